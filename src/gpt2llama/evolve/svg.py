"""SVG text: colours, scales, and the few shapes the charts are made of."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .words import fixed

Point = tuple[float, float]

# On light, on dark. The three verdicts stay apart for the colour-blind, and have shapes of their
# own: blue disc, orange square, grey ring, grey cross.
COLORS = {
    "paper": ("#ffffff", "#15181b"),
    "ink": ("#1c2024", "#e9ebed"),
    "soft": ("#5b646e", "#a4adb6"),
    "rule": ("#e1e5e9", "#30363c"),
    "helps": ("#0a63a5", "#62b2ee"),
    "hurts": ("#b34a05", "#f29a5c"),
    "neutral": ("#69737d", "#99a3ad"),
}
_FONT = "font-family=\"system-ui, -apple-system, 'Noto Sans CJK SC', sans-serif\""
_RAMP = ((116, 84, 184), (46, 132, 190), (40, 150, 118), (208, 120, 38))  # first rung to last


def style() -> str:
    """The classes the charts use: `ink` fills with that colour, `ink-line` draws with it."""

    def rules(dark: bool) -> str:
        return "".join(
            f".{name}{{fill:{pair[dark]}}}.{name}-line{{stroke:{pair[dark]};fill:none}}"
            for name, pair in COLORS.items()
        )

    return f"{rules(False)}@media(prefers-color-scheme:dark){{{rules(True)}}}"


def rung_color(i: int, n: int) -> str:
    """The i-th of n colours from violet to orange, each readable on light and on dark."""
    place = i / max(1, n - 1) * (len(_RAMP) - 1)
    k = min(int(place), len(_RAMP) - 2)
    pairs = zip(_RAMP[k], _RAMP[k + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - k)):02x}" for a, b in pairs)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places pushed apart to lie at least `gap` from each other, between low and high.

    Their order stays; where there is no room for the gap, they lie evenly.
    """
    gap = min(gap, (high - low) / max(1, len(places) - 1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    out = [0.0] * len(places)
    least = low
    for i in order:
        out[i] = max(places[i], least)
        least = out[i] + gap
    most = high
    for i in reversed(order):
        out[i] = min(out[i], most)
        most = out[i] - gap
    return out


@dataclass(frozen=True)
class Scale:
    """From values low..high to pixels start..end; y grows downwards, so its start is below."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Scale:
        """All values, and a little more on either side."""
        spare = 0.06 * (max(values) - min(values)) or 0.01
        return cls(min(values) - spare, max(values) + spare, start, end)

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def step(self, count: int) -> float:
        """The smallest of 1, 2, 5 · 10ⁿ that gives at most `count` intervals."""
        least = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(least))
        return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))

    def ticks(self, count: int) -> list[float]:
        step = self.step(count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def write(self, tick: float, count: int = 5) -> str:
        return fixed(tick, max(0, -math.floor(math.log10(self.step(count)) + 1e-9)))


def grid(
    x: Scale, y: Scale, name: str, x_ticks: list[float] | None = None, count: int = 5
) -> list[str]:
    """Ticks, lines across for those of y, and the name of the x axis."""
    out = []
    for tick in y.ticks(count):
        out.append(line(x.start, y(tick), x.end, y(tick), "rule"))
        out.append(text(x.start - 6, y(tick) + 4, y.write(tick, count), "soft", 10, "end"))
    out += [
        text(x(tick), y.start + 15, x.write(tick), "soft", 10, "middle")
        for tick in (x.ticks(5) if x_ticks is None else x_ticks)
    ]
    out.append(text((x.start + x.end) / 2, y.start + 31, name, "soft", 11, "middle"))
    return out


def points(values: Iterable[Point], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in values)


def polyline(values: Iterable[Point], x: Scale, y: Scale, color: str, more: str = "") -> str:
    return (
        f'<polyline points="{points(values, x, y)}" fill="none" stroke="{color}" '
        f'stroke-width="1.6" stroke-linejoin="round"{more}/>'
    )


def text(
    x: float,
    y: float,
    content: str,
    color: str = "ink",
    size: int = 12,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    more = "" if weight == 400 else f' font-weight="{weight}"'
    more += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{color}" font-size="{size}"{more}>'
        f"{escape(content)}</text>"
    )


def line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1, dash: str = ""
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{color}-line" '
        f'stroke-width="{width}"{dashed}/>'
    )


def drawing(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(label)}" {_FONT} '
        f'style="font-variant-numeric:tabular-nums">{"".join(parts)}</svg>'
    )


def window(x: Scale, y: Scale, parts: Iterable[str]) -> str:
    """The parts, cut at the edges of the plot: an <svg> within shows nothing outside its box."""
    left, top, width, height = x.start, y.end, x.end - x.start, y.start - y.end
    return (
        f'<svg x="{left}" y="{top}" width="{width}" height="{height}" '
        f'viewBox="{left} {top} {width} {height}">{"".join(parts)}</svg>'
    )


def fit(text: str, width: float, size: int) -> str:
    """The text, cut with `…` where it would be wider than `width` pixels, by a rough measure."""
    room = width / size
    for i, char in enumerate(text):
        room -= 1.0 if unicodedata.east_asian_width(char) in "WF" else 0.56
        if room < 0:
            return text[: max(0, i - 1)] + "…"
    return text
