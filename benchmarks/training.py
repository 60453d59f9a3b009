"""Training speed of gpt2llama beside its peers, which README.md describes, on one shape.

Rounds run every system in turn, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpt2llama import ModelConfig, Transformer, preset
from gpt2llama.data.batches import Batch
from gpt2llama.machine import bf16_if_native, gemm_limit, peak_rss
from gpt2llama.plan import flops_per_token, parameters
from gpt2llama.train.config import TrainConfig
from gpt2llama.train.step import Step, can_compile

BATCH, CFG = 16, preset("zh-3m")
PLAIN = preset("zh-3m-gpt2").replace(d_ff=4 * CFG.d_model)  # GPT-2's own ratio
CPU = torch.cpu.get_capabilities()
Dtype = Literal["fp32", "bf16"]
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
ABLE = [d for d in DTYPES if d == "fp32" or bf16_if_native(torch.device("cpu")) == DTYPES[d]]
INSTALL = {  # litgpt pins an older huggingface-hub than transformers needs: no dependencies
    "hf": "pip install 'transformers>=5'",
    "litgpt": "pip install --no-deps litgpt lightning lightning-utilities torchmetrics psutil",
}
Learn = Callable[[Tensor, Tensor], float]  # ids, targets (B, T) -> loss: one whole optimiser step
Row = dict[str, Any]


class System(NamedTuple):
    name: str
    dtype: Dtype
    build: Callable[[], Learn]
    config: ModelConfig = CFG  # counts its FLOPs


class PlainBlock(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, nn.Linear(d, d)
        self.qkv = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 3 * d))
        mlp = nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), *mlp)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class PlainGPT(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        d = cfg.d_model
        self.tokens = nn.Embedding(cfg.vocab_size, d)
        self.positions = nn.Embedding(cfg.max_seq_len, d)
        blocks = (PlainBlock(d, cfg.n_heads) for _ in range(cfg.n_layers))
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(d))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.blocks(x), self.tokens.weight)


def loop(model: nn.Module, loss_of: Callable[..., Tensor], cfg: ModelConfig = CFG) -> Learn:
    """A user's step: backward, clip, AdamW, everything at its default."""
    optimizer = torch.optim.AdamW(model.parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters(cfg)["total"]

    def step(ids: Tensor, targets: Tensor) -> float:
        loss = loss_of(ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def sizes_as(names: str) -> dict[str, Any]:
    """zh-3m's sizes under the names a peer has for them."""
    ours = "vocab_size max_seq_len n_layers n_heads n_kv_heads d_model d_ff"
    return {new: getattr(CFG, old) for new, old in zip(names.split(), ours.split(), strict=True)}


def plain() -> Learn:
    model = PlainGPT(PLAIN)
    return loop(model, lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), PLAIN)


def hf() -> Learn:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = "num_hidden_layers num_attention_heads num_key_value_heads"
    sizes = sizes_as(f"vocab_size max_position_embeddings {heads} hidden_size intermediate_size")
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).train()
    return loop(model, lambda x, _: model(x, labels=x).loss)  # shifts the labels itself


def litgpt(pretrain: bool) -> Learn:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    names = "vocab_size block_size n_layer n_head n_query_groups n_embd intermediate_size"
    llama = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0}
    model = GPT(Config(**sizes_as(names), **llama, bias=False, parallel_residual=False))
    model.apply(model._init_weights)
    model.transformer.wte.weight = model.lm_head.weight
    forward = torch.compile(model) if pretrain else model

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=pretrain):
            logits = forward(ids)
        return chunked_cross_entropy(logits.float(), targets)

    return loop(model, loss_of)


def ours(dtype: Dtype) -> Learn:
    cfg = TrainConfig(dtype=dtype, optimizer="adamw", clip=1.0)
    step = Step(Transformer(CFG), cfg, can_compile())
    return lambda ids, targets: step([Batch(ids, targets)], cfg.lr)[0]


SYSTEMS = [
    System("gpt2llama", "fp32", lambda: ours("fp32")),
    System("gpt2llama", "bf16", lambda: ours("bf16")),
    System("hf", "fp32", hf),
    System("litgpt", "fp32", lambda: litgpt(pretrain=False)),
    System("litgpt", "bf16", lambda: litgpt(pretrain=True)),
    System("plain", "fp32", plain, PLAIN),
]


