"""What a draft is trained for: the target's own law of every token that it will have to propose.

A student is a module with `unroll(tokens, states, steps)`, the drafts that start at every row, and
`logits(state, step)` over `ids`. The law comes from the target's stored final states through its
own head, so no logits are stored. Knows nothing of disks, optimisers or kinds.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import mlx.core as mx
import numpy as np

from ..shapes import Float
from .batches import Batch


def loss(student: Any, batch: Batch, weights: Sequence[float]) -> mx.array:
    """Cross-entropy to the target's law, summed over the steps of a draft; a mean over its rows."""
    outs = student.unroll(batch.tokens, batch.states, len(weights))
    laws, places = _laws(student, batch)
    total = mx.array(0.0)
    for step, (weight, out) in enumerate(zip(weights, outs)):
        rows = batch.rows(step)
        logits = student.logits(_flat(out)[mx.array(rows)], step)
        total = total + weight * _cross_entropy(logits, laws[mx.array(places[rows + step])])
    return total / sum(weights)


def _laws(student: Any, batch: Batch) -> tuple[Float[mx.array, "rows vocab"], np.ndarray]:
    """The target's law after each row that is judged, over the student's ids, and where each is."""
    rows = batch.rows(0)
    places = np.zeros(batch.tokens.size, np.int32)
    places[rows] = np.arange(len(rows))
    return mx.softmax(student.shared.head(_flat(batch.states[-1])[mx.array(rows)]), axis=-1), places


def _flat(states: Float[mx.array, "batch rows dim"]) -> Float[mx.array, "all dim"]:
    return states.reshape(-1, states.shape[-1])


def _cross_entropy(logits: Float[mx.array, "rows vocab"], law: Float[mx.array, "rows vocab"]) -> mx.array:
    """Its gradient is (softmax - law), said outright: one exponential an id instead of two."""
    own = mx.stop_gradient(mx.softmax(logits, axis=-1))
    best = mx.argmax(own, axis=-1, keepdims=True)
    total = mx.take_along_axis(logits, best, axis=-1) - mx.log(mx.take_along_axis(own, best, axis=-1))
    value = (total[:, 0] - (law * logits).sum(axis=-1)).mean()
    slope = ((own - mx.stop_gradient(law)) * logits).sum(axis=-1).mean()
    return slope + mx.stop_gradient(value - slope)


class Score(NamedTuple):
    """Counts over a held-out text, by step of a draft. reached: rows whose earlier drafts all
    stood; kept: of those, rows whose draft is the target's choice; overlap: the sum, over all rows,
    of sum min(p, q); rows: how many rows."""

    reached: np.ndarray
    kept: np.ndarray
    overlap: np.ndarray
    rows: np.ndarray

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(self, other)))

    @property
    def acceptance(self) -> np.ndarray:
        """Greedy, by step, given that the earlier drafts stood."""
        return self.kept / np.maximum(self.reached, 1)

    @property
    def sampled(self) -> np.ndarray:
        """Sum min(p, q) by step: acceptance at temperature 1."""
        return self.overlap / np.maximum(self.rows, 1)


def score(student: Any, batch: Batch, steps: int) -> Score:
    """How a draft of `steps` tokens would fare on a text that the target wrote. Evaluates."""
    outs = student.unroll(batch.tokens, batch.states, steps)
    rows, places = batch.rows(0), np.zeros(batch.tokens.size, np.int32)
    places[rows] = np.arange(len(rows))
    theirs = student.shared.whole(_flat(batch.states[-1])[mx.array(rows)])
    best, laws = mx.argmax(theirs, axis=-1), mx.softmax(theirs, axis=-1)[:, student.ids]
    mx.eval(best, laws)
    standing, found = None, []
    for step, out in enumerate(outs):
        rows = batch.rows(step)
        at = mx.array(places[rows + step])
        logits = student.logits(_flat(out)[mx.array(rows)], step)
        agree = student.ids[mx.argmax(logits, axis=-1)] == best[at]
        overlap = mx.minimum(laws[at], mx.softmax(logits, axis=-1)).sum()
        agree, overlap = np.array(agree), overlap.item()
        reached = np.ones(len(rows), bool) if standing is None else standing[rows]
        found.append((reached.sum(), (reached & agree).sum(), overlap, len(rows)))
        standing = np.zeros(batch.tokens.size, bool)
        standing[rows[reached & agree]] = True
    return Score(*np.array(found, dtype=float).T)
