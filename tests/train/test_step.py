from __future__ import annotations

import copy
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2llama.data.batches import IGNORED, Batch
from gpt2llama.errors import TrainingError
from gpt2llama.model.config import ModelConfig
from gpt2llama.model.presets import preset
from gpt2llama.model.transformer import Transformer
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.step import Step, _in_order, can_compile

SIZES: dict[str, Any] = {
    "vocab_size": 40, "max_seq_len": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_model": 16,
    "d_ff": 24,
}  # fmt: skip


def make_model(**switches: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES | switches))
    with torch.no_grad():  # far from the symmetry of the initial weights
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def make_batch(valid: int, rows: int = 4, seed: int = 0) -> Batch:
    """`valid` targets at random places, the others masked."""
    rng = torch.Generator().manual_seed(1000 * seed + valid)
    ids, targets = torch.randint(40, (2, rows, 8), generator=rng)
    masked = torch.randperm(rows * 8, generator=rng)[valid:]
    return Batch(ids, targets.flatten().index_fill(0, masked, IGNORED).view(rows, 8))


def take(
    model: Transformer, batches: list[Batch], compiled: bool = False, **settings: Any
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and the gradient as it was applied: a step of plain descent at rate 1."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = {"dtype": "fp32", "clip": None, **settings}
    step = Step(model, TrainConfig(**settings), compiled)
    step.optimizers = [torch.optim.SGD(step.params)]
    loss, norm = step(batches, 1.0)
    return loss, norm, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def length(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradient.values()]).norm())


def test_micro_batches_weigh_by_their_valid_targets() -> None:
    """Against autograd in fp64 over all rows at once."""
    batches = [make_batch(valid) for valid in (1, 7, 2, 30, 0)]
    model = make_model()
    exact = copy.deepcopy(model).double()
    ids, targets = (torch.cat([getattr(b, k) for b in batches]) for k in ("ids", "targets"))
    mean = F.cross_entropy(exact(ids).flatten(0, 1), targets.flatten())
    mean.backward()  # type: ignore[no-untyped-call]  # torch's
    loss, norm, gradient = take(model, batches)
    assert loss == pytest.approx(mean.item(), rel=1e-6)
    for name, p in exact.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(gradient[name], p.grad.float(), msg=name)
    assert norm == pytest.approx(length(gradient), rel=1e-5)
    one = take(make_model(), [Batch(ids, targets)])
    assert one[0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(one[2], gradient)


def test_a_masked_target_teaches_nothing() -> None:
    batch, seen = make_batch(9), list[Any]()
    model = make_model()

    def look(module: object, inward: object, outward: Any) -> None:
        seen.append(outward[0])

    model.lm_head.register_full_backward_hook(look)
    take(model, [batch])
    taught = seen[0].abs().sum(-1) > 0  # (B · T), from the gradient with respect to the logits
    assert torch.equal(taught, batch.targets.flatten() != IGNORED)


def test_what_follows_the_last_target_changes_nothing() -> None:
    whole = make_batch(32)
    for mask in (slice(5, None), slice(0, 5)):
        targets = whole.targets.clone()
        targets[:, mask] = IGNORED
        other = whole.ids.clone()
        other[:, mask] = (other[:, mask] + 1) % 40
        a, b = (take(make_model(), [Batch(ids, targets)]) for ids in (whole.ids, other))
        assert (a[:2] == b[:2]) == (mask.start == 5)  # a prompt is context, a tail is not even that


def test_clip_bounds_the_update_and_reports_the_norm_before() -> None:
    batch = make_batch(20)
    _, norm, gradient = take(make_model(), [batch])
    assert norm == pytest.approx(length(gradient), rel=1e-5)
    _, same, clipped = take(make_model(), [batch], clip=norm / 10)
    assert same == pytest.approx(norm, rel=1e-6)
    assert length(clipped) == pytest.approx(norm / 10, rel=1e-4)
    for name in gradient:
        torch.testing.assert_close(clipped[name] * 10, gradient[name], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(take(make_model(), [batch], clip=norm * 10)[2], gradient)


def test_a_step_leaves_no_gradient_behind_and_uses_its_rate() -> None:
    model = make_model()
    step = Step(model, TrainConfig(dtype="fp32", weight_decay=0.0, optimizer="muon"), False)
    step([make_batch(20)], 0.01)
    assert all(p.grad is None for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    step([make_batch(20)], 0.0)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_dropout_is_on_whatever_mode_the_model_comes_in() -> None:
    torch.manual_seed(0)
    model = make_model(dropout=0.5).eval()
    step = Step(model, TrainConfig(dtype="fp32"), False)
    assert step([make_batch(20)], 0.0)[0] != step([make_batch(20)], 0.0)[0]


def test_all_masked() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    step = Step(model, TrainConfig(), False)
    with pytest.raises(TrainingError, match="no target to learn"):
        step([make_batch(0), make_batch(0)], 0.1)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_documents_are_learned_as_if_alone() -> None:
    """Three in two rows, padded, against one row each."""
    rng = torch.Generator().manual_seed(3)
    texts = [torch.randint(40, (n,), generator=rng) for n in (5, 4, 7)]
    zeros = torch.zeros(2, 8, dtype=torch.long)
    ids, targets, documents, positions = zeros, zeros + IGNORED, zeros.clone(), zeros.clone()
    ids = zeros.clone()
    for number, (text, row, at) in enumerate(zip(texts, (0, 0, 1), (0, 4, 0), strict=True), 1):
        n = len(text) - 1
        ids[row, at : at + n], targets[row, at : at + n] = text[:-1], text[1:]
        documents[row, at : at + n] = number
        positions[row, at : at + n] = torch.arange(n)
    alone = [Batch(text[None, :-1], text[None, 1:]) for text in texts]
    packed = take(make_model().double(), [Batch(ids, targets, documents, positions)])
    apart = take(make_model().double(), alone)
    torch.testing.assert_close(packed[0], apart[0])
    torch.testing.assert_close(packed[2], apart[2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite(dtype: str) -> None:
    model = make_model()
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.up_proj.weight")[3, 4] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = Step(model, TrainConfig(dtype=dtype), False)  # type: ignore[arg-type]  # a parameter
    with pytest.raises(TrainingError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        step([make_batch(20)], 0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_bf16_computes_in_a_copy(tied: bool) -> None:
    batches = [make_batch(20), make_batch(5)]
    reference = take(make_model(tie_embeddings=tied), batches)
    got = take(make_model(tie_embeddings=tied), batches, dtype="bf16")
    assert got[0] == pytest.approx(reference[0], rel=0.01)
    error = {name: got[2][name] - g for name, g in reference[2].items()}
    assert 0 < length(error) < 0.03 * length(reference[2])  # bf16 has 8 bits

    model = make_model(tie_embeddings=tied)
    step = Step(model, TrainConfig(dtype="bf16", optimizer="muon"), False)
    for _ in range(2):
        step(batches, 0.01)
    assert step.model is model
    for network in (model, step.compute):
        assert (network.lm_head.weight is network.embed_tokens.weight) == tied
    for p, c in zip(model.parameters(), step.compute.parameters(), strict=True):
        assert (p.dtype, c.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(c, p.bfloat16())
    rounded = [torch.equal(p, p.bfloat16().float()) for p in model.parameters() if p.dim() > 1]
    assert not any(rounded)  # the master keeps what bf16 cannot
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(3.0)
    step.refresh()
    assert step.compute.get_parameter("norm.weight").tolist() == [3.0] * 16


def test_fp32_computes_in_the_model_itself() -> None:
    model = make_model()
    assert Step(model, TrainConfig(dtype="fp32"), False).compute is model


def step_with_dropout(compiled: bool) -> tuple[float, float, dict[str, Tensor]]:
    torch.manual_seed(0)
    torch.compile = partial(torch.compile, fullgraph=True)
    batches = [make_batch(20), make_batch(3)]
    for few in (make_batch(7), make_batch(5)):  # of these, only the targets get logits
        learned = (few.targets.flatten() != IGNORED).nonzero()[:, 0]
        batches.append(replace(few, learned=learned))
    return take(make_model(dropout=0.3), batches, compiled)


def repeated_on_two_threads(_: int) -> list[bytes]:
    """Gradients of an embedding in which a few tokens meet 2,048 times."""
    torch.set_num_threads(2)
    cfg = preset("zh-3m").replace(n_layers=1, d_ff=64, vocab_size=300, max_seq_len=128)
    found = []
    for _ in range(4):
        torch.manual_seed(0)
        step = Step(Transformer(cfg), TrainConfig(dtype="fp32", device="cpu"), compiled=True)
        ids = torch.randint(3, (2, 16, 128), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            step([Batch(*ids)], 1e-2)
        found.append(step.model.embed_tokens.weight.detach().numpy().tobytes())
    return found


def test_what_a_program_wants_of_determinism_stays_its_own() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with _in_order():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler, e.g. apt install g++")
def test_compiled_is_the_same_each_time_on_two_threads() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        (found,) = pool.map(repeated_on_two_threads, [0])
    assert len(set(found)) == 1


@pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler, e.g. apt install g++")
def test_compiled_equals_eager_with_its_dropout() -> None:
    """In one graph, labels masked; another coin for dropout would be a wholly other gradient.
    In a process of its own, since the compiler trips over modules that other tests import."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        eager, compiled = pool.map(step_with_dropout, [False, True])
    assert compiled[:2] == pytest.approx(eager[:2], rel=1e-5)
    torch.testing.assert_close(compiled[2], eager[2])
