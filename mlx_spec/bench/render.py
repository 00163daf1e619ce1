"""A record as Markdown or CSV. Losses are shown as plainly as gains; what is unknown is n/a."""

from __future__ import annotations

import csv
import io
from typing import Any, Sequence

from ..hub import readable
from .arms import OURS, PLAIN
from .figures import ALL, Row, advice, arm_of, rows
from .record import Record

HEADER = ("text", "arm", "speed / plain", "predicted", "tok/s", "end to end", "first token s", "drafts kept",
          "tokens a round", "memory", "output", "")
CSV = ("category", "prompts", "tps", "end_to_end_tps", "ttft_s", "draft_prompt_s", "predicted", "drafted", "accepted", "looked_up",
       "acceptance_rate", "tokens_per_round", "peak_memory_bytes", "identical", "ties", "bugs", "moved", "mode")


def markdown(record: Record) -> str:
    table = rows(record)
    parts = ["# mlx_spec bench", _card(record), _costs(record)]
    for t in dict.fromkeys(row.arm.temperature for row in table):
        mine = [row for row in table if row.arm.temperature == t]
        parts += [f"## Temperature {t:g}", lines(HEADER, [_cells(row) for row in mine]), _acceptance(mine)]
    parts.append("Medians over the prompts [95 % bootstrap interval]; speed / plain is decoding alone, over mlx-lm's plain "
                 "decoding of the same prompt beside it, and below 1 a loss. Output: compared with plain decoding.")
    close = [abs(row.predicted / row.speedup["median"] - 1) <= 0.1 for row in table
             if row.predicted and row.speedup and row.arm.engine == OURS and row.arm.k != 0 and row.category != ALL]
    parts += [f"The speed-up was within 10 % of the predicted one in {sum(close)} of {len(close)} cells."] * bool(close)
    if any(row.moved for row in table):
        parts.append("MOVED: a fixed product, timed before every prompt, took 10 % more or less than usual beside some of "
                     "these: something else was running, or the machine was warm. Measure again, idle.")
    parts += _differences(record)
    parts += [f"Note: {note}." for note in record["notes"]]
    if not record["finished"]:
        parts.append("Interrupted: this is what was finished.")
    return "\n\n".join([*(p for p in parts if p), advice(record)]) + "\n"


def comma_separated(record: Record) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["engine", "k", "temperature", "speedup", "speedup_low", "speedup_high", *CSV])
    for row in rows(record):
        gain = row.speedup or dict.fromkeys(("median", "low", "high"))
        writer.writerow([*row.arm, gain["median"], gain["low"], gain["high"], *(getattr(row, name) for name in CSV)])
    return out.getvalue()


def lines(header: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    """A Markdown table that can be read without rendering, too."""
    table = [[str(cell) for cell in row] for row in (header, *cells)]
    widths = [max(map(len, column)) for column in zip(*table)]
    table.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in table)


def ratio(gain: dict | None) -> str:
    if gain is None:
        return "n/a"
    within = "" if gain["low"] is None else f" [{gain['low']:.2f}, {gain['high']:.2f}]"
    return f"{gain['median']:.2f}{within}"


def number(value: float | None, form: str = ".2f") -> str:
    return "n/a" if value is None else format(value, form)


def _card(record: Record) -> str:
    c = record["card"]
    gpu = f"{c['gpu_cores']} GPU cores" if c["gpu_cores"] else None
    memory = c["memory_bytes"] and readable(c["memory_bytes"])
    speed = f"memory {number(c['bandwidth_gbs'], '.0f')} GB/s measured, {number(c['bandwidth_nominal_gbs'], '.0f')} nominal"
    versions = ", ".join(f"{name} {c[name]}" for name in ("python", "mlx", "mlx_lm", "mlx_spec", "git") if c[name])
    machine = (c["chip"], gpu, memory, c["system"], f"runs on the {c['device']}", c["power"],
               "low-power mode" if c["low_power"] else None, c["blas"] and f"BLAS: {c['blas']}", speed)
    models = [f"{role}: {m['name']}{' at ' + m['revision'][:12] if m['revision'] else ''}, "
              f"{str(m['bits']) + '-bit' if m['bits'] else m['dtype']}, {readable(m['bytes'])}"
              for role in ("target", "draft") if (m := record[role])]
    load = max((run["load"] for run in record["runs"]), default=None)
    return "\n".join(["; ".join(part for part in machine if part), versions, *models,
                      f"made {record['made']}, load average {number(load, '.1f')} at most"])


def _costs(record: Record) -> str:
    costs = record["costs"]
    parts = [f"At {d['tokens']} tokens of context a target step takes {d['rows_ms'][0]:.1f} ms, "
             f"a draft step c = {number(d['c'], '.3f')} of that; a pass over 2, 3, ... rows takes v = "
             + " ".join(f"{v:.2f}" for v in d["v"][1:]) for d in costs["depths"]]
    parts += [f"A round of k={r['k']}: draft {r['draft_ms']:.1f} ms, target {r['target_ms']:.1f} ms, host {r['host_ms']:.1f} ms; "
              f"{r['evaluations']:g} evaluation and {r['reads']:g} read of the host, counted" for r in costs["rounds"]]
    parts.append(f"If memory were all: {number(costs['ceiling_plain_tps'], '.1f')} tokens/s plain, "
                 f"{number(costs['ceiling_rounds_per_s'], '.1f')} rounds/s")
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    rate = row.acceptance_rate
    kept = "n/a" if rate is None else f"{row.accepted} of {row.drafted} ({rate:.0%})"
    same = ", ".join(f"{n} {kind}" for n, kind in ((row.identical, "identical"), (row.ties, "tie"), (row.bugs, "BUG")) if n)
    memory = "n/a" if row.peak_memory_bytes is None else readable(row.peak_memory_bytes)
    return [row.category, str(row.arm), "1" if row.arm.engine == PLAIN else ratio(row.speedup), number(row.predicted),
            number(row.tps, ".1f"), number(row.end_to_end_tps, ".1f"), number(row.ttft_s), kept,
            number(row.tokens_per_round), memory, same or "n/a", _remark(row)]


def _remark(row: Row) -> str:
    said = ["BUG: no speed"] * bool(row.bugs)
    said += ["a loss"] * bool(row.speedup and round(row.speedup["median"], 2) < 1)
    said += [row.mode] * (row.arm.engine == OURS and row.arm.k != 0 and row.mode != "speculative")
    said += [f"draft prefill {number(row.draft_prompt_s)} s"] * (row.draft_prompt_s is not None)
    said += [f"{row.looked_up} drafts looked up"] * bool(row.looked_up)
    return "; ".join(said + ["MOVED"] * bool(row.moved))


def _differences(record: Record) -> list[str]:
    """Where replies part from plain decoding."""
    return [f"{found['kind']}: {run['prompt']}, {arm_of(run)}, T={run['temperature']:g}, token {found['at']}: the two best "
            f"choices differ by {found['gap']:.2g}."
            for run in record["runs"] if (found := run["identity"]) and found["kind"] != "identical"]


def _acceptance(table: Sequence[Row]) -> str:
    last = table[-1].category if table else ALL
    drafting = [row for row in table if row.category == last and row.kept]
    shown = "\n".join(f"{row.arm}: {_rates(row.kept)}; where those before stood {_rates(row.stood)}" for row in drafting)
    return shown and f"Drafts kept by place in the round, {last}:\n\n{shown}"


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
