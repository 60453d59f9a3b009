"""From the runs of a claim's comparisons to its Finding. Differences are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from .. import stats
from ..words import fixed, signed
from .claim import Finding, Verdict
from .trained import Comparison
from .training import STRETCH, Result, Study, Trained

Done = Sequence[tuple[Comparison, Trained]]  # those of one claim
Said = tuple[str, str]  # in English, in Chinese

_VERDICTS: dict[str | None, Verdict] = {
    "helps": "helps",
    "hurts": "hurts",
    "no difference shown": "no-difference-shown",
}
_WORST_FIRST = ("hurts", "no difference shown", "helps")
_VERDICT_ZH = {
    "helps": "有益",
    "hurts": "有害",
    "no difference shown": "未见差异",
    "not comparable": "无法比较",
}


def decide(number: int, done: Done, study: Study) -> Finding:
    """What the runs say of claim `number`; not-measured where too few of them are whole."""
    return _DECIDE.get(number, _by_loss)(done, study)


def _by_loss(done: Done, study: Study) -> Finding:
    """The claim's subjects are the variants; its verdict is the worst of theirs."""
    found = [(to, one) for to, one in _against_baseline(done)]
    return _finding(found, [_versus(one, to) for to, one in found])


def _by_perplexity(done: Done, study: Study) -> Finding:
    return _in_percent(
        done, ("perplexity", "困惑度"), lambda bits, _: math.expm1(bits / study.nats_to_bits)
    )


def _by_share_of_loss(done: Done, study: Study) -> Finding:
    return _in_percent(done, ("loss", "损失"), lambda bits, baseline: bits / baseline)


def _in_percent(done: Done, what: Said, share: Callable[[float, float], float]) -> Finding:
    """share: from a difference in bits per byte, and the baseline's mean, to a share."""
    comparison, trained = done[0]
    whole = [bits for bits in _bits(trained.runs[comparison.baseline]).values() if bits is not None]
    found, said = _against_baseline(done), []
    for to, one in found:
        en, zh = _versus(one, to)
        if one.difference is not None and one.low is not None and one.high is not None:
            at, low, high = (
                signed(100 * share(bits, fmean(whole)), 1)
                for bits in (one.difference, one.low, one.high)
            )
            en += f": {what[0]} {at}% ({low}% to {high}%)"
            zh += f"：{what[1]} {at}%（{low}% 至 {high}%）"
        said.append((en, zh))
    return _finding(found, said)


def _by_depth(done: Done, study: Study) -> Finding:
    """Pre against post at two depths: 2² runs, whose interaction is half of what depth adds."""
    by_levels: dict[tuple[int, ...], dict[int, float | None]] = {}
    found, swings = _against_baseline(done), []
    for deep, (comparison, trained) in enumerate(done):
        for pre, name in enumerate([comparison.baseline, *comparison.variants]):
            by_levels[deep, pre] = _bits(trained.runs[name])
            swings.append(f"{name} {_swing(trained.tuned[name])}")
    said = [_versus(one, to) for to, one in found]
    *_, more = stats.factorial(by_levels, ["depth", "pre-norm"]).comparisons
    rates = done[0][0].learning_rates
    ends = f"{min(rates):g}–{max(rates):g}"
    if more.difference is not None and more.low is not None and more.high is not None:
        numbers = [signed(2 * value) for value in (more.difference, more.low, more.high)]
        en, zh = "depth adds {} ({} to {})", "加深另带来 {}（{} 至 {}）"
        said.append((en.format(*numbers), zh.format(*numbers)))
    said.append(
        (
            f"worst less best of the learning rates {ends}, one seed: {', '.join(swings)}",
            f"学习率 {ends} 中最差与最好之差（一个种子）：{'、'.join(swings)}",
        )
    )
    verdicts = {one.verdict for _, one in found}
    if verdicts == {"helps"}:
        deeper = more.verdict == "helps"
        return Finding("true" if deeper else "wrong-in-part", *_joined(said))
    if "helps" in verdicts:
        return Finding("wrong-in-part", *_joined(said))
    return _finding(found, said)


