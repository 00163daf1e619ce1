"""One PNG of records: speed-up by category, acceptance by position, v(m). Drawn with Pillow, which Gradio brings."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from .arms import OURS
from .figures import rows
from .record import Record

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe, Ito: for any eyes
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1200, 420, 80, 30, 90, 70


class Series(NamedTuple):
    """points: (x, value, low, high); low and high are None where there is no interval."""

    name: str
    points: list[tuple[int, float, float | None, float | None]]


def plot(records: Sequence[tuple[str, Record]], path: str) -> None:
    """Raises ValueError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ValueError("--plot needs Pillow: pip install pillow") from None
    panels = list(_panels(records))
    image = Image.new("RGB", (WIDTH, HEIGHT * len(panels)), "white")
    font = ImageFont.load_default(size=16)
    for i, (title, labels, series, line) in enumerate(panels):
        _Panel(ImageDraw.Draw(image), font, HEIGHT * i).draw(title, labels, series, line)
    image.save(path)


def _panels(records: Sequence[tuple[str, Record]]) -> Any:
    several = len(records) > 1
    label = lambda name, arm: f"{name}, {arm}" if several else str(arm)  # noqa: E731
    tables = [(name, [r for r in rows(record) if r.arm.engine == OURS and r.arm.k != 0]) for name, record in records]
    for t in sorted({r.arm.temperature for _, table in tables for r in table}):
        categories = list(dict.fromkeys(r.category for _, table in tables for r in table))
        found = [Series(label(name, arm), [(categories.index(r.category), *_ends(r.speedup)) for r in table if r.arm == arm and r.speedup])
                 for name, table in tables for arm in dict.fromkeys(r.arm for r in table) if arm.temperature == t]
        yield f"Speed over mlx-lm's plain decoding, temperature {t:g} (95 % intervals)", categories, found, 1.0
        stood = [Series(label(name, r.arm), [(i, rate, None, None) for i, rate in enumerate(r.stood)]) for name, table in tables
                 for r in table if r.category == categories[-1] and r.arm.temperature == t]
        yield (f"Drafts kept where those before stood, by position, temperature {t:g}",
               [str(i + 1) for i in range(max((len(s.points) for s in stood), default=0))], stood, None)
    costs = [Series(f"{name}, {d['tokens']} tokens" if several else f"at {d['tokens']} tokens of context",
                    [(i, v, None, None) for i, v in enumerate(d["v"])]) for name, r in records for d in r["costs"]["depths"]]
    yield "v(m): a pass of the target over m rows, in single steps", [str(i + 1) for i in range(max(len(s.points) for s in costs))], costs, 1.0


def _ends(gain: dict) -> tuple[float, float | None, float | None]:
    return gain["median"], gain["low"], gain["high"]


class _Panel:
    """Axes from 0, a line where nothing is gained, a point with its interval for each value."""

    def __init__(self, pen: Any, font: Any, top: int) -> None:
        self.pen, self.font, self.top, self.highest = pen, font, top + TOP, 1.0

    def y(self, value: float) -> float:
        return self.top + (HEIGHT - TOP - BOTTOM) * (1 - value / self.highest)

    def draw(self, title: str, labels: Sequence[str], series: Sequence[Series], line: float | None) -> None:
        values = [v for s in series for _, mid, _, high in s.points for v in (mid, high or mid)]
        self.highest = 1.1 * max([*values, line or 0.5])
        self.pen.text((LEFT, self.top - TOP + 12), title, "black", self.font)
        step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 100) if self.highest / s <= 8)
        for value, colour in [*((i * step, "#dddddd") for i in range(int(self.highest / step) + 1)), (line, "black")]:
            if value is not None:
                y = self.y(value)
                self.pen.line((LEFT, y, WIDTH - RIGHT, y), colour)
                self.pen.text((LEFT - 12, y), f"{value:g}", "black", self.font, anchor="rm")
        slot = (WIDTH - LEFT - RIGHT) / max(len(labels), 1)
        for i, text in enumerate(labels):
            self.pen.text((LEFT + slot * (i + 0.5), self.y(0) + 22), text, "black", self.font, anchor="mm")
        x = LEFT
        for n, one in enumerate(series):
            colour = COLOURS[n % len(COLOURS)]
            self.pen.rectangle((x, self.top - TOP + 44, x + 12, self.top - TOP + 56), colour)
            self.pen.text((x + 18, self.top - TOP + 50), one.name, "black", self.font, anchor="lm")
            x += 40 + self.pen.textlength(one.name, self.font)
            self._points(one, colour, slot, (n - (len(series) - 1) / 2) * min(18, slot / (len(series) + 1)) * (line is not None and any(p[2] for p in one.points)))

    def _points(self, series: Series, colour: str, slot: float, aside: float) -> None:
        for i, value, low, high in series.points:
            x, y = LEFT + slot * (i + 0.5) + aside, self.y(value)
            if low is not None:
                self.pen.line((x, self.y(low), x, self.y(high)), colour, 3)
            if low is None and i + 1 < len(series.points):  # a curve
                self.pen.line((x, y, x + slot, self.y(series.points[i + 1][1])), colour, 2)
            self.pen.ellipse((x - 5, y - 5, x + 5, y + 5), colour)
