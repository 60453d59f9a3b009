"""The claims that only training decides: which configs are compared, how matched, what is read.

This is data. The same text, seeds and recipe go to every config of a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ...model.config import LinearScaling, Llama3Scaling, ModelConfig, NTKScaling, YarnScaling
from ...model.presets import ladder, preset
from ..design import Match, Rung, matched
from .claim import Claim, Finding

Changes = Mapping[str, Any]  # field of ModelConfig -> value


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Trains `base` with `setup`, called `baseline`, and that again with each of `variants`.

    match: what d_ff keeps equal, within 1%. reads: held-out bits per byte, or the loss by
    position. learning_rates: each config takes its best of them; none: the recipe's.
    without_training: the variants are the base's trained weights read under another config at
    longer lengths, before and after a short training there.
    """

    number: int
    base: str
    baseline: str
    setup: Changes = field(default_factory=dict)
    variants: Mapping[str, Changes]
    match: Match = "params"
    reads: Literal["bits per byte", "loss by position"] = "bits per byte"
    learning_rates: tuple[float, ...] = ()
    without_training: bool = False

    def configs(self) -> dict[str, ModelConfig]:
        """The baseline and the variants by name, not yet matched."""
        base = preset(self.base).replace(**self.setup)
        return {self.baseline: base} | {n: base.replace(**to) for n, to in self.variants.items()}

    def trained(self) -> dict[str, ModelConfig]:
        """Those that are trained, their sizes matched to the baseline's."""
        rungs = [Rung(name, cfg) for name, cfg in self.configs().items()]
        chosen = rungs[:1] if self.without_training else rungs
        return {rung.name: rung.config for rung in matched(chosen, self.match, None)}


_THIN: Changes = {"d_model": 96, "d_ff": 234}  # 24 such layers are 2.7M parameters
_SWEEP = (3e-4, 1e-3, 3e-3, 1e-2)
_PLAIN_MLP: Changes = {"gated_mlp": False, "d_ff": 768}  # 2 · 768 = 3 · 512, zh-3m's
_SWIGLU: Changes = {"gated_mlp": True, "activation": "silu", "d_ff": 512}
_OTHER_POSITIONS: dict[str, Changes] = {
    "learned": {"position": "learned"},
    "sinusoidal": {"position": "sinusoidal", "embed_scale": True},  # √d, which they must match
    "no positions": {"position": "none"},
}
_STRETCHED: dict[str, Changes] = {
    "theta × 4": {"rope_theta": 40_000.0},
    "PI": {"rope_scaling": LinearScaling(4.0)},
    "NTK": {"rope_scaling": NTKScaling(4.0)},
    "YaRN": {"rope_scaling": YarnScaling(4.0, original_max_seq_len=128)},
    "llama3": {"rope_scaling": Llama3Scaling(4.0, 1.0, 4.0, original_max_seq_len=128)},
}


def _rungs() -> dict[str, Changes]:
    """Every rung of the ladder but the first, as its difference to that."""
    (_, first), *others = ladder().items()
    return {
        name: {key: to for key, to in vars(cfg).items() if to != getattr(first, key)}
        for name, cfg in others
    }


def _pre_or_post(n_layers: int) -> Comparison:
    return Comparison(
        number=9,
        base="zh-3m-gpt2",
        baseline=f"post-norm, {n_layers} layers",
        setup={**_THIN, "n_layers": n_layers, "norm_placement": "post"},
        variants={f"pre-norm, {n_layers} layers": {"norm_placement": "pre"}},
        learning_rates=_SWEEP,
    )


def _against_swiglu(number: int, baseline: str, activation: str, match: Match) -> Comparison:
    return Comparison(
        number=number,
        base="zh-3m",
        baseline=baseline,
        setup={**_PLAIN_MLP, "activation": activation},
        variants={"swiglu": _SWIGLU},
        match=match,
    )


COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        number=8, base="zh-3m-gpt2", baseline="layernorm", variants={"rmsnorm": {"norm": "rmsnorm"}}
    ),
    _pre_or_post(4),
    _pre_or_post(24),
    Comparison(
        number=13,
        base="zh-3m",
        baseline="rope",
        variants=_OTHER_POSITIONS,
        reads="loss by position",
    ),
    Comparison(
        number=14,
        base="zh-3m",
        baseline="rope",
        variants=_STRETCHED,
        match="none",
        reads="loss by position",
        without_training=True,
    ),
    Comparison(
        number=23,
        base="zh-3m",
        baseline="4 kv heads",
        setup={"n_kv_heads": None, "d_ff": 427},  # of zh-3m's size
        variants={"2 kv heads": {"n_kv_heads": 2}, "1 kv head": {"n_kv_heads": 1}},
    ),
    _against_swiglu(28, "gelu", "gelu_tanh", "params"),
    _against_swiglu(28, "gelu", "gelu_tanh", "flops"),
    _against_swiglu(29, "relu", "relu", "params"),
    _against_swiglu(29, "relu", "relu", "flops"),
    Comparison(
        number=32,
        base="zh-3m",
        baseline="no biases",
        variants={"biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True}},
    ),
    Comparison(
        number=39,
        base="zh-3m",
        baseline="untied",
        setup={"tie_embeddings": False, "d_ff": 168},  # of zh-3m's size
        variants={"tied": {"tie_embeddings": True, "d_ff": 512}},
    ),
    Comparison(number=46, base="zh-3m-2017", baseline="2017", variants=_rungs()),
)


