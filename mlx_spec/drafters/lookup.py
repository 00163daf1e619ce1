"""Prompt lookup: where the newest tokens occurred before, what followed them then is proposed.

No model and no memory: right where a reply copies, as in edits, summaries and code (Saxena, 2023,
"Prompt Lookup Decoding"). `propose` is the graph; `Seen` is what the host knows of it, so that a
round without a match need not be tried.
"""

from __future__ import annotations

from typing import Iterable

import mlx.core as mx

from ..shapes import Integer

LONGEST, SHORTEST = 4, 2  # tokens that have to match: one alone says nothing
FARTHEST = 16  # as far back as the host looks at a match


def propose(
    history: Integer[mx.array, "batch capacity"], length: Integer[mx.array, "batch"], k: int
) -> Integer[mx.array, "batch k"]:
    """What followed the most recent of the longest earlier matches; a match that reaches the newest
    token goes round. Without one, whatever the history begins with."""
    places, size = mx.arange(history.shape[1]), history.shape[1]
    same, run = mx.array(True), mx.array(0)
    for back in range(LONGEST):
        token = mx.take_along_axis(history, mx.maximum(length[:, None] - 1 - back, 0), axis=1)
        equal = mx.pad(history == token, ((0, 0), (back, 0)))[:, :size]  # False before the first token
        same = same & equal
        run = run + same
    matches = (run >= SHORTEST) & (places < length[:, None] - 1)
    at = mx.argmax(mx.where(matches, run * size + places, -1), axis=1, keepdims=True).astype(mx.int32)
    period = mx.maximum(length[:, None] - 1 - at, 1)
    return mx.take_along_axis(history, at + 1 + mx.arange(k) % period, axis=1)


class Seen:
    """Where each short run of the tokens that the host knows last ended."""

    def __init__(self, ids: Iterable[int]):
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._earlier: int | None = None
        self.add(ids)

    def add(self, ids: Iterable[int]) -> None:
        for i in ids:
            self._ids.append(i)
            self._earlier = None
            for n in range(min(LONGEST, len(self._ids)), SHORTEST - 1, -1):
                run = tuple(self._ids[-n:])
                if self._earlier is None:
                    self._earlier = self._ends.get(run)
                self._ends[run] = len(self._ids) - 1

    def continuation(self, k: int) -> list[int]:
        """What `propose` gives, none without a match."""
        at, end = self._earlier, len(self._ids)
        return [] if at is None else [self._ids[at + 1 + i % (end - 1 - at)] for i in range(k)]

    def matched(self) -> int:
        """How many of the newest tokens occurred before where `propose` looks, 16 at most; 0: no match."""
        at, ids, n = self._earlier, self._ids, 0
        while at is not None and n < FARTHEST and n <= at and ids[at - n] == ids[-1 - n]:
            n += 1
        return n
