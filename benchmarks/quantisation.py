"""What rounding costs models that we trained: int8 and int4 by RTN, GPTQ and AWQ.

Perplexity of held-out text, against the same weights in bf16, computed through the native kernel,
a few tokens a step, with keys and values in bf16: what decoding computes. GPTQ and AWQ are repeated
with other windows of the training text. Each RUN is a folder of `gpt2llama train` or `demo`.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from gpt2llama import Transformer, load
from gpt2llama.data.batches import IGNORED, TokenData, held_out_windows
from gpt2llama.generate.engine import new_cache, run
from gpt2llama.native import decoder
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.calibration import windows
from gpt2llama.quant.report import report
from gpt2llama.quant.scheme import QuantScheme
from gpt2llama.train.config import RunConfig

STEP = 4  # tokens: few enough that the kernel computes as for one
BITS = {"int8": QuantScheme(bits=8), "int4": QuantScheme(bits=4, group=32)}


@torch.inference_mode()
def perplexity(model: Transformer, text: list[int], bos: int | None) -> float:
    """Of the next tokens, in windows of the model's context."""
    if decoder(model) is None:
        sys.exit("there is no native kernel here, whose perplexity this would be")
    length = model.config.max_seq_len
    cache, nats, count = new_cache(model, 1, length, "bf16"), 0.0, 0
    for batch in held_out_windows(text, length, bos, 1):
        cache.truncate(0)
        for ids, targets in zip(
            batch.ids.split(STEP, 1), batch.targets.split(STEP, 1), strict=True
        ):
            logits = run(model, ids, cache, keep=ids.shape[1])
            nats += float(
                F.cross_entropy(logits[0], targets[0], ignore_index=IGNORED, reduction="sum")
            )
            count += int((targets != IGNORED).sum())
    return math.exp(nats / count)


def measure(folder: Path, tokens: int, seeds: int, calibration: int) -> list[dict[str, Any]]:
    model, tokenizer = load(folder, dtype=torch.float32)
    assert tokenizer is not None
    data = TokenData.open(RunConfig.read(folder / "config.toml").data)
    text = data.held_out[:tokens].tolist()
    train = data.train[: len(data.train)].tolist()
    bf16, _ = load(folder, dtype=torch.bfloat16)
    base = perplexity(bf16, text, tokenizer.bos_id)
    exact = perplexity(model, text, tokenizer.bos_id)
    rows = [{"weights": "fp32", "bits_per_weight": 32.0, "percent": [100 * (exact / base - 1)]}]
    for name, scheme in BITS.items():
        for method in ("rtn", "gptq", "awq"):
            row: dict[str, Any] = {"weights": name, "method": method, "percent": []}
            for seed in range(1 if method == "rtn" else seeds):
                how = scheme.replace(method=method)
                seen = windows(train, model.config.max_seq_len, calibration, seed)
                rounded = quantise(model, how, None if method == "rtn" else seen)
                row["percent"].append(
                    100 * (perplexity(rounded, text, tokenizer.bos_id) / base - 1)
                )
                row["bits_per_weight"] = report(model, rounded).bits_per_weight
            rows.append(row)
            print(f"{folder.name} {row}", file=sys.stderr)
    for row in rows:
        row |= {"model": folder.name, "bf16_perplexity": base}
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model", "weights", "method", "bits a weight", "perplexity against bf16, %", "beats RTN"
    )
    for row in rows:
        percent, method = row["percent"], row.get("method", "")
        spread = f" ± {stdev(percent):.3f}" if len(percent) > 1 else ""
        beats = ""
        if method in ("gptq", "awq"):
            (rtn,) = next(
                r["percent"]
                for r in rows
                if (r["model"], r["weights"], r.get("method"))
                == (row["model"], row["weights"], "rtn")
            )
            beats = f"{sum(p < rtn for p in percent)} of {len(percent)}"
        figure = f"{mean(percent):+.3f}{spread}"
        table.add_row(
            row["model"], row["weights"], method, f"{row['bits_per_weight']:.2f}", figure, beats
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--tokens", type=int, default=16384, help="of held-out text")
    parser.add_argument("--seeds", type=int, default=3, help="of calibration text")
    parser.add_argument("--calibration", type=int, default=128, help="windows of it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantisation.json"))
    args = parser.parse_args()
    rows = [
        row
        for run_ in args.runs
        for row in measure(run_, args.tokens, args.seeds, args.calibration)
    ]
    figures = {
        "command": shlex.join(["python", "benchmarks/quantisation.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main()
