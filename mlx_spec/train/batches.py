"""Batches of stored text: the same for a seed, whatever was interrupted."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..shapes import Float, Integer

LENGTH_STEP = 32  # batches are padded to a multiple of it, so that few shapes occur
SORTED = 32  # batches' worth of texts that are sorted by length, so that little is padding


class Batch(NamedTuple):
    """texts side by side, padded at the end. prompt: tokens of each that are only read.

    states[j][:, t] is what the target knows after token t, shallow first, the final one last.
    """

    tokens: Integer[mx.array, "batch rows"]
    states: list[Float[mx.array, "batch rows dim"]]
    prompt: np.ndarray
    length: np.ndarray

    def rows(self, ahead: int) -> np.ndarray:
        """Flat indices of the rows i that a draft can start from, whose (ahead + 1)-th draft the
        target's state at i + ahead can judge."""
        places = np.arange(self.tokens.shape[1])
        valid = (places >= self.prompt[:, None] - 1) & (places + ahead < self.length[:, None])
        return np.flatnonzero(valid)


def shuffled(lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The texts of each batch of one epoch."""
    rng = np.random.default_rng([seed, epoch])
    order, found = rng.permutation(len(lengths)), []
    while len(order):
        count = max(1, np.searchsorted(np.cumsum(lengths[order]), batch_tokens * SORTED, "right"))
        pool, order = order[:count], order[count:]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        while len(pool):
            wide = -(-lengths[pool] // LENGTH_STEP) * LENGTH_STEP
            fits = max(1, int((wide * np.arange(1, len(pool) + 1) <= batch_tokens).sum()))
            found.append(pool[:fits])
            pool = pool[fits:]
    return [found[i] for i in rng.permutation(len(found))]


def load(tokens: np.ndarray, states: np.ndarray, rows: np.ndarray) -> Batch:
    """rows: of `States.rows`, the texts of this batch."""
    longest = -(-int(rows[:, 2].max()) // LENGTH_STEP) * LENGTH_STEP
    ids = np.zeros((len(rows), longest), np.int32)
    held = np.zeros((len(rows), longest, *states.shape[1:]), np.float16)
    for i, (start, _, length, _) in enumerate(rows):
        ids[i, :length] = tokens[start : start + length]
        held[i, :length] = states[start : start + length]
    split = [mx.array(held[:, :, j]).astype(mx.float32) for j in range(held.shape[2])]
    return Batch(mx.array(ids), split, rows[:, 1], rows[:, 2])


def split(rows: np.ndarray, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """(to learn from, to judge by): the last share of the texts is never trained on."""
    kept = len(rows) - max(1, round(len(rows) * held_out))
    return rows[:kept], rows[kept:]
