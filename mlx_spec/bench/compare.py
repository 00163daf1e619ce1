"""Several records side by side: machines, or versions of this library on one machine."""

from __future__ import annotations

import math
from typing import Sequence

from .arms import Arm
from .figures import ALL, Row, gains, rows, unrest
from .record import Record
from .render import lines, ratio
from .stats import interval, spread

ENOUGH = 5  # prompts, before a difference is called one


def markdown(records: Sequence[tuple[str, Record]]) -> str:
    """Speed-ups over plain, and what each record's are over the first one's: prompt by prompt, so that what differs
    between prompts, or between two days of one machine, is out of it."""
    tables = {name: {(row.category, row.arm): row for row in rows(record)} for name, record in records}
    (first, base), *others = records
    keys = [key for key in dict.fromkeys(k for t in tables.values() for k in t) if any(
        key in t and t[key].speedup for t in tables.values())]
    cells = [[*_labels(*key), *(_gain(t.get(key)) for t in tables.values()),
              *(_against(base, other, *key) for _, other in others)] for key in keys]
    header = ["text", "arm", "T", *tables, *(f"{name} / {first}" for name, _ in others)]
    machines = [f"{name}: {r['card']['chip'] or 'unknown chip'}, {r['card']['system']}, mlx_spec {r['card']['mlx_spec']}"
                f"{' ' + r['card']['git'] if r['card']['git'] else ''}, {r['target']['name']}" for name, r in records]
    return "\n\n".join(["# mlx_spec bench --compare", "\n".join(machines), lines(header, cells),
                        "Speed over mlx-lm's plain decoding of the same machine [95 % interval]; the last columns are ratios "
                        "of that on the same prompts. `slower` or `faster`: the interval leaves out 1, and there are "
                        f"{ENOUGH} prompts or more. That is said of two runs, and the speed of a process varies: before two "
                        "builds are called different, run both again."]) + "\n"


def _labels(category: str, arm: Arm) -> list[str]:
    return [category, str(arm), f"{arm.temperature:g}"]


def _gain(row: Row | None) -> str:
    return "n/a" if row is None else "BUG" if row.bugs else ratio(row.speedup)


def against(base: Record, other: Record, arm: Arm, category: str = ALL) -> dict | None:
    """The other's speed-up over the base's, paired by prompt; None where there is none."""
    shared = _shared(base, other, arm, category)
    within = spread([_shared(base, other, arm, c) for c in dict.fromkeys(r["category"] for r in base["runs"])])
    return interval(shared, max(within, math.hypot(unrest(base), unrest(other)))) if shared else None


def _shared(base: Record, other: Record, arm: Arm, category: str) -> list[float]:
    ours, theirs = gains(base, arm, category), gains(other, arm, category)
    return [theirs[p] / ours[p] for p in ours if p in theirs]


def _against(base: Record, other: Record, category: str, arm: Arm) -> str:
    found = against(base, other, arm, category)
    if found is None or found["low"] is None:
        return ratio(found)
    if len(_shared(base, other, arm, category)) < ENOUGH:
        return ratio(found)
    return ratio(found) + (" slower" if found["high"] < 1 else " faster" if found["low"] > 1 else "")
