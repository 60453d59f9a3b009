"""What the checked claims look like: a table for a terminal, a Markdown page for the docs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rich.table import Table

from ..evolve.claims import IN_CHINESE, Claim, Finding

Language = Literal["en", "zh"]
_COLOURS = {
    "true": "green",
    "true-if": "yellow",
    "helps": "green",
    "hurts": "red",
    "wrong": "red",
    "wrong-in-part": "red",
}


class Row(NamedTuple):
    claim: Claim
    finding: Finding


class Training(NamedTuple):
    """How the trained rows came about; all of them share it."""

    tokens: int  # a run
    steps: int
    seeds: int
    corpus: str
    cpu: str
    chart: bool  # whether the loss by position was measured
    flags: str = ""  # of the command, where it was not the plain one


def _command(claim: Claim, training: Training | None) -> str:
    return claim.command + (training.flags if training and claim.trained else "")


def as_dict(row: Row, training: Training | None = None) -> dict[str, int | str]:
    return {
        "number": row.claim.number,
        "claim": row.claim.statement,
        "verdict": row.finding.verdict,
        "figure": row.finding.figure,
        "command": _command(row.claim, training),
    }


def table(rows: list[Row], training: Training | None = None) -> Table:
    """The claim, and under it our figure."""
    found = Table(show_header=True, header_style="bold", show_lines=False, box=None)
    found.add_column("#", justify="right", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    found.add_column("claim, our figure, the command", overflow="fold")
    for claim, finding in rows:
        colour = _COLOURS.get(finding.verdict, "dim")
        verdict = f"[{colour}]{finding.verdict}[/]"
        found.add_row(str(claim.number), verdict, f"[bold]{_plain(claim.statement)}[/]")
        found.add_row("", "", _plain(finding.figure))
        found.add_row("", "", f"[dim]{_plain(_command(claim, training))}[/]", end_section=True)
    return found


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


_WORDS = {
    "en": {
        "title": "# What is said of GPT and Llama, checked",
        "other": "[中文](claims.zh.md)",
        "about": "Each row is a statement of published walk-throughs, decided by arithmetic, by a "
        "small exact computation or by training. This page is the output of",
        "legend": "A verdict is computed together with its figure. `true-if` names the condition; "
        "`not-measured` rows need training. Rows {timed} time the machine they run on. What comes "
        "from memory is marked as such.",
        "trained": "Rows {rows} were trained: every model from {seeds} seeds, {tokens:,} tokens a "
        "run ({steps} steps) of {corpus}, on {cpu}. That is early learning: what holds here need "
        "not hold after more of it. Differences are paired by seed, in held-out bits per byte "
        "(rows 13 and 14: nats per token; below 0 is better); in brackets the 95% interval, which "
        "covers other seeds, not other texts; a row's verdicts are corrected together (Holm).",
        "header": "| # | claim | verdict | our figure | make it again |",
        "chart": "![Loss by position for every position scheme](long-context.svg)",
        "chart_text": "Rows 13 and 14 as a chart, by the same command (`long-context.svg` in its "
        "folder).",
        "and": " and ",
    },
    "zh": {
        "title": "# 关于 GPT 和 Llama 的说法，逐条核对",
        "other": "[English](claims.md)",
        "about": "每一行是公开教程里的一个说法，由算术、一个精确的小计算或训练来判定。"
        "本页是这条命令的输出：",
        "legend": "结论与数字一同算出。“有条件成立”会写明条件；“尚未测量”的行需要训练。"
        "第 {timed} 行测的是运行这条命令的机器。凭记忆的数字都已注明。",
        "trained": "第 {rows} 行经过训练：每个模型 {seeds} 个种子，每次训练用 {corpus} 的 "
        "{tokens:,} 个词元（{steps} 步），在 {cpu} 上完成。这只是训练的早期：在这里成立的，"
        "训练更久后未必成立。差值按种子配对，单位为留出文本的每字节比特数（第 13、14 行为每词元"
        "奈特数），负值表示更好；括号内为 95% 区间，只反映更换种子的波动，不反映更换文本的波动；"
        "同一行的各次比较一并作 Holm 校正。",
        "header": "| # | 说法 | 结论 | 我们的数字 | 重做的命令 |",
        "chart": "![各种位置编码在各位置的损失](long-context.zh.svg)",
        "chart_text": "第 13、14 行的图，由同一条命令画出（其目录里的 `long-context.zh.svg`）。",
        "and": "、",
    },
}


def page(rows: list[Row], language: Language, training: Training | None = None) -> str:
    """The Markdown page; training: of the rows that were trained, if any were."""
    words = _WORDS[language]
    timed = [str(claim.number) for claim, _ in rows if claim.times_machine]
    trained = [str(claim.number) for claim, finding in rows
               if claim.trained and finding.verdict != "not-measured"]  # fmt: skip
    how = f"--train{training.flags}" if training else "--quick"
    lines = [words["title"], "", words["other"], "", words["about"], ""]
    lines += ["```", f"gpt2llama claims {how} --markdown {language}", "```", ""]
    lines += [words["legend"].format(timed=words["and"].join(timed) or "–"), ""]
    if training and trained:
        facts = training._asdict() | {"rows": ("、" if language == "zh" else ", ").join(trained)}
        lines += [words["trained"].format(**facts), ""]
    lines += [words["header"], "| ---: | --- | --- | --- | --- |"]
    for claim, finding in rows:
        cells: list[str] = [claim.statement, finding.verdict, finding.figure]
        if language == "zh":
            cells = [claim.statement_zh, IN_CHINESE[finding.verdict], finding.figure_zh]
        escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
        lines.append(f"| {claim.number} | {escaped} | `{_command(claim, training)}` |")
    if training and training.chart:
        lines += ["", words["chart"], "", words["chart_text"]]
    return "\n".join(lines) + "\n"
