"""A reply's figures: the line above each column, the verdict, the plots' rows, a row to copy.

Takes a Reply of arena.py as it is at some moment. A figure that is not known is a dash.
"""

from __future__ import annotations

import json
import platform
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..types import Stats
from .text import escape

PLAIN, SPECULATIVE = "plain", "speculative"
NOTHING = "–"
NOISE = 0.02  # a difference that one race can't tell
FEW, FEW_YET = 4, 8  # with fewer tokens, at the end or under way, a speed is the clock's noise


def shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def head_html(name: str, view: Any, k: int | str) -> str:
    """A column's name, speed and counts."""
    stats = view.stats if view is not None else Stats()
    facts = [("first token", shown(stats.ttft_s, "{:.2f} s")), ("tokens", stats.generation_tokens)]
    if name == SPECULATIVE:
        used = f"auto, {stats.drafted / stats.rounds:.1f} on average" if k == "auto" and stats.rounds else k
        facts += [("accepted", shown(stats.acceptance_rate, "{:.0%}")),
                  ("tokens a round", shown(stats.tokens_per_round, "{:.2f}")), ("", f"k {used}")]
    memory = stats.peak_memory_bytes
    facts.append(("peak memory", shown(memory and memory / 1e9, "{:.2f} GB")))
    cells = "".join(f"<span><b>{value}</b> {label}</span>" for label, value in facts)
    return (f'<div class="lane {name}"><span class="name">{name}</span><span class="speed">'
            f'<b>{shown(stats.generation_tps, "{:.1f}")}</b> tokens/s</span></div><div class="facts">{cells}</div>')


def verdict(reply: Any) -> tuple[str, str]:
    """(class for its colour, sentence); the class is won, lost, bad or open."""
    if len(reply.lanes) < 2:
        return "open", ""
    short = min(view.stats.generation_tokens for view in reply.lanes.values()) < (FEW if reply.done else FEW_YET)
    speed, kind = ("too short to time", "open") if short else speed_of(reply.speedup)
    if not reply.done:
        return kind, f"{speed} so far" if speed else ""
    if reply.verdict is not None and reply.verdict.kind == "BUG":
        kind, said = "bad", f"{reply.verdict}: a bug, please report it"
    elif any(view.finish_reason == "cancelled" for view in reply.lanes.values()):
        said = "stopped"
    else:
        said = str(reply.verdict or "not compared") if reply.comparable else "texts are not comparable token by token"
    if kind != "bad" and reply.lanes[SPECULATIVE].stats.mode.startswith("plain"):
        kind, speed = "open", "both columns are plain decoding"
    return kind, " · ".join(filter(None, (speed, said)))


def speed_of(speedup: float | None) -> tuple[str, str]:
    if not speedup:
        return "", "open"
    if abs(speedup - 1) < NOISE:
        return "as fast as plain", "open"
    return (f"{speedup:.2f}x faster", "won") if speedup > 1 else (f"{1 / speedup:.2f}x slower here", "lost")


def gain(advice: Any) -> str:
    """What a draft is predicted to bring."""
    return f"{advice.speedup:.2f}x predicted, k = {advice.k}" if advice.helps else "no gain predicted"


def verdict_html(reply: Any) -> str:
    kind, sentence = verdict(reply) if reply is not None else ("open", "")
    first, dot, rest = sentence.partition(" · ")
    return f'<div class="verdict {kind}" role="status"><b>{escape(first)}</b>{escape(dot + rest)}</div>' if sentence else ""


def trail_rows(reply: Any, most: int = 150) -> list[tuple[float, int, str]]:
    """(device seconds, tokens, column), thinned so that a long reply draws as quickly."""
    rows = []
    for name, view in reply.lanes.items():
        step = max(1, len(view.trail) // most)
        rows += [(round(s, 3), n, name) for s, n in [(0.0, 0), *view.trail[::step], *view.trail[-1:]]]
    return rows


def acceptance_rows(reply: Any) -> list[tuple[str, float]]:
    """(position in the round, percent accepted of what was drafted there)."""
    view = reply.lanes.get(SPECULATIVE)
    counts = zip(view.stats.drafted_by_position, view.stats.accepted_by_position) if view else ()
    return [(str(i + 1), round(100 * accepted / drafted, 1)) for i, (drafted, accepted) in enumerate(counts) if drafted]


@lru_cache(maxsize=1)
def machine() -> dict[str, str]:
    import mlx.core as mx

    versions = f"mlx-spec {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return {"chip": mx.device_info()["device_name"], "system": f"{platform.system()} {platform.release()}", "versions": versions}


def record(reply: Any, pair: str) -> dict[str, Any]:
    """What somebody needs to compare this result with theirs."""
    stats = {name: view.stats for name, view in reply.lanes.items()}
    plain, speculative = stats.get(PLAIN, Stats()), stats.get(SPECULATIVE, Stats())
    figures = {"plain_tokens_per_s": plain.generation_tps, "speculative_tokens_per_s": speculative.generation_tps,
               "speedup": reply.speedup, "acceptance_rate": speculative.acceptance_rate}
    return machine() | {
        "pair": pair, "k": reply.options.num_draft_tokens, "verify": reply.options.verify,
        "temperature": reply.options.temperature, "seed": reply.seed,
        **{name: value and round(value, 3) for name, value in figures.items()}, "verdict": verdict(reply)[1],
    }


def row_markdown(found: dict[str, Any]) -> str:
    cells = [NOTHING if v is None else " ".join(str(v).replace("|", r"\|").split()) for v in found.values()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (list(found), ["---"] * len(found), cells))


def row_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False)
