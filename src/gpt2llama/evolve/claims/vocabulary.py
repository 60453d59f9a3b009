"""What is said of vocabularies and of tying the output to the input table."""

from __future__ import annotations

from ...model.config import ModelConfig
from ...model.presets import preset, presets
from ...plan import parameters, weight_bytes
from .claim import Finding, claim


def _untied(cfg: ModelConfig) -> ModelConfig:
    return cfg.replace(tie_embeddings=False)


def _saving(cfg: ModelConfig) -> int:
    """Parameters that tying saves."""
    tied = cfg.replace(tie_embeddings=True)
    return parameters(_untied(cfg))["total"] - parameters(tied)["total"]


@claim(
    33,
    "GPT-2 is BPE, Llama is SentencePiece, 32k → 128k",
    "GPT-2 用 BPE，Llama 用 SentencePiece，词表 32k → 128k",
)
def kinds_of_tokenizer() -> Finding:
    # (algorithm, library): SentencePiece is a library, whose model Llama 1 and 2 train as BPE.
    kinds = {
        "gpt2": ("BPE", "GPT-2's own"),
        "llama-2-7b": ("BPE", "SentencePiece"),
        "llama-3-8b": ("BPE", "tiktoken"),
    }
    sizes = {name: preset(name).vocab_size for name in kinds}
    special = sizes["llama-3-8b"] - 128_000
    shown = ", ".join(f"{n} {sizes[n]:,} ({library})" for n, (_, library) in kinds.items())
    shown_zh = shown.replace("GPT-2's own", "GPT-2 自己的")
    one_algorithm = len({algorithm for algorithm, _ in kinds.values()}) == 1
    return Finding(
        "wrong" if one_algorithm or kinds["llama-3-8b"][1] != "SentencePiece" else "true",
        f"all are BPE: {shown}; Llama 3's are 128,000 + {special} special",
        f"都是 BPE：{shown_zh}；Llama 3 的词表是 128,000 + {special} 个特殊词元",
    )


@claim(34, "128k packs 25% more text than 32k", "128k 词表的每个词元比 32k 词表多装 25% 的文本")
def packing() -> Finding:
    decides = "gpt2llama tokenizer compare TEXT --tokenizer LLAMA2 --tokenizer LLAMA3"
    return Finding(
        "not-measurable-here",
        "it depends on the text and needs both vocabularies, which are not shipped; with them at "
        f"hand this decides: {decides}",
        f"取决于文本，而且需要两个词表，它们不随本项目分发；有了它们，可用这条命令判定：{decides}",
    )


@claim(
    35,
    "tying saves a third of GPT-2's parameters",
    "共享输入输出表，GPT-2 省下三分之一的参数",
)
def tying_in_gpt2() -> Finding:
    shares = {}
    for name in ("gpt2", "gpt2-xl"):
        cfg = preset(name)
        shares[name] = _saving(cfg) / parameters(cfg)["total"]
    thirds = [abs(share - 1 / 3) < 0.05 for share in shares.values()]
    saved = _saving(preset("gpt2"))
    return Finding(
        "true" if all(thirds) else "true-if" if any(thirds) else "wrong",
        f"{saved:,} numbers, {shares['gpt2']:.1%} of the 124M; {shares['gpt2-xl']:.1%} of XL",
        f"{saved:,} 个数，占 124M 的 {shares['gpt2']:.1%}；XL 则省 {shares['gpt2-xl']:.1%}",
    )


@claim(36, "Llama unties / Llama ties", "Llama 不共享输入输出表 / Llama 共享")
def who_ties() -> Finding:
    llamas = [name for name in presets() if name.startswith("llama-")]
    tied = [n.removeprefix("llama-") for n in llamas if preset(n).tie_embeddings]
    untied = [n.removeprefix("llama-") for n in llamas if not preset(n).tie_embeddings]
    return Finding(
        "true-if" if tied and untied else "wrong",
        f"tied: {' '.join(tied)}; untied: {' '.join(untied)}",
        f"共享：{' '.join(tied)}；不共享：{' '.join(untied)}",
    )


