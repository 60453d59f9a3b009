"""What loading makes of each tensor of a file: renamed, turned, transposed, split, tied."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from .build import check, settle_head
from .opened import Opened

_TWINS = {  # where a tied table stands beside the place that it is stored for
    "embed_tokens.weight": "lm_head.weight",
    **{f"lm_head.{part}": f"embed_tokens.{part}" for part in ("words", "scale", "minimum")},
}


@dataclass(frozen=True)
class Mapped:
    """A tensor by its name in the file; ours: its names in the model; change: how it changed."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    ours: tuple[str, ...]
    change: str


def report(opened: Opened) -> list[Mapped]:
    """A line for every tensor of the file, in the file's order; WeightsError if it cannot load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `load` says it of a head that is kept
        settled = settle_head(opened)
    check(settled)
    lines = []
    for name, info in opened.headers.items():
        ours: tuple[str, ...] = ()
        change = "repeats the embedding, which the config ties: left out"
        if name in settled.headers:
            ours = tuple(settled.from_file({name: torch.empty(info.shape, device="meta")}))
            change = settled.change(name)
        twin = _TWINS.get(ours[0]) if ours and settled.config.tie_embeddings else None
        if twin is not None:
            ours = (*ours, twin)
            change = f"{change}, tied" if change else "tied"
        dtype, file = info.kind or info.dtype, str(opened.file_of(name))
        lines.append(Mapped(opened.own_name(name), file, info.shape, dtype, ours, change))
    return lines
