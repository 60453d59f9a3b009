"""The Transformer against a second implementation, and what must hold for every switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sharp import (
    CONTEXT,
    SCALINGS,
    SIZES,
    SWITCHES,
    VOCAB,
    configs,
    make,
    reference,
    tokens,
)
from torch import Tensor
from torch.nn import Dropout
from torch.testing import assert_close

from gpt2llama.errors import InputError
from gpt2llama.model.config import DynamicScaling, ModelConfig
from gpt2llama.model.kv_cache import KVCache
from gpt2llama.model.position import rope_frequencies
from gpt2llama.model.transformer import Transformer

EVERY_SWITCH = [
    *({name: value} for name, values in SWITCHES.items() for value in values),
    *({"position": kind} for kind in ("learned", "sinusoidal", "rope", "none")),
    *({"rope_scaling": scaling} for scaling in SCALINGS[1:]),
]
few = settings(max_examples=25, deadline=None)


def config(**switches: Any) -> ModelConfig:
    return ModelConfig(**SIZES | switches)


def check_reference(cfg: ModelConfig, seed: int) -> None:
    model, ids = make(cfg, seed), tokens(2, CONTEXT, seed=seed)
    table = rope_frequencies(cfg) if cfg.position == "rope" else (torch.zeros(0), 1.0)
    # The model's sinusoids are fp32 numbers, the reference's fp64.
    bound = {"rtol": 1e-5, "atol": 1e-4} if cfg.position == "sinusoidal" else {}
    for row, logits in zip(ids.tolist(), model(ids), strict=True):
        assert_close(logits, reference(model, row, *table), **bound)


@pytest.mark.parametrize("switch", EVERY_SWITCH, ids=str)
def test_each_switch_equals_the_reference(switch: dict[str, Any]) -> None:
    check_reference(config(**switch), seed=1)


@few
@given(configs(), st.integers(0, 99))
def test_any_combination_equals_the_reference(cfg: ModelConfig, seed: int) -> None:
    check_reference(cfg, seed)


@few
@given(configs(), st.integers(0, 99), st.lists(st.integers(0, 2 * CONTEXT - 1), max_size=5))
def test_chosen_places_are_those_of_the_whole(
    cfg: ModelConfig, seed: int, places: list[int]
) -> None:
    model, ids = make(cfg, seed), tokens(2, CONTEXT, seed=seed)
    chosen = torch.tensor(places, dtype=torch.long)
    weights, found = list(model.requires_grad_().parameters()), []
    for hidden in (model.hidden(ids, places=chosen), model.hidden(ids).flatten(0, 1)[chosen]):
        learned = torch.autograd.grad(hidden.square().sum(), weights, allow_unused=True)
        zeros = [
            torch.zeros_like(p) if g is None else g for p, g in zip(weights, learned, strict=True)
        ]
        found.append([hidden, *zeros])
    assert_close(*found)


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if not isinstance(s, DynamicScaling)])
@pytest.mark.parametrize("window", [None, 3])
def test_rope_sees_only_distances(scaling: Any, window: int | None) -> None:
    model = make(config(rope_scaling=scaling, sliding_window=window))
    ids, here = tokens(1, CONTEXT), torch.arange(CONTEXT)[None]
    assert_close(model(ids, positions=here + 100_000), model(ids), rtol=1e-7, atol=1e-7)
    assert not torch.allclose(model(ids, positions=here * 2), model(ids), atol=1e-2)


def test_a_query_sees_keys_at_or_before_its_own_position() -> None:
    model, ids = make(config()), tokens(1, 6)
    order = torch.tensor([[3, 0, 5, 1, 4, 2]])
    shuffled = model(ids[:, order[0]], positions=order)
    assert_close(shuffled, model(ids)[:, order[0]])


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "none"])
def test_only_a_learned_table_ends(position: str) -> None:
    make(config(position=position))(tokens(1, CONTEXT + 1))
    learned, ids = make(config(position="learned")), tokens(1, 2)
    learned(tokens(1, CONTEXT))
    learned(ids, positions=torch.tensor([[0, CONTEXT - 1]]))
    for call in (
        lambda: learned(tokens(1, CONTEXT + 1)),
        lambda: learned(ids, positions=torch.tensor([[0, CONTEXT]])),
    ):
        with pytest.raises(InputError, match=f"{CONTEXT + 1} positions .* max_seq_len={CONTEXT}"):
            call()


@few
@given(configs(), st.lists(st.integers(0, 5), min_size=2, max_size=4), st.booleans())
def test_padding_changes_nothing(cfg: ModelConfig, lengths: list[int], left: bool) -> None:
    """Rows of 0 to 5 real tokens, padded on either side, are what each is alone, and finite."""
    model, width = make(cfg), 5
    rows = [tokens(1, n, seed=i) for i, n in enumerate(lengths)]
    ids, real = tokens(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = slice(width - row.shape[1], width) if left else slice(0, row.shape[1])
        ids[i, at], real[i, at] = row[0], True
    logits = model(ids, attention_mask=real)
    assert logits.isfinite().all()
    for i, row in enumerate(rows):
        if row.numel():
            assert_close(logits[i, real[i]], model(row)[0])


@few
@given(configs(), st.booleans())
def test_asking_for_attention_changes_nothing(cfg: ModelConfig, padded: bool) -> None:
    model, ids = make(cfg, dtype=torch.float32), tokens(2, 7)
    real = torch.ones_like(ids).bool()
    real[0, :2] = not padded
    mask = real if padded else None
    logits, weights = model(ids, attention_mask=mask, return_attention=True)
    assert torch.equal(logits, model(ids, attention_mask=mask))
    assert len(weights) == cfg.n_layers
    at = torch.arange(7)
    distance = at[:, None] - at
    hidden = (distance < 0) | (distance >= (cfg.sliding_window or 99))
    for w in weights:
        assert w.shape == (2, cfg.n_heads, 7, 7)
        assert_close(w.sum(-1), torch.ones(2, cfg.n_heads, 7))
        assert (w[1][:, hidden] == 0).all()
        assert (w[1][:, ~hidden] > 0).any()
        assert (w[0][:, 2:, :2] == 0).all() or not padded


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_repeated_ones(kv_heads: int) -> None:
    """Query heads 0 and 1 of four use key/value head 0 of two: interleaved, not tiled."""
    cfg = config(n_kv_heads=kv_heads, qkv_bias=True, qk_norm=True)
    grouped, full = make(cfg), make(cfg.replace(n_kv_heads=None))
    weights = grouped.state_dict()
    for name, w in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = w.unflatten(0, (kv_heads, cfg.head_size))
            weights[name] = heads.repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(weights)
    assert_close(grouped(tokens(2, 9)), full(tokens(2, 9)))


@few
@given(configs(), st.integers(1, 9))
def test_hidden_head_and_the_last_logits(cfg: ModelConfig, keep: int) -> None:
    model, ids = make(cfg), tokens(2, 7)
    logits = model(ids)
    assert logits.shape == (2, 7, VOCAB)
    assert_close(model(ids, logits_to_keep=keep), logits[:, -keep:])
    head = model.lm_head(model.hidden(ids))
    cap = cfg.logit_softcap
    assert_close(logits, head if cap is None else cap * torch.tanh(head / cap))


@few
@given(configs(), st.sampled_from([None, "left", "right"]))
def test_with_autograd_attention_is_the_same(cfg: ModelConfig, padding: str | None) -> None:
    """With gradients attention is written out, without them it is torch's kernel."""
    model, ids = make(cfg).requires_grad_(), tokens(3, 7)
    real = None
    if padding:
        real = torch.ones_like(ids).bool()
        real[0, :3], real[2] = False, False  # the last row is nothing but padding
        real = real if padding == "left" else real.flip(1)
    with torch.enable_grad():
        written_out = model(ids, attention_mask=real)
        written_out.square().mean().backward()
    with torch.no_grad():
        assert_close(written_out.detach(), model(ids, attention_mask=real))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_gradients_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: Dropout) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout.p, enable_gqa=True)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens(2, 9)).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    model = make(config(n_kv_heads=2, sliding_window=3)).requires_grad_()
    written_out = gradients()
    monkeypatch.setattr("gpt2llama.model.transformer.attend", kernel)
    assert_close(written_out, gradients())


