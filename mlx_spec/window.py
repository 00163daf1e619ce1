"""Caches that look back only so far: a sliding window as a ring of slots, and chunks, which begin anew.

A ring is wider than its window, so that what is rejected never covers what can still be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from .cache import Arrays, Cursor, Full, Layer, OpenCache
from .shapes import Integer


@dataclass(frozen=True)
class Ring(Layer):
    """A sliding window: position p lives in slot p mod `ring`, after the `keep` that never move.

    The ring is wider than the window by `slack`, so that drafts that were rejected, and a round
    still in flight when a reply ends, never cover a position that can still be seen.
    """

    window: int = 0
    slack: int = 0
    keep: int = 0

    @property
    def ring(self) -> int:
        return self.window - self.keep + self.slack

    def slots(self, capacity: int) -> int:
        return min(capacity, self.keep + self.ring)

    def write(self, arrays: Arrays, cursor: Cursor, keys: mx.array, values: mx.array) -> Arrays:
        positions = cursor.positions(keys.shape[2])
        turning = self.keep + (positions - self.keep) % self.ring
        slots = turning if not self.keep else mx.where(positions < self.keep, positions, turning)
        slots = slots[:, None]
        return tuple(
            mx.put_along_axis(a, mx.broadcast_to(slots, new.shape), new.astype(a.dtype), axis=2)
            for a, new in zip(arrays, (keys, values))
        )

    def mask(self, arrays: Arrays, cursor: Cursor, rows: int, window: int | None) -> mx.array:
        slots = mx.arange(min(cursor.bound, arrays[0].shape[2]))
        own = cursor.positions(rows)[:, None]
        seen = self.held(slots, cursor.offset + rows)
        if self.keep:
            seen = mx.where(slots < self.keep, slots, mx.where(seen < self.keep, -1, seen))
        width = min(window or self.window, self.window) - self.keep
        near = (seen > own - width) | (slots < self.keep)
        return (seen >= 0) & (seen <= own) & near

    def held(self, slots: mx.array, end: mx.array) -> mx.array:
        """The position in a slot once `end` are written, below 0 in an unused one. It is arithmetic:
        last - ((last - slot) mod ring)."""
        return end - 1 - (end - 1 - slots) % self.ring

    @classmethod
    def like(cls, cache: RotatingKVCache, slack: int) -> Ring:
        dense = Full.like(cache)
        return cls(dense.heads, dense.key_dim, dense.value_dim, dense.dtype, cache.max_size, slack, cache.keep)

    def adopt(self, cache: RotatingKVCache, capacity: int) -> Arrays:
        return self.place(cache, [cache._temporal_order(a) for a in (cache.keys, cache.values)], capacity)

    def place(self, cache: Any, ordered: Sequence[mx.array], capacity: int) -> Arrays:
        """Take over keys and values in temporal order; the cache is left empty."""
        length = cache.offset
        cache.keys = cache.values = None
        return tuple(self._place(a, b, length) for a, b in zip(self.buffers(capacity), ordered))

    def _place(self, buffer: mx.array, ordered: mx.array, length: int) -> mx.array:
        """Put the newest positions of a window in temporal order into their slots."""
        kept = min(self.keep, length)
        recent = min(ordered.shape[2] - kept, self.window - self.keep)
        start = length - recent
        positions = [*range(kept), *range(start, length)]
        source = [*range(kept), *range(ordered.shape[2] - recent, ordered.shape[2])]
        slots = [self._slot(p) for p in positions]
        buffer[:, :, mx.array(slots)] = ordered[:, :, mx.array(source)]
        return buffer

    def _slot(self, position: int) -> int:
        return position if position < self.keep else self.keep + (position - self.keep) % self.ring

    def hand_back(self, arrays: Arrays, length: int) -> RotatingKVCache:
        cache = RotatingKVCache(self.window, keep=self.keep)
        cache.keys, cache.values = self.newest(arrays, length)
        cache.offset = length
        cache._idx = cache.keys.shape[2]
        return cache

    def newest(self, arrays: Arrays, length: int) -> list[mx.array]:
        """What a window over `length` positions sees, in temporal order."""
        kept = min(self.keep, length)
        start = max(kept, length - (self.window - self.keep))
        slots = mx.array([self._slot(p) for p in (*range(kept), *range(start, length))])
        return [a[:, :, slots] for a in arrays]


class OpenChunk(OpenCache):
    """As Llama 4 wants it: it masks by the positions of the keys that it is handed."""

    def maybe_trim_front(self) -> None:
        """Nothing: a ring writes over what no chunk can see."""

    def start_position(self, end: Integer[mx.array, ""]) -> Integer[mx.array, "slots"]:
        """In place of the first position, all of them, once `end` are written (see `positions.py`)."""
        return self.layer.held(mx.arange(min(self.cursor.bound, self.arrays[0].shape[2])), end)


@dataclass(frozen=True)
class Chunked(Ring):
    """Attention within chunks: a ring that holds the newest chunk; the model masks the rest."""

    def open(self, arrays: Arrays, cursor: Cursor) -> OpenChunk:
        return OpenChunk(self, arrays, cursor)

    @classmethod
    def like(cls, cache: ChunkedKVCache, slack: int) -> Chunked:
        dense = Full.like(cache)
        return cls(dense.heads, dense.key_dim, dense.value_dim, dense.dtype, cache.chunk_size, slack)

    def adopt(self, cache: ChunkedKVCache, capacity: int) -> Arrays:
        return self.place(cache, cache.keys_and_values(), capacity)

    def hand_back(self, arrays: Arrays, length: int) -> ChunkedKVCache:
        cache = ChunkedKVCache(self.window)
        cache.keys, cache.values = self.newest(arrays, length)
        cache.offset, cache.start_position = length, length - cache.keys.shape[2]
        return cache
