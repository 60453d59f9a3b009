"""From the runs of a claim's comparisons to its Finding. Differences are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from .. import stats
from ..words import WORDS, fixed, signed
from .claim import Finding, Verdict
from .trained import Comparison
from .training import STRETCH, Result, Study, Trained

Done = Sequence[tuple[Comparison, Trained]]  # those of one claim
Said = tuple[str, str]  # in English, in Chinese
BySeed = dict[int, float | None]  # None: the run diverged, or is beyond a learned table

HOLDS = 0.02  # nats per token: a longer text that costs surely less is still read well
_VERDICTS: dict[str, Verdict] = {
    "helps": "helps",
    "hurts": "hurts",
    "no difference shown": "no-difference-shown",
}


def decide(number: int, done: Done, study: Study) -> Finding:
    """What the runs say of claim `number`; not-measured where too few of them are whole."""
    return _DECIDE.get(number, _by_loss)(done, study)


def _by_loss(done: Done, study: Study) -> Finding:
    """The claim's subjects are the variants; its verdict is the worst of theirs."""
    found = _against_baseline(done)
    return Finding(_worst(found), *_joined(_versus(one, to) for to, one in found))


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
    return Finding(_worst(found), *_joined(said))


def _by_depth(done: Done, study: Study) -> Finding:
    """Pre against post, shallow and deep: the claim is that it helps, and more where deep."""
    found = _against_baseline(done)
    by_levels: dict[tuple[int, ...], BySeed] = {}
    rates, rates_zh, depths = [], [], []
    for deep, (comparison, trained) in enumerate(done):
        depths.append(comparison.configs()[comparison.baseline].n_layers)
        for pre, name in enumerate([comparison.baseline, *comparison.variants]):
            by_levels[deep, pre] = _bits(trained.runs[name])
            (best,) = {run["lr"] for run in trained.runs[name]}
            lost = sum(run["diverged"] for run in [*trained.runs[name], *trained.tuned[name]])
            swing = _swing(trained.tuned[name])
            rates.append(f"{name}: {best:g}, {swing}, {lost}")
            rates_zh.append(f"{name}：{best:g}、{swing}、{lost}")
    *_, more = stats.factorial(by_levels, ["depth", "pre-norm"]).comparisons
    said = [_versus(one, to) for to, one in found]
    if more.difference is not None and more.low is not None and more.high is not None:
        # An interaction is half of what the depth adds to the difference.
        numbers = [signed(2 * value) for value in (more.difference, more.low, more.high)]
        en = "from {} to {} layers the difference changes by {} ({} to {})"
        zh = "从 {} 层到 {} 层，差值变化 {}（{} 至 {}）"
        said.append((en.format(*depths, *numbers), zh.format(*depths, *numbers)))
    en, zh = _joined(said)
    verdict = _worst(found)
    helps = [one.verdict == "helps" for _, one in found]
    if verdict != "not-measured" and any(helps):
        deeper = more.high is not None and more.high < 0
        verdict = "true" if all(helps) and deeper else "wrong-in-part"
    return Finding(
        verdict,
        f"{en}; best of the learning rates, worst less best of them (one seed), and diverged "
        f"runs: {'; '.join(rates)}",
        f"{zh}；各模型的最佳学习率、各学习率中最差与最好之差（一个种子）、发散的次数："
        f"{'；'.join(rates_zh)}",
    )


def _swing(tuned: Iterable[Result]) -> str:
    bits = [run["bits_per_byte"] for run in tuned if run["bits_per_byte"] is not None]
    return fixed(max(bits) - min(bits) if bits else None)


