"""ModelConfig: every change between GPT-2 and Llama is one field. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

from ..errors import CheckedFields, ConfigError, check_names

Norm = Literal["layernorm", "rmsnorm"]
NormPlacement = Literal["pre", "post"]
Position = Literal["learned", "sinusoidal", "rope", "none"]
Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class LinearScaling(CheckedFields):
    """Position interpolation: positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class NTKScaling(CheckedFields):
    """NTK-aware: theta times factor^(E/(E-2)), so that only low frequencies are stretched."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling(CheckedFields):
    """NTK-aware, growing with the text once it is longer than `max_seq_len`."""

    factor: float


@dataclass(frozen=True)
class YarnScaling(CheckedFields):
    """YaRN (Peng et al. 2023): high frequencies kept, low ones interpolated, a ramp between."""

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class Llama3Scaling(CheckedFields):
    """Llama 3.1: wavelengths above original/low interpolated, below original/high kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


RopeScaling = LinearScaling | NTKScaling | DynamicScaling | YarnScaling | Llama3Scaling
_NAMES = ("linear", "ntk", "dynamic", "yarn", "llama3")
_SCALINGS = dict(zip(_NAMES, get_args(RopeScaling), strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckedFields):
    """Sizes and switches of one decoder-only Transformer; docs/architecture.md explains each.

    `n_kv_heads` and `head_dim` stay None ("all heads", "d_model / n_heads") until they are used
    (`kv_heads`, `head_size`), so that a `replace()` of sizes leaves the config valid.
    Raises ConfigError, naming the fields, for a combination that cannot be built.
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
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_placement: NormPlacement = "pre"
    norm_bias: bool = True
    position: Position = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
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
        if isinstance(self.rope_scaling, dict):  # as read from TOML or JSON
            object.__setattr__(self, "rope_scaling", _scaling_from_dict(self.rope_scaling))
        super().__post_init__()
        rope, scaling = self.position == "rope", self.rope_scaling
        self._require(self.n_heads % self.kv_heads == 0, "n_kv_heads must divide n_heads")
        if self.head_dim is None:
            even_split = self.d_model % self.n_heads == 0
            self._require(even_split, "n_heads must divide d_model unless head_dim is given")
        self._require(self.dropout < 1, "dropout must be below 1")
        if rope and self.head_size % 2:
            self._require(False, "position 'rope' turns pairs, so head_dim must be even")
        if self.position == "sinusoidal" and self.d_model % 2:
            self._require(False, "position 'sinusoidal' pairs sin and cos: d_model must be even")
        self._require(rope or scaling is None, "rope_scaling needs position 'rope'")
        if isinstance(scaling, NTKScaling | DynamicScaling):
            self._require(self.head_size > 2, "rope_scaling by NTK needs head_dim above 2")
        if isinstance(scaling, Llama3Scaling) and not (
            scaling.low_freq_factor < scaling.high_freq_factor
        ):
            self._require(False, "rope_scaling needs low_freq_factor below high_freq_factor")

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            names = [f.name for f in fields(self) if f.name in rule.replace("'", " ").split()]
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise ConfigError(f"{rule} (got {got})")

    @property
    def kv_heads(self) -> int:
        """K: key/value heads; `n_kv_heads`, or all of them."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """E: numbers in one head; `head_dim`, or d_model / n_heads."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with these fields changed; an unknown one is a ConfigError with the nearest."""
        check_names("ModelConfig", ModelConfig, changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or TOML; `from_dict` is the way back."""
        values = asdict(self)
        if self.rope_scaling is not None:
            kind = next(k for k, c in _SCALINGS.items() if isinstance(self.rope_scaling, c))
            values["rope_scaling"] = {"type": kind, **values["rope_scaling"]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Raises ConfigError for an unknown key, a missing size or a bad value."""
        check_names("ModelConfig", cls, values, complete=True)
        return cls(**values)


def _scaling_from_dict(values: dict[str, Any]) -> RopeScaling:
    kind, rest = values.get("type"), {k: v for k, v in values.items() if k != "type"}
    if kind not in _SCALINGS:
        raise ConfigError(f"rope_scaling type {kind!r} must be one of {', '.join(_SCALINGS)}")
    check_names(f"rope_scaling {kind!r}", _SCALINGS[kind], rest, complete=True)
    scaling: RopeScaling = _SCALINGS[kind](**rest)
    return scaling
