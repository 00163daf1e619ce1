"""Several builds or machines side by side, each with one record or, better, several of the same command.

One process differs from the next by more than its own prompts can tell, so a difference is called one only where
there are several records of each, made in turns if they are of one machine.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import numpy as np

from .arms import Arm
from .figures import ALL, POOLED, Row, arm_of, gains, restlessness, rows, unrest, wrong
from .record import Record
from .render import lines, ratio
from .stats import difference, interval, median, spread

ENOUGH = 5  # prompts, before a difference is called one
RECORDS = 3  # of each build, before that


class Build(NamedTuple):
    """Records of the same command on one build and machine."""

    name: str
    records: Sequence[Record]

    @property
    def pooled(self) -> Record:
        """As one record, each process one repetition more."""
        runs = [run | {"repetition": POOLED * i + run["repetition"]} for i, r in enumerate(self.records) for run in r["runs"]]
        return self.records[0] | {"runs": runs}

    def check(self) -> None:
        """Raises ValueError where the records are not of one command, build and machine."""
        for what, of in (("machine", lambda r: Build("", [r]).machine), ("pair", lambda r: (r["target"], r["draft"])),
                         ("build", lambda r: (r["card"]["mlx_spec"], r["card"]["git"], r["card"]["mlx"], r["card"]["mlx_lm"])),
                         ("set of arms", lambda r: {arm_of(run) for run in r["runs"]})):
            if any(of(r) != of(self.records[0]) for r in self.records):
                raise ValueError(f"the records of {self.name} are not of one {what}: put them side by side, not in one list")

    @property
    def machine(self) -> tuple:
        return tuple(self.records[0]["card"][name] for name in ("chip", "gpu_cores", "memory_bytes", "system", "device", "blas"))


def markdown(builds: Sequence[Build]) -> str:
    """Speed-ups over plain, and each build against the first."""
    tables = {b.name: {(row.category, row.arm): row for row in rows(b.pooled)} for b in builds}
    base, *others = builds
    keys = [key for key in dict.fromkeys(k for t in tables.values() for k in t) if any(
        key in t and t[key].speedup for t in tables.values())]
    cells = [[*_labels(*key), *(_gain(t.get(key)) for t in tables.values()),
              *(_against(base, other, *key) for other in others)] for key in keys]
    header = ["text", "arm", "T", *tables, *(f"{b.name} / {base.name}" for b in others)]
    return "\n\n".join(["# mlx_spec bench --compare", "\n".join(map(_facts, builds)), lines(header, cells),
                        _caption(base, others)]) + "\n"


def _facts(build: Build) -> str:
    r, many = build.records[0], f", {len(build.records)} records" * (len(build.records) > 1)
    return (f"{build.name}: {r['card']['chip'] or 'unknown chip'}, {r['card']['system']}, mlx_spec {r['card']['mlx_spec']}"
            f"{' ' + r['card']['git'] if r['card']['git'] else ''}, {r['target']['name']}{many}")


def _caption(base: Build, others: Sequence[Build]) -> str:
    said = ["Speed over mlx-lm's plain decoding of the same machine [95 % interval]."]
    if any(_one_machine(base, b) for b in others):
        said.append("The last columns: tokens/s of records of one machine and target against each other, on the same prompts.")
    if not all(_one_machine(base, b) for b in others):
        said.append("The last columns, where machine or target differ: that speed over plain against each other, on the same prompts.")
    if any(_called(base, b) for b in others):
        said.append(f"`slower` or `faster`: the interval leaves out 1, with {ENOUGH} prompts or more.")
    if not all(_called(base, b) for b in others):
        said.append(f"The speed of a process varies, so nothing is called slower or faster without {RECORDS} records of each build, "
                    "comma-separated (a1.json,a2.json,a3.json b1.json,...), made in turns where they are of one machine.")
    return " ".join(said)


def _labels(category: str, arm: Arm) -> list[str]:
    return [category, str(arm), f"{arm.temperature:g}"]


def _gain(row: Row | None) -> str:
    return "n/a" if row is None else "BUG" if row.bugs else ratio(row.speedup)


def against(base: Build, other: Build, arm: Arm, category: str = ALL) -> dict | None:
    """The other's speed over the base's on the prompts of both; None where there is none. From two records of each on,
    a record is one value, and its interval has in it how processes differ; below, the prompts are the values."""
    sides = _sides(base, other, arm, category)
    if not sides[0][0]:
        return None
    if min(map(len, sides)) > 1:
        return difference(*([math.exp(np.mean(np.log([*found.values()]))) for found in side] for side in sides))
    first, second = ({p: median([found[p] for found in side]) for p in side[0]} for side in sides)
    kinds = {run["prompt"]: run["category"] for run in base.records[0]["runs"]}
    ratios = {p: second[p] / first[p] for p in first}
    within = spread([[x for p, x in ratios.items() if kinds[p] == c] for c in dict.fromkeys(kinds.values())])
    pooled = base.pooled, other.pooled
    return interval(list(ratios.values()), max(within, math.hypot(*map(unrest, pooled))),
                    math.hypot(*(restlessness(r, category) for r in pooled)))


def _sides(base: Build, other: Build, arm: Arm, category: str) -> list[list[dict[str, float]]]:
    """Of both builds each record's speed by prompt, the prompts that all have; nothing where a reply was wrong."""
    speeds = _speeds if _one_machine(base, other) else gains
    sides = [[{} if wrong(r, arm, category) else speeds(r, arm, category) for r in b.records] for b in (base, other)]
    shared = set.intersection(*(set(found) for side in sides for found in side))
    return [[{p: found[p] for p in sorted(shared)} for found in side] for side in sides]


def _speeds(record: Record, arm: Arm, category: str) -> dict[str, float]:
    """Tokens a second by prompt."""
    found: dict[str, list[float]] = {}
    for r in record["runs"]:
        if arm_of(r) == arm and r["tokens"] and category in (ALL, r["category"]):
            found.setdefault(r["prompt"], []).append(r["tokens"] / r["decode_s"])
    return {prompt: median(speeds) for prompt, speeds in found.items()}


def _one_machine(base: Build, other: Build) -> bool:
    """And one target, so that tokens a second can be compared outright."""
    return base.machine == other.machine and base.records[0]["target"] == other.records[0]["target"]


def _called(base: Build, other: Build) -> bool:
    """Whether a difference between them may be called one."""
    many = min(len(base.records), len(other.records)) >= RECORDS
    return many and (not _one_machine(base, other) or _in_turns(base, other))


def _in_turns(base: Build, other: Build) -> bool:
    """Whether none was made twice before the other was made once more, so that both saw the same machine."""
    first, second = (sorted(r["made"] for r in b.records) for b in (base, other))
    return all(later > before for a, b in ((first, second), (second, first)) for later, before in zip(a[1:], b))


def _against(base: Build, other: Build, category: str, arm: Arm) -> str:
    found = against(base, other, arm, category)
    if found is None or found["low"] is None or not _called(base, other):
        return ratio(found)
    if len(_sides(base, other, arm, category)[0][0]) < ENOUGH:
        return ratio(found)
    return ratio(found) + (" slower" if found["high"] < 1 else " faster" if found["low"] > 1 else "")
