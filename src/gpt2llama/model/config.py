"""ModelConfig: every change between GPT-2 and Llama is one field. No torch here."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import CheckedFields, ConfigError


@dataclass(frozen=True)
class LinearScaling(CheckedFields):  # position interpolation (Chen et al. 2023)
    KIND: ClassVar = "linear"
    factor: float


@dataclass(frozen=True)
class NTKScaling(CheckedFields):  # theta · factor^(E/(E-2)): low frequencies stretched most
    KIND: ClassVar = "ntk"
    factor: float


@dataclass(frozen=True)
class DynamicScaling(CheckedFields):  # the same, growing with a text beyond max_seq_len
    KIND: ClassVar = "dynamic"
    factor: float


@dataclass(frozen=True)
class YarnScaling(CheckedFields):  # Peng et al. 2023: high frequencies kept, a ramp between
    KIND: ClassVar = "yarn"
    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class Llama3Scaling(CheckedFields):  # wavelengths over original/low stretched, a ramp between
    KIND: ClassVar = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


RopeScaling = LinearScaling | NTKScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedFields):
    """Sizes and switches; docs/architecture.md explains each. Raises ConfigError, naming fields.

    `n_kv_heads` and `head_dim` stay None until they are used, as `kv_heads` and `head_size`, so
    that a `replace()` of other sizes leaves the config valid.
    """

    ZERO_ALLOWED: ClassVar = ("dropout",)

    vocab_size: int
    max_seq_len: int
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post"] = "pre"
    norm_bias: bool = True
    position: Literal["learned", "sinusoidal", "rope", "none"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"] = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True
    embed_scale: bool = False
    dropout: float = 0.0
    qk_norm: bool = False
    sliding_window: int | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rope, scaling, split = self.position == "rope", self.rope_scaling, self.head_dim is None
        ntk = isinstance(scaling, NTKScaling | DynamicScaling)
        ramp = 1.0
        if isinstance(scaling, Llama3Scaling):
            ramp = scaling.high_freq_factor - scaling.low_freq_factor
        for wrong, rule in (
            (self.n_heads % self.kv_heads, "n_kv_heads must divide n_heads"),
            (split and self.d_model % self.n_heads, "n_heads must divide d_model without head_dim"),
            (self.dropout >= 1, "dropout must be below 1"),
            (rope and self.head_size % 2, "position 'rope' turns pairs: head_dim must be even"),
            (self.position == "sinusoidal" and self.d_model % 2, "position needs an even d_model"),
            (scaling is not None and not rope, "rope_scaling needs position 'rope'"),
            (rope and self.rope_theta <= 1, "rope_theta must be above 1"),
            (ntk and self.head_size == 2, "rope_scaling by NTK needs head_dim above 2"),
            (ramp <= 0, "rope_scaling needs low_freq_factor below high_freq_factor"),
        ):
            if wrong:
                named = [name for name in re.findall(r"\w+", rule) if name in vars(self)]
                got = ", ".join(f"{name}={getattr(self, name)!r}" for name in named)
                raise ConfigError(f"{rule} (got {got})")

    @property
    def kv_heads(self) -> int:  # K
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:  # E
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim
