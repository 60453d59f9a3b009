"""Whether preferences and rewards are learned: sums by a tiny model from scratch, over seeds.

For each seed a model of 0.1M parameters learns sums of two numbers by next-token training, from a
text in which half of them are wrong. It is then tuned from the same weights twice: by GRPO, whose
reward is 1 for a right sum, and by DPO on right sums beside wrong ones. The sums that are scored
are in no training data. Reported: the figures before and after, and 95% intervals (Student's t) of
their differences over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from scipy import special

from gpt2llama.data.prepare import prepare
from gpt2llama.finetune import preference, reward
from gpt2llama.finetune.grpo import RewardConfig
from gpt2llama.finetune.preference import PreferenceConfig
from gpt2llama.finetune.settings import Tuning
from gpt2llama.model.presets import preset
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.config import RunConfig, TrainConfig
from gpt2llama.train.run import train
from gpt2llama.train.run_folder import read_metrics

SIZES = "vocab_size=264 max_seq_len=16 n_layers=2 d_model=64 d_ff=128 n_heads=4 n_kv_heads=4"
PLAIN = "batch_size=64 lr=0.003 optimizer=muon eval_every=none checkpoint_every=none"
GRPO = "group_size=8 max_new_tokens=4 kl=0.01 chat=false lr=2e-4 batch_size=16 warmup_steps=10"
DPO = "chat=false lr=1e-4 batch_size=16 warmup_steps=5"


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def one_seed(folder: Path, seed: int, numbers: int, plain_steps: int, steps: int) -> dict[str, Any]:
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    sums = [(a, b) for a in range(numbers) for b in range(numbers)]
    rng.shuffle(sums)
    held, known = sums[: len(sums) // 5], sums[len(sums) // 5 :]

    def wrong(total: int) -> int:
        return rng.choice([n for n in range(max(0, total - 9), total + 10) if n != total])

    texts = [{"text": f"{a}+{b}={n}"} for a, b in known * 8 for n in (a + b, wrong(a + b))]
    rng.shuffle(texts)
    data = prepare([write(folder / "sums.jsonl", texts)], train_bpe(["0"], 264), folder / "data")
    run = RunConfig(model=preset("zh-3m"), train=TrainConfig(), data=str(data.folder))
    same = f"seed={seed} dtype=fp32 device=cpu"
    run = run.set(f"{SIZES} {PLAIN} {same} compile=off steps={plain_steps}".split())
    train(run, folder / "plain")

    paths = {}
    for name, part in (("train", known), ("held-out", held)):
        lines = [
            {"prompt": f"{a}+{b}=", "answer": a + b, "chosen": f"{a + b}",
             "rejected": f"{wrong(a + b)}"} for a, b in part
        ]  # fmt: skip
        paths[name] = str(write(folder / f"{name}.jsonl", lines))
    files = {"data": paths["train"], "held_out": paths["held-out"]}
    often = f"{same} steps={steps} eval_every={max(1, steps // 5)} checkpoint_every=none".split()
    rewarded = Tuning(
        begin=str(folder / "plain"), **files, method=RewardConfig(), train=reward.DEFAULTS
    ).set([*GRPO.split(), *often])
    reward.tune_reward(rewarded, folder / "grpo")
    preferred = Tuning(
        begin=str(folder / "plain"), **files, method=PreferenceConfig(),
        train=preference.DEFAULTS,
    ).set([*DPO.split(), *often])  # fmt: skip
    preference.tune_preference(preferred, folder / "dpo")
    grpo, dpo = read_metrics(folder / "grpo"), read_metrics(folder / "dpo")
    sampled = [line["reward"] for line in grpo[1:]]
    few = max(1, steps // 10)
    return {
        "seed": seed,
        "grpo": {
            "held_out_reward": [grpo[0]["held_out_reward"], grpo[-1]["held_out_reward"]],
            "held_out_greedy": [grpo[0]["held_out_greedy"], grpo[-1]["held_out_greedy"]],
            "training_reward": [mean(sampled[:few]), mean(sampled[-few:])],
            "equal_groups": sum(line["equal_groups"] for line in grpo[1:]),
            "kl": grpo[-1].get("kl"),
        },
        "dpo": {
            name: [dpo[0][f"held_out_{name}"], dpo[-1][f"held_out_{name}"]]
            for name in ("margin", "accuracy", "loss", "chosen", "rejected")
        },
    }


def summary(pairs: list[list[float]]) -> dict[str, float]:
    """Before, after, and the difference with its interval."""
    differences = [after - before for before, after in pairs]
    n = len(differences)
    half = special.stdtrit(n - 1, 0.975) * stdev(differences) / math.sqrt(n) if n > 1 else math.nan
    middle = mean(differences)
    return {
        "before": mean(p[0] for p in pairs), "after": mean(p[1] for p in pairs),
        "difference": middle, "low": middle - half, "high": middle + half,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--numbers", type=int, default=20, help="below it; default: %(default)s")
    parser.add_argument("--plain-steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=150, help="of tuning; default: %(default)s")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    parser.add_argument("--out", type=Path, help="JSON with every seed's figures")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    found, begun = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.seeds):
            folder = (args.keep or Path(temporary)) / f"seed-{seed}"
            found.append(one_seed(folder, seed, args.numbers, args.plain_steps, args.steps))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    figures = {
        "command": f"python benchmarks/preference_reward.py --seeds {args.seeds} --numbers "
        f"{args.numbers} --plain-steps {args.plain_steps} --steps {args.steps}",
        "seconds": round(time.perf_counter() - begun, 1),
        "grpo_held_out_reward": summary([one["grpo"]["held_out_reward"] for one in found]),
        "grpo_held_out_greedy": summary([one["grpo"]["held_out_greedy"] for one in found]),
        "grpo_training_reward": summary([one["grpo"]["training_reward"] for one in found]),
        "dpo_held_out_margin": summary([one["dpo"]["margin"] for one in found]),
        "dpo_held_out_accuracy": summary([one["dpo"]["accuracy"] for one in found]),
        "seeds": found,
    }
    text = json.dumps(figures, indent=2) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