def _by_extrapolation(done: Done, study: Study) -> Finding:
    """What lies behind the trained length in a text of twice that, against the same tokens in
    texts of the trained length: windows begin alike, so that the first halves are equal."""
    ((comparison, trained),) = done
    short, long = study.seq_len, 2 * study.seq_len
    read: dict[str, BySeed] = {}
    for name in comparison.configs():
        for length in (short, long):
            whole = _nats(trained.runs[name], "by_position", length)
            behind = long / (long - short)  # tokens in all for one behind the trained length
            read[f"{name} {length}"] = {s: v if v is None else behind * v for s, v in whole.items()}
    undefined = [
        name
        for name in comparison.configs()
        if _any(read[f"{name} {short}"]) and not _any(read[f"{name} {long}"])
    ]
    names = [name for name in comparison.configs() if name not in undefined]
    pairs = [(f"{name} {long}", f"{name} {short}") for name in names]
    found = dict(zip(names, stats.compare(read, pairs).comparisons, strict=True))
    said = [_nats_more(name, one) for name, one in found.items()]
    said += [(f"{name} undefined", f"{name} 无定义") for name in undefined]
    en, zh = _joined(said)
    rope, sinusoidal = _holds(found.get("rope")), _holds(found.get("sinusoidal"))
    verdict: Verdict = "true" if rope else "wrong"
    if rope is None or sinusoidal is None:
        verdict = _unknown([found.get("rope"), found.get("sinusoidal")])
    elif rope and sinusoidal:
        verdict = "wrong-in-part"
    return Finding(
        verdict,
        f"nats per token more at positions {short + 1} to {long} than for the same tokens read "
        f"{short} at a time (surely less than {HOLDS} holds): {en}",
        f"位置 {short + 1} 至 {long} 上每词元的损失，比同样的词元每次只读 {short} 个时高出的奈特数"
        f"（必定小于 {HOLDS} 算成立）：{zh}",
    )


def _by_stretching(done: Done, study: Study) -> Finding:
    """Each scaling's reading beyond the trained length against plain RoPE's at that length."""
    ((comparison, trained),) = done
    n, names = study.seq_len, list(trained.runs)
    if comparison.baseline not in names:
        return Finding("not-measured", "every run diverged", "所有训练都发散了")
    reference = _nats(trained.runs[comparison.baseline], "by_position_before", n)

    def against(key: str, length: int) -> dict[str, stats.Comparison]:
        read = {name: _nats(runs, key, length) for name, runs in trained.runs.items()}
        read["reference"] = reference
        compared = stats.compare(read, [(name, "reference") for name in names]).comparisons
        return dict(zip(names, compared, strict=True))

    twice, most = 2 * n, STRETCH * n
    near, far = against("by_position_before", twice), against("by_position_before", most)
    tuned, steps = against("by_position", most), study.stretched_train.steps
    said = []
    for name in names:
        en, zh = _nats_more(name, near[name])
        untrained, after = (signed(at[name].difference, 3) for at in (far, tuned))
        said.append((f"{en}, {untrained} at {most}, {after} after the tune",
                     f"{zh}，{most} 时 {untrained}，微调后 {after}"))  # fmt: skip
    en, zh = _joined(said)
    plain, *claimed = (_holds(near.get(name)) for name in ("rope", "theta × 4", "PI", "YaRN"))
    verdict: Verdict = "true" if all(claimed) else "wrong-in-part" if any(claimed) else "wrong"
    if plain is None or None in claimed:
        verdict = _unknown(near.values())
    elif plain and all(claimed):  # here is nothing that a scaling mends
        verdict = "no-difference-shown"
    return Finding(
        verdict,
        f"nats per token more, untrained, at {twice} tokens than RoPE's at the trained {n} "
        f"(surely less than {HOLDS} holds), then at {most}, and there after {steps} steps at "
        f"that length: {en}",
        f"每词元的损失比 RoPE 在训练长度 {n} 上高出的奈特数：不训练、读 {twice} 个词元时"
        f"（必定小于 {HOLDS} 算成立），其后依次是读 {most} 个词元时，以及在该长度上微调 "
        f"{steps} 步之后：{zh}",
    )


def _by_ladder(done: Done, study: Study) -> Finding:
    """Each rung against the one before: a gain that is seen at this size refutes the claim."""
    ((comparison, trained),) = done
    names = list(comparison.configs())
    scores = {name: _bits(trained.runs[name]) for name in names}
    before = names[:-1]
    compared = stats.compare(scores, list(zip(names[1:], before, strict=True))).comparisons
    found = list(zip(before, compared, strict=True))
    gains = [one.verdict == "helps" for one in compared]
    verdict = _worst(found)
    if verdict != "not-measured":
        verdict = "wrong" if all(gains) else "wrong-in-part" if any(gains) else verdict
    return Finding(verdict, *_joined(_versus(one, to) for to, one in found))


