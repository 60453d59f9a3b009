"""QuantScheme: how a matrix is quantised. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


def to_dict(schemes: Mapping[str, QuantScheme]) -> dict[str, Any]:
    """Of the matrices by name the commonest scheme; under "exceptions" those that have another."""
    (most, _), *_ = Counter(schemes.values()).most_common(1)
    others = {name: how.to_dict() for name, how in schemes.items() if how != most}
    return most.to_dict() | ({"exceptions": others} if others else {})


def from_dict(value: Any, names: Iterable[str]) -> dict[str, QuantScheme]:
    """The way back, for the matrices of these names; none where `value` is None.

    Raises ConfigError for anything that `to_dict` does not write.
    """
    if value is None:
        return {}
    names, others = list(names), value.get("exceptions", {}) if isinstance(value, dict) else None
    if not isinstance(others, dict) or not all(isinstance(v, dict) for v in others.values()):
        raise ConfigError("it and its exceptions must be objects of a scheme's fields")
    if unknown := others.keys() - names:
        raise ConfigError(f"the exception {min(unknown)!r} is no quantised matrix of the file")
    most = QuantScheme.from_dict({k: v for k, v in value.items() if k != "exceptions"})
    return {n: QuantScheme.from_dict(others[n]) if n in others else most for n in names}
