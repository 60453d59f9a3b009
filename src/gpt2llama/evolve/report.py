"""The report of an experiment: report.json, .csv, .md, .zh.md and .html, and its chart alone."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any

from ..atomic import write_text
from .charts import ladder_svg as ladder_svg
from .page import page
from .sentences import (
    Column,
    Results,
    Rung,
    columns,
    effect_columns,
    effect_verdict,
    effects_text,
    how_to_read,
    interval,
    statistics,
    summary,
    title,
    verdict,
)
from .words import WORDS, Words, fixed, mebibytes, p_value, percent, signed, whole


def write_report(results: Results, folder: Path) -> None:
    """Writes its files, each whole or not at all, over those of an earlier report.

    results: what `evolve --json` prints, with every run's curves; a number that is not finite
    becomes null. A factorial's effects have a CSV of their own. FileError if a file cannot be
    written.
    """
    results = _finite(results)
    contents = {
        "report.json": json.dumps(results, ensure_ascii=False, indent=1, allow_nan=False) + "\n",
        "report.csv": as_csv(results),
        "report.md": as_markdown(results, "en"),
        "report.zh.md": as_markdown(results, "zh"),
        "report.html": page(results),
        "ladder.svg": ladder_svg(results, "en"),
        "ladder.zh.svg": ladder_svg(results, "zh"),
    }
    if "effects" in results:
        effects = effect_columns(WORDS["en"])
        contents["effects.csv"] = _csv(effects, results["effects"])
    for name, text in contents.items():
        write_text(folder / name, text, overwrite=True)


def as_csv(results: Results) -> str:
    """A row per rung, numbers in full; empty where a value is not known."""
    return _csv(columns(results, WORDS["en"]), results["rungs"])


def _csv(columns: list[Column], rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(column.key for column in columns)
    for row in rows:
        writer.writerow(column.value(row) for column in columns)
    return file.getvalue()


def as_markdown(results: Results, language: str) -> str:
    """GitHub's Markdown: summary, table, statistics, how to read it, the command."""
    words = WORDS[language]
    confidence = percent(results["statistics"]["confidence"])
    heads = [words["name"], words["change"], words["bits_per_byte"], words["difference"]]
    heads += [words["interval"].format(confidence=confidence), words["verdict"]]
    heads += [words[key] for key in ("parameters", "flops_per_token", "train_tokens_per_s")]
    heads += [words[key] for key in ("decode_tokens_per_s", "kv_bytes_per_token")]
    heads += [words["peak_rss_bytes"]]
    rows = [heads, ["---", "---", "---:", "---:", "---:", "---", *["---:"] * 6]]
    rows += [_markdown_row(rung, results, words) for rung in results["rungs"]]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", results["command"])), default=0))
    return "\n".join(
        [
            f"# {_markdown(title(results, words))}",
            "",
            _markdown(summary(results, words)),
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            _markdown(statistics(results, words)),
            "",
            *(_markdown_effects(results, words) if "effects" in results else []),
            f"## {words['reading']}",
            "",
            *(f"- {_markdown(sentence)}" for sentence in how_to_read(results, words)),
            "",
            f"## {words['command']}",
            "",
            fence,
            results["command"],
            fence,
            "",
        ]
    )


def _markdown_effects(results: Results, words: Words) -> list[str]:
    confidence = percent(results["statistics"]["confidence"])
    heads = [words["effect"], words["difference"], words["interval"].format(confidence=confidence)]
    rows = [[*heads, words["p_holm"], words["verdict"]], ["---", "---:", "---:", "---:", "---"]]
    for effect in results["effects"]:
        numbers = [signed(effect["difference"]), interval(effect), p_value(effect["p_holm"])]
        rows.append([_markdown(effect["name"]), *numbers, effect_verdict(effect, words)])
    return [
        f"## {words['effects']}",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        _markdown(effects_text(results, words)),
        "",
    ]


def _markdown_row(rung: Rung, results: Results, words: Words) -> list[str]:
    change = words["comma"].join(filter(None, [rung["change"], rung["adjusted"]]))
    return [
        _markdown(rung["name"]),
        _markdown(change) or "–",
        fixed(rung["bits_per_byte"]),
        signed(rung["difference"]),
        interval(rung),
        verdict(rung, results, words),
        whole(rung["parameters"]),
        whole(rung["flops_per_token"]),
        whole(rung["train_tokens_per_s"]),
        whole(rung["decode_tokens_per_s"]),
        whole(rung["kv_bytes_per_token"]),
        mebibytes(rung["peak_rss_bytes"]),
    ]


def _markdown(text: str) -> str:
    """On one line, with nothing in it that Markdown or HTML would read."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
