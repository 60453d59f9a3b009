"""Where a token stands: sinusoids, and RoPE with its scalings. (Learned ones are a table.)"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    YarnScaling,
)


def rope_frequencies(cfg: ModelConfig, seq_len: int = 0) -> tuple[Tensor, float]:
    """RoPE's angle per position for each pair, fp64 (E/2,), and the factor on cos and sin.

    Su et al. 2021 §3.2; the scalings' sources stand beside their classes in config.py. Only
    the dynamic one looks at `seq_len`, the length of the text so far.
    """
    size, theta, scaling, magnitude = cfg.head_size, cfg.rope_theta, cfg.rope_scaling, 1.0
    stretch = 1.0
    if isinstance(scaling, NTKScaling):
        stretch = scaling.factor
    elif isinstance(scaling, DynamicScaling) and seq_len > cfg.max_seq_len:
        stretch = scaling.factor * seq_len / cfg.max_seq_len - (scaling.factor - 1)
    if stretch != 1.0:
        theta *= stretch ** (size / (size - 2))
    pair = torch.arange(size // 2, dtype=torch.float64, device="cpu")
    inv_freq = theta ** (-2 * pair / size)
    keep = torch.ones_like(inv_freq)  # share of each frequency that is not interpolated
    if isinstance(scaling, LinearScaling):
        keep = torch.zeros_like(inv_freq)
    elif isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_seq_len * inv_freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    elif isinstance(scaling, YarnScaling):

        def pair_that_turns(times: float) -> float:
            wavelength = scaling.original_max_seq_len / (times * 2 * math.pi)
            return size * math.log(wavelength) / (2 * math.log(theta))

        first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
        last = min(math.ceil(pair_that_turns(scaling.beta_slow)), size - 1)
        keep = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
        default = 0.1 * math.log(max(scaling.factor, 1.0)) + 1
        magnitude = scaling.attention_factor or default
    if isinstance(scaling, LinearScaling | Llama3Scaling | YarnScaling):
        inv_freq = inv_freq * (keep + (1 - keep) / scaling.factor)
    return inv_freq, magnitude


class Rope(nn.Module):
    """Positions -> (cos, sin), each (B|1, 1, T, E/2), in fp32 or better whatever the weights are.

    The table is kept as Python numbers, so that no `.to(bfloat16)` or meta device can spoil it.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.dynamic = isinstance(cfg.rope_scaling, DynamicScaling)
        inv_freq, self.magnitude = rope_frequencies(cfg)
        self.inv_freq: list[float] = inv_freq.tolist()

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        table = self.inv_freq
        if self.dynamic:
            table = rope_frequencies(self.cfg, int(positions.max()) + 1)[0].tolist()
        dtype = torch.promote_types(dtype, torch.float32)
        inv_freq = torch.tensor(table, dtype=dtype, device=positions.device)
        angle = positions[:, None, :, None].to(dtype) * inv_freq
        return angle.cos() * self.magnitude, angle.sin() * self.magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i together with i + E/2 (half-split, HF's layout). x: (B, heads, T, E)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Sinusoids(nn.Module):
    """Vaswani et al. 2017 §3.5: sin at even, cos at odd dimensions. (B|1, T) -> (B|1, T, D)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, positions: Tensor) -> Tensor:
        pair = torch.arange(self.d_model // 2, device=positions.device)
        angle = positions[..., None].float() * 10000.0 ** (-2 * pair / self.d_model)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