def test_rope_tables_stay_in_fp32() -> None:
    """In 16 bits, positions 256 and 257 would merge, and so would neighbouring frequencies."""
    cfg = config(max_seq_len=4096)
    model = Transformer(cfg)
    far = torch.arange(4000, 4096)[None]
    cos, sin = model.rope(far, torch.float32)
    half = model.to(torch.bfloat16)
    for table, expected in zip(half.rope(far, torch.bfloat16), (cos, sin), strict=True):
        assert torch.equal(table, expected)
    angle = far[0, :, None].double() * rope_frequencies(cfg)[0]
    assert_close(cos[0, 0].double(), angle.cos(), rtol=0, atol=3e-4)  # fp32 holds 4096 to 2e-4
    assert half(tokens(1, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "learned"])
def test_built_on_the_meta_device(position: str) -> None:
    cfg = config(position=position)
    with torch.device("meta"):
        empty = Transformer(cfg)
    filled = empty.to_empty(device="cpu").to(torch.float64).eval()
    filled.load_state_dict(make(cfg).state_dict())
    assert torch.equal(filled(tokens(1, 9)), make(cfg)(tokens(1, 9)))


def test_init_is_normal_and_seeded() -> None:
    cfg = config(
        d_model=256, d_ff=512, n_layers=3, norm="layernorm", qkv_bias=True, out_bias=True,
        mlp_bias=True, tie_embeddings=False, position="learned", max_seq_len=128, vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Transformer(cfg)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (1.0 if "norm.weight" in name else 0.0)).all(), name
            continue
        std = 0.02 / 6**0.5 if "o_proj" in name or "down_proj" in name else 0.02
        assert abs(p.std().item() / std - 1) < 0.03, name
        assert abs(p.mean().item()) < std * 0.03, name
    torch.manual_seed(3)
    again = Transformer(cfg).state_dict()
    assert all(torch.equal(p, again[name]) for name, p in model.state_dict().items())


