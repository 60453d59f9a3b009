"""The main job in one function: a Chinese model, from text to one that answers, in minutes."""

from __future__ import annotations

import bz2
import itertools
import lzma
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from .atomic import new_folder, write_text
from .corpus import corpus_texts, prepare_corpus
from .data.batches import TokenData
from .errors import FileError, InputError, counted
from .finetune.assistant import Score, asked_second, assistant, to_learn
from .finetune.assistant import score as score_answers
from .finetune.assistant import texts as assistant_texts
from .finetune.instruct import make_trainer as make_trainer_of_answers
from .finetune.instruct import packed
from .generate import stream
from .generate.chat import Chat
from .machine import gemm_limit
from .model.presets import preset
from .plan import flops_per_token
from .train.config import SHORT_RUN, RunConfig
from .train.metrics import evaluate, evaluate_text
from .train.run import WORTH_COMPILING, draw_curve, make_trainer, pick_device
from .train.run_folder import RunFolder, read_metrics
from .train.step import can_compile, computing_dtype
from .train.trainer import Progress, Trainer
from .weights import load
from .weights.checkpoint import write_model

if TYPE_CHECKING:
    from .model.transformer import Transformer
    from .tokenizer import Tokenizer

MODEL = preset("zh-3m")
PROMPT = "却说曹操"
PROBE = 12  # steps that are timed first: they lie in the warm-up
SAVE_EVERY = 45  # seconds
MAX_EPOCHS, TUNE_EPOCHS = 10, 12  # past that a model of this size learns by heart
# For some 600 steps over a few epochs (docs/experiments/LOG.md, 2026-12-01); open until timed.
TRAIN = SHORT_RUN.replace(momentum=0.9, weight_decay=0.7, steps=1_000_000)
TUNE = TRAIN.replace(batch_size=32, lr=4e-3)
QUESTIONS = ("你好", "RoPE 是什么？", "为什么要用 KV 缓存？", "37+48等于多少？", "明天会下雨吗？")


@dataclass(frozen=True)
class DemoResult:
    """bits_per_byte of the raw held-out text, by the model and by compressors that know the
    training text; seconds from the first batch to the final weights."""

    folder: Path
    corpus: str
    held_out_bytes: int
    bits_per_byte: float
    xz: float
    bz2: float
    train_seconds: float
    tokens_per_second: float
    tokens: int
    epochs: float
    sample: str
    tune_seconds: float = 0.0
    score: Score | None = None  # of the held-out questions, if it was tuned
    second: float | None = None  # the share of wordings right as a chat's second question
    answers: tuple[tuple[str, str], ...] = ()  # to QUESTIONS


