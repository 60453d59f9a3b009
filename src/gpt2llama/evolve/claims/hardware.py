"""What is said of memory bandwidth, compute and cost."""

from __future__ import annotations

from ...model.presets import preset
from ...plan import flops_per_token, kv_bytes, matmul_parameters, parameters, weight_bytes
from .claim import Finding, claim
from .timing import fastest

BYTES_PER_SECOND = {"DGX Spark": 273e9, "H100": 3.35e12, "MI300X": 5.3e12}
# Dense bf16 by the data sheets, from memory: every text that uses one says so.
FLOPS_PER_SECOND = {"H100": 989e12, "MI300X": 1307e12}
MFU = 0.4  # share of those FLOP/s that training uses: assumed, and said with each figure


@claim(
    24,
    "decoding is bound by memory bandwidth",
    "解码受内存带宽限制",
    times_machine=True,
)
def decoding_bound() -> Finding:
    """Roofline: FLOPs a byte of the step against those the machine does while it copies one."""
    import torch

    from ...model.kv_cache import KVCache
    from ...model.transformer import Transformer

    # 110 MB of weights: too many for the caches of a processor.
    cfg = preset("zh-3m").replace(n_layers=2, n_heads=16, d_model=1024, d_ff=2816)
    model, ids = Transformer(cfg).eval(), torch.zeros(1, 1, dtype=torch.long)
    cache = KVCache(cfg, batch_size=1, max_len=8)

    def step() -> None:
        cache.truncate(4)
        with torch.inference_mode():
            model(ids, cache=cache)

    source = torch.ones(weight_bytes(cfg, "fp32") // 4)
    target, square = torch.empty_like(source), torch.ones(512, 512)
    with torch.inference_mode():
        model(ids.expand(1, 4), cache=cache)
    seconds, copy = fastest(step, lambda: target.copy_(source), seconds=0.6)
    (product,) = fastest(lambda: square @ square, seconds=0.2)
    read = weight_bytes(cfg, "fp32") + kv_bytes(cfg, 5, dtype="fp32")
    decoding, copying = read / seconds, 2 * source.nbytes / copy  # a copy reads and writes
    intensity = 2 * matmul_parameters(cfg) / read
    balance = 2 * 512**3 / product / copying
    threads, size = torch.get_num_threads(), read / 1e6
    return Finding(
        "true" if intensity < balance else "wrong",
        f"batch 1, fp32: {intensity:.2f} FLOP a byte, where this machine ({threads} threads) has "
        f"{balance:.1f} FLOP to spend a byte; decoding {size:.0f} MB a token reads "
        f"{decoding / 1e9:.1f} GB/s, a copy moves {copying / 1e9:.1f}",
        f"批 1、fp32：每字节 {intensity:.2f} 次浮点运算，而本机（{threads} 线程）每字节能做 "
        f"{balance:.1f} 次；解码每词元读 {size:.0f} MB，速度 {decoding / 1e9:.1f} GB/s，"
        f"单纯复制 {copying / 1e9:.1f} GB/s",
    )


@claim(
    25,
    "273 GB/s, 3.35 TB/s, 5.3 TB/s rank decoding speed",
    "解码速度的高低由 273 GB/s、3.35 TB/s、5.3 TB/s 决定",
)
def ranking() -> Finding:
    read = weight_bytes(preset("llama-3-8b"), "bf16")
    bounds = {name: rate / read for name, rate in BYTES_PER_SECOND.items()}
    ranked = sorted(bounds, key=lambda name: bounds[name]) == list(BYTES_PER_SECOND)
    # A batch shares one reading: 2 FLOPs for each 2 bytes and each text.
    batch = FLOPS_PER_SECOND["H100"] / BYTES_PER_SECOND["H100"]
    shown = ", ".join(f"{name} {bound:.0f}" for name, bound in bounds.items())
    return Finding(
        ("true-if" if batch > 1 else "true") if ranked else "wrong",
        f"batch 1: Llama 3 8B in bf16, at most {shown} tokens/s; from a batch of about {batch:.0f} "
        "(H100, its FLOP/s from memory) compute decides",
        f"批 1：Llama 3 8B（bf16）每秒词元数至多为 {shown}；批大小约从 {batch:.0f} 起"
        "（H100，算力数字凭记忆）改由算力决定",
    )


@claim(47, "an H100 has more compute than an MI300X", "H100 的算力比 MI300X 高")
def h100_against_mi300x() -> Finding:
    h100, mi300x = (FLOPS_PER_SECOND[name] for name in ("H100", "MI300X"))
    reads = [BYTES_PER_SECOND[name] / 1e12 for name in ("H100", "MI300X")]
    return Finding(
        "true" if h100 > mi300x else "wrong",
        f"dense bf16 on paper, from memory: {h100 / 1e12:.0f} against {mi300x / 1e12:.0f} "
        f"TFLOP/s; bandwidth {reads[0]:g} against {reads[1]:g} TB/s",
        f"标称稠密 bf16 算力（凭记忆）：{h100 / 1e12:.0f} 对 {mi300x / 1e12:.0f} TFLOP/s；"
        f"带宽 {reads[0]:g} 对 {reads[1]:g} TB/s",
    )


@claim(
    48,
    "reading 100 GB takes orders of magnitude longer than computing 100 GFLOP",
    "读 100 GB 比算 100 GFLOP 慢几个数量级",
)
def read_or_compute() -> Finding:
    read = 100e9 / BYTES_PER_SECOND["H100"] * 1e3
    compute = 100e9 / FLOPS_PER_SECOND["H100"] * 1e3
    return Finding(
        "true" if read >= 100 * compute else "wrong",
        f"H100: {read:.0f} ms against {compute:.1f} ms (its FLOP/s from memory), "
        f"{read / compute:.0f} times",
        f"H100：{read:.0f} ms 对 {compute:.1f} ms（算力数字凭记忆），{read / compute:.0f} 倍",
    )


@claim(
    49,
    "a GPT-2-grade model: $43,000 in 2019, about $48 and 2 hours on 8×H100 now",
    "GPT-2 水平的模型：2019 年 43,000 美元，现在 8×H100 两小时约 48 美元",
)
def cost_of_gpt2() -> Finding:
    """The claim's figures are nanochat's README's. GPT-2 XL's own size bounds what they mean."""
    price = 3.0  # dollars an H100 and hour: assumed
    hours, gpus = 2, 8
    cfg = preset("gpt2-xl")
    rate = gpus * FLOPS_PER_SECOND["H100"] * MFU
    flops = rate * hours * 3600
    tokens = flops / flops_per_token(cfg)
    count = parameters(cfg)["total"]
    needed = 20 * count * flops_per_token(cfg) / rate / 3600  # Hoffmann et al. 2022
    cost, cost_needed = gpus * hours * price, gpus * needed * price
    return Finding(
        "true" if needed <= hours else "true-if" if abs(cost - 48) < 5 else "wrong",
        f"8 H100 at {MFU:.0%} of 989 TFLOP/s (from memory) and ${price:g} an hour each: {hours} h "
        f"are ${cost:.0f}, {flops:.1e} FLOPs, {tokens / 1e9:.1f}B tokens of GPT-2 XL; at 20 tokens "
        f"a parameter XL takes {needed:.0f} h, ${cost_needed:,.0f}: so only with a smaller model "
        "or better data",
        f"8 张 H100，按 989 TFLOP/s（凭记忆）的 {MFU:.0%}、每张每小时 {price:g} 美元：{hours} 小时 "
        f"{cost:.0f} 美元，{flops:.1e} FLOPs，GPT-2 XL 可训 {tokens / 1e9:.1f}B 词元；"
        f"按每参数 20 词元，XL 要 {needed:.0f} 小时、{cost_needed:,.0f} 美元："
        "因此须用更小的模型或更好的数据",
    )


@claim(
    54,
    "no biases saves minutes of training over 15T tokens",
    "不用偏置，在 15T 词元的训练中省下几分钟",
)
def bias_time() -> Finding:
    """Bounds of Llama 3 8B: a bias costs FLOPs alone if fused, its output's bytes too if not."""
    tokens, gpus = 15e12, 16_384
    cfg = preset("llama-3-8b")
    biased = cfg.replace(qkv_bias=True, out_bias=True, mlp_bias=True)
    biases = parameters(biased)["total"] - parameters(cfg)["total"]
    whole = tokens * flops_per_token(cfg) / (FLOPS_PER_SECOND["H100"] * MFU) / 3600
    # Forward one addition, backward one for its gradient.
    fused = tokens * 2 * biases / (FLOPS_PER_SECOND["H100"] * MFU) / 3600
    # In bf16: forward reads and writes each output, backward reads its gradient once more.
    unfused = tokens * 3 * 2 * biases / BYTES_PER_SECOND["H100"] / 3600
    low, high = fused / gpus * 3600, unfused / gpus * 60
    return Finding(
        "not-measurable-here",
        f"bounds for Llama 3 8B ({biases:,} biases, {whole:,.0f} H100-hours at {MFU:.0%} of 989 "
        f"TFLOP/s, from memory): {fused:,.0f} H100-hours if fused into the product, {unfused:,.0f} "
        f"if not; on {gpus:,} GPUs {low:.0f} s to {high:.0f} min. A timed step on that hardware, "
        "with and without, would decide",
        f"Llama 3 8B 的上下界（{biases:,} 个偏置；按 989 TFLOP/s（凭记忆）的 {MFU:.0%} 共 "
        f"{whole:,.0f} H100 小时）：并入矩阵乘则 {fused:,.0f} H100 小时，否则 {unfused:,.0f}；"
        f"{gpus:,} 张卡上为 {low:.0f} 秒到 {high:.0f} 分钟。"
        "要在那种硬件上分别测出有、无偏置时一步的用时，才能判定",
    )
