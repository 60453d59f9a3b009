"""Meta folders: what is read, what is refused; the logits are compared in tests/oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpt2llama.errors import ConfigError, FileError, WeightsError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import preset
from gpt2llama.model.transformer import Transformer
from gpt2llama.weights import load, open_model
from gpt2llama.weights.build import check, state_of
from gpt2llama.weights.keys import read_keys
from gpt2llama.weights.meta import Params, config_from_meta, state_from_meta, state_to_meta
from gpt2llama.weights.report import report

CFG = ModelConfig(
    vocab_size=40, max_seq_len=4096, n_layers=2, n_heads=6, n_kv_heads=2, d_model=48, d_ff=128,
    tie_embeddings=False,
)  # fmt: skip
PARAMS: dict[str, Any] = {
    "dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 40, "multiple_of": 32,
    "norm_eps": 1e-5, "max_batch_size": 1,
}  # fmt: skip
TABLE = "tok_embeddings.weight"
IDS = torch.arange(20).view(2, 10)
State = dict[str, Tensor]


def make(cfg: ModelConfig = CFG) -> Transformer:
    torch.manual_seed(0)
    return Transformer(cfg).eval().requires_grad_(False)


def write(folder: Path, states: list[State], **params: Any) -> Path:
    (folder / "params.json").write_text(json.dumps(PARAMS | params), encoding="utf-8")
    for i, state in enumerate(states):
        torch.save(state, folder / f"consolidated.{i:02d}.pth")
    return folder


def whole(model: Transformer | None = None) -> State:
    return state_to_meta(state_of(model or make()), head_size=8)


def halves() -> list[State]:
    """Two shards."""
    shards: list[State] = [{}, {}]
    for name, tensor in whole().items():
        dim = int(name.endswith(("wo.weight", "w2.weight")))
        parts = tensor.chunk(2, dim) if tensor.dim() > 1 else (tensor, tensor)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


def test_dict_to_dict_and_back() -> None:
    state = state_of(make())
    back = state_from_meta(state_to_meta(state, head_size=8), head_size=8)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert_close(back[name], tensor, rtol=0, atol=0)


def test_a_folder_gives_the_model_back(tmp_path: Path) -> None:
    model, _ = load(write(tmp_path, [whole()]))
    assert model.config == CFG
    assert_close(model(IDS), make()(IDS), rtol=0, atol=0)
    loss = model(IDS).logsumexp(-1).mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_close(load(tmp_path)[0](IDS), make()(IDS), rtol=0, atol=0)


def test_notes(tmp_path: Path) -> None:
    opened = open_model(write(tmp_path, halves()))
    assert opened.format == "meta"
    assert opened.notes == [
        "2 shards joined",
        "max_seq_len=4096 by the other keys: params.json has none",
    ]
    check(opened)


def test_opening_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, halves())
    code = "import sys; from gpt2llama.weights import open_model; open_model(sys.argv[1])"
    code += "\nassert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)


@pytest.mark.parametrize("kind", ["shared", "equal"])
@pytest.mark.parametrize("shards", [1, 2])
def test_tied(kind: str, shards: int, tmp_path: Path) -> None:
    """A head that repeats the table, in whatever way, is the table."""
    parts = halves() if shards == 2 else [whole()]
    for part in parts:
        part["output.weight"] = part[TABLE] if kind == "shared" else part[TABLE].clone()
    model, _ = load(write(tmp_path, parts))
    assert model.lm_head.weight is model.embed_tokens.weight
    lines = {line.name: line for line in report(open_model(tmp_path))}
    assert lines["output.weight"].ours == ()
    assert lines[TABLE].change.endswith("tied")


def test_all_but_tied(tmp_path: Path) -> None:
    """All rows but the last are the same."""
    state = whole()
    state["output.weight"] = state[TABLE].clone()
    state["output.weight"][-1] = 1.0
    assert not load(write(tmp_path, [state]))[0].config.tie_embeddings


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-1-7b", {"dim": 4096, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6}),
        ("llama-1-65b", {"dim": 8192, "n_heads": 64, "n_layers": 80}),
        ("llama-2-7b", {"dim": 4096, "n_heads": 32, "n_layers": 32}),
        (
            "llama-2-70b",
            {"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "n_layers": 80, "multiple_of": 4096,
             "ffn_dim_multiplier": 1.3},
        ),
        (
            "llama-3-8b",
            {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32, "multiple_of": 1024,
             "ffn_dim_multiplier": 1.3, "rope_theta": 500000.0},
        ),
        (
            "llama-3.1-405b",
            {"dim": 16384, "n_heads": 128, "n_kv_heads": 8, "n_layers": 126, "multiple_of": 4096,
             "ffn_dim_multiplier": 1.2, "rope_theta": 500000.0, "use_scaled_rope": True},
        ),
        (
            "llama-3.2-1b",
            {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "n_layers": 16, "multiple_of": 256,
             "ffn_dim_multiplier": 1.5, "rope_theta": 500000.0, "use_scaled_rope": True},
        ),
    ],
)  # fmt: skip
def test_the_published_params_give_the_presets(name: str, params: dict[str, Any]) -> None:
    """Down to the width of the MLP and the length of the context, which neither file says."""
    expected, params = preset(name), {"multiple_of": 256, "norm_eps": 1e-5, **params}
    factor = getattr(expected.rope_scaling, "factor", None)
    read = read_keys(Params, params)
    cfg = config_from_meta(read, expected.vocab_size, expected.tie_embeddings, factor)
    assert cfg == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"qk_norm": True}, r"'qk_norm' is not known here; .*--ignore-key qk_norm"),
        ({"dim": None}, "Params lacks dim"),
        ({"dim": "48"}, "dim must be a whole number above 0"),
        ({"multiple_of": 0}, "multiple_of must be a whole number above 0"),
        ({"vocab_size": -2}, "vocab_size must be"),
        ({"norm_eps": float("inf")}, "norm_eps must be"),
        ({"ffn_dim_multiplier": 1e307}, "too large"),
        ({"n_kv_heads": 4}, "n_kv_heads must divide n_heads"),
        ({"use_scaled_rope": True}, r"--rope-factor 8 \(Llama 3\.1, 3\.3\) or 32 \(Llama 3\.2\)"),
    ],
)
def test_params_that_cannot_be(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"params\.json: .*{message}"):
        load(write(tmp_path, [whole()], **params))


def test_keys_overruled_and_a_factor_for_nothing(tmp_path: Path) -> None:
    write(tmp_path, [whole()], qk_norm=True, max_seq_len=64)
    assert load(tmp_path, ignore_keys=["qk_norm"])[0].config.max_seq_len == 64
    with pytest.raises(ConfigError, match=r"rope_factor=8\.0 is only for"):
        load(tmp_path, ignore_keys=["qk_norm"], rope_factor=8.0)


NORM, WQ = "layers.0.ffn_norm.weight", "layers.1.attention.wq.weight"
DAMAGE: list[tuple[Callable[[list[State]], Any], str]] = [
    (lambda s: [part.pop(WQ) for part in s], rf"lacks the tensor {WQ}"),
    (lambda s: s[1].pop(WQ), rf"consolidated\.01\.pth lacks the tensor {WQ}, which other"),
    (lambda s: s[0].pop(TABLE), rf"consolidated\.00\.pth lacks the tensor {TABLE}"),
    (lambda s: [part.pop(TABLE) for part in s], f"lacks the tensor {TABLE}"),
    (lambda s: [part.pop("output.weight") for part in s], r"lacks the tensor output\.weight"),
    (lambda s: s[0].update(bias=torch.ones(1)), r"consolidated\.01\.pth lacks the tensor bias"),
    (lambda s: [part.update(bias=torch.ones(1)) for part in s], "no place for: bias"),
    (
        lambda s: s[1].update({WQ: torch.ones(23, 48)}),
        rf"consolidated\.01\.pth: {WQ} is float32 of shape \(23, 48\), .*\(24, 48\)",
    ),
    (lambda s: s[1].update({WQ: torch.ones(24, 48).half()}), r"float16 of shape"),
    (
        lambda s: [part.update({WQ: torch.ones(23, 48)}) for part in s],
        rf"{WQ} has the shape \(46, 48\), but its config asks for \(48, 48\)",
    ),
    (
        lambda s: s[1].update({NORM: 1.5 * s[1][NORM]}),
        rf"consolidated\.00\.pth and consolidated\.01\.pth differ in {NORM}",
    ),
    (lambda s: s[0].update({WQ: [1.0]}), rf"holds a list as '{WQ}'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_tensors_that_do_not_fit(
    change: Callable[[list[State]], Any], message: str, tmp_path: Path
) -> None:
    shards = halves()
    change(shards)
    with pytest.raises(WeightsError, match=message):
        load(write(tmp_path, shards))


def test_the_mlp_is_as_wide_as_the_formula_says(tmp_path: Path) -> None:
    write(tmp_path, [whole()], multiple_of=96)
    with pytest.raises(WeightsError, match=r"feed_forward\.w\d\.weight has the shape .*192"):
        load(tmp_path)


def test_shards_that_are_missing(tmp_path: Path) -> None:
    write(tmp_path, halves())
    (tmp_path / "consolidated.00.pth").unlink()
    with pytest.raises(FileError, match=r"lacks consolidated\.00\.pth"):
        load(tmp_path)
    (tmp_path / "consolidated.01.pth").rename(tmp_path / "consolidated.00.pth")
    with pytest.raises(FileError, match=r"has 1 shards \(consolidated\.NN\.pth\) of 2$"):
        load(tmp_path)
