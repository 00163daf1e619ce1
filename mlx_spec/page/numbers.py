"""A reply's figures: the line above each column, the verdict, the plots' rows, a row to copy.

Takes a Reply of arena.py as it is at some moment. A figure that is not known is a dash.
"""

from __future__ import annotations

import json
import platform
import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .text import escape

PLAIN, SPECULATIVE = "plain", "speculative"
NOTHING = "–"
NOISE = 0.02  # a difference that one race can't tell


def shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def head_html(name: str, view: Any, k: int) -> str:
    """A column's name, speed and counts."""
    stats = getattr(view, "stats", None)
    facts = [("first token", shown(stats and stats.ttft_s, "{:.2f} s")),
             ("tokens", shown(stats and stats.generation_tokens, "{}"))]
    if name == SPECULATIVE:
        facts += [("accepted", shown(stats and stats.acceptance_rate, "{:.0%}")),
                  ("tokens a round", shown(stats and stats.tokens_per_round, "{:.2f}")), ("", f"k {k}")]
    memory = stats and stats.peak_memory_bytes
    facts.append(("peak memory", shown(memory and memory / 1e9, "{:.2f} GB")))
    cells = "".join(f"<span><b>{value}</b> {label}</span>" for label, value in facts)
    speed = shown(stats and stats.generation_tps, "{:.1f}")
    return (f'<div class="lane {name}"><span class="name">{name}</span>'
            f'<span class="speed"><b>{speed}</b> tokens/s</span></div><div class="facts">{cells}</div>')


def verdict(reply: Any) -> tuple[str, str]:
    """(class for its colour, sentence); the class is won, lost, bad or open."""
    if len(reply.lanes) < 2:
        return "open", ""
    speed, kind = speed_of(reply.speedup)
    if not reply.done:
        return kind, f"{speed} so far" if speed else ""
    plainly = reply.lanes[SPECULATIVE].stats.mode
    if reply.verdict is not None and reply.verdict.kind == "BUG":
        return "bad", " · ".join(filter(None, (speed, f"{reply.verdict}: a bug, please report it")))
    if any(v.finish_reason == "cancelled" for v in reply.lanes.values()):
        said = "stopped"
    elif not reply.comparable:
        said = "texts are not comparable token by token"
    else:
        said = str(reply.verdict) if reply.verdict is not None else "not compared"
    if plainly.startswith("plain"):
        return "open", f"both columns are plain decoding · {said}"
    return kind, " · ".join(filter(None, (speed, said)))


def speed_of(speedup: float | None) -> tuple[str, str]:
    if not speedup:
        return "", "open"
    if abs(speedup - 1) < NOISE:
        return "as fast as plain", "open"
    return (f"{speedup:.2f}x faster", "won") if speedup > 1 else (f"{1 / speedup:.2f}x slower here", "lost")


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
def machine() -> str:
    """The chip's name."""
    try:
        if platform.system() == "Darwin":
            return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def versions() -> str:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "?"

    return ", ".join(f"{name} {of(name)}" for name in ("mlx-spec", "mlx", "mlx-lm"))


def record(reply: Any, pair: str) -> dict[str, Any]:
    """What somebody needs to compare this result with theirs."""
    lanes = {name: view.stats for name, view in reply.lanes.items()}
    speculative = lanes.get(SPECULATIVE)

    def tps(name: str) -> float | None:
        rate = lanes[name].generation_tps if name in lanes else None
        return rate and round(rate, 2)

    rate = speculative and speculative.acceptance_rate
    return {
        "chip": machine(), "system": f"{platform.system()} {platform.release()}", "versions": versions(), "pair": pair,
        "k": reply.options.num_draft_tokens, "verify": reply.options.verify,
        "temperature": reply.options.temperature, "seed": reply.seed, "plain_tokens_per_s": tps(PLAIN),
        "speculative_tokens_per_s": tps(SPECULATIVE), "speedup": reply.speedup and round(reply.speedup, 3),
        "acceptance_rate": rate and round(rate, 4), "verdict": verdict(reply)[1],
    }


def row_markdown(found: dict[str, Any]) -> str:
    cells = [NOTHING if v is None else " ".join(str(v).replace("|", r"\|").split()) for v in found.values()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (list(found), ["---"] * len(found), cells))


def row_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False)
