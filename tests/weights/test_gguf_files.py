"""What a GGUF file may not be, and what becomes of one: only our own errors, nothing half-written.

Numbers and names are compared with other libraries in tests/oracle/test_gguf_*.
"""

from __future__ import annotations

import contextlib
import math
import resource
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2llama.errors import (
    ConfigError,
    FileError,
    Gpt2LlamaError,
    InputError,
    TokenizerError,
    WeightsError,
)
from gpt2llama.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NTKScaling,
    YarnScaling,
)
from gpt2llama.model.position import rope_frequencies
from gpt2llama.model.transformer import Transformer
from gpt2llama.tokenizer import train_bpe
from gpt2llama.weights import gguf, load, open_model, save
from gpt2llama.weights.gguf_blocks import BY_NAME
from gpt2llama.weights.gguf_file import Stored, read_header, write_file

CFG = ModelConfig(
    vocab_size=40, max_seq_len=64, n_layers=2, n_heads=4, n_kv_heads=2, d_model=32, d_ff=48
)
GPT2 = CFG.replace(
    n_kv_heads=None,
    norm="layernorm",
    position="learned",
    activation="gelu_tanh",
    gated_mlp=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
IDS = torch.arange(30)[None]


def make(cfg: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(cfg).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(make(CFG), None, tmp_path / "model.gguf", format="gguf")
    return tmp_path / "model.gguf"


def rewrite(path: Path, **changes: Any) -> Path:
    """The same tensors under other metadata; `key=...` is the key after "llama.", None drops it."""
    metadata, tensors = read_header(path)
    opened = gguf.open_model(path)
    for key, value in changes.items():
        full = key.replace("__", ".")
        if not full.startswith(("general.", "split.", "quantize.", "tokenizer.")):
            full = f"llama.{full}"
        metadata.pop(full, None)
        if value is not None:
            metadata[full] = value
    new = path.with_name(f"{len(list(path.parent.iterdir()))}.gguf")
    pieces = ((name, opened.read(name).numpy().view(np.uint8).reshape(-1)) for name in tensors)
    write_file(new, metadata, tensors, pieces)
    return new


CONFIGS = [
    CFG,
    CFG.replace(n_kv_heads=None, tie_embeddings=False, norm_eps=1e-6, rope_theta=5e5),
    CFG.replace(d_model=36, head_dim=8),
    CFG.replace(qkv_bias=True),
    CFG.replace(qkv_bias=True, head_dim=16),
    CFG.replace(out_bias=True, mlp_bias=True),
    CFG.replace(qk_norm=True, head_dim=16),
    GPT2,
    GPT2.replace(tie_embeddings=False, norm_eps=0.01),
    CFG.replace(rope_scaling=LinearScaling(4.0)),
    CFG.replace(rope_scaling=YarnScaling(4.0, 16)),
    CFG.replace(rope_scaling=YarnScaling(4.0, 16, attention_factor=1.3)),
    CFG.replace(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192), head_dim=16),
    CFG.replace(rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 16), qkv_bias=True),
]


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip(cfg: ModelConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(cfg)
    for p in model.parameters():  # F32 in any file, but numbers that the model's dtype has
        p.copy_(p.to(dtype))
    model = model.to(dtype)
    save(model, None, tmp_path / "out.gguf", format="gguf")
    back, tokenizer = load(tmp_path / "out.gguf")
    assert tokenizer is None
    assert back.config == cfg
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert tensor.dtype == dtype


def test_ntk_becomes_a_theta(tmp_path: Path) -> None:
    cfg = CFG.replace(rope_scaling=NTKScaling(4.0))
    save(make(cfg), None, tmp_path / "out.gguf", format="gguf")
    back = load(tmp_path / "out.gguf")[0].config
    assert back.rope_scaling is None
    torch.testing.assert_close(
        rope_frequencies(back)[0], rope_frequencies(cfg)[0], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_placement": "post"}, "norm_placement='post'"),
        ({"position": "sinusoidal"}, "position='sinusoidal'"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"sliding_window": 9}, "sliding_window=9"),
        ({"logit_softcap": 5.0}, "logit_softcap=5.0"),
        ({"embed_scale": True}, "embed_scale=True"),
        ({"rope_scaling": DynamicScaling(2.0)}, "rope_scaling=Dynamic"),
        (
            {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 16), "qk_norm": True},
            "(rope_scaling=Llama3|qk_norm)",
        ),
        ({"rope_scaling": YarnScaling(2.0, 16, beta_fast=16.0)}, "rope_scaling=Yarn"),
        (
            {"rope_scaling": Llama3Scaling(8.0, 1.0, 5.0, 8192), "head_dim": 16},
            "rope_scaling=Llama3",
        ),
    ],
)
def test_switches_without_an_architecture(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*gpt2llama"):
        save(make(CFG.replace(**changes)), None, tmp_path / "out.gguf", format="gguf")
    assert not list(tmp_path.iterdir())


def test_rows_that_no_block_divides(tmp_path: Path) -> None:
    model = make(CFG)
    (note,) = gguf.write_model(tmp_path / "out.gguf", model, None, "Q8_0")
    assert note.startswith("F16")
    found = {
        name: stored.kind.name for name, stored in read_header(tmp_path / "out.gguf")[1].items()
    }
    for name, kind in found.items():
        assert ("ffn_down" in name) == (name in note) == (kind == "F16")  # d_ff is 48
        assert (kind == "F32") == ("norm" in name)
    assert load(tmp_path / "out.gguf")[0].config == CFG


def test_tokenizer_travels_along(tmp_path: Path) -> None:
    tokenizer = train_bpe(["却说曹操引军至赤壁 2017, then 2026! " * 9], 300)
    model = make(CFG.replace(vocab_size=tokenizer.vocab_size + 3))
    save(model, tokenizer, tmp_path / "out.gguf", format="gguf")
    back = load(tmp_path / "out.gguf")[1]
    assert back is not None
    text = "曹操 then 赤壁!"
    assert back.encode(text) == tokenizer.encode(text)
    assert (back.bos_id, back.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)


def test_a_tokenizer_that_cannot_be_names_the_file(saved: Path) -> None:
    with pytest.raises(TokenizerError, match="gguf: "):
        load(rewrite(saved, tokenizer__ggml__model="gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__sliding_window": 9}, r"llama\.attention\.sliding_window=9 is not known"),
        ({"expert_count": 8}, "expert_count=8 is beyond"),
        ({"odd": float("nan")}, r"llama\.odd=nan is not known"),
        ({"rope__dimension_count": 4}, "dimension_count=4 is beyond .* 8"),
        ({"attention__value_length": 4}, "value_length=4 is beyond"),
        ({"attention__head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"attention__head_count": 5}, "n_kv_heads must divide n_heads"),
        ({"block_count": None}, r"'llama\.block_count' is missing"),
        ({"block_count": "two"}, "n_layers must be a whole number"),
        ({"rope__scaling__type": "longrope"}, "'longrope'"),
        ({"rope__scaling__type": ["yarn"]}, "'yarn'"),
        ({"rope__scaling__attn_factor": 2.0}, "attn_factor=2.0"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0,
          "rope__scaling__yarn_ext_factor": 0.5}, "0.5"),
        ({"rope__scaling__factor": "x"}, "factor must be a number"),
        ({"general__architecture": "gemma"}, "'gemma' is not one of gpt2"),
        ({"general__architecture": 3}, "3 is not one of"),
        ({"split__count": 4}, "llama-gguf-split"),
    ],
)  # fmt: skip
def test_metadata_beyond_us(changes: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(ConfigError, match=rf"\.gguf: .*{message}"):
        load(rewrite(saved, **changes))


def test_metadata_without_effect(saved: Path) -> None:
    want = load(saved)[0](IDS)
    harmless = {
        "vocab_size": 99,
        "attention__head_count_kv": [2, 2],
        "attention__causal": True,
        "expert_count": 0,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 0.0,
        "quantize__x": "y",
        "attention__key_length": None,
    }
    assert torch.equal(
        load(
            rewrite(saved, **harmless),
        )[0](IDS),
        want,
    )
    path = rewrite(saved, attention__sliding_window=9)
    assert torch.equal(load(path, ignore_keys=["llama.attention.sliding_window"])[0](IDS), want)


def test_other_rope_factors_than_llama_3s(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    cfg = CFG.replace(rope_theta=5e5, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    save(make(cfg), None, path, "gguf")
    assert open_model(path).config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    _, tensors = read_header(path)
    raw = bytearray(path.read_bytes())
    for factors in ((1.0, 2.0, 3.0, 8.0), (1.0, 1.0, 1.0, math.nan)):
        struct.pack_into("<4f", raw, tensors["rope_freqs.weight"].offset, *factors)
        path.write_bytes(raw)
        with pytest.raises(ConfigError):
            open_model(path)


def header(**changes: Any) -> bytes:
    """A file of one key and one tensor of 8 fp32 numbers, by hand."""
    v = {
        "magic": b"GGUF", "version": 3, "tensors": 1, "keys": 1, "key": b"a", "kind": 4,
        "value": struct.pack("<I", 7), "name": b"x", "sizes": [8], "type": 0, "offset": 0,
        "data": bytes(32), "dims": None,
    } | changes  # fmt: skip
    out = v["magic"] + struct.pack("<IQQ", v["version"], v["tensors"], v["keys"])
    out += struct.pack("<Q", len(v["key"])) + v["key"] + struct.pack("<I", v["kind"]) + v["value"]
    dims = len(v["sizes"]) if v["dims"] is None else v["dims"]
    one = struct.pack("<Q", len(v["name"])) + v["name"]
    one += struct.pack(f"<I{len(v['sizes'])}QIQ", dims, *v["sizes"], v["type"], v["offset"])
    out += one * min(v["tensors"], 2)
    return out + bytes(-len(out) % 32) + v["data"]


def test_a_file_by_hand(tmp_path: Path) -> None:
    for version in (2, 3):
        (tmp_path / "x").write_bytes(header(version=version, data=struct.pack("<8f", *range(8))))
        metadata, tensors = read_header(tmp_path / "x")
        assert metadata == {"a": 7}
        assert tensors["x"].shape == (8,)
    alignment = struct.pack("<I", 64)
    raw = header(key=b"general.alignment", value=alignment)
    (tmp_path / "x").write_bytes(raw + bytes(64))
    assert read_header(tmp_path / "x")[1]["x"].offset % 64 == 0


BIG = 2**64 - 1
STRING, ARRAY = 8, 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GGUG"}, "no GGUF file"),
        ({"version": 1}, "version 1"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": BIG}, "claims"),
        ({"keys": 1 << 20}, "claims"),
        ({"key": b"\xff"}, "not UTF-8"),
        ({"kind": 13}, "'a' with a value of type 13"),
        ({"kind": STRING, "value": struct.pack("<Q", BIG)}, "'a' reaches beyond"),
        ({"kind": STRING, "value": struct.pack("<Q", 1) + b"\xff"}, "'a' with text"),
        ({"kind": ARRAY, "value": struct.pack("<IQ", 0, BIG)}, "'a' claims"),
        ({"kind": ARRAY, "value": struct.pack("<IQ", 12, 2**20)}, "'a' reaches beyond"),
        ({"kind": ARRAY, "value": struct.pack("<IQ", STRING, 2**22)}, "'a' reaches beyond"),
        ({"kind": ARRAY, "value": struct.pack("<IQIQ", ARRAY, 1, 0, 0)}, "of type 9"),
        ({"key": b"general.alignment", "value": struct.pack("<I", 24)}, "alignment of 24"),
        ({"key": b"general.alignment", "value": struct.pack("<I", 1 << 31)}, "short of"),
        ({"tensors": 2}, "'x' twice"),
        ({"dims": 0}, "0 dimensions"),
        ({"dims": BIG >> 32}, "dimensions"),
        ({"sizes": [0]}, r"\(0,\) weights"),
        ({"sizes": [2**63, 4]}, "short of the tensor 'x'"),
        ({"sizes": [33], "type": 8}, "Q8_0 blocks of 32"),
        ({"type": 999}, "type 999"),
        ({"offset": 7}, "at 7, where none can begin"),
        ({"offset": 32}, "32 bytes short"),
        ({"offset": 2**64 - 32}, "bytes short"),
        ({"data": bytes(31)}, "1 bytes short of the tensor 'x'"),
    ],
)  # fmt: skip
def test_damaged_headers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(header(**changes))
    with pytest.raises(WeightsError, match=rf"bad\.gguf.*{message}"):
        read_header(tmp_path / "bad.gguf")


@pytest.mark.parametrize("size", range(24, 74, 7))
def test_truncated_headers(size: int, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(header()[:size])
    with pytest.raises(WeightsError, match=r"truncated: the .* reaches beyond the header$"):
        read_header(tmp_path / "bad.gguf")


def test_tensors_on_one_another(tmp_path: Path) -> None:
    """A small file could otherwise claim any number of weights."""
    kind = BY_NAME["F32"]
    path, piece = tmp_path / "x", np.zeros(256, np.uint8)
    write_file(path, {}, {n: Stored(kind, (64,)) for n in "ab"}, [("a", piece), ("b", piece)])
    raw = path.read_bytes()
    for at in (32, 224):
        head, tail = raw.rsplit(struct.pack("<Q", 256), 1)
        path.write_bytes(head + struct.pack("<Q", at) + tail)
        with pytest.raises(WeightsError, match=f"'b' at {at}, where none can begin"):
            read_header(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.gguf: No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(FileError, match="directory"):
        read_header(tmp_path)
    for content in (b"", b"GGUF", b"PK\3\4" * 99):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(WeightsError, match="no GGUF file"):
            read_header(tmp_path / "x")


def test_a_file_cut_after_opening(saved: Path) -> None:
    opened = gguf.open_model(saved)
    saved.write_bytes(saved.read_bytes()[:-64])
    with pytest.raises(WeightsError, match=r"ends inside the tensor output_norm\.weight"):
        opened.read("output_norm.weight")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    cfg = CFG.replace(n_layers=1, rope_theta=5e5, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    tokenizer = train_bpe(["abc " * 9], 265)
    cfg = cfg.replace(vocab_size=tokenizer.vocab_size)
    gguf.write_model(path, make(cfg), tokenizer, "Q8_0")
    return path.read_bytes()


@settings(max_examples=250)
@given(st.data())
def test_mutated_files_give_a_model_or_our_errors(
    valid: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw, table = bytearray(valid), valid.index(b"token_embd.weight")
    end = valid.index(b"rope_freqs.weight") + 50
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, 1500) | st.integers(table - 8, end))
        new = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, BIG]) | st.integers(0, BIG))
        width = data.draw(st.sampled_from([1, 4, 8]))
        raw[at : at + width] = (new % 2 ** (8 * width)).to_bytes(width, "little")
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Gpt2LlamaError):
            load(path)


