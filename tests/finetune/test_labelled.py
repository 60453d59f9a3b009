"""Labelled texts: the formats, the lines that are refused, and a split without leaks."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.assets import ASSETS, fetch
from gpt2llama.errors import AssetError, DataError
from gpt2llama.finetune.labelled import Labelled, read_labelled, skeleton, split

# As the asset is broken: a quote at a message's start swallowed the messages after it.
BROKEN = (
    ',spam,text\n0,0,"Ok lar, see u"\n'
    '1,0,"""Quoted"" till here\nspam\tWIN a prize!\nham\tCalm, \r\nand more\nham at home"\n'
    "2,1,Call 08001950382\n"
)
REPAIRED = [
    ("Ok lar, see u", "ham"),
    ('"Quoted" till here', "ham"),
    ("WIN a prize!", "spam"),
    ("Calm, \r\nand more\nham at home", "ham"),
    ("Call 08001950382", "spam"),
]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_the_asset_comes_out_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT2LLAMA_CACHE", str(tmp_path))
    content = BROKEN.encode("utf-8")
    sha256 = hashlib.sha256(content).hexdigest()
    asset = replace(ASSETS["sms-spam"], size=len(content), sha256=sha256)
    monkeypatch.setitem(ASSETS, "sms-spam", asset)
    asset.path.parent.mkdir()
    asset.path.write_bytes(content)
    assert read_labelled("sms-spam") == REPAIRED


@pytest.mark.network
def test_the_real_asset() -> None:
    try:
        fetch("sms-spam")
    except AssetError as error:
        pytest.skip(f"gpt2llama fetch sms-spam: {error}")
    texts = read_labelled("sms-spam")
    assert Counter(label for _, label in texts) == {"ham": 4827, "spam": 747}
    parts = split(texts, seed=0)
    assert (parts.counts["read"], parts.counts["duplicates"]) == (5574, 403)
    assert parts.counts["contradicting"] == 0
    assert Counter(label for _, label in parts.held_out) == {"ham": 131, "spam": 131}
    kept = [*parts.train, *parts.validation, *parts.held_out]
    assert len(kept) + parts.counts["near_copies"] == 5171
    spam = [sum(x.label == "spam" for x in part) for part in (parts.train, parts.validation)]
    assert spam[1] / len(parts.validation) == pytest.approx(spam[0] / len(parts.train), abs=0.02)


WANTED = [("a, b", "x"), ('say "hi"\nto me', "y"), ("中奖", "x")]


@pytest.mark.parametrize(
    "content",
    [
        'text,label\n"a, b",x\n"say ""hi""\nto me",y\n中奖,x\n',
        '\ufeffid,Label,TEXT\r\n1,x,"a, b"\r\n2, y ,"say ""hi""\nto me"\r\n\r\n3,x,中奖\r\n',
        '"a, b",x\n"say ""hi""\nto me",y\n中奖,x',
        'sms,label\n"a, b",x\n"say ""hi""\nto me",y\n中奖,x\n',
        'Class, Message \nx,"a, b"\ny,"say ""hi""\nto me"\nx,中奖\n',
        'message,class,text\n1,x,"a, b"\n2,y,"say ""hi""\nto me"\n3,x,中奖\n',
    ],
    ids=["by name", "by name, other columns too", "two columns", "sms", "class", "text wins"],
)
def test_csv(content: str, tmp_path: Path) -> None:
    assert read_labelled(write(tmp_path / "t.CSV", content)) == WANTED


LONG = (
    "come to the station at noon,spam\nbring the books with you,ham\n"
    "中奖了快来领取你的礼物吧就在火车站的旁边,ham\n"
)


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        ("see you, bye", LONG),  # marks: no name
        ("we will see you then", LONG),  # a sentence
        ("tomorrowatnoon", LONG),  # a word that is as long as texts are
        ("Smith", "Miller,ham\nBaker,spam\nLi,spam\nLópez,ham\n"),  # where all are words
        ("你好", "再见,spam\n谢谢,ham\n"),
    ],
)
def test_a_short_first_text(first: str, rest: str, tmp_path: Path) -> None:
    texts = read_labelled(write(tmp_path / "t.csv", f'"{first}",spam\n{rest}'))
    assert texts[0] == (first, "spam")
    assert len(texts) == rest.count("\n") + 1


