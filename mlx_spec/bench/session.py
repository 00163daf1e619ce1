"""A whole bench of one pair, from costs to record."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any, Callable, Sequence

from ..costs import ROWS, Costs, measure
from ..engine import COMPILE_AFTER
from . import card as cards
from .arms import compile_after, count_rounds, filled
from .record import VERSION, Card, Model, Record, check
from .run import Plan, runs, seconds, warm_up
from .stats import Probe

COUNTED_K = 4  # where no number was asked for


def bench(pair: Any, plan: Plan, draft_name: str | None, arguments: dict[str, Any], note: Callable[[str], None]) -> Record:
    """note: is told what goes on. Ctrl-C while prompts run ends it with what there is."""
    note("measuring what a step costs")
    card, costs = cards.card(), measure(pair, again=True)
    first = plan.prompts[0][1]
    counted = [count_rounds(pair, first, k) for k in _counted(pair, plan)]
    note("warming up")
    warm_up(pair, plan)
    began = time.perf_counter()
    filled(pair.target, first)
    read_s = (time.perf_counter() - began) / len(first)
    note(f"{len(plan.prompts)} prompts, {len(plan.arms)} arms: about {_time(seconds(plan, costs, read_s))}")
    found, finished = [], True
    tell = lambda done, of, left: note(f"prompt {done} of {of}, about {_time(left)} left")  # noqa: E731
    try:
        with compile_after(COMPILE_AFTER):
            for row in runs(pair, plan, costs, Probe(), tell):
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


def _counted(pair: Any, plan: Plan) -> list[int]:
    """The draft lengths whose rounds are counted: those that run and whose costs are known."""
    if pair.draft is None or pair.draft_profile.reason or pair.target_profile.reason:
        return []
    wanted = [arm.k for arm in plan.arms if arm.k and arm.k != "auto"] or [COUNTED_K]
    return sorted({min(k, ROWS - 1, getattr(pair.draft, "largest", None) or k) for k in wanted})


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
