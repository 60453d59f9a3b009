"""`gpt2llama chat` on a tiny saved model: piped, once, as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.tokenizer import train_bpe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    tokenizer = train_bpe(["却说曹操引军至赤壁。the reader and the model\n" * 3], 300)
    cfg = g.ModelConfig(vocab_size=300, max_seq_len=256, n_layers=1, n_heads=2, d_model=16, d_ff=16)
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = g.Transformer(cfg)
    torch.nn.init.normal_(model.embed_tokens.weight)
    g.save(model, tokenizer, path)
    return str(path)


def test_once(run: Any, folder: str) -> None:
    out, _ = run("chat", folder, "--prompt", "你好", "--temperature", "0", "-n", "9", "--json")
    got = json.loads(out)
    model, tokenizer = g.load(folder)
    prompt = tokenizer.apply_chat([{"role": "user", "content": "你好"}])
    (ids,) = g.generate_ids(
        model, [prompt], max_new_tokens=9, temperature=0.0, stop_ids=tokenizer.stop_ids
    )
    assert got["text"] == tokenizer.decode(ids)
    assert (got["prompt_tokens"], got["new_tokens"]) == (len(prompt), len(ids))


def test_piped(run: Any, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = f"one\n/system be brief\ntwo\nthree\n/save {saved}\n/save {saved}\n/what\n/exit\nfour\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    out, err = run("chat", folder, "--temperature", "0", "-n", "5", "--json")
    assert len(out.splitlines()) == 3  # no answer after /exit, none to a command
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [m["content"] for m in messages][:2] == ["be brief", "two"]
    assert len(messages) == 5
    assert f"{saved} exists" in " ".join(err.split())
    assert "/reset" in err


def test_without_a_tokenizer(run: Any, tmp_path: Path) -> None:
    cfg = g.ModelConfig(vocab_size=9, max_seq_len=8, n_layers=1, n_heads=1, d_model=4, d_ff=4)
    g.save(g.Transformer(cfg), None, tmp_path / "m")
    _, err = run("chat", tmp_path / "m", "--prompt", "x", code=1)
    assert "has no tokenizer" in err
