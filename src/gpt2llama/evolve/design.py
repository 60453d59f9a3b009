"""Which models are compared: from one config to another, a switch at a time, sizes matched.

A switch is the least that can change by itself: mostly one field, and three times several that
belong together (√d on the embeddings leaves with the sinusoids it was there to match, SwiGLU is an
activation and a gate, biases are biases).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError, did_you_mean
from ..model.config import ModelConfig
from ..model.presets import ladder, preset
from ..plan import flops_per_token, parameters

DESIGNS = ("ladder", "add", "drop", "factorial")
Match = Literal["params", "flops", "none"]
MATCHES = ("params", "flops", "none")
TOLERANCE = 0.01  # of the first rung's parameters or FLOPs

# In the order in which a ladder changes them; of two that share fields, the first that fits.
SWITCHES: dict[str, tuple[str, ...]] = {
    "norm_placement": ("norm_placement",),
    "activation": ("activation",),
    "norm": ("norm", "norm_bias"),
    "position": ("position", "embed_scale"),
    "rope_theta": ("rope_theta",),
    "rope_scaling": ("rope_scaling",),
    "gated_mlp": ("gated_mlp", "activation"),
    "n_kv_heads": ("n_kv_heads",),
    "biases": ("qkv_bias", "out_bias", "mlp_bias"),
    "tie_embeddings": ("tie_embeddings",),
    "qk_norm": ("qk_norm",),
    "sliding_window": ("sliding_window",),
    "logit_softcap": ("logit_softcap",),
    "norm_eps": ("norm_eps",),
    "dropout": ("dropout",),
    "n_layers": ("n_layers",),
    "d_model": ("d_model", "n_heads", "head_dim"),
    "d_ff": ("d_ff",),
    "max_seq_len": ("max_seq_len",),
}
_WIDTHS = {"d_ff"}  # what matching may change, and so no switch of a matched design


@dataclass(frozen=True)
class Rung:
    """A model of the experiment; `previous` names the one it is compared with.

    change: in words, what makes it differ from that; adjusted: what matching changed.
    """

    name: str
    config: ModelConfig
    change: str = ""
    previous: str | None = None
    adjusted: str = ""
    levels: tuple[int, ...] = ()  # of a factorial: for each switch, whether it is on


def rungs_of(
    base: str,
    to: str,
    design: str,
    match: Match,
    seq_len: int | None = None,
    switches: Iterable[str] = (),
) -> list[Rung]:
    """The models of a design between two presets; the first is what the sizes are matched to.

    switches: of the factorial, which (all that differ unless given). Raises InputError for
    presets that cannot be compared, ConfigError for a combination that cannot be built.
    """
    first, last = preset(base), preset(to)
    if design not in DESIGNS:
        raise InputError(f"the design must be one of {', '.join(DESIGNS)} (got {design!r})")
    if match not in MATCHES:
        raise InputError(f"--match must be one of {', '.join(MATCHES)} (got {match!r})")
    if first.vocab_size != last.vocab_size:
        raise InputError(
            f"{base} has a vocabulary of {first.vocab_size:,} and {to} one of {last.vocab_size:,}: "
            "their losses per token cannot be compared; choose presets with the same tokenizer"
        )
    if design == "ladder" and (base, to) == ("zh-3m-2017", "zh-3m"):
        return matched(_standard_ladder(), match, seq_len)
    changes = differences(first, last, without=_WIDTHS if match != "none" else set())
    if not changes:
        raise InputError(f"{base} and {to} differ in nothing but what is matched; choose others")
    if design == "factorial":
        chosen = _choose(changes, switches)
        rungs = _factorial(base, first, chosen)
    elif list(switches):
        raise InputError("--switch is for --design factorial; leave it out")
    elif design == "ladder":
        rungs = _ladder(base, first, changes)
    elif design == "add":
        rungs = [Rung(base, first)]
        rungs += [_after(rungs[0], name, fields) for name, fields in changes.items()]
    else:
        rungs = [Rung(to, last)]
        back = {name: {f: getattr(first, f) for f in fields} for name, fields in changes.items()}
        for name, fields in back.items():
            rungs.append(_after(rungs[0], name, fields, f"without {_name(last, changes[name])}"))
    return matched(rungs, match, seq_len)


def differences(
    first: ModelConfig, last: ModelConfig, without: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """Switch -> the fields that it changes, with their new values, in the ladder's order."""
    left = {f for f in vars(first) if getattr(first, f) != getattr(last, f)} - set(without)
    gated = "gated_mlp" in left
    found = {}
    for name, fields in SWITCHES.items():
        if name == "activation" and gated:
            continue  # it changes with the gate
        changed = {f: getattr(last, f) for f in fields if f in left}
        if changed:
            found[name] = changed
            left -= changed.keys()
    found |= {field: {field: getattr(last, field)} for field in sorted(left)}
    return found


def _standard_ladder() -> list[Rung]:
    """The presets' ladder with the first rung's d_ff throughout: matching is this module's work."""
    rungs: list[Rung] = []
    for name, preset_config in ladder().items():
        before = rungs[-1] if rungs else None
        config = preset_config.replace(d_ff=before.config.d_ff) if before else preset_config
        change = _words(before.config, config) if before else ""
        rungs.append(Rung(name, config, change, before.name if before else None))
    return rungs