def demo(
    out: str | Path,
    minutes: float,
    *,
    tune: bool = True,
    say: Callable[[str], None] = lambda text: None,
    report: Callable[[dict[str, Any], int], None] = lambda line, steps: None,
    write: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Trains zh-3m in the folder `out` for at most `minutes`, scores it and lets it write; then,
    with `tune`, teaches it to answer for as long again at most, and asks it.

    say: one line of what is going on; report: a line of metrics.jsonl, and the steps in all once
    they are settled, before that 0; write: a piece of the sample. Called again on its folder, it
    goes on where it was stopped and ends with an undisturbed run's numbers. Raises what training
    raises.
    """
    if not 0 < minutes < 10_000:
        raise InputError(f"--minutes {minutes:g} must be above 0 and below 10,000")
    out = Path(out)
    _check_folder(out)
    with RunFolder(out, resume=True) as folder:
        also = [assistant_texts()] if tune else []
        corpus = prepare_corpus(folder.path, "sanguo", MODEL.vocab_size, say, also)
        trainer = _plan(folder, minutes, say, report)
        progress = trainer.run()
        draw_curve(folder)
    model, tokenizer = load(out)
    assert tokenizer is not None
    begun = time.perf_counter()
    held_out = (out / "data" / "held-out.txt").read_bytes().decode("utf-8")
    score = evaluate_text(model, tokenizer, held_out)
    seconds = progress.seconds + time.perf_counter() - begun
    write(PROMPT)
    pieces = [PROMPT]
    settings: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    room = model.config.max_seq_len - len(tokenizer.encode(PROMPT)) - 1
    for piece in stream(model, tokenizer, PROMPT, max_new_tokens=room, **settings):
        write(piece)
        pieces.append(piece)
    write("\n")
    known = "\n".join(corpus_texts(out)).encode("utf-8")[: -score.bytes]
    tuned = _tune(out, model, tokenizer, minutes, say, report, write) if tune else {}
    return DemoResult(
        folder=out,
        corpus=corpus,
        held_out_bytes=score.bytes,
        bits_per_byte=score.bits_per_byte,
        xz=_conditional_bits(_xz, known, held_out),
        bz2=_conditional_bits(bz2.compress, known, held_out),
        train_seconds=seconds,
        tokens_per_second=median(line["tokens_per_s"] for line in read_metrics(out)),
        tokens=progress.tokens,
        epochs=progress.tokens / len(TokenData.open(out / "data").train),
        sample="".join(pieces),
        **tuned,
    )


def _tune(
    out: Path,
    model: Transformer,
    tokenizer: Tokenizer,
    minutes: float,
    say: Callable[[str], None],
    report: Callable[[dict[str, Any], int], None],
    write: Callable[[str], None],
) -> dict[str, Any]:
    """In out/tune, with its own plan; the tuned model becomes what `out` loads as."""
    data, steps = assistant(), [0]
    seq_len = model.config.max_seq_len
    prepared = packed(to_learn(tokenizer, data.train, seq_len), seq_len)
    say(
        f"tuning: {counted(prepared.examples, 'example')} in {counted(len(prepared.rows), 'row')} "
        f"of {seq_len} tokens"
    )
    with RunFolder(out / "tune", resume=True) as folder:
        settled = folder.path / "config.toml"
        compiling = RunConfig.read(out / "config.toml").train.compile
        cfg = RunConfig.read(settled).train if settled.exists() else TUNE.replace(compile=compiling)
        compiled = cfg.compile == "on"
        trainer = make_trainer_of_answers(
            model.train(), tokenizer, prepared, cfg, folder, compiled=compiled,
            report=lambda line: report(line, steps[0]),
        )  # fmt: skip
        if settled.exists():
            steps[0] = cfg.steps
        else:
            most = TUNE_EPOCHS * len(prepared.rows) // cfg.batch_size
            _settle(trainer, steps, most, cfg.batch_size * seq_len, minutes * 60)
            run = RunConfig(model=model.config, train=trainer.cfg, data="assistant", begin=str(out))
            folder.write_text("config.toml", run.to_toml())
        epochs = steps[0] * cfg.batch_size / len(prepared.rows)
        say(f"tuning: {counted(steps[0], 'step')}, {epochs:.1f} epochs")
        progress = trainer.run()
        draw_curve(folder)
    target = out / "checkpoints" / "tuned"
    if not target.exists():
        with new_folder(target) as place:
            write_model(place, model, tokenizer)
    write_text(out / "latest", target.name + "\n", overwrite=True)
    model, _ = load(out)
    say("asking it what it has not seen")
    score = score_answers(model, tokenizer, data.held_out)
    seconds = asked_second(tokenizer, data.held_out, seq_len)
    second = score_answers(model, tokenizer, seconds).wordings if seconds else None
    answers = []
    for question in QUESTIONS:
        write(f"\n问：{question}\n答：")
        answer = ""
        for piece in Chat(model, tokenizer, max_new_tokens=64).say(question):
            write(piece)
            answer += piece
        answers.append((question, answer))
    return {
        "tune_seconds": progress.seconds,
        "score": score,
        "second": second,
        "answers": tuple(answers),
    }


def _settle(
    trainer: Trainer, steps: list[int], most: int, a_step: int, seconds: float, after: float = 0.0
) -> float:
    """Runs the first steps, a quarter at most, and settles by their tokens/s, which it gives, how
    many there will be.

    a_step: its tokens. after: of the seconds, those that the steps must leave.
    """
    speed = 0.0

    def planned(done: Progress) -> int:
        nonlocal speed
        lines = read_metrics(trainer.folder.path)[min(PROBE, done.step // 3) :]
        speed = median(line["tokens_per_s"] for line in lines)
        left = 0.95 * (seconds - after - done.seconds) * speed / a_step
        return min(most, done.step + max(1, int(left)))

    steps[0] = planned(trainer.run(until=PROBE))
    trainer.cfg = trainer.cfg.replace(checkpoint_every=max(1, int(steps[0] * SAVE_EVERY / seconds)))
    if steps[0] > 10 * PROBE:  # the first steps are slow; in a quarter no rate has fallen
        done = trainer.run(until=steps[0] // 4)
        steps[0] = max(planned(done), shortest(done.step))
    trainer.cfg = trainer.cfg.replace(steps=steps[0])
    return speed


def shortest(timed: int) -> int:
    """Steps of the shortest plan whose rate is constant in its first `timed` ones."""
    return math.ceil(timed / (1 - TUNE.decay))


def _check_folder(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()) and not (out / "corpus.jsonl").exists():
        raise FileError(f"{out} is in use, and not by a demo; name another --out")


def _plan(
    folder: RunFolder,
    minutes: float,
    say: Callable[[str], None],
    report: Callable[[dict[str, Any], int], None],
) -> Trainer:
    """The minutes become a number of steps once, by timing the first ones; config.toml keeps it,
    and before that what a stopped beginning goes on with."""
    steps = [0]
    begun = folder.path / "config.toml"
    run = RunConfig.read(begun) if begun.exists() else _begin(folder, minutes)
    trainer = make_trainer(run, folder, lambda line: report(line, steps[0]))
    if run.train.steps != TRAIN.steps:
        steps[0] = run.train.steps
        say(f"going on with {counted(steps[0], 'step')}, settled before")
        return trainer
    how = "compiling and timing" if run.train.compile == "on" else "timing"
    say(f"{how} the first steps")
    trainer.run(until=PROBE)
    assert trainer.held_out is not None
    mark = time.perf_counter()
    evaluate(trainer.model, itertools.islice(trainer.held_out.batches(), 2))
    scored = 2 * 4096 / (time.perf_counter() - mark)  # tokens/s
    data = TokenData.open(run.data)
    once = len(data.held_out) / scored  # seconds
    cheap = once < 0.01 * minutes * 60
    if not cheap:
        trainer.held_out = None  # the one score at the end must do
    a_step = run.train.batch_size * run.seq_len
    most = MAX_EPOCHS * len(data.train) // a_step
    after = (3 if cheap else 1.5) * once + 1
    speed = _settle(trainer, steps, most, a_step, minutes * 60, after)
    if cheap:
        trainer.cfg = trainer.cfg.replace(eval_every=max(1, steps[0] // 8))
    folder.write_text("config.toml", replace(run, train=trainer.cfg).to_toml())
    epochs = steps[0] * a_step / len(data.train)
    say(f"{speed:,.0f} tokens/s: {counted(steps[0], 'step')}, {epochs:.1f} epochs")
    return trainer


def _begin(folder: RunFolder, minutes: float) -> RunConfig:
    """Settles whether to compile and to drop out, by the machine's speed, for all of a run."""
    data = folder.path.resolve() / "data"
    tokens = len(TokenData.open(data).train)
    dtype = computing_dtype(TRAIN, torch.device(pick_device(TRAIN.device)))
    flops = 0.4 * gemm_limit(dtype) * minutes * 60  # a guess at what fits
    guess = flops / flops_per_token(MODEL) / tokens  # epochs
    compiled = can_compile() and flops > WORTH_COMPILING
    run = RunConfig(
        model=MODEL.replace(dropout=0.15 if guess > 4 else 0.0),
        train=TRAIN.replace(compile="on" if compiled else "off"),
        data=str(data),
    )
    folder.write_text("config.toml", run.to_toml())
    return run


def _xz(text: bytes) -> bytes:
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)


def _conditional_bits(compress: Callable[[bytes], bytes], known: bytes, text: str) -> float:
    """Bits per byte of `text` for a compressor that has read `known` before it."""
    new = text.encode("utf-8")
    return 8 * (len(compress(known + new)) - len(compress(known))) / len(new)
