"""Memory of a training step on a CPU in fp32, eager: what is alive at its fullest moment.

Counted are the tensors of `train.step` as PyTorch keeps them. The process takes more: PyTorch
itself, and what the C library holds between freed blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

from ..errors import InputError
from ..model.config import ModelConfig
from .arithmetic import context_length, matrices, parameters

BF16, FP32, INT64 = 2, 4, 8  # bytes
WRITTEN_OUT = 256  # tokens up to which the model trains without the fused attention kernel


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes that the backward pass needs of the forward pass, by the part that made them."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    logits: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes alive at the fullest `moment` of a step, by what they are.

    moment: what is computed then: the "loss", the gradients of the "head", the "last layer", the
    "first layer" or the "embedding", or the "update". workspace: what lives only meanwhile.
    """

    moment: str
    weights: int
    optimizer: int
    gradients: int
    activations: int
    workspace: int

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.workspace


def training_memory(
    cfg: ModelConfig,
    context: int | None = None,
    batch: int = 1,
    accumulate: int = 1,
    optimizer: Literal["adamw", "muon"] = "adamw",
    bf16: bool = False,
) -> TrainingMemory:
    """Of a step on `accumulate` times `batch` texts of `context` tokens (None: max_seq_len).

    bf16: the processor multiplies in it, and so does Muon, whatever the rest is in.
    """
    if accumulate < 1:
        raise InputError(f"accumulate must be at least 1 (got {accumulate})")
    kept = activations(cfg, context, batch)
    one = activations(cfg.replace(n_layers=1), context, batch)
    tokens, d = batch * context_length(cfg, context), cfg.d_model
    logits, stream = FP32 * tokens * cfg.vocab_size, FP32 * tokens * d
    numbers, layer = parameters(cfg)["total"], _layer_workspace(cfg, context, batch)
    every, table = FP32 * numbers, FP32 * cfg.vocab_size * d
    # From the second micro-batch on, new gradients stand beside the sums they are added to.
    before, beside = (every, table) if accumulate > 1 else (0, 0)
    # A tied table's gradient from the head waits for the embedding's; both stay for their sum.
    tied = table if cfg.tie_embeddings else 0
    moments = (
        ("loss", before, kept.total, 2 * logits),
        ("head", before or table, kept.total - kept.logits, beside + logits + stream),
        ("last layer", before or table, kept.total - kept.logits, (beside and tied) + layer),
        (
            "first layer",
            before or every - (table - tied),
            one.total - one.logits,
            (beside and tied) + layer,
        ),
        ("embedding", every, one.embedding, beside + 2 * tied + stream),
        ("update", every, 0, _muon_workspace(cfg, bf16) if optimizer == "muon" else 0),
    )
    state = 2 * numbers - (_hidden(cfg) if optimizer == "muon" else 0)
    moment, gradients, held, workspace = max(moments, key=lambda m: sum(m[1:]))
    return TrainingMemory(
        moment=moment,
        weights=every,
        optimizer=FP32 * state,
        gradients=gradients,
        activations=held,
        workspace=workspace,
    )


def activations(cfg: ModelConfig, context: int | None = None, batch: int = 1) -> Activations:
    """Of `batch` texts of `context` tokens (None: max_seq_len)."""
    steps = _check(cfg, context, batch)
    tokens, d, pre = batch * steps, cfg.d_model, cfg.norm_placement == "pre"
    # LayerNorm keeps its input, mean and deviation; RMSNorm the input, the deviation and their
    # quotient; the projections behind either keep its output.
    norm = 2 * d + 2 if cfg.norm == "layernorm" else 3 * d + 1
    norms = 2 * cfg.n_layers + pre
    embedding = INT64 * tokens  # ids
    if cfg.position == "learned":
        embedding += INT64 * steps
    elif cfg.position == "rope":
        embedding += FP32 * steps * cfg.head_size  # cos and sin
    return Activations(
        embedding=embedding + FP32 * tokens * d * (not pre),
        attention=_attention(cfg, steps, batch),
        mlp=cfg.n_layers * FP32 * tokens * _mlp_width(cfg),
        norms=norms * FP32 * tokens * norm,
        logits=tokens * (FP32 * cfg.vocab_size * (2 if cfg.logit_softcap else 1) + INT64),
    )


