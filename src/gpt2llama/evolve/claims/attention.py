"""What is said of masks, GQA and the KV cache."""

from __future__ import annotations

from ...model.presets import preset, presets
from ...plan import kv_bytes, kv_bytes_per_token, weight_bytes
from .claim import Finding, claim

GIB = 2**30


@claim(16, "a stored 128k × 128k mask is enormous", "存一张 128k × 128k 的掩码要占极大的内存")
def stored_mask() -> Finding:
    length = preset("llama-3.1-8b").max_seq_len
    as_bool, as_fp32 = length**2, 4 * length**2
    weights = weight_bytes(preset("llama-3.1-8b"), "bf16")
    return Finding(
        "true" if as_bool > weights else "wrong",
        f"{as_bool / GIB:.0f} GiB as bool, {as_fp32 / GIB:.0f} GiB as fp32; the weights of "
        f"Llama 3.1 8B in bf16 are {weights / GIB:.1f} GiB",
        f"bool 为 {as_bool / GIB:.0f} GiB，fp32 为 {as_fp32 / GIB:.0f} GiB；"
        f"Llama 3.1 8B 的 bf16 权重也不过 {weights / GIB:.1f} GiB",
    )


@claim(
    17,
    "Llama 3 70B has 64 query and 8 kv heads: its K and V matrices are 8 times smaller",
    "Llama 3 70B 有 64 个查询头、8 个 KV 头：K、V 矩阵缩小到 1/8",
)
def kv_matrices() -> Finding:
    cfg = preset("llama-3-70b")
    full = cfg.d_model * cfg.n_heads * cfg.head_size
    shared = cfg.d_model * cfg.kv_heads * cfg.head_size
    stated = (cfg.n_heads, cfg.kv_heads, full / shared) == (64, 8, 8)
    return Finding(
        "true" if stated else "wrong",
        f"{full:,} numbers without GQA, {shared:,} with: {full / shared:g} times",
        f"不用 GQA 为 {full:,} 个数，用了为 {shared:,} 个：前者是后者的 {full / shared:g} 倍",
    )


@claim(
    18,
    "its KV cache at 4k, batch 1, fp16: about 10 GB without GQA, 1.25 with",
    "它的 KV 缓存（4k、批 1、fp16）：不用 GQA 约 10 GB，用了 1.25 GB",
)
def cache_of_70b() -> Finding:
    cfg = preset("llama-3-70b")
    full = kv_bytes(cfg.replace(n_kv_heads=None), 4096, dtype="fp16")
    shared = kv_bytes(cfg, 4096, dtype="fp16")
    return Finding(
        "true" if (full, shared) == (10 * GIB, 1.25 * GIB) else "wrong",
        f"{full:,} and {shared:,} bytes: {full / GIB:g} and {shared / GIB:g} GiB "
        f"({full / 1e9:.2f} and {shared / 1e9:.2f} GB)",
        f"{full:,} 与 {shared:,} 字节：{full / GIB:g} 与 {shared / GIB:g} GiB"
        f"（{full / 1e9:.2f} 与 {shared / 1e9:.2f} GB）",
    )


@claim(19, "an int8 KV cache halves it", "KV 缓存用 int8 能减半")
def int8_cache() -> Finding:
    from ...quant.kv import Int8KVCache

    cfg = preset("llama-3-70b")
    cache = Int8KVCache(cfg, batch_size=1, max_len=63, device="meta")
    held = cache.keys.nbytes + cache.values.nbytes
    slots = cache.keys.shape[3]
    planned = kv_bytes(cfg, slots, dtype="int8")
    wide = kv_bytes(cfg, slots, dtype="fp16")
    share, whole = held / wide, cache.nbytes / wide
    halved = share == 0.5 and held == planned
    return Finding(
        "wrong" if not halved else "true" if whole == share else "true-if",
        f"the numbers are {share:.1%} of fp16's ({held:,} bytes for {slots} tokens of 70B in a "
        f"real cache, as planned); with its scales, fp32 for each head and token, {whole:.2%}",
        f"数值本身为 fp16 的 {share:.1%}（70B 的真实缓存存 {slots} 个词元占 {held:,} 字节，"
        f"与计算一致）；加上每头每词元一个 fp32 缩放系数后为 {whole:.2%}",
    )


@claim(20, "GQA makes the cache 8 times smaller", "GQA 使缓存缩小到 1/8")
def gqa_ratios() -> Finding:
    cfgs = {n.removeprefix("llama-"): preset(n) for n in presets() if n.startswith("llama-3")}
    ratios = {
        name: kv_bytes_per_token(cfg.replace(n_kv_heads=None)) // kv_bytes_per_token(cfg)
        for name, cfg in cfgs.items()
    }
    eights = [ratio == 8 for ratio in ratios.values()]
    shown = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
    return Finding(
        "true" if all(eights) else "true-if" if any(eights) else "wrong",
        f"times by model: {shown}",
        f"各型号缩小的倍数：{shown}",
    )


@claim(21, "GQA came with Llama 3", "GQA 始于 Llama 3")
def gqa_before_llama_3() -> Finding:
    earlier = presets()[: presets().index("llama-3-8b")]
    llamas = [name for name in earlier if name.startswith("llama")]
    shared = [name for name in llamas if preset(name).n_kv_heads is not None]
    cfg = preset("llama-2-70b")
    return Finding(
        "wrong" if shared else "true",
        f"before it: {', '.join(shared)} ({cfg.n_heads} query heads, {cfg.kv_heads} kv heads, "
        "July 2023)",
        f"更早就有：{'、'.join(shared)}（{cfg.n_heads} 个查询头，{cfg.kv_heads} 个 KV 头，"
        "2023 年 7 月）",
    )


@claim(
    22,
    "d 256, 4 heads: an MHA cache holds 4 × 256 = 1024 numbers, GQA 512",
    "d 256、4 头：MHA 缓存 4 × 256 = 1024 个数，GQA 512 个",
)
def small_cache() -> Finding:
    grouped = preset("zh-3m").replace(n_layers=1)
    both = [kv_bytes_per_token(cfg, "int8") for cfg in (grouped.replace(n_kv_heads=None), grouped)]
    keys = [numbers // 2 for numbers in both]
    return Finding(
        "true" if keys == [1024, 512] or both == [1024, 512] else "wrong",
        f"head_dim is d / heads = {grouped.head_size}: {keys[0]} → {keys[1]} numbers of K a token "
        f"and layer, {both[0]} → {both[1]} with V",
        f"head_dim 是 d / 头数 = {grouped.head_size}：每层每词元 K 为 {keys[0]} → {keys[1]} 个数，"
        f"连 V 为 {both[0]} → {both[1]}",
    )
