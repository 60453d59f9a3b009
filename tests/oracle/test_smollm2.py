"""A real model, SmolLM2-135M-Instruct, against transformers and llama.cpp on the same weights.

Skipped where the asset is not cached and cannot be fetched: gpt2llama fetch smollm2-135m
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpt2llama as g
from gpt2llama.assets import fetch
from gpt2llama.errors import AssetError

pytestmark = pytest.mark.network

TEXT = (Path(g.__file__).parents[2] / "README.md").read_text(encoding="utf-8")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def original() -> Path:
    try:
        return fetch("smollm2-135m", timeout=120)
    except AssetError as error:
        pytest.skip(f"{error}; gpt2llama fetch smollm2-135m")


@pytest.fixture(scope="module")
def real(original: Path) -> tuple[g.Transformer, Any]:
    model, tokenizer = g.load(original)
    return model.requires_grad_(False), tokenizer


@pytest.fixture(scope="module")
def exported(
    real: tuple[g.Transformer, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """As an HF folder and as GGUF in F32 and Q8_0."""
    folder = tmp_path_factory.mktemp("smollm2")
    g.save(*real, folder / "hf", format="hf")
    g.save(*real, folder / "f32.gguf", format="gguf", dtype="F32")
    g.save(*real, folder / "q8.gguf", format="gguf", dtype="Q8_0")
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


@pytest.fixture(scope="module")
def ids(real: tuple[g.Transformer, Any]) -> list[int]:
    return real[1].encode(TEXT)[:512]


def test_config_is_the_preset(real: tuple[g.Transformer, Any]) -> None:
    assert real[0].config == g.preset("smollm2-135m")


def test_it_says_paris(real: tuple[g.Transformer, Any]) -> None:
    model, tokenizer = real
    prompt = tokenizer.apply_chat(QUESTION)
    (answer,) = g.generate_ids(
        model, [prompt], max_new_tokens=20, temperature=0.0, stop_ids=tokenizer.stop_ids
    )
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_transformers_gives_the_same_logits_and_text(
    real: tuple[g.Transformer, Any], exported: Path, ids: list[int]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = real
    theirs = AutoModelForCausalLM.from_pretrained(exported / "hf").eval()
    batch = torch.tensor([ids])
    with torch.no_grad():
        want, got = theirs(batch).logits, model(batch)
    assert len(ids) == 512
    # 30 layers of sharp real weights in another order of sums
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    assert (got.argmax(-1) == want.argmax(-1)).all()
    their_tokenizer = AutoTokenizer.from_pretrained(exported / "hf")
    assert their_tokenizer(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert (
        their_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    ) == tokenizer.apply_chat(QUESTION)
    prompt = ids[:24]
    out = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    (new,) = g.generate_ids(model, [prompt], max_new_tokens=64, temperature=0.0, stop_ids=())
    assert out[0, len(prompt) :].tolist() == new
    question = torch.tensor([tokenizer.apply_chat(QUESTION)])  # and ends where the answer does
    mask = torch.ones_like(question)
    out = theirs.generate(
        question, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    answer = out[0, question.shape[1] :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def llama_cpp_logits(path: Path, ids: list[int]) -> Tensor:
    llama_cpp = pytest.importorskip("llama_cpp", reason="compiled from source by: make oracles")
    llm = llama_cpp.Llama(str(path), n_ctx=1024, logits_all=True, verbose=False, n_threads=2)
    llm.eval(ids)
    logits = torch.tensor(llm.scores[: len(ids)].copy())
    llm.close()
    return logits


def test_llama_cpp_on_our_export(
    real: tuple[g.Transformer, Any], exported: Path, ids: list[int]
) -> None:
    want = llama_cpp_logits(exported / "f32.gguf", ids)
    got = real[0](torch.tensor([ids]))[0]
    assert (got.argmax(-1) == want.argmax(-1)).double().mean() >= 0.99


def test_llama_cpp_on_the_original(
    real: tuple[g.Transformer, Any], original: Path, ids: list[int]
) -> None:
    """It rounds activations to 8 bits where the weights are quantised, so by divergence."""
    want = llama_cpp_logits(original, ids).log_softmax(-1)
    got = real[0](torch.tensor([ids]))[0].log_softmax(-1)
    assert (want.exp() * (want - got)).sum(-1).mean() <= 0.01


def test_llama_cpp_on_q8(real: tuple[g.Transformer, Any], exported: Path, ids: list[int]) -> None:
    """Its 8-bit activations decide close races otherwise ("The" 0.15, "L" 0.14 after QUESTION,
    on the original file too), so by divergence here, and by the answer from F32."""
    want = llama_cpp_logits(exported / "q8.gguf", ids).log_softmax(-1)
    got = real[0](torch.tensor([ids]))[0].log_softmax(-1)
    assert (want.exp() * (want - got)).sum(-1).mean() <= 0.01


def test_llama_cpp_answers_the_same(exported: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="compiled from source by: make oracles")
    llm = llama_cpp.Llama(str(exported / "f32.gguf"), n_ctx=1024, verbose=False, n_threads=2)
    answer = llm.create_chat_completion(QUESTION, max_tokens=20, temperature=0.0)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
