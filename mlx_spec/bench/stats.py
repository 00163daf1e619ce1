"""Numbers from repeated timings: order, intervals, and whether the machine itself moved."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Sequence

import mlx.core as mx
import numpy as np

RESAMPLES = 10_000
MOVED = 0.10  # a probe this far from the median marks what was timed beside it


def rotated(items: Sequence, by: int) -> list:
    """The items in the order of turn `by`, so that no arm always comes first."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if len(values) else None


def interval(ratios: Sequence[float], seed: int = 0) -> dict[str, float | None]:
    """The median of paired ratios and its 95 % bootstrap interval, smoothed; one ratio has none.

    Resamples of a few values are too narrow, so each draw gets normal noise of s / sqrt(n)
    (Hesterberg 2015, arXiv 1411.5279), on logarithms, so that no ratio becomes negative.
    """
    values, draws = np.log(np.asarray(ratios, dtype=float)), np.random.default_rng(seed)
    if len(values) < 2:
        return {"median": float(ratios[0]), "low": None, "high": None}
    size = (RESAMPLES, len(values))
    noise = draws.normal(0, values.std(ddof=1) / len(values) ** 0.5, size)
    medians = np.median(values[draws.integers(0, len(values), size)] + noise, axis=1)
    low, high = np.exp(np.percentile(medians, [2.5, 97.5]))
    return {"median": statistics.median(map(float, ratios)), "low": float(low), "high": float(high)}


class Probe:
    """The same chain of products before every prompt: what moves it is the machine, not the arms."""

    def __init__(self) -> None:
        self.weight = mx.full((576, 49152), 1e-3)
        self.readings: list[dict[str, float]] = []
        mx.eval(self.weight)
        self._time()

    def read(self) -> dict[str, float]:
        seconds = min(self._time() for _ in range(3))
        self.readings.append({"ms": seconds * 1e3, "load": os.getloadavg()[0]})
        return self.readings[-1]

    def _time(self) -> float:
        x = mx.ones((1, 576))
        started = time.perf_counter()
        for _ in range(6):
            x = (x @ self.weight)[:, :576]
        mx.eval(x)
        return time.perf_counter() - started

    def moved(self) -> list[int]:
        """The readings that lie more than a tenth from the median."""
        middle: Any = median([r["ms"] for r in self.readings])
        return [i for i, r in enumerate(self.readings) if abs(r["ms"] / middle - 1) > MOVED]
