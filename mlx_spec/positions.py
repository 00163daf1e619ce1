"""Positions that a model counts in Python, where only the device knows how long the text is.

Some of mlx-lm's models make positions with `arange` between two integers, or count the keys that
they are handed. While such a model runs in a graph, `mx`, `np` and the attention function are
others in its own modules; the model's code is mlx-lm's, and nothing else sees the difference.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from .cache import Cursor, OpenCache
from .shapes import Integer


class Counted:
    """A model, or what stands for it, that counts in Python, as a Pass calls it."""

    def __init__(self, model: Callable, code: nn.Module):
        self.model, self.modules = model, _modules(code)

    def __call__(self, tokens: Integer[mx.array, "batch rows"], *more: Any, cache: list[Any]) -> Any:
        with _counting(self.modules, _cursor(cache[0]), tokens.shape[1]):
            return self.model(tokens, *more, cache=[_Lender(c) if type(c) is OpenCache else c for c in cache])


def _modules(code: nn.Module) -> list[ModuleType]:
    names = {type(m).__module__ for m in code.modules()}
    return [sys.modules[n] for n in sorted(names) if n in sys.modules and not n.startswith("mlx.")]


def _cursor(cache: Any) -> Cursor:
    return cache.cursor if isinstance(cache, OpenCache) else _cursor(cache[0])


@contextmanager
def _counting(modules: list[ModuleType], cursor: Cursor, rows: int) -> Iterator[None]:
    stand_ins: list[tuple[Any, Any]] = [(m, _with_arange(m, cursor, rows)) for m in (mx, np)]
    stand_ins.append((scaled_dot_product_attention, _attention))
    changed = [(m, name, old) for m in modules for name, old in vars(m).items()
               if any(old is known for known, _ in stand_ins)]
    try:
        for m, name, old in changed:
            setattr(m, name, next(new for known, new in stand_ins if known is old))
        yield
    finally:
        for m, name, old in changed:
            setattr(m, name, old)


def _with_arange(module: ModuleType, cursor: Cursor, rows: int) -> SimpleNamespace:
    def arange(start: Any, stop: Any = None, *more: Any, **options: Any) -> Any:
        if callable(start):
            return start(stop)
        if isinstance(start, mx.array):
            return start + mx.arange(rows)
        if isinstance(stop, mx.array):
            return mx.arange(cursor.bound)
        if stop is not None and (start, stop) == (cursor.bound - rows, cursor.bound):
            return cursor.positions(rows)  # the last of the keys there are, it means
        bounds = (start,) if stop is None else (start, stop)
        return module.arange(*bounds, *more, **options)

    return SimpleNamespace(**vars(module) | {"arange": arange})


class _Lender:
    """A cache whose keys later layers may ask for."""

    def __init__(self, cache: OpenCache):
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        self.rows = keys.shape[2]
        return self.cache.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple:
        end = self.cache.offset + self.rows
        return tuple(_Lent(x, end) for x in self.cache.keys_and_values())


class _Lent:
    """Keys or values whose number is the text's, not the buffer's."""

    def __init__(self, array: mx.array, length: Integer[mx.array, ""]):
        self.array = array
        self.shape = (*array.shape[:2], length, array.shape[3])


def _attention(queries: mx.array, keys: Any, values: Any, *more: Any, **options: Any) -> mx.array:
    keys, values = (x.array if isinstance(x, _Lent) else x for x in (keys, values))
    return scaled_dot_product_attention(queries, keys, values, *more, **options)