def test_opening_imports_no_torch(saved: Path) -> None:
    code = (
        "import sys; from gpt2llama.weights import open_model; "
        f"open_model({str(saved)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_is_not_replaced(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(FileError, match="exists already"):
        save(make(CFG), None, saved, format="gguf")
    assert saved.read_bytes() == before
    with pytest.raises(InputError, match="dtype must be one of F32"):
        gguf.write_model(saved.with_name("new"), make(CFG), None, "Q9")


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 8 kB. Not a fixture: pytest's own log may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_disk(), pytest.raises(FileError, match=r"cannot write .*out\.gguf.*too large"):
        save(make(CFG), None, tmp_path / "out.gguf", format="gguf")
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    model = make(CFG)
    model.norm.weight[0] = math.nan
    save(model, None, tmp_path / "f32.gguf", format="gguf")  # F32 holds anything
    model.layers[1].mlp.up_proj.weight[3, 3] = 1e6
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight"):
        save(model, None, tmp_path / "out.gguf", format="gguf", dtype="Q8_0")
    with pytest.raises(WeightsError, match=r"llama\.context_length=4294967296 does not fit"):
        save(make(CFG.replace(max_seq_len=2**32)), None, tmp_path / "out.gguf", format="gguf")
    with pytest.raises(WeightsError, match=r"rope\.freq_base=1e\+39 does not fit"):
        save(make(CFG.replace(rope_theta=1e39)), None, tmp_path / "out.gguf", format="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["f32.gguf"]
