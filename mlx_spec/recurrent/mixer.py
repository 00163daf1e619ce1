"""The layers that keep recurrent state, found by watching who reads it, and run again without weights.

Knows no model by name: a mixer is any module whose own code reads a state.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList

from ..hidden import Heard, View
from .state import OpenState

LINEAR = (nn.Linear, nn.QuantizedLinear)


class Told(View):
    """A linear layer that has run already, and gives the same results again."""

    def __init__(self, module: nn.Module, results: Iterator[mx.array]):
        super().__init__(module, _results=results)

    def __call__(self, x: mx.array) -> mx.array:
        return next(self._results)


class Silent:
    """In place of keys and values that a mixer also has: nothing is kept."""

    def __init__(self, offset: Any):
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


@dataclass(frozen=True)
class Call:
    """A mixer's run over the rows of a pass. products: what its linear layers gave, in order."""

    mixer: nn.Module
    arguments: dict[str, Any]
    products: dict[str, list[mx.array]]
    rows: int

    def masked(self, cache: OpenState) -> None:
        """Run again on `cache`, which has the number of rows that stand as its `lengths`."""
        if "mask" not in self.arguments:
            raise ValueError(f"{type(self.mixer).__name__} takes no mask")
        self._run(cache, lambda a: a, self.arguments | {"mask": cache.make_mask(self.rows)})

    def row(self, row: int, cache: OpenState) -> None:
        """Run again on one row alone. An offset among the arguments is the first row's position."""
        def cut(a: Any) -> Any:
            rows = isinstance(a, mx.array) and a.ndim > 1 and a.shape[1] == self.rows
            return a[:, row : row + 1] if rows else a

        arguments = {name: cut(a) for name, a in self.arguments.items()}
        given = {"mask": None, "offset": arguments.get("offset", 0) + row}
        self._run(cache, cut, arguments | {name: a for name, a in given.items() if name in arguments}, row)

    def _run(self, cache: OpenState, cut: Callable, arguments: dict[str, Any], row: int = 0) -> None:
        told = {name: Told(getattr(self.mixer, name), map(cut, found)) for name, found in self.products.items()}
        View(self.mixer, **told)(**{name: _swapped(a, cache, row) for name, a in arguments.items()})


def _swapped(argument: Any, cache: OpenState, row: int) -> Any:
    """The argument, with another cache where it is one, or holds one among several."""
    if isinstance(argument, OpenState):
        return cache
    if _state_in(argument) is None:
        return argument
    return [cache if isinstance(c, OpenState) else Silent(c.offset + row) for c in argument]


def _state_in(argument: Any) -> OpenState | None:
    caches = argument if isinstance(argument, list) else [argument]
    return next((c for c in caches if isinstance(c, OpenState)), None)


class Mixer:
    """A mixer's stand-in for rounds: runs it and leaves with the state what it takes to run it again."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.signature = inspect.signature(type(module).__call__)
        # With an adapter a linear layer is one inside another.
        self.linear = [name for name, child in module.children().items() if isinstance(getattr(child, "linear", child), LINEAR)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        _, *named = bound.arguments.items()
        arguments, products = dict(named), {}
        cache = next(filter(None, map(_state_in, arguments.values())))
        rows = next(a.shape[1] for a in arguments.values() if isinstance(a, mx.array) and a.ndim > 1)

        def hear(name: str) -> Callable:
            def keep(out: mx.array) -> mx.array:
                if out.ndim == 3 and out.shape[1] == rows:
                    products.setdefault(name, []).append(out)
                return out
            return keep

        heard = {name: Heard(getattr(self.module, name), hear(name)) for name in self.linear}
        out = View(self.module, **heard)(*args, **kwargs)
        cache.calls.append(Call(self.module, arguments, products, rows))
        return out


def mixers(model: nn.Module, caches: list[Any]) -> list[Any]:
    """What reads the states while the model runs: modules, or None for code that is no module's."""
    found: dict[int, Any] = {}

    class Watched(ArraysCache):
        def __getitem__(self, index: int) -> Any:
            reader = sys._getframe(1).f_locals.get("self")
            found[id(reader)] = reader
            return super().__getitem__(index)

    for cache in caches:
        for c in cache.caches if isinstance(cache, CacheList) else (cache,):
            if isinstance(c, ArraysCache):
                c.__class__ = Watched
    model(mx.zeros((1, 2), mx.uint32), cache=caches)
    return list(found.values())


def stood_in(module: Any, stand_ins: dict[int, Mixer]) -> Any:
    """A module whose code finds stand-ins, by id, for some of the modules below it."""
    if id(module) in stand_ins or not isinstance(module, nn.Module):
        return stand_ins.get(id(module), module)
    below, changed = dict(is_leaf=nn.Module.is_module), {}
    for name, child in module.children().items():
        new = tree_map(lambda m: stood_in(m, stand_ins), child, **below)
        if any(isinstance(m, (View, Mixer)) for _, m in tree_flatten(new, **below)):
            changed[name] = new
    return View(module, **changed) if changed else module


def for_rounds(model: nn.Module, caches: list[Any]) -> Any:
    """The model as rounds run it, with a stand-in for each mixer. Raises ValueError."""
    found = mixers(model, caches)
    known = {id(m) for m in model.modules()}
    if not all(id(m) in known for m in found):
        raise ValueError("its recurrent states are read by code that is not a layer's own")
    return stood_in(model, {id(m): Mixer(m) for m in found})
