"""How fast answers are learned: packed rows beside padded ones, and beside trl; see README.md.

All train zh-3m on the same examples, the shipped assistant's (each answer whole, or with
--as-demo what the demo learns of them), and count real tokens: neither the padding nor an
example's last token, which is only a target. Rounds run every system in turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import gpt2llama as g
from gpt2llama.data.batches import IGNORED, Batch
from gpt2llama.finetune.assistant import assistant, texts, to_learn
from gpt2llama.finetune.examples import Example, to_example
from gpt2llama.finetune.instruct import SHORT_TUNE, make_trainer, packed
from gpt2llama.machine import peak_rss
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.run_folder import RunFolder

CFG, SEED = g.preset("zh-3m"), 0
CONTEXT, ROWS, LR = CFG.max_seq_len, SHORT_TUNE.batch_size, SHORT_TUNE.lr
FOREVER = 1_000_000
Row = dict[str, Any]


class Clock:
    """Of a process that trains: waits for the word before a round's steps, then answers with the
    real tokens/s of all but the first, whose caches are still another system's. `real`: the
    tokens of each step's batch, in their order."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.real = pipe, list[int]()
        self.first = self.goal = 0

    def before(self, step: int) -> None:
        if step == self.goal:
            if not (steps := self.pipe.recv()):
                os._exit(0)  # trl's loop would go on
            self.first, self.goal = step + 1, step + 1 + steps

    def after(self, step: int) -> None:
        """`step`: how many are done."""
        if step == self.first:
            self.begun = time.perf_counter()
        if step == self.goal:
            seconds = time.perf_counter() - self.begun
            tokens = self.real[self.first : self.goal]
            self.pipe.send((sum(tokens) / seconds, mean(tokens), peak_rss()))


def ours(clock: Clock, system: System, folder: Path) -> None:
    """As `finetune instruct` trains; padded rows have an example each."""
    model, tokenizer = g.load(folder / "model", dtype=torch.float32)
    data = packed(read(folder), CONTEXT)
    if system.how != "packed":
        data = replace(data, rows=[[example] for row in data.rows for example in row])
    cfg = SHORT_TUNE.replace(batch_size=system.rows, steps=FOREVER)
    assert tokenizer is not None
    with tempfile.TemporaryDirectory() as run:
        trainer = make_trainer(model.train(), tokenizer, data, cfg, RunFolder(run))
    clock.pipe.send(None)
    for step in range(FOREVER):
        clock.before(step)
        batch = trainer.batches.batch(step)
        assert batch.documents is not None
        real = batch.documents > 0
        clock.real.append(int(real.sum()))
        if system.how != "packed":  # padding is on the right: without a mask it changes nothing
            width = int(real.sum(1).max()) if system.how == "padded to the longest" else CONTEXT
            batch = Batch(batch.ids[:, :width], batch.targets[:, :width])
        trainer.step([batch], LR)
        clock.after(step + 1)


def trl(clock: Clock, system: System, folder: Path) -> None:
    """SFTTrainer at its defaults, but for what `system` says, and without reports."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Rounds(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.before(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.after(state.global_step)

    examples = read(folder)
    pairs = [zip(e.ids, e.learned, strict=True) for e in examples]
    labels = [[i if learned else IGNORED for i, learned in pair] for pair in pairs]
    with tempfile.TemporaryDirectory() as run:
        cfg = SFTConfig(
            output_dir=run, per_device_train_batch_size=system.rows, learning_rate=LR,
            max_steps=FOREVER, use_cpu=True, report_to="none", save_strategy="no",
            disable_tqdm=True, **system.options,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32),
            args=cfg,
            train_dataset=Dataset.from_dict(
                {"input_ids": [e.ids for e in examples], "labels": labels}
            ),
            processing_class=AutoTokenizer.from_pretrained(folder / "hf"),
            callbacks=[Rounds()],
        )
        collate = trainer.data_collator

        def counted(features: list[dict[str, Any]]) -> Any:
            lengths = [f.get("seq_lengths") or [len(f["input_ids"])] for f in features]
            clock.real.append(sum(n - 1 for row in lengths for n in row))
            return collate(features)

        trainer.data_collator = counted
        clock.pipe.send(None)
        trainer.train()


class System(NamedTuple):
    name: str
    how: str
    rows: int
    run: Callable[[Clock, System, Path], None] = ours
    options: dict[str, Any] = {}  # noqa: RUF012  # of trl's config


def systems(an_example: float) -> list[System]:
    """an_example: its real tokens, from which follows how many rows are as much as ROWS packed."""
    as_many = round(ROWS * CONTEXT / an_example)
    padded = [
        System("gpt2llama", f"padded to the {end}", rows)
        for end in ("longest", "context")
        for rows in (ROWS, as_many)
    ]
    packing = {"packing": True, "max_length": CONTEXT}
    faster = {"gradient_checkpointing": False}
    return [
        System("gpt2llama", "packed", ROWS),
        *padded,
        System("trl", "defaults", 8, trl),
        System("trl", "packing", 8, trl, packing),
        System("trl", "as many examples, no checkpointing", as_many, trl, faster),
        System("trl", "packing, no checkpointing", 8, trl, packing | faster),
    ]


def write_inputs(folder: Path, most: int | None, as_demo: bool) -> dict[str, float]:
    """The model in our format and Hugging Face's, and the examples; what these are like."""
    tokenizer = train_bpe([texts()], CFG.vocab_size)
    torch.manual_seed(SEED)
    model = g.Transformer(CFG.replace(vocab_size=tokenizer.vocab_size))
    g.save(model, tokenizer, folder / "model")
    g.save(model, tokenizer, folder / "hf", format="hf")
    asked = assistant().train
    random.Random(SEED).shuffle(asked)
    if as_demo:
        examples = to_learn(tokenizer, asked[:most], CONTEXT)
        random.Random(SEED).shuffle(examples)
    else:
        examples = [to_example(tokenizer, question.messages) for question in asked[:most]]
        examples = [example for example in examples if len(example.ids) - 1 <= CONTEXT]
    lines = [[example.ids, example.learned] for example in examples]
    (folder / "examples.json").write_text(json.dumps(lines), encoding="utf-8")
    lengths = [len(example.ids) - 1 for example in examples]
    rows = packed(examples, CONTEXT).rows
    return {
        "examples": len(examples),
        "mean_tokens": mean(lengths),
        "longest": max(lengths),
        "packed_share": sum(lengths) / len(rows) / CONTEXT,
    }


