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
    states, places = _judged(batch)
    laws, total = mx.softmax(student.shared.head(states), axis=-1), mx.array(0.0)
    for step, (weight, out) in enumerate(zip(weights, outs)):
        rows = batch.rows(step)
        logits = student.logits(out.flatten(0, 1)[mx.array(rows)], step)
        total = total + weight * _cross_entropy(logits, laws[mx.array(places[rows + step])])
    return total / sum(weights)


def _judged(batch: Batch) -> tuple[Float[mx.array, "rows dim"], np.ndarray]:
    """The target's final states of the rows that are judged, and where each row's is."""
    rows = batch.rows(0)
    places = np.zeros(batch.tokens.size, np.int32)
    places[rows] = np.arange(len(rows))
    return batch.states[-1].flatten(0, 1)[mx.array(rows)], places


def _cross_entropy(logits: Float[mx.array, "rows vocab"], law: Float[mx.array, "rows vocab"]) -> mx.array:
    """Its gradient is (softmax - law), said outright: one exponential an id instead of two."""
    own = mx.stop_gradient(mx.softmax(logits, axis=-1))
    best = mx.argmax(own, axis=-1, keepdims=True)
    total = mx.take_along_axis(logits, best, axis=-1) - mx.log(mx.take_along_axis(own, best, axis=-1))
    value = (total[:, 0] - (law * logits).sum(axis=-1)).mean()
    slope = ((own - mx.stop_gradient(law)) * logits).sum(axis=-1).mean()
    return slope + mx.stop_gradient(value - slope)


class Score(NamedTuple):
    """Counts by step of a draft. reached: rows whose earlier drafts all stood; kept: of those, rows whose draft is
    the target's choice; overlap: the sum, over all rows, of sum min(p, q)."""

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
    states, places = _judged(batch)
    theirs = student.shared.whole(states)
    best, laws = mx.argmax(theirs, axis=-1), mx.softmax(theirs, axis=-1)[:, student.ids]
    mx.eval(best, laws)
    standing, found = np.ones(batch.tokens.size, bool), []
    for step, out in enumerate(outs):
        rows = batch.rows(step)
        at = mx.array(places[rows + step])
        logits = student.logits(out.flatten(0, 1)[mx.array(rows)], step)
        agree = student.ids[mx.argmax(logits, axis=-1)] == best[at]
        overlap = mx.minimum(laws[at], mx.softmax(logits, axis=-1)).sum()
        reached = standing[rows]
        kept = reached & np.array(agree)
        found.append((reached.sum(), kept.sum(), overlap.item(), len(rows)))
        standing = np.isin(np.arange(batch.tokens.size), rows[kept])
    return Score(*np.array(found, dtype=float).T)
