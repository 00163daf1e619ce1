"""What a reply leaves for a later turn, and how much of it a new prompt can build on.

Caches go back to mlx-lm's kinds between turns. They are cut to the longest common beginning; where
one of them can't be cut that far (a window has moved on), nothing of that model is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mlx_lm.models.cache import can_trim_prompt_cache


class Memory(NamedTuple):
    """mlx-lm's caches and the tokens that are in them. Of use to the same models only: other
    weights, or another adapter, would have written other keys.

    draft: caches; for a drafter on hidden states (caches, the target's last states).
    """

    pair: Any
    ids: list[int]
    target: list[Any]
    draft: Any
    draft_length: int


def recall(memory: Memory | None, pair: Any, ids: Sequence[int], drafting: bool = True) -> Memory | None:
    """The memory as far as it holds for this pair and prompt; None where it is of no use. Spends
    the one given. At least one token of the prompt is left to read. drafting: whether the pair's
    draft will be used."""
    if memory is None or memory.pair.target is not pair.target:
        return None
    common = _common(memory.ids, ids[:-1])
    if not common or not _cut(memory.target, len(memory.ids) - common):
        return None
    draft, length = _draft(memory, pair, common)
    if drafting and not draft and hasattr(pair.draft, "bind"):
        return None  # what reads the target's states needs them from the start
    return Memory(pair, list(ids[:common]), memory.target, draft, length)


def _draft(memory: Memory, pair: Any, common: int) -> tuple[Any, int]:
    """The draft's part, if it is of the same draft and can be cut; otherwise it reads anew."""
    if memory.pair.draft is not pair.draft or not memory.draft:
        return [], 0
    length, drop = min(memory.draft_length, common), max(memory.draft_length - common, 0)
    if not hasattr(pair.draft, "bind"):
        return (memory.draft, length) if _cut(memory.draft, drop) else ([], 0)
    caches, last = memory.draft
    return ((caches, None if drop else last), length) if _cut(caches, drop) else ([], 0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _cut(caches: list[Any], drop: int) -> bool:
    """Take the newest `drop` tokens out of every cache, or none out of any."""
    if drop and not can_trim_prompt_cache(caches):
        return False
    # Each layer is asked: mlx-lm's own function answers for the first one only.
    return drop == 0 or all([c.trim(drop) == drop for c in caches])
