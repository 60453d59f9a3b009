"""report.html: one file with its charts, style and script in it, in English and in Chinese."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

from . import charts, svg
from .sentences import (
    SIZES,
    Column,
    Results,
    Rung,
    columns,
    effect_columns,
    effect_verdict,
    effects_text,
    how_to_read,
    lengths,
    statistics,
    summary,
    title,
    verdict,
)
from .words import WORDS, Words, whole

Row = dict[str, Any]  # a rung or an effect
Said = Callable[[Row], str]  # its verdict in words

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav><button data-lang="en" lang="en">English</button>\
<button data-lang="zh" lang="zh">中文</button></nav>
{bodies}
<div id="tip" hidden></div>
<script>{script}</script>
</body>
</html>
"""


def page(results: Results) -> str:
    """The whole file. It asks nothing of the network, and its policy forbids it to."""
    own = files(__package__)
    return _PAGE.format(
        title=escape(title(results, WORDS["en"])),
        style=_variables() + svg.style() + own.joinpath("page.css").read_text(encoding="utf-8"),
        bodies="\n".join(_body(results, language) for language in WORDS),
        script=own.joinpath("page.js").read_text(encoding="utf-8"),
    )


def _variables() -> str:
    light, dark = (
        "".join(f"--{name}:{pair[i]};" for name, pair in svg.COLORS.items()) for i in (0, 1)
    )
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _body(results: Results, language: str) -> str:
    words, rungs = WORDS[language], results["rungs"]
    ladder = _figure(partial(charts.ladder_chart, results, words))
    kicker = f"gpt2llama evolve {results['version']} · {results['created'][:10]}"
    parts = [
        f"<header>{_p(kicker, 'kicker soft')}<h1>{escape(title(results, words))}</h1>"
        f"{_p(summary(results, words))}{_p(statistics(results, words), 'soft')}</header>",
        _section(words["ladder"], charts.ladder_text(results, words), ladder),
    ]
    if "effects" in results:
        effects, said = results["effects"], partial(effect_verdict, words=words)
        figure = _figure(partial(charts.effects_chart, results, words))
        table = _table(effects, effect_columns(words), said)
        parts.append(_section(words["effects"], effects_text(results, words), figure + table))
    parts.append(_section(words["curves"], words["curves_text"], _curves(results, words)))
    if sizes := lengths(results):
        note = words["positions_text"].format(
            lengths=words["comma"].join(map(str, sizes)), trained=sizes[0], worse=charts.WORSE
        )
        drawn = [charts.position_chart(rung, results, words) for rung in rungs]
        figure = f'<figure class="positions">{"".join(drawn)}</figure>'
        parts.append(_section(words["positions"], note, figure))
    every, said = columns(results, words), partial(verdict, results=results, words=words)
    chosen = [column for column in every if column.key in SIZES]
    parts += [
        _section(words["sizes"], words["sizes_text"], _table(rungs, chosen, said, bars=True)),
        _section(words["everything"], words["everything_text"], _table(rungs, every, said)),
        _section(words["configs"], words["configs_text"], _configs(results, words)),
        _section(
            words["reading"],
            "",
            "<ul>"
            + "".join(f"<li>{escape(s)}</li>" for s in how_to_read(results, words))
            + "</ul>",
        ),
        _section(words["origin"], "", _origin(results, words)),
    ]
    return f'<main lang="{language}">{"".join(parts)}</main>'


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _section(heading: str, note: str, content: str) -> str:
    intro = _p(note, "soft") if note else ""
    return f"<section><h2>{escape(heading)}</h2>{intro}{content}</section>"


def _figure(chart: Callable[..., str]) -> str:
    """The chart as the desktop shows it and as the phone does."""
    return (
        f'<figure class="ladder"><div class="wide">{chart()}</div>'
        f'<div class="narrow">{chart(narrow=True)}</div></figure>'
    )


def _curves(results: Results, words: Words) -> str:
    drawn = [charts.curve_chart(results, words, axis) for axis in ("steps", "flops", "seconds")]
    return f'<figure class="curves">{"".join(drawn)}</figure>'


def _table(rows: list[Row], shown: list[Column], said: Said, bars: bool = False) -> str:
    """Each cell holds its exact value as data-value, by which the script sorts."""
    most = {c.key: _largest(rows, c) for c in shown if bars and c.numeric}
    head = "".join(
        f'<th scope="col" class="{"number" if c.numeric else "word"}">'
        f'<button type="button">{escape(c.header)}</button></th>'
        for c in shown
    )
    cells = ["".join(_cell(row, c, said, most.get(c.key)) for c in shown) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    kind = ' class="bars"' if bars else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _largest(rows: list[Row], column: Column) -> float:
    return max((value for row in rows if (value := column.value(row))), default=0.0)


def _cell(row: Row, column: Column, said: Said, most: float | None) -> str:
    value = column.value(row)
    exact = "" if value is None else value
    shown = "–" if value is None else column.show(value)
    text = said(row) if column.key == "verdict" else shown
    tag = 'th scope="row"' if column.key == "name" else "td"
    kind = "" if column.numeric else ' class="word"'
    bar = f'<i style="width:{100 * (value or 0) / most:.1f}%"></i>' if most else ""
    opened = f'<{tag}{kind} data-value="{escape(str(exact))}">{escape(text)}{bar}'
    return f"{opened}</{tag.split()[0]}>"


def _configs(results: Results, words: Words) -> str:
    first = results["rungs"][0]["config"]
    return "".join(_config(rung, first, words) for rung in results["rungs"])


def _config(rung: Rung, first: dict[str, Any], words: Words) -> str:
    config = rung["config"]
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{_json(first.get(key))}</td>'
        f"<td>{_json(config.get(key))}</td></tr>"
        for key in {**first, **config}
        if first.get(key) != config.get(key)
    )
    head = "".join(
        f'<th scope="col"{kind}>{escape(words[key])}</th>'
        for key, kind in (("field", ' class="word"'), ("first_rung", ""), ("this_rung", ""))
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    differs = f'<div class="scroll">{table}</div>' if rows else _p(words["same_as_first"], "soft")
    about = " · ".join(filter(None, [rung["name"], rung["change"], rung["adjusted"]]))
    full = f"<pre>{_json(config, indent=2)}</pre>"
    return (
        f"<details><summary>{escape(about)}</summary>{differs}"
        f"<details><summary>{escape(words['full_config'])}</summary>{full}</details></details>"
    )


def _json(value: Any, indent: int | None = None) -> str:
    return escape(json.dumps(value, ensure_ascii=False, indent=indent))


def _origin(results: Results, words: Words) -> str:
    machine, data = results["machine"], results["data"]
    held_out = words["bytes_and_tokens"].format(
        bytes=whole(data["held_out_bytes"]), tokens=whole(data["held_out_tokens"])
    )
    versions = [
        f"gpt2llama {results['version']}",
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
    ]
    facts = {
        "created": results["created"],
        "versions": words["comma"].join(versions),
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "threads": machine["threads"],
        "dtype": machine["dtype"],
        "data": data["name"],
        "train_tokens": whole(data["train_tokens"]),
        "held_out": held_out,
        "vocab_size": whole(data["vocab_size"]),
    }
    listed = "".join(
        f"<dt>{escape(words[key])}</dt><dd>{escape(str(value))}</dd>"
        for key, value in facts.items()
    )
    command = f"<pre>{escape(results['command'])}</pre>"
    return f"{_p(words['again'])}{command}<dl>{listed}</dl>"
