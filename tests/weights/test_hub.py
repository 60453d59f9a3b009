"""Hub ids: which files are asked for, and the real library on a cache and a mirror of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from gpt2llama.errors import AssetError, FileError, MissingExtraError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.transformer import Transformer
from gpt2llama.weights import load, save
from gpt2llama.weights.hub import resolve


def test_only_one_copy_of_the_weights_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From repositories that also hold Meta's, Mistral's, ONNX and pickled ones."""
    wanted = [
        "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
        "merges.txt", "tokenizer.model", "chat_template.jinja",
    ]  # fmt: skip
    others = [
        ".gitattributes", "README.md", "original/params.json", "original/tokenizer.model",
        "original/consolidated.00.pth", "consolidated.safetensors", "consolidated.00.pth",
        "onnx/config.json", "pytorch_model.bin", "64.tflite", "fp16/model.safetensors",
        "model-Q4_0.gguf", "modeling_evil.py",
    ]  # fmt: skip
    asked = {}

    def snapshot_download(name: str, **patterns: Any) -> str:
        asked[name] = list(filter_repo_objects(wanted + others, **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name-1.5B") == tmp_path
    assert asked == {"org/name-1.5B": wanted}


@pytest.mark.parametrize("name", ["name", "a/b/c", "/abs/path", "../up", "~/home", "org/", "a\n/b"])
def test_no_id(name: str) -> None:
    with pytest.raises(FileError, match="org/name"):
        resolve(name)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"gpt2llama\[hub\]"):
        resolve("org/name")


def test_a_network_that_fails_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        raise RuntimeError("peer closed connection. Check your proxy.\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    says = r"org/name .* \(peer closed connection\); set HF_ENDPOINT .* fetch smollm2-135m"
    with pytest.raises(AssetError, match=says):
        resolve("org/name")


def in_a_new_process(name: str, **settings: str) -> str:
    """The folder, or the error: the library reads its settings when it is imported."""
    code = "import sys; from gpt2llama.weights.hub import resolve\ntry: print(resolve(sys.argv[1]))"
    code += "\nexcept Exception as error: print(type(error).__name__, error)"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**kept, "HF_HUB_DISABLE_TELEMETRY": "1", **settings},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_offline_from_the_librarys_cache(tmp_path: Path) -> None:
    """Laid out as the library does: a ref that names a snapshot of links to blobs."""
    cfg = ModelConfig(vocab_size=40, max_seq_len=8, n_layers=1, n_heads=2, d_model=8, d_ff=12)
    model = Transformer(cfg).eval()
    repository, commit = tmp_path / "hub/models--org--name", "c" * 40
    save(model, None, repository / "blobs", format="hf")
    (repository / "snapshots" / commit).mkdir(parents=True)
    for blob in list((repository / "blobs").iterdir()):
        (repository / "snapshots" / commit / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit, encoding="utf-8")
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    folder = in_a_new_process("org/name", **offline)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(load(folder)[0](ids), model(ids), rtol=0, atol=0)
    said = in_a_new_process("org/other", **offline)
    assert said.startswith("AssetError org/other is no folder here and cannot be fetched (Cannot")
    assert "\n" not in said


@pytest.fixture
def mirror() -> Iterator[HTTPServer]:
    """Answers every question with 403, and as error the name that was asked for."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("X-Error-Code", self.path.split("/")[4])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("GatedRepo", "org/GatedRepo is gated: accept its terms"),
        ("RepoNotFound", "org/RepoNotFound is neither a folder here nor a model on the hub"),
        ("Else", "org/Else is no folder here and cannot be fetched (Got: "),
    ],
)
def test_a_mirror_that_refuses(error: str, says: str, mirror: HTTPServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{mirror.server_port}"
    said = in_a_new_process(f"org/{error}", HF_ENDPOINT=endpoint, HF_HUB_CACHE=str(tmp_path))
    assert said.startswith(f"AssetError {says}")
    assert "\n" not in said
