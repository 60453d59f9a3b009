"""Every word of the report, in English and in Chinese, and how its numbers are written."""

from __future__ import annotations

from typing import Any

Words = dict[str, str]

# `one|many` where English has a plural. Braces are filled in by str.format.
WORDS: dict[str, Words] = {
    "en": {
        "title_ladder": "From {base} to {to}, one change at a time",
        "title_add": "Each change between {base} and {to}, alone on {base}",
        "title_drop": "Each change between {base} and {to}, taken out of {to}",
        "title_factorial": "Every combination of the changes between {base} and {to}",
        "comma": ", ",
        "space": " ",
        "brackets": " ({})",
        "rungs": "{n} rung|{n} rungs",
        "seeds": "{n} seed|{n} seeds",
        "summary": "{rungs}, {seeds} each, {match}. Every run trains on {tokens} tokens of {data} "
        "({steps} steps) in the same order; what is measured is the loss on {bytes} bytes of held-"
        "out text.",
        "match_params": "parameters matched within 1%",
        "match_flops": "training FLOPs matched within 1%",
        "match_none": "sizes not matched",
        "overall": "From the first rung to the last, bits per byte go from {first} to {last} "
        "({change}).",
        "verdicts": "Of {n} change, {parts}.|Of {n} changes, {parts}.",
        "count_helps": "{n} helps{names}|{n} help{names}",
        "count_hurts": "{n} hurts{names}|{n} hurt{names}",
        "count_none": "{n} shows no difference{names}|{n} show no difference{names}",
        "count_not_comparable": "{n} cannot be compared{names}",
        "diverged_runs": "{n} of {all} runs diverged: {runs}. The means are over the others.",
        "no_diverged": "No run diverged.",
        "run": "{rung} (seed {seed})",
        "helps": "helps",
        "hurts": "hurts",
        "no difference shown": "no difference shown",
        "not_comparable": "not comparable; {n} of {seeds} diverged",
        "power": "no difference shown; {seeds} could detect ≥ {x} (80% power)",
        "power_short": "no difference shown; {seeds} could detect ≥ {x}",
        "reference": "reference",
        "no_verdict": "one seed: no interval",
        "versus": "against {previous}",
        "better": "← better",
        "worse": "worse →",
        "ladder": "What each change buys",
        "ladder_text": "Difference in held-out bits per byte to {previous} (lower is better), "
        "paired by seed: mean and {confidence} interval.",
        "before": "the rung before",
        "before_or_named": "the rung before, or to the one named",
        "ladder_axis": "difference in bits per byte",
        "effects": "Main effects and interactions",
        "effects_text": "Main effect: mean held-out bits per byte with the change less without it, "
        "over every combination of the others (lower is better). Interaction a × b: half of what "
        "having b adds to the effect of a; below 0 the two together gain more than the sum of what "
        "each gains alone. Mean over seeds and {confidence} interval; verdicts are Holm-corrected "
        "over these effects.",
        "effect": "effect",
        "interval": "{confidence} interval",
        "curves": "Loss while training",
        "curves_text": "Held-out bits per byte: the mean over seeds (line), their minimum and "
        "maximum (band). A dashed line is a seed that diverged. The start is cut off above.",
        "axis_steps": "steps",
        "axis_flops": "training FLOPs",
        "axis_seconds": "seconds of training",
        "positions": "Loss by position, beyond the trained length",
        "positions_text": "Nats per token by position in the text, read at {lengths} tokens, "
        "trained at {trained} (dotted line). Grey: beyond the trained length the mean loss is more "
        "than {worse} nats above the mean within it; such a line may leave the panel.",
        "position_axis": "position, tokens",
        "nats": "nats per token",
        "undefined": "undefined beyond {trained}",
        "not_measured": "not measured",
        "sizes": "Size and speed",
        "sizes_text": "A bar is the share of the largest in its column. Click a header to sort.",
        "everything": "Every figure",
        "everything_text": "Click a header to sort; a second click turns the order.",
        "configs": "Every config",
        "configs_text": "Only the fields that differ from the first rung's, then all of them.",
        "field": "field",
        "first_rung": "first rung",
        "this_rung": "this rung",
        "same_as_first": "The same as the first rung's.",
        "full_config": "the full config",
        "reading": "How to read this",
        "reading_pairs": "Differences are paired: the same seed has the same data order and, where "
        "shapes allow, the same initial weights in both rungs. r is the correlation of the pairs; "
        "the higher it is, the more pairing helps.",
        "reading_seeds": "Intervals cover seeds, not texts: they say what other seeds would give "
        "on this data, not what another corpus would.",
        "reading_holm": "Verdicts are Holm-corrected: over all rungs together, the chance of any "
        "false one is at most {alpha}. So an interval may leave out zero and the verdict still be "
        "“no difference shown”.",
        "reading_power": "“No difference shown” is not “no difference”: it states the smallest "
        "difference that so many seeds would have shown in 80% of sweeps.",
        "reading_diverged": "A seed that diverged is reported and counted; it is in no mean.",
        "reading_size": "A result holds at this size, with this budget and this data. A larger "
        "model may rank the changes in another way.",
        "pooled": "The variance of the paired differences is pooled over the comparisons "
        "({df} degrees of freedom{check}).",
        "not_pooled": "The variance of the paired differences is each comparison's own "
        "({df} degrees of freedom{check}).",
        "check": "; equal variances: p\u00a0=\u00a0{p}",
        "no_check": "; equal variances not checked: too few seeds",
        "no_interval": "No interval: it takes two rungs, and two seeds that diverged in neither.",
        "origin": "Where this comes from",
        "command": "Command",
        "again": "Made by this command:",
        "machine": "Machine",
        "cpu": "processor",
        "cores": "cores",
        "threads": "threads per run",
        "dtype": "computed in",
        "versions": "Versions",
        "data": "Data",
        "train_tokens": "training tokens",
        "held_out": "held out",
        "bytes_and_tokens": "{bytes} bytes, {tokens} tokens",
        "vocab_size": "vocabulary",
        "created": "Made",
        "name": "rung",
        "change": "change",
        "adjusted": "adjusted",
        "previous": "compared with",
        "bits_per_byte": "bits per byte",
        "difference": "difference",
        "low": "low",
        "high": "high",
        "p": "p",
        "p_holm": "p (Holm)",
        "verdict": "verdict",
        "detectable": "detectable",
        "correlation": "r",
        "parameters": "parameters",
        "flops_per_token": "training FLOPs / token",
        "kv_bytes_per_token": "KV bytes / token",
        "train_tokens_per_s": "training tokens / s",
        "decode_tokens_per_s": "decoding tokens / s",
        "peak_rss_bytes": "peak memory, MiB",
        "int8_bits_per_byte": "bits per byte, int8",
        "int4_bits_per_byte": "bits per byte, int4",
        "diverged": "diverged seeds",
        "at_length": "nats / token at {n}",
        "of_seed": "bits per byte, seed {n}",
    },
    "zh": {
        "title_ladder": "从 {base} 到 {to}：一次只改一处",
        "title_add": "{base} 与 {to} 之间的每一处改动，单独加到 {base} 上",
        "title_drop": "{base} 与 {to} 之间的每一处改动，单独从 {to} 中去掉",
        "title_factorial": "{base} 与 {to} 之间各处改动的全部组合",
        "comma": "、",
        "space": "",
        "brackets": "（{}）",
        "rungs": "{n} 级",
        "seeds": "{n} 个种子",
        "summary": "共 {rungs}，每级 {seeds}，{match}。每次训练都按相同的顺序读 {data} 的 {tokens} "
        "个词元（{steps} 步）；测量的是 {bytes} 字节留出文本上的损失。",
        "match_params": "参数量对齐到 1% 以内",
        "match_flops": "训练 FLOPs 对齐到 1% 以内",
        "match_none": "大小未对齐",
        "overall": "从第一级到最后一级，每字节比特数由 {first} 变为 {last}（{change}）。",
        "verdicts": "{n} 处改动中，{parts}。",
        "count_helps": "{n} 处有益{names}",
        "count_hurts": "{n} 处有害{names}",
        "count_none": "{n} 处未见差异{names}",
        "count_not_comparable": "{n} 处无法比较{names}",
        "diverged_runs": "{all} 次训练中有 {n} 次发散：{runs}。均值只算其余的训练。",
        "no_diverged": "没有训练发散。",
        "run": "{rung}（种子 {seed}）",
        "helps": "有益",
        "hurts": "有害",
        "no difference shown": "未见差异",
        "not_comparable": "无法比较；{seeds}中有 {n} 个发散",
        "power": "未见差异；{seeds}可测出 ≥ {x}（功效 80%）",
        "power_short": "未见差异；{seeds}可测出 ≥ {x}",
        "reference": "参照",
        "no_verdict": "只有一个种子：没有区间",
        "versus": "对比 {previous}",
        "better": "← 更好",
        "worse": "更差 →",
        "ladder": "每一处改动换来了什么",
        "ladder_text": "与{previous}相比，留出文本每字节比特数之差（越低越好），按种子配对：均值与 "
        "{confidence} 区间。",
        "before": "前一级",
        "before_or_named": "前一级（或注明的一级）",
        "ladder_axis": "每字节比特数之差",
        "effects": "主效应与交互作用",
        "effects_text": "主效应：有这处改动时留出文本的每字节比特数，减去没有时的，在其他改动的全部"
        "组合上取平均（越低越好）。交互作用 a × b：a 的效应因有 b 而增加的量的一半；低于 0，则"
        "两者合用胜过各自之和。给出各种子的均值与 {confidence} 区间；结论按全部效应作 Holm 校正。",
        "effect": "效应",
        "interval": "{confidence} 区间",
        "curves": "训练过程中的损失",
        "curves_text": "留出文本的每字节比特数：各种子的均值（线）及最小、最大值（带）。虚线是发散"
        "的种子。开头较高的部分已截去。",
        "axis_steps": "步数",
        "axis_flops": "训练 FLOPs",
        "axis_seconds": "训练秒数",
        "positions": "超出训练长度时，各位置的损失",
        "positions_text": "文本中各位置每词元的奈特数，分别读 {lengths} 个词元；训练长度为 "
        "{trained}（点线）。灰色：训练长度之外的平均损失，比长度之内高出 {worse} 奈特以上；这样的线"
        "可能超出图框。",
        "position_axis": "位置（词元）",
        "nats": "奈特 / 词元",
        "undefined": "超出 {trained} 无定义",
        "not_measured": "未测量",
        "sizes": "大小与速度",
        "sizes_text": "横条表示占该列最大值的比例。点击表头可排序。",
        "everything": "全部数据",
        "everything_text": "点击表头可排序，再点一次则倒序。",
        "configs": "全部配置",
        "configs_text": "先列出与第一级不同的字段，再列出全部字段。",
        "field": "字段",
        "first_rung": "第一级",
        "this_rung": "本级",
        "same_as_first": "与第一级相同。",
        "full_config": "完整配置",
        "reading": "怎样读这份报告",
        "reading_pairs": "差值是配对的：同一个种子在两级中读数据的顺序相同，形状允许时初始权重也"
        "相同。r 是配对的相关系数；它越高，配对的好处越大。",
        "reading_seeds": "区间涵盖的是别的种子，不是别的文本：它说的是数据不变、换了种子会得到什么"
        "，而不是换一份语料会怎样。",
        "reading_holm": "结论经过 Holm 校正：所有各级合在一起，出现任何一个误判的概率不超过 "
        "{alpha}。因此区间可能不含零，而结论仍是“未见差异”。",
        "reading_power": "“未见差异”不等于“没有差异”：它附带说明，这么多种子在 80% 的实验里能显示"
        "出来的最小差异有多大。",
        "reading_diverged": "发散的种子会报告并计数，但不进入任何均值。",
        "reading_size": "结果只对这个大小、这个预算和这份数据成立。换成更大的模型，各处改动的"
        "排序可能不同。",
        "pooled": "配对差值的方差由各次比较合并估计（自由度 {df}{check}）。",
        "not_pooled": "配对差值的方差由每次比较各自估计（自由度 {df}{check}）。",
        "check": "；方差齐性检验 p\u00a0=\u00a0{p}",
        "no_check": "；种子太少，未检验方差齐性",
        "no_interval": "没有区间：至少要有两级，以及两个在两级中都不发散的种子。",
        "origin": "这份报告的来历",
        "command": "命令",
        "again": "由这条命令得出：",
        "machine": "机器",
        "cpu": "处理器",
        "cores": "核心数",
        "threads": "每次训练的线程数",
        "dtype": "计算精度",
        "versions": "版本",
        "data": "数据",
        "train_tokens": "训练词元数",
        "held_out": "留出文本",
        "bytes_and_tokens": "{bytes} 字节，{tokens} 个词元",
        "vocab_size": "词表大小",
        "created": "生成时间",
        "name": "级",
        "change": "改动",
        "adjusted": "相应调整",
        "previous": "比较对象",
        "bits_per_byte": "每字节比特数",
        "difference": "差值",
        "low": "下限",
        "high": "上限",
        "p": "p",
        "p_holm": "p（Holm）",
        "verdict": "结论",
        "detectable": "可测出",
        "correlation": "r",
        "parameters": "参数量",
        "flops_per_token": "训练 FLOPs / 词元",
        "kv_bytes_per_token": "KV 字节 / 词元",
        "train_tokens_per_s": "训练（词元 / 秒）",
        "decode_tokens_per_s": "解码（词元 / 秒）",
        "peak_rss_bytes": "峰值内存（MiB）",
        "int8_bits_per_byte": "每字节比特数，int8",
        "int4_bits_per_byte": "每字节比特数，int4",
        "diverged": "发散的种子数",
        "at_length": "奈特 / 词元，长度 {n}",
        "of_seed": "每字节比特数，种子 {n}",
    },
}


def counted(words: Words, key: str, n: int, **values: Any) -> str:
    """The phrase `key` for n things: its part before the bar for one, after it for more."""
    one, _, many = words[key].partition("|")
    return (one if n == 1 or not many else many).format(n=n, **values)


def fixed(value: float | None, digits: int = 4) -> str:
    """`2.3120`, with a real minus sign; a dash for what is not known."""
    return "–" if value is None else f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:+,.{digits}f}".replace("-", "−")


def whole(value: float | None) -> str:
    return fixed(value, 0)


def mebibytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**20:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def p_value(value: float | None) -> str:
    return "–" if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"
