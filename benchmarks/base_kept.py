"""What instruction tuning costs the base: SmolLM2-135M with LoRA on 1,000 examples.

Held-out answers should get likelier, and text that has nothing to do with them hardly harder: bits
per byte of the Python reference, as `pydoc` carries it, before and after. README.md says more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import gpt2llama as g
from gpt2llama.finetune.assistant import Question, assistant
from gpt2llama.finetune.examples import to_example
from gpt2llama.finetune.instruct import SHORT_TUNE, InstructConfig, instruct
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.finetune.packing import in_order, pack
from gpt2llama.train.metrics import evaluate, evaluate_text
from gpt2llama.train.run_folder import read_metrics

BASE, ROW, WINDOW, SEED = "smollm2-135m", 512, 1024, 0
TUNE = SHORT_TUNE.replace(batch_size=2, seq_len=ROW, warmup_steps=10)
LORA = LoraConfig(rank=8, alpha=16)


def questions(examples: int, pilot: bool) -> tuple[list[Question], list[Question]]:
    """To learn from and to score. English ones alone, unless there are too few; a pilot scores
    training questions that it leaves out, so that what is held out decides nothing."""
    data, rng = assistant(), random.Random(SEED)
    parts = [[q for q in data.train if q.english == english] for english in (True, False)]
    for part in parts:
        rng.shuffle(part)
    ordered = [question for part in parts for question in part]
    if pilot:
        return ordered[:examples], ordered[examples : examples + 100]
    return ordered[:examples], [q for q in data.held_out if q.english]


def reference_text(size: int, pilot: bool) -> str:
    """`size` bytes of the Python reference; a pilot reads those that follow them."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics)).encode("utf-8")
    return text[size * pilot : size * (pilot + 1)].decode("utf-8", "ignore")


def write(path: Path, chosen: Sequence[Question]) -> Path:
    lines = [json.dumps({"messages": q.messages}, ensure_ascii=False) + "\n" for q in chosen]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def watched(what: str) -> Any:
    def watch(batches: Iterable[Any], count: int) -> Iterable[Any]:
        begun = time.monotonic()
        for number, batch in enumerate(batches):
            if number and number % 5 == 0:
                left = (time.monotonic() - begun) / number * (count - number)
                print(f"{what}: {number}/{count}, {left:.0f} s left", file=sys.stderr)
            yield batch

    return watch


def score(path: str | Path, chosen: Sequence[Question], text: str) -> dict[str, Any]:
    """Mean log-likelihood of the answers' tokens in nats, in all and by kind; bits per byte."""
    model, tokenizer = g.load(path)  # in bf16, as the file is and as it is used
    assert tokenizer is not None
    sums: dict[str, list[float]] = {}
    for kind in Counter(q.kind for q in chosen):
        examples = [to_example(tokenizer, q.messages) for q in chosen if q.kind == kind]
        nats, tokens = evaluate(model, in_order(pack(examples, ROW), 4, ROW))
        sums[kind] = [-nats, tokens]
    total = [sum(part) for part in zip(*sums.values(), strict=True)]
    found = evaluate_text(model, tokenizer, text, watch=watched("reference"), seq_len=WINDOW)
    return {
        "answer_log_likelihood": total[0] / total[1],
        "answer_tokens": total[1],
        "by_kind": {kind: nats / tokens for kind, (nats, tokens) in sums.items()},
        "bits_per_byte": found.bits_per_byte,
        "text_tokens": found.tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--examples", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--epochs", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1.5e-4, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=LORA.rank, help="default: %(default)s")
    parser.add_argument("--bytes", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--pilot", action="store_true", help="to choose settings: other data")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/base_kept.json"))
    args = parser.parse_args()
    taught, held_out = questions(args.examples, args.pilot)
    text = reference_text(args.bytes, args.pilot)
    lora = replace(LORA, rank=args.rank, alpha=2.0 * args.rank)
    before = score(BASE, held_out, text)
    print(json.dumps(before), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        begun = time.perf_counter()
        done = instruct(
            BASE,
            [(write(Path(folder, "train.jsonl"), taught), 1.0)],
            run,
            TUNE.replace(lr=args.lr),
            InstructConfig(epochs=args.epochs, held_out=0.0),
            lora=lora,
            say=lambda line: print(line, file=sys.stderr),
            report=lambda line, steps: print(
                f"step {line['step']}/{steps}: loss {line['loss']:.3f}", file=sys.stderr
            ),
        )
        seconds = time.perf_counter() - begun
        after = score(run, held_out, text)
        losses = [line["loss"] for line in read_metrics(run)]
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    result = {
        "command": shlex.join(["python", "benchmarks/base_kept.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "base": BASE,
        "taught": Counter(f"{q.kind}, {'English' if q.english else 'Chinese'}" for q in taught),
        "held_out": Counter(f"{q.kind}, {'English' if q.english else 'Chinese'}" for q in held_out),
        "text": f"pydoc topics of Python {platform.python_version()}, sha256 {digest[:16]}",
        "text_bytes": len(text.encode("utf-8")),
        "lora": lora.to_dict(),
        "train": TUNE.replace(lr=args.lr, steps=done.step).to_dict(),
        "tokens": done.tokens,
        "train_seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "before": before,
        "after": after,
        "likelihood_gain": after["answer_log_likelihood"] - before["answer_log_likelihood"],
        "perplexity": [math.exp(-one["answer_log_likelihood"]) for one in (before, after)],
        "bits_per_byte_change": after["bits_per_byte"] / before["bits_per_byte"] - 1,
    }
    print(json.dumps(result, indent=2))
    if not args.pilot:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
