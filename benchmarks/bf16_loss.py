"""What computing in bf16 costs: the loss of the demo's recipe after some steps, beside fp32's.

On a CPU without bf16 its products are simulated: operands and result in bf16, added up in fp32, as
such CPUs do it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2llama import Transformer, preset
from gpt2llama.data.batches import PackedBatches, TokenData, held_out_windows
from gpt2llama.demo import RECIPE
from gpt2llama.machine import bf16_if_native
from gpt2llama.tokenizer import load_tokenizer
from gpt2llama.train.config import learning_rate
from gpt2llama.train.metrics import evaluate
from gpt2llama.train.optim import Muon
from gpt2llama.train.step import Step

CFG = preset("zh-3m")
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
NATIVE = bf16_if_native(torch.device("cpu")) == torch.bfloat16


class SimulatedBf16(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and args[0].dtype == torch.bfloat16:
            wide = (a.float() if isinstance(a, torch.Tensor) else a for a in args)
            return func(*wide, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def losses(folder: Path, dtype: str, steps: int) -> dict[str, float]:
    """Nats per token: the mean of the last 50 steps', and of the held-out text."""
    data = TokenData.open(folder)
    cfg = RECIPE.replace(steps=steps, dtype=dtype, device="cpu")
    batches = PackedBatches(data, cfg.batch_size, CFG.max_seq_len, cfg.seed)
    torch.manual_seed(cfg.seed)
    step = Step(Transformer(CFG), cfg, compiled=False)
    for optimizer in step.optimizers:
        if isinstance(optimizer, Muon):
            optimizer.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    seen, begun = [], time.perf_counter()
    for i in range(steps):
        seen.append(step([batches.batch(i)], learning_rate(cfg, i))[0])
        if not math.log2(i + 1) % 1 or (i + 1) % 50 == 0:
            took = time.perf_counter() - begun
            print(f"{dtype} step {i + 1}/{steps} loss {seen[-1]:.4f} {took:.0f} s", flush=True)
    bos = load_tokenizer(folder / "tokenizer").bos_id
    nats, tokens = evaluate(step.model, held_out_windows(data.held_out, CFG.max_seq_len, bos, 32))
    return {"training": sum(seen[-50:]) / len(seen[-50:]), "held_out": nats / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("data", type=Path, help="what data prepare wrote: a demo's DIR/data")
    parser.add_argument("--steps", type=int, default=500, help="default: %(default)s")
    args = parser.parse_args()
    fp32 = losses(args.data, "fp32", args.steps)
    if NATIVE:
        bf16 = losses(args.data, "bf16", args.steps)
    else:
        with SimulatedBf16():
            bf16 = losses(args.data, "bf16", args.steps)
    ratio = {name: bf16[name] / fp32[name] - 1 for name in fp32}
    figures = {"steps": args.steps, "simulated": not NATIVE, "fp32": fp32, "bf16": bf16}
    print(json.dumps(figures | {"relative_difference": ratio}, indent=2))


if __name__ == "__main__":
    main()
