"""A whole bench of one pair, from costs to record."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any, Callable, Sequence

from ..costs import ROWS, Costs, measure
from ..types import Options
from . import card as cards
from .arms import count_rounds, filled
from .record import VERSION, Card, Model, Record, check
from .run import Plan, arms_of, encoded, runs, seconds, warm_up
from .stats import Probe
from .texts import Prompt

COUNTED_K = 4  # where no number was asked for
TIMED = ROWS - 1  # the largest k whose pass was timed


def bench(pair: Any, draft_name: str | None, prompts: Sequence[Prompt], ks: Sequence[int | str],
          temperatures: Sequence[float], baselines: Sequence[str], repetitions: int, options: Options, delay_s: float,
          arguments: dict[str, Any], note: Callable[[str], None]) -> Record:
    """note: is told what goes on. Ctrl-C while prompts run ends it with what there is. Raises ValueError."""
    plan = Plan(arms_of(pair, ks, temperatures, baselines), encoded(pair, prompts), repetitions, options, delay_s)
    note("measuring what a step costs")
    card, costs = cards.card(), measure(pair, again=True)
    numbers = [k for k in ks if k and k != "auto"] or [COUNTED_K]
    largest = getattr(pair.draft, "largest", None) or max(numbers)
    drafts = pair.draft is not None and not (pair.draft_profile.reason or pair.target_profile.reason)
    counted = [count_rounds(pair, plan.prompts[0][1], k) for k in sorted({min(k, largest, TIMED) for k in numbers}) if drafts]
    note("warming up")
    warm_up(pair, plan)
    probe, found, finished = Probe(), [], True
    began = time.perf_counter()
    filled(pair.target, plan.prompts[0][1])
    read_s = (time.perf_counter() - began) / len(plan.prompts[0][1])
    note(f"{len(plan.prompts)} prompts, {len(plan.arms)} arms: at most {_time(seconds(plan, costs, read_s))}")
    try:
        for row in runs(pair, plan, costs, probe, lambda done, of, left: note(f"prompt {done} of {of}, about {_time(left)} left")):
            found.append(row)
    except KeyboardInterrupt:
        finished = False
    target = cards.model(pair.target, pair.name)
    draft = None if pair.draft is None else cards.model(pair.draft, draft_name)
    record: Record = {
        "version": VERSION, "made": datetime.now(timezone.utc).isoformat(timespec="seconds"), "finished": finished,
        "arguments": arguments, "card": card, "target": target, "draft": draft,
        "costs": _costs(costs, counted, card, target, draft), "runs": found, "notes": list(pair.notes),
    }
    check(record)
    return record


def _costs(costs: Costs, counted: Sequence[dict], card: Card, target: Model, draft: Model | None) -> dict:
    depths = [{"tokens": c.depth, "rows_ms": [s * 1e3 for s in c.rows_s], "step_ms": c.step_s and c.step_s * 1e3,
               "start_ms": c.start_s * 1e3, "c": c.c, "v": [c.v(m + 1) for m in range(len(c.rows_s))]}
              for c in (costs, costs.deep) if c is not None]
    rounds = [r | {"draft_ms": costs.draft_s(r["k"]) * 1e3, "target_ms": costs.rows_s[r["k"]] * 1e3} for r in counted]
    read, k = card["bandwidth_gbs"], max((r["k"] for r in counted), default=0)
    once = target["bytes"] + (k * draft["bytes"] if draft else 0)
    return {"depths": depths, "rounds": rounds, "ceiling_plain_tps": read and read * 1e9 / target["bytes"],
            "ceiling_rounds_per_s": read and k and read * 1e9 / once or None}


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
