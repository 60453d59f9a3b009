"""`gpt2llama classify PATH TEXT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._print import Json, print_json, tell
from ._text import read_text

app = typer.Typer(add_completion=False)


@app.command()
def classify(
    path: Annotated[Path, typer.Argument(help="A run of finetune classify, or its model folder.")],
    text: Annotated[str, typer.Argument(help="The text; - reads stdin.")],
    json: Json = False,
) -> None:
    """Label a text, with the probability of each label."""
    from ..finetune.classifier import load_classifier

    content = read_text("-") if text == "-" else text
    classifier = load_classifier(path)
    cut = classifier.encode(content)[1]
    if cut:
        tell(f"only the first {classifier.seq_len:,} tokens are looked at, as in training")
    shares = classifier.probabilities([content])[0]
    label = max(shares, key=lambda name: shares[name])
    if json:
        print_json({"label": label, "probabilities": shares, "cut": cut})
        return
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"{share:7.2%}  {name}")
