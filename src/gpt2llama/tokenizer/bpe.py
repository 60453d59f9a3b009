"""Byte-level BPE: every text is a string of bytes, so none is ever out of vocabulary."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from ..errors import FileError, InputError, TokenizerError

# No piece crosses a border of this pattern: a digit; an English contraction; letters (Chinese up to
# its punctuation, or a word with the space before it); marks; white space, whose last character is
# left to a word that follows. It is GPT-2's with every digit alone, which llama.cpp calls "smollm".
# On held-out Chinese at 4096 pieces, letting a mark join the letters after it saves 4% of the ids
# but costs a 4-gram model 2% in bits per byte; cutting Chinese every 4 characters costs both.
PATTERN = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END, *(f"<|reserved_{i}|>" for i in range(5)))
MAX_PIECE_BYTES = 15  # five Chinese characters, or a long English word
MAX_VOCAB_SIZE = 1 << 20
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ENDS_A_TURN = (IM_END, END_OF_TEXT, "<|eot_id|>", "<|eom_id|>")
_CHUNK = 1 << 20  # characters given to the trainer at once


class BPETokenizer:
    """A byte-level `tokenizers.Tokenizer`, with what tokenizer_config.json says of it.

    Of the config these are read: bos_token, eos_token, add_bos_token (without it, whether the
    backend's post-processor adds it), chat_template. The rest is only kept for `save`.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any]) -> None:
        backend.encode_special_tokens = True  # special strings in a text are text
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._config = backend, dict(config)
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        self.bos_id, self.eos_id = self._named("bos_token"), self._named("eos_token")
        added = backend.get_added_tokens_decoder()
        specials = {token.content: id for id, token in added.items() if token.special}
        ends = [specials.get(name) for name in _ENDS_A_TURN]
        self.stop_ids = frozenset(id for id in [self.eos_id, *ends] if id is not None)
        named = [id for id in (self.bos_id, self.eos_id) if id is not None]
        self.special_ids = frozenset([*specials.values(), *named])
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:
            adds_bos = backend.encode("").ids[:1] == [self.bos_id]
        self.adds_bos = bool(adds_bos) and self.bos_id is not None

    def _named(self, key: str) -> int | None:
        token = self._config.get(key)
        if token is None:
            return None
        name = token.get("content") if isinstance(token, dict) else token
        id = self._backend.token_to_id(name) if isinstance(name, str) else None
        if id is None:
            raise TokenizerError(f"the config's {key} {token!r} is not in the vocabulary")
        return id

    def encode(self, text: str) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise InputError(
                "the text must be a string of whole characters; this one is none, or has half a "
                "surrogate pair"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        try:
            return b"".join([self._bytes[id] for id in ids])
        except KeyError as error:
            raise TokenizerError(
                f"id {error} is not in the vocabulary of {self.vocab_size:,} pieces; are these "
                "ids another tokenizer's?"
            ) from None

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """The bytes of each id; a piece not spelled in the byte alphabet stands for itself."""
        alphabet = _alphabet()
        table = {
            id: bytes(alphabet[c] for c in piece)
            if alphabet.keys() >= set(piece)
            else piece.encode()
            for piece, id in self._backend.get_vocab().items()
        }
        added = self._backend.get_added_tokens_decoder()
        return table | {id: token.content.encode() for id, token in added.items()}

    @cached_property
    def fingerprint(self) -> str:
        state = json.loads(self._backend.to_str())
        parts = [state["model"]["vocab"], state["model"]["merges"], state["normalizer"]]
        parts += [state["pre_tokenizer"], state["added_tokens"]]
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """ChatML. Raises TokenizerError for a vocabulary made for another chat format."""
        start, end = (self._backend.token_to_id(name) for name in (IM_START, IM_END))
        if self._config.get("chat_template") != CHATML or start is None or end is None:
            raise TokenizerError(
                "only the ChatML of tokenizers trained here is known, and this one has another "
                "chat format or none; write the prompt as text"
            )
        if not messages:
            raise InputError("a chat needs at least one message")
        newline, ids = self.encode("\n"), list[int]()
        for i, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in ("system", "user", "assistant"):
                raise InputError(f"message {i} has role {role!r}; use system, user or assistant")
            if not isinstance(content, str):
                raise InputError(f"message {i} must have a string content (got {content!r})")
            ids += [start, *self.encode(f"{role}\n{content}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]

    def save(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json, as transformers reads them."""
        config = json.dumps(self._config, ensure_ascii=False, indent=2)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _write(Path(folder, "tokenizer_config.json"), config)
            _write(Path(folder, "tokenizer.json"), self._backend.to_str(pretty=True))
        except OSError as error:
            raise FileError(
                f"cannot write the tokenizer to {folder}: {error.strerror or error}; choose a "
                "folder with room"
            ) from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Byte-level BPE of `vocab_size` pieces, the 256 bytes and SPECIALS among them.

    Fewer, when the texts have no more pairs that occur twice. The same texts give the same
    tokenizer. `<|endoftext|>` both ends a document and begins one: bos_id and eos_id are the
    same, and generation starts from it (adds_bos). Needs memory for some 100 times the text: give
    it a sample of a large one. Raises TokenizerError.
    """
    least = 256 + len(SPECIALS)
    if not least <= vocab_size <= MAX_VOCAB_SIZE:
        raise TokenizerError(
            f"vocab_size must be from {least} (256 bytes, {len(SPECIALS)} special) to "
            f"{MAX_VOCAB_SIZE:,} (got {vocab_size})"
        )
    chunks = _chunks(texts)
    first = next(chunks, None)
    if first is None:
        raise TokenizerError(
            "there is no text to train the tokenizer on; give some that is not empty"
        )

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=sorted(_alphabet()),
        max_token_length=MAX_PIECE_BYTES + 1,  # the library's is exclusive
        show_progress=False,
    )
    try:
        backend.train_from_iterator(itertools.chain([first], chunks), trainer)
    except UnicodeEncodeError as error:
        raise TokenizerError(f"a text has half a surrogate pair ({error}); leave it out") from None
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT}:1 $B:1",
        special_tokens=[(END_OF_TEXT, backend.token_to_id(END_OF_TEXT))],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    return BPETokenizer(backend, config)


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """The texts, long ones in several chunks cut before a newline, so that memory is bounded."""
    for text in [texts] if isinstance(texts, str) else texts:
        start = 0
        while start < len(text):
            stop = start + _CHUNK
            if stop < len(text):
                newline = text.rfind("\n", start + 1, stop)
                stop = newline if newline > 0 else stop
            yield text[start:stop]
            start = stop


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as tokenizer.json spells pieces."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | stand_ins


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
