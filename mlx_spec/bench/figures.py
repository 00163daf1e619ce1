"""What the runs of a record come to: a row for each arm and category, and one sentence of advice."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Iterable, NamedTuple, Sequence

import numpy as np

from .arms import OURS, PLAIN, Arm
from .record import Record, Run
from .stats import MOVED, interval, median, shared_error, spread

ALL = "all"
# What a whole process is off by, on logarithms, and can't see itself: beyond their prompts the speed-ups of ten
# processes of one build varied by so much (benchmarks/bench_power.py, on Linux). Of pooled records, less.
PROCESS = 0.03
FEW_PROMPTS = 3  # of which advice is no more than a guess
POOLED = 1000  # repetitions between those of one record and of the next, where several are pooled


class Row(NamedTuple):
    """Medians over the prompts. speedup and predicted: over mlx-lm's plain decoding, None with a BUG or nothing to
    compare; what our plain decoding gains over it is in both, where it was run; kept, stood: acceptance by position, of all drafts and of those whose predecessors stood; moved: prompts
    beside which the machine's clock was off."""

    category: str
    arm: Arm
    prompts: int
    tps: float | None
    end_to_end_tps: float | None
    ttft_s: float | None
    draft_prompt_s: float | None
    speedup: dict | None
    predicted: float | None
    drafted: int
    accepted: int
    looked_up: int
    kept: list[float]
    stood: list[float]
    tokens_per_round: float | None
    peak_memory_bytes: int | None
    identical: int
    ties: int
    bugs: int
    moved: int
    mode: str

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def arm_of(run: Run) -> Arm:
    return Arm(run["engine"], run["k"], run["temperature"])


def gains(record: Record, arm: Arm, category: str = ALL) -> dict[str, float]:
    """Speed over plain by prompt: the median of its repetitions, each pair timed beside one another. Nothing where a
    reply was wrong."""
    if wrong(record, arm, category):
        return {}
    speeds = {(arm_of(r), r["prompt"], r["repetition"]): r["tokens"] / r["decode_s"]
              for r in record["runs"] if r["tokens"] and category in (ALL, r["category"])}
    found: dict[str, list[float]] = {}
    for (other, prompt, repetition), speed in speeds.items():
        plain = speeds.get((Arm(PLAIN, 0, arm.temperature), prompt, repetition))
        if other == arm and plain:
            found.setdefault(prompt, []).append(speed / plain)
    return {prompt: median(ratios) for prompt, ratios in found.items()}


def wrong(record: Record, arm: Arm, category: str = ALL) -> bool:
    """Whether one of its replies is a BUG: then there is no speed."""
    return any(_kind(r) == "BUG" for r in record["runs"] if arm_of(r) == arm and category in (ALL, r["category"]))


def unrest(record: Record) -> float:
    """How much a ratio of two timings varies because the machine's own clock did, on logarithms."""
    read = {(r["prompt"], r["repetition"]): r["probe_ms"] for r in record["runs"]}
    return 2**0.5 * spread([list(read.values())])


