"""The report's charts as SVG text. Colours are classes, so that one drawing serves light and dark.

Each function takes the results (see report.py) and the words of one language.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from . import svg
from .sentences import (
    Effect,
    Results,
    Rung,
    effect_verdict,
    interval,
    lengths,
    losses_at,
    mean,
    title,
    verdict,
)
from .svg import Point, Scale
from .words import WORDS, Words, fixed, percent, signed

Band = list[tuple[float, float, float, float]]  # (x, mean, lowest, highest), one a held-out test

_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
WORSE = 0.1  # nats per token beyond the trained length's mean: a line that breaks


def ladder_svg(results: Results, language: str = "en") -> str:
    """The ladder chart as a file of its own, readable on any background (it brings its paper)."""
    words = WORDS[language]
    chart, width, height = _ladder(results, words, _WIDE)
    head = [
        f"<style>{svg.style()}</style>",
        f'<rect width="{width + 48}" height="{height + 92}" rx="8" class="paper"/>',
        svg.text(24, 36, title(results, words), size=17, weight=600),
        svg.text(24, 58, ladder_text(results, words), "soft"),
        f'<g transform="translate(24 76)">{chart}</g>',
    ]
    return svg.drawing(width + 48, height + 92, title(results, words), head) + "\n"


def ladder_text(results: Results, words: Words) -> str:
    """The chart's caption, which names the rung that all are compared with, if there is one."""
    previous = [rung["previous"] for rung in results["rungs"]]
    before = [None, *(rung["name"] for rung in results["rungs"][:-1])]
    if previous == before:
        to = words["before"]
    else:
        to = _compared_with(results) or words["before_or_named"]
    confidence = percent(results["statistics"]["confidence"])
    return words["ladder_text"].format(previous=to, confidence=confidence)


def _compared_with(results: Results) -> str | None:
    names = {rung["previous"] for rung in results["rungs"]} - {None}
    return names.pop() if len(names) == 1 else None


def ladder_chart(results: Results, words: Words, *, narrow: bool = False) -> str:
    """A row per rung: the paired difference and its interval, the absolute loss beside it."""
    chart, width, height = _ladder(results, words, _NARROW if narrow else _WIDE)
    return svg.drawing(width, height, words["ladder"], [chart])


@dataclass(frozen=True, kw_only=True)
class _Ladder:
    """Where things stand in the ladder chart; y counts from the top of a rung's row."""

    width: int
    row: int
    plot: tuple[int, int]  # left and right
    plot_y: int
    grid: tuple[int, int]  # from and to y: clear of what is written
    name_width: int
    change_width: int
    loss: Point  # right end of the text, as the next
    difference: Point
    interval: Point | None
    verdict: Point
    power: str  # the words of how small a difference could be detected


_WIDE = _Ladder(
    width=960,
    row=46,
    plot=(272, 600),
    plot_y=23,
    grid=(0, 46),
    name_width=262,
    change_width=262,
    loss=(690, 20),
    difference=(778, 20),
    interval=(960, 20),
    verdict=(960, 38),
    power="power",
)
_NARROW = _Ladder(
    width=340,
    row=86,
    plot=(14, 326),
    plot_y=50,
    grid=(38, 62),
    name_width=190,
    change_width=340,
    loss=(268, 16),
    difference=(340, 16),
    interval=None,
    verdict=(340, 76),
    power="power_short",
)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What is written in a row of the chart; `found` holds what is drawn."""

    name: str
    change: str
    loss: str  # empty: it has none
    found: Rung | Effect
    verdict: str


def _ladder(results: Results, words: Words, at: _Ladder) -> tuple[str, int, int]:
    rows, above = [], None
    for rung in results["rungs"]:
        named = rung["previous"] not in (None, above, _compared_with(results))
        versus = words["versus"].format(previous=rung["previous"]) if named else ""
        rows.append(
            _Row(
                name=rung["name"],
                change=" · ".join(filter(None, [versus, rung["change"], rung["adjusted"]])),
                loss=fixed(rung["bits_per_byte"]),
                found=rung,
                verdict=verdict(rung, results, words, at.power),
            )
        )
        above = rung["name"]
    return _rows(rows, results, words, at)


def effects_chart(results: Results, words: Words, *, narrow: bool = False) -> str:
    """The same of a factorial's main effects and interactions."""
    at = _NARROW if narrow else _WIDE
    changes = {rung["name"]: rung["change"] for rung in results["rungs"]}
    rows = [
        _Row(
            name=effect["name"],
            change=changes.get(effect["name"], ""),
            loss="",
            found=effect,
            verdict=effect_verdict(effect, words, at.power),
        )
        for effect in results["effects"]
    ]
    chart, width, height = _rows(rows, results, words, at)
    return svg.drawing(width, height, words["effects"], [chart])


