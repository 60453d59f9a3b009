"""The report, from invented results: what it says is what it was given, in both languages."""

from __future__ import annotations

import ast
import copy
import csv
import itertools
import json
import math
import random
import re
import shutil
import string
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import asdict
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.evolve import charts, svg
from gpt2llama.evolve.page import page
from gpt2llama.evolve.report import as_csv, as_markdown, ladder_svg, write_report
from gpt2llama.evolve.sentences import effect_verdict, statistics, summary
from gpt2llama.evolve.stats import factorial
from gpt2llama.evolve.words import WORDS, p_value, signed
from gpt2llama.model.presets import ladder
from gpt2llama.plan import flops_per_token, kv_bytes_per_token, parameters

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SVG = "{http://www.w3.org/2000/svg}"
LEARNED = ("learned", "rmsnorm")
CHANGES = {
    "2017": ("", ""),
    "pre-norm": ("norm_placement: post → pre", ""),
    "gelu": ("activation: relu → gelu_tanh", ""),
    "learned": ("position: sinusoidal → learned", ""),
    "rmsnorm": ("norm: layernorm → rmsnorm", ""),
    "rope": ("position: learned → rope", ""),
    "swiglu": ("gated_mlp: false → true", "d_ff 624 → 416"),
    "gqa": ("n_kv_heads: 4 → 2", "d_ff 416 → 512"),
    "no-bias": ("qkv_bias, out_bias, mlp_bias: true → false", ""),
    "untied": ("tie_embeddings: true → false", "d_ff 512 → 171"),
}


def invented(rungs: int = 10, seeds: int = 3, steps: int = 195) -> dict[str, Any]:
    """Plausible results of a ladder: one diverged seed, learned positions without a loss beyond."""
    draw = random.Random(7)
    gains = (0, -0.21, -0.012, 0.004, -0.003, -0.083, -0.041, 0.026, 0.001, -0.028)
    verdicts = (None, "helps", *["no difference shown"] * 3, "helps", "helps", "hurts")
    verdicts += ("no difference shown", "helps")
    out, loss, before = [], 2.71, None
    for i, (name, cfg) in enumerate(list(ladder().items())[:rungs]):
        loss += gains[i]
        flops = flops_per_token(cfg)
        runs = [
            _run(loss + draw.gauss(0, 0.006), seed, steps, (i, seed) == (0, 1), draw)
            for seed in range(seeds)
        ]
        several = seeds > 1 and i > 0
        half = 0.011 + draw.random() * 0.004
        shown = verdicts[i] if several else None
        kept = [run["bits_per_byte"] for run in runs if not run["diverged"]]
        out.append(
            {
                "name": name,
                "change": CHANGES[name][0],
                "adjusted": CHANGES[name][1],
                "previous": before,
                "config": cfg.to_dict(),
                "parameters": parameters(cfg)["total"],
                "flops_per_token": flops,
                "kv_bytes_per_token": kv_bytes_per_token(cfg),
                "bits_per_byte": sum(kept) / len(kept) if kept else None,
                "difference": gains[i] if i else None,
                "low": gains[i] - half if several else None,
                "high": gains[i] + half if several else None,
                "p": 0.00001 * 10 ** draw.uniform(0, 4) if several else None,
                "p_holm": 0.0001 * 10 ** draw.uniform(0, 4) if several else None,
                "verdict": shown,
                "detectable": 0.0193 + draw.random() * 0.002 if several else None,
                "correlation": draw.uniform(0.3, 0.95) if several else None,
                "train_tokens_per_s": 2600 + draw.random() * 500,
                "decode_tokens_per_s": 190 + draw.random() * 60,
                "peak_rss_bytes": 700_000_000 + draw.randrange(90_000_000),
                "int8_bits_per_byte": loss + 0.0007,
                "int4_bits_per_byte": loss + 0.05 + draw.random() * 0.02,
                "by_position": {
                    str(size): _by_position(name, size, loss, draw) for size in (128, 256, 512)
                },
                "runs": runs,
            }
        )
        before = name
    return {
        "version": "0.1.0",
        "created": "2026-11-29T23:50:00Z",
        "command": "gpt2llama evolve --data sanguo --seeds 3 --tokens 400000 --out runs/ladder",
        "machine": {
            "cpu": "Intel Xeon E5-2680 v4 @ 2.40GHz",
            "cores": 2,
            "torch": "2.13.0+cpu",
            "python": "3.11.2",
            "dtype": "fp32",
            "threads": 1,
        },
        "design": "ladder",
        "base": "zh-3m-2017",
        "to": "zh-3m",
        "match": "params",
        "seeds": list(range(seeds)),
        "tokens": steps * 2048,
        "steps": steps,
        "data": {
            "name": "sanguo",
            "train_tokens": 437_545,
            "held_out_bytes": 160_006,
            "held_out_tokens": 45_675,
            "vocab_size": 4096,
        },
        "statistics": {
            "pooled": True,
            "equal_variance_p": 0.4312,
            "degrees_of_freedom": 17.0,
            "confidence": 0.95,
        },
        "rungs": out,
    }


