"""The report's charts as SVG text. Colours are classes, so that one drawing serves light and dark.

Each function takes the results (see report.py) and the words of one language.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .sentences import Results, Rung, interval, lengths, mean, title, verdict
from .words import WORDS, Words, fixed, percent, signed

Point = tuple[float, float]
Band = list[tuple[float, float, float, float]]  # (x, mean, lowest, highest), one a held-out test

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
WORSE = 0.1  # nats per token beyond the trained length's mean: a line that breaks


def style() -> str:
    """The classes the charts use: `ink` fills with that colour, `ink-line` draws with it."""

    def rules(dark: bool) -> str:
        return "".join(
            f".{name}{{fill:{pair[dark]}}}.{name}-line{{stroke:{pair[dark]};fill:none}}"
            for name, pair in COLORS.items()
        )

    return f"{rules(False)}@media(prefers-color-scheme:dark){{{rules(True)}}}"


def ladder_svg(results: Results, language: str = "en") -> str:
    """The ladder chart as a file of its own, readable on any background (it brings its paper)."""
    words = WORDS[language]
    chart, width, height = _ladder(results, words, _WIDE)
    head = [
        f"<style>{style()}</style>",
        f'<rect width="{width + 48}" height="{height + 92}" rx="8" class="paper"/>',
        _text(24, 36, title(results, words), size=17, weight=600),
        _text(24, 58, ladder_text(results, words), "soft"),
        f'<g transform="translate(24 76)">{chart}</g>',
    ]
    return _svg(width + 48, height + 92, title(results, words), head) + "\n"


def ladder_text(results: Results, words: Words) -> str:
    return words["ladder_text"].format(confidence=percent(results["statistics"]["confidence"]))


def ladder_chart(results: Results, words: Words, *, narrow: bool = False) -> str:
    """A row per rung: the paired difference and its interval, the absolute loss beside it."""
    chart, width, height = _ladder(results, words, _NARROW if narrow else _WIDE)
    return _svg(width, height, words["ladder"], [chart])


@dataclass(frozen=True, kw_only=True)
class _Ladder:
    """Where things stand in the ladder chart; y counts from the top of a rung's row."""

    width: int
    row: int
    plot: tuple[int, int]  # left and right
    plot_y: int
    name_width: int
    loss: Point  # right end of the text, as the next
    difference: Point
    interval: Point | None
    verdict: Point


_WIDE = _Ladder(
    width=960,
    row=46,
    plot=(240, 600),
    plot_y=22,
    name_width=220,
    loss=(690, 20),
    difference=(778, 20),
    interval=(960, 20),
    verdict=(960, 38),
)
_NARROW = _Ladder(
    width=340,
    row=86,
    plot=(14, 326),
    plot_y=50,
    name_width=190,
    loss=(268, 16),
    difference=(340, 16),
    interval=None,
    verdict=(340, 72),
)


def _ladder(results: Results, words: Words, at: _Ladder) -> tuple[str, int, int]:
    rungs, top = results["rungs"], 30
    bottom = top + at.row * len(rungs)
    ends = [rung[key] for rung in rungs for key in ("difference", "low", "high")]
    x = _Scale.around([0.0, *(end for end in ends if end is not None)], *at.plot)
    out = [
        _text(at.loss[0], 14, words["bits_per_byte"], "soft", 11, "end"),
        _text(at.difference[0], 14, words["difference"], "soft", 11, "end"),
    ]
    if at.interval:
        confidence = percent(results["statistics"]["confidence"])
        header = words["interval"].format(confidence=confidence)
        out.append(_text(at.interval[0], 14, header, "soft", 11, "end"))
    for tick in x.ticks(5):
        zero = abs(tick) < 1e-12
        out.append(_line(x(tick), top, x(tick), bottom, "soft" if zero else "rule"))
        out.append(_text(x(tick), bottom + 17, x.write(tick), "soft", 11, "middle"))
    for i, rung in enumerate(rungs):
        above = rungs[i - 1]["name"] if i else None
        moved = f'<g transform="translate(0 {top + i * at.row})">'
        out.append(moved + _rung(rung, above, results, words, x, at) + "</g>")
    left, right = at.plot
    out += [
        _text(left, bottom + 36, words["better"], "helps", 11),
        _text(right, bottom + 36, words["worse"], "hurts", 11, "end"),
        _text((left + right) / 2, bottom + 36, words["ladder_axis"], "soft", 11, "middle"),
    ]
    return "".join(out), at.width, bottom + 44


