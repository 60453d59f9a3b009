"""`gpt2llama generate` and `eval` on a tiny saved model: stdout, stderr, exit codes."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sharp import make

import gpt2llama as g
from gpt2llama.generate.chat import Chat
from gpt2llama.tokenizer import BPETokenizer, train_bpe
from gpt2llama.train.metrics import evaluate_text

TEXT = "却说曹操引军追赶玄德，玄德走樊城。Then the story goes on.\n" * 3
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return train_bpe([TEXT], vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer: BPETokenizer) -> g.Transformer:
    torch.manual_seed(0)
    cfg = g.ModelConfig(
        vocab_size=tokenizer.vocab_size + 4, max_seq_len=32, n_layers=1, n_heads=2, d_model=16,
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


def test_text_goes_to_stdout(
    run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer
) -> None:
    out, err = run("generate", folder, "却说", "-n", "12")
    assert out == g.generate(model, tokenizer, "却说", max_new_tokens=12) + "\n"
    assert err == ""


def test_json(run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer) -> None:
    how = ["-n", "9", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    how += ["--repetition-penalty", "1.2", "--seed", "7", "--stop", "。", "--stop", "!"]
    out, err = run("generate", folder, "却说", *how, "--json")
    answer = json.loads(out)
    assert list(answer) == ["text", "tokens", "finish_reason", "tokens_per_second"]
    assert answer["text"] == g.generate(
        model, tokenizer, "却说", max_new_tokens=9, temperature=1.5, top_k=50, top_p=0.9,
        min_p=0.01, repetition_penalty=1.2, seed=7, stop=["。", "!"],
    )  # fmt: skip
    assert (answer["tokens"], answer["finish_reason"]) == (9, "length")
    assert answer["tokens_per_second"] > 0
    assert err == ""


def test_samples(run: Any, folder: str) -> None:
    how = ["--num-samples", "3", "--temperature", "1", "--seed", "1", "-n", "6"]
    answer = json.loads(run("generate", folder, "却说", *how, "--json")[0])
    assert list(answer) == ["samples", "tokens_per_second"]
    assert len({sample["text"] for sample in answer["samples"]}) == 3
    out, _ = run("generate", folder, "却说", *how)
    texts = [f"--- {i}\n{sample['text']}\n" for i, sample in enumerate(answer["samples"], 1)]
    assert out == "".join(texts)


def test_the_end_of_the_context_is_said(run: Any, folder: str) -> None:
    """Before the first token, and where it came to that."""
    out, err = run("generate", folder, "却说", "-n", "1000", "--json")
    answer = json.loads(out)
    assert answer["finish_reason"] == "context"
    assert err == (
        f"room for {answer['tokens']} new tokens, not 1,000: the model's context has 32, the "
        "prompt's among them\nstopped at the model's context of 32 tokens\n"
    )
    assert run("generate", folder, "却说", "-n", answer["tokens"])[1].startswith("stopped") is False


def test_prompt_from_stdin(
    run: Any, folder: str, monkeypatch: pytest.MonkeyPatch, model: g.Transformer,
    tokenizer: BPETokenizer,
) -> None:  # fmt: skip
    for prompt in ("却说\n", "却说\r\n"):  # as it is, newline and all
        stdin = io.TextIOWrapper(io.BytesIO(prompt.encode()), encoding="ascii")
        monkeypatch.setattr(sys, "stdin", stdin)
        out, _ = run("generate", folder, "-", "-n", "5")
        assert out == g.generate(model, tokenizer, prompt, max_new_tokens=5) + "\n"


def sharp(tokenizer: BPETokenizer) -> g.Transformer:
    """One whose matrices can be quantised: 32 divides their inputs."""
    cfg = g.ModelConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=96, n_layers=1, n_heads=2, d_model=32, d_ff=32
    )
    return make(cfg, dtype=torch.float32)


@pytest.mark.parametrize("drafter", ["lookup", "itself"])
def test_guessing_ahead(
    run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer, drafter: str
) -> None:
    """The same text, and how the guesses went: a model's own are always right."""
    how = ["-n", "9", "--speculate", folder if drafter == "itself" else drafter]
    out, err = run("generate", folder, "却说曹操", *how)
    alone = g.generate(model, tokenizer, "却说曹操", max_new_tokens=9)
    assert out == alone + "\n"
    share, step = re.fullmatch(
        r"(\d+)% of \d+ guesses accepted, (\d\.\d\d) tokens a step\n", err
    ).groups()  # type: ignore[union-attr]  # it matches
    answer = json.loads(run("generate", folder, "却说曹操", *how, "--json")[0])
    assert (answer["text"], answer["tokens"]) == (alone, 9)
    assert share == f"{answer['acceptance_rate']:.0%}".rstrip("%")
    assert step == f"{answer['tokens_per_step']:.2f}"
    if drafter == "itself":
        assert answer["acceptance_rate"] == 1
        assert answer["tokens_per_step"] == 9 / 3  # one token, five, and the last three


