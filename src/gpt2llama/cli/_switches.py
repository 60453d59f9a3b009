"""What each field of the config means, in a few words, and two configs side by side."""

from __future__ import annotations

from rich.table import Table

from ..model.config import ModelConfig

MEANING = {
    "vocab_size": "pieces of the tokenizer",
    "max_seq_len": "tokens of context",
    "n_layers": "blocks",
    "n_heads": "query heads",
    "d_model": "width of the residual stream",
    "d_ff": "width of the MLP",
    "n_kv_heads": "key and value heads; fewer than n_heads is GQA, 1 is MQA",
    "head_dim": "width of a head; none is d_model / n_heads",
    "norm": "rmsnorm leaves out the mean",
    "norm_eps": "inside the norm's square root",
    "norm_placement": "before or after each block's sum",
    "norm_bias": "of layernorm",
    "position": "how a token's place enters",
    "rope_theta": "RoPE's base: larger turns more slowly",
    "rope_scaling": "how RoPE reaches beyond its first context",
    "activation": "of the MLP",
    "gated_mlp": "with silu this is SwiGLU",
    "qkv_bias": "bias of q, k and v",
    "out_bias": "bias of attention's output",
    "mlp_bias": "bias of the MLP",
    "tie_embeddings": "the head is the embedding",
    "embed_scale": "embeddings times √d_model",
    "dropout": "in training only",
    "qk_norm": "RMSNorm on each head's q and k",
    "sliding_window": "tokens a query looks back",
    "logit_softcap": "c·tanh(x/c) on the logits",
}


def values(cfg: ModelConfig) -> dict[str, str]:
    """Every field as it is shown."""
    return {name: _show(value) for name, value in cfg.to_dict().items()}


def side_by_side(first: ModelConfig, second: ModelConfig, names: tuple[str, str]) -> Table:
    """The fields in which the two differ, a line each."""
    table = Table(title=f"{names[0]} → {names[1]}", title_justify="left")
    for header in ("field", *names, ""):
        table.add_column(header, style="dim" if not header else None, overflow="fold")
    left, right = values(first), values(second)
    for name in left:
        if left[name] != right[name]:
            table.add_row(name, left[name], right[name], MEANING[name])
    return table


def _show(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(str(v) if k == "type" else f"{k} {v:g}" for k, v in value.items() if v)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value}"