def test_modules_that_the_switches_leave_out() -> None:
    tied = Transformer(config(norm_placement="post", gated_mlp=False))
    names = dict(tied.named_parameters())
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert not [
        n for n in names if n.startswith(("norm.", "lm_head")) or "gate" in n or "bias" in n
    ]
    untied = Transformer(config(tie_embeddings=False))
    assert untied.lm_head.weight is not untied.embed_tokens.weight


@pytest.mark.parametrize("grad", [True, False])
def test_dropout_is_for_training(grad: bool) -> None:
    model, plain = make(config(dropout=0.5)), make(config())
    ids = tokens(2, 7)
    with torch.set_grad_enabled(grad):
        assert torch.equal(model(ids), plain(ids))
        model.train()
        torch.manual_seed(0)
        first = model(ids)
        assert not torch.allclose(first, model(ids))
        torch.manual_seed(0)
        assert torch.equal(first, model(ids))
        # Attention's own, with the embedding's and the residual's off
        for module in model.modules():
            if isinstance(module, Dropout) and module is not model.layers[0].self_attn.dropout:
                module.p = 0.0
        assert not torch.allclose(model(ids), plain(ids))


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_compiles_without_a_graph_break(position: str) -> None:
    cfg = config(position=position, n_kv_heads=2, sliding_window=3, n_layers=1)
    model = make(cfg, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(tokens(2, 7)), model(tokens(2, 7)))


IDS = tokens(2, 4)


@pytest.mark.parametrize(
    ("ids", "how", "says"),
    [
        (IDS[0], {}, r"ids must be int64 \(B, T\)"),
        (IDS.int(), {}, "torch.int32"),
        (IDS.float(), {}, "torch.float32"),
        (IDS[:, :0], {}, "T > 0"),
        (IDS, {"attention_mask": torch.ones(2, 3).bool()}, "attention_mask must be bool"),
        (IDS, {"attention_mask": torch.ones(2, 4)}, "attention_mask must be bool"),
        (IDS, {"positions": torch.arange(3)[None]}, "positions"),
        (IDS, {"positions": torch.arange(4)}, "positions"),
        (IDS, {"positions": torch.arange(4.0)[None]}, "positions"),
        (IDS, {"cache": KVCache(config(), 3, 9)}, "2 rows and the cache 3"),
    ],
)
def test_wrong_shapes_are_refused(ids: Tensor, how: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make(config(), dtype=torch.float32)(ids, **how)
