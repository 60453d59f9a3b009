"""BPE of either style, and how ours is trained.

Byte-level (GPT-2, Llama 3): words are cut by a pattern and spelled in an alphabet of 256 bytes.
SentencePiece (Llama 1 and 2, Mistral): a whole text is merged from its characters, each space
written ▁ and one put before the text; a character that is no piece becomes its bytes, as <0x0A>.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, processors, trainers
from tokenizers import Tokenizer as Backend

from ..atomic import write_text
from ..errors import InputError, TokenizerError
from .chat import ROLES, chat_ids, template_of
from .splits import PATTERN, pre_tokenizer

END_OF_TEXT, END = "<|endoftext|>", "<|end|>"
SPECIALS = (
    *(END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END),
    *(f"<|reserved_{i}|>" for i in range(3)),
)
MAX_PIECE_BYTES = 15  # five Chinese characters, or a long English word
MAX_VOCAB_SIZE = 1 << 20
ENDS_A_TURN = (END, "<|im_end|>", END_OF_TEXT, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_CHUNK = 1 << 20  # characters given to the trainer at once


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """The library raises bare Exceptions, and panics, which no Exception is, on odd files."""
    try:
        yield
    except (TypeError, TokenizerError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what} ({error})") from None


Parts = tuple[Backend, dict[str, Any]]  # what a file gives: the backend and its config


class BPETokenizer:
    """A `tokenizers.Tokenizer` of BPE, with what tokenizer_config.json says of it.

    Of the config these are read: bos_token, eos_token, add_bos_token (without it, whether the
    backend's post-processor adds it), chat_template. The rest is only kept for `save`.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any]) -> None:
        _mark_special(backend, [config.get("bos_token"), config.get("eos_token")])
        backend = _text_stays_text(backend)
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._config = backend, dict(config)
        self.byte_level, self.dummy_space = _style(backend)
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise TokenizerError(f"an id is above {MAX_VOCAB_SIZE:,}: no vocabulary is so large")
        self.bos_id, self.eos_id = self._named("bos_token"), self._named("eos_token")
        added = backend.get_added_tokens_decoder()
        specials = {token.content: id for id, token in added.items() if token.special}
        self._specials = specials
        ends = [specials.get(name) for name in ENDS_A_TURN]
        self.stop_ids = frozenset(id for id in [self.eos_id, *ends] if id is not None)
        named = [id for id in (self.bos_id, self.eos_id) if id is not None]
        self.special_ids = frozenset([*specials.values(), *named])
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:
            with library_errors("its post-processor cannot be used"):
                adds_bos = backend.encode("").ids[:1] == [self.bos_id]
        self.adds_bos = bool(adds_bos) and self.bos_id is not None

    def _named(self, key: str) -> int | None:
        token = self._config.get(key)
        if token is None:
            return None
        name = name_of(token)
        id = self._backend.token_to_id(name) if isinstance(name, str) else None
        if id is None:
            raise TokenizerError(f"the config's {key} {token!r} is not in the vocabulary")
        return id

    def encode(self, text: str) -> list[int]:
        try:
            with library_errors("its vocabulary cannot spell this text"):
                return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise InputError(
                "the text must be a string of whole characters; this one is none, or has half a "
                "surrogate pair"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        raw = self.decode_bytes(ids)
        if self.dummy_space:
            first = [*itertools.takewhile(self.special_ids.__contains__, ids)]
            start = len(self.decode_bytes(first))
            raw = raw[:start] + raw[start:].removeprefix(b" ")
        return raw.decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        try:
            return b"".join([self._spelled.get(id) or self._spell(id) for id in ids])
        except KeyError as error:
            raise TokenizerError(
                f"id {error} is not in the vocabulary of {self.vocab_size:,} pieces; are these "
                "ids another tokenizer's?"
            ) from None

    @cached_property
    def _spelled(self) -> dict[int, bytes]:
        """The bytes of the ids that were asked for, and of all added tokens."""
        added = self._backend.get_added_tokens_decoder()
        return {id: token.content.encode() for id, token in added.items()}

    def _spell(self, id: int) -> bytes:
        piece = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if piece is None:
            raise KeyError(id)
        spell = _byte_level_bytes if self.byte_level else _sentencepiece_bytes
        return self._spelled.setdefault(id, spell(piece))

    @property
    def state(self) -> dict[str, Any]:
        """What `save` writes as tokenizer.json."""
        state: dict[str, Any] = json.loads(self._backend.to_str())
        return state

    @property
    def config(self) -> dict[str, Any]:
        """What `save` writes as tokenizer_config.json."""
        return self._config

    @cached_property
    def fingerprint(self) -> str:
        state = self.state
        model, added = state["model"], state["added_tokens"]
        vocab = model["vocab"] | {token["content"]: token["id"] for token in added}
        parts = [vocab, model["merges"], state["normalizer"], state["pre_tokenizer"], added]
        parts += [key for key in ("ignore_merges", "byte_fallback") if model[key]]
        canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The file's own, or the built-in one whose special tokens the vocabulary has."""
        return template_of(self._config, self._specials)

    def apply_chat(
        self, messages: Sequence[dict[str, str]], generation_prompt: bool = True
    ) -> list[int]:
        """By `chat_template`, which says itself where a BOS stands, if anywhere; raises
        TokenizerError where there is none."""
        template = self.chat_template
        if template is None:
            raise TokenizerError(
                "the tokenizer has no chat template and no special tokens of a known one; write "
                "the prompt as text"
            )
        names = {id: name for name, id in self._specials.items()}
        bos, eos = (None if id is None else names.get(id) for id in (self.bos_id, self.eos_id))
        added = self._backend.get_added_tokens_decoder().values()
        return chat_ids(
            template,
            messages,
            self.encode,
            self._specials,
            bos=bos,
            eos=eos,
            encode_later=self._later.encode if self._later else None,
            lstrip={token.content for token in added if token.lstrip},
            rstrip={token.content for token in added if token.rstrip},
            generation_prompt=generation_prompt,
        )

    @cached_property
    def _later(self) -> BPETokenizer | None:
        """For text after a special token, where only what comes first gets the dummy space."""
        state = self.state
        splits = state["pre_tokenizer"] or {}
        steps = splits.get("pretokenizers", [splits])
        firsts = [step for step in steps if step.get("prepend_scheme") == "first"]
        for step in firsts:
            step["prepend_scheme"] = "never"
        return BPETokenizer(Backend.from_str(json.dumps(state)), {}) if firsts else None

    def save(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json, as transformers reads them."""
        values = self._config
        if values.get("chat_template") is None and self.chat_template:  # the built-in one
            values = {**values, "chat_template": self.chat_template}
        config = json.dumps(values, ensure_ascii=False, indent=2)
        write_text(Path(folder, "tokenizer_config.json"), config, overwrite=True)
        write_text(Path(folder, "tokenizer.json"), self._backend.to_str(pretty=True), True)


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
    backend.pre_tokenizer = pre_tokenizer((PATTERN,))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=sorted(byte_alphabet()),
        max_token_length=MAX_PIECE_BYTES + 1,  # the library's is exclusive
        show_progress=False,
    )
    try:
        backend.train_from_iterator(itertools.chain([first], chunks), trainer)
    except UnicodeEncodeError as error:
        raise TokenizerError(f"a text has half a surrogate pair ({error}); leave it out") from None
    config = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "chat_template": ROLES}
    return assembled(backend, config | {"add_bos_token": True})


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


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    patterns: tuple[str, ...],
    takes_whole_words: bool = False,
) -> Backend:
    """A backend of GPT-2's style; `vocab` and `merges` are spelled in `byte_alphabet`."""
    for left, right in merges:
        if not (left in vocab and right in vocab and left + right in vocab):
            raise TokenizerError(f"its merge of {left!r} and {right!r} is not in its vocabulary")
    model = models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=takes_whole_words)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer(patterns)
    backend.decoder = decoders.ByteLevel()
    return backend


def add_specials(backend: Backend, names: Iterable[str]) -> None:
    """A name that is no piece of the vocabulary gets the next id."""
    names = [*names]
    for name in names:
        if len(name) == 1 and backend.token_to_id(name) is not None:
            raise TokenizerError(f"its special piece {name!r} is one that text is spelled with")
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])


