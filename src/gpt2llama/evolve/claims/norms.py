"""What is said of LayerNorm and RMSNorm."""

from __future__ import annotations

import math

from ...model.presets import preset, presets
from .claim import Finding, claim
from .timing import fastest


@claim(
    1,
    "RMSNorm is x / sqrt(mean x² + eps); LayerNorm uses the biased variance",
    "RMSNorm 是 x / sqrt(mean x² + eps)；LayerNorm 用有偏方差",
)
def norm_formulas() -> Finding:
    import torch
    import torch.nn.functional as F

    eps, bound = 1e-5, 1e-14
    x = torch.linspace(-2, 3, 256, dtype=torch.float64).sin()
    rms = x / (x.square().mean() + eps).sqrt()
    layer = (x - x.mean()) / (x.var(correction=0) + eps).sqrt()
    equal = torch.allclose(rms, F.rms_norm(x, x.shape, eps=eps), rtol=0, atol=bound)
    equal &= torch.allclose(layer, F.layer_norm(x, x.shape, eps=eps), rtol=0, atol=bound)
    return Finding(
        "true" if equal else "wrong",
        f"{'equal' if equal else 'not equal'} to torch's in fp64 (to {bound:g})",
        f"在 fp64 下与 torch 的结果{'相等' if equal else '不等'}（差 ≤ {bound:g}）",
    )


@claim(2, "RMSNorm is x / (rms + eps)", "RMSNorm 是 x / (rms + eps)")
def eps_outside_the_root() -> Finding:
    import torch
    import torch.nn.functional as F

    rms, eps = 1e-3, 1e-5
    inside, outside = rms / math.sqrt(rms**2 + eps), rms / (rms + eps)
    x = torch.full((256,), rms, dtype=torch.float64)
    got = float(F.rms_norm(x, x.shape, eps=eps)[0])
    return Finding(
        "wrong" if math.isclose(got, inside) and not math.isclose(got, outside) else "true",
        f"eps is inside the root: at rms {rms:g}, eps {eps:g} that gives {inside:.4f}, "
        f"outside {outside:.4f}; torch gives {got:.4f}",
        f"eps 在根号里：rms {rms:g}、eps {eps:g} 时得 {inside:.4f}，放在外面得 {outside:.4f}；"
        f"torch 得 {got:.4f}",
    )


@claim(3, "LayerNorm can be written with x.var()", "LayerNorm 可以用 x.var() 来写")
def unbiased_variance() -> Finding:
    import torch
    import torch.nn.functional as F

    ratios = {}
    for width in (4, 256):
        x = torch.arange(width, dtype=torch.float64)
        written = (x - x.mean()) / (x.var() + 1e-5).sqrt()
        ratios[width] = float((written / F.layer_norm(x, x.shape))[0])
    shown = ", ".join(f"d {width}: {ratio:.4f}" for width, ratio in ratios.items())
    return Finding(
        "true" if all(math.isclose(r, 1, rel_tol=1e-6) for r in ratios.values()) else "wrong",
        f"x.var() divides by n − 1, LayerNorm by n; output relative to LayerNorm's: {shown}",
        f"x.var() 除以 n − 1，LayerNorm 除以 n；输出与 LayerNorm 之比：{shown}",
    )


@claim(4, "Llama's eps is 1e-6", "Llama 的 eps 是 1e-6")
def llama_eps() -> Finding:
    eps = {name: preset(name).norm_eps for name in presets() if name.startswith("llama-")}
    shown = []
    for value in dict.fromkeys(eps.values()):
        names = [name.removeprefix("llama-") for name, own in eps.items() if own == value]
        shown.append(f"{value:g}: {' '.join(names)}")
    listed = "; ".join(shown)
    return Finding(
        "true" if set(eps.values()) == {1e-6} else "wrong",
        f"{listed} (1-65b's from memory): take it from the checkpoint",
        f"{listed}（1-65b 的数值凭记忆）：应从权重文件读取",
    )