def restlessness(record: Record, category: str = ALL) -> float:
    """What all of a category's ratios are off by together: as processes differ, and, from plain decoding, as spells of
    slowness go. Its speed should follow from the length of the context; what it varies beyond that, prompt after prompt,
    is the machine's."""
    plain = [r for r in record["runs"] if r["engine"] == PLAIN and r["tokens"] and r["decode_s"]]
    plain = [r for r in plain if r["temperature"] == plain[0]["temperature"]]
    length = np.array([r["prompt_tokens"] + r["tokens"] / 2 for r in plain])
    speed = np.log([r["tokens"] / r["decode_s"] for r in plain])
    if len(plain) > 3 and np.ptp(length):
        speed = speed - np.polyval(np.polyfit(length, speed, 1), length)
    mine = [r for r in plain if category in (ALL, r["category"])]
    stretches, processes = (len({r["repetition"] // of for r in mine}) or 1 for of in (1, POOLED))
    return math.hypot(PROCESS / processes**0.5, shared_error(speed, len(mine) // stretches, stretches))


def rows(record: Record) -> list[Row]:
    categories = list(dict.fromkeys(r["category"] for r in record["runs"]))
    arms, floor = list(dict.fromkeys(map(arm_of, record["runs"]))), unrest(record)
    least = {arm: max(floor, spread([list(gains(record, arm, c).values()) for c in categories])) for arm in arms}
    common = {c: restlessness(record, c) for c in [*categories, *([ALL] if len(categories) > 1 else [])]}
    return [_row(record, arm, c, least[arm], shared) for c, shared in common.items() for arm in arms]


def _row(record: Record, arm: Arm, category: str, least: float, common: float) -> Row:
    runs = [r for r in record["runs"] if arm_of(r) == arm and category in (ALL, r["category"])]
    kinds, gain = [_kind(r) for r in runs], {} if arm.engine == PLAIN else gains(record, arm, category)
    own = gains(record, Arm(OURS, 0, arm.temperature), category) if arm.engine == OURS else {}
    clock = median([r["probe_ms"] for r in record["runs"]])
    whole = [r["tokens"] / (r["prompt_s"] + r["decode_s"]) for r in runs if r["tokens"]]
    judged, kept, drafted = (_added(r[n] for r in runs) for n in ("judged", "kept", "drafted_by_position"))
    tokens, rounds = (sum(r[n] for r in runs) for n in ("tokens", "rounds"))
    return Row(
        category, arm, len({r["prompt"] for r in runs}), median([r["tokens"] / r["decode_s"] for r in runs if r["tokens"]]),
        median(whole), *(median([r[n] for r in runs if r[n] is not None]) for n in ("ttft_s", "draft_prompt_s")),
        interval(list(gain.values()), least, common) if gain else None,
        median([r["predicted"] * own.get(r["prompt"], 1.0) for r in runs
                if gain and arm.k != 0 and r["predicted"] is not None]),  # of k=0 it would be the measured one itself
        *(sum(r[n] for r in runs) for n in ("drafted", "accepted", "looked_up")),
        [a / b for a, b in zip(kept, drafted) if b], [a / b for a, b in zip(kept, judged) if b],
        tokens / rounds if rounds else None,
        max((r["peak_memory_bytes"] for r in runs if r["peak_memory_bytes"] is not None), default=None),
        *(kinds.count(k) for k in ("identical", "tie", "BUG")),
        sum(abs(r["probe_ms"] / clock - 1) > MOVED for r in runs),
        "; ".join(dict.fromkeys(r["mode"] for r in runs)))


def _added(lists: Iterable[Sequence[int]]) -> list[int]:
    """By place, of lists that can be of different lengths."""
    return [sum(place) for place in zip_longest(*lists, fillvalue=0)]


def bugs(record: Record) -> bool:
    """Whether a reply of ours is wrong."""
    return any(r["engine"] == OURS and _kind(r) == "BUG" for r in record["runs"])


def _kind(run: Run) -> str | None:
    return run["identity"] and run["identity"]["kind"]


def advice(record: Record) -> str:
    """The draft length to use here, and where another one, or none, is better. The largest medians, so a little
    flattered; greedy where that was run."""
    table = rows(record)
    temperature = min((row.arm.temperature for row in table), default=0.0)
    best = {c: _best(row for row in table if row.category == c and row.arm.temperature == temperature)
            for c in dict.fromkeys(row.category for row in table)}
    if bugs(record):
        return "Some replies were wrong (BUG): use k=0, and report it with this record."
    if not best:
        return "Nothing was finished, so there is no advice."
    main = best.pop(ALL, None) if ALL in best else best.pop(next(iter(best)))
    others: dict[str, list[str]] = {}
    for category, row in best.items():
        if (row and row.arm.k) != (main and main.arm.k):
            others.setdefault(_use(row), []).append(category)
    parts = [_use(main), *(f"for {', '.join(names)} {use}" for use, names in others.items())]
    if len({run["prompt"] for run in record["runs"]}) < FEW_PROMPTS:
        parts.append(f"with fewer than {FEW_PROMPTS} prompts that is a guess")
    where = record["card"]["chip"] or record["card"]["system"]
    return f"On this {where}{' (CPU)' if record['card']['device'] == 'cpu' else ''} {'; '.join(parts)}."


def _best(candidates: Iterable[Row]) -> Row | None:
    """The fastest of ours that gains; none where our own plain decoding is as fast."""
    mine = [r for r in candidates if r.arm.engine == OURS and r.speedup and r.speedup["median"] > 1]
    best = max(mine, key=lambda r: (r.speedup["median"], r.arm.k == 0), default=None)
    return best if best and best.arm.k != 0 else None


def _use(row: Row | None) -> str:
    if row is None:
        return "leave speculation off (k=0)"
    gain, low = row.speedup["median"], row.speedup["low"]
    return f"use k={row.arm.k} ({gain:.2f}x{'' if low and low > 1 else ', not certain'})"
