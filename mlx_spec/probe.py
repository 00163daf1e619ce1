"""What a model's caches are, and whether it can be verified in rows: learnt by running it.

No list of names: the model is run with mlx-lm's caches to see what they hold, then k + 1 rows in
one pass through device-resident caches are compared with the same rows one at a time. A model
that looks at an offset from Python, or whose rows or rewound states differ, is found here, at load,
and decodes plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from .cache import Cursor, Full, Layer, Pass, Quantized, Several, adopt, changed, flat, rung
from .window import Chunked, Ring
from .errors import first_line
from .hidden import why_hidden
from .positions import Counted
from .recurrent.mixer import for_rounds
from .recurrent.state import Recurrent

KINDS: dict[type, Any] = {KVCache: Full, RotatingKVCache: Ring, ChunkedKVCache: Chunked}
KEEP = 4  # tokens that a bounded cache never drops, as in mlx-lm
ROWS = 4
# Largest relative distance between the two ways of computing the same rows. Float32 differs by
# rounding only; in half precision a mixture of experts may route a near tie differently.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 1e-3, 0.25


@dataclass(frozen=True)
class Profile:
    """A model's caches, one Layer each; or, in `reason`, why it can only decode plainly.

    model: what rounds run: the model itself, or one with stand-ins where it keeps recurrent state.
    hidden_reason: why its hidden states can't be read, None where they can. counts: whether its code
    counts positions in Python.
    """

    model: Any = None
    layers: tuple[Layer, ...] = ()
    head_rows: int = 0
    reason: str | None = None
    hidden_reason: str | None = None
    counts: bool = False

    def runs(self, view: Callable | None = None) -> Callable:
        """What a Pass calls, for the model or for a view of it."""
        view = self.model if view is None else view
        return Counted(view, self.model) if self.counts else view

    def for_request(
        self, slack: int, max_kv_size: int | None = None, kv_bits: int | None = None, kv_group_size: int = 64
    ) -> tuple[Layer, ...]:
        """The layers of one request: rings wide enough for its drafts, bounded or quantised if asked."""
        if max_kv_size is not None:
            return tuple(self._bounded(layer, max_kv_size, slack) for layer in self.layers)
        if kv_bits is not None:
            return tuple(Quantized.like(layer, kv_bits, kv_group_size) if isinstance(layer, Full) else layer
                         for layer in self.layers)
        return tuple(changed(layer, Ring, slack=slack) for layer in self.layers)

    @staticmethod
    def _bounded(layer: Full, size: int, slack: int) -> Ring:
        return Ring(layer.heads, layer.key_dim, layer.value_dim, layer.dtype, size, slack, KEEP)

    @property
    def special(self) -> bool:
        """Whether some layer keeps anything but keys and values of every position."""
        return not all(type(layer) is Full for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, Recurrent) for layer in flat(self.layers))


def prompt_cache(model: Callable, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's caches for a prefill; a bound is honoured for every model whose caches are full."""
    caches = make_prompt_cache(model)
    if max_kv_size is None:
        return caches
    return [RotatingKVCache(max_kv_size, keep=KEEP) for _ in caches]


def profile(model: Callable) -> Profile:
    """Learn a model's caches and test it. Evaluates: call it in the thread that loads the model."""
    caches = make_prompt_cache(model)
    logits = model(mx.zeros((1, 2), mx.uint32), cache=caches)
    head_rows = logits.shape[-1]
    try:
        layers = tuple(_like(c, logits.dtype) for c in caches)
    except KeyError as kind:
        return Profile(model, (), head_rows, f"it keeps its past in {kind.args[0].__name__}, which can't be rewound yet")
    except AttributeError:
        return Profile(model, (), head_rows, "some of its caches are filled in a way of its own")
    runs, layers, reason, counts = _runs(model, layers, head_rows)
    return Profile(runs, layers, head_rows, reason, why_hidden(model, partial(make_prompt_cache, model)), counts)


def _like(cache: Any, dtype: mx.Dtype) -> Any:
    """The layer for a cache that holds something. Raises KeyError for a kind that there is none for,
    AttributeError for a cache that is used in another way than mlx-lm's."""
    if type(cache) is CacheList:
        return Several(tuple(_like(c, dtype) for c in cache.caches))
    if type(cache) is ArraysCache and not cache.empty():
        return Recurrent(len(cache.cache), dtype)
    return KINDS[type(cache)].like(cache, slack=2 * ROWS)


def _runs(model: Callable, layers: tuple, head_rows: int) -> tuple[Callable, tuple, str | None, bool]:
    """The model as rounds run it, its layers, why it can't be rewound, and whether it counts in Python."""
    if not any(isinstance(layer, Recurrent) for layer in flat(layers)):
        # An indexer counts keys only where there are more than it picks: too late for a test to see.
        counts = any(isinstance(layer, Several) for layer in layers)
        reason = None if counts else _compare(model, model, layers, head_rows)
        if counts or reason:
            counted = _compare(model, Counted(model, model), layers, head_rows)
            counts, reason = counted is None, counted and (reason or counted)
        return model, () if reason else layers, reason, counts
    try:
        runs = for_rounds(model, make_prompt_cache(model))
    except ValueError as error:
        return model, (), str(error), False
    for masked in (True, False):
        tried = tuple(changed(layer, Recurrent, masked=masked) for layer in layers)
        reason = _compare(model, runs, tried, head_rows)
        if reason is None:
            return runs, tried, None, False
    return model, (), reason, False


