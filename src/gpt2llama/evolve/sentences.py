"""What the report says of its results, in either language; and the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .words import Words, counted, fixed, mebibytes, p_value, percent, signed, whole

Results = dict[str, Any]
Rung = dict[str, Any]
Effect = dict[str, Any]  # of a factorial: a stats.Comparison
VERDICTS = {
    "helps": "count_helps",
    "hurts": "count_hurts",
    "no difference shown": "count_none",
    "not comparable": "count_not_comparable",
}


def title(results: Results, words: Words) -> str:
    return words[f"title_{results['design']}"].format(base=results["base"], to=results["to"])


def summary(results: Results, words: Words) -> str:
    """The report's first paragraph: what was run, what came out, what diverged."""
    rungs = results["rungs"]
    said = [
        words["summary"].format(
            rungs=counted(words, "rungs", len(rungs)),
            seeds=counted(words, "seeds", len(results["seeds"])),
            match=words[f"match_{results['match']}"],
            tokens=whole(results["tokens"]),
            steps=whole(results["steps"]),
            data=results["data"]["name"],
            bytes=whole(results["data"]["held_out_bytes"]),
        )
    ]
    first, last = rungs[0]["bits_per_byte"], rungs[-1]["bits_per_byte"]
    if results["design"] == "ladder" and len(rungs) > 1 and None not in (first, last):
        ends = {"first": fixed(first), "last": fixed(last), "change": signed(last - first)}
        said.append(words["overall"].format(**ends))
    if parts := _verdict_counts(rungs, words):
        compared = sum(rung["verdict"] is not None for rung in rungs)
        text = words["comma"].join(parts)
        said.append(counted(words, "verdicts", compared, parts=text))
    return words["space"].join([*said, diverged(results, words)])


def _verdict_counts(rungs: list[Rung], words: Words) -> list[str]:
    parts = []
    for verdict, key in VERDICTS.items():
        if names := [rung["name"] for rung in rungs if rung["verdict"] == verdict]:
            bracket = words["brackets"].format(words["comma"].join(names))
            parts.append(counted(words, key, len(names), names=bracket))
    return parts


def diverged(results: Results, words: Words) -> str:
    runs = [(rung["name"], run) for rung in results["rungs"] for run in rung["runs"]]
    lost = [
        words["run"].format(rung=name, seed=run["seed"]) for name, run in runs if run["diverged"]
    ]
    if not lost:
        return words["no_diverged"]
    return words["diverged_runs"].format(n=len(lost), all=len(runs), runs=words["comma"].join(lost))


def statistics(results: Results, words: Words) -> str:
    """How the intervals were made: pooled or not, and what the check of that said."""
    if all(rung["low"] is None for rung in results["rungs"]):
        return words["no_interval"]
    return _how(results["statistics"], words)


def effects_text(results: Results, words: Words) -> str:
    """What a factorial's effects are, and how their intervals were made."""
    confidence = percent(results["statistics"]["confidence"])
    said = [words["effects_text"].format(confidence=confidence)]
    if any(effect["low"] is not None for effect in results["effects"]):
        said.append(_how(results["effects_statistics"], words))
    return words["space"].join(said)


def _how(found: dict[str, Any], words: Words) -> str:
    p = found["equal_variance_p"]
    check = words["no_check"] if p is None else words["check"].format(p=p_value(p))
    df = f"{found['degrees_of_freedom']:.4g}"
    return words["pooled" if found["pooled"] else "not_pooled"].format(df=df, check=check)


def how_to_read(results: Results, words: Words) -> list[str]:
    alpha = percent(1 - results["statistics"]["confidence"])
    keys = ("pairs", "seeds", "holm", "power", "diverged", "size")
    return [words[f"reading_{key}"].format(alpha=alpha) for key in keys] + [
        statistics(results, words)
    ]


def verdict(rung: Rung, results: Results, words: Words, power: str = "power") -> str:
    """`helps`, `reference`, `no difference shown; 3 seeds could detect ≥ 0.0123 (80% power)`,
    `not comparable; 2 of 3 seeds diverged`.

    power: the key of the third one's words, `power_short` where room is small.
    """
    if rung["verdict"] is None and rung["previous"] is None:
        return words["reference"]
    return _verdict(rung, len(_pairs(rung, results)), len(results["seeds"]), words, power)


def effect_verdict(effect: Effect, words: Words, power: str = "power") -> str:
    """What `verdict` says, of a main effect or an interaction."""
    kept = effect["seeds"]
    return _verdict(effect, kept, kept + effect["diverged"], words, power)


