"""Recurrent and convolution states, which a length can't cut: the state after fewer rows is made anew.

A pass over several rows leaves the state after the last of them. How many stand is data, so the
state is made in the same graph, from what the mixers' linear layers gave in the pass: the weights
are read once. mlx-lm's own code does it, in one of two ways.

masked   the mixer runs again over all rows, those that fell masked, as mlx-lm masks a batch's padding
by rows  row after row, each state chosen or not: for a mixer that knows no such mask
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..cache import Arrays, Cursor
from ..shapes import Integer

if TYPE_CHECKING:
    from .mixer import Call


class OpenState(ArraysCache):
    """One layer's state inside a graph, as mlx-lm's mixers want to see it; calls: their runs on it."""

    def __init__(self, size: int, arrays: Arrays):
        super().__init__(size)
        self.cache = list(arrays) or [None] * size
        self.before = arrays
        self.calls: list[Call] = []


@dataclass(frozen=True)
class Recurrent:
    """What one layer's state is: `size` arrays of any shape; none at all before the first token,
    which some models treat unlike zeros. dtype: the model's."""

    size: int
    dtype: mx.Dtype
    masked: bool = True

    def open(self, arrays: Arrays, cursor: Cursor) -> OpenState:
        return OpenState(self.size, arrays)

    def close(self, cache: OpenState, rows: Integer[mx.array, ""] | None = None) -> Arrays:
        """The state after the first `rows` rows of the pass, at least one; after all when None."""
        assert rows is None or cache.calls, "the model was not run through its stand-ins"
        if rows is None or cache.calls[0].rows == 1:
            return tuple(cache.cache)
        return self._masked(cache, rows) if self.masked else self._by_rows(cache, rows)

    def _masked(self, cache: OpenState, rows: mx.array) -> Arrays:
        again = OpenState(self.size, cache.before)
        again.lengths = rows.reshape(1)
        for call in cache.calls:
            call.masked(again)
        return tuple(again.cache)

    def _by_rows(self, cache: OpenState, rows: mx.array) -> Arrays:
        again, states = OpenState(self.size, cache.before), []
        for row in range(cache.calls[0].rows):
            for call in cache.calls:
                call.row(row, again)
            states.append(tuple(again.cache))
        return self.choose(states, rows - 1)

    def choose(self, states: list[Arrays], index: Integer[mx.array, ""]) -> Arrays:
        """One of several states of the layer, later ones last."""
        chosen = states[0]
        for i, state in enumerate(states[1:], 1):
            chosen = tuple(mx.where(index >= i, new, _filled(old, new.shape)) for new, old in zip(state, chosen))
        return chosen

    def buffers(self, capacity: int, batch: int = 1) -> Arrays:
        return ()

    def grow(self, arrays: Arrays, capacity: int) -> Arrays:
        return arrays

    def adopt(self, cache: ArraysCache, capacity: int) -> Arrays:
        return tuple(cache.cache)

    def hand_back(self, arrays: Arrays, length: int) -> ArraysCache:
        """As mlx-lm's cache. The arrays must be the state after `length` tokens."""
        cache = ArraysCache(self.size)
        cache.cache = list(arrays) or [None] * self.size
        return cache


def _filled(window: mx.array, shape: tuple[int, ...]) -> mx.array:
    """A window that a short text has not filled yet (LongCat's n-grams), with zeros for what is missing."""
    return mx.pad(window, [(wanted - have, 0) for wanted, have in zip(shape, window.shape)])
