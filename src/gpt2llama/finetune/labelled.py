"""Labelled texts: read, without copies, and split so that the held-out ones are news."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from ..assets import fetch
from ..errors import DataError, counted
from ..jsonl import read_jsonl, read_text_lines

SMS_SPAM = "sms-spam"
TEXT_NAMES = ("text", "sms", "message", "sentence", "content", "review", "comment", "body", "文本")
LABEL_NAMES = ("label", "class", "category", "target", "sentiment", "intent", "标签", "类别")
MAX_LABELS = 1000  # more are a sign that the columns are swapped


class Labelled(NamedTuple):
    text: str
    label: str


@dataclass(frozen=True)
class Split:
    """labels: all there are, sorted; their places are the classes' numbers.

    held_out: equally many of each label, to be scored once, at the end. validation: drawn like
    train, for what is chosen by looking (the best step, the temperature). counts: of the texts
    `read`, the `duplicates` and the `contradicting` ones (one text, several labels), and the
    `near_copies` of a held-out or validation text, none of which is in any part.
    """

    labels: list[str]
    train: list[Labelled]
    validation: list[Labelled]
    held_out: list[Labelled]
    counts: dict[str, int]


def read_labelled(source: str | Path) -> list[Labelled]:
    """The texts of the asset sms-spam, of a .csv file or of a .jsonl file, in their order.

    CSV: columns named text and label, or by one of the other usual names; or just two columns,
    first the text, without names. A first row of other names is told from a text by its label,
    which no text has, or where one has it, by its text, a word or two of at most half the usual
    length. JSONL: objects with text and label. A label is a string or a whole number. Raises
    AssetError, FileError, and DataError, naming the line, for what is malformed or empty.
    """
    path = Path(source)
    if str(source) == SMS_SPAM:
        return _sms_spam(fetch(SMS_SPAM))
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{source} must be a .csv or .jsonl file, or {SMS_SPAM}")
    found = []
    for place, text, label in read(path):
        if isinstance(label, int) and not isinstance(label, bool):
            label = str(label)
        for name, value in (("text", text), ("label", label)):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{place} has no {name}, a string with something in it")
        found.append(Labelled(str(text), str(label).strip()))
    if not found:
        raise DataError(f"{source} has no text in it; fill it")
    return found


def _sms_spam(path: Path) -> list[Labelled]:
    """Repaired: where a quote opened by chance, some messages hold those that follow them."""
    rows = csv.reader(line for _, line in read_text_lines(path))
    found = []
    for _, spam, text in list(rows)[1:]:
        first, *rest = re.split(r"\n(ham|spam)\t", text)
        found.append(Labelled(first, "spam" if spam == "1" else "ham"))
        found += [Labelled(text, label) for label, text in zip(rest[::2], rest[1::2], strict=True)]
    return found


def _read_csv(path: Path) -> Iterator[tuple[str, object, object]]:
    rows = csv.reader((line for _, line in read_text_lines(path)), strict=True)
    text, label, width = 0, 1, 0
    nameless = ("", "")  # the text and the label in a first row that names no columns we know
    seen, lengths = Counter[str](), list[int]()
    line = 1
    try:
        for row in rows:
            place, line = f"{path}:{line}", rows.line_num + 1
            if not row:
                continue
            if not width:
                at, width, first = place, len(row), f"{place} {_says(row)}"
                texts, labels = _column(row, TEXT_NAMES), _column(row, LABEL_NAMES)
                if texts is not None and labels is not None:
                    text, label = texts, labels
                    continue
                if width != 2 or texts is not None or labels is not None:  # half of it is named
                    raise DataError(first)
                nameless = row[text].strip(), row[label].strip()
            if len(row) != width:
                raise DataError(
                    f"{place} has {counted(len(row), 'column')} and the first row {width}; put a "
                    "text with commas in quotes"
                )
            seen[row[label].strip()] += 1
            lengths.append(len(row[text].strip()))
            yield place, row[text], row[label]
    except csv.Error as error:
        raise DataError(f"{path}:{line} is not CSV ({error}); mend its quotes") from None
    if seen[nameless[1]] == 1:  # a name that we do not know: as a label it could not be learned
        raise DataError(first)
    if re.fullmatch(r"\w+([ -]\w+)?", nameless[0]) and 2 * len(nameless[0]) <= median(lengths):
        raise DataError(
            f"{at} {nameless[0]!r}, {nameless[1]!r} may name the columns or be a text and its "
            "label; put text,label in its place, or above it if it is a text"
        )


def _column(names: Sequence[str], known: Sequence[str]) -> int | None:
    """The one that has the first of the known names, or else any, if there is just one."""
    plain = [name.strip().casefold() for name in names]
    for usual in (known[:1], known):
        found = [place for place, name in enumerate(plain) if name in usual]
        if len(found) == 1:
            return found[0]
    return None


def _says(row: Sequence[str]) -> str:
    listed = ", ".join(f"{name.strip()[:30]!r}" for name in row[:8]) + ", …" * (len(row) > 8)
    return (
        f"has the columns {listed}, and no telling which are the texts and the labels; name them "
        "text and label in the first row"
    )


def _read_jsonl(path: Path) -> Iterator[tuple[str, object, object]]:
    for number, values in read_jsonl(path, 'an object with "text" and "label"'):
        yield f"{path}:{number}", values.get("text"), values.get("label")


def split(
    texts: Sequence[Labelled], seed: int, held_out: float = 0.2, validation: float = 0.1
) -> Split:
    """Of the smallest class the share `held_out`, and as many of each other one, are held out; of
    what is left of each class the share `validation` is set apart.

    Copies go before the split. Then what is left to learn from loses the texts that equal a
    held-out or validation one but for case, punctuation and digits: templates filled in anew.
    Raises DataError for fewer than two classes, too many, and, by name, those that nothing is
    left of to learn from.
    """
    labels_of: dict[str, set[str]] = {}
    for text, label in texts:
        labels_of.setdefault(text, set()).add(label)
    labels = sorted({label for _, label in texts})
    if not 2 <= len(labels) <= MAX_LABELS:
        raise DataError(
            f"the texts have {len(labels):,} different labels, and there must be from 2 to "
            f"{MAX_LABELS:,}; are the columns text and label swapped?"
        )
    kept = {text: min(found) for text, found in labels_of.items() if len(found) == 1}
    contradicting = sum(len(labels_of[text]) > 1 for text, _ in texts)
    classes = [[text for text, label in kept.items() if label == name] for name in labels]
    count = max(1, round(held_out * min(map(len, classes))))
    parts: dict[str, list[Labelled]] = {"held_out": [], "validation": [], "train": []}
    for number, (name, members) in enumerate(zip(labels, classes, strict=True)):
        order = np.random.default_rng((seed, number)).permutation(len(members))
        until = count + round(validation * max(0, len(members) - count))
        for place, i in enumerate(order.tolist()):
            part = "held_out" if place < count else "validation" if place < until else "train"
            parts[part].append(Labelled(members[i], name))
    before = sum(map(len, parts.values()))
    seen: set[str] = set()
    for part, members_of in parts.items():  # in this order
        keys = [skeleton(text) for text, _ in members_of]
        if part != "held_out":
            members_of[:] = [x for x, key in zip(members_of, keys, strict=True) if key not in seen]
        seen |= set(keys)
    learned = Counter(label for _, label in parts["train"])
    if lacking := [name for name in labels if not learned[name]]:
        listed = ", ".join(map(repr, lacking[:5])) + (", …" if len(lacking) > 5 else "")
        raise DataError(
            f"no text labelled {listed} is left to learn from once {count:,} of each class are "
            "held out; give more of them, or leave the class out"
        )
    counts = {
        "read": len(texts),
        "duplicates": len(texts) - contradicting - len(kept),
        "contradicting": contradicting,
        "near_copies": before - sum(map(len, parts.values())),
    }
    return Split(labels, parts["train"], parts["validation"], parts["held_out"], counts)


def skeleton(text: str) -> str:
    """What is left of a text without case, punctuation and which digits it has."""
    words = re.findall(r"\w+", re.sub(r"\d+", "0", text.casefold()))
    return " ".join(words) or text