def comparisons_of(number: int) -> list[Comparison]:
    """Those that decide claim `number`."""
    return [comparison for comparison in COMPARISONS if comparison.number == number]


_MATCHED = {"params": "parameters matched", "flops": "FLOPs matched", "none": "sizes as they are"}
_MATCHED_ZH = {"params": "参数量对齐", "flops": "FLOPs 对齐", "none": "尺寸不变"}


def _few(variants: Mapping[str, Changes]) -> str:
    names = list(variants)
    return ", ".join(names if len(names) <= 5 else [*names[:2], "…", names[-1]])


def _not_measured(number: int) -> Finding:
    """What would decide it; a result comes only from a run."""
    comparisons = comparisons_of(number)
    first = comparisons[0]
    ways = list(dict.fromkeys(c.match for c in comparisons))
    pairs = dict.fromkeys(f"{c.baseline} against {_few(c.variants)}" for c in comparisons)
    pairs_zh = dict.fromkeys(f"{c.baseline} 对 {_few(c.variants)}" for c in comparisons)
    matched = " and ".join(_MATCHED[way] for way in ways)
    matched_zh = "、".join(_MATCHED_ZH[way] for way in ways)
    reads_zh = {"bits per byte": "每字节比特数", "loss by position": "各位置损失"}[first.reads]
    return Finding(
        "not-measured",
        f"decided by training {first.base}: {'; '.join(pairs)}; {matched}, held-out {first.reads}",
        f"由训练 {first.base} 判定：{'；'.join(pairs_zh)}；{matched_zh}，"
        f"比较留出文本上的{reads_zh}",
    )


def _needs_trained_pairs() -> Finding:
    command = "python benchmarks/quantisation.py RUN…"
    return Finding(
        "not-measured",
        "decided by the perplexity that int8 and int4 (round-to-nearest, GPTQ, AWQ) cost a "
        f"GPT-like and a Llama-like model of several training seeds: `{command}` measures each",
        "由 int8、int4（就近取整、GPTQ、AWQ）使 GPT 式与 Llama 式模型的困惑度各增加多少来判定，"
        f"需要多个训练种子：`{command}` 逐个测量",
    )


_STATEMENTS = {
    8: ("RMSNorm loses no quality", "RMSNorm 不降低质量"),
    9: (
        "pre-norm trains more steadily, the more so the deeper",
        "pre-norm 训练更稳，层数越多越明显",
    ),
    13: (
        "RoPE extrapolates from 128 to 200 tokens, sinusoids cannot",
        "RoPE 能从 128 个词元外推到 200 个，正弦位置不能",
    ),
    14: (
        "raising theta, PI or YaRN takes 4k to 8k untrained",
        "提高 theta、用 PI 或 YaRN，不训练就能从 4k 扩到 8k",
    ),
    23: ("GQA's quality cost is negligible", "GQA 的质量损失可以忽略"),
    28: ("SwiGLU beats GELU by 1–2% perplexity", "SwiGLU 的困惑度比 GELU 低 1–2%"),
    29: (
        "SwiGLU's loss is 5–10% under ReLU's in a 3M model",
        "3M 的模型里，SwiGLU 的损失比 ReLU 低 5–10%",
    ),
    32: ("biases help small models", "偏置对小模型有益"),
    39: (
        "tied input and output are inverse, so one table serves",
        "共享的输入与输出互逆，所以一张表就够",
    ),
    46: ("these gains cannot be seen at 3M", "这些好处在 3M 的规模上看不出来"),
}

CLAIMS = (
    *(
        Claim(
            number=number,
            statement=statement,
            statement_zh=statement_zh,
            check=partial(_not_measured, number),
            trained=True,
        )
        for number, (statement, statement_zh) in _STATEMENTS.items()
    ),
    Claim(
        number=44,
        statement="SwiGLU + RMSNorm quantise best",
        statement_zh="SwiGLU + RMSNorm 最耐量化",
        check=_needs_trained_pairs,
    ),
)
