"""What is said of learned positions and of RoPE."""

from __future__ import annotations

import symtable
from typing import TYPE_CHECKING

from ...errors import InputError
from ...model.config import DynamicScaling, Llama3Scaling, ModelConfig
from ...model.presets import preset
from .claim import Finding, claim

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 1e-12  # differences below this are rounding in fp64


@claim(
    10,
    "a learned table of 1024 has no position 1025",
    "1024 个可学习位置的表里没有第 1025 个位置",
)
def end_of_the_table() -> Finding:
    import torch

    from ...model.transformer import Transformer

    cfg = preset("gpt2").replace(n_layers=1, n_heads=1, d_model=8, d_ff=8, vocab_size=8)
    model = Transformer(cfg)
    longest = 0
    refused = ""
    for length in (cfg.max_seq_len, cfg.max_seq_len + 1):
        try:
            with torch.inference_mode():
                model(torch.zeros(1, length, dtype=torch.long))
            longest = length
        except InputError as error:
            refused = str(error)
    return Finding(
        "true" if longest == cfg.max_seq_len else "wrong",
        f"{longest} tokens run; one more: “{refused}”",
        f"{longest} 个词元可以运行；再多一个就报错：“{refused}”",
    )


@claim(11, "a RoPE score depends only on i − j", "RoPE 的注意力分数只取决于 i − j")
def relative_scores() -> Finding:
    import torch

    from ...model.position import Rope, rope_frequencies

    cfg = preset("zh-3m")
    near, far = (103, 101), (203, 201)  # shifted by 100; 203 is beyond max_seq_len 128

    def score(cfg: ModelConfig, places: tuple[int, int]) -> float:
        """Of a query and a key of ones, so that it is 2 Σ cos(angle of the distance)."""
        cos, sin = Rope(cfg)(torch.tensor([places]), torch.float64)
        return _score(torch.ones(1, 1, 2, cfg.head_size, dtype=torch.float64), cos, sin)

    def rough(places: tuple[int, int]) -> float:
        """The same with positions, frequencies and angles in bf16."""
        position = torch.tensor(places, dtype=torch.bfloat16)
        angle = position[:, None] * rope_frequencies(cfg)[0].bfloat16()
        cos, sin = angle.double().cos(), angle.double().sin()
        return _score(torch.ones(1, 1, 2, cfg.head_size, dtype=torch.float64), cos, sin)

    exact = abs(score(cfg, far) - score(cfg, near))
    rounded = abs(rough(far) - rough(near))
    dynamic = cfg.replace(rope_scaling=DynamicScaling(2.0))
    stretched = abs(score(dynamic, far) - score(dynamic, near))
    relative, always = exact < EXACT, max(rounded, stretched) < EXACT
    return Finding(
        "true" if always else "true-if" if relative else "wrong",
        f"shifted by 100 the score of two vectors of ones ({score(cfg, near):.2f}) changes by less "
        f"than {EXACT:g} in fp64, by {rounded:.2g} with bf16 tables, by {stretched:.2g} with "
        "dynamic NTK past max_seq_len",
        f"两个全 1 向量的分数（{score(cfg, near):.2f}）在位置平移 100 后：fp64 下变化小于 "
        f"{EXACT:g}；用 bf16 的表，变化 {rounded:.2g}；"
        f"动态 NTK 在超出 max_seq_len 时，变化 {stretched:.2g}",
    )


def _score(x: Tensor, cos: Tensor, sin: Tensor) -> float:
    from ...model.position import rotate

    query, key = rotate(x, cos, sin)[0, 0]
    return float(query @ key)


def _adjacent(x: Tensor, angle: Tensor) -> Tensor:
    """Meta's layout: dimensions 2i and 2i + 1 as a complex number, times e^(i angle)."""
    import torch

    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def _pairs_to_halves(size: int) -> list[int]:
    """Which dimension of the adjacent layout stands where in the half-split one."""
    return [*range(0, size, 2), *range(1, size, 2)]


