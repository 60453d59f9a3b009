from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.tokenizer import BPETokenizer, StreamDecoder, split_pieces

# Half random ids (invalid UTF-8 mostly), half the ids of texts, cut anywhere.
ids_of_all_kinds = st.lists(st.integers(0, 399)) | st.lists(st.integers(8, 263))
texts_of_all_kinds = st.text(st.sampled_from("曹麤😀é👨‍👩‍👧a\ufffd") | st.characters(codec="utf-8"))


@given(ids_of_all_kinds)
def test_streamed_is_decoded(tokenizer: BPETokenizer, ids: list[int]) -> None:
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert not stream.holds_back
    assert stream.flush() == ""


@given(texts_of_all_kinds, st.integers(0, 20))
def test_no_character_is_torn(tokenizer: BPETokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text)[:cut]
    stream, given = StreamDecoder(tokenizer), ""
    for n, id in enumerate(ids, start=1):
        given += stream.push(id)
        assert text.startswith(given)
        held = tokenizer.decode_bytes(ids[:n])[len(given.encode()) :]
        assert len(held) < 4  # no whole character is held back
        assert stream.holds_back == (held != b"")


def test_invalid_bytes_are_given_once_certain(tokenizer: BPETokenizer) -> None:
    lead, *rest = tokenizer.encode("麤")
    (letter,) = tokenizer.encode("a")
    stream = StreamDecoder(tokenizer)
    assert [stream.push(id) for id in (lead, letter, lead)] == ["", "\ufffda", ""]
    assert stream.flush() == "\ufffd"
    assert len(rest) >= 1


@given(ids_of_all_kinds)
def test_pieces_are_all_ids_in_order(tokenizer: BPETokenizer, ids: list[int]) -> None:
    pieces = list(split_pieces(tokenizer, ids))
    assert [id for _, group in pieces for id in group] == ids
    assert "".join(text for text, _ in pieces) == tokenizer.decode(ids)


@given(texts_of_all_kinds)
def test_pieces_are_whole_and_smallest(tokenizer: BPETokenizer, text: str) -> None:
    for piece, group in split_pieces(tokenizer, tokenizer.encode(text)):
        assert tokenizer.decode_bytes(group) == piece.encode("utf-8")
        for n in range(1, len(group)):
            try:
                tokenizer.decode_bytes(group[:n]).decode("utf-8")
            except UnicodeDecodeError:
                continue
            raise AssertionError("a group could have been cut")
