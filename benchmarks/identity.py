"""How many replies equal mlx-lm's plain decoding, as the library's `identity.compare` judges them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple, Sequence

from mlx_spec.identity import compare


class Reply(NamedTuple):
    """who: ours or theirs. difference: as found below; None: the same tokens."""

    name: str
    prompt: int
    who: str
    difference: dict[str, Any] | None


def difference(pair: Any, ids: list[int], wanted: list[int], got: list[int]) -> dict[str, Any] | None:
    """Where two greedy replies part, how far apart the two best logits are there, and whether that is a tie."""
    verdict = compare(pair, ids, wanted, got)
    return None if verdict.kind == "identical" else asdict(verdict)


def is_bug(reply: Reply) -> bool:
    return reply.who == "ours" and reply.difference is not None and reply.difference["kind"] == "BUG"


def report_identity(replies: Sequence[Reply]) -> None:
    for who, title in (("ours", "ours"), ("theirs", "mlx-lm speculative")):
        mine = [r for r in replies if r.who == who]
        if not mine:
            continue
        same = sum(r.difference is None for r in mine)
        print(f"greedy, {title}: {same} of {len(mine)} replies equal mlx-lm's plain decoding")
        for r in mine:
            if r.difference is not None:
                kind = "BUG" if is_bug(r) else "tie" if r.difference["kind"] == "tie" else "other"
                print(f"  {kind}: {r.name}, prompt {r.prompt}, token {r.difference['at']}: "
                      f"the two best logits differ by {r.difference['gap']:.2g}")
    print()