def _rung(
    rung: Rung, above: str | None, results: Results, words: Words, x: _Scale, at: _Ladder
) -> str:
    change = rung["change"]
    if rung["previous"] not in (None, above):  # of a design other than the ladder
        change = f"{change}, {words['versus'].format(previous=rung['previous'])}"
    color = _verdict_color(rung["verdict"])
    said = verdict(rung, results, words)
    out = [
        _line(0, 0, at.width, 0, "rule"),
        _text(0, at.loss[1], _fit(rung["name"], at.name_width, 13), size=13, weight=600),
        _text(0, at.loss[1] + 17, _fit(change, max(at.name_width, at.plot[0]), 11), "soft", 11),
        _text(*at.loss, fixed(rung["bits_per_byte"]), size=12, anchor="end"),
        _text(*at.difference, signed(rung["difference"]), color, 12, "end", 600),
        _text(*at.verdict, said, color, 11, "end"),
    ]
    if at.interval:
        out.append(_text(*at.interval, interval(rung), "soft", 12, "end"))
    if rung["difference"] is not None:
        y, tip = at.plot_y, f"{rung['name']}: {signed(rung['difference'])} {interval(rung)}, {said}"
        mark = _mark(x(rung["difference"]), y, rung["verdict"])
        if rung["low"] is not None:
            low, high = x(rung["low"]), x(rung["high"])
            mark = (
                _line(low, y, high, y, color, 2)
                + "".join(_line(end, y - 4, end, y + 4, color, 2) for end in (low, high))
                + mark
            )
        out.append(f'<g data-tip="{escape(tip)}">{mark}</g>')
    return "".join(out)


def _verdict_color(name: str | None) -> str:
    return name if name in ("helps", "hurts") else "neutral"


def _mark(x: float, y: float, name: str | None) -> str:
    color = _verdict_color(name)
    if name == "helps":
        return f'<circle cx="{x:.1f}" cy="{y}" r="5.5" class="{color}"/>'
    if name == "hurts":
        return f'<rect x="{x - 5:.1f}" y="{y - 5}" width="10" height="10" class="{color}"/>'
    if name == "not comparable":
        path = f"M{x - 5:.1f} {y - 5}l10 10m0 -10l-10 10"
        return f'<path d="{path}" class="{color}-line" stroke-width="2"/>'
    return (
        f'<circle cx="{x:.1f}" cy="{y}" r="5" class="paper"/>'
        f'<circle cx="{x:.1f}" cy="{y}" r="5" class="{color}-line" stroke-width="2"/>'
    )


def curve_chart(results: Results, words: Words, axis: str) -> str:
    """Held-out bits per byte against `steps`, `flops` or `seconds`; seeds as a band."""
    width, height, left, right, top, bottom = 340, 320, 44, 92, 14, 44
    rungs = results["rungs"]
    bands = [_band(rung, results, axis) for rung in rungs]
    reach = max((band[-1][0] for band in bands if band), default=1.0)
    settled = [v for band in bands for x, *values in band if x >= band[-1][0] / 4 for v in values]
    settled = settled or [0.0, 1.0]
    spare = 0.05 * (max(settled) - min(settled)) or 0.05
    y = _Scale(min(settled) - spare, max(settled) + spare, height - bottom, top)
    power = math.floor(math.log10(reach)) if axis == "flops" else 0
    x = _Scale(0.0, reach / 10**power, left, width - right)
    name = words[f"axis_{axis}"] + (f", ×10{str(power).translate(_RAISED)}" if power else "")
    inside = [
        _curve(rung, band, results, axis, 10**power, x, y, rung_color(i, len(rungs)))
        for i, (rung, band) in enumerate(zip(rungs, bands, strict=True))
    ]
    out = [
        *_grid(x, y, name),
        # An <svg> within shows nothing outside its box: curves start far above it.
        f'<svg x="{left}" y="{top}" width="{width - left - right}" height="{height - top - bottom}"'
        f' viewBox="{left} {top} {width - left - right} {height - top - bottom}">',
        *inside,
        "</svg>",
    ]
    drawn = [(i, band[-1]) for i, band in enumerate(bands) if band]
    places = spread([y(end[1]) for _, end in drawn], 13.5, top + 4, height - bottom)
    for (i, end), place in zip(drawn, places, strict=True):
        color, edge = rung_color(i, len(rungs)), width - right
        path = f"M{x(end[0] / 10**power) + 1:.1f} {y(end[1]):.1f}L{edge} {y(end[1]):.1f}"
        path += f"L{edge + 8} {place:.1f}"
        out.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="0.6"/>')
        label = _fit(rungs[i]["name"], right - 12, 11)
        out.append(_text(edge + 11, place + 4, label, "ink", 11))
    return _svg(width, height, f"{words['curves']}: {words[f'axis_{axis}']}", out)


