"""One PNG of records: speed-up by category, acceptance by position, v(m). Drawn with Pillow, which Gradio brings."""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple, Sequence

from .arms import OURS
from .figures import ALL, rows
from .record import Record

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe, Ito: for any eyes
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1200, 420, 80, 30, 90, 70
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # of an axis

# x, value, and the ends of its interval where it has one
Point = tuple[int, float, float | None, float | None]


class Panel(NamedTuple):
    """lines: values that get a line across, beside the grid; curve: points are joined."""

    title: str
    labels: list[str]
    series: dict[str, list[Point]]
    lines: Sequence[float] = ()
    curve: bool = True


def plot(records: Sequence[tuple[str, Record]], path: str) -> None:
    """Raises ValueError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ValueError("--plot needs Pillow: pip install pillow") from None
    found = list(panels(records))
    image = Image.new("RGB", (WIDTH, HEIGHT * len(found)), "white")
    pen = ImageDraw.Draw(image)
    pen.font = ImageFont.load_default(size=16)
    for i, panel in enumerate(found):
        _draw(pen, panel, HEIGHT * i + TOP)
    pen.text((LEFT, image.height - 26), "Measured on: " + "; ".join(_machines(records)), "black")
    image.save(path)


def _machines(records: Sequence[tuple[str, Record]]) -> list[str]:
    cards = [record["card"] for _, record in records]
    return list(dict.fromkeys(f"{c['chip'] or 'unknown chip'}, {c['system']}, {c['device']}" for c in cards))


def panels(records: Sequence[tuple[str, Record]]) -> Iterator[Panel]:
    """For each temperature speed-ups and acceptance, then the target's cost by rows."""
    label = (lambda name, what: f"{name}, {what}") if len(records) > 1 else (lambda name, what: str(what))
    table = [(label(name, r.arm), r) for name, record in records for r in rows(record) if r.arm.engine == OURS and r.arm.k != 0]
    for t in sorted({r.arm.temperature for _, r in table}):
        mine = [(name, r) for name, r in table if r.arm.temperature == t]
        kinds = sorted(dict.fromkeys(r.category for _, r in mine), key=ALL.__eq__)
        gains: dict[str, list[Point]] = {name: [] for name, _ in mine}
        for name, r in mine:
            gains[name] += [(kinds.index(r.category), *(r.speedup[n] for n in ("median", "low", "high")))] if r.speedup else []
        yield Panel(f"Speed over mlx-lm's plain decoding, temperature {t:g} (95 % intervals)", kinds, gains, [1.0], False)
        stood = {name: _points(r.stood) for name, r in mine if r.category == kinds[-1]}
        yield Panel(f"Drafts kept where those before stood, by position, temperature {t:g}", _numbers(stood), stood)
    costs = {label(name, f"{d['tokens']} tokens of context"): _points(d["v"]) for name, r in records for d in r["costs"]["depths"]}
    yield Panel("v(m): a pass of the target over m rows, in single steps", _numbers(costs), costs, [1.0])


def _points(values: Sequence[float]) -> list[Point]:
    return [(i, value, None, None) for i, value in enumerate(values)]


def _numbers(series: dict[str, list[Point]]) -> list[str]:
    return [str(i + 1) for i in range(max(map(len, series.values()), default=0))]


def _draw(pen: Any, panel: Panel, top: int) -> None:
    """Axes from 0 up to the largest value, then the series."""
    highest = 1.1 * max([0.5, *panel.lines, *(p[3] or p[1] for points in panel.series.values() for p in points)])
    y_of = lambda value: top + (HEIGHT - TOP - BOTTOM) * (1 - value / highest)  # noqa: E731
    step = next((s for s in STEPS if highest / s <= 8), highest)
    grid = [(i * step, "#dddddd") for i in range(int(highest / step) + 1)] + [(line, "black") for line in panel.lines]
    pen.text((LEFT, top - TOP + 12), panel.title, "black")
    for value, colour in grid:
        pen.line((LEFT, y_of(value), WIDTH - RIGHT, y_of(value)), colour)
        pen.text((LEFT - 12, y_of(value)), f"{value:g}", "black", anchor="rm")
    slot, x = (WIDTH - LEFT - RIGHT) / max(len(panel.labels), 1), LEFT
    for i, text in enumerate(panel.labels):
        pen.text((LEFT + slot * (i + 0.5), y_of(0) + 22), text, "black", anchor="mm")
    apart = 0 if panel.curve else min(18, slot / (len(panel.series) + 1))
    for n, (name, points) in enumerate(panel.series.items()):
        colour, aside = COLOURS[n % len(COLOURS)], apart * (n - (len(panel.series) - 1) / 2)
        pen.rectangle((x, top - TOP + 44, x + 12, top - TOP + 56), colour)
        pen.text((x + 18, top - TOP + 50), name, "black", anchor="lm")
        x += 40 + pen.textlength(name)
        _series(pen, [(LEFT + slot * (i + 0.5) + aside, *rest) for i, *rest in points], y_of, colour, panel.curve)


def _series(pen: Any, points: Sequence[tuple], y_of: Callable[[float], float], colour: str, curve: bool) -> None:
    if curve and len(points) > 1:
        pen.line([(x, y_of(value)) for x, value, *_ in points], colour, 2)
    for x, value, low, high in points:
        if low is not None:
            pen.line((x, y_of(low), x, y_of(high)), colour, 3)
        pen.ellipse((x - 5, y_of(value) - 5, x + 5, y_of(value) + 5), colour)