def _rows(rows: list[_Row], results: Results, words: Words, at: _Ladder) -> tuple[str, int, int]:
    top = 30
    bottom = top + at.row * len(rows)
    ends = [row.found[key] for row in rows for key in ("difference", "low", "high")]
    x = Scale.around([0.0, *(end for end in ends if end is not None)], *at.plot)
    out = [svg.text(at.difference[0], 14, words["difference"], "soft", 11, "end")]
    if any(row.loss for row in rows):
        out.append(svg.text(at.loss[0], 14, words["bits_per_byte"], "soft", 11, "end"))
    if at.interval:
        confidence = percent(results["statistics"]["confidence"])
        header = words["interval"].format(confidence=confidence)
        out.append(svg.text(at.interval[0], 14, header, "soft", 11, "end"))
    out += [svg.text(x(t), bottom + 17, x.write(t), "soft", 11, "middle") for t in x.ticks(5)]
    for i, row in enumerate(rows):
        moved = f'<g transform="translate(0 {top + i * at.row})">'
        out.append(moved + _row(row, x, at) + "</g>")
    left, right = at.plot
    out += [
        svg.text(left, bottom + 36, words["better"], "helps", 11),
        svg.text(right, bottom + 36, words["worse"], "hurts", 11, "end"),
        svg.text((left + right) / 2, bottom + 36, words["ladder_axis"], "soft", 11, "middle"),
    ]
    return "".join(out), at.width, bottom + 44


