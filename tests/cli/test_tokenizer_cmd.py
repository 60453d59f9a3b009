from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import gpt2llama as g
from gpt2llama.cli.tokenizer import app
from gpt2llama.errors import DataError, FileError, Gpt2LlamaError, TokenizerError
from gpt2llama.tokenizer import load_tokenizer, train_bpe

TEXT = "却说曹操大喜。周瑜笑曰：“公瑾之计！”\n" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([TEXT], 400).save(folder)
    return folder


def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)), env=env)
    if isinstance(result.exception, Gpt2LlamaError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_train(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    lines = "".join(json.dumps({"text": line}) + "\n" for line in ["共有2026字", "共有2026字"])
    (tmp_path / "b.jsonl").write_text(lines, encoding="utf-8")
    out = tmp_path / "out"
    files = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    result = run("train", *files, "--vocab-size", 290, "--out", out, "--json")
    tokenizer = load_tokenizer(out)
    assert json.loads(result.stdout) == {
        "out": str(out),
        "vocab_size": 290,
        "fingerprint": tokenizer.fingerprint,
    }
    assert "warning" not in result.stderr
    assert tokenizer.fingerprint == train_bpe([TEXT, "共有2026字", "共有2026字"], 290).fingerprint


def test_train_with_too_little_text_warns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab ab", encoding="utf-8")
    out = tmp_path / "out"
    result = run("train", tmp_path / "a.txt", "--vocab-size", 5000, "--out", out)
    assert result.stdout == f"{out}: 265 pieces\n"
    assert "265 pieces, not 5,000" in " ".join(result.stderr.split())


def test_train_refuses_what_is_no_text(tmp_path: Path) -> None:
    options = ("--vocab-size", 300, "--out", tmp_path / "out")
    (tmp_path / "a.txt").write_bytes("曹".encode() * 3 + b"\xff")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 9"):
        run("train", tmp_path / "a.txt", *options)
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.txt has no text"):
        run("train", tmp_path / "b.txt", *options)
    (tmp_path / "c.txt").write_text("text", encoding="utf-8")
    with pytest.raises(TokenizerError, match="vocab_size must be from 264"):
        run("train", tmp_path / "c.txt", *options[2:], "--vocab-size", 100)
    assert not (tmp_path / "out").exists()


def test_encode(folder: Path) -> None:
    ids = load_tokenizer(folder).encode("曹操 <|endoftext|>")
    assert run("encode", folder, "曹操 <|endoftext|>").stdout == " ".join(map(str, ids)) + "\n"
    assert json.loads(run("encode", folder, "曹操 <|endoftext|>", "--json").stdout) == {"ids": ids}


def test_show_json(folder: Path) -> None:
    pieces = json.loads(run("show", folder, "曹操麤\n", "--json").stdout)["pieces"]
    assert "".join(piece["text"] for piece in pieces) == "曹操麤\n"
    (torn,) = [piece for piece in pieces if piece["text"] == "麤"]
    assert len(torn["ids"]) > 1  # its bytes are pieces, but it is shown whole
    assert [id for piece in pieces for id in piece["ids"]] == load_tokenizer(folder).encode(
        "曹操麤\n"
    )


def test_show_plain(folder: Path) -> None:
    (full_stop,) = load_tokenizer(folder).encode("。")
    torn = " ".join(map(str, load_tokenizer(folder).encode("麤")))
    shown = run("show", folder, "。" * 60 + "麤").stdout  # longer than a line
    assert shown == f"│。│{full_stop} " * 60 + f"│麤│{torn} \n"


def test_show_in_colour(folder: Path) -> None:
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""}
    shown = run("show", folder, "大喜。\x1b[2J", env=colours).stdout
    assert "│" not in shown
    assert "\x1b[2J" not in shown
    assert r"\x1b" in shown  # seen, not obeyed
    backgrounds = [part.split("m")[0] for part in shown.split("\x1b[30;")[1:]]
    assert backgrounds[:4] == ["106", "103", "106", "103"]
    assert "│" in run("show", folder, "大喜", env={**colours, "NO_COLOR": "1"}).stdout


def test_compare(folder: Path, tmp_path: Path) -> None:
    train_bpe(["the attention of the reader\n" * 20], 400).save(tmp_path / "en")
    (tmp_path / "zh.txt").write_text("曹操大喜。\n" * 9, encoding="utf-8")
    (tmp_path / "en.jsonl").write_text('{"text": "the reader"}\n"of"\n', encoding="utf-8")
    arguments = ("compare", tmp_path / "zh.txt", tmp_path / "en.jsonl")
    arguments += ("--tokenizer", folder, "--tokenizer", tmp_path / "en")
    rows = json.loads(run(*arguments, "--json").stdout)["compared"]
    pairs = [("zh.txt", folder), ("zh.txt", "en"), ("en.jsonl", folder), ("en.jsonl", "en")]
    assert [(r["text"], r["tokenizer"]) for r in rows] == [
        (str(tmp_path / text), str(tmp_path / name)) for text, name in pairs
    ]
    assert [row["bytes"] for row in rows] == [144, 144, 12, 12]
    ids = load_tokenizer(tmp_path / "en").encode
    assert rows[3]["tokens"] == len(ids("the reader")) + len(ids("of"))
    assert rows[3]["bytes_per_token"] == 12 / rows[3]["tokens"]
    assert rows[0]["bytes_per_token"] > rows[1]["bytes_per_token"]  # each is good at its own
    assert rows[3]["bytes_per_token"] > rows[2]["bytes_per_token"]
    shown = run(*arguments, env={"COLUMNS": "300"}).stdout
    for row in rows:
        assert f"{row['bytes_per_token']:.3f}" in shown


def test_the_tokenizer_of_a_model(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    cfg = g.ModelConfig(vocab_size=400, max_seq_len=8, n_layers=1, n_heads=1, d_model=32, d_ff=32)
    g.save(g.Transformer(cfg), tokenizer, tmp_path / "m.gguf", "gguf")
    g.save(g.Transformer(cfg), None, tmp_path / "none.gguf", "gguf")
    out = run("encode", tmp_path / "m.gguf", "却说曹操", "--json").stdout
    assert json.loads(out) == {"ids": tokenizer.encode("却说曹操")}
    with pytest.raises(TokenizerError, match=r"none\.gguf has no tokenizer"):
        run("encode", tmp_path / "none.gguf", "a")


@pytest.mark.parametrize("make", [lambda place: None, Path.mkdir])
def test_what_has_no_tokenizer_says_what_may_be_given(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "given")
    with pytest.raises(FileError) as refused:
        run("show", tmp_path / "given", "曹操")
    says = str(refused.value)
    assert says.startswith(f"{tmp_path / 'given'} ")
    assert "config.json" in says
    names = "tokenizer.json, tokenizer.model, vocab.json or encoder.json"
    assert says.endswith(f"; for a tokenizer alone, give its {names}, or the folder of that")