_DECIDE: dict[int, Callable[[Done, Study], Finding]] = {
    9: _by_depth,
    13: _by_extrapolation,
    14: _by_stretching,
    28: _by_perplexity,
    29: _by_share_of_loss,
    46: _by_ladder,
}


def _against_baseline(done: Done) -> list[tuple[str, stats.Comparison]]:
    """(baseline, variant less baseline) of each, corrected together; two comparisons of the same
    models count once."""
    scores: dict[str, BySeed] = {}
    pairs, names, seen = [], [], []
    for i, (comparison, trained) in enumerate(done):
        if comparison.trained() in seen:
            continue
        seen.append(comparison.trained())
        scores |= {f"{i} {name}": _bits(runs) for name, runs in trained.runs.items()}
        pairs += [(f"{i} {name}", f"{i} {comparison.baseline}") for name in comparison.variants]
        names += [(comparison.baseline, name) for name in comparison.variants]
    compared = stats.compare(scores, pairs).comparisons
    return [(to, replace(one, name=name)) for (to, name), one in zip(names, compared, strict=True)]


def _worst(found: Sequence[tuple[str, stats.Comparison]]) -> Verdict:
    verdicts = [_VERDICTS.get(one.verdict or "", "not-measured") for _, one in found]
    order: tuple[Verdict, ...] = ("hurts", "not-measured", "no-difference-shown", "helps")
    return min(verdicts, key=order.index)


def _holds(one: stats.Comparison | None) -> bool | None:
    """None: the interval leaves it open, or there is none."""
    if one is None or one.high is None:
        return None
    if one.high < HOLDS:
        return True
    return False if one.verdict == "hurts" else None


def _unknown(found: Iterable[stats.Comparison | None]) -> Verdict:
    measured = all(one is not None and one.high is not None for one in found)
    return "no-difference-shown" if measured else "not-measured"


def _bits(runs: Iterable[Result]) -> BySeed:
    return {run["seed"]: run["bits_per_byte"] for run in runs}


def _nats(runs: Iterable[Result], key: str, length: int) -> BySeed:
    """The mean over windows of `length` tokens."""
    parts = {run["seed"]: (run.get(key) or {}).get(str(length)) for run in runs}
    return {seed: fmean(part) if part else None for seed, part in parts.items()}


def _any(by_seed: Mapping[int, float | None]) -> bool:
    return any(value is not None for value in by_seed.values())


def _versus(one: stats.Comparison, to: str) -> Said:
    if one.difference is None or one.low is None:
        return (
            f"{one.name} against {to}: not comparable, {one.seeds} seeds diverged in neither",
            f"{one.name} 对 {to}：无法比较，两者都未发散的种子有 {one.seeds} 个",
        )
    at, low, high = signed(one.difference), signed(one.low), signed(one.high)
    en = f"{one.name} against {to} {at} bits per byte ({low} to {high})"
    zh = f"{one.name} 对 {to}：每字节比特数相差 {at}（{low} 至 {high}）"
    said = one.verdict or ""
    if said == "no difference shown":
        least = fixed(one.detectable)
        en += f", {said}; {one.seeds} seeds could detect ≥ {least} (80% power, uncorrected)"
        zh += f"，{WORDS['zh'][said]}；{one.seeds} 个种子可测出 ≥ {least}（功效 80%，未校正）"
    else:
        en += f", {said}"
        zh += f"，{WORDS['zh'][said]}"
    return en, zh


def _nats_more(name: str, one: stats.Comparison) -> Said:
    at, low, high = (signed(value, 3) for value in (one.difference, one.low, one.high))
    return f"{name} {at} ({low} to {high})", f"{name} {at}（{low} 至 {high}）"


def _joined(said: Iterable[Said]) -> Said:
    both = list(said)
    return "; ".join(en for en, _ in both), "；".join(zh for _, zh in both)
