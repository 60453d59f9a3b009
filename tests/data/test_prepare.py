from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2llama.data import prepare as prepare_module
from gpt2llama.data.batches import TokenData
from gpt2llama.data.prepare import prepare
from gpt2llama.data.shards import open_shard
from gpt2llama.errors import DataError, FileError, InputError

TOKENIZER = ByteTokenizer()
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


def corpus(folder: Path, texts: list[str], name: str = "corpus.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(texts), encoding="utf-8")
    return path


@given(texts=st.lists(TEXT, min_size=2, max_size=9), limit=st.integers(9, 99))
@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25
)
def test_shards_hold_the_documents_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("prepare")
    out = folder / "out"
    report = prepare([corpus(folder, texts)], TOKENIZER, out, 0.25, shard_tokens=limit)
    held = max(1, round(len(texts) * 0.25))
    data = TokenData.open(out, TOKENIZER.fingerprint)
    for split, tokens, expected in (
        ("train", data.train, texts[:-held]),
        ("held-out", data.held_out, texts[-held:]),
    ):
        assert tokens[:].tolist() == [i for t in expected for i in [*TOKENIZER.encode(t), 256]]
        shards = [open_shard(path) for path in sorted(out.glob(f"{split}-*"))]
        assert all(len(shard.tokens) == limit for shard in shards[:-1])
        assert 0 < len(shards[-1].tokens) <= limit
        ends = [shard.tokens[end - 1] for shard in shards for end in shard.document_ends]
        assert ends == [256] * len(expected)
        total = report.train if split == "train" else report.held_out
        size = sum(len(text.encode()) for text in expected)
        assert total.bytes == sum(shard.bytes for shard in shards) == size
        assert (total.documents, total.tokens) == (len(expected), len(tokens))
        assert total.bytes_per_token == size / len(tokens)
    assert (out / "held-out.txt").read_bytes() == "\n".join(texts[-held:]).encode()
    assert data.held_out_bytes == report.held_out.bytes
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.json", "out"]


def test_one_document_gives_its_last_tenth(tmp_path: Path) -> None:
    text = "第一回\r\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out")
    data = TokenData.open(tmp_path / "out")
    assert TOKENIZER.decode(data.train[:].tolist()) == text[:90]
    assert TOKENIZER.decode(data.held_out[:].tolist()) == text[90:]
    assert data.held_out_text.read_bytes() == text[90:].encode()


def test_the_tenth_of_120_chapters_is_12(tmp_path: Path) -> None:
    texts = [f"chapter {i}" for i in range(120)]
    report = prepare([corpus(tmp_path, texts)], TOKENIZER, tmp_path / "out")
    assert report.held_out.documents == 12
    assert (tmp_path / "out" / "tokenizer" / "size").exists()


def test_long_text_is_encoded_in_pieces_and_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_PIECE", 7)
    text = "ab\n\ncdef\n刘备关羽张飞诸葛亮\nx" * 9
    assert "".join(prepare_module._pieces(text)) == text
    assert max(map(len, prepare_module._pieces(text))) <= 7
    assert next(prepare_module._pieces(text)) == "ab\n\n"
    done: list[tuple[int, int]] = []
    report = prepare(
        [corpus(tmp_path, [text, text])],
        TOKENIZER,
        tmp_path / "out",
        progress=lambda *counts: done.append(counts),
    )
    assert report.train.documents == 1
    data = TokenData.open(tmp_path / "out")
    assert data.train[:].tolist() == [*TOKENIZER.encode(text), 256]
    assert done[-1] == (2 * len(text.encode()),) * 2
    assert done == sorted(done)
    assert len(done) > 10


