"""Runs of instruction tuning: what is learned, resumed, refused."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import gpt2llama as g
from gpt2llama.cli._progress import TrainingProgress
from gpt2llama.errors import ConfigError, DataError, InputError
from gpt2llama.finetune.examples import Example
from gpt2llama.finetune.instruct import SHORT_TUNE, InstructConfig, InstructRun, instruct, packed
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.generate.chat import Chat
from gpt2llama.model.presets import preset
from gpt2llama.tokenizer import train_bpe
from gpt2llama.train.config import to_toml
from gpt2llama.train.run_folder import read_metrics
from gpt2llama.train.step import can_compile
from gpt2llama.train.trainer import Interrupted

PAIRS = [("甲是什么", "它是一"), ("乙是什么", "它是二"), ("丙呢", "三个"), ("What is D?", "four")]
TRAIN = SHORT_TUNE.replace(
    steps=1, lr=5e-3, batch_size=2, seq_len=40, warmup_steps=2, dtype="fp32", device="cpu"
)
ALL = InstructConfig(epochs=3, held_out=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_bpe(["".join(a + b for a, b in PAIRS) * 20], 320)
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 32, "d_ff": 48, "n_heads": 2}
    cfg = preset("zh-3m").replace(vocab_size=tokenizer.vocab_size, max_seq_len=64, **sizes)
    torch.manual_seed(0)
    g.save(g.Transformer(cfg.replace(dropout=0.1)), tokenizer, folder / "model")
    lines = [json.dumps({"instruction": a, "output": b}, ensure_ascii=False) for a, b in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(lines * 6) + "\n", encoding="utf-8")
    return folder


def figures(run: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in line.items() if k not in clock} for line in read_metrics(run)]


def test_it_learns_to_answer(base: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = [(base / "pairs.jsonl", 1.0)]
    train = TRAIN.replace(lr=1e-2, batch_size=4)
    done = instruct(base / "model", data, tmp_path / "run", train, ALL, steps=250, say=said.append)
    assert done.step == 250
    assert "24 conversations an epoch" in said[0]
    model, tokenizer = g.load(tmp_path / "run")
    assert tokenizer is not None
    for question, answer in PAIRS:
        assert "".join(Chat(model, tokenizer).say(question)) == answer


def test_rows_are_as_long_as_the_longest_example_needs() -> None:
    def of(*lengths: int) -> list[Example]:
        return [Example([n] * (n + 1), [True] * (n + 1)) for n in lengths]

    for lengths, held, context, expected in (
        ((30, 40, 30), (20,), 8192, 512),
        ((30, 700), (20,), 8192, 700),
        ((30, 40), (900,), 8192, 900),
        ((30, 40), (20,), 64, 64),
    ):
        found = packed(of(*lengths), context, of(*held), 3).in_short_rows()
        assert (found.seq_len, found.skipped, found.examples) == (expected, 3, len(lengths))
        for rows, given in ((found.rows, lengths), (found.held_out, held)):
            assert sorted(e.ids[0] for row in rows for e in row) == sorted(given)
            assert all(sum(len(e.ids) - 1 for e in row) <= expected for row in rows)


@pytest.mark.parametrize(
    ("neftune", "lora", "seq_len"),
    [(None, None, 40), (5.0, None, None), (5.0, LoraConfig(rank=4, dropout=0.1), 40)],
)
def test_resumed_is_undisturbed(
    base: Path,
    neftune: float | None,
    lora: LoraConfig | None,
    seq_len: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit: dropout's and the noise's random numbers, the order of rows, the best score."""
    monkeypatch.setattr("gpt2llama.finetune.instruct.SHORTEST_ROWS", 45)
    train = TRAIN.replace(eval_every=4, checkpoint_every=5, seq_len=seq_len)
    how = ALL.replace(held_out=0.25, neftune=neftune)
    data: Any = [(base / "pairs.jsonl", 1.5)]
    settings: Any = {"steps": 16, "lora": lora}
    said: list[str] = []
    instruct(base / "model", data, tmp_path / "whole", train, how, say=said.append, **settings)
    assert f"of {seq_len or 45} tokens" in said[0]

    def stop(line: dict[str, Any], steps: int) -> None:
        if line["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        instruct(base / "model", data, tmp_path / "run", train, how, report=stop, **settings)
    other = how.replace(neftune=1.0)
    with pytest.raises(ConfigError, match="was begun with neftune"):
        instruct(base / "model", data, tmp_path / "run", train, other, resume=True, **settings)
    instruct(base / "model", data, tmp_path / "run", train, how, resume=True, **settings)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert "held_out_loss" in figures(tmp_path / "run")[-1]
    assert "bits_per_byte" not in figures(tmp_path / "run")[-1]  # answers alone have no bytes
    weights = [g.load(tmp_path / name)[0].state_dict() for name in ("run", "whole")]
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())