@pytest.mark.parametrize("first", ["Nachricht", "SMS text", "sms_text", "短信", "e-mail"])
def test_a_name_that_is_a_label_too(first: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", f"{first},spam\n{LONG}")
    with pytest.raises(DataError, match=f"t.csv:1 '{first}', 'spam' may name .* put text,label in"):
        read_labelled(path)
    path = write(tmp_path / "t.csv", f"text,label\n{first},spam\n{LONG}")  # as it says
    assert read_labelled(path)[0] == (first, "spam")
    path = write(tmp_path / "t.csv", f"text,label\n{LONG}")
    assert len(read_labelled(path)) == 3


def test_jsonl(tmp_path: Path) -> None:
    lines = '{"text": "a, b", "label": 1}\n\n{"label": "0", "text": "\\u4e2d", "more": []}'
    assert read_labelled(write(tmp_path / "t.jsonl", lines)) == [("a, b", "1"), ("中", "0")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.csv", "text,label\nfine,x\na,b,c\n", "t.csv:3 has 3 columns and the first row 2"),
        ("t.csv", 'text,label\n"1\n2",x\nno\n', "t.csv:4 has 1 column and the first row 2"),
        ("t.csv", "a,b,c\n", "t.csv:1 has the columns 'a', 'b', 'c', and no telling which"),
        ("t.csv", "Nachricht,Art\na,x\nb,x\n", "t.csv:1 has the columns 'Nachricht', 'Art'.*name"),
        ("t.csv", "text,kind\na,x\nb,y\n", "t.csv:1 has the columns 'text', 'kind'"),
        ("t.csv", "Text,spam\na,spam\nb,ham\n", "t.csv:1 has the columns 'Text', 'spam'"),
        ("t.csv", f"ham,{'a' * 60}\nham,b\n", "t.csv:1 has the columns 'ham', 'a{30}', and no"),
        ("t.csv", "review,message,label\na,b,x\n", "t.csv:1 has the columns 'review', 'message'"),
        ("t.csv", "x,a\ny,b\nx,c\n", "t.csv:1 has the columns 'x', 'a'"),
        ("t.csv", 'text,label\na,x\n"b" c,x\n', "t.csv:3 is not CSV"),
        ("t.csv", 'text,label\na,x\n"open\nto the end', "t.csv:3 is not CSV"),
        ("t.csv", "text,label\na,x\n ,x\n", "t.csv:3 has no text"),
        ("t.csv", "text,label\na,x\nb,\n", "t.csv:3 has no label"),
        ("t.csv", f"text,label\n{'a' * 200_000},x\n", "t.csv:2 is not CSV .field larger"),
        ("t.csv", b"text,label\na,x\n\xff,x\n", "t.csv:3 is not UTF-8"),
        ("t.csv", "text,label\n", "has no text in it"),
        ("t.jsonl", '["a", "x"]\n', "t.jsonl:1 must be an object"),
        ("t.jsonl", '{"text": "a"}\n', "t.jsonl:1 has no label"),
        ("t.jsonl", '{"text": 1, "label": 1}\n', "t.jsonl:1 has no text"),
        ("t.jsonl", '{"text": "a", "label": true}\n', "t.jsonl:1 has no label"),
        ("t.jsonl", "", "t.jsonl is empty"),
        ("t.txt", "a", "must be a .csv or .jsonl file, or sms-spam"),
    ],
)
def test_what_is_refused(name: str, content: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says) as raised:
        read_labelled(write(tmp_path / name, content))
    assert "\n" not in str(raised.value)


TEXTS = st.lists(
    st.tuples(st.text("aA1 2.b", min_size=1, max_size=4), st.sampled_from("xyz")), max_size=60
)


@given(TEXTS, st.integers(0, 3), st.floats(0.01, 0.6))
def test_no_split_leaks(texts: list[tuple[str, str]], seed: int, share: float) -> None:
    """Whatever the texts: a split has these properties, or the labels without texts are named."""
    given = [Labelled(*text) for text in texts]
    try:
        parts = split(given, seed, share)
    except DataError as refused:
        reason = str(refused)
        assert "different labels" in reason or "is left to learn from" in reason
        return
    everything = [*parts.train, *parts.validation, *parts.held_out]
    assert set(everything) <= set(given)
    assert len({text for text, _ in everything}) == len(everything)  # once, in one part
    held, validation, train = (
        {skeleton(text) for text, _ in part}
        for part in (parts.held_out, parts.validation, parts.train)
    )
    assert not held & (validation | train)
    assert not validation & train
    count = Counter(label for _, label in parts.held_out)
    assert set(count) == set(parts.labels) == {label for _, label in given}
    assert len(set(count.values())) == 1
    assert {label for _, label in parts.train} == set(parts.labels)
    gone = ("duplicates", "contradicting", "near_copies")
    assert len(everything) + sum(parts.counts[name] for name in gone) == len(given)
    assert split(given, seed, share) == parts


def test_another_seed_is_another_split() -> None:
    texts = [Labelled(f"{chr(97 + i)} {label}", label) for i in range(26) for label in "xy"]
    first, second = (split(texts, seed) for seed in (0, 1))
    assert first.held_out != second.held_out
    assert len(first.held_out) == len(second.held_out) == 10


def test_copies_and_contradictions_are_counted() -> None:
    texts = [Labelled(f"{chr(97 + i)} {label}", label) for i in range(20) for label in "xy"]
    more = [texts[0], texts[0], Labelled("both", "x"), Labelled("both", "y"), Labelled("both", "x")]
    parts = split(texts + more, 0)
    assert parts.counts == {"read": 45, "duplicates": 2, "contradicting": 3, "near_copies": 0}


def test_a_template_filled_in_anew_is_no_news() -> None:
    templates = [f"{c}: you won {{}} pounds, call {{}}!" for c in "abcdefghijklmnopqrst"]
    texts = [Labelled(t.format(i, i), "x") for t in templates for i in range(2)]
    texts += [Labelled(f"{t} {u}", "y") for t in "abcdefgh" for u in "ijklm"]
    parts = split(texts, 0)
    held = [text for text, label in parts.held_out if label == "x"]
    assert len(held) == 8
    assert parts.counts["near_copies"] >= 4
    assert skeleton("Win £100, NOW!!") == skeleton("win £95 now")
    assert skeleton(":-)") != skeleton(":-(")


def test_classes_without_texts_are_named() -> None:
    texts = [Labelled(f"{c} {d}", "many") for c in "abcdef" for d in "ghij"]
    rare = [Labelled("one of its kind", "rare"), Labelled("and another", "scarce")]
    with pytest.raises(DataError, match="no text labelled 'rare', 'scarce' is left to learn from"):
        split(texts + rare, 0)
    with pytest.raises(DataError, match="1 different labels"):
        split(texts, 0)
    with pytest.raises(DataError, match=r"1,001 different labels.* swapped"):
        split([Labelled("a", str(i)) for i in range(1001)], 0)
