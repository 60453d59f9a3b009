"""Decoding against the bound that `gpt2llama plan NAME --this-machine` gives: none may exceed it.

Random weights, fp32, batch 1, greedy. The machine's limits are measured before and after each
model over as many bytes as its step reads, and the better ones bound it.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from gpt2llama import ModelConfig, Transformer, generate_ids, preset
from gpt2llama.plan import Hardware, decode_step, weight_bytes
from gpt2llama.train.run import pick_device
from gpt2llama.train.speed import this_machine

MODELS = {
    "zh-3m": preset("zh-3m"),
    "llama-25m": preset("zh-3m").replace(
        vocab_size=16384,
        max_seq_len=1024,
        n_layers=6,
        n_heads=8,
        n_kv_heads=2,
        d_model=512,
        d_ff=1408,
    ),
    "gpt2": preset("gpt2"),
}
PROMPT = 8  # tokens


def decode_speed(cfg: ModelConfig, tokens: int, repeats: int) -> float:
    """Tokens a second of the best of `repeats` continuations, without the prompt's own pass."""
    model, best = Transformer(cfg).eval().to(pick_device("auto")), 0.0
    prompt = [list(range(1, 1 + PROMPT))]
    generate_ids(model, prompt, max_new_tokens=4)  # warms up
    for _ in range(repeats):
        times = []
        for count in (1, 1 + tokens):
            begun = time.perf_counter()
            generate_ids(model, prompt, max_new_tokens=count)
            times.append(time.perf_counter() - begun)
        best = max(best, tokens / (times[1] - times[0]))
    return best


def bound(cfg: ModelConfig, tokens: int, machine: Hardware) -> tuple[float, str]:
    """Tokens a second at most, over the contexts that these tokens see, and what sets it."""
    contexts = range(PROMPT + 1, PROMPT + 1 + tokens)
    bounds = [decode_step(cfg, n, 1, "fp32", "fp32").on(machine) for n in contexts]
    return tokens / sum(1 / each.tokens_per_second for each in bounds), bounds[-1].limit


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = parser.parse_args()
    if not 1 <= args.tokens <= 128 - PROMPT or args.repeats < 1:
        parser.error(f"--tokens must be 1 to {128 - PROMPT}, --repeats at least 1")
    names = ("model", "weights, MB", "GB/s", "tokens/s", "bound", "limit", "of the bound")
    table, exceeded = Table(*names), []
    for name, cfg in MODELS.items():
        read = decode_step(cfg, PROMPT + args.tokens, 1, "fp32", "fp32").bytes
        before = this_machine(read)
        speed = decode_speed(cfg, args.tokens, args.repeats)
        after = this_machine(read)
        machine = Hardware(
            name=before.name,
            bandwidth=max(before.bandwidth, after.bandwidth),
            flops=max(before.flops, after.flops),
            memory=None,
        )
        most, limit = bound(cfg, args.tokens, machine)
        if speed > most:
            exceeded.append(name)
        table.add_row(
            name,
            f"{weight_bytes(cfg, 'fp32') / 1e6:,.0f}",
            f"{machine.bandwidth / 1e9:.1f}",
            f"{speed:,.1f}",
            f"{most:,.1f}",
            limit,
            f"{speed / most:.0%}",
        )
    device = pick_device("auto")
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    Console().print(table)
    if exceeded:
        sys.exit(f"faster than the bound: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
