"""A model on disk of which only headers have been read. No torch here: `inspect` needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..tokenizer import Tokenizer

    State = dict[str, Tensor]


class TensorInfo(NamedTuple):
    """What a header says of a tensor; dtype as torch names it: "float32", "bfloat16".

    kind: the file's own name of the type where the numbers are quantised ("Q4_1").
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """headers: the file's tensors by the file's names; read: one of them.

    to_file, from_file: tensors (and so names and shapes) from ours to the file's and back;
    from_file is given them one at a time. repeats: the names of a head that the file holds though
    the config ties it, and of the embedding. notes: what a user may want to know, a line each.
    """

    where: str
    format: str
    config: ModelConfig
    headers: dict[str, TensorInfo]
    read: Callable[[str], Tensor]
    to_file: Callable[[State], State] = dict
    from_file: Callable[[State], State] = dict
    repeats: tuple[str, str] | None = None
    notes: list[str] = field(default_factory=list)
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
