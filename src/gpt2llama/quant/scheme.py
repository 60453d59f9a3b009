"""QuantScheme: how a matrix is quantised. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import CheckedFields, ConfigError, did_you_mean

BLOCK = 32  # inputs that share a scale when activations are rounded; divides every K quantised


@dataclass(frozen=True, kw_only=True)
class QuantScheme(CheckedFields):
    """Integers of `bits`, a scale for every `group` inputs of a row. Raises ConfigError.

    activations: "int8" rounds a layer's inputs too, in blocks of 32; "float" is weight-only.
    zero: a minimum beside each scale, as in GGUF's Q4_1. head: the embedding table and the head
    too. method: how the integers were chosen.
    """

    bits: Literal[8, 4]
    group: int | None = None  # None: a whole row
    zero: bool = False
    activations: Literal["int8", "float"] = "int8"
    method: Literal["rtn", "gptq", "awq", "gguf"] = "rtn"
    head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for wrong, rule in (
            (type(self.bits) is not int, "bits must be a whole number"),  # 4.0 equals 4
            (self.group not in (None, 32, 64, 128), "group must be 32, 64, 128 or none"),
            (self.bits == 4 and self.group is None, "4 bits need a group of 32, 64 or 128"),
            (self.bits == 8 and self.zero, "zero is for 4 bits; 8 have no minimum"),
        ):
            if wrong:
                raise ConfigError(f"{rule} (got bits={self.bits!r}, group={self.group!r})")

    @property
    def divisor(self) -> int:
        """What must divide a matrix's inputs."""
        return max(BLOCK, self.group or BLOCK)

    def groups(self, inputs: int) -> int:
        """Scales a row."""
        return 1 if self.group is None else inputs // self.group

    def bits_per_weight(self, inputs: int) -> float:
        """Scales and minimums included."""
        return self.bits + 16 * (1 + self.zero) * self.groups(inputs) / inputs


SCHEMES = {"int8": QuantScheme(bits=8), "int4": QuantScheme(bits=4, group=32)}


def scheme(name: str) -> QuantScheme:
    """ "int8": a scale a row; "int4": groups of 32. Raises ConfigError for another name."""
    if name not in SCHEMES:
        known = " or ".join(SCHEMES)
        raise ConfigError(f"scheme {name!r} must be {known}{did_you_mean(name, SCHEMES)}")
    return SCHEMES[name]