def _attention(cfg: ModelConfig, steps: int, batch: int) -> int:
    """Of all layers: queries, keys, values, what the kernel keeps, the output projection's input.

    Written out, a layer keeps the scores after softmax and after dropout. The fused kernel keeps
    its output and the scores' log-sum. It has no dropout: then PyTorch writes attention out too,
    for as many key/value heads as query heads, with a coin for each score.
    """
    q, kv, heads = cfg.n_heads * cfg.head_size, cfg.kv_heads * cfg.head_size, cfg.n_heads
    windowed = cfg.sliding_window is not None and cfg.sliding_window < steps
    width = 2 * (q + kv) + heads + cfg.kv_heads if cfg.qk_norm else 0
    mask = 0
    if steps <= WRITTEN_OUT:
        width += q + 2 * kv + q + heads * steps * (2 if cfg.dropout else 1)
        mask = steps * steps * (1 if windowed else cfg.n_layers)  # bool; a window's is shared
    elif cfg.dropout:
        width += 4 * q + 3 * heads * steps
    else:
        # RoPE leaves the heads before the tokens: the output is turned around by a copy.
        width += q + 2 * kv + heads + q * (2 if cfg.position == "rope" else 1)
        mask = FP32 * steps * steps * cfg.n_layers if windowed else 0
    return FP32 * batch * steps * width * cfg.n_layers + mask


def _mlp_width(cfg: ModelConfig) -> int:
    """Numbers a token: the activation's input (ReLU: its output), and every product's factors."""
    kept = {"relu": 1, "relu2": 2}.get(cfg.activation, 2) + 2 * cfg.gated_mlp
    return kept * cfg.d_ff


def _layer_workspace(cfg: ModelConfig, context: int | None, batch: int) -> int:
    """Of a layer's backward pass, beyond the activations that it has freed by then."""
    steps = context_length(cfg, context)
    two = cfg.gated_mlp or cfg.activation in ("relu", "relu2")
    mlp = (2 if two else 1) * cfg.d_ff
    scores = cfg.n_heads * steps * (3 if cfg.dropout else 2) if steps <= WRITTEN_OUT else 0
    numbers = max(mlp, scores - _mlp_width(cfg)) + 2 * cfg.d_model
    return FP32 * batch * steps * numbers


def _hidden(cfg: ModelConfig) -> int:
    """Numbers in the matrices that Muon takes."""
    return cfg.n_layers * sum(matrices(cfg))


def _muon_workspace(cfg: ModelConfig, bf16: bool) -> int:
    """All updates, and of the largest stack of equal shapes what is there beside them.

    That is three copies and two Gram matrices while it is turned, and what the last stack became;
    while it is stacked, in fp32 first, both of the last one's copies.
    """
    q, kv = cfg.n_heads * cfg.head_size, cfg.kv_heads * cfg.head_size
    sizes = Counter[tuple[int, int]]()
    for width, count in ((q, 2), (kv, 2), (cfg.d_ff, 2 + cfg.gated_mlp)):
        shape = min(width, cfg.d_model), max(width, cfg.d_model)
        sizes[shape] += cfg.n_layers * count
    most, before, size = 0, 0, BF16 if bf16 else FP32
    for (rows, columns), count in sizes.items():
        numbers, gram = count * rows * columns, count * rows * rows
        stacking = FP32 * numbers + bf16 * BF16 * numbers + size * 2 * before
        most = max(most, stacking, size * (3 * numbers + 2 * gram + before))
        before = numbers
    return FP32 * _hidden(cfg) + most


def _check(cfg: ModelConfig, context: int | None, batch: int) -> int:
    if batch < 1:
        raise InputError(f"batch must be at least 1 (got {batch})")
    return context_length(cfg, context)
