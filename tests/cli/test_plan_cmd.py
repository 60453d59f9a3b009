"""`gpt2llama plan`: one JSON object, a table, clear refusals, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpt2llama.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpt2llama", "plan", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "gpt2", "--json") == 0
    expected = {
        "parameters": 124_439_808,
        "flops_per_token": 854_438_400,
        "weight_bytes": 248_879_616,
        "kv_bytes": 37_748_736,  # 2 · 12 · 768 · 1024 numbers of 2 bytes
    }
    assert json.loads(capsys.readouterr().out).items() >= expected.items()


def test_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--context": "4096", "--batch": "2", "--kv-dtype": "int8", "--dtype": "fp32"}
    words = [word for option in options.items() for word in option]
    assert run(monkeypatch, "llama-3-70b", *words, "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["kv_bytes"] == 1_342_177_280  # 2 texts, half the bytes
    assert out["weight_bytes"] == 4 * 70_553_706_496


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "llama-3.2-1b") == 0
    out = capsys.readouterr().out
    for figure in ("1,235,814,400", "262,668,288", "2,471,628,800", "4,294,967,296", "4.00 GiB"):
        assert figure in out


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["llama-3.2-1B"], 1, "did you mean 'llama-3.2-1b'?"),
        (["gpt2", "--kv-dtype", "fp8"], 1, "one of fp32, bf16, fp16, int8, int4"),
        (["gpt2", "--context", "1025"], 1, "max_seq_len=1024"),
        (["gpt2", "--context", "0"], 2, "--context"),
        (["gpt2", "--batch", "x"], 2, "--batch"),
        (["gpt2", "--optimizer", "sgd"], 2, "--optimizer"),
        (["gpt2", "--accumulate", "0"], 2, "--accumulate"),
        ([], 2, "Missing argument"),
        (["gpt2", "--on", "h10"], 1, "did you mean 'h100'?"),
        (["gpt2", "--on", "abacus"], 1, "known: dgx-spark, "),
        (["gpt2", "--memory", "24"], 1, "'24' is no size of memory; write it like 24GB"),
        (["gpt2", "--memory", "0GB"], 1, "holds nothing"),
        (["gpt2", "--tokens", "many"], 1, "'many' is no number of tokens"),
        (["gpt2", "--tokens", "1B", "--on", "h100", "--mfu", "0"], 1, "above 0, at most 1 (got 0"),
        (["gpt2", "--tokens", "1B", "--price", "3"], 1, "--price needs --tokens"),
        (["gpt2", "--set", "n_layer=2"], 1, "did you mean 'n_layers'?"),
        (["gpt2", "--set", "lr=1"], 1, "lr is a field of the training"),
        (["gpt2", "--set", "n_heads=7"], 1, "n_heads must divide d_model"),
        (["gpt2", "--compare", "gpt3"], 1, "did you mean 'gpt2'?"),
        (["no/such/model.gguf"], 1, "no/such"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    says: str,
) -> None:
    assert run(monkeypatch, *args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "work",
    [
        "import sys; sys.argv = 'gpt2llama plan zh-3m --set d_ff=640 --memory 24GB --on h100 '"
        "'--tokens 1B --price 3 --compare gpt2 --json'.split()\n"
        "from gpt2llama.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code",
        "import gpt2llama",
        "import gpt2llama as g; g.preset('llama-3.1-405b'); g.presets(); g.depth(12)",
        "import gpt2llama.plan",
        "import sys; sys.argv = ['gpt2llama', 'plan', 'zh-3m', '--json']\n"
        "from gpt2llama.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code",
    ],
)
def test_no_torch_is_loaded(work: str) -> None:
    check = "\nimport sys; assert 'gpt2llama' in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", work + check], check=True, timeout=60)