def _band(rung: Rung, results: Results, axis: str) -> Band:
    """The seeds that did not diverge; x in `axis`, its mean where they differ in it."""
    at_step: dict[int, list[Point]] = {}
    for run in rung["runs"]:
        if not run["diverged"]:
            for step, point in _curve_points(run, rung, results, axis):
                at_step.setdefault(step, []).append(point)
    return [
        (sum(x for x, _ in points) / len(points), sum(ys) / len(ys), min(ys), max(ys))
        for _, points in sorted(at_step.items())
        if (ys := [y for _, y in points])
    ]


def _curve_points(run: Rung, rung: Rung, results: Results, axis: str) -> list[tuple[int, Point]]:
    """(step, (x, bits per byte)) of one run."""
    import numpy as np

    held_out = [(step, value) for step, value in run["held_out_curve"] if value is not None]
    if axis == "seconds":
        steps, seconds = [row[0] for row in run["curve"]], [row[2] for row in run["curve"]]
        if not steps:
            return []
        at = [float(np.interp(step, [0, *steps], [0, *seconds])) for step, _ in held_out]
    else:
        per_step = results["tokens"] / results["steps"] * rung["flops_per_token"]
        at = [step * (per_step if axis == "flops" else 1) for step, _ in held_out]
    return [(step, (x, value)) for x, (step, value) in zip(at, held_out, strict=True)]


def _curve(
    rung: Rung,
    band: Band,
    results: Results,
    axis: str,
    unit: float,
    x: _Scale,
    y: _Scale,
    color: str,
) -> str:
    out = ['<g class="series">']
    if band:
        around = [(at, high) for at, _, _, high in band] + [(at, low) for at, _, low, _ in band][
            ::-1
        ]
        points = _points(((at / unit, value) for at, value in around), x, y)
        out.append(f'<polygon points="{points}" fill="{color}" fill-opacity="0.16"/>')
        tip = f"{rung['name']}: {fixed(band[-1][1])} [{fixed(band[-1][2])}, {fixed(band[-1][3])}]"
        line = _polyline([(at / unit, middle) for at, middle, _, _ in band], x, y, color)
        out.append(f'<g data-tip="{escape(tip)}">{line}</g>')
    for run in rung["runs"]:
        if run["diverged"]:
            lost = [(at / unit, v) for _, (at, v) in _curve_points(run, rung, results, axis)]
            out.append(_polyline(lost, x, y, color, ' stroke-dasharray="3 3"'))
    return "".join([*out, "</g>"])


