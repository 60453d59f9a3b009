"""Does a teacher help? A small student on the data alone, or also on a larger model's word.

All students see the same number of tokens with the same settings; with `top_k`, which stores the
teacher's likeliest tokens, in windows that lie still. One teacher, several seeds of the students;
differences are paired by seed (evolve's statistics). What is equal is the data, not the computing:
a teacher's own training and its passes come on top, and their time is reported.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpt2llama.corpus import prepare_corpus
from gpt2llama.evolve.stats import compare
from gpt2llama.finetune.distill import DistillConfig, DistillRun, distill
from gpt2llama.model.presets import preset
from gpt2llama.train.config import SHORT_RUN, RunConfig
from gpt2llama.train.run import train

VOCAB = 512
TEACHER = preset("zh-3m").replace(
    vocab_size=VOCAB, max_seq_len=64, n_layers=3, d_model=128, d_ff=256
)
STUDENT = TEACHER.replace(n_layers=1, d_model=48, n_heads=2, n_kv_heads=1, d_ff=96)
ARMS: dict[str, dict[str, Any] | None] = {
    "data": None,
    "logits": {"alpha": 0.5, "temperature": 2.0},
    "logits only": {"alpha": 1.0, "temperature": 1.0},
    "top 16": {"alpha": 0.5, "temperature": 2.0, "top_k": 16},
}


def figures(out: Path) -> dict[str, float]:
    """Of the last evaluation, and the whole run's seconds."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    return {name: last[name] for name in ("bits_per_byte", "tokens", "seconds")}


def say(text: str) -> None:
    print(text, file=sys.stderr)


def measure(work: Path, arms: list[str], seeds: int, steps: int, teacher_steps: int) -> Any:
    """Goes on with what `work` has."""
    prepare_corpus(work, "sanguo", VOCAB, say)
    data = str((work / "data").resolve())
    cfg = SHORT_RUN.replace(compile="off", dtype="fp32", checkpoint_every=100)
    run = partial(RunConfig, data=data)
    taught = work / "teacher"
    train(run(model=TEACHER, train=cfg.replace(steps=teacher_steps)), taught, resume=True)
    result: dict[str, Any] = {"teacher": figures(taught), "students": {}}
    say(f"teacher {result['teacher']}")
    for seed in range(seeds):
        for arm in arms:
            out, settings = work / f"{arm.replace(' ', '-')}-{seed}", ARMS[arm]
            how = cfg.replace(steps=steps, seed=seed)
            if settings is None:
                train(run(model=STUDENT, train=how), out, resume=True)
            else:
                distilled = DistillConfig(teacher=str(taught.resolve()), **settings)
                student = DistillRun(model=STUDENT, train=how, data=data, distill=distilled)
                distill(student, out, resume=True)
            result["students"].setdefault(arm, {})[seed] = figures(out)
            say(f"{arm}, seed {seed}: {result['students'][arm][seed]}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("work", type=Path, help="a folder for the runs, taken up if it is there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["data", "logits"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of a student, 1,024 tokens each")
    parser.add_argument("--teacher-steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distillation.json"))
    args = parser.parse_args()
    arms = ["data", *(arm for arm in args.arms if arm != "data")]
    result = measure(args.work, arms, args.seeds, args.steps, args.teacher_steps)
    scores = {
        arm: {seed: found["bits_per_byte"] for seed, found in by_seed.items()}
        for arm, by_seed in result["students"].items()
    }
    analysis = compare(scores, [(arm, "data") for arm in arms[1:]])
    result |= {
        "command": shlex.join(["python", "benchmarks/distillation.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "analysis": asdict(analysis),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    table = Table("student", "bits per byte, by seed", "difference from data", "95%", "")
    table.add_row("data", " ".join(f"{value:.4f}" for value in scores["data"].values()))
    for row in analysis.comparisons:
        assert row.difference is not None
        span = "" if row.low is None else f"{row.low:+.4f} to {row.high:+.4f}"
        each = " ".join(f"{value:.4f}" for value in scores[row.name].values())
        table.add_row(row.name, each, f"{row.difference:+.4f}", span, row.verdict or "")
    Console().print(table)


if __name__ == "__main__":
    main()