def _small_chinese(vocab_size: int) -> ModelConfig:
    """The small Chinese model of the walk-throughs: 4 layers, d 256, GQA, d_ff 704."""
    return preset("zh-3m").replace(d_ff=704, vocab_size=vocab_size)


@claim(
    37,
    "V 1000, d 256: tying saves 15% of a 3M model",
    "词表 1000、d 256：共享输入输出表，3M 的模型省下 15%",
)
def tying_in_a_small_model() -> Finding:
    cfg, wanted = _small_chinese(1000), 0.15
    saved = _saving(cfg)
    percent = saved / parameters(_untied(cfg))["total"]
    rest = parameters(cfg)["total"] - saved  # all but the table of V rows
    # V d = wanted · (rest + V d) of the tied model, or · (rest + 2 V d) of the untied one.
    needed = [rest * wanted / (1 - tables * wanted) / cfg.d_model for tables in (1, 2)]
    return Finding(
        "true" if abs(percent - wanted) < 0.01 else "wrong",
        f"{saved:,} numbers, {percent:.1%}; {wanted:.0%} needs V near {needed[0]:,.0f} "
        f"(counted against the tied model) to {needed[1]:,.0f} (the untied)",
        f"{saved:,} 个数，{percent:.1%}；要省 {wanted:.0%}，"
        f"V 约为 {needed[0]:,.0f}（以共享后的模型计）到 {needed[1]:,.0f}（以不共享的模型计）",
    )


@claim(
    38,
    "tying saves hundreds of millions of parameters in Llama 3",
    "共享输入输出表，Llama 3 省下数亿参数",
)
def tying_in_llama_3() -> Finding:
    tied = {n: _saving(preset(n)) for n in presets() if "llama-3" in n and preset(n).tie_embeddings}
    untied = [n for n in presets() if "llama-3" in n and not preset(n).tie_embeddings]
    shown = ", ".join(f"{n.removeprefix('llama-')} {saved:,}" for n, saved in tied.items())
    large = bool(tied) and all(saved > 1e8 for saved in tied.values())
    others = " ".join(n.removeprefix("llama-") for n in untied)
    return Finding(
        ("true-if" if untied else "true") if large else "wrong",
        f"{shown}; not tied: {others}",
        f"{shown}；不共享的：{others}",
    )


@claim(40, "3.16M fp32 parameters are 12.05 MB", "316 万个 fp32 参数占 12.05 MB")
def megabytes() -> Finding:
    size = 3_160_000 * 4
    mib, mb = size / 2**20, size / 1e6
    return Finding(
        "true" if f"{mib:.2f}" == "12.05" else "wrong",
        f"{size:,} bytes are {mib:.2f} MiB, {mb:.2f} MB",
        f"{size:,} 字节是 {mib:.2f} MiB，{mb:.2f} MB",
    )


@claim(
    53,
    "the small Chinese GPT has 3.16M / 3.37M / 3,147,520 parameters",
    "小型中文 GPT 有 316 万 / 337 万 / 3,147,520 个参数",
)
def small_chinese_gpt() -> Finding:
    row = preset("zh-3m").d_model
    rest = parameters(_small_chinese(1))["total"] - row
    vocabularies = [(count - rest) / row for count in (3_160_000, 3_370_000, 3_147_520)]
    exact = vocabularies[2].is_integer()
    totals = {v: parameters(_small_chinese(v))["total"] for v in (751, 766)}
    shown = ", ".join(f"V {v} gives {total:,}" for v, total in totals.items())
    shown_zh = "，".join(f"V {v} 得 {total:,}" for v, total in totals.items())
    rounded = ", ".join(f"{v:,.0f}" for v in vocabularies[:2])
    size = weight_bytes(_small_chinese(766), "fp32") / 2**20
    return Finding(
        "both" if exact else "wrong",
        f"it depends on the vocabulary: {rest:,} + {row} V at its sizes: {shown} "
        f"({size:.2f} MiB); 3.16M and 3.37M are V near {rounded}",
        f"取决于词表：按其尺寸，参数量为 {rest:,} + {row} V：{shown_zh}（{size:.2f} MiB）；"
        f"316 万与 337 万对应 V 约 {rounded}",
    )
