"""Numbers from repeated timings: order, intervals, and whether the machine itself moved."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Iterable, Sequence

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


def spread(groups: Iterable[Sequence[float]]) -> float:
    """The standard deviation of logarithms within groups, pooled; 0 where no group has two."""
    logs = [np.log(group) for group in groups if len(group) > 1]
    return float(np.sqrt(sum(((x - x.mean()) ** 2).sum() for x in logs) / max(sum(len(x) - 1 for x in logs), 1)))


def shared_error(noise: Sequence[float], together: int, stretches: int) -> float:
    """What the mean of so many stretches of neighbouring timings is off by beyond what independent ones would be, if
    their logarithms vary as `noise` does, in order of time: a spell of slowness takes neighbours in (an AR(1) process)."""
    if len(noise) < 4 or not np.ptp(noise):
        return 0.0
    off = np.asarray(noise) - np.mean(noise)
    carried = float(np.clip((off[1:] * off[:-1]).sum() / (off**2).sum(), 0, 0.95))
    lags = np.arange(1, together)
    return float(np.sqrt(off.var(ddof=1) * 2 * ((1 - lags / together) * carried**lags).sum() / (together * stretches)))


def difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The second over the first, each the mean of independent runs (two at least, on logarithms), and its 95 % interval
    by Student's t with the variance of both together."""
    a, b, draws = np.log(first), np.log(second), np.random.default_rng(seed)
    free = len(a) + len(b) - 2
    error = np.sqrt((((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / free * (1 / len(a) + 1 / len(b)))
    middle, reach = b.mean() - a.mean(), error * np.percentile(np.abs(draws.standard_t(free, 20 * RESAMPLES)), 95)
    return dict(zip(("median", "low", "high"), map(float, np.exp([middle, middle - reach, middle + reach]))))


def interval(ratios: Sequence[float], least: float = 0.0, common: float = 0.0, seed: int = 0) -> dict[str, float | None]:
    """The median of paired ratios and its 95 % bootstrap interval, smoothed; one ratio has none.

    Resamples of a few values are too narrow, so each draw gets normal noise of s / sqrt(n) (Hesterberg 2015, arXiv
    1411.5279), on logarithms, so that no ratio becomes negative; more where the draws would still vary less than
    `least`, the `spread` of many such groups: two values that agree by chance are no proof of precision. common: the
    standard deviation of an error that all values share.
    """
    values, draws = np.log(np.asarray(ratios, dtype=float)), np.random.default_rng(seed)
    n = len(values)
    if n < 2:
        return {"median": float(ratios[0]), "low": None, "high": None}
    variance = values.var(ddof=1)
    noise = np.sqrt(max(variance / n, least**2 - variance * (n - 1) / n))
    drawn = values[draws.integers(0, n, (RESAMPLES, n))] + draws.normal(0, noise, (RESAMPLES, n))
    low, high = np.exp(np.percentile(np.median(drawn, axis=1) + draws.normal(0, common, RESAMPLES), [2.5, 97.5]))
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