def why_not_quantised(pair: Any, profile: Profile, bits: int, group_size: int) -> str | None:
    """Why a model can't keep quantised keys and values, found by running it once with them."""
    key = (profile is pair.target_profile, bits, group_size)
    if key not in pair.quantised:
        pair.quantised[key] = _try_quantised(profile, bits, group_size)
    return pair.quantised[key]


def _try_quantised(profile: Profile, bits: int, group_size: int) -> str | None:
    if profile.reason:
        return profile.reason
    if any(isinstance(layer, (Ring, Several)) for layer in profile.layers):
        return "it has sliding-window layers or several caches in a layer, which mlx-lm can't quantise"
    widths = {d for layer in profile.layers for d in (getattr(layer, "key_dim", 0), getattr(layer, "value_dim", 0))}
    if any(d % group_size for d in widths):
        return f"its attention keeps keys and values of width {max(widths)}, which kv_group_size {group_size} does not divide"
    layers = profile.for_request(0, kv_bits=bits, kv_group_size=group_size)
    try:
        state = [layer.buffers(rung(1)) for layer in layers]
        mx.eval(Pass(profile.runs(), layers, state, Cursor(mx.array(0), 256))(mx.array([[0, 1]])))
    except Exception as error:
        return f"its attention can't read them ({first_line(error)})"
    return None


def _compare(model: Callable, runs: Callable, layers: tuple, head_rows: int) -> str | None:
    """Why a pass of `runs` over several rows, of which some stand, is no replacement for single
    rows of the model; None where it is."""
    prompt, rows = (ids[None] % head_rows for ids in (mx.arange(1, 6), mx.arange(6, 6 + ROWS)))
    single = make_prompt_cache(model)
    model(prompt, cache=single)
    expected, states = [], [_recurrent(layers, single)]
    for i in range(ROWS):
        expected.append(model(rows[:, i : i + 1], cache=single))
        states.append(_recurrent(layers, single))
    caches = make_prompt_cache(model)
    model(prompt, cache=caches)
    state = adopt(layers, caches, rung(1))

    def one_pass(state: list, offset: mx.array, stand: mx.array) -> tuple[mx.array, list]:
        run = Pass(runs, layers, state, Cursor(offset, 256))
        logits = run(rows)
        return logits, _recurrent(layers, run.kept(stand))

    try:
        expected = mx.concatenate(expected, axis=1)
        # Traced, so that a model that looks at an array from Python can't hide it.
        mx.compile(one_pass)(state, mx.array(prompt.shape[1]), mx.array(ROWS))
        passes = [one_pass(state, mx.array(prompt.shape[1]), mx.array(n)) for n in range(1, ROWS + 1)]
        mx.eval(expected, passes[0])
        if not all(_nearest(made, states, n) for n, (_, made) in enumerate(passes, 1)):
            return "its recurrent states can't be made for fewer rows than a pass had"
    except Exception as error:
        if "eval an array during function transformations" in str(error):
            return "its code looks at values on the device while it runs, as dynamic rotary scaling does"
        return f"it can't run on device-resident caches ({first_line(error)})"
    return _distance(expected, passes[0][0])


def _recurrent(layers: Sequence, held: Sequence) -> list[tuple]:
    """The recurrent states among caches of mlx-lm's, or among the arrays of layers."""
    found = []
    for layer, x in zip(layers, held):
        if isinstance(layer, Several):
            found += _recurrent(layer.parts, getattr(x, "caches", x))
        elif isinstance(layer, Recurrent):
            found.append(tuple(getattr(x, "cache", x)))
    return found


def _nearest(made: list[tuple], states: list[list[tuple]], n: int) -> bool:
    """Whether every array of the states made for n rows is that of single rows, but for rounding:
    by far nearer to it than to the one a row before."""
    for ours, own, before in zip(made, states[n], states[n - 1]):
        for a, b, other in zip(ours, own, before, strict=True):
            a, b, other = (x.astype(mx.float32) for x in (a, b, other))
            scale = TOLERANCE_FLOAT32 * mx.linalg.norm(b) if own[0].dtype == mx.float32 else mx.linalg.norm(b - other) / 4
            if not (mx.linalg.norm(a - b) <= scale).item():
                return False
    return True


def _distance(expected: mx.array, got: mx.array) -> str | None:
    exact = expected.dtype == mx.float32
    a, b = (mx.where(mx.isinf(x), 0, x.astype(mx.float32)) for x in (expected, got))  # ids ruled out say nothing
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    apart = mx.linalg.norm(a - b, axis=-1) / mx.maximum(mx.linalg.norm(a, axis=-1), 1e-6)
    worst = apart.max().item() if exact else mx.median(apart).item()
    if worst <= (TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF):
        return None
    return f"several rows in one pass give other logits than single rows (by {worst:.2g})"
