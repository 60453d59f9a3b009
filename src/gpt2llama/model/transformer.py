"""The Transformer, read top to bottom: norm, attention, MLP, block, model.

Shapes: B batch, T query tokens, S keys (cached and new), D d_model, H heads, K key/value heads,
E head_dim, F d_ff, V vocabulary.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .config import ModelConfig
from .kv_cache import KVCache
from .position import Rope, rotate, sinusoids

ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's
    "silu": F.silu,  # gated, this is SwiGLU (Shazeer 2020)
}


def make_norm(cfg: ModelConfig) -> nn.Module:
    if cfg.norm == "layernorm":
        return nn.LayerNorm(cfg.d_model, cfg.norm_eps, bias=cfg.norm_bias)
    return nn.RMSNorm(cfg.d_model, cfg.norm_eps)


def visible(q_pos: Tensor, k_pos: Tensor, real: Tensor | None, window: int | None) -> Tensor:
    """The one mask, bool (B|1, 1, T, S): keys at k_pos (B|1, S) that queries at q_pos (B|1, T) see.
    `real` (B, S) marks keys that are no padding, or numbers documents, each of which sees itself
    alone; a query left with no key sees all, to stay finite.
    """
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if real is not None:
        own = real if real.dtype == torch.bool else real[:, :, None] == real[:, None]
        seen = seen & own.view(len(own), -1, own.shape[-1])
        seen = seen | ~seen.any(-1, keepdim=True)
    return seen[:, None]


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(E)): q (B, H, T, E), k (B, K, S, E) -> (B, H, T, S)."""
    # The H/K query heads that share a key head become rows of one product: k is not repeated.
    b, heads, steps, size = q.shape
    rows = (q / math.sqrt(size)).reshape(b, k.shape[1], -1, size)
    scores = (rows @ k.mT).view(b, heads, steps, -1)
    if mask is None and steps > 1:
        place = torch.arange(steps, dtype=torch.int32, device=q.device)  # int64 compiles to slower
        mask = place[:, None] >= place
    return (scores if mask is None else scores.where(mask, -torch.inf)).softmax(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: nn.Dropout) -> Tensor:
    """(B, H, T, E) out of q and k, v (B, K, S, E); no mask: causal, or T = 1 that sees all."""
    b, heads, steps, _ = q.shape
    if torch.is_grad_enabled() and steps <= 256 and q.device.type == "cpu":
        # The CPU kernel's backward takes longer than these two products and a softmax do.
        weights = dropout(attention_weights(q, k, mask))
        return (weights.view(b, k.shape[1], -1, k.shape[2]) @ v).view(b, heads, steps, -1)
    p, causal = dropout.p * dropout.training, mask is None and steps > 1
    return F.scaled_dot_product_attention(q, k, v, mask, p, causal, enable_gqa=heads != k.shape[1])


class Attention(nn.Module):
    """Causal self-attention; MHA, GQA and MQA are n_kv_heads = H, fewer, 1."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.size, self.dropout = layer, cfg.head_size, nn.Dropout(cfg.dropout)
        q_width, kv_width = cfg.n_heads * self.size, cfg.kv_heads * self.size
        self.q_proj = nn.Linear(cfg.d_model, q_width, cfg.qkv_bias)
        self.k_proj = nn.Linear(cfg.d_model, kv_width, cfg.qkv_bias)
        self.v_proj = nn.Linear(cfg.d_model, kv_width, cfg.qkv_bias)
        self.o_proj = nn.Linear(q_width, cfg.d_model, cfg.out_bias)
        norm = partial(nn.RMSNorm, self.size, cfg.norm_eps) if cfg.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, rope: Any, mask: Any, cache: Any, weights: Any) -> Tensor:
        """rope: (cos, sin) · mask: as `attend` · weights: a list to append to · each may be None"""
        heads = (*x.shape[:2], -1, self.size)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)  # (B, H, T, E)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)  # (B, K, T, E)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)  # (B, K, S, E)
        if weights is not None:  # beside the answer, so that asking does not change it
            weights.append(attention_weights(q, k, mask))
        return self.o_proj(attend(q, k, v, mask, self.dropout).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """D -> F -> D; gated: the activation of a second projection multiplies the first."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation]
        linear = partial(nn.Linear, bias=cfg.mlp_bias)
        self.gate_proj = linear(cfg.d_model, cfg.d_ff) if cfg.gated_mlp else None
        self.up_proj, self.down_proj = linear(cfg.d_model, cfg.d_ff), linear(cfg.d_ff, cfg.d_model)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm x + f(norm(x)) (GPT-2, Llama) or post-norm norm(x + f(x)) (2017)."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.pre, self.dropout = cfg.norm_placement == "pre", nn.Dropout(cfg.dropout)
        self.attn_norm, self.mlp_norm = make_norm(cfg), make_norm(cfg)
        self.self_attn, self.mlp = Attention(cfg, layer), MLP(cfg)

    def forward(self, x: Tensor, places: Tensor | None, *how: Any) -> Tensor:
        attended = self.dropout(self.self_attn(self.attn_norm(x) if self.pre else x, *how))
        x = x + attended if self.pre else self.attn_norm(x + attended)
        x = x if places is None else x.flatten(0, 1).index_select(0, places)
        update = self.dropout(self.mlp(self.mlp_norm(x) if self.pre else x))
        return x + update if self.pre else self.mlp_norm(x + update)


