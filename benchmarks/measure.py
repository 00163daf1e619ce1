"""What every benchmark here needs: rotation, a probe of the machine, intervals, printing.

Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any, Callable, Sequence

import mlx.core as mx
import numpy as np

RESAMPLES = 10_000
MOVED = 0.10  # a probe this far from the median flags its prompt


def rotated(items: Sequence, by: int) -> list:
    """The items in the order of turn `by`, so that no arm always comes first."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def interval(ratios: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The median of paired ratios and its 95 % bootstrap interval, resampling the prompts."""
    values = np.asarray(ratios, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if len(values) else float("nan")


class Probe:
    """The same chain of products before every prompt: what moves it is the machine, not the arms."""

    def __init__(self) -> None:
        self.weight = mx.full((576, 49152), 1e-3)
        self.readings: list[dict[str, float]] = []
        mx.eval(self.weight)
        self._time()

    def read(self) -> None:
        seconds = min(self._time() for _ in range(3))
        self.readings.append({"ms": seconds * 1e3, "load": os.getloadavg()[0]})

    def _time(self) -> float:
        x = mx.ones((1, 576))
        started = time.perf_counter()
        for _ in range(6):
            x = (x @ self.weight)[:, :576]
        mx.eval(x)
        return time.perf_counter() - started

    def moved(self) -> list[int]:
        """The readings that lie more than a tenth from the median."""
        middle = median([r["ms"] for r in self.readings])
        return [i for i, r in enumerate(self.readings) if abs(r["ms"] / middle - 1) > MOVED]


def each_prompt(prompts: Sequence[list[int]], probe: Probe, one: Callable[[list[int], int], dict]) -> list[dict]:
    """one(ids, turn) for every prompt, the machine probed before it and the time left told after it."""
    records, started = [], time.perf_counter()
    for turn, ids in enumerate(prompts):
        probe.read()
        records.append(one(ids, turn))
        done = time.perf_counter() - started
        note(f"prompt {turn + 1} of {len(prompts)}; {done / 60:.1f} min, about "
             f"{done / (turn + 1) * (len(prompts) - turn - 1) / 60:.0f} to go")
    return records


def parser(about: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    found = argparse.ArgumentParser(description=about.splitlines()[0])
    found.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    found.add_argument("--prompts", type=int, default=10, help="at most ten (%(default)s)")
    found.add_argument("--tokens", type=int, default=128, help="of each reply (%(default)s)")
    found.add_argument("--temperatures", type=float, nargs="+", choices=(0.0, 0.8), default=[0.0, 0.8])
    found.add_argument("--json", metavar="FILE", help="write everything raw")
    return found


def machine(dtype: str, blas: dict | None) -> dict[str, Any]:
    return {
        "kind": "Linux CPU, not a Mac" if sys.platform.startswith("linux") else platform.platform(),
        "cpu": _cpu(), "cores": os.cpu_count(), "device": str(mx.default_device()),
        "mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "dtype": dtype,
        "blas": blas["blas"] if blas else f"not used by {dtype}", "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    with open("/proc/cpuinfo") as lines:
        return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def show(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def reached(ok: bool, wanted: str) -> str:
    return f"{'yes' if ok else 'NO'} ({wanted})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
    print()


def note(text: str) -> None:
    """Progress, on stderr, so that stdout is the report."""
    print(text, file=sys.stderr, flush=True)


def report_machine(card: dict[str, Any], probe: Probe | None = None) -> None:
    if probe is None:
        print("; ".join(f"{name}: {value}" for name, value in card.items()), end="\n\n")
        return
    readings, moved = probe.readings, probe.moved()
    print(f"probe: {median([r['ms'] for r in readings]):.1f} ms over {len(readings)} readings, load {readings[0]['load']:.1f} to "
          f"{max(r['load'] for r in readings):.1f}")
    if moved:
        print(f"FLAGGED: the probe moved by more than 10 % before readings {', '.join(map(str, moved))}: measure again, idle")
