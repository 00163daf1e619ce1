"""What every benchmark here needs beside the library's bench: options, progress, printing.

Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Callable, Sequence

from mlx_spec.bench.card import card
from mlx_spec.bench.stats import Probe, median


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


def machine(dtype: str) -> dict[str, Any]:
    found = {name: value for name, value in card().items() if value is not None}
    return found | {"dtype": dtype, "load": os.getloadavg()[0]}


def show(ratio: dict[str, float | None]) -> str:
    within = "" if ratio["low"] is None else f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{ratio['median']:.3f}{within}"


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


def report_machine(found: dict[str, Any], probe: Probe | None = None) -> None:
    if probe is None:
        print("; ".join(f"{name}: {value}" for name, value in found.items()), end="\n\n")
        return
    readings, moved = probe.readings, probe.moved()
    print(f"probe: {median([r['ms'] for r in readings]):.1f} ms over {len(readings)} readings, load {readings[0]['load']:.1f} to "
          f"{max(r['load'] for r in readings):.1f}")
    if moved:
        print(f"FLAGGED: the probe moved by more than 10 % before readings {', '.join(map(str, moved))}: measure again, idle")
