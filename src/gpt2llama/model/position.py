"""Where a token stands: sinusoids, and RoPE with its scalings. (Learned ones are a table.)"""

import math

import torch
from torch import Tensor

from .config import DynamicScaling, Llama3Scaling, ModelConfig, NTKScaling, YarnScaling


def rope_frequencies(cfg: ModelConfig, seq_len: int = 0) -> tuple[Tensor, float]:
    """RoPE's angle per position for each pair, fp64 (E/2,), and the factor on cos and sin.

    Su et al. 2021 §3.2. Only dynamic scaling looks at `seq_len`, the length of the text so far.
    """
    size, theta, scaling = cfg.head_size, cfg.rope_theta, cfg.rope_scaling
    pair = torch.arange(size // 2, dtype=torch.float64, device="cpu")
    if isinstance(scaling, NTKScaling):
        theta *= scaling.factor ** (size / (size - 2))
    elif isinstance(scaling, DynamicScaling) and seq_len > cfg.max_seq_len:
        stretch = scaling.factor * seq_len / cfg.max_seq_len - (scaling.factor - 1)
        theta *= stretch ** (size / (size - 2))
    inv_freq = theta ** (-2 * pair / size)
    if scaling is None or isinstance(scaling, NTKScaling | DynamicScaling):
        return inv_freq, 1.0
    keep, magnitude = torch.zeros_like(inv_freq), 1.0  # keep: the share not interpolated
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_seq_len * inv_freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    elif isinstance(scaling, YarnScaling):
        radius, base = scaling.original_max_seq_len / (2 * math.pi), math.log(theta)
        # The pairs that turn beta_fast and beta_slow times over the original length.
        first = max(math.floor(size * math.log(radius / scaling.beta_fast) / (2 * base)), 0)
        last = min(math.ceil(size * math.log(radius / scaling.beta_slow) / (2 * base)), size - 1)
        keep = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
        magnitude = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1
    return inv_freq * (keep + (1 - keep) / scaling.factor), magnitude


class Rope:
    """Positions -> (cos, sin), each (B|1, 1, T, E/2), fp32 or better whatever the weights are."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.cfg = cfg
        inv_freq, self.magnitude = rope_frequencies(cfg)
        self.inv_freq: list[float] = inv_freq.tolist()  # no .to(bfloat16) or meta device spoils it

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        table = self.inv_freq
        if isinstance(self.cfg.rope_scaling, DynamicScaling):
            table = rope_frequencies(self.cfg, int(positions.max()) + 1)[0].tolist()
        dtype = torch.promote_types(dtype, torch.float32)
        inv_freq = torch.tensor(table, dtype=dtype, device=positions.device)
        angle = positions[:, None, :, None].to(dtype) * inv_freq
        return angle.cos() * self.magnitude, angle.sin() * self.magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i together with i + E/2 (half-split, HF's layout). x: (B, heads, T, E)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    """Vaswani et al. 2017 §3.5: sin at even, cos at odd dimensions. (B|1, T) -> (B|1, T, D)."""
    pair = torch.arange(d_model // 2, device=positions.device)
    angle = positions[..., None].float() * 10000.0 ** (-2 * pair / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
