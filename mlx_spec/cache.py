"""Keys and values that live on the device, so that rolling back is a subtraction in the graph.

How many drafted tokens were kept is data, so a cache here is written at an `mx.array` offset into
buffers made beforehand. Two sizes: the *capacity* is what is written into, the *bound* is the part
that attention reads; what is read past the newest position is masked, and overwritten later.

A cache has two lives. Between rounds it is a `Layer`, a static description, and a tuple of arrays.
In a graph it is opened: `Layer.open` gives an object that speaks mlx-lm's protocol (`offset`,
`update_and_fetch`, `keys_and_values`, `make_mask`) and collects the new arrays. MLX does not check
array offsets, so the engine asserts the capacity before every submission.

Knows nothing of rounds, drafts or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, Sequence

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from .shapes import Bool, Integer

Arrays = tuple[mx.array, ...]

STEP = 256


def round_up(n: int, step: int = STEP) -> int:
    return -(-n // step) * step


def rung(n: int) -> int:
    """The capacity for n positions: a short geometric ladder, so that requests of many lengths
    share few shapes, each of which is traced once."""
    capacity = 2 * STEP
    while capacity < n:
        capacity = round_up(capacity + capacity // 2)
    return capacity


def read_bound(n: int) -> int:
    """How far attention reads for n positions: at most an eighth too far, in steps of 256."""
    return round_up(n, max(STEP, round_up(n // 8)))


class Cursor:
    """Where the next token is written; one for all layers of a model."""

    def __init__(self, offset: Integer[mx.array, ""], bound: int):
        self.offset = offset
        self.bound = bound

    def advance(self, rows: int) -> None:
        self.offset = self.offset + rows

    def positions(self, rows: int) -> Integer[mx.array, "rows"]:
        return self.offset + mx.arange(rows)


class OpenCache:
    """One layer's cache inside a graph, as mlx-lm's attention wants to see it."""

    batched = False  # whether masks have four axes, as in mlx-lm's batches

    def __init__(self, layer: Layer, arrays: Arrays, cursor: Cursor):
        self.layer = layer
        self.arrays = arrays
        self.cursor = cursor

    @property
    def offset(self) -> Integer[mx.array, ""]:
        return self.cursor.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        self.arrays = self.layer.write(self.arrays, self.cursor, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple:
        return self.layer.read(self.arrays, self.cursor)

    @property
    def keys(self) -> mx.array:
        """What models of mlx-lm's name, and assign, to order its lazy graph; here an assignment is
        nothing, for arrays leave a graph through `close`."""
        return self.arrays[0]

    @property
    def values(self) -> mx.array:
        return self.arrays[-1]

    @keys.setter
    def keys(self, new: mx.array) -> None: ...

    @values.setter
    def values(self, new: mx.array) -> None: ...

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> Bool[mx.array, "rows bound"]:
        """Always an array: the buffers hold more than what may be seen."""
        mask = self.layer.mask(self.arrays, self.cursor, N, window_size)
        return mask[None, None] if self.batched else mask

    def __getattr__(self, name: str) -> Any:
        # mlx-lm tells a quantised cache by its having `bits`.
        if name in ("bits", "group_size") and isinstance(self.layer, Quantized):
            return getattr(self.layer, name)
        raise AttributeError(name)


@dataclass(frozen=True)
class Layer:
    """What one layer's cache is: static, hashable, and the same for every request of its kind.

    heads, key_dim, value_dim and dtype are learnt from the model, so that buffers can be made
    before the first token.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    def open(self, arrays: Arrays, cursor: Cursor) -> OpenCache:
        return OpenCache(self, arrays, cursor)

    def close(self, cache: OpenCache, rows: Integer[mx.array, ""] | None = None) -> Arrays:
        """What is left of a pass; rows: how many of its rows stand. The others lie past the length."""
        return cache.arrays

    def choose(self, states: list[Arrays], index: Integer[mx.array, ""]) -> Arrays:
        """One of the layer's arrays after each of several steps: the last serve every length."""
        return states[-1]

    def buffers(self, capacity: int, batch: int = 1) -> Arrays:
        """Empty buffers that hold `capacity` positions."""
        slots = self.slots(capacity)
        return tuple(mx.zeros((batch, self.heads, slots, dim), self.dtype) for dim in (self.key_dim, self.value_dim))

    def slots(self, capacity: int) -> int:
        return capacity

    def grow(self, arrays: Arrays, capacity: int) -> Arrays:
        have = arrays[0].shape[2]
        wanted = self.slots(capacity)
        if wanted <= have:
            return arrays
        return tuple(
            mx.concatenate([a, mx.zeros((*a.shape[:2], wanted - have, a.shape[3]), a.dtype)], axis=2)
            for a in arrays
        )

    def write(self, arrays: Arrays, cursor: Cursor, keys: mx.array, values: mx.array) -> Arrays:
        start = cursor.offset.reshape(1)
        new = self.pack(keys) + self.pack(values)
        return tuple(mx.slice_update(a, n.astype(a.dtype), start, (2,)) for a, n in zip(arrays, new))

    def pack(self, x: mx.array) -> Arrays:
        return (x,)

    def read(self, arrays: Arrays, cursor: Cursor) -> tuple:
        return tuple(a[:, :, : cursor.bound] for a in arrays)

    def mask(self, arrays: Arrays, cursor: Cursor, rows: int, window: int | None) -> mx.array:
        seen = mx.arange(min(cursor.bound, arrays[0].shape[2]))
        own = cursor.positions(rows)[:, None]
        mask = seen <= own
        return mask if window is None else mask & (seen > own - window)