def test_a_draft_of_another_tokenizer(run: Any, folder: str, tmp_path: Path) -> None:
    other = train_bpe([TEXT[::-1]], vocab_size=300)
    g.save(sharp(other), other, tmp_path / "other")
    _, err = run("generate", folder, "却说", "--speculate", tmp_path / "other", code=1)
    assert "another tokenizer" in err


def test_quantised_while_loading(run: Any, tokenizer: BPETokenizer, tmp_path: Path) -> None:
    path = tmp_path / "model"
    g.save(sharp(tokenizer), tokenizer, path)
    quantised, _ = g.load(path, quant="int4")
    how = ["--quant", "int4", "--kv-dtype", "int8"]
    out, _ = run("generate", path, "却说", "-n", "9", *how)
    assert out == g.generate(quantised, tokenizer, "却说", max_new_tokens=9, kv_dtype="int8") + "\n"
    out, _ = run("chat", path, "--prompt", "却说", "-n", "9", *how)
    chat = Chat(quantised, tokenizer, max_new_tokens=9, kv_dtype="int8")
    assert out == "".join(chat.say("却说")) + "\n"
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    score = evaluate_text(quantised, tokenizer, TEXT).bits_per_byte
    found, exact = (
        json.loads(run("eval", path, "--text", tmp_path / "text", *quant, "--json")[0])
        for quant in (["--quant", "int4"], [])
    )
    assert found["bits_per_byte"] == pytest.approx(score, rel=1e-5)
    assert exact["bits_per_byte"] != pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["", "-n", "3"], 1, "the prompt is empty"),
        (["却说" * 40], 1, "and the model's context 32; shorten it to 31"),
        (["却说", "--top-p", "0"], 1, "gpt2llama: --top-p must be above 0"),
        (["却说", "--min-p", "2"], 1, "gpt2llama: --min-p must be from 0 to 1"),
        (["却说", "--repetition-penalty", "0"], 1, "--repetition-penalty must be above 0"),
        (["却说", "--stop", ""], 1, "a stop string is empty"),
        (["却说", "--kv-dtype", "fp8"], 1, "--kv-dtype must be one of auto, fp32, bf16, int8"),
        (["却说", "--quant", "int3"], 1, "gpt2llama: --quant must be int8, int4 or keep"),
        (
            ["却说", "--quant", "keep"],
            1,
            "has no blocks to keep (Q8_0, Q4_0 or Q4_1); leave out --q",
        ),
        (["却说", "--speculate", "lookup", "--num-samples", "2"], 1, "one text; leave it or --num"),
        (["却说", "--draft-tokens", "0"], 2, "--draft-tokens"),
        (["却说", "-n", "0"], 2, "-n"),
        (["却说", "--temperature", "-1"], 2, "--temperature"),
        ([], 2, "Missing argument"),
    ],
)
def test_refusals(run: Any, folder: str, args: list[str], code: int, says: str) -> None:
    out, err = run("generate", folder, *args, code=code)
    assert out == ""
    assert says in err


