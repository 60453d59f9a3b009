"""A classifier: the Transformer with a head that scores labels, read at the last real token.

Its folder is a checkpoint of ours, whose head has a row a label, with classifier.json beside it.
For that file `load` refuses it: it is no language model, and nothing must take it for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..atomic import new_folder
from ..errors import FileError, InputError, TokenizerError, WeightsError
from ..tokenizer import load_tokenizer
from ..weights.build import assemble
from ..weights.checkpoint import open_model, write_model
from ..weights.files import read_json, write_json

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

ABOUT = "classifier.json"
POOLING = "last"  # the last real token's hidden state, which has seen all the others
_HEAD = "lm_head.weight"


def put_head(model: Transformer, labels: int) -> None:
    """In the place of the language model's head one of (labels, D), without bias, at zero."""
    model.config = model.config.replace(tie_embeddings=False, logit_softcap=None)
    model.softcap = None
    like = model.embed_tokens.weight
    model.lm_head = nn.Linear(
        model.config.d_model, labels, bias=False, device=like.device, dtype=like.dtype
    )
    nn.init.zeros_(model.lm_head.weight)


def label_logits(model: Transformer, ids: Tensor, real: Tensor) -> Tensor:
    """(B, K) from ids (B, T) and real, bool (B, T): padding on either side changes nothing."""
    if not real.any(1).all():
        raise InputError("a row holds padding alone: there is no token to classify it by")
    last = real.long().cumsum(1).argmax(1)  # the first place where all real tokens are counted
    hidden = model.hidden(ids, attention_mask=real)
    logits: Tensor = model.logits(hidden[torch.arange(len(ids), device=ids.device), last])
    return logits


@dataclass(frozen=True, eq=False)
class Classifier:
    """labels: of the head's rows. temperature: what logits are divided by before the softmax.
    seq_len: a longer text is cut to its first seq_len tokens, as in training."""

    model: Transformer
    tokenizer: Tokenizer
    labels: list[str]
    temperature: float
    seq_len: int

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], batch_size: int = 32) -> list[dict[str, float]]:
        """Of each text, label -> probability; InputError for an empty one."""
        found: list[dict[str, float]] = []
        for first in range(0, len(texts), batch_size):
            rows = [self.encode(text)[0] for text in texts[first : first + batch_size]]
            logits = label_logits(self.model, *padded(rows, self.model.embed_tokens.weight.device))
            shares = (logits.double() / self.temperature).softmax(1).tolist()
            found += [dict(zip(self.labels, row, strict=True)) for row in shares]
        return found

    def encode(self, text: str) -> tuple[list[int], bool]:
        """Its ids, and whether it was cut."""
        return text_ids(self.tokenizer, text, self.seq_len)

    def save(self, folder: str | Path) -> None:
        """A new folder, whole or not at all; FileError if it is in use or cannot be written."""
        with new_folder(Path(folder)) as place:
            write_model(place, self.model, self.tokenizer)
            about = {
                "labels": self.labels,
                "pooling": POOLING,
                "temperature": self.temperature,
                "seq_len": self.seq_len,
            }
            write_json(place / ABOUT, about)


def text_ids(tokenizer: Tokenizer, text: str, seq_len: int) -> tuple[list[int], bool]:
    """At most seq_len ids, a BOS before the text where the tokenizer wants one; whether more
    there were. InputError for a text without any."""
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("the text is empty: there is nothing to classify")
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    return ids[:seq_len], len(ids) > seq_len


def padded(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """ids and which of them are real, each (B, T), padded on the right."""
    width = max(map(len, rows))
    ids = [[*row, *[0] * (width - len(row))] for row in rows]
    real = [[place < len(row) for place in range(width)] for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(real, device=device)


def load_classifier(path: str | Path, device: torch.device | str = "cpu") -> Classifier:
    """From a run of `finetune classify` or its folder `model`, in eval mode and fp32.

    Raises FileError, WeightsError, ConfigError or TokenizerError for what is missing or does not
    fit together.
    """
    place = Path(path)
    if (place / "model" / ABOUT).is_file():
        place = place / "model"
    if not (place / ABOUT).is_file():
        raise FileError(
            f"{path} is no classifier: it has no {ABOUT}; give the folder of a finished "
            "gpt2llama finetune classify"
        )
    about = _read_about(place / ABOUT)
    opened, fingerprint = open_model(place)
    if about["seq_len"] > opened.config.max_seq_len:
        raise WeightsError(
            f"{place / ABOUT}: seq_len {about['seq_len']} is above the model's max_seq_len "
            f"{opened.config.max_seq_len}"
        )
    head = opened.headers.get(_HEAD)
    wanted = (len(about["labels"]), opened.config.d_model)
    if head is None or head.shape != wanted or opened.schemes:
        raise WeightsError(
            f"{opened.where} has no head {_HEAD} of shape {wanted}, which {ABOUT} and its config "
            "ask for"
        )
    body = replace(
        opened,
        config=opened.config.replace(tie_embeddings=True),  # so that no other head is asked for
        headers={name: info for name, info in opened.headers.items() if name != _HEAD},
    )
    model = assemble(body, torch.float32, device)
    put_head(model, wanted[0])
    model.lm_head.weight.data.copy_(opened.read(_HEAD))
    tokenizer = load_tokenizer(place)
    if tokenizer.fingerprint != fingerprint or tokenizer.vocab_size > model.config.vocab_size:
        raise TokenizerError(
            f"{place}: its tokenizer is not the one it was trained with; put that back"
        )
    return Classifier(
        model, tokenizer, about["labels"], float(about["temperature"]), about["seq_len"]
    )


def _read_about(path: Path) -> dict[str, Any]:
    about = read_json(path)
    labels, temperature, seq_len = (
        about.get(name) for name in ("labels", "temperature", "seq_len")
    )
    strings = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    for right, rule in (
        (
            isinstance(labels, list) and strings and 2 <= len(set(labels)) == len(labels),
            "labels must be at least two different strings",
        ),
        (about.get("pooling") == POOLING, f"pooling must be {POOLING!r}"),
        (type(seq_len) is int and seq_len > 0, "seq_len must be a whole number above 0"),
        (
            number and 0 < (temperature or 0) < 1000,
            "temperature must be a number above 0 and below 1000",
        ),
    ):
        if not right:
            raise WeightsError(f"{path}: {rule}")
    return about