def _run(last: float, seed: int, steps: int, diverged: bool, draw: random.Random) -> dict[str, Any]:
    speed = 2700 + draw.random() * 200

    def loss(step: int) -> float:
        if diverged and step > steps / 2:
            return 3.1 + 0.02 * (step - steps / 2)
        return last + 6 * math.exp(-14 * step / steps) + 0.9 * (1 - step / steps) ** 2

    held_out = [*range(0, steps, max(1, steps // 13)), steps]
    seconds = steps * 2048 / speed
    return {
        "seed": seed,
        "bits_per_byte": None if diverged else last,
        "diverged": diverged,
        "seconds": seconds,
        "tokens_per_s": speed,
        "peak_rss_bytes": 700_000_000 + draw.randrange(90_000_000),
        "curve": [
            [step, step * 2048, seconds * step / steps, loss(step) * 2.4]
            for step in range(1, steps + 1)
        ],
        "held_out_curve": [[step, loss(step)] for step in held_out],
    }


def _by_position(name: str, size: int, loss: float, draw: random.Random) -> list[float] | None:
    if name in LEARNED and size > 128:
        return None
    broken = 0.9 if name in ("rope", "swiglu", "gqa") else 0.05
    values = []
    for bucket in range(16):
        at = (bucket + 0.5) * size / 16
        beyond = max(0.0, at / 128 - 1) * broken
        values.append(loss * 2.4 + 1.3 * math.exp(-at / 14) + beyond + draw.gauss(0, 0.02))
    return values


def invented_factorial() -> dict[str, Any]:
    """Two switches, whose effects are those of the invented runs."""
    found = invented(4) | {"design": "factorial"}
    names = ["2017", "rope", "rmsnorm", "rmsnorm + rope"]
    levels = list(itertools.product((0, 1), repeat=2))
    found["rungs"][0]["runs"][1].update(diverged=False, bits_per_byte=2.71)
    scores = {}
    for rung, name, at in zip(found["rungs"], names, levels, strict=True):
        rung.update(name=name, levels=at, previous="2017" if any(at) else None)
        scores[at] = {run["seed"]: run["bits_per_byte"] for run in rung["runs"]}
    analysis = factorial(scores, ["rmsnorm", "rope"])
    found["effects"] = [asdict(effect) for effect in analysis.comparisons]
    found["effects_statistics"] = {
        "pooled": analysis.pooled,
        "equal_variance_p": analysis.equal_variance_p,
        "degrees_of_freedom": analysis.degrees_of_freedom,
        "confidence": analysis.confidence,
    }
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return invented()


@pytest.fixture(scope="module")
def html(results: dict[str, Any]) -> str:
    return page(results)


class Page(HTMLParser):
    """Checks that tags nest; collects the tables of each language, as rows of (value, text)."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[list[tuple[str | None, str]]]]] = {}
        self.language = ""
        self.text = {"en": "", "zh": ""}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "main":
            self.language = str(values["lang"])
            self.tables[self.language] = []
        elif tag == "table":
            self.tables[self.language].append([])
        elif tag == "tr":
            self.tables[self.language][-1].append([])
        elif tag in ("td", "th"):
            self.tables[self.language][-1][-1].append((values.get("data-value"), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "main":
            self.language = ""

    def handle_data(self, data: str) -> None:
        if self.language:
            self.text[self.language] += data
            if {"td", "th"} & set(self.open):
                row = self.tables[self.language][-1][-1]
                row[-1] = (row[-1][0], row[-1][1] + data)


def as_number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_number_of_the_tables_is_the_datas(
    results: dict[str, Any], html: str, language: str
) -> None:
    words = WORDS[language]
    sizes, every = Page(html).tables[language][:2]
    known = {words[key]: key for key in results["rungs"][0] if key in words}
    seen = set()
    for table in (sizes, every):
        headers = [text for _, text in table[0]]
        assert len(table) == 1 + len(results["rungs"])
        for row, rung in zip(table[1:], results["rungs"], strict=True):
            for header, (exact, text) in zip(headers, row, strict=True):
                if header not in known:
                    continue
                key = known[header]
                value = rung[key]
                seen.add(key)
                assert exact == ("" if value is None else str(value))
                if isinstance(value, str):
                    assert text == value or key == "verdict"
                elif value is None:
                    assert text in ("–", words["reference"])
                elif text.startswith("< "):
                    assert value < as_number(text[2:])
                else:
                    unit = 2**20 if key == "peak_rss_bytes" else 1
                    digits = len(text.partition(".")[2])
                    assert as_number(text) == pytest.approx(value / unit, abs=0.5001 / 10**digits)
    numbers = {key for key, value in results["rungs"][1].items() if isinstance(value, int | float)}
    assert numbers <= seen
    assert {"name", "change", "adjusted", "verdict"} <= seen


@pytest.mark.parametrize("language", ["en", "zh"])
def test_seeds_and_positions_have_columns(
    results: dict[str, Any], html: str, language: str
) -> None:
    words, every = WORDS[language], Page(html).tables[language][1]
    headers = [text for _, text in every[0]]
    for row, rung in zip(every[1:], results["rungs"], strict=True):
        cells = dict(zip(headers, row, strict=True))
        lost = sum(run["diverged"] for run in rung["runs"])
        assert cells[words["diverged"]] == (str(lost), str(lost))
        for run in rung["runs"]:
            exact, text = cells[words["of_seed"].format(n=run["seed"])]
            loss = run["bits_per_byte"]
            assert (exact, text) == (("", "–") if loss is None else (str(loss), f"{loss:.4f}"))
        for size, losses in rung["by_position"].items():
            exact, _ = cells[words["at_length"].format(n=size)]
            assert exact == ("" if losses is None else str(sum(losses) / 16))


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    assert set(re.findall(r"https?://[^\"' <>]*", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|<img|<iframe", html)
    for tag, attributes in Page(html).tags:
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,", tag


def test_both_languages_are_complete(html: str) -> None:
    text = Page(html).text
    for language, other in (("en", "zh"), ("zh", "en")):
        for key, phrase in WORDS[language].items():
            if len(phrase) > 6 and "{" not in phrase and "|" not in phrase:
                theirs = WORDS[other][key]
                shown = phrase in text[language] or key in ("no_diverged", "same_as_first")
                assert shown or phrase not in text[other], key
                assert theirs == phrase or phrase not in text[other], key


def fields(phrase: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(phrase) if name is not None}


def test_the_words_are_the_same_in_both_and_all_are_used() -> None:
    english, chinese = WORDS["en"], WORDS["zh"]
    assert list(english) == list(chinese)
    for key in english:
        forms = [*english[key].split("|"), *chinese[key].split("|")]
        assert len({frozenset(fields(form)) for form in forms}) == 1, key
        assert all(forms) or key == "space"
    said: set[str] = set()
    prefixes = ("title_", "match_", "axis_", "reading_")
    for path in Path(charts.__file__).parent.glob("*.py"):
        if path.name != "words.py":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            said |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    assert {prefix for prefix in prefixes if prefix in said} == set(prefixes)
    unused = [key for key in english if key not in said and not key.startswith(prefixes)]
    assert unused == []


@pytest.mark.parametrize("design", ["ladder", "add", "drop", "factorial"])
@pytest.mark.parametrize("match", ["params", "flops", "none"])
def test_every_design_can_be_said(results: dict[str, Any], design: str, match: str) -> None:
    changed = {**results, "design": design, "match": match}
    for words in WORDS.values():
        said = summary(changed, words)
        assert words[f"match_{match}"] in said
        total = "−0.3444"  # from the first rung to the last: of a ladder alone
        assert (total in said) == (design == "ladder")
    against = copy.deepcopy(changed)
    against["rungs"][5]["previous"] = "2017"
    assert "against 2017" in charts.ladder_chart(against, WORDS["en"])
    assert "against" not in charts.ladder_chart(changed, WORDS["en"])


def test_the_caption_names_what_is_compared(results: dict[str, Any]) -> None:
    def caption(previous: list[str | None]) -> str:
        changed = copy.deepcopy(results)
        for rung, name in zip(changed["rungs"], previous, strict=True):
            rung["previous"] = name
        assert ("against" in ladder_svg(changed)) == ("named" in ladder_svg(changed))
        return charts.ladder_text(changed, WORDS["en"])

    order = [None, *list(CHANGES)[:-1]]
    assert "to the rung before (lower" in caption(order)
    assert "to 2017 (lower" in caption([None, *["2017"] * 9])
    assert "to the rung before, or to the one named (lower" in caption([*order[:-1], "2017"])


def test_the_summary_counts(results: dict[str, Any]) -> None:
    said = summary(results, WORDS["en"])
    assert "10 rungs, 3 seeds each" in said
    assert "4 help (pre-norm, rope, swiglu, untied), 1 hurts (gqa), 4 show no difference" in said
    assert "1 of 30 runs diverged: 2017 (seed 1)." in said
    assert f"{results['rungs'][0]['bits_per_byte']:.4f}" in said


def test_the_statistics_sentence(results: dict[str, Any]) -> None:
    def said(**changes: Any) -> str:
        changed = {**results, "statistics": {**results["statistics"], **changes}}
        return statistics(changed, WORDS["en"]).replace("\u00a0", " ")

    assert (
        "pooled over the comparisons (17 degrees of freedom; equal variances: p = 0.4312)" in said()
    )
    assert "each comparison's own" in said(pooled=False, equal_variance_p=0.0021)
    assert "not checked" in said(equal_variance_p=None)


def test_a_verdict_counts_the_seeds_left_in_both_rungs(results: dict[str, Any]) -> None:
    changed = copy.deepcopy(results)
    assert "no difference shown; 3 seeds could detect ≥ " in as_markdown(changed, "en")
    changed["rungs"][1]["runs"][2]["diverged"] = True  # of pre-norm; gelu is compared with it
    row = next(line for line in as_markdown(changed, "en").splitlines() if "| gelu |" in line)
    least = f"{changed['rungs'][2]['detectable']:.4f}"
    assert f"no difference shown; 2 seeds could detect ≥ {least} (80% power)" in row


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_effects_of_a_factorial(language: str, tmp_path: Path) -> None:
    found, words = invented_factorial(), WORDS[language]
    write_report(found, tmp_path)
    suffix = "" if language == "en" else ".zh"
    text = (tmp_path / f"report{suffix}.md").read_text(encoding="utf-8")
    tables = Page((tmp_path / "report.html").read_text(encoding="utf-8")).tables[language]
    after = text.partition(f"## {words['effects']}\n")[2]
    lines = [line.strip("| ").split(" | ") for line in after.splitlines() if line.startswith("|")]
    rows = list(csv.DictReader((tmp_path / "effects.csv").read_text("utf-8").splitlines()))
    names = ["rmsnorm", "rope", "rmsnorm × rope"]
    for shown in (tables[0], lines, rows, found["effects"]):
        assert len(shown) == 3 + (shown is tables[0]) + 2 * (shown is lines)
    for i, (effect, name) in enumerate(zip(found["effects"], names, strict=True)):
        said = effect_verdict(effect, words)
        ends = f"[{signed(effect['low'])}, {signed(effect['high'])}]"
        p_holm = p_value(effect["p_holm"])
        assert lines[2 + i] == [name, signed(effect["difference"]), ends, p_holm, said]
        cells = dict(zip((text for _, text in tables[0][0]), tables[0][1 + i], strict=True))
        assert cells[words["effect"]] == (name, name)
        assert cells[words["verdict"]] == (effect["verdict"], said)
        for key in ("difference", "low", "high", "p", "p_holm", "detectable", "diverged"):
            assert cells[words[key]][0] == str(effect[key])
            assert float(rows[i][key]) == effect[key]
    root = ET.fromstring(charts.effects_chart(found, words))
    assert words["bits_per_byte"] not in [*root.itertext()]
    straight(drawn(root, found["effects"]))


def test_only_a_factorial_has_effects(html: str) -> None:
    for words in WORDS.values():
        assert words["effects"] not in html


def test_effects_that_divergence_took() -> None:
    found = invented_factorial()
    none = dict.fromkeys(("low", "high", "p", "p_holm", "detectable"))
    for effect in found["effects"]:
        effect.update(none, seeds=1, diverged=2, verdict="not comparable")
    text = as_markdown(found, "en").partition("## Main effects")[2]
    assert text.count("not comparable; 2 of 3 seeds diverged") == 3
    assert "degrees of freedom" not in text.partition("## How")[0]


def test_a_verdict_says_how_many_seeds_diverged(results: dict[str, Any]) -> None:
    changed = copy.deepcopy(results)
    *_, before, rung = changed["rungs"]
    for run in (before["runs"][0], rung["runs"][2]):
        run["diverged"] = True
    rung.update(verdict="not comparable", low=None, high=None)
    assert "| not comparable; 2 of 3 seeds diverged |" in as_markdown(changed, "en")
    assert "| 无法比较；3 个种子中有 2 个发散 |" in as_markdown(changed, "zh")
    assert "not comparable; 2 of 3 seeds diverged" in ladder_svg(changed)
    assert "1 cannot be compared (untied)" in summary(changed, WORDS["en"])


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>|a`b`*c*{d}&amp;\n# e"


def hostile() -> dict[str, Any]:
    changed = invented(3)
    for rung in changed["rungs"]:
        rung.update(name=rung["name"] + HOSTILE, change=HOSTILE, adjusted=HOSTILE)
        rung["config"][HOSTILE] = HOSTILE + rung["name"]
    changed.update(base=HOSTILE, to=HOSTILE, command=HOSTILE, version=HOSTILE, created=HOSTILE)
    changed["data"]["name"] = HOSTILE
    changed["machine"] |= {"cpu": HOSTILE, "torch": HOSTILE, "python": HOSTILE, "dtype": HOSTILE}
    return changed


def test_text_from_data_stays_text() -> None:
    changed = hostile()
    parsed = Page(page(changed))
    assert [tag for tag, _ in parsed.tags if tag in ("script", "img")] == ["script"]
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    for row, rung in zip(parsed.tables["en"][1][1:], changed["rungs"], strict=True):
        assert [text for _, text in row[:3]] == [rung["name"], HOSTILE, HOSTILE]
    ET.fromstring(ladder_svg(changed))
    for language in WORDS:
        outside = re.split(r"^`{3,}$", as_markdown(changed, language), flags=re.MULTILINE)
        assert len(outside) == 3  # the command stands in one fence
        assert outside[1] == f"\n{HOSTILE}\n"
        assert "<" not in outside[0]
        table = [line for line in outside[0].splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {13}
        assert len(table) == 5


def test_files_are_whole_repeatable_and_replace_older_ones(
    results: dict[str, Any], html: str, tmp_path: Path
) -> None:
    given = copy.deepcopy(results)
    write_report(invented(2), tmp_path)
    write_report(results, tmp_path)
    assert results == given
    names = ["ladder.svg", "ladder.zh.svg", "report.csv", "report.html", "report.json"]
    names += ["report.md", "report.zh.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == given
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html == page(given)


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    changed = invented(3)
    run = changed["rungs"][0]["runs"][1]
    run["bits_per_byte"], run["curve"][-1][3] = math.nan, math.inf
    run["held_out_curve"][-1][1] = math.nan
    changed["rungs"][1]["by_position"]["512"][3] = math.nan
    write_report(changed, tmp_path)
    read = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert read["rungs"][0]["runs"][1]["bits_per_byte"] is None
    assert read["rungs"][0]["runs"][1]["curve"][-1][3] is None
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|inf)\b", html)
    assert WORDS["en"]["not_measured"] in html


def test_the_csv_gives_the_numbers_back(results: dict[str, Any]) -> None:
    for case in (results, hostile()):
        rows = list(csv.DictReader(as_csv(case).splitlines(keepends=True)))
        assert len(rows) == len(case["rungs"])
        for row, rung in zip(rows, case["rungs"], strict=True):
            for key, value in rung.items():
                if value is None or isinstance(value, str):
                    assert row.get(key, "") == (value or "")
                elif isinstance(value, int | float):
                    assert float(row[key]) == value
            for run in rung["runs"]:
                text = row[f"bits_per_byte_seed_{run['seed']}"]
                assert (float(text) if text else None) == run["bits_per_byte"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_markdown_table(results: dict[str, Any], language: str) -> None:
    text = as_markdown(results, language)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(results["rungs"])
    for row, rung in zip(rows[2:], results["rungs"], strict=True):
        cells = [cell.strip() for cell in row]
        assert cells[0] == rung["name"]
        assert as_number(cells[2]) == round(rung["bits_per_byte"], 4)
        if rung["difference"] is None:
            assert cells[3:6] == ["–", "–", WORDS[language]["reference"]]
        else:
            ends = [as_number(end) for end in cells[4].strip("[]").split(", ")]
            assert as_number(cells[3]) == round(rung["difference"], 4)
            assert ends == [round(rung["low"], 4), round(rung["high"], 4)]
        assert as_number(cells[6]) == rung["parameters"]
        assert as_number(cells[7]) == rung["flops_per_token"]
    assert f"```\n{results['command']}\n```" in text


def all_diverged() -> dict[str, Any]:
    changed = invented(3)
    for run in changed["rungs"][1]["runs"]:
        run.update(diverged=True, bits_per_byte=None)
    none = dict.fromkeys(("bits_per_byte", "difference", "low", "high", "p", "p_holm"))
    changed["rungs"][1].update(none, detectable=None, correlation=None, verdict="not comparable")
    changed["rungs"][2].update(none, bits_per_byte=2.5, verdict="not comparable")
    changed["statistics"] = {
        "pooled": False,
        "equal_variance_p": None,
        "degrees_of_freedom": None,
        "confidence": 0.95,
    }
    return changed


def bare() -> dict[str, Any]:
    """Nothing but what a run of one step has."""
    changed = invented(2, 1, 1)
    for rung in changed["rungs"]:
        rung["by_position"] = {}
        for run in rung["runs"]:
            run["held_out_curve"] = run["curve"] = []
    return changed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (invented(1), "No interval: it takes two rungs"),
        (invented(10, 1), "one seed: no interval"),
        (all_diverged(), "2 cannot be compared (pre-norm, gelu)"),
        (bare(), "2 rungs, 1 seed each"),
    ],
    ids=["one rung", "one seed", "all diverged", "bare"],
)
def test_little_to_show(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_report(given, tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    parsed = Page(html)
    assert said in parsed.text["en"]
    assert len(parsed.tables["zh"][1]) == 1 + len(given["rungs"])
    assert not re.search(r"\b(nan|None|inf)\b", html.replace("none", ""))
    ET.fromstring(ladder_svg(given))


def straight(pairs: list[tuple[float, float]]) -> None:
    """All (value, pixel) lie on one line, which is not level."""
    (a, p), (b, q) = min(pairs), max(pairs)
    slope = (q - p) / (b - a)
    assert abs(slope) > 1
    for value, pixel in pairs:
        assert pixel == pytest.approx(p + slope * (value - a), abs=0.2)


def drawn(root: ET.Element, found: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(value, pixel) of each interval's ends and of its mark."""
    places = []
    marks = [g for g in root.iter(f"{SVG}g") if "data-tip" in g.attrib]
    for mark, row in zip(marks, found, strict=True):
        line, shape = mark.find(f"{SVG}path"), mark[-1]
        assert line is not None
        low, high = (float(x) for x in re.findall(r"[ML](-?[\d.]+) ", line.attrib["d"]))
        middle = float(shape.get("cx", 0)) or float(shape.attrib["x"]) + 5
        places += [(row["low"], low), (row["high"], high), (row["difference"], middle)]
    return places


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_ladder_is_drawn_to_scale(results: dict[str, Any], language: str) -> None:
    root = ET.fromstring(ladder_svg(results, language))
    words = "\n".join(root.itertext())
    marks = [g for g in root.iter(f"{SVG}g") if "data-tip" in g.attrib]
    assert len(marks) == 9
    shapes = []
    for mark, rung in zip(marks, results["rungs"][1:], strict=True):
        shape = mark[-1]
        shapes.append((rung["verdict"], shape.tag.removeprefix(SVG), shape.attrib["class"]))
        for text in (rung["name"], rung["change"], f"{rung['bits_per_byte']:.4f}"):
            assert text in words
    straight(drawn(root, results["rungs"][1:]))
    assert set(shapes) == {
        ("helps", "circle", "helps"),
        ("hurts", "rect", "hurts"),
        ("no difference shown", "circle", "neutral-line"),
    }


@pytest.mark.parametrize("axis", ["steps", "flops", "seconds"])
def test_curves_are_drawn_to_scale(results: dict[str, Any], axis: str) -> None:
    root = ET.fromstring(charts.curve_chart(results, WORDS["en"], axis))
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "series"]
    across, down = [], []
    for group, rung in zip(groups, results["rungs"], strict=True):
        kept = [run for run in rung["runs"] if not run["diverged"]]
        dashed = [
            line for line in group.iter(f"{SVG}polyline") if "stroke-dasharray" in line.attrib
        ]
        assert len(dashed) == len(rung["runs"]) - len(kept)
        line, band = group.find(f".//{SVG}g/{SVG}polyline"), group.find(f"{SVG}polygon")
        assert line is not None
        assert band is not None
        drawn, around = ([*map(pair, x.attrib["points"].split())] for x in (line, band))
        assert len(around) == 2 * len(drawn)
        for i, (x, y) in enumerate(drawn):
            step = kept[0]["held_out_curve"][i][0]
            values = [run["held_out_curve"][i][1] for run in kept]
            ends = [
                (sum(values) / len(values), y),
                (max(values), around[i][1]),
                (min(values), around[-1 - i][1]),
            ]
            at = {
                "steps": step,
                "flops": step * 2048 * rung["flops_per_token"] / 1e10,
                "seconds": sum(run["seconds"] for run in kept) / len(kept) * step / 195,
            }
            down += [(value, pixel) for value, pixel in ends]
            across.append((at[axis], x))
    straight(down)
    (a, p), (b, q) = min(across), max(across)
    for value, pixel in across:
        assert pixel == pytest.approx(p + (q - p) * (value - a) / (b - a), abs=0.2)


def pair(text: str) -> tuple[float, float]:
    x, y = text.split(",")
    return float(x), float(y)


def test_positions_beyond_the_trained_length(results: dict[str, Any]) -> None:
    for rung in results["rungs"]:
        root = ET.fromstring(charts.position_chart(rung, results, WORDS["en"]))
        lines = {
            g.attrib["data-tip"].split(", ")[1].split(":")[0]: g[0].attrib
            for g in root.iter(f"{SVG}g")
        }
        known = {size: losses for size, losses in rung["by_position"].items() if losses}
        assert lines.keys() == known.keys()
        undefined = "undefined beyond 128" in "".join(root.itertext())
        assert undefined == (rung["name"] in LEARNED)
        straight(
            [
                (loss, pair(point)[1])
                for size, losses in known.items()
                for loss, point in zip(losses, lines[size]["points"].split(), strict=True)
            ]
        )
        broken = rung["name"] in ("rope", "swiglu", "gqa")
        assert lines["128"]["class"] == "helps-line"
        if "512" in lines:
            assert lines["512"]["class"] == ("neutral-line" if broken else "helps-line")


def test_a_line_breaks_by_its_mean_beyond_the_trained_length() -> None:
    clearly = charts.WORSE + 0.01
    assert charts.breaks([9.0, 9.0, 3.0 + clearly, 3.0 + clearly], 256, 128, 3.0)
    assert not charts.breaks([9.0, 9.0, 3.0 + clearly, 3.0], 256, 128, 3.0)
    assert not charts.breaks([9.0, 9.0], 128, 128, 3.0)


@given(st.lists(st.floats(0, 300), max_size=30), st.floats(1, 20))
def test_spread_keeps_order_and_gaps(places: list[float], gap: float) -> None:
    moved = svg.spread(places, gap, 10, 290)
    room = min(gap, 280 / max(1, len(places) - 1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(10 - 1e-6 <= place <= 290 + 1e-6 for place in moved)
    for i, j in itertools.pairwise(order):
        assert moved[j] - moved[i] >= room - 1e-6
    apart = [b - a for a, b in itertools.pairwise(sorted(places))]
    if all(10 <= place <= 290 for place in places) and all(between >= gap for between in apart):
        assert moved == places


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6), st.integers(3, 8))
def test_ticks_are_round_and_read_apart(low: float, width: float, count: int) -> None:
    scale = svg.Scale(low, low + width, 0, 100)
    ticks = scale.ticks(count)
    assert 1 <= len(ticks) <= count + 1
    step = scale.step(count)
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)
    written = [scale.write(tick, count) for tick in ticks]
    assert len(set(written)) == len(written)
    for tick, text in zip(ticks, written, strict=True):
        assert as_number(text) == pytest.approx(tick, rel=1e-12, abs=1e-6 * step)


BROWSED = """<!doctype html><body>{frames}<script>
addEventListener("load", () => {{
  const seen = [...document.querySelectorAll("iframe")].map((frame) => {{
    const page = frame.contentDocument, root = page.documentElement;
    const main = () => page.querySelector(`main[lang=${{root.lang}}]`);
    const out = {{ first: root.lang, wide: root.scrollWidth, clipped: [] }};
    page.querySelector("nav [data-lang=zh]").click();
    out.zh = [page.title, main().querySelector("h1").offsetHeight > 0, root.scrollWidth];
    page.querySelector("nav [data-lang=en]").click();
    const sorted = main().querySelectorAll("table")[1];
    const names = () => [...sorted.tBodies[0].rows].map((row) => row.cells[0].dataset.value);
    const header = [...sorted.tHead.rows[0].cells].find((c) => c.textContent === "difference");
    header.firstChild.click();
    out.up = names();
    header.firstChild.click();
    out.down = names();
    for (const text of main().querySelectorAll("svg text")) {{
      const inner = text.getBoundingClientRect();
      const outer = text.ownerSVGElement.getBoundingClientRect();
      if (inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1)) {{
        out.clipped.push(text.textContent);
      }}
    }}
    return out;
  }});
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "SEEN";
}});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_in_a_browser(results: dict[str, Any], html: str, tmp_path: Path) -> None:
    """Phone and desktop: no error, no sideways scroll, no cut text; sorting and languages work."""
    frames = "".join(
        f'<iframe srcdoc="{escape(html)}" style="border:0;width:{width}px;height:900px"></iframe>'
        for width in (360, 1280)
    )
    (tmp_path / "browsed.html").write_text(BROWSED.format(frames=frames), encoding="utf-8")
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--lang=en-US"),
            *(
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}",
            ),
            *("--virtual-time-budget=5000", "--dump-dom", str(tmp_path / "browsed.html")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    phone, desktop = json.loads(unescape(done.stdout.split("SEEN")[1]))
    by_difference = sorted(
        (rung for rung in results["rungs"] if rung["difference"] is not None),
        key=lambda rung: rung["difference"],
    )
    names = [rung["name"] for rung in by_difference]
    for seen, width in ((phone, 360), (desktop, 1280)):
        assert seen["first"] == "en"
        assert seen["wide"] == width
        assert seen["zh"] == ["从 zh-3m-2017 到 zh-3m：一次只改一处", True, width]
        assert seen["up"] == [*names, "2017"]
        assert seen["down"] == [*names[::-1], "2017"]
        assert seen["clipped"] == []
