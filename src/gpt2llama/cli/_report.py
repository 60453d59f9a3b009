"""What loading makes of a file's tensors, for people: like layers share a line."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from typing import Any

from ..weights.opened import Opened


def as_rows(opened: Opened) -> list[dict[str, Any]]:
    """Every tensor of its own."""
    from ..weights.report import report

    return [asdict(line) for line in report(opened)]


def as_lines(opened: Opened) -> list[str]:
    """30 × blk.*.attn_q.weight 576×576 Q4_1 → layers.*.self_attn.q_proj.weight: turned …"""
    like = Counter(
        (
            re.sub(r"\d+", "*", row["name"]),
            f"{'×'.join(map(str, row['shape']))} {row['dtype']}",
            re.sub(r"\d+", "*", " and ".join(row["ours"])),
            row["change"],
        )
        for row in as_rows(opened)
    )
    name_width, kind_width = (max((len(key[i]) for key in like), default=0) for i in (0, 1))
    lines = []
    for (name, kind, ours, change), times in like.items():
        count = f"{times} ×" if times > 1 else ""
        line = f"{count:>6} {name:<{name_width}} {kind:<{kind_width}} → {ours or 'nothing'}"
        lines.append(f"{line}: {change}" if change else line)
    return lines
