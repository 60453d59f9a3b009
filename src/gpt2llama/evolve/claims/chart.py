"""One chart of loss by position for every position scheme, beyond the trained length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from .. import svg
from ..svg import Scale
from .training import STRETCH, Study, Trained

Lines = dict[str, list[tuple[float, float]]]  # name -> (position, nats per token)

_WORDS = {
    "en": {
        "title": "Trained at {trained} tokens, read at {longest}",
        "text": "Held-out nats per token by position, means over {seeds} seeds. The dotted line is "
        "the trained length.",
        "before": "as trained",
        "after": "after {steps} steps at {longest} tokens",
        "axis": "position, tokens",
        "ends": "ends here: ",
    },
    "zh": {
        "title": "训练长度 {trained}，读到 {longest} 个词元",
        "text": "留出文本各位置每词元的奈特数，{seeds} 个种子的平均。点线标出训练长度。",
        "before": "训练后直接读",
        "after": "再以 {longest} 个词元的长度训练 {steps} 步之后",
        "axis": "位置（词元）",
        "ends": "到此为止：",
    },
}
_LEFT, _PANEL, _LABELS, _TOP, _BOTTOM = 44, 320, 110, 116, 400  # pixels


def long_context_svg(schemes: Trained, scalings: Trained, study: Study, language: str) -> str:
    """`schemes` are claim 13's runs and `scalings` claim 14's; a drawing on paper of its own."""
    trained = study.seq_len
    longest = trained * STRETCH
    shown = {
        "trained": trained, "longest": longest, "seeds": study.seeds,
        "steps": study.stretched_train.steps,
    }  # fmt: skip
    words = {key: text.format(**shown) for key, text in _WORDS[language].items()}
    before: Lines = {
        name: _line(runs, "by_position", longest) or _line(runs, "by_position", trained)
        for name, runs in schemes.runs.items()
    }
    scaled = [name for name in scalings.runs if name not in before]
    before |= {name: _line(scalings.runs[name], "by_position_before", longest) for name in scaled}
    after = {name: _line(runs, "by_position", longest) for name, runs in scalings.runs.items()}
    colors = {name: svg.rung_color(i, len(before)) for i, name in enumerate(before)}
    losses = [loss for lines in (before, after) for line in lines.values() for _, loss in line]
    y = Scale.around(losses or [0.0, 1.0], _BOTTOM, _TOP)
    width = 2 * (_LEFT + _PANEL + _LABELS)
    out = [
        f"<style>{svg.style()}</style>",
        f'<rect width="{width}" height="{_BOTTOM + 48}" rx="8" class="paper"/>',
        svg.text(24, 36, words["title"], size=17, weight=600),
        svg.text(24, 58, words["text"], "soft"),
    ]
    for left, what, lines in ((0, "before", before), (width // 2, "after", after)):
        x = Scale(0.0, float(longest), left + _LEFT, left + _LEFT + _PANEL)
        out.append(svg.text(x.start, _TOP - 14, words[what], size=13, weight=600))
        out += _panel(lines, x, y, trained, colors, words)
    return svg.drawing(width, _BOTTOM + 48, words["title"], out) + "\n"


def _panel(
    lines: Lines, x: Scale, y: Scale, trained: int, colors: Mapping[str, str], words: dict[str, str]
) -> list[str]:
    lengths = [float(trained * times) for times in range(1, STRETCH + 1)]
    drawn = [
        f'<g data-tip="{escape(name)}">{svg.polyline(line, x, y, colors[name])}</g>'
        for name, line in lines.items()
    ]
    out = [
        *svg.grid(x, y, words["axis"], lengths),
        svg.line(x(trained), _TOP, x(trained), _BOTTOM, "soft", 1, "1.5 3"),
        svg.window(x, y, drawn),
    ]
    ends = {name: line[-1] for name, line in lines.items() if line and line[-1][0] > trained}
    places = svg.spread([y(loss) for _, loss in ends.values()], 14, _TOP + 4, _BOTTOM)
    for (name, (at, loss)), place in zip(ends.items(), places, strict=True):
        path = f"M{x(at) + 1:.1f} {y(loss):.1f}H{x.end:.1f}L{x.end + 8:.1f} {place:.1f}"
        color = colors[name]
        out.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="0.6"/>')
        out.append(f'<circle cx="{x.end + 12:.1f}" cy="{place:.1f}" r="3" fill="{color}"/>')
        out.append(svg.text(x.end + 18, place + 4, name, size=11))
    if short := [name for name, line in lines.items() if line and name not in ends]:
        said = words["ends"] + ", ".join(short)
        out.append(svg.text(x(trained) + 4, _TOP + 10, said, "soft", 10))
    return out


def _line(runs: Sequence[dict[str, Any]], key: str, length: int) -> list[tuple[float, float]]:
    """The middle of each part of the window and its loss, a mean over seeds; empty: undefined."""
    parts = [(run.get(key) or {}).get(str(length)) for run in runs if not run["diverged"]]
    if not parts or None in parts:
        return []
    means = [fmean(at) for at in zip(*parts, strict=True)]
    return [((i + 0.5) * length / len(means), mean) for i, mean in enumerate(means)]
