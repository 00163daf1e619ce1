"""What a round's parts cost on this machine: the target's rows and a draft's steps, timed.

Nothing else may run meanwhile. What is measured depends on shapes and types alone, so models that
share them share one file, costs/*.json in MLX_SPEC_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .blas import use_fast_blas
from .cache import Cursor, Pass, read_bound, rung
from .hub import cache_folder
from .pairs import Pair
from .round import Plan, State

CONTEXT, DEEP = 256, 4096  # tokens in the caches while timing
ROWS, DEEP_ROWS = 9, (1, 5, 9)  # deeper down only attention costs more, and evenly so
STEPS = 4  # of a draft, timed at once
SECONDS, BRIEFLY = 1.0, 0.1  # for one figure, where it is that fast
PIECES = 3
SLOW_S, PATIENCE_S = 0.05, 10.0  # a pass that takes longer is timed for fewer rows; after so long, at one depth only
FORMAT = 1


@dataclass(frozen=True)
class Costs:
    """Seconds, with `depth` tokens in the caches.

    rows_s[m - 1]: one pass of the target over m rows. step_s: one draft step, None without a draft;
    start_s: what a round's drafting takes beside its steps (reading what the last round wrote).
    deep: the same further down.
    """

    rows_s: tuple[float, ...]
    step_s: float | None
    start_s: float = 0.0
    depth: int = CONTEXT
    deep: Costs | None = None

    @property
    def c(self) -> float | None:
        """A draft step, in target steps."""
        return None if self.step_s is None else self.step_s / self.rows_s[0]

    def v(self, rows: int) -> float:
        """A pass over so many rows, in target steps."""
        return self.rows_s[rows - 1] / self.rows_s[0]

    def draft_s(self, k: int) -> float:
        """Proposing k tokens."""
        return self.start_s + k * self.step_s if k else 0.0

    def speedup(self, acceptance: Sequence[float], k: int) -> float:
        """Expected gain over plain decoding of k drafts a round; acceptance as in `expected`."""
        return expected(acceptance, k) * self.rows_s[0] / (self.draft_s(k) + self.rows_s[k])

    def at(self, depth: int) -> Costs:
        """With another number of tokens in the caches, on the line through the two measured ones."""
        if self.deep is None:
            return self
        t = max(depth - self.depth, 0) / (self.deep.depth - self.depth)
        between = lambda near, far: near + t * max(far - near, 0.0)  # noqa: E731
        rows = tuple(map(between, self.rows_s, self.deep.rows_s))
        if self.step_s is None:
            return Costs(rows, None, 0.0, depth)
        return Costs(rows, between(self.step_s, self.deep.step_s), between(self.start_s, self.deep.start_s), depth)


def expected(acceptance: Sequence[float], k: int) -> float:
    """Tokens of a round of k drafts, each accepted with its own probability once those before it were."""
    tokens, standing = 1.0, 1.0
    for a in acceptance[:k]:
        standing *= a
        tokens += standing
    return tokens


def best(costs: Costs, acceptance: Sequence[float]) -> tuple[int, float]:
    """(k, speed-up) of the best draft length; (0, 1.0) where none pays."""
    found = [(costs.speedup(acceptance, k), k) for k in range(1, min(len(acceptance), len(costs.rows_s) - 1) + 1)]
    gain, k = max(found, default=(1.0, 0))
    return (k, gain) if gain > 1 else (0, 1.0)


def measure(pair: Pair, again: bool = False) -> Costs:
    """A pair's costs for 1 to 9 rows at two depths: those on the disk, or timed now and kept there.

    Meant to take 3 seconds where a pass takes up to 20 ms, and longer where it takes more. Call it
    in the thread that decodes. again: time them anew.
    """
    if pair.costs is not None and not again:
        return pair.costs
    facts = _facts(pair)
    path = cache_folder() / "costs" / f"{_digest(facts)}.json"
    pair.costs = None if again else _stored(path)
    if pair.costs is None:
        pair.costs = _measure(pair)
        with suppress(OSError):  # a disk that can't be written costs a few seconds the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({"facts": facts, "costs": asdict(pair.costs)}, indent=1))
            os.replace(scratch, path)
    return pair.costs


def _stored(path: Any) -> Costs | None:
    try:
        found = json.loads(path.read_text())["costs"]
        near, deep = (part and replace(Costs(**part), rows_s=tuple(part["rows_s"]), deep=None) for part in (found, found["deep"]))
        return replace(near, deep=deep)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(pair: Pair) -> dict[str, Any]:
    """All that costs depend on."""
    models = {"target": pair.target} | ({} if pair.draft is None else {"draft": pair.draft})
    return {
        "format": FORMAT, "mlx": mx.__version__, "device": str(mx.default_device()), "cores": os.cpu_count(),
        "machine": mx.device_info().get("device_name"), "blas": use_fast_blas(),
    } | {role: _shapes(model) for role, model in models.items()}


def _shapes(model: Any) -> str:
    weights = sorted((path, w.shape, str(w.dtype)) for path, w in tree_flatten(model.parameters()))
    return _digest([type(model).__module__, weights, repr(getattr(model, "args", None))])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _measure(pair: Pair) -> Costs:
    began, fast = time.perf_counter(), target_rows(pair, 1, CONTEXT, BRIEFLY) < SLOW_S
    every, some = tuple(range(1, ROWS + 1)), (1, 2, 3, 5, 9)
    measured = every if fast else some
    near = costs_at(pair, CONTEXT, measured, BRIEFLY)
    near = replace(near, rows_s=tuple(map(float, np.interp(every, measured, near.rows_s))))
    if time.perf_counter() - began > PATIENCE_S:
        return near
    far = costs_at(pair, DEEP, DEEP_ROWS, BRIEFLY)
    more = [max(deep - near.rows_s[m - 1], 0.0) for m, deep in zip(DEEP_ROWS, far.rows_s)]
    rows = tuple(s + float(np.interp(m, DEEP_ROWS, more)) for m, s in zip(every, near.rows_s))
    mx.clear_cache()
    return replace(near, deep=replace(far, rows_s=rows))


def costs_at(pair: Pair, context: int, rows: Sequence[int], seconds: float = SECONDS) -> Costs:
    """Timed now, at one depth and for these numbers of rows."""
    found = tuple(target_rows(pair, m, context, seconds) for m in rows)
    if pair.draft is None or pair.draft_profile.reason:
        return Costs(found, None, 0.0, context)
    k = min(STEPS, getattr(pair.draft, "largest", STEPS))
    one, many = (drafting(pair, n, context, seconds) for n in (1, k))
    step = max(many - one, 0.0) / (k - 1) if k > 1 else one
    return Costs(found, step, max(one - step, 0.0), context)


def timed(step: Callable[[Any], Any], start: Any, seconds: float = SECONDS) -> float:
    """Seconds of one step of a chain, each fed by the one before; one is built while one runs. The
    best of a few stretches, which grow while there is time."""
    state, start = step(start), None
    mx.eval(state)
    found, spent = math.inf, 0.0
    for piece in range(PIECES):
        steps, began = 2 << piece, time.perf_counter()
        for _ in range(steps):
            state = step(state)
            mx.async_eval(state)
        mx.eval(state)
        took = time.perf_counter() - began
        found, spent = min(found, took / steps), spent + took
        if piece and spent > seconds:  # one stretch alone may be the one that was disturbed
            break
    return found


def target_rows(pair: Pair, rows: int, context: int = CONTEXT, seconds: float = SECONDS) -> float:
    """Seconds of one pass of the target over so many rows, `context` tokens behind it."""
    layers = pair.target_profile.for_request(2 * rows)
    bound = read_bound(context + rows)

    def step(state: tuple) -> tuple:
        # The caches go from step to step, or each would begin with a copy of them.
        tokens, caches = state
        target = Pass(pair.target_profile.runs(), layers, caches, Cursor(mx.array(context), bound))
        logits = target(tokens)
        return mx.argmax(logits, axis=-1).astype(mx.uint32), target.kept(mx.array(rows))

    return timed(step, (mx.zeros((1, rows), mx.uint32), _buffers(layers, context + rows)), seconds)


def draft_step(pair: Pair, context: int = CONTEXT, k: int = STEPS) -> float:
    """Seconds of one of a drafter's steps, its start included: k of them at once, by k."""
    k = min(k, getattr(pair.draft, "largest", k))
    return drafting(pair, k, context) / k