def _queries_and_angles() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (1, 1, 8, E) in fp64, the angles (8, E/2) at positions 0 to 7, and their cos and sin."""
    import torch

    from ...model.position import rope_frequencies

    cfg = preset("zh-3m")
    angle = torch.arange(8)[:, None] * rope_frequencies(cfg)[0]
    x = torch.arange(8 * cfg.head_size, dtype=torch.float64).sin().view(1, 1, 8, cfg.head_size)
    return x, angle, angle.cos(), angle.sin()


@claim(
    12,
    "RoPE pairs adjacent dimensions / RoPE pairs the two halves",
    "RoPE 把相邻两维配对 / RoPE 把前后两半配对",
)
def two_layouts() -> Finding:
    from ...model.position import rotate

    x, angle, cos, sin = _queries_and_angles()
    order = _pairs_to_halves(x.shape[-1])
    adjacent, halves = _adjacent(x, angle), rotate(x[..., order], cos, sin)
    same = float((adjacent[..., order] - halves).abs().max())
    mixed = rotate(x, cos, sin)  # one layout's weights under the other's rotation
    scores, wrong = (float(y[0, 0, 7] @ y[0, 0, 0]) for y in (adjacent, mixed))
    one_function, interchangeable = same < EXACT, abs(scores - wrong) < EXACT
    return Finding(
        "both" if one_function and not interchangeable else "wrong",
        "two layouts of one function: equal once the rows of Q and K are permuted (to "
        f"{EXACT:g}); not interchangeable: a score of {scores:.3f} becomes {wrong:.3f}. Meta and "
        "llama GGUF: adjacent; Hugging Face and ours: halves",
        f"同一个函数的两种排列：把 Q、K 的行重排后相等（差 ≤ {EXACT:g}）；不能混用："
        f"分数 {scores:.3f} 会变成 {wrong:.3f}。"
        "Meta 与 llama GGUF：相邻；Hugging Face 与本项目：两半",
    )


@claim(
    15,
    "Llama 3.1 raised theta to 500k for 128k tokens",
    "Llama 3.1 为了 128k 上下文把 theta 提高到 500k",
)
def theta_of_llama_3() -> Finding:
    old, new, small = map(preset, ("llama-3-8b", "llama-3.1-8b", "llama-3.2-1b"))
    raised = old.rope_theta != new.rope_theta
    scaling, factor = new.rope_scaling, 0.0
    shown = ""
    if isinstance(scaling, Llama3Scaling) and isinstance(small.rope_scaling, Llama3Scaling):
        shown = (
            f"{scaling.factor:g}/{scaling.low_freq_factor:g}/{scaling.high_freq_factor:g}/"
            f"{scaling.original_max_seq_len}"
        )
        factor = small.rope_scaling.factor
    return Finding(
        "true" if raised else "wrong",
        f"Llama 3: theta {old.rope_theta:,.0f}; 3.1: {new.rope_theta:,.0f} and frequency scaling "
        f"{shown}; 3.2 1B and 3B: factor {factor:g}",
        f"Llama 3 的 theta 已是 {old.rope_theta:,.0f}；3.1 仍是 {new.rope_theta:,.0f}，另加"
        f"频率缩放 {shown}；3.2 的 1B 与 3B 缩放倍数为 {factor:g}",
    )


@claim(52, "RoPE turns Q and K, not V", "RoPE 旋转 Q 和 K，不旋转 V")
def values_stay() -> Finding:
    import torch

    from ...model.position import rotate
    from ...model.transformer import attention_weights

    x, angle, _, _ = _queries_and_angles()
    shift = angle[1] * 100  # what 100 positions add

    def output(angle: Tensor, turn_values: bool) -> Tensor:
        cos, sin = angle.cos(), angle.sin()
        weights = attention_weights(rotate(x, cos, sin), rotate(x, cos, sin), None)
        return torch.as_tensor(weights @ (rotate(x, cos, sin) if turn_values else x))

    changes = []
    for turn_values in (False, True):
        before, after = output(angle, turn_values), output(angle + shift, turn_values)
        changes.append(float((after - before).norm() / before.norm()))
    kept, turned = changes
    return Finding(
        "true" if kept < EXACT < turned else "wrong",
        f"shifted by 100, the output changes by less than {EXACT:g}; with V turned too, by "
        f"{turned:.0%}",
        f"整体平移 100 个位置，输出变化小于 {EXACT:g}；若连 V 也旋转，变化 {turned:.0%}",
    )


# The gist of the function as printed: it cuts x at head_dim, which nothing gives it.
_PRINTED = """
def apply_rope(x, cos, sin):
    a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    return a * cos - b * sin, b * cos + a * sin
"""


@claim(
    55,
    "a printed apply_rope that reads head_dim without defining it",
    "一段刊出的 apply_rope，用了没有定义的 head_dim",
)
def undefined_head_dim() -> Finding:
    from ...model.position import rotate

    module = symtable.symtable(_PRINTED, "printed", "exec")
    function = module.get_children()[0]
    given = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned()}
    free = sorted(
        symbol.get_name()
        for symbol in function.get_symbols()
        if symbol.is_global() and symbol.get_name() not in given
    )
    x, angle, cos, sin = _queries_and_angles()
    order = _pairs_to_halves(x.shape[-1])
    ours = rotate(x[..., order], cos, sin)
    difference = float((ours - _adjacent(x, angle)[..., order]).abs().max())
    agrees = "equals" if difference < EXACT else "differs from"
    return Finding(
        "wrong" if free else "true",
        f"undefined: {', '.join(free)}, so that the first call raises NameError; ours {agrees} the "
        f"complex product x·e^(i·angle) (to {EXACT:g})",
        f"未定义：{'、'.join(free)}，一调用就报 NameError；本项目的结果与复数乘积 x·e^(i·角度) "
        f"{'相等' if difference < EXACT else '不等'}（差 ≤ {EXACT:g}）",
    )