def _verdict(found: Rung | Effect, kept: int, seeds: int, words: Words, power: str) -> str:
    """Of a comparison that `kept` so many of its seeds, the others having diverged."""
    if found["verdict"] is None:
        return words["no_verdict"]
    if found["verdict"] == "not comparable":
        asked = counted(words, "seeds", seeds)
        return words["not_comparable"].format(n=seeds - kept, seeds=asked)
    if found["verdict"] == "no difference shown" and found["detectable"] is not None:
        least = fixed(found["detectable"])
        return words[power].format(seeds=counted(words, "seeds", kept), x=least)
    return words[found["verdict"]]


def _pairs(rung: Rung, results: Results) -> set[int]:
    """The seeds that diverged in neither rung of the comparison."""
    compared = [r for r in results["rungs"] if r["name"] in (rung["name"], rung["previous"])]
    lost = {run["seed"] for r in compared for run in r["runs"] if run["diverged"]}
    return set(results["seeds"]) - lost


def interval(found: Rung | Effect) -> str:
    return "–" if found["low"] is None else f"[{signed(found['low'])}, {signed(found['high'])}]"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its key in the CSV, its header, a row's value, how that is written."""

    key: str
    header: str
    value: Callable[[Rung], Any]
    show: Callable[[Any], str]

    @property
    def numeric(self) -> bool:
        return self.show is not str


_SHOWN: dict[str, Callable[[Any], str]] = {
    "name": str,
    "change": str,
    "adjusted": str,
    "previous": str,
    "bits_per_byte": fixed,
    "difference": signed,
    "low": signed,
    "high": signed,
    "p": p_value,
    "p_holm": p_value,
    "verdict": str,
    "detectable": fixed,
    "correlation": lambda r: signed(r, 2),
    "parameters": whole,
    "flops_per_token": whole,
    "kv_bytes_per_token": whole,
    "train_tokens_per_s": whole,
    "decode_tokens_per_s": whole,
    "peak_rss_bytes": mebibytes,
    "int8_bits_per_byte": fixed,
    "int4_bits_per_byte": fixed,
}
SIZES = (
    "name",
    "parameters",
    "flops_per_token",
    "train_tokens_per_s",
    "decode_tokens_per_s",
    "kv_bytes_per_token",
    "peak_rss_bytes",
)


def columns(results: Results, words: Words) -> list[Column]:
    """All there are, in the order of the table and of the CSV."""

    def plain(key: str) -> Column:
        def value(rung: Rung) -> Any:
            return rung[key]

        return Column(key=key, header=words[key], value=value, show=_SHOWN[key])

    def at_length(length: int) -> Column:
        def value(rung: Rung) -> float | None:
            return mean(losses_at(rung, length))

        header = words["at_length"].format(n=length)
        return Column(key=f"nats_at_{length}", header=header, value=value, show=fixed)

    def of_seed(seed: int) -> Column:
        def value(rung: Rung) -> float | None:
            return next((r["bits_per_byte"] for r in rung["runs"] if r["seed"] == seed), None)

        header = words["of_seed"].format(n=seed)
        return Column(key=f"bits_per_byte_seed_{seed}", header=header, value=value, show=fixed)

    def lost(rung: Rung) -> int:
        return sum(run["diverged"] for run in rung["runs"])

    return [
        *map(plain, _SHOWN),
        Column(key="diverged", header=words["diverged"], value=lost, show=whole),
        *map(at_length, lengths(results)),
        *map(of_seed, results["seeds"]),
    ]


def effect_columns(words: Words) -> list[Column]:
    """Those of a factorial's effects, for the same uses."""

    def column(key: str) -> Column:
        def value(effect: Effect) -> Any:
            return effect[key]

        header = words["effect" if key == "name" else key]
        return Column(key=key, header=header, value=value, show=_SHOWN.get(key, whole))

    keys = ("name", "difference", "low", "high", "p", "p_holm", "verdict", "detectable")
    return [*map(column, keys), column("diverged")]


def lengths(results: Results) -> list[int]:
    """The text lengths of the loss by position, shortest (the trained one) first."""
    return sorted({int(key) for rung in results["rungs"] for key in rung["by_position"]})


def losses_at(rung: Rung, length: int) -> list[float]:
    """Nats per token in buckets of equal width; empty if undefined, unmeasured or not finite."""
    losses = rung["by_position"].get(str(length)) or []
    return [] if None in losses else losses


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