def test_ids_from_65536_on(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(vocab_size=66_000, eos_id=65_536, shift=65_600)
    prepare([corpus(tmp_path, ["abc", "de"])], tokenizer, tmp_path / "out")
    data = TokenData.open(tmp_path / "out", tokenizer.fingerprint)
    assert data.train[:].tolist() == [65_600 + 97, 65_600 + 98, 65_600 + 99, 65_536]
    assert open_shard(tmp_path / "out" / "train-00000.safetensors").tokens.dtype == "uint32"


def test_without_an_end_of_text(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(eos_id=None)
    prepare([corpus(tmp_path, ["abc", "de", "f"])], tokenizer, tmp_path / "out")
    shard = open_shard(tmp_path / "out" / "train-00000.safetensors")
    assert bytes(shard.tokens.tolist()) == b"abcde"
    assert shard.document_ends.tolist() == [3, 5]


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer(vocab_size=100, eos_id=99)
    with pytest.raises(DataError, match="gave id 122, outside its 100"):
        prepare([corpus(tmp_path, ["abz", "x"])], tokenizer, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]


def test_leaks_are_counted(tmp_path: Path) -> None:
    long = "".join(chr(0x4E00 + i) for i in range(200))
    clean = prepare([corpus(tmp_path, ["x" * 99, "y", long])], TOKENIZER, tmp_path / "clean")
    assert (clean.leaked_windows, clean.leaked_documents) == (0, 0)
    texts = ["x", long, "short", "y", "short", long]
    report = prepare([corpus(tmp_path, texts)], TOKENIZER, tmp_path / "out", 0.34)
    assert report.held_out.documents == 2
    assert report.leaked_documents == 2
    assert report.leaked_windows == (600 - 58) // 64  # all but the window with "short" in it


def test_skipped_files_are_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "picture.png").touch()
    corpus(tmp_path / "in", ["ab", "cd"])
    report = prepare([tmp_path / "in"], TOKENIZER, tmp_path / "out")
    assert report.to_dict()["skipped"] == [str(tmp_path / "in" / "picture.png")]
    assert json.loads(json.dumps(report.to_dict()))["train"]["bytes_per_token"] == 2 / 3


def test_used_and_empty_folders(tmp_path: Path) -> None:
    path = corpus(tmp_path, ["ab", "cd"])
    (tmp_path / "empty").mkdir()
    prepare([path], TOKENIZER, tmp_path / "empty")
    TokenData.open(tmp_path / "empty")
    for used in (tmp_path / "empty", path):
        with pytest.raises(FileError, match="name a new folder"):
            prepare([path], TOKENIZER, used)
    with pytest.raises(FileError, match="cannot write"):
        prepare([path], TOKENIZER, path / "below-a-file")
    assert json.loads(path.read_text(encoding="utf-8")) == ["ab", "cd"]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_that_is_none(tmp_path: Path, share: float) -> None:
    with pytest.raises(InputError, match="held_out must be a share"):
        prepare([corpus(tmp_path, ["ab", "cd"])], TOKENIZER, tmp_path / "out", share)


def test_bad_text_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short to hold anything out"):
        prepare([corpus(tmp_path, ["a"])], TOKENIZER, tmp_path / "out")
    with pytest.raises(DataError, match="must be a string"):
        prepare([corpus(tmp_path, ["a", 3])], TOKENIZER, tmp_path / "out")  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]


SCRIPT = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
from byte_tokenizer import ByteTokenizer
from gpt2llama.data.prepare import prepare
from gpt2llama.errors import FileError
def kill(done, total):
    if done > total // 2:
        os.kill(os.getpid(), int(sys.argv[4]))
if sys.argv[4] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    kill = None
try:
    prepare([sys.argv[2]], ByteTokenizer(), sys.argv[3], progress=kill, shard_tokens=3000)
except FileError as error:
    print(error)
"""


def run_script(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    path = corpus(folder, ["word " * 100] * 40)
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SCRIPT, here, str(path), str(folder / "out"), how]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(os.name != "posix", reason="file size limits and signals are POSIX")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "full")
    assert done.returncode == 0, done.stderr
    assert "out: File too large; free some space or name another" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.json"]


@pytest.mark.skipif(os.name != "posix", reason="file size limits and signals are POSIX")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_prepare_leaves_no_folder(tmp_path: Path, how: signal.Signals) -> None:
    done = run_script(tmp_path, str(int(how)))
    assert done.returncode == -how, done.stderr
    assert not (tmp_path / "out").exists()
    prepare([tmp_path / "corpus.json"], TOKENIZER, tmp_path / "out")  # and can be done again
