"""What is said of papers, code and checkpoints."""

from __future__ import annotations

from ...model.presets import preset
from .claim import Finding, claim


@claim(
    42,
    "nanochat is RMSNorm + RoPE + GQA + SwiGLU",
    "nanochat 是 RMSNorm + RoPE + GQA + SwiGLU",
)
def nanochat() -> Finding:
    claimed = {"RMSNorm", "RoPE", "GQA", "SwiGLU"}
    # As in its nanochat/gpt.py, whose n_kv_head equals n_head by default.
    found = {"RMSNorm", "RoPE", "MHA", "ReLU²", "QK-norm"}
    right, wrong = sorted(claimed & found), sorted(claimed - found)
    others = sorted(found - claimed)
    return Finding(
        "true" if not wrong else "wrong-in-part" if right else "wrong",
        f"right: {', '.join(right)}, though its norm has no weights; not so: {', '.join(wrong)} "
        f"(GQA is off by default); instead: {', '.join(others)}",
        f"对的：{'、'.join(right)}，但它的归一化没有权重；不对的：{'、'.join(wrong)}"
        f"（GQA 默认不开）；实际是：{'、'.join(others)}",
    )


@claim(43, "AWQ and GPTQ were developed on Llama", "AWQ 和 GPTQ 是在 Llama 上开发的")
def quantisers() -> Finding:
    models = {"GPTQ": ("OPT", "BLOOM"), "AWQ": ("Llama", "OPT")}  # of the papers' experiments
    on_llama = ["Llama" in names for names in models.values()]
    shown = "; ".join(f"{method}: {', '.join(names)}" for method, names in models.items())
    return Finding(
        "true" if all(on_llama) else "wrong-in-part" if any(on_llama) else "wrong",
        f"from memory: {shown}",
        f"凭记忆：{shown}",
    )


@claim(
    45,
    "loading weights = check the shape, copy, rename",
    "加载权重 = 核对形状、复制、改名",
)
def equal_shapes() -> Finding:
    import torch

    from ...model.transformer import Transformer

    cfg = preset("zh-3m").replace(n_layers=1, vocab_size=64, n_kv_heads=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(cfg)
    for weight in model.layers.parameters():  # as large as trained ones, so that it shows
        if weight.dim() == 2:
            weight.data.mul_(5)
    ids = torch.arange(16)[None]
    with torch.inference_mode():
        right = model(ids)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = "layers.0.self_attn."
    pairs = torch.arange(cfg.d_model).view(cfg.n_heads, 2, -1).mT.flatten()
    damages = {
        "o_proj transposed": {f"{attention}o_proj.weight": state[f"{attention}o_proj.weight"].T},
        "rows of Q and K in pairs": {
            name: state[name][pairs]
            for name in (f"{attention}q_proj.weight", f"{attention}k_proj.weight")
        },
    }
    changes = {}
    for damage, tensors in damages.items():
        model.load_state_dict({**state, **tensors})  # strict: names and shapes are checked
        with torch.inference_mode():
            changes[damage] = float((model(ids) - right).norm() / right.norm())
    off = list(changes.values())
    return Finding(
        "incomplete" if all(change > 1e-3 for change in off) else "true",
        f"equal shapes hide transposes and row orders: both load without complaint, and change the "
        f"logits by {off[0]:.0%} (o_proj transposed) and {off[1]:.0%} (Q and K rows in pairs)",
        f"形状相同掩盖了转置和行序：两种错误都能顺利加载，却使 logits 改变 {off[0]:.0%}"
        f"（o_proj 转置）和 {off[1]:.0%}（Q、K 的行两两交错）",
    )


@claim(50, "the Llama architecture is from 2024", "Llama 架构出自 2024 年")
def year_of_llama() -> Finding:
    paper = "2302.13971"  # Touvron et al.; an arXiv number begins with its year and month
    year, month = 2000 + int(paper[:2]), int(paper[2:4])
    return Finding(
        "true" if year == 2024 else "wrong",
        f"its paper, arXiv {paper}, is of {year}-{month:02}",
        f"论文 arXiv {paper} 发表于 {year} 年 {month} 月",
    )
