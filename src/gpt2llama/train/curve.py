"""The loss curve of a run as one SVG file, drawn from metrics.jsonl."""

from __future__ import annotations

import math
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 400, 64, 48, 40, 20


def loss_curve(lines: list[dict[str, Any]], title: str) -> str:
    """Training loss (thin: every step; bold: smoothed) and held-out loss against steps, in nats.

    lines: as `read_metrics` gives them, at least one.
    """
    train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    held = [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]
    reach, last = len(train) // 50, train[-1][0]
    near = [train[max(0, i - reach) : i + reach + 1] for i in range(len(train))]
    smooth = [
        (step, sum(loss for _, loss in around) / len(around))
        for (step, _), around in zip(train, near, strict=True)
    ]
    values = [loss for _, loss in train + held]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    high = max(high, low + 0.5)

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(points: list[tuple[int, float]], color: str, width: float, extra: str = "") -> str:
        keep = max(1, len(points) // 1000)
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in [*points[::keep], points[-1]])
        return (
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-linejoin="round" {extra}/>'
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" '
        'fill="#444">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" fill="#111">{_escape(title)}</text>',
    ]
    for i in range(6):
        value, step = low + (high - low) * i / 5, last * i / 5
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#e5e5e5"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{step:,.0f}</text>"
        )
    out += [line(train, "#9ec5e8", 1), line(smooth, "#1f6fb2", 2.2)]
    legend = [("training", "#1f6fb2")]
    if held:
        out.append(line(held, "#c8442c", 2.2))
        out += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="#c8442c"/>' for s, v in held]
        legend.append((f"held out: {held[-1][1]:.3f}", "#c8442c"))
    for i, (name, color) in enumerate(legend):
        at = WIDTH - RIGHT - 260 + 110 * i
        out.append(
            f'<line x1="{at}" x2="{at + 18}" y1="{TOP + 14}" y2="{TOP + 14}" stroke="{color}" '
            f'stroke-width="3"/><text x="{at + 24}" y="{TOP + 18}">{name}</text>'
        )
    out.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "optimiser steps</text>"
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        'text-anchor="middle">loss, nats per token</text></svg>'
    )
    return "\n".join(out) + "\n"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