def test_bench_names_its_options_too(run: Any, folder: str) -> None:
    for options, code, says in (
        (["--quant", "int8", "--dtype", "bf16"], 1, "computes in float32; leave out --dtype (here"),
        (["--context", "64"], 1, "in the model's context of 32; take a shorter one (--context)"),
        (["--kv-dtype", "fp8"], 2, "--kv-dtype"),
        (["--quant", "int3"], 2, "--quant"),
    ):
        assert says in run("bench", "decode", "--model", folder, *options, code=code)[1]


def test_a_model_without_a_tokenizer(run: Any, model: g.Transformer, tmp_path: Path) -> None:
    g.save(model, None, tmp_path / "bare")
    for command in (["generate", str(tmp_path / "bare"), "x"],):
        assert "has no tokenizer" in run(*command, code=1)[1]


def test_eval(
    run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    """Against sums over windows written out here; bytes are the file's, CR and BOM included."""
    content = "\ufeff" + TEXT.replace("\n", "\r\n")
    (tmp_path / "text").write_bytes(content.encode())
    ids, nats = tokenizer.encode(content), 0.0
    for at in range(0, len(ids), 32):
        window = [tokenizer.bos_id if at == 0 else ids[at - 1], *ids[at : at + 32]]
        logits = model(torch.tensor([window[:-1]]))[0].log_softmax(-1)
        nats -= logits.gather(1, torch.tensor(window[1:])[:, None]).sum().item()
    out, err = run("eval", folder, "--text", str(tmp_path / "text"), "--json")
    answer = json.loads(out)
    assert list(answer) == ["bits_per_byte", "perplexity", "tokens", "bytes"]
    size = (tmp_path / "text").stat().st_size
    assert (answer["tokens"], answer["bytes"]) == (len(ids), size)
    assert answer["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert answer["perplexity"] == pytest.approx(math.exp(nats / len(ids)), rel=1e-5)
    assert err == ""
    out, _ = run("eval", folder, "--text", str(tmp_path / "text"))
    assert f"{answer['bits_per_byte']:.4f} bits per byte" in out


def test_eval_by_position_and_with_another_scaling(
    run: Any, folder: str, model: g.Transformer, tokenizer: BPETokenizer, tmp_path: Path
) -> None:
    """Windows of twice the context, read with positions half as far apart."""
    (tmp_path / "text").write_text(TEXT * 9, encoding="utf-8")
    how = ["eval", folder, "--text", str(tmp_path / "text"), "--length", 64, "--by-position"]
    answer = json.loads(run(*how, "--rope-scaling", "linear", "--factor", 2, "--json")[0])
    linear = g.Transformer(model.config.replace(rope_scaling={"type": "linear", "factor": 2.0}))
    linear.load_state_dict(model.state_dict())
    stream = [tokenizer.bos_id, *tokenizer.encode(TEXT * 9)]
    each, nats = [], 0.0
    for at in range(0, len(stream) - 1, 64):
        window = torch.tensor([stream[at : at + 65]])
        with torch.no_grad():
            scores = linear.eval()(window[:, :-1]).log_softmax(-1)
        found = -scores.gather(2, window[:, 1:, None])[0, :, 0]
        nats += found.sum().item()
        each += [found] if len(found) == 64 else []
    assert answer["bits_per_byte"] * answer["bytes"] == pytest.approx(nats / math.log(2), rel=1e-5)
    want = torch.stack(each).mean(0).view(16, 4).mean(1).tolist()
    assert answer["by_position"] == pytest.approx(want, rel=1e-5)
    plain = run(*how)[0].splitlines()
    assert len(plain) == 17
    assert plain[1].startswith("positions      1 to      4: ")
    _, err = run(*how, "--rope-scaling", "linear", code=2)
    assert "belong together" in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "text.txt is empty"),
        ("却说".encode() + b"\xff\xfe", "text.txt is not UTF-8 at byte 6 (0xff)"),
        (None, "text.txt: No such file"),
    ],
)
def test_eval_of_what_is_no_text(
    run: Any, folder: str, tmp_path: Path, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    out, err = run("eval", folder, "--text", str(tmp_path / "text.txt"), code=1)
    assert out == ""
    assert says in err