def _swing(tuned: Iterable[Result]) -> str:
    bits = [result["bits_per_byte"] for result in tuned]
    known = [value for value in bits if value is not None]
    if not known:
        return "–"
    lost = f" (+{len(bits) - len(known)} ∞)" if len(known) < len(bits) else ""
    return fixed(max(known) - min(known)) + lost


def _by_extrapolation(done: Done, study: Study) -> Finding:
    """The same text read in windows of twice the trained length rather than of it."""
    ((comparison, trained),) = done
    short, long = study.seq_len, 2 * study.seq_len
    read = {
        f"{name} {length}": _nats(trained.runs[name], "by_position", length)
        for name in comparison.configs()
        for length in (short, long)
    }
    reachable = [n for n in comparison.configs() if any(_known(read[f"{n} {long}"]))]
    undefined = [n for n in comparison.configs() if n not in reachable]
    pairs = [(f"{name} {long}", f"{name} {short}") for name in reachable]
    found = dict(zip(reachable, stats.compare(read, pairs).comparisons, strict=True))
    said = [_nats_more(name, one) for name, one in found.items()]
    said += [(f"{name} undefined", f"{name} 无定义") for name in undefined]
    en, zh = _joined(said)
    breaks = {name: one.verdict == "hurts" for name, one in found.items()}
    verdict: Verdict = "wrong-in-part" if breaks["rope"] == breaks["sinusoidal"] else "true"
    if breaks["rope"]:
        verdict = "wrong"
    return Finding(
        verdict,
        f"nats per token more when the same text is read {long} at a time, not {short}: {en}",
        f"同一文本每次读 {long} 而不是 {short} 个词元时，每词元多出的奈特数：{zh}",
    )


def _by_stretching(done: Done, study: Study) -> Finding:
    """Each scaling's reading beyond the trained length against plain RoPE's at that length."""
    ((comparison, trained),) = done
    n = study.seq_len
    twice, most, tuned = 2 * n, STRETCH * n, f"tuned {STRETCH * n}"
    read = {"reference": _nats(trained.runs[comparison.baseline], "by_position_before", n)}
    for name, runs in trained.runs.items():
        for length in (twice, most):
            read[f"{name} {length}"] = _nats(runs, "by_position_before", length)
        read[f"{name} {tuned}"] = _nats(runs, "by_position", most)
    names = [name for name in read if name != "reference"]
    compared = stats.compare(read, [(name, "reference") for name in names]).comparisons
    found = dict(zip(names, compared, strict=True))
    steps = study.stretched_train.steps
    said = []
    for name in trained.runs:
        en, zh = _nats_more(name, found[f"{name} {twice}"])
        far, after = (signed(found[f"{name} {at}"].difference, 3) for at in (most, tuned))
        said.append((f"{en}, {far} at {most}, {after} after the tune",
                     f"{zh}，{most} 时 {far}，微调后 {after}"))  # fmt: skip
    en, zh = _joined(said)
    reaches = {name: found[f"{name} {twice}"].verdict != "hurts" for name in trained.runs}
    kept = [reaches[name] for name in ("theta × 4", "PI", "YaRN")]
    verdict: Verdict = "true" if all(kept) else "wrong-in-part" if any(kept) else "wrong"
    if all(reaches.values()):  # plain RoPE among them: here is nothing that a scaling mends
        verdict = "no-difference-shown"
    return Finding(
        verdict,
        f"nats per token more, untrained, at {twice} tokens than RoPE's at the trained {n} (then "
        f"at {most}, and there after {steps} steps at that length): {en}",
        f"不训练、读 {twice} 个词元时，比 RoPE 在训练长度 {n} 上每词元多出的奈特数（其后依次是读 "
        f"{most} 个词元时，以及在该长度上微调 {steps} 步之后）：{zh}",
    )