def test_an_adapters_run_loads_as_the_tuned_model(base: Path, tmp_path: Path) -> None:
    """Only adapters are stored; loaded, it is the base with them merged."""
    data: Any = [(base / "pairs.jsonl", 1.0)]
    train = TRAIN.replace(lr=2e-2, batch_size=4)
    lora = LoraConfig(rank=8, alpha=16)
    instruct(base / "model", data, tmp_path / "run", train, ALL, steps=40, lora=lora)
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-000040").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    model, before = g.load(tmp_path / "run")[0], g.load(base / "model")[0].state_dict()
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {n for n in before if n.endswith("_proj.weight")}
    losses = [line["loss"] for line in figures(tmp_path / "run")]
    assert sum(losses[-8:]) < sum(losses[:8]) - 0.5  # a random base learns little by adapters


def test_noise_is_for_training_alone(base: Path, tmp_path: Path) -> None:
    data: Any = [(base / "pairs.jsonl", 1.0)]
    how = ALL.replace(held_out=0.25)
    runs = {}
    for neftune in (None, 5.0):
        train = TRAIN.replace(eval_every=1, lr=1e-12, warmup_steps=0)
        out = tmp_path / str(neftune)
        instruct(base / "model", data, out, train, how.replace(neftune=neftune), steps=2)
        runs[neftune] = figures(out)
    assert runs[None][0]["loss"] != runs[5.0][0]["loss"]
    assert runs[None][0]["held_out_loss"] == pytest.approx(runs[5.0][0]["held_out_loss"], abs=1e-6)


def test_refused(base: Path, tmp_path: Path) -> None:
    data: Any = [(base / "pairs.jsonl", 1.0)]
    with pytest.raises(InputError, match="a weight must be above 0"):
        instruct(base / "model", [(base / "pairs.jsonl", 0.0)], tmp_path / "a", TRAIN)
    with pytest.raises(DataError, match="have more than 4 tokens"):
        instruct(base / "model", data, tmp_path / "b", TRAIN.replace(seq_len=4))
    with pytest.raises(ConfigError, match="seq_len 65 is above"):
        instruct(base / "model", data, tmp_path / "c", TRAIN.replace(seq_len=65))


def test_command(run: Any, base: Path, tmp_path: Path) -> None:
    pairs, out = base / "pairs.jsonl", tmp_path / "run"
    settings = [f"--set={key}" for key in ("batch_size=2", "seq_len=40", "device=cpu")]
    begin = ("finetune", "instruct", base / "model")
    command = [*begin, "--data", f"{pairs}:0.5", "--out", out, "--epochs", "2", *settings]
    result = json.loads(run(*command, "--json")[0])
    assert result["run"] == str(out)
    assert result["step"] == len(read_metrics(out)) > 1
    assert "already used" in run(*command, code=1)[1]
    bad = [*begin, "--data", f"{pairs}:much", "--out", tmp_path / "b"]
    assert "the weight 'much' is no number" in run(*bad, code=1)[1]
    odd = [*begin, "--data", pairs, "--out", tmp_path / "c", "--set", "lrr=1"]
    assert "did you mean 'lr'" in run(*odd, code=1)[1]
    alone = [*begin, "--data", pairs, "--out", tmp_path / "d", "--lora-alpha", "4"]
    assert "--lora-alpha is of adapters; add --lora RANK" in run(*alone, code=1)[1]
    lora = ("--lora", 4, "--lora-modules")
    first = [*begin, "--data", pairs, "--out", tmp_path / "e", *settings, *lora]
    assert "nothing_such" in run(*first, "nothing_such", code=1)[1]
    assert not (tmp_path / "e").exists()  # so that the command can be mended