def assembled(backend: Backend, config: Mapping[str, Any]) -> BPETokenizer:
    """A tokenizer that was not a tokenizer.json, made so that transformers reads it alike."""
    saved_as = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    tokenizer = BPETokenizer(backend, {**config, **saved_as})
    if tokenizer.adds_bos and (id := tokenizer.bos_id) is not None:
        bos = tokenizer._backend.id_to_token(id)
        tokenizer._backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, id)]
        )
    return tokenizer


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as files spell pieces."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | stand_ins


def name_of(token: Any) -> Any:
    """A token is named by a string or, in tokenizer_config.json, also by an object."""
    return token.get("content") if isinstance(token, dict) else token


def _mark_special(backend: Backend, tokens: Iterable[Any]) -> None:
    """As transformers does with the tokens that the config names, if the backend has them."""
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    for name in map(name_of, tokens):
        there = isinstance(name, str) and backend.token_to_id(name) is not None
        if there and len(name) > 1 and name not in special:
            add_specials(backend, [name])


def _text_stays_text(backend: Backend) -> Backend:
    """No special string in a text is taken for its id, nor is merged into it."""
    backend.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    specials = {token.content: id for id, token in added.items() if token.special}
    with library_errors("its special strings cannot be read"):
        merged = {name: [token.id for token in backend.model.tokenize(name)] for name in specials}
    wrong = {name for name, id in specials.items() if merged[name] == [id]}
    if not wrong:
        return backend
    state = json.loads(backend.to_str())
    merges = state["model"].get("merges", [])
    state["model"]["merges"] = [pair for pair in merges if "".join(pair) not in wrong]
    backend = Backend.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    return backend


def _style(backend: Backend) -> tuple[bool, bool]:
    """(is it byte-level, does a text's first piece carry a space that is not in it)."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    model = backend.model
    plain = isinstance(model, models.BPE) and not model.continuing_subword_prefix
    if plain and not model.end_of_word_suffix:
        if "ByteLevel" in steps:
            return True, False
        if "Metaspace" in steps:
            return False, steps["Metaspace"]["prepend_scheme"] != "never"
        if "Replace" in steps and steps["Replace"]["pattern"] == {"String": "▁"}:
            return False, "Strip" in steps
    raise TokenizerError("it is not a byte-level BPE vocabulary, nor one of SentencePiece's style")


def _byte_level_bytes(piece: str) -> bytes:
    """A piece that is not spelled in the byte alphabet stands for itself."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[c] for c in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
