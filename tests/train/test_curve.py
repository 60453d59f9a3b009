from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from gpt2llama.train.curve import HEIGHT, WIDTH, loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def points(line: ET.Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in line.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


@pytest.mark.parametrize("count", [1, 2, 5000])
@pytest.mark.parametrize("held_out", [True, False])
def test_the_curve_is_svg_and_shows_what_it_should(count: int, held_out: bool) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 2.0 + 6.0 / step} for step in range(1, count + 1)
    ]
    if held_out:
        lines[-1]["held_out_loss"] = 3.25
    root = ET.fromstring(loss_curve(lines, "a <b> & c"))
    assert root.find(f"{SVG}text").text == "a <b> & c"  # type: ignore[union-attr]  # there is one
    drawn = [points(line) for line in root.iter(f"{SVG}polyline")]
    assert len(drawn) == 2 + held_out
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in drawn for x, y in line)
    assert all(len(line) <= 2001 for line in drawn)
    raw = drawn[0]
    if count > 1:
        assert raw[0][0] < raw[-1][0]
        assert raw[0][1] < raw[-1][1]  # a loss that falls is drawn downwards
    words = "".join(root.itertext())
    assert ("held out: 3.250" in words) == held_out
