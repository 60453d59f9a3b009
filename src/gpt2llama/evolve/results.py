"""From the runs of a sweep to what they show: the dict of report.json, which report.py draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..data.batches import TokenData
from ..plan import flops_per_token, kv_bytes_per_token, parameters
from .design import Rung
from .measure import bits_of_tokens
from .stats import Analysis, Comparison, compare, factorial
from .sweep import Plan, machine

Result = Mapping[str, Any]
_OF_A_RUN = (
    *("seed", "bits_per_byte", "diverged", "seconds", "tokens_per_s", "peak_rss_bytes", "lr"),
    *("curve", "held_out_curve", "why"),
)


def summarise(folder: Path, plan: Plan, by_rung: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """by_rung: the results of each rung's seeds. All rungs are there; a run may have diverged."""
    data, question = TokenData.open(folder / "data"), plan.question
    scores = {
        rung.name: {result["seed"]: result["bits_per_byte"] for result in by_rung[rung.name]}
        for rung in plan.rungs
    }
    pairs = [(rung.name, rung.previous) for rung in plan.rungs if rung.previous is not None]
    found = compare(scores, pairs)
    compared = {comparison.name: comparison for comparison in found.comparisons}
    tokens = plan.train.steps * plan.train.batch_size * (plan.train.seq_len or 0)
    values: dict[str, Any] = {
        "version": version("gpt2llama"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "machine": machine(plan.train),
        "design": question.design,
        "base": question.base,
        "to": question.to,
        "match": question.match,
        "seeds": list(range(question.seeds)),
        "tokens": tokens,
        "steps": plan.train.steps,
        "train": plan.train.to_dict(),
        "data": {
            "name": plan.corpus,
            "train_tokens": len(data.train),
            "held_out_tokens": len(data.held_out),
            "held_out_bytes": data.held_out_bytes,
            "vocab_size": data.vocab_size,
        },
        "statistics": _statistics(found),
        "rungs": [
            _rung(rung, by_rung[rung.name], compared.get(rung.name), data, plan.train.seq_len)
            for rung in plan.rungs
        ],
    }
    if question.design == "factorial":
        levels = {rung.levels: scores[rung.name] for rung in plan.rungs}
        effects = factorial(levels, _switches(plan.rungs))
        values["effects"] = [asdict(effect) for effect in effects.comparisons]
        values["effects_statistics"] = _statistics(effects)
    return values


def _statistics(found: Analysis) -> dict[str, Any]:
    return {
        "pooled": found.pooled,
        "equal_variance_p": found.equal_variance_p,
        "degrees_of_freedom": found.degrees_of_freedom,
        "confidence": found.confidence,
    }


def _rung(
    rung: Rung,
    results: Sequence[Result],
    compared: Comparison | None,
    data: TokenData,
    seq_len: int | None,
) -> dict[str, Any]:
    whole = [result for result in results if not result["diverged"]]
    score = _mean(result["bits_per_byte"] for result in whole)
    rounded = {
        f"int{bits}_bits_per_byte": _mean(
            result["bits_per_byte"] + bits_of_tokens(result[f"int{bits}_nats_per_token_more"], data)
            for result in whole
        )
        for bits in (8, 4)
    }
    shown = ("difference", "low", "high", "p", "p_holm", "verdict", "detectable", "correlation")
    return {
        "name": rung.name,
        "change": rung.change,
        "adjusted": rung.adjusted,
        "previous": rung.previous,
        "levels": list(rung.levels),
        "config": rung.config.to_dict(),
        "parameters": parameters(rung.config)["total"],
        "flops_per_token": flops_per_token(rung.config, seq_len),
        "kv_bytes_per_token": kv_bytes_per_token(rung.config),
        "bits_per_byte": score,
        **{key: getattr(compared, key) if compared else None for key in shown},
        "train_tokens_per_s": _middle(result["tokens_per_s"] for result in whole),
        "decode_tokens_per_s": _middle(result["decode_tokens_per_s"] for result in whole),
        "peak_rss_bytes": max((result["peak_rss_bytes"] or 0 for result in whole), default=None),
        **rounded,
        "by_position": _positions(whole),
        "runs": [{key: result.get(key) for key in _OF_A_RUN} for result in results],
    }


def _positions(results: Sequence[Result]) -> dict[str, list[float] | None]:
    """The mean over seeds in each part of the window; None: beyond a learned table."""
    lengths = results[0]["by_position"] if results else {}
    means: dict[str, list[float] | None] = {}
    for length in lengths:
        parts = [result["by_position"][length] for result in results]
        known = all(part is not None for part in parts)
        means[length] = [fmean(at) for at in zip(*parts, strict=True)] if known else None
    return means


def _switches(rungs: list[Rung]) -> list[str]:
    """The names of a factorial's switches: each is the rung with that one alone."""
    count = len(rungs[0].levels)
    alone = {tuple(int(i == j) for j in range(count)): i for i in range(count)}
    named = {alone[rung.levels]: rung.name for rung in rungs if rung.levels in alone}
    return [named[i] for i in range(count)]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