def drafting(pair: Pair, k: int, context: int = CONTEXT, seconds: float = SECONDS) -> float:
    """Seconds of proposing k tokens, greedy, after a round of as many: with all that is read again."""
    drafter, ahead = pair.drafter(), mx.default_device().type == mx.gpu
    history = mx.zeros((1, rung(context + k + 1)), mx.uint32)
    length, bound = mx.array([context]), read_bound(context + 2 * k + 1)
    plan = Plan(k, 1 + ahead, bound)
    choose = lambda logits, drafted: (mx.argmax(logits, axis=-1), None)  # noqa: E731

    def heard(own: list, feed: mx.array) -> Any:
        if not drafter.hears:
            return drafter.begin(own, context - plan.catch_up) if hasattr(drafter, "begin") else own
        states = [mx.zeros((1, k + 1, pair.draft.args.hidden_size)) + feed * 0.0 for _ in (*drafter.depths, "final")]
        return drafter.hear(own, states, length - k - 1)

    def step(state: tuple) -> tuple:
        # The newest token is the last one proposed, so that one call waits for the other.
        token, own = state
        begun = mx.slice_update(history, token.reshape(1, 1).astype(mx.uint32), mx.array([context - 1]), (1,))
        request = State(begun, length, mx.zeros((3, 2), mx.uint32), [], heard(own, token))
        proposal = drafter.propose(request, plan, choose)
        own = proposal.state(mx.array([k]))[0] if callable(proposal.state) else proposal.state
        return proposal.tokens[0, -1], own

    return timed(step, (mx.array(0, dtype=mx.uint32), _buffers(drafter.layers, context + 2 * k + 1)), seconds)


def _buffers(layers: Sequence[Any], positions: int) -> list:
    caches = [layer.buffers(read_bound(positions)) for layer in layers]
    mx.eval(caches)
    return caches
