"""The Transformer, read top to bottom: norm, attention, MLP, block, model.

Shapes: B batch, T query tokens, S keys (cached and new), D d_model, H heads, K key/value heads,
E head_dim, F d_ff, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .config import ModelConfig
from .kv_cache import KVCache
from .position import Rope, Sinusoids, rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021 (Primer)
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's
    "silu": F.silu,  # gated, this is SwiGLU (Shazeer 2020)
}


def make_norm(cfg: ModelConfig) -> nn.Module:
    if cfg.norm == "layernorm":
        return nn.LayerNorm(cfg.d_model, cfg.norm_eps, bias=cfg.norm_bias)
    return nn.RMSNorm(cfg.d_model, cfg.norm_eps)


def visible(q_pos: Tensor, k_pos: Tensor, real: Tensor | None, window: int | None) -> Tensor:
    """The one mask: which of the keys at k_pos (B|1, S) a query at q_pos (B|1, T) sees.

    Bool (B|1, 1, T, S). `real` marks keys that are no padding; a query left with none sees all
    of them, so that rows of padding stay finite.
    """
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if real is not None:
        seen = seen & real[:, None, :]
        seen = seen | ~seen.any(-1, keepdim=True)
    return seen[:, None]


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(E)): q (B, H, T, E), k (B, K, S, E) -> (B, H, T, S).

    The H/K query heads that share a key head become rows of one product: k is not repeated.
    """
    b, heads, steps, size = q.shape
    rows = (q / math.sqrt(size)).reshape(b, k.shape[1], -1, size)
    scores = (rows @ k.mT).view(b, heads, steps, -1)
    if mask is None and steps > 1:
        mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """(B, H, T, E) out of q and k, v (B, K, S, E); no mask: causal, or T = 1 that sees all."""
    b, heads, steps, _ = q.shape
    if torch.is_grad_enabled() and steps <= 256 and q.device.type == "cpu":
        # The CPU kernel's backward takes longer than these two products and a softmax do.
        weights = F.dropout(attention_weights(q, k, mask), dropout)
        return (weights.view(b, k.shape[1], -1, k.shape[2]) @ v).view(b, heads, steps, -1)
    causal, grouped = mask is None and steps > 1, heads != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, enable_gqa=grouped)


@dataclass
class Pass:
    """What one forward pass hands to every layer."""

    rope: tuple[Tensor, Tensor] | None  # cos, sin
    mask: Tensor | None  # None: causal over T = S, or one query that sees every key
    cache: KVCache | None
    weights: list[Tensor] | None  # attention weights asked for, a layer each