def _row(row: _Row, x: Scale, at: _Ladder) -> str:
    found = row.found
    color = _verdict_color(found["verdict"])
    out = [
        svg.line(0, 0, at.width, 0, "rule"),
        *(
            svg.line(x(t), at.grid[0], x(t), at.grid[1], "soft" if abs(t) < 1e-12 else "rule")
            for t in x.ticks(5)
        ),
        svg.text(0, at.loss[1], svg.fit(row.name, at.name_width, 13), size=13, weight=600),
        svg.text(0, at.loss[1] + 17, svg.fit(row.change, at.change_width, 11), "soft", 11),
        svg.text(*at.loss, row.loss, size=12, anchor="end"),
        svg.text(*at.difference, signed(found["difference"]), color, 12, "end", 600),
        svg.text(*at.verdict, row.verdict, color, 11, "end"),
    ]
    if at.interval:
        out.append(svg.text(*at.interval, interval(found), "soft", 12, "end"))
    if found["difference"] is not None:
        y, numbers = at.plot_y, f"{signed(found['difference'])} {interval(found)}"
        tip = f"{row.name}: {numbers}, {row.verdict}"
        mark = _mark(x(found["difference"]), y, found["verdict"])
        if found["low"] is not None:
            low, high = x(found["low"]), x(found["high"])
            mark = (
                svg.line(low, y, high, y, color, 2)
                + "".join(svg.line(end, y - 4, end, y + 4, color, 2) for end in (low, high))
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
    width, height, left, right, top, bottom = 340, 320, 44, 248, 14, 276
    rungs, name = results["rungs"], words[f"axis_{axis}"]
    bands = [_band(rung, results, axis) for rung in rungs]
    reach = max((band[-1][0] for band in bands if band), default=0.0) or 1.0
    settled = [v for band in bands for x, *vs in band if x >= band[-1][0] / 3 for v in vs]
    y = Scale.around(settled or [0.0, 1.0], bottom, top)
    x = Scale(0.0, reach, left, right)
    if axis == "flops":
        power = math.floor(math.log10(reach))
        name += f", ×10{str(power).translate(_RAISED)}"
        ticks = Scale(0.0, reach / 10**power, left, right)
    else:
        ticks = x
    colors = [svg.rung_color(i, len(rungs)) for i in range(len(rungs))]
    curves = [
        f'<g class="series">{_seeds(rung, band, x, y, color)}'
        f"{_diverged(rung, results, axis, x, y, color)}</g>"
        for rung, band, color in zip(rungs, bands, colors, strict=True)
    ]
    out = [*svg.grid(ticks, y, name), svg.window(x, y, curves)]
    ends = [(i, band[-1][:2]) for i, band in enumerate(bands) if band]
    places = svg.spread([y(value) for _, (_, value) in ends], 13.5, top + 4, bottom)
    for (i, (at, value)), place in zip(ends, places, strict=True):
        path = f"M{x(at) + 1:.1f} {y(value):.1f}H{right}L{right + 8} {place:.1f}"
        out.append(f'<path d="{path}" fill="none" stroke="{colors[i]}" stroke-width="0.6"/>')
        label = svg.fit(rungs[i]["name"], width - right - 12, 11)
        out.append(svg.text(right + 11, place + 4, label, size=11))
    return svg.drawing(width, height, f"{words['curves']}: {words[f'axis_{axis}']}", out)


def _band(rung: Rung, results: Results, axis: str) -> Band:
    """The seeds that did not diverge, at each step; x in `axis`, its mean where they differ."""
    at_step: dict[int, list[Point]] = {}
    for run in rung["runs"]:
        if not run["diverged"]:
            for step, point in _curve_points(run, rung, results, axis):
                at_step.setdefault(step, []).append(point)
    band = []
    for _, points in sorted(at_step.items()):
        xs, values = zip(*points, strict=True)
        band.append((sum(xs) / len(xs), sum(values) / len(values), min(values), max(values)))
    return band


def _curve_points(
    run: dict[str, Any], rung: Rung, results: Results, axis: str
) -> list[tuple[int, Point]]:
    """(step, (x, bits per byte)) of one run."""
    import numpy as np

    if axis == "seconds":
        steps = [0, *(row[0] for row in run["curve"])]
        seconds = [0.0, *(row[2] for row in run["curve"])]
    else:
        tokens = results["tokens"] / results["steps"]  # of one step
        unit = tokens * rung["flops_per_token"] if axis == "flops" else 1.0
    points = []
    for step, value in run["held_out_curve"]:
        if value is not None:
            at = float(np.interp(step, steps, seconds)) if axis == "seconds" else step * unit
            points.append((step, (at, value)))
    return points


def _seeds(rung: Rung, band: Band, x: Scale, y: Scale, color: str) -> str:
    """The band from the lowest seed to the highest, and the line of their mean."""
    if not band:
        return ""
    upper = [(at, high) for at, _, _, high in band]
    lower = [(at, low) for at, _, low, _ in band]
    around = svg.points([*upper, *reversed(lower)], x, y)
    _, middle, low, high = band[-1]
    tip = f"{rung['name']}: {fixed(middle)} [{fixed(low)}, {fixed(high)}]"
    line = svg.polyline([(at, mean) for at, mean, _, _ in band], x, y, color)
    return (
        f'<polygon points="{around}" fill="{color}" fill-opacity="0.16"/>'
        f'<g data-tip="{escape(tip)}">{line}</g>'
    )


def _diverged(rung: Rung, results: Results, axis: str, x: Scale, y: Scale, color: str) -> str:
    lost = [run for run in rung["runs"] if run["diverged"]]
    curves = [[p for _, p in _curve_points(run, rung, results, axis)] for run in lost]
    dashed = ' stroke-dasharray="3 3"'
    return "".join(svg.polyline(curve, x, y, color, dashed) for curve in curves)


def position_chart(rung: Rung, results: Results, words: Words) -> str:
    """Nats per token by position for one rung, a line per text length; grey where it breaks."""
    width, height, left, right, top, bottom = 214, 170, 34, 202, 30, 136
    sizes = lengths(results)
    trained, longest = sizes[0], sizes[-1]
    known = [loss for r in results["rungs"] for loss in losses_at(r, trained)] or [0.0, 1.0]
    y = Scale(math.floor(2 * min(known)) / 2, max(known) + 0.5, bottom, top)
    x = Scale(0.0, float(longest), left, right)
    within = mean(losses_at(rung, trained))
    lines = []
    for n, size in reversed([*enumerate(sizes)]):  # the trained length on top
        if losses := losses_at(rung, size):
            color = "neutral" if breaks(losses, size, trained, within) else "helps"
            each = size / len(losses)  # tokens in a bucket, whose middle is drawn
            path = svg.points([((i + 0.5) * each, loss) for i, loss in enumerate(losses)], x, y)
            tip = f"{rung['name']}, {size}: {fixed(mean(losses))} {words['nats']}"
            lines.append(
                f'<g data-tip="{escape(tip)}"><polyline points="{path}" class="{color}-line" '
                f'stroke-width="{2.4 - 0.6 * min(n, 2):.1f}" stroke-linejoin="round"/></g>'
            )
    out = [
        svg.text(0, 14, svg.fit(rung["name"], width, 12), size=12, weight=600),
        *svg.grid(x, y, words["position_axis"], [float(size) for size in sizes], 3),
        svg.line(x(trained), top, x(trained), bottom, "soft", 1, "1.5 3"),
        svg.window(x, y, lines),
        svg.text(right, bottom - 6, _lacking(rung, sizes, words), "neutral", 10, "end"),
    ]
    return svg.drawing(width, height, f"{words['positions']}: {rung['name']}", out)


def _lacking(rung: Rung, sizes: list[int], words: Words) -> str:
    lacking = [size for size in sizes if not losses_at(rung, size)]
    if not lacking:
        return ""
    if all(rung["by_position"].get(str(size), ()) is None for size in lacking):
        return words["undefined"].format(trained=sizes[0])
    return words["not_measured"]


def breaks(losses: Sequence[float], size: int, trained: int, within: float | None) -> bool:
    """Whether, in a text of `size` tokens, the mean loss beyond `trained` is clearly worse."""
    beyond = [v for i, v in enumerate(losses) if (i + 0.5) * size / len(losses) > trained]
    return bool(beyond) and within is not None and sum(beyond) / len(beyond) > within + WORSE