def _ladder(base: str, first: ModelConfig, changes: dict[str, dict[str, Any]]) -> list[Rung]:
    rungs = [Rung(base, first)]
    for name, fields in changes.items():
        rungs.append(_after(rungs[-1], name, fields))
    return rungs


def _after(before: Rung, switch: str, fields: dict[str, Any], name: str | None = None) -> Rung:
    config = before.config.replace(**fields)
    name = name or _name(config, fields) or switch
    return Rung(name, config, _words(before.config, config), before.name)


def _factorial(base: str, first: ModelConfig, changes: dict[str, dict[str, Any]]) -> list[Rung]:
    rungs = []
    for levels in itertools.product((0, 1), repeat=len(changes)):
        fields: dict[str, Any] = {}
        names = []
        for on, change in zip(levels, changes.values(), strict=True):
            if on:
                fields |= change
                names.append(_name(first.replace(**change), change))
        config = first.replace(**fields)
        previous = base if names else None
        rungs.append(
            Rung(" + ".join(names) or base, config, _words(first, config), previous, levels=levels)
        )
    return rungs


def _choose(changes: dict[str, dict[str, Any]], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    chosen = {}
    for name in names:
        if name not in changes:
            raise InputError(
                f"--switch {name!r} does not differ between the two{did_you_mean(name, changes)}; "
                f"these do: {', '.join(changes)}"
            )
        chosen[name] = changes[name]
    chosen = chosen or changes
    if len(chosen) > 5:
        raise InputError(
            f"{len(chosen)} switches make {2 ** len(chosen)} models; choose at most 5 of "
            f"{', '.join(changes)} with --switch"
        )
    return chosen


def matched(rungs: list[Rung], match: Match, seq_len: int | None) -> list[Rung]:
    """The same with d_ff, and where that is not enough the depth, as close to the first as goes."""
    if match == "none":
        return rungs

    def size(cfg: ModelConfig) -> int:
        return parameters(cfg)["total"] if match == "params" else flops_per_token(cfg, seq_len)

    goal, found = size(rungs[0].config), []
    for rung in rungs:
        config = fit(rung.config, size, goal)
        if abs(size(config) - goal) > TOLERANCE * goal:
            raise InputError(
                f"{rung.name} cannot be matched to {rungs[0].name} within {TOLERANCE:.0%} by d_ff "
                "and depth; use --match none, or presets of a like size"
            )
        adjusted = _words(rung.config, config)
        found.append(Rung(rung.name, config, rung.change, rung.previous, adjusted, rung.levels))
    return found


def fit(cfg: ModelConfig, size: Any, goal: int) -> ModelConfig:
    """The d_ff (a multiple of 8 where that is close enough), else depth and d_ff, nearest `goal`.

    size: of a config, growing with d_ff.
    """
    if abs(size(cfg) - goal) <= TOLERANCE * goal:
        return cfg
    depths = [cfg.n_layers, *(cfg.n_layers + step for step in (-1, 1, -2, 2)), cfg.n_layers + 3]
    best = cfg
    for n_layers in (depth for depth in depths if depth > 0):
        deep = cfg.replace(n_layers=n_layers)
        a_column = size(deep.replace(d_ff=deep.d_ff + 1)) - size(deep)
        wanted = deep.d_ff + (goal - size(deep)) / a_column
        for step in (8, 1):
            d_ff = step * round(wanted / step)
            if d_ff < deep.d_model // 4:
                continue
            found = deep.replace(d_ff=d_ff)
            if abs(size(found) - goal) <= TOLERANCE * goal:
                return found
            if abs(size(found) - goal) < abs(size(best) - goal):
                best = found
    return best


def _words(before: ModelConfig, after: ModelConfig) -> str:
    """norm: layernorm → rmsnorm, …"""
    pairs = ((f, getattr(before, f), getattr(after, f)) for f in vars(before))
    return ", ".join(f"{f}: {_shown(old)} → {_shown(new)}" for f, old, new in pairs if old != new)


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return str(getattr(value, "KIND", value))


def _name(cfg: ModelConfig, fields: dict[str, Any]) -> str:
    """What the field calls a switch in its new position."""
    if "gated_mlp" in fields:
        gates = {"silu": "swiglu", "relu": "reglu", "gelu": "geglu", "gelu_tanh": "geglu"}
        return gates.get(cfg.activation, "gated") if cfg.gated_mlp else f"plain {cfg.activation}"
    if "n_kv_heads" in fields:
        return {cfg.n_heads: "mha", 1: "mqa"}.get(cfg.kv_heads, f"gqa {cfg.kv_heads}")
    if fields.keys() & set(SWITCHES["biases"]):
        return "biases" if cfg.qkv_bias or cfg.out_bias or cfg.mlp_bias else "no-bias"
    if "norm_placement" in fields:
        return f"{cfg.norm_placement}-norm"
    if "tie_embeddings" in fields:
        return "tied" if cfg.tie_embeddings else "untied"
    for field in ("norm", "position", "activation"):
        if field in fields:
            return "nope" if fields[field] == "none" else str(fields[field])
    return ", ".join(f"{field} {_shown(value)}" for field, value in fields.items())