@claim(
    5,
    "nn.RMSNorm(d) without eps is the same thing",
    "nn.RMSNorm(d) 不写 eps 也一样",
)
def default_eps() -> Finding:
    import torch
    from torch import nn

    rms, width = 1e-4, 256
    x = torch.full((width,), rms)
    default = float(nn.RMSNorm(width)(x)[0].detach())
    llama = float(nn.RMSNorm(width, eps=1e-5)(x)[0].detach())
    used = rms**2 / default**2 - rms**2  # solved for the eps that gives this output
    machine = torch.finfo(torch.float32).eps
    return Finding(
        "true" if math.isclose(default, llama, rel_tol=1e-3) else "wrong",
        f"its default is the dtype's machine epsilon ({machine:.3g} in fp32; {used:.2g} "
        f"recovered from its output): at rms {rms:g} it gives {default:.3f}, eps 1e-5 {llama:.3f}",
        f"默认值是该数据类型的机器精度（fp32 为 {machine:.3g}；由输出反推得 {used:.2g}）："
        f"rms {rms:g} 时得 {default:.3f}，eps 1e-5 得 {llama:.3f}",
    )


@claim(
    6,
    "RMSNorm makes a model 7–64% faster",
    "RMSNorm 使模型快 7–64%",
    times_machine=True,
)
def rmsnorm_speed() -> Finding:
    """The paper's range is of whole models on its hardware (Zhang and Sennrich 2019)."""
    import torch
    import torch.nn.functional as F

    from ...model.kv_cache import KVCache
    from ...model.transformer import Transformer

    x = torch.randn(512, 256)
    layer, rms = fastest(
        lambda: F.layer_norm(x, (256,)), lambda: F.rms_norm(x, (256,)), seconds=0.2
    )
    gains = {"op": layer / rms - 1}

    cfg = preset("zh-3m-gpt2")
    models = [Transformer(cfg), Transformer(cfg.replace(norm="rmsnorm"))]
    caches = [KVCache(cfg, batch_size=1, max_len=65) for _ in models]
    ids = torch.zeros(4, 128, dtype=torch.long)

    def train(model: Transformer) -> None:
        model(ids).sum().backward()

    def decode(model: Transformer, cache: KVCache) -> None:
        cache.truncate(64)
        with torch.inference_mode():
            model(ids[:1, :1], cache=cache)

    for model, cache in zip(models, caches, strict=True):
        with torch.inference_mode():
            model(ids[:1, :64], cache=cache)
    layer, rms = fastest(lambda: train(models[0]), lambda: train(models[1]), seconds=0.8)
    gains["train"] = layer / rms - 1
    layer, rms = fastest(
        lambda: decode(models[0], caches[0]), lambda: decode(models[1], caches[1]), seconds=0.5
    )
    gains["decode"] = layer / rms - 1
    threads = torch.get_num_threads()
    in_range = all(0.07 <= gains[step] <= 0.64 for step in ("train", "decode"))
    return Finding(
        "true" if in_range else "true-if",
        f"the paper's models and hardware; here (zh-3m-gpt2, eager, {threads} threads): the op "
        f"alone {gains['op']:+.0%}, forward and backward {gains['train']:+.0%}, a decoding step "
        f"{gains['decode']:+.0%} in speed",
        f"限于论文自己的模型与硬件；本机（zh-3m-gpt2，未编译，{threads} 线程）速度变化："
        f"单个算子 {gains['op']:+.0%}，前向加反向 {gains['train']:+.0%}，"
        f"解码一步 {gains['decode']:+.0%}",
    )


@claim(
    7,
    "RMSNorm saves 32 mean reductions a token in a 32-layer model",
    "32 层的模型里，RMSNorm 每个词元省去 32 次求均值",
)
def norms_in_a_model() -> Finding:
    from torch import nn

    from ...model.transformer import Transformer

    cfg = preset("llama-1-7b").replace(vocab_size=8, n_heads=1, d_model=8, d_ff=8)
    count = sum(isinstance(module, nn.RMSNorm) for module in Transformer(cfg).modules())
    return Finding(
        "true" if count == cfg.n_layers else "wrong",
        f"{count}: two in each of {cfg.n_layers} layers and the final one",
        f"{count} 次：{cfg.n_layers} 层每层两次，末尾还有一次",
    )
