"""What is said of the MLP, its activation and its biases."""

from __future__ import annotations

import math

from ...model.config import ModelConfig
from ...model.presets import preset
from ...plan import parameters, weight_bytes
from .claim import Finding, claim


def _mlp(cfg: ModelConfig) -> int:
    return parameters(cfg.replace(n_layers=1))["mlp"]


@claim(
    26,
    "a third MLP matrix adds 50%, a width of 2/3 restores it",
    "MLP 加上第三个矩阵，参数多 50%；宽度取 2/3 就与原来持平",
)
def third_matrix() -> Finding:
    cfg = preset("zh-3m").replace(gated_mlp=False, d_ff=4 * 256)
    plain, gated = _mlp(cfg), _mlp(cfg.replace(gated_mlp=True))
    narrow = _mlp(cfg.replace(gated_mlp=True, d_ff=2 * cfg.d_ff // 3))
    true = gated == 1.5 * plain and abs(narrow / plain - 1) < 0.01
    return Finding(
        "true" if true else "wrong",
        f"d {cfg.d_model}: {plain:,} · {gated:,} · {narrow:,}",
        f"d {cfg.d_model}：{plain:,} · {gated:,} · {narrow:,}",
    )


def _meta_width(d_model: int, multiplier: float, multiple: int) -> int:
    """d_ff as Meta's llama-models compute it from params.json."""
    return multiple * math.ceil(int(multiplier * int(2 * 4 * d_model / 3)) / multiple)


@claim(
    27,
    "Llama 3 uses the multiplier 1.3 and multiples of 256",
    "Llama 3 的 MLP 宽度用乘数 1.3，取 256 的倍数",
)
def llama_3_widths() -> Finding:
    small, large = preset("llama-3-8b"), preset("llama-3-70b")
    with_256 = [_meta_width(cfg.d_model, 1.3, 256) == cfg.d_ff for cfg in (small, large)]
    with_4096 = _meta_width(large.d_model, 1.3, 4096)
    return Finding(
        "true" if all(with_256) else "wrong-in-part" if with_4096 == large.d_ff else "wrong",
        f"70B: 1.3 and a multiple of 4096 give {with_4096:,}, the real width {large.d_ff:,}; 256 "
        f"would give {_meta_width(large.d_model, 1.3, 256):,} (8B: {small.d_ff:,} either way)",
        f"70B：乘数 1.3、取 4096 的倍数得 {with_4096:,}，实际宽度 {large.d_ff:,}；用 256 会得 "
        f"{_meta_width(large.d_model, 1.3, 256):,}（8B 两种取法都得 {small.d_ff:,}）",
    )


@claim(30, "ReLU drops half the information", "ReLU 丢掉一半信息")
def half_the_information() -> Finding:
    import torch
    import torch.nn.functional as F

    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 64, generator=random, dtype=torch.float64)
    up = torch.randn(256, 64, generator=random, dtype=torch.float64) / 8  # outputs of variance 1
    hidden = F.relu(x @ up.T)
    zeros = float((hidden == 0).double().mean())
    shifted = float((F.relu(x @ up.T + 1) == 0).double().mean())
    kept = hidden[0] > 0
    back = torch.linalg.lstsq(up[kept], hidden[0][kept, None]).solution[:, 0]
    recovered = bool((back - x[0]).abs().max() < 1e-10)
    axis = torch.linspace(-2, -1, 100_001, dtype=torch.float64)
    lowest, at = (float(v) for v in (F.silu(axis).min(), axis[F.silu(axis).argmin()]))
    half = abs(zeros - 0.5) < 0.02
    return Finding(
        "true" if half and not recovered else "true-if" if half else "wrong",
        f"{zeros:.1%} of the outputs are zero if inputs are symmetric about 0, {shifted:.1%} if "
        f"shifted by one deviation; of 64 → 256 the {int(kept.sum())} others still "
        f"{'give' if recovered else 'do not give'} x back exactly. SiLU's minimum is "
        f"{lowest:.3f} at {at:.3f}",
        f"输入关于 0 对称时 {zeros:.1%} 的输出为零，平移一个标准差时 {shifted:.1%}；64 → 256 时"
        f"其余 {int(kept.sum())} 个输出{'仍能' if recovered else '不能'}精确还原 x。"
        f"SiLU 在 {at:.3f} 处取最小值 {lowest:.3f}",
    )


@claim(31, "dropping biases saves memory", "去掉偏置节省内存")
def bias_memory() -> Finding:
    cfg = preset("gpt2")
    bare = cfg.replace(qkv_bias=False, out_bias=False, mlp_bias=False)
    saved = parameters(cfg)["total"] - parameters(bare)["total"]
    share = saved / parameters(cfg)["total"]
    size = weight_bytes(cfg, "fp32") - weight_bytes(bare, "fp32")
    return Finding(
        "true" if share > 0.01 else "true-if" if saved else "wrong",
        f"{saved:,} numbers, {share:.3%} of GPT-2 124M: {size / 1024:.0f} KiB in fp32",
        f"{saved:,} 个数，占 GPT-2 124M 的 {share:.3%}：fp32 下 {size / 1024:.0f} KiB",
    )


@claim(41, "nanoGPT is a faithful GPT-2", "nanoGPT 忠实于 GPT-2")
def exact_gelu() -> Finding:
    import torch
    import torch.nn.functional as F

    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    apart = float((F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max())
    return Finding(
        "true-if" if 0 < apart < 1e-3 else "wrong" if apart else "true",
        f"it uses the exact GELU, GPT-2 the tanh form: up to {apart:.1e} apart",
        f"它用精确的 GELU，GPT-2 用 tanh 近似：最多相差 {apart:.1e}",
    )


@claim(51, "hidden = int(4d · 2/3)", "隐藏宽度 = int(4d · 2/3)")
def two_thirds() -> Finding:
    d_model, multiple = 256, 64
    exact = 4 * d_model * 2 / 3
    plain, rounded = int(exact), multiple * math.ceil(int(exact) / multiple)
    return Finding(
        "true" if plain == rounded else "true-if",
        f"d {d_model}: {plain}; the code that goes with it rounds up to a multiple of {multiple}, "
        f"{rounded} ({rounded / exact - 1:+.1%})",
        f"d {d_model}：{plain}；与之相配的代码又向上取 {multiple} 的倍数，得 {rounded}"
        f"（{rounded / exact - 1:+.1%}）",
    )
