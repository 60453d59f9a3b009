"""A model on disk of which only headers have been read. No torch here: `inspect` needs none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..model.config import ModelConfig
from ..quant.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from ..tokenizer import Facts, Tokenizer

    State = dict[str, Tensor]
    Parts = tuple[Tensor, Tensor, Tensor | None]


PAIRS = "rows of each head from pairs to halves"
TRANSPOSED = "transposed"
SPLIT = "split into q, k and v"
FLOATS = ("float32", "bfloat16", "float16", "float64")  # what weights may be


class TensorInfo(NamedTuple):
    """What a header says of a tensor; dtype as torch names it: "float32", "bfloat16".

    kind: the file's own name of the type where the numbers are quantised ("Q4_1"). file, own_name:
    for errors and reports, of the files of a folder the one it is in, and what it is called there
    if that is not the whole name.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    file: str = ""
    own_name: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """headers: the file's tensors by the file's names; read: one of them.

    to_file, from_file: tensors (and so names and shapes) from ours to the file's and back;
    from_file is given them one at a time; change: how it changes a tensor, in words, by its name in
    the file. repeats: the names of a head that the file holds though the config ties it, and of
    the embedding. schemes: of the matrices that the model has quantised, by module (a tied table as
    lm_head). blocks: of a tensor that can be kept in the file's own blocks, its scheme and what
    reads its integers, scales and minimums. notes: what a user may want to know, a line each.
    facts: of the tokenizer, where they can be had quickly. readers: how many tensors are worth
    reading at once.
    """

    where: str
    format: str
    config: ModelConfig
    headers: dict[str, TensorInfo]
    read: Callable[[str], Tensor]
    to_file: Callable[[State], State] = dict
    from_file: Callable[[State], State] = dict
    change: Callable[[str], str] = lambda name: ""
    repeats: tuple[str, str] | None = None
    schemes: Mapping[str, QuantScheme] = field(default_factory=dict)
    blocks: Callable[[str], tuple[QuantScheme, Callable[[], Parts]] | None] = lambda name: None
    notes: list[str] = field(default_factory=list)
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    facts: Callable[[], Facts | None] = lambda: None
    readers: int = 1

    def changes(self) -> dict[str, int]:
        """What loading does, and to how many tensors."""
        return dict(Counter(how for name in self.headers if (how := self.change(name))))

    def file_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return Path(self.where, self.headers[name].file)

    def own_name(self, name: str) -> str:
        """What a tensor is called in that file."""
        return self.headers[name].own_name or name
