"""Tokens beside the vocabulary, and their flags: ids equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gpt2llama.errors import FileError, TokenizerError
from gpt2llama.tokenizer import (
    BPETokenizer,
    facts_of,
    facts_of_gguf,
    load_tokenizer,
    read_facts,
    tokenizer_to_gguf,
)
from gpt2llama.tokenizer.chat import LLAMA_3
from gpt2llama.tokenizer.gguf import tokenizer_from_gguf

CHAT = [{"role": "user", "content": "Hello,  the reader\n "}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|> \\n' + m.content }}"
    "{{ eos_token + ' \\n' }}{% endfor %}<|assistant|>\n"
)
TEXTS = ["Hello, the reader and the model hello 却说曹操"] * 4


def spaces_first(texts: list[str], scheme: str | None) -> tokenizers.Tokenizer:
    """SentencePiece's style; scheme None: with the normalizer that older files have."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=names, show_progress=False)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme or "always", split=False)
    if scheme is None:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def byte_level(texts: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    backend.save(str(folder / "tokenizer.json"))
    text = json.dumps(named | config)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return folder


def equal(folder: Path) -> BPETokenizer:
    """Ids of a chat and of texts are transformers'; and once more after saving."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert isinstance(ours, BPETokenizer)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat(CHAT) == expected
    for text in ("Hello", " Hello", "the reader", "\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocab_size == len(theirs)
    ours.save(folder / "again")
    assert load_tokenizer(folder / "again").apply_chat(CHAT) == expected
    return ours


@pytest.mark.parametrize("scheme", ["first", "always", "never", None])
def test_only_a_texts_beginning_gets_the_dummy_space(scheme: str | None, tmp_path: Path) -> None:
    backend = spaces_first(TEXTS, scheme)
    backend.add_special_tokens(["<|user|>", "<|assistant|>"])
    equal(write(tmp_path, backend))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
@pytest.mark.parametrize("scheme", ["first", None])
def test_tokens_that_take_spaces_away(flag: str, scheme: str | None, tmp_path: Path) -> None:
    backend = spaces_first(TEXTS, scheme)
    names = ("<|user|>", "<|assistant|>", "</s>")
    taking = [AddedToken(name, special=True, normalized=False, **{flag: True}) for name in names]  # type: ignore[arg-type]
    backend.add_special_tokens(taking)
    equal(write(tmp_path, backend))


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    decoder = {
        "280": {"content": "<|user|>", "special": True},
        "281": {"content": "<think>", "special": False},
        "282": {"content": "<|assistant|>", "special": True, "rstrip": True},
    }
    ours = equal(write(tmp_path, byte_level(TEXTS), added_tokens_decoder=decoder))
    assert 280 not in ours.encode("<|user|>")
    assert 281 in ours.encode("a<think>")


def test_added_tokens_json_says_nothing_beside_a_tokenizer_json(tmp_path: Path) -> None:
    backend = byte_level(TEXTS)
    backend.add_tokens(["<tool_call>"])
    (tmp_path / "added_tokens.json").write_text('{"<tool_call>": 280, "x": 7}', encoding="utf-8")
    ours = equal(write(tmp_path, backend))
    assert 280 in ours.encode("a<tool_call>")


def test_tokens_beside_vocab_and_merges(tmp_path: Path) -> None:
    byte_level(TEXTS).model.save(str(tmp_path))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    files = {"added_tokens.json": {"<|im_end|>": 281, "<|im_start|>": 280}}
    files["tokenizer_config.json"] = {**named, "tokenizer_class": "GPT2Tokenizer"}  # type: ignore[dict-item]
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (282, 280, 281)
    ids = ours.apply_chat([{"role": "user", "content": "<|im_end|>"}])  # by the built-in ChatML
    assert (ids.count(280), ids.count(281)) == (2, 1)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"285": {"content": "<|user|>"}}, "has the id 285 in one file and would be 280"),
        ({"0": {"content": "</s>"}}, "'</s>' has the id 0 .* would be 1"),
        ({"x": {"content": "<|user|>"}}, "cannot have the id 'x'"),
        ({"9" * 5000: {"content": "<|user|>"}}, "cannot have the id '999"),
        ({"280": {"content": "\ud800"}}, "has half a surrogate pair"),
        ({"280": "<|user|>"}, "280 must have a content"),
        ([], "^$"),
        (["a"], "must be an object"),
    ],
)
def test_listed_tokens_that_cannot_be(decoder: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(TEXTS), added_tokens_decoder=decoder)
    if message == "^$":
        load_tokenizer(folder)
    else:
        with pytest.raises((FileError, TokenizerError), match=message):
            load_tokenizer(folder)


def test_a_bos_that_the_file_does_not_call_special(tmp_path: Path) -> None:
    backend = byte_level(["<s> </s> reader"] * 3)
    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(["<|user|>", "<|assistant|>"])
    ours = equal(write(tmp_path, backend))
    assert ours.bos_id == ours.apply_chat(CHAT)[0]
    assert ours.bos_id not in ours.encode("<s>")


def test_dropout_of_the_merges_is_off(tmp_path: Path) -> None:
    backend = byte_level(TEXTS)
    backend.model.dropout = 0.9  # type: ignore[attr-defined]  # a BPE
    ours = load_tokenizer(write(tmp_path, backend))
    assert len({tuple(ours.encode("the reader and the model")) for _ in range(20)}) == 1


def test_a_prefix_space_that_is_not_done(tmp_path: Path) -> None:
    byte_level(TEXTS).model.save(str(tmp_path))
    config = {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(TokenizerError, match="add_prefix_space is not done here"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace("a", "b" * 100_000),
        normalizers.Sequence([normalizers.Replace("a", "aa")] * 20),
        normalizers.Prepend("b" * 100_000),
        normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "a" * 60)] * 2)]),
    ],
)
def test_a_normalizer_that_makes_text_explode(normalizer: Any, tmp_path: Path) -> None:
    backend = byte_level(TEXTS)
    backend.normalizer = normalizer
    with pytest.raises(TokenizerError, match="makes text much longer"):
        load_tokenizer(write(tmp_path, backend))


def test_the_built_in_template_goes_out(tmp_path: Path) -> None:
    backend = byte_level(TEXTS)
    backend.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    ours = load_tokenizer(write(tmp_path, backend, chat_template=None))
    assert isinstance(ours, BPETokenizer)
    ours.save(tmp_path / "again")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs.chat_template == LLAMA_3
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat(CHAT) == expected
    assert tokenizer_to_gguf(ours, 400)["tokenizer.chat_template"] == LLAMA_3
    assert isinstance(theirs, PreTrainedTokenizerFast)


def test_ends_of_a_turn_that_no_name_tells(tmp_path: Path) -> None:
    ours = load_tokenizer(write(tmp_path, byte_level(TEXTS)))
    ours.stop_ids |= {7, 9}
    metadata = tokenizer_to_gguf(ours, 400)
    ends = [metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eot", "eom")]
    assert ends == [7, 9]
    assert tokenizer_from_gguf(metadata).stop_ids == ours.stop_ids
    metadata["tokenizer.ggml.eot_token_id"] = [7]
    assert tokenizer_from_gguf(metadata).stop_ids == ours.stop_ids - {7}
    metadata["tokenizer.ggml.pre"] = ["gpt-2"]
    with pytest.raises(TokenizerError, match=r"pre .* is not known here"):
        tokenizer_from_gguf(metadata)


def test_facts_are_those_of_the_built_tokenizer(tmp_path: Path) -> None:
    decoder = {"280": {"content": "<|user|>", "special": True}}
    backend = byte_level(TEXTS)
    piece = next(p for p in backend.get_vocab() if len(p) > 1 and not p.startswith("<"))
    folder = write(tmp_path, backend, added_tokens_decoder=decoder, bos_token=piece)
    ours = load_tokenizer(folder)
    assert read_facts(folder) == facts_of(ours)
    assert len(ours.special_ids) == 4  # <s>, </s>, the listed one and the named BOS
    metadata = tokenizer_to_gguf(ours, 400)
    assert facts_of_gguf(metadata) == facts_of(tokenizer_from_gguf(metadata))
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(400, 200_000)]
    metadata["tokenizer.ggml.token_type"] += [5] * 199_600
    assert facts_of_gguf(metadata) == facts_of(ours)  # and not in quadratic time