def position_chart(rung: Rung, results: Results, words: Words) -> str:
    """Nats per token by position for one rung, a line per text length; grey where it breaks."""
    width, height, left, right, top, bottom = 214, 170, 34, 12, 30, 34
    trained, *_, longest = sizes = lengths(results)
    known = [v for r in results["rungs"] for v in r["by_position"].get(str(trained)) or []]
    known = known or [0.0, 1.0]
    y = _Scale(math.floor(2 * min(known)) / 2, max(known) + 0.5, height - bottom, top)
    x = _Scale(0.0, float(longest), left, width - right)
    grid = _grid(x, y, words["position_axis"], [float(size) for size in sizes], 3)
    out = [
        _text(0, 14, _fit(rung["name"], width, 12), size=12, weight=600),
        *grid,
        _line(x(trained), top, x(trained), height - bottom, "soft", 1, "1.5 3"),
        f'<svg x="{left}" y="{top}" width="{width - left}" height="{height - top - bottom}"'
        f' viewBox="{left} {top} {width - left} {height - top - bottom}">',
    ]
    within = mean(rung["by_position"].get(str(trained)))
    for n, size in enumerate(sizes):
        if losses := rung["by_position"].get(str(size)):
            color = "neutral" if breaks(losses, size, trained, within) else "helps"
            each = size / len(losses)
            points = [((i + 0.5) * each, loss) for i, loss in enumerate(losses)]
            path = _points(points, x, y)
            tip = f"{rung['name']}, {size}: {fixed(mean(losses))} {words['nats']}"
            out.append(
                f'<g data-tip="{escape(tip)}"><polyline points="{path}" class="{color}-line" '
                f'stroke-width="{2.4 - 0.6 * n:.1f}" stroke-linejoin="round"/></g>'
            )
    out.append("</svg>")
    lacking = [size for size in sizes if not rung["by_position"].get(str(size))]
    if lacking and lacking[0] > trained:
        note = words["undefined"].format(trained=trained)
    else:
        note = words["not_measured"] if lacking else ""
    out.append(_text(width - right, height - bottom - 6, note, "neutral", 10, "end"))
    return _svg(width, height, f"{words['positions']}: {rung['name']}", out)


def breaks(losses: Sequence[float], size: int, trained: int, within: float | None) -> bool:
    """Whether, in a text of `size` tokens, the mean loss beyond `trained` is clearly worse."""
    beyond = [v for i, v in enumerate(losses) if (i + 0.5) * size / len(losses) > trained]
    return bool(beyond) and within is not None and sum(beyond) / len(beyond) > within + WORSE


def rung_color(i: int, n: int) -> str:
    """The i-th of n colours from violet to orange, each readable on light and on dark."""
    place = i / max(1, n - 1) * (len(_RAMP) - 1)
    k = min(int(place), len(_RAMP) - 2)
    pairs = zip(_RAMP[k], _RAMP[k + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - k)):02x}" for a, b in pairs)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved as little as need be to lie `gap` apart between low and high.

    In the order they had; where they cannot all fit, they lie evenly.
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
class _Scale:
    """From values low..high to pixels start..end."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> _Scale:
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


def _grid(
    x: _Scale, y: _Scale, name: str, x_ticks: list[float] | None = None, count: int = 5
) -> list[str]:
    out = []
    for tick in y.ticks(count):
        out.append(_line(x.start, y(tick), x.end, y(tick), "rule"))
        out.append(_text(x.start - 6, y(tick) + 4, y.write(tick, count), "soft", 10, "end"))
    out += [
        _text(x(tick), y.start + 15, x.write(tick, 4), "soft", 10, "middle")
        for tick in (x.ticks(4) if x_ticks is None else x_ticks)
    ]
    out.append(_text((x.start + x.end) / 2, y.start + 31, name, "soft", 11, "middle"))
    return out


_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def _points(points: Iterable[Point], x: _Scale, y: _Scale) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)


def _polyline(points: Sequence[Point], x: _Scale, y: _Scale, color: str, more: str = "") -> str:
    return (
        f'<polyline points="{_points(points, x, y)}" fill="none" stroke="{color}" '
        f'stroke-width="1.6" stroke-linejoin="round"{more}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    color: str = "ink",
    size: int = 12,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    more = "" if weight == 400 else f' font-weight="{weight}"'
    more += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{color}" font-size="{size}"{more}>'
        f"{escape(text)}</text>"
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1, dash: str = ""
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{color}-line" '
        f'stroke-width="{width}"{dashed}/>'
    )


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(label)}" {_FONT} '
        f'style="font-variant-numeric:tabular-nums">{"".join(parts)}</svg>'
    )


def _fit(text: str, width: float, size: int) -> str:
    """The text, cut with `…` where it would be wider than `width` pixels, by a rough measure."""
    room = width / size
    for i, char in enumerate(text):
        room -= 1.0 if unicodedata.east_asian_width(char) in "WF" else 0.56
        if room < 0:
            return text[: max(0, i - 1)] + "…"
    return text