class Transformer(nn.Module):
    """ids, int64 (B, T) -> logits (B, T, V).

        ids ─ embed_tokens [· √D] [+ embed_positions] ─ L × Block ─ [norm] ─ lm_head ─ [softcap]

    cache: appends the T tokens to it; any split of a text gives the one-shot logits.
    attention_mask: bool (B, T), False = padding on either side; positions count real tokens. Or
    int64 (B, T), beside positions: the numbers of documents, each of which sees itself alone.
    positions: int64 (B|1, T), where the tokens stand; a query sees keys at or before its own.
    logits_to_keep: the head on the last k tokens only; 0 means all.
    return_attention: also a list of (B, H, T, S) weights, one a layer; the logits are the same.
    Raises InputError for shapes that do not fit and positions past a learned table.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.config, self.window, self.softcap = cfg, cfg.sliding_window, cfg.logit_softcap
        self.scale = math.sqrt(cfg.d_model) if cfg.embed_scale else 1.0
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.embed_positions: Any = None
        if cfg.position == "learned":
            self.embed_positions = nn.Embedding(cfg.max_seq_len, cfg.d_model)
        elif cfg.position == "sinusoidal":
            self.embed_positions = partial(sinusoids, d_model=cfg.d_model)
        self.position_limit = cfg.max_seq_len if cfg.position == "learned" else math.inf
        self.rope = Rope(cfg) if cfg.position == "rope" else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
        self.norm = make_norm(cfg) if cfg.norm_placement == "pre" else nn.Identity()
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self, draw: Any = lambda name: None) -> None:  # name -> its Generator
        """Normal(0, 0.02), residual projections / sqrt(2 L) as in GPT-2; norms 1, biases 0."""
        for name, p in self.named_parameters():
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / math.sqrt(2 * self.config.n_layers if residual else 1)
            one = 0.0 if name.endswith("bias") else 1.0
            nn.init.constant_(p, one) if p.dim() < 2 else nn.init.normal_(p, 0, std, draw(name))

    def forward(
        self, ids: Tensor, *, logits_to_keep: int = 0, return_attention: bool = False, **how: Any
    ) -> Any:
        weights: list[Tensor] | None = [] if return_attention else None
        logits = self.logits(self.hidden(ids, weights=weights, **how)[:, -logits_to_keep:])
        return logits if weights is None else (logits, weights)

    def logits(self, hidden: Tensor) -> Tensor:  # (…, D) -> (…, V)
        logits: Tensor = self.lm_head(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def hidden(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        weights: list[Tensor] | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) after the final norm; as of forward; `weights` gathers attention's.
        places: (N,) of B·T, for their (N, D) alone: the last MLP is spared all others."""
        positions, mask = self._place(ids, cache, attention_mask, positions)
        x = self.embed_tokens(ids) * self.scale
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions).to(x.dtype)
        rope = None if self.rope is None else self.rope(positions, x.dtype)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, places if layer is self.layers[-1] else None, rope, mask, cache, weights)
        if cache is not None:
            cache.commit()
        return self.norm(x)

    def _place(
        self, ids: Tensor, cache: KVCache | None, real: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Where the tokens stand (B|1, T), and the mask, unless the kernel's own will do."""
        if ids.dim() != 2 or ids.dtype != torch.long or ids.shape[1] == 0:
            raise InputError(f"ids must be int64 (B, T), T > 0 (got {ids.dtype} {ids.shape})")
        kinds = (torch.bool,) if cache or positions is None else (torch.bool, torch.long)
        if real is not None and (real.shape != ids.shape or real.dtype not in kinds):
            raise InputError(f"attention_mask must be bool {ids.shape} (got {real.dtype})")
        if cache is not None and len(cache.length) != len(ids):
            raise InputError(f"ids have {len(ids)} rows and the cache {len(cache.length)}")
        start, steps = cache.end if cache else 0, ids.shape[1]
        plain = real is None and positions is None and (cache is None or cache.plain)
        if positions is None:
            counted = torch.ones_like(ids[:1], dtype=torch.bool) if real is None else real
            first = start if plain or cache is None else cache.length[:, None]
            positions = (first + counted.cumsum(1) - 1).where(counted, 0)
        elif positions.dtype != torch.long or positions.shape not in (ids.shape, ids[:1].shape):
            raise InputError(f"positions must be int64 {ids.shape} (got {positions.shape})")
        end = start + steps if plain or self.position_limit == math.inf else positions.max() + 1
        if end > self.position_limit:
            rule = f"the learned table has max_seq_len={self.position_limit}: shorten the text"
            raise InputError(f"{int(end)} positions are needed and {rule}")
        k_pos, k_real = cache.place(positions, real, plain) if cache else (positions, real)
        keys = k_pos.shape[1]
        causal = plain and steps in (1, keys) and (self.window is None or keys <= self.window)
        return positions, None if causal else visible(positions, k_pos, k_real, self.window)