class Attention(nn.Module):
    """Causal self-attention; MHA, GQA and MQA are n_kv_heads = H, fewer, 1."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.size, self.dropout = layer, cfg.head_size, cfg.dropout
        q_width, kv_width = cfg.n_heads * self.size, cfg.kv_heads * self.size
        self.q_proj = nn.Linear(cfg.d_model, q_width, cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.d_model, kv_width, cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.d_model, kv_width, cfg.qkv_bias)
        self.o_proj = nn.Linear(q_width, cfg.d_model, cfg.out_bias)
        self.q_norm = nn.RMSNorm(self.size, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        heads = (*x.shape[:2], -1, self.size)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # (B, H, T, E)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # (B, K, T, E)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if now.rope is not None:
            q, k = rotate(q, *now.rope), rotate(k, *now.rope)
        if now.cache is not None:
            k, v = now.cache.write(self.layer, k, v)  # (B, K, S, E)
        if now.weights is not None:  # beside the answer, so that asking does not change it
            now.weights.append(attention_weights(q, k, now.mask))
        out = attend(q, k, v, now.mask, self.dropout if self.training else 0.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """D -> F -> D; gated, the activation of a second projection multiplies the first."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        gate = nn.Linear(cfg.d_model, cfg.d_ff, cfg.mlp_bias) if cfg.gated_mlp else None
        self.gate_proj = gate
        self.up_proj = nn.Linear(cfg.d_model, cfg.d_ff, cfg.mlp_bias)
        self.down_proj = nn.Linear(cfg.d_ff, cfg.d_model, cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(self.activation(up))
        return self.down_proj(self.activation(self.gate_proj(x)) * up)


class Block(nn.Module):
    """Pre-norm x + f(norm(x)) (GPT-2, Llama) or post-norm norm(x + f(x)) (2017)."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre = cfg.norm_placement == "pre"
        self.attn_norm, self.mlp_norm = make_norm(cfg), make_norm(cfg)
        self.self_attn, self.mlp = Attention(cfg, layer), MLP(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        if self.pre:
            x = x + self.dropout(self.self_attn(self.attn_norm(x), now))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.attn_norm(x + self.dropout(self.self_attn(x, now)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class Transformer(nn.Module):
    """ids, int64 (B, T) -> logits (B, T, V).

    ```
    ids ─ embed_tokens [· √D] [+ embed_positions] ─ L × Block ─ [norm] ─ lm_head ─ [softcap]
    ```
    cache: appends the T tokens to it; any split of a text gives the one-shot logits.
    attention_mask: bool (B, T), False = padding on either side; positions count real tokens.
    positions: int64 (B|1, T), where the tokens stand; a query sees keys at or before its own.
    logits_to_keep: the head on the last k tokens only; 0 means all.
    return_attention: also one (B, H, T, S) tensor a layer; the logits are the same.
    Raises InputError for shapes that do not fit and positions past a learned table.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.embed_positions: nn.Module | None = None
        if cfg.position == "learned":
            self.embed_positions = nn.Embedding(cfg.max_seq_len, cfg.d_model)
        elif cfg.position == "sinusoidal":
            self.embed_positions = Sinusoids(cfg.d_model)
        self.position_limit = cfg.max_seq_len if cfg.position == "learned" else None
        self.rope = Rope(cfg) if cfg.position == "rope" else None
        self.scale = math.sqrt(cfg.d_model) if cfg.embed_scale else 1.0
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
        self.norm = make_norm(cfg) if cfg.norm_placement == "pre" else nn.Identity()
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.softcap, self.window = cfg.logit_softcap, cfg.sliding_window
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal(0, 0.02), residual projections / sqrt(2 L) as in GPT-2; norms 1, biases 0."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 1:
                nn.init.ones_(p)
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.n_layers if residual else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))

    def forward(self, ids: Tensor, *, logits_to_keep: int = 0, **how: Any) -> Any:
        hidden = self.hidden(ids, **how)
        hidden, *weights = hidden if isinstance(hidden, tuple) else (hidden,)
        logits = self.lm_head(hidden[:, -logits_to_keep:])
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return (logits, *weights) if weights else logits

    def hidden(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        return_attention: bool = False,
    ) -> Any:
        """The same arguments; (B, T, D) after the final norm."""
        positions, mask = self.place(ids, cache, attention_mask, positions)
        x = self.embed_tokens(ids) * self.scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions).to(x.dtype)
        x = self.dropout(x)
        rope = None if self.rope is None else self.rope(positions, x.dtype)
        now = Pass(rope, mask, cache, [] if return_attention else None)
        for layer in self.layers:
            x = layer(x, now)
        if cache is not None:
            cache.commit()
        x = self.norm(x)
        return x if now.weights is None else (x, now.weights)

    def place(
        self, ids: Tensor, cache: KVCache | None, real: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Where the tokens stand (B|1, T), and the mask, unless the kernel's own will do."""
        if ids.dim() != 2 or ids.dtype != torch.long or ids.shape[1] == 0:
            raise InputError(f"ids must be int64 (B, T), T > 0 (got {ids.dtype} {ids.shape})")
        if real is not None and (real.shape != ids.shape or real.dtype != torch.bool):
            raise InputError(f"attention_mask must be bool {ids.shape} (got {real.dtype})")
        if cache is not None and len(cache.length) != len(ids):
            raise InputError(f"ids have {len(ids)} rows and the cache {len(cache.length)}")
        start, steps = cache.end if cache is not None else 0, ids.shape[1]
        plain = real is None and positions is None and (cache is None or cache.plain)
        if positions is None:
            positions = torch.arange(start, start + steps, device=ids.device)[None]
            if not plain:
                order = positions - start if real is None else (real.cumsum(1) - 1).clamp(min=0)
                positions = order + (0 if cache is None else cache.length[:, None])
        if self.position_limit is not None:
            last = start + steps if plain else int(positions.max()) + 1
            if last > self.position_limit:
                raise InputError(
                    f"the text needs {last} positions and the learned table has "
                    f"max_seq_len={self.position_limit}; shorten it, or use position 'rope'"
                )
        k_pos, k_real = (positions, real)
        if cache is not None:
            k_pos, k_real = cache.place(positions, real, plain)
        keys = k_pos.shape[1]
        if plain and steps in (1, keys) and (self.window is None or keys <= self.window):
            return positions, None
        return positions, visible(positions, k_pos, k_real, self.window)
