"""Greedy replies against mlx-lm's plain decoding: the same tokens, a tie that rounding decides, or a fault."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import mlx_spec  # noqa: F401  before mlx.core: it puts a fast BLAS in place

import mlx.core as mx
from arms import filled

TIE = {"float32": 1e-3, "bfloat16": 0.5}  # gaps between the two best logits that rounding can flip


class Reply(NamedTuple):
    """who: ours or theirs. difference: as found below; None: the same tokens."""

    name: str
    prompt: int
    who: str
    difference: dict[str, float] | None


def difference(model: Any, ids: list[int], wanted: list[int], got: list[int]) -> dict[str, float] | None:
    """Where two greedy replies part, and how far apart the two best logits are there."""
    if wanted == got:
        return None
    at = next(i for i, (a, b) in enumerate(zip(wanted, got)) if a != b)
    prefix = ids + wanted[:at]
    logits = model(mx.array([prefix[-1:]]), cache=filled(model, prefix[:-1]))[0, -1].astype(mx.float32)
    low, high = mx.sort(mx.topk(logits, 2)).tolist()
    return {"at": at, "gap": high - low}


def kind(reply: Reply, dtype: str) -> str:
    if reply.difference is None:
        return "same"
    if reply.difference["gap"] <= TIE[dtype]:
        return "tie"
    return "BUG" if reply.who == "ours" else "other"


def report_identity(replies: Sequence[Reply], dtype: str) -> None:
    for who, title in (("ours", "ours"), ("theirs", "mlx-lm speculative")):
        mine = [r for r in replies if r.who == who]
        if not mine:
            continue
        same = sum(r.difference is None for r in mine)
        print(f"greedy, {title}: {same} of {len(mine)} replies equal mlx-lm's plain decoding")
        for r in mine:
            if r.difference is not None:
                print(f"  {kind(r, dtype)}: {r.name}, prompt {r.prompt}, token {r.difference['at']}: "
                      f"the two best logits differ by {r.difference['gap']:.2g}")
    print()
