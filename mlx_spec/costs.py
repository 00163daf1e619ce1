"""What a round's parts cost on this machine: the target's rows and a draft's steps, timed.

Nothing else may run meanwhile. The figures are of this machine and this context length only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import mlx.core as mx

from .cache import Cursor, Pass, read_bound, rung
from .pairs import Pair
from .round import Plan, State

CONTEXT = 256  # tokens in the caches while timing
REPEATS = 8


@dataclass(frozen=True)
class Costs:
    """rows_s[m - 1]: seconds of one pass of the target over m rows; step_s: of one draft step."""

    rows_s: tuple[float, ...]
    step_s: float

    @property
    def c(self) -> float:
        """A draft step, in target steps."""
        return self.step_s / self.rows_s[0]

    def v(self, rows: int) -> float:
        """A pass over so many rows, in target steps."""
        return self.rows_s[rows - 1] / self.rows_s[0]

    def speedup(self, acceptance: Sequence[float], k: int) -> float:
        """Expected gain over plain decoding of k drafts, each accepted with its own probability
        once those before it were."""
        tokens, standing = 1.0, 1.0
        for a in acceptance[:k]:
            standing *= a
            tokens += standing
        return tokens / (k * self.c + self.v(k + 1))


def best(costs: Costs, acceptance: Sequence[float]) -> tuple[int, float]:
    """(k, speed-up) of the best draft length; (0, 1.0) where none pays."""
    found = [(costs.speedup(acceptance, k), k) for k in range(1, min(len(acceptance), len(costs.rows_s) - 1) + 1)]
    gain, k = max(found, default=(1.0, 0))
    return (k, gain) if gain > 1 else (0, 1.0)


def timed(step: Callable[[Any], Any], start: Any, repeats: int = REPEATS) -> float:
    """Seconds of one step of a chain, each fed by the one before; one is built while one runs."""
    state = start
    for i in range(repeats + 2):
        if i == 2:
            mx.eval(state)
            began = time.perf_counter()
        state = step(state)
        mx.async_eval(state)
    mx.eval(state)
    return (time.perf_counter() - began) / repeats


def target_rows(pair: Pair, rows: int, context: int = CONTEXT) -> float:
    """Seconds of one pass of the target over so many rows, `context` tokens behind it."""
    layers = pair.target_profile.for_request(2 * rows)
    caches = [layer.buffers(rung(context + rows)) for layer in layers]
    bound = read_bound(context + rows)

    def step(tokens: mx.array) -> mx.array:
        logits = Pass(pair.target, layers, caches, Cursor(mx.array(context), bound))(tokens)
        return mx.argmax(logits, axis=-1).astype(mx.uint32)

    return timed(step, mx.zeros((1, rows), mx.uint32))


def draft_step(pair: Pair, context: int = CONTEXT, k: int = 4) -> float:
    """Seconds of one of a drafter's steps, greedy: k of them at once, by k."""
    drafter = pair.drafter()
    k = min(k, getattr(drafter, "largest", k))
    history = mx.zeros((1, rung(context + k)), mx.uint32)
    length = mx.array([context])
    own = [layer.buffers(history.shape[1]) for layer in drafter.layers]
    plan = Plan(k, 1, read_bound(context + k))
    choose = lambda logits, drafted: (mx.argmax(logits, axis=-1), None)  # noqa: E731

    def heard(feed: mx.array) -> Any:
        if not drafter.hears:
            return own
        states = [mx.zeros((1, 1, pair.draft.args.hidden_size)) + feed * 0.0 for _ in (*drafter.depths, "final")]
        return drafter.hear(own, states, length - 1)

    def step(token: mx.array) -> mx.array:
        # The newest token is the last one proposed, so that one call waits for the other.
        begun = mx.slice_update(history, token.reshape(1, 1).astype(mx.uint32), mx.array([context - 1]), (1,))
        state = State(begun, length, mx.zeros((3, 2), mx.uint32), [], heard(token))
        return drafter.propose(state, plan, choose).tokens[0, -1]

    return timed(step, mx.array(0, dtype=mx.uint32)) / k