def _by_ladder(done: Done, study: Study) -> Finding:
    """Each rung against the one before: a change that can be seen at this size refutes it."""
    ((comparison, trained),) = done
    names = list(comparison.configs())
    scores = {name: _bits(trained.runs[name]) for name in names}
    compared = stats.compare(scores, list(zip(names[1:], names[:-1], strict=True))).comparisons
    said = [
        (f"{one.name} {signed(one.difference)} {one.verdict}",
         f"{one.name} {signed(one.difference)} {_VERDICT_ZH.get(one.verdict or '', '–')}")
        for one in compared
    ]  # fmt: skip
    seen = any(one.verdict in ("helps", "hurts") for one in compared)
    en, zh = _joined(said)
    return Finding(
        "wrong" if seen else "no-difference-shown",
        f"each rung against the one before, bits per byte: {en}",
        f"每一级与前一级之差（每字节比特数）：{zh}",
    )


_DECIDE: dict[int, Callable[[Done, Study], Finding]] = {
    9: _by_depth,
    13: _by_extrapolation,
    14: _by_stretching,
    28: _by_perplexity,
    29: _by_share_of_loss,
    46: _by_ladder,
}


def _against_baseline(done: Done) -> list[tuple[str, stats.Comparison]]:
    """(baseline, variant less baseline) of each; two comparisons of the same models count once."""
    found, seen = [], []
    for comparison, trained in done:
        if comparison.trained() in seen:
            continue
        seen.append(comparison.trained())
        scores = {name: _bits(runs) for name, runs in trained.runs.items()}
        pairs = [(name, comparison.baseline) for name in comparison.variants]
        found += [(comparison.baseline, one) for one in stats.compare(scores, pairs).comparisons]
    return found


def _finding(found: Sequence[tuple[str, stats.Comparison]], said: Sequence[Said]) -> Finding:
    verdicts = [one.verdict for _, one in found]
    worst = next((v for v in _WORST_FIRST if v in verdicts), None)
    return Finding(_VERDICTS.get(worst, "not-measured"), *_joined(said))


def _bits(runs: Iterable[Result]) -> dict[int, float | None]:
    return {run["seed"]: run["bits_per_byte"] for run in runs}


def _nats(runs: Iterable[Result], key: str, length: int) -> dict[int, float | None]:
    """The mean over the window, by seed; None: diverged, or beyond a learned table."""
    parts = {run["seed"]: (run.get(key) or {}).get(str(length)) for run in runs}
    return {seed: fmean(part) if part else None for seed, part in parts.items()}


def _known(by_seed: dict[int, float | None]) -> list[bool]:
    return [value is not None for value in by_seed.values()]


def _versus(one: stats.Comparison, to: str) -> Said:
    if one.difference is None or one.low is None:
        return (
            f"{one.name} against {to}: not comparable, {one.seeds} seeds of both are whole",
            f"{one.name} 对 {to}：无法比较，两者都未发散的种子有 {one.seeds} 个",
        )
    at, low, high = signed(one.difference), signed(one.low), signed(one.high)
    en = f"{one.name} against {to} {at} bits per byte ({low} to {high})"
    zh = f"{one.name} 对 {to}：每字节比特数相差 {at}（{low} 至 {high}）"
    if one.verdict == "no difference shown":
        least = fixed(one.detectable)
        en += f", {one.seeds} seeds could show {least}"
        zh += f"，{one.seeds} 个种子可测出 {least}"
    return en, zh


def _nats_more(name: str, one: stats.Comparison) -> Said:
    at, low, high = (signed(value, 3) for value in (one.difference, one.low, one.high))
    return f"{name} {at} ({low} to {high})", f"{name} {at}（{low} 至 {high}）"


def _joined(said: Sequence[Said]) -> Said:
    return "; ".join(en for en, _ in said), "；".join(zh for _, zh in said)