@dataclass(frozen=True)
class Full(Layer):
    """Every position has a slot of its own."""

    @classmethod
    def like(cls, cache: KVCache, slack: int = 0) -> Full:
        return cls(cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3], cache.keys.dtype)

    def adopt(self, cache: KVCache, capacity: int) -> Arrays:
        """Take over the buffers that mlx-lm's prefill filled; the cache is left empty."""
        arrays = (cache.keys, cache.values)
        cache.keys = cache.values = None
        return self.grow(arrays, capacity)

    def hand_back(self, arrays: Arrays, length: int) -> KVCache:
        """The first `length` positions as mlx-lm's cache, for the prefill of a later turn."""
        cache = KVCache()
        cache.keys, cache.values = arrays
        cache.offset = length
        return cache


@dataclass(frozen=True)
class Quantized(Layer):
    """Every position has a slot; keys and values are packed in groups, as mlx-lm packs them."""

    bits: int = 8
    group_size: int = 64

    def buffers(self, capacity: int, batch: int = 1) -> Arrays:
        dense = super().buffers(capacity, batch)
        return self.convert(dense)

    def pack(self, x: mx.array) -> Arrays:
        return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def read(self, arrays: Arrays, cursor: Cursor) -> tuple:
        part = super().read(arrays, cursor)
        return part[:3], part[3:]

    @classmethod
    def like(cls, layer: Full, bits: int, group_size: int) -> Quantized:
        return cls(layer.heads, layer.key_dim, layer.value_dim, layer.dtype, bits, group_size)

    def adopt(self, cache: QuantizedKVCache, capacity: int) -> Arrays:
        arrays = (*cache.keys, *cache.values)
        cache.keys = cache.values = None
        return self.grow(arrays, capacity)

    def convert(self, dense: Arrays) -> Arrays:
        """Quantise what a full cache holds, when a reply reaches `quantized_kv_start`."""
        return tuple(a for d in dense for a in self.pack(d))

    def hand_back(self, arrays: Arrays, length: int) -> QuantizedKVCache:
        cache = QuantizedKVCache(group_size=self.group_size, bits=self.bits)
        cache.keys, cache.values = list(arrays[:3]), list(arrays[3:])
        cache.offset = length
        return cache