def test_ctrl_c_keeps_a_checkpoint(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpt2llama.finetune.instruct as module

    def interrupted(*_: Any, **__: Any) -> None:
        raise Interrupted("stopped after step 3")

    monkeypatch.setattr(module, "instruct", interrupted)
    what = (base / "model", "--data", base / "pairs.jsonl", "--out", tmp_path / "run")
    said = f"finetune instruct --out {tmp_path / 'run'} --resume"
    assert said in run("finetune", "instruct", *what, code=130)[1]


@pytest.mark.parametrize("lora", [[], ["--lora", "4", "--lora-alpha", "4", "--neftune", "5"]])
def test_the_folder_is_enough_to_go_on(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: list[str]
) -> None:
    """From another folder, too; it ends as an undisturbed run."""

    class Shown(TrainingProgress):
        def update(self, line: dict[str, Any], steps: int) -> None:
            super().update(line, steps)
            if line["step"] == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(base)
    fields = ("lr=0.005", "batch_size=1", "seq_len=40", "dtype=fp32", "device=cpu", "eval_every=2")
    what = ["finetune", "instruct", "model", "--data", "pairs.jsonl:0.5", "--epochs", "2", *lora]
    what += ["--held-out", "pairs.jsonl", *(f"--set={field}" for field in fields)]
    run(*what, "--out", tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("gpt2llama.cli._finetune_instruct.TrainingProgress", Shown)
        run(*what, "--out", tmp_path / "run", code=130)
    monkeypatch.chdir(tmp_path)
    again = ["finetune", "instruct", "--resume", "--out", "run"]
    for options, says in (
        (["--lora", "8"], "was begun with rank=4, not 8" if lora else "was begun without lora"),
        (["--set", "lr=1"], "was begun with lr=0.005, not 1"),
        (["--data", base / "pairs.jsonl"], "was begun with data="),
        ([tmp_path / "whole"], "was begun with begin="),
    ):
        assert says in run(*again, *options, code=1)[1]
    run(*again, *lora[:2])
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    configs = [(tmp_path / name / "config.toml").read_bytes() for name in ("run", "whole")]
    assert configs[0] == configs[1]
    assert "nothing was left to do: " in run(*again)[1]
    length = len(figures(tmp_path / "run"))
    run(*again, "--epochs", "3")
    assert len(figures(tmp_path / "run")) > length


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_other_data_under_the_same_name(
    base: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    """The texts, their order, what is held out, the model: all are as they were, or it is said."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "model/model.safetensors")]
    (tmp_path / "model").mkdir()
    for file in (base / "model").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    lines = (base / "pairs.jsonl").read_bytes().splitlines(keepends=True)
    for file in files[:2]:
        file.write_bytes(b"".join(lines))
    out = tmp_path / "run"

    def go(steps: int) -> int:
        data = [(files[0], 1.0)]
        return instruct(tmp_path / "model", data, out, TRAIN, ALL, held_out=files[1], lora=lora,
                        steps=steps, resume=True).step  # fmt: skip

    assert go(2) == 2
    before = (out / "config.toml").read_bytes()
    other = g.load(base / "model")[0].requires_grad_(False)
    other.embed_tokens.weight[5] += 1
    g.save(other, None, tmp_path / "other")
    changed = [
        b"".join(lines).replace("它是一".encode(), "它是二".encode()),
        b"".join(lines[::-1]),
        (tmp_path / "other/model.safetensors").read_bytes(),
    ]
    for file, content in zip(files, changed, strict=True):
        kept = file.read_bytes()
        assert content != kept
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"no longer what .*run was begun with; put it back"):
            go(3)
        assert (out / "config.toml").read_bytes() == before
        file.write_bytes(kept)
    assert go(3) == 3


@pytest.mark.parametrize(
    ("asked", "worth", "compiler", "compiled"),
    [
        ("off", 0.0, True, False),
        ("on", 1e99, True, True),
        ("auto", 1e99, True, False),
        ("auto", 0.0, True, True),
        ("auto", 0.0, False, False),
    ],
)
def test_it_compiles_as_train_does(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    asked: str, worth: float, compiler: bool, compiled: bool,
) -> None:  # fmt: skip
    class Asked(Exception):
        pass

    def trainer(*_: Any, compiled: bool, **__: Any) -> None:
        raise Asked(compiled)

    monkeypatch.setattr("gpt2llama.train.run.WORTH_COMPILING", worth)
    monkeypatch.setattr("gpt2llama.train.run.can_compile", lambda: compiler)
    monkeypatch.setattr("gpt2llama.finetune.instruct.Trainer", trainer)
    data: Any = [(base / "pairs.jsonl", 1.0)]
    with pytest.raises(Asked) as raised:
        instruct(base / "model", data, tmp_path / "run", TRAIN.replace(compile=asked), ALL)
    assert raised.value.args == (compiled,)


def compiled_runs(base: Path, out: Path) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """One without a stop, and one that was stopped behind its third step."""
    torch.set_num_threads(2)
    train = TRAIN.replace(checkpoint_every=2, compile="on")
    data: Any = [(base / "pairs.jsonl", 1.0)]

    def stop(line: dict[str, Any], steps: int) -> None:
        if line["step"] == 3:
            raise KeyboardInterrupt

    instruct(base / "model", data, out / "whole", train, ALL, steps=6)
    with suppress(KeyboardInterrupt):
        instruct(base / "model", data, out / "run", train, ALL, steps=6, report=stop)
    torch._dynamo.reset()  # as in another process
    instruct(base / "model", data, out / "run", train, ALL, steps=6, resume=True)
    runs = out / "whole", out / "run"
    return [(figures(run), g.load(run)[0].state_dict()) for run in runs]


@pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler, e.g. apt install g++")
def test_compiled_and_resumed_is_undisturbed(base: Path, tmp_path: Path) -> None:
    """In a process of its own, since the compiler trips over modules that other tests import."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        whole, resumed = pool.submit(compiled_runs, base, tmp_path).result()
    assert resumed[0] == whole[0]
    assert all(torch.equal(t, whole[1][name]) for name, t in resumed[1].items())


def test_a_weight_is_kept_to_the_last_digit(tmp_path: Path) -> None:
    data = [("a:b.jsonl", 1 / 3), ("c.jsonl", 2.0), ("d.jsonl", 0.5), ("e.jsonl", 123.4567891)]
    begun = InstructRun(begin="model", data=data)
    assert begun.to_dict()["data"][1:3] == ["c.jsonl:2", "d.jsonl:0.5"]
    (tmp_path / "config.toml").write_text(to_toml(begun.to_dict()), encoding="utf-8")
    assert InstructRun.read(tmp_path / "config.toml") == begun


def test_a_run_begun_with_a_relative_path(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command once wrote the held-out file: it is still the same file."""
    monkeypatch.chdir(base)
    data = [(base / "pairs.jsonl", 1.0)]
    instruct(base / "model", data, tmp_path / "run", TRAIN, held_out="pairs.jsonl", steps=1)
    again = ["finetune", "instruct", "--resume", "--out", tmp_path / "run", "--set", "steps=2"]
    run(*again, "--held-out", base / "pairs.jsonl")
    (base / "others.jsonl").write_bytes((base / "pairs.jsonl").read_bytes())
    says = run(*again, "--held-out", "others.jsonl", code=1)[1]
    assert "was begun with held_out_file='pairs.jsonl', not" in says


def test_another_stages_run(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('stage = "classify"\n', encoding="utf-8")
    again = ["finetune", "instruct", "--resume", "--out", tmp_path]
    assert "is not the config of a run of finetune instruct" in run(*again, code=1)[1]
    for text in ("", "data = 3", 'data = ["a"]', 'data = ["a:b"]'):
        (tmp_path / "config.toml").write_text(f'stage = "instruct"\n{text}\n', encoding="utf-8")
        assert "data must be a list of FILE:WEIGHT" in run(*again, code=1)[1]
    bad = 'stage = "instruct"\ndata = ["a:1"]\n[train]\nlr = "x"\n'
    (tmp_path / "config.toml").write_text(bad, encoding="utf-8")
    assert "[train]: lr must be a number" in run(*again, code=1)[1]
    (tmp_path / "config.toml").unlink()
    assert f"{tmp_path} holds no run to resume" in run(*again, code=1)[1]
    assert "name the model to tune" in run(*again[:2], *again[3:], code=1)[1]
    assert "--data is missing" in run(*again, "smollm2-135m", code=1)[1]
