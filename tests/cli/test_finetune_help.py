"""The help of `finetune` and its stages: one sentence each, an explanation of every option."""

from __future__ import annotations

import pytest
from typer.main import get_command

from gpt2llama.cli.finetune import app

STAGES = ("classify", "instruct", "preference", "reward", "distill")


def commands() -> dict[str, object]:
    return dict(get_command(app).commands)  # type: ignore[attr-defined]  # a group


def test_the_stages_stand_in_the_order_of_the_guide() -> None:
    assert tuple(commands()) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_is_explained(stage: str) -> None:
    command = commands()[stage]
    first = str(command.help).split("\n\n")[0]  # type: ignore[attr-defined]  # a click command
    assert first.endswith(".")
    assert len(first) <= 80
    assert "\n" not in first
    options = {parameter.name: parameter for parameter in command.params}  # type: ignore[attr-defined]
    assert {"out", "data", "settings", "resume", "json"} <= options.keys()
    assert all(getattr(option, "help", None) for option in options.values())
    assert options["resume"].secondary_opts == []  # not to go on is what one does anyway


def test_adapters_are_asked_for_in_one_way() -> None:
    told = []
    for stage in STAGES[:-1]:
        parameters = commands()[stage].params  # type: ignore[attr-defined]
        of_lora = [(p.name, p.opts, p.help) for p in parameters if str(p.name).startswith("lora")]
        assert len(of_lora) == 4
        told.append(of_lora)
    assert all(each == told[0] for each in told)
