"""Options that several commands share, each said once."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A model: folder, run, .gguf file, asset or hub id.")]
IgnoreKey = Annotated[list[str] | None, typer.Option(help="A config key to treat as not there.")]
RopeFactor = Annotated[float | None, typer.Option(help="Of a Meta folder with use_scaled_rope.")]

MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Only the k likeliest.")]
TopP = Annotated[float | None, typer.Option(help="Only the likeliest, up to p.")]
MinP = Annotated[float | None, typer.Option(help="Not below p × the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="1 is none.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same text each time.")]

Quant = Annotated[
    str | None, typer.Option(help="Round the weights: int8 or int4; keep: a GGUF file's blocks.")
]
KVDtype = Annotated[str, typer.Option(help="Of keys and values: auto, fp32, bf16 or int8.")]


class TrackerName(StrEnum):
    """Those of `train.trackers`; typer takes a list of no Literal."""

    trackio = "trackio"
    tensorboard = "tensorboard"
    wandb = "wandb"


Track = Annotated[
    list[TrackerName] | None,
    typer.Option(help="Metrics also there, on this machine; several. A resumed run remembers."),
]


# What a call in Python names its arguments; single words are told from prose by what they stand in.
_ARGUMENTS = re.compile(
    "max_new_tokens|num_samples|draft_tokens|kv_dtype|top_[kp]|min_p|repetition_penalty"
    "|^(quant|dtype|temperature|seed)(?= must)|(?<=leave out )(quant|dtype)"
)


def as_options(error: str) -> str:
    """An InputError's sentence with the options' names for the arguments'."""
    return _ARGUMENTS.sub(lambda found: "--" + found[0].replace("_", "-"), error)