@dataclass(frozen=True)
class Several:
    """A layer that keeps several caches, told apart by index; its arrays are a tuple for each."""

    parts: tuple[Any, ...]

    @property
    def dtype(self) -> mx.Dtype:
        return self.parts[0].dtype

    def open(self, arrays: tuple[Arrays, ...], cursor: Cursor) -> list[Any]:
        caches = [part.open(a, cursor) for part, a in zip(self.parts, arrays, strict=True)]
        for cache in caches:
            cache.batched = True  # an indexer takes from the mask as it takes from the keys
        return caches

    def close(self, caches: list[Any], rows: Integer[mx.array, ""] | None = None) -> tuple[Arrays, ...]:
        return tuple(part.close(c, rows) for part, c in zip(self.parts, caches))

    def choose(self, states: list[tuple[Arrays, ...]], index: Integer[mx.array, ""]) -> tuple[Arrays, ...]:
        return tuple(part.choose(list(made), index) for part, made in zip(self.parts, zip(*states)))

    def buffers(self, capacity: int, batch: int = 1) -> tuple[Arrays, ...]:
        return tuple(part.buffers(capacity, batch) for part in self.parts)

    def grow(self, arrays: tuple[Arrays, ...], capacity: int) -> tuple[Arrays, ...]:
        return tuple(part.grow(a, capacity) for part, a in zip(self.parts, arrays))

    def adopt(self, cache: CacheList, capacity: int) -> tuple[Arrays, ...]:
        return tuple(part.adopt(c, capacity) for part, c in zip(self.parts, cache.caches))

    def hand_back(self, arrays: tuple[Arrays, ...], length: int) -> CacheList:
        return CacheList(*(part.hand_back(a, length) for part, a in zip(self.parts, arrays)))


def flat(layers: Iterable[Any]) -> Iterator[Any]:
    """The layers, with the parts of those that hold several."""
    for layer in layers:
        yield from flat(layer.parts) if isinstance(layer, Several) else (layer,)


def changed(layer: Any, kind: type, **facts: Any) -> Any:
    """The layer with other facts, where it or a part of it is of a kind."""
    if isinstance(layer, Several):
        return Several(tuple(changed(part, kind, **facts) for part in layer.parts))
    return replace(layer, **facts) if isinstance(layer, kind) else layer


class Native:
    """A cache of mlx-lm's that can't live on the device: it moves forward only, so it serves
    plain decoding, where the length is known to the host."""

    def __init__(self, cache: Any):
        self.cache = cache

    def open(self, arrays: Arrays, cursor: Cursor) -> Any:
        return self.cache

    def close(self, cache: Any, rows: mx.array | None = None) -> Arrays:
        return ()

    def grow(self, arrays: Arrays, capacity: int) -> Arrays:
        return arrays

    def adopt(self, cache: Any, capacity: int) -> Arrays:
        return ()


class Pass:
    """A model with its caches open in one graph: rows in, what the model makes of them out, arrays
    at the end."""

    def __init__(self, model: Callable, layers: Sequence[Layer], state: Sequence[Arrays], cursor: Cursor):
        self.model = model
        self.layers = layers
        self.cursor = cursor
        self.caches = [layer.open(arrays, cursor) for layer, arrays in zip(layers, state, strict=True)]

    def __call__(self, tokens: Integer[mx.array, "batch rows"], *more: Any) -> Any:
        out = self.model(tokens, *more, cache=self.caches)
        self.cursor.advance(tokens.shape[1])
        return out

    @property
    def state(self) -> list[Arrays]:
        return [layer.close(cache) for layer, cache in zip(self.layers, self.caches)]

    def kept(self, rows: Integer[mx.array, ""]) -> list[Arrays]:
        """The state when only the first `rows` rows stand, at least one."""
        return [layer.close(cache, rows) for layer, cache in zip(self.layers, self.caches)]


def adopt(layers: Sequence[Layer], caches: list[Any], capacity: int) -> list[Arrays]:
    """Make a prefill's caches device-resident, layer by layer, so that the peak is one layer's
    copy; caches that hold nothing yet become empty buffers."""
    state = []
    for layer, cache in zip(layers, caches, strict=True):
        arrays = layer.buffers(capacity) if not isinstance(layer, Native) and cache.empty() else layer.adopt(cache, capacity)
        mx.eval(arrays)
        state.append(arrays)
    return state


def grow(layers: Sequence[Layer], state: list[Arrays], capacity: int) -> None:
    """Larger buffers in place of the old ones, layer by layer, as above."""
    for i, layer in enumerate(layers):
        state[i] = layer.grow(state[i], capacity)
        mx.eval(state[i])


def convert(layers: Sequence[Layer], state: list[Arrays]) -> None:
    """Quantised buffers in place of full ones, layer by layer, as above."""
    for i, layer in enumerate(layers):
        if isinstance(layer, Quantized):
            state[i] = layer.convert(state[i])
            mx.eval(state[i])