def read(folder: Path) -> list[Example]:
    lines = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    return [Example(ids, learned) for ids, learned in lines]


class Peer:
    """A system in a process of its own."""

    def __init__(self, system: System, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        context.Process(target=work, args=(far, system, folder), daemon=True).start()
        if error := self.pipe.recv():
            raise ModuleNotFoundError(error)

    def train(self, steps: int) -> tuple[float, float, int | None]:
        """Real tokens per second, and per step; the process's peak memory in bytes."""
        self.pipe.send(steps)
        figures: tuple[float, float, int | None] = self.pipe.recv()
        return figures


def work(pipe: Connection, system: System, folder: Path) -> None:
    sys.stdout = sys.stderr  # trl prints its logs
    try:
        system.run(Clock(pipe), system, folder)
    except ModuleNotFoundError as error:
        pipe.send(str(error))


def measure(asked: list[System], folder: Path, steps: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    ready: list[tuple[Row, Peer]] = []
    for system in asked:
        rows.append(row := Row(name=system.name, how=system.how, rows=system.rows))
        try:
            ready.append((row, Peer(system, folder)))
        except ModuleNotFoundError as error:
            row["not_measured"] = f"{error}; it comes with: pip install trl"
    for r in range(-1, repeats):  # round -1 warms up
        for i in range(len(ready)):
            row, peer = ready[(i + r) % len(ready)]
            speed, row["tokens_per_step"], row["peak_rss_bytes"] = peer.train(steps)
            row["rounds"] = [*row["rounds"], speed] if r >= 0 else []
        print(f"round {r + 1} of {repeats}", file=sys.stderr)
    for _, peer in ready:
        peer.pipe.send(0)
    for row, _ in ready:
        row["tokens_per_second"] = median(row["rounds"])
        pairs = zip(rows[0]["rounds"], row["rounds"], strict=True)
        row["ours_times"] = median(a / b for a, b in pairs)  # how many times its speed packing is
    return rows


def cells(rows: list[Row]) -> list[list[str]]:
    return [
        [row["name"], row["how"], str(row["rows"]), f"not measured: {row['not_measured']}", "", ""]
        if "not_measured" in row
        else [
            row["name"], row["how"], str(row["rows"]), f"{row['tokens_per_step']:,.0f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['ours_times']:.2f} x",
        ]
        for row in rows
    ]  # fmt: skip


HEAD = ["system", "how", "rows", "real tokens a step", "real tokens/s", "packed / it"]


def markdown(figures: dict[str, Any]) -> str:
    about = figures["data"]
    lines = [
        f"**zh-3m on {about['examples']:,} examples of {about['mean_tokens']:.1f} tokens (at most "
        f"{about['longest']}), {figures['threads']} threads"
        + (f"; {figures['note']}" if figures["note"] else "")
        + "**",
        "",
        f"| {' | '.join(HEAD)} |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(f"| {' | '.join(row)} |" for row in cells(figures["systems"])),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="timed, of each system a round")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--examples", type=int, help="at most; all unless given")
    parser.add_argument("--as-demo", action="store_true", help="most answers cut, some in chats")
    parser.add_argument("--note", default="", help="kept with the figures: what else ran")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/instruct_speed.json"))
    args = parser.parse_args()
    if min(args.steps, args.repeats) < 1:
        parser.error("--steps and --repeats at least 1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        about = write_inputs(folder, args.examples, args.as_demo)
        asked = systems(about["mean_tokens"])
        rows = measure(asked, folder, args.steps, args.repeats)
    cpu = torch.cpu.get_capabilities()
    figures: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/instruct_speed.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": args.note,
        "cpu": cpu.get("cpu_name"),
        "avx512": cpu.get("avx512_f", False),
        "threads": torch.get_num_threads(),
        "data": about,
        "systems": rows,
        "versions": {},
    }
    for name in ("torch", "transformers", "trl"):
        with suppress(PackageNotFoundError):
            figures["versions"][name] = version(name)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(markdown(figures), encoding="utf-8")
    table = Table(*HEAD)
    for row in cells(rows):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