class Peer:
    """A system in a process of its own, so that no other's settings and caches are in it."""

    def __init__(self, system: System) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        context.Process(target=work, args=(far, SYSTEMS.index(system)), daemon=True).start()
        if error := self.pipe.recv():
            raise ModuleNotFoundError(error)

    def train(self, steps: int) -> tuple[float, float, int | None]:
        """Tokens per second, the last loss, the process's peak memory in bytes."""
        self.pipe.send(steps)
        figures: tuple[float, float, int | None] = self.pipe.recv()
        return figures


def work(pipe: Connection, system: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(CFG.vocab_size, (8, BATCH, CFG.max_seq_len + 1))
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in ids]
    try:
        step = SYSTEMS[system].build()
    except ModuleNotFoundError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    while steps := pipe.recv():
        step(*batches[-1])  # untimed: the caches are still another system's
        start = time.perf_counter()
        losses = [step(*batches[s % len(batches)]) for s in range(steps)]
        speed = steps * BATCH * CFG.max_seq_len / (time.perf_counter() - start)
        pipe.send((speed, losses[-1], peak_rss()))


def measure(systems: list[System], steps: int, repeats: int) -> dict[str, Any]:
    """The best FLOP/s of a 2048^3 product in each dtype; a row of figures for each system."""
    rows, ready, limits = [], [], dict.fromkeys(ABLE, 0.0)
    for system in systems:
        rows.append(row := Row(name=system.name, dtype=system.dtype))
        try:
            if system.dtype in ABLE:
                ready.append((row, Peer(system)))
                row["flops_per_token"] = flops_per_token(system.config)
            else:
                row["not_measured"] = "this CPU has no bf16"
        except ModuleNotFoundError as error:
            row["not_measured"] = f"{error}; it comes with: {INSTALL[system.name]}"
    for r in range(-1, repeats):  # round -1 warms up: compilation, the optimiser's state
        limits = {d: max(best, gemm_limit(DTYPES[d])) for d, best in limits.items()}
        for i in range(len(ready)):
            row, peer = ready[(i + r) % len(ready)]
            speed, row["last_loss"], row["peak_rss_bytes"] = peer.train(steps)
            row["rounds"] = [*row["rounds"], speed] if r >= 0 else []
    for _, peer in ready:
        peer.pipe.send(0)
    ours = [row for row, _ in ready if row["name"] == "gpt2llama"]
    for row, _ in ready:
        row["tokens_per_second"] = speed = median(row["rounds"])
        row["fraction_of_limit"] = speed * row["flops_per_token"] / limits[row["dtype"]]
        row["ours_times"] = {  # how many times this system's speed ours is
            own["dtype"]: median(a / b for a, b in zip(own["rounds"], row["rounds"], strict=True))
            for own in ours
        }
    return {"gemm_flops": limits, "systems": rows}


def show(rows: list[Row]) -> None:
    table = Table("system", "dtype", "tokens/s", "of GEMM limit", *(f"ours in {d}" for d in ABLE))
    for row in rows:
        if "not_measured" in row:
            print(f"{row['name']} {row['dtype']} not measured: {row['not_measured']}")
            continue
        ratios = [f"{row['ours_times'][d]:.2f} x" if d in row["ours_times"] else "" for d in ABLE]
        speed, share = f"{row['tokens_per_second']:,.0f}", f"{row['fraction_of_limit']:.0%}"
        table.add_row(row["name"], row["dtype"], speed, share, *ratios)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--peers", default="hf,litgpt,plain", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of ours")
    parser.add_argument("--steps", type=int, default=10, help="timed, of each system a round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training.json"))
    args = parser.parse_args()
    asked, known = args.peers.split(","), {s.name for s in SYSTEMS} - {"gpt2llama"}
    if not known.issuperset(asked) or min(args.steps, args.repeats) < 1:
        parser.error(f"--peers are {', '.join(sorted(known))}; --steps and --repeats at least 1")
    ours = [s for s in SYSTEMS if s.name == "gpt2llama" and args.dtype in ("auto", s.dtype)]
    figures: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/training.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": CPU.get("cpu_name"),
        "avx512": CPU.get("avx512_f", False),
        "bf16": "bf16" in ABLE,
        "threads": torch.get_num_threads(),
        **measure(ours + [s for s in SYSTEMS if s.name in asked], args.steps, args.repeats),
    }
    figures["versions"] = {}
    for name in ("torch", "transformers", "litgpt"):
        with suppress(PackageNotFoundError):
            figures["versions"][name] = version(name)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    temporary.replace(args.out)
    show(figures["systems"])


if __name__ == "__main__":
    main()
