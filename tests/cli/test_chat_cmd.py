"""`gpt2llama chat` on a tiny saved model: one answer, and conversations through a pipe."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.generate.chat import Chat
from gpt2llama.tokenizer import BPETokenizer, train_bpe

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from tiny_run import arguments, make_data

TEXT = "却说曹操引军追赶玄德，玄德走樊城。Then the story goes on.\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe([TEXT], vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer: BPETokenizer) -> g.Transformer:
    torch.manual_seed(0)
    cfg = g.ModelConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=96, n_layers=1, n_heads=2, d_model=16,
        d_ff=16, tie_embeddings=False,
    )  # fmt: skip
    model = g.Transformer(cfg).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    torch.nn.init.normal_(model.embed_tokens.weight)
    return model


@pytest.fixture(scope="module")
def folder(
    model: g.Transformer, tokenizer: BPETokenizer, tmp_path_factory: pytest.TempPathFactory
) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    g.save(model, tokenizer, path)
    return str(path)


def answers(model: g.Transformer, tokenizer: BPETokenizer, *texts: str, **how: Any) -> str:
    chat = Chat(model, tokenizer, max_new_tokens=8, **how)
    return "".join("".join(chat.say(text)) + "\n" for text in texts)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pipe(content: bytes) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(content), encoding="ascii")
        monkeypatch.setattr(sys, "stdin", stdin)

    return pipe


def test_one_answer(
    run: Any, pipe: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer
) -> None:
    expected = answers(model, tokenizer, "却说")
    out, err = run("chat", folder, "--prompt", "却说", "-n", 8)
    assert out == expected
    assert "8 tokens, " in err
    assert "Cut off at 8 tokens" in err
    pipe("却说\n".encode())
    out, _ = run("chat", folder, "--prompt", "-", "-n", 8)
    assert out == answers(model, tokenizer, "却说\n")


def test_json(run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer) -> None:
    how = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    how |= {"repetition_penalty": 1.2, "system": "曹操"}
    options = [part for key, value in how.items() for part in (f"--{key}".replace("_", "-"), value)]
    out, err = run("chat", folder, "--prompt", "却说", "-n", 8, *options, "--json")
    answer = json.loads(out)
    assert list(answer) == [
        "text", "prompt_tokens", "new_tokens", "finish_reason", "tokens_per_second",
    ]  # fmt: skip
    assert answer["text"] + "\n" == answers(model, tokenizer, "却说", **how)
    messages = [{"role": "system", "content": "曹操"}, {"role": "user", "content": "却说"}]
    assert answer["prompt_tokens"] == len(tokenizer.apply_chat(messages))
    assert (answer["new_tokens"], answer["finish_reason"]) == (8, "length")
    assert answer["tokens_per_second"] > 0
    assert err == ""


def test_a_pipe(
    run: Any, pipe: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    """A line is a message: no prompt, no colour, only answers on stdout."""
    pipe(f"却说\r\n\n 曹操 \n/save {tmp_path}/chat.json\n/exit\n玄德\n".encode())
    out, err = run("chat", folder, "-n", 8)
    assert out == answers(model, tokenizer, "却说", " 曹操 ")
    assert err.count("tokens/s") == 2
    assert "\x1b" not in out + err
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert saved[2] == {"role": "user", "content": " 曹操 "}
    assert saved[1]["content"] + "\n" + saved[3]["content"] + "\n" == out
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_commands(
    run: Any, pipe: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer
) -> None:
    pipe("却说\n/reset\n却说\n/system 曹操\n/reset\n却说\n/system\n/help\n/what\n".encode())
    out, err = run("chat", folder, "-n", 8)
    plain = answers(model, tokenizer, "却说")
    assert out == plain * 2 + answers(model, tokenizer, "却说", system="曹操")
    for said in ("Forgotten", "system message is set", "no system message", "/save FILE"):
        assert said in err
    assert "There is no /what; /help lists the commands" in err


def test_one_token(run: Any, folder: str) -> None:
    _, err = run("chat", folder, "--prompt", "却说", "-n", 1)
    assert err.startswith("1 token, ")
    assert err.endswith("Cut off at 1 token; -n sets how many.\n")


def test_a_full_context_is_said(run: Any, pipe: Any, folder: str) -> None:
    pipe("却说曹操引军追赶玄德\n".encode() * 6)
    _, err = run("chat", folder, "-n", 20)
    assert "The context is full: the oldest " in err


def test_another_template(run: Any, folder: str, tmp_path: Path, tokenizer: BPETokenizer) -> None:
    (tmp_path / "bare.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    how = ["--prompt", "却说 a b", "--json", "-n", 2, "--template"]
    counts = [
        json.loads(run("chat", folder, *how, name)[0])["prompt_tokens"]
        for name in (tmp_path / "bare.jinja", "chatml", "llama-2")
    ]
    chatml = tokenizer.encode(  # of which our vocabulary has no token
        "<|im_start|>user\n却说 a b<|im_end|>\n<|im_start|>assistant\n"
    )
    inst = [tokenizer.bos_id, *tokenizer.encode("[INST] 却说 a b [/INST]")]
    assert counts[1:] == [len(chatml), len(inst)]
    assert counts[0] - len(tokenizer.encode("却说 a b")) in (0, 1)  # with a BOS or without


def test_what_only_continues_text_is_said(
    run: Any, tmp_path: Path, model: Any, tokenizer: BPETokenizer
) -> None:
    """A line for what was never taught to answer, none for what has a chat template."""

    def note(path: Path, *more: str) -> str:
        lines = run("chat", path, "--prompt", "x", "-n", 2, "--json", *more)[1].splitlines()
        assert len(lines) <= 1
        return "".join(lines)

    data, out = make_data(tmp_path), tmp_path / "run"
    run(*arguments(data, out, max_seq_len=64, seq_len=16, steps=2))
    for path in (out, out / "checkpoints" / "step-000002"):
        assert "was trained on text alone, which it continues" in note(path)
    assert f"gpt2llama finetune instruct {out} --data" in note(out)
    assert note(out, "--template", "chatml") == ""
    shutil.copytree(out / "checkpoints" / "step-000002", out / "checkpoints" / "tuned")
    (out / "latest").write_text("tuned\n", encoding="utf-8")  # as the demo ends
    assert note(out) == ""
    (tmp_path / "talks.jsonl").write_text(
        json.dumps({"instruction": "a", "output": "b"}) + "\n", encoding="utf-8"
    )
    how = ["--set=device=cpu", "--set=steps=1", "--out", tmp_path / "assistant"]
    run("finetune", "instruct", out, "--data", tmp_path / "talks.jsonl", *how)
    assert note(tmp_path / "assistant") == ""
    for begin, says in (
        (out / "checkpoints" / "step-000002", "was trained on text alone"),
        (tmp_path / "first", "was trained on text alone"),  # itself begun with another's weights
        (out, ""),  # its latest is the demo's tuned one by now
        (tmp_path / "assistant", ""),
    ):
        more = tmp_path / ("first" if begin.name == "step-000002" else f"from-{begin.name}")
        run("train", "--from", begin, "--data", data, "--out", more, "--set=steps=1",
            "--set=seq_len=16", "--set=device=cpu", "--set=compile=off")  # fmt: skip
        said = note(more)
        assert says in said
        assert bool(says) == bool(said)
    tune = (out / "config.toml").read_text(encoding="utf-8").split("\n", 1)[1]
    begin = f'data = "assistant"\nbegin = "{tmp_path / "first"}"\n'  # as the demo writes it
    (tmp_path / "first" / "config.toml").write_text(begin + tune, encoding="utf-8")
    assert note(tmp_path / "first") == ""
    g.save(model, tokenizer, tmp_path / "hf", format="hf")
    assert note(tmp_path / "hf") == ""
    config = tmp_path / "hf/tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    del values["chat_template"]
    config.write_text(json.dumps(values), encoding="utf-8")
    _, err = run("chat", tmp_path / "hf", "--prompt", "x", code=1)
    assert err.startswith("gpt2llama: the tokenizer has no chat template")  # nor could it be taught
    ids = tmp_path / "hf/tokenizer.json"
    chatml = ids.read_text(encoding="utf-8").replace("<|user|>", "<|im_start|>")
    ids.write_text(chatml.replace("<|end|>", "<|im_end|>"), encoding="utf-8")
    assert "has no chat template of its own and may only continue text" in note(tmp_path / "hf")


def test_a_template_that_makes_nothing(run: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text("", encoding="utf-8")
    how = ["--prompt", "a", "--template", tmp_path / "empty.jinja"]
    assert "the chat template makes nothing" in run("chat", folder, *how, code=1)[1]


class Interrupts:
    """A stdin whose user presses Ctrl-C while the line with the given number is awaited."""

    def __init__(self, *lines: str | None) -> None:
        self.lines = iter(lines)
        self.buffer = self

    def isatty(self) -> bool:
        return False

    def readline(self) -> bytes:
        line = next(self.lines, "")
        if line is None:
            signal.raise_signal(signal.SIGINT)
        return str(line).encode()


def test_two_interrupts_leave(
    run: Any, monkeypatch: pytest.MonkeyPatch, folder: str, model: Any, tokenizer: BPETokenizer
) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupts(None, "却说\n", None, None, "曹操\n"))
    out, err = run("chat", folder, "-n", 8)
    assert out == "\n" + answers(model, tokenizer, "却说") + "\n\n"
    assert err.count("Stopped; Ctrl-C again leaves.") == 2


def test_an_interrupt_stops_the_answer(
    run: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    say, said = Chat.say, []

    def interrupted(self: Chat, text: str) -> Any:
        for piece in say(self, text):
            yield piece
            said.append(piece)
            if len(said) == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Chat, "say", interrupted)
    pipe(f"却说\n/save {tmp_path}/chat.json\n".encode())
    out, err = run("chat", folder, "-n", 20)
    assert out == "".join(said[:3]) + "\n"
    assert "Stopped" in err
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert saved[1] == {"role": "assistant", "content": "".join(said[:3])}


def test_save_overwrites_nothing(run: Any, pipe: Any, folder: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept", encoding="utf-8")
    for name, says in (
        ("mine", "exists already; name another"),
        ("mine/x", "cannot write"),
        ("", "needs the"),
    ):
        pipe(f"/save {tmp_path / name if name else ''}\n".encode())
        _, err = run("chat", folder, code=1)
        assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "kept"


def test_refusals(
    run: Any, pipe: Any, folder: str, tmp_path: Path, model: Any, tokenizer: BPETokenizer
) -> None:
    for args, code, says in (
        (["--prompt", ""], 1, "the message is empty"),
        (["--prompt", "却说" * 90], 1, "this message alone makes"),
        (["--prompt", "x", "--top-p", "0"], 1, "gpt2llama: --top-p must be above 0"),
        (["--prompt", "x", "--template", "none.jinja"], 1, "none.jinja"),
        (["--json"], 2, "needs --prompt"),
        (["-n", "0"], 2, "-n"),
    ):
        out, err = run("chat", folder, *args, code=code)
        assert out == ""
        assert says in err
    pipe(b"\xff\xfe\n")
    assert "not UTF-8 at byte 0" in run("chat", folder, code=1)[1]
    g.save(model, None, tmp_path / "bare")
    assert "has no tokenizer" in run("chat", tmp_path / "bare", code=1)[1]
    g.save(model, tokenizer, tmp_path / "silent")
    config = tmp_path / "silent/tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": "{{ raise_exception('No chat.') }}"}), encoding="utf-8"
    )
    assert "No chat." in run("chat", tmp_path / "silent", "--prompt", "x", code=1)[1]
