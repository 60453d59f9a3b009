"""GRPO by hand, what its samples are, rewards, and whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefer_run import (
    CONTEXT,
    SUMS,
    check_adapters,
    check_same,
    make_model,
    metrics,
    reward_run,
    sharp_model,
    small_reward,
    tokenizer,
    write_lines,
)

from gpt2llama.data.batches import IGNORED
from gpt2llama.errors import ConfigError, DataError, FileError, TrainingError
from gpt2llama.finetune.answers import Line, Writer, padded, read_parts
from gpt2llama.finetune.grpo import GroupBatch, PolicyLoss, RewardConfig, advantages
from gpt2llama.finetune.lora import LoraConfig, adapters, add_lora
from gpt2llama.finetune.reward import tune_reward
from gpt2llama.finetune.rewards import arithmetic, make_reward
from gpt2llama.finetune.rollouts import Sampler, Task, encode_task
from gpt2llama.finetune.settings import Tuning
from gpt2llama.generate import SamplingConfig
from gpt2llama.model.transformer import Transformer

LORA = LoraConfig(rank=4, alpha=8, dropout=0.1, modules="q_proj v_proj down_proj lm_head")


def test_advantages_by_hand() -> None:
    """(1 - 1/4) over the root of (9 + 1 + 1 + 1)/16/3 = 1/4 is 3/2."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 3.0, 1.0, 0.0]])
    found = advantages(rewards, "grpo")
    torch.testing.assert_close(found[0], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    torch.testing.assert_close(found[1], torch.tensor([-1.0, 2.0, 0.0, -1.0]) / math.sqrt(2))
    found = advantages(rewards, "dr-grpo")
    torch.testing.assert_close(found[1], torch.tensor([-1.0, 2.0, 0.0, -1.0]))


def sampler(
    model: Transformer | None = None,
    reference: Transformer | None = None,
    lora: LoraConfig | None = None,
    **settings: Any,
) -> Sampler:
    """Of three prompts."""
    ours = tokenizer()
    tasks = [
        Task(Writer(ours, chat=False).prompt(line["prompt"]), Line(str(i), line))
        for i, line in enumerate(SUMS[:3])
    ]
    run = reward_run(Path(), Path(), small_reward(**settings), lora, batch_size=3)
    policy = model or sharp_model()
    return Sampler(tasks, run, ours, make_reward(run.method.reward), policy, reference)


def test_the_loss_by_hand() -> None:
    """A good answer of 2 tokens, one beyond the clip, and a bad one of 3, also with one beyond."""
    targets = torch.tensor([[IGNORED, 4, 4, IGNORED], [IGNORED, 4, 4, 4]])
    ratios = torch.tensor([[1.0, 1.5, 0.9, 1.0], [1.0, 0.5, 1.5, 1.0]])
    old = torch.full((2, 4), -2.0)
    reference = old + torch.tensor([[0.0, 0.3, 0.0, 9.0], [9.0, 0.0, 0.0, -0.2]])
    batch = GroupBatch(
        targets, targets, advantages=torch.tensor([2.0, -1.0]), old=old, reference=reference
    )
    terms = [[2 * 1.2, 2 * 0.9], [-0.8, -1.5, -1.0]]

    def k3(gap: float) -> float:
        return math.exp(gap) - gap - 1

    divergence = [
        [k3(0.3 - math.log(1.5)), k3(-math.log(0.9))],
        [k3(-math.log(0.5)), k3(-math.log(1.5)), k3(-0.2)],
    ]
    for variant, lengths in (("grpo", (2, 3)), ("dr-grpo", (5, 5))):
        objective = PolicyLoss(small_reward(variant=variant, kl=0.5), sampler().logprobs)
        wanted = -sum(
            (sum(gain) - 0.5 * sum(kl)) / length
            for gain, kl, length in zip(terms, divergence, lengths, strict=True)
        )
        assert objective.of(ratios.log() + old, batch).item() == pytest.approx(wanted, rel=1e-5)
        assert objective.take_figures() == pytest.approx(
            {"clipped": 2 / 5, "kl": (sum(divergence[0]) + sum(divergence[1])) / 5}, rel=1e-5
        )
    assert batch.count == 2


def test_at_the_samples_own_step_it_is_the_policy_gradient() -> None:
    """Ratio 1, nothing clipped: the gradient of -A log p, whatever the clip (Williams 1992)."""
    model = sharp_model().double()
    source = sampler(model, kl=0.0, clip_ratio=1e-9)
    batch = source.make(0)
    objective = PolicyLoss(source.cfg, source.logprobs)
    parameters = list(model.parameters())
    found = torch.autograd.grad(objective(model, batch), parameters)
    logprobs = source.logprobs(model, batch.ids, batch.targets)
    counted = (batch.targets != IGNORED).sum(1)
    plain = -(batch.advantages * logprobs.sum(1) / counted).sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, parameters))
    assert max(float(g.abs().max()) for g in found) > 1e-3


class TestSamples:
    def test_are_a_function_of_the_seed_the_batch_and_the_weights(self) -> None:
        first, again = sampler().make(4), sampler().make(4)
        assert torch.equal(first.ids, again.ids)
        assert torch.equal(first.advantages, again.advantages)
        assert not torch.equal(first.ids[:, -5:], sampler().make(5).ids[:, -5:])
        assert not torch.equal(first.ids[:, -5:], sampler(sharp_model(1)).make(4).ids[:, -5:])

    @pytest.mark.parametrize("lora", [None, LORA])
    def test_are_the_policys_own(self, lora: LoraConfig | None) -> None:
        """The log-probabilities of the fast path are those that are trained, and a stop id counts
        like any other token."""
        policy = sharp_model()
        if lora is not None:
            add_lora(policy, lora)
            for layer in adapters(policy).values():
                torch.nn.init.normal_(layer.lora_B.weight, std=0.3)
        source = sampler(policy, lora=lora, temperature=1.0)
        source.tokenizer.stop_ids = frozenset(range(0, 256, 8))
        sampling = SamplingConfig(temperature=1.0, seed=1)
        samples = source.answer(source.speaker(policy), [source.tasks[0]] * 20, sampling)
        stopped = [sample for sample in samples if sample.finish_reason == "stop"]
        assert 0 < len(stopped) < 20
        assert all(len(sample.tokens) == len(sample.ids) + 1 for sample in stopped)
        assert all(sample.tokens[-1] in source.tokenizer.stop_ids for sample in stopped)
        ids, targets = padded([(sample.prompt, sample.tokens) for sample in samples])
        found = source.score(source.policy, ids, targets)
        for row, sample in zip(found, samples, strict=True):
            scored = row[row != 0][: len(sample.ids)]
            torch.testing.assert_close(scored, torch.tensor(sample.logprobs), rtol=1e-4, atol=1e-4)

    def test_equal_groups_are_left_out_and_counted(self, monkeypatch: Any) -> None:
        source = sampler()

        def reward(answer: str, line: dict[str, Any]) -> float:
            return float(len(answer.encode()) % 2) if line["prompt"] == SUMS[1]["prompt"] else 1.0

        source.reward = reward
        batch = source.make(0)
        assert batch.figures["equal_groups"] == 2
        assert batch.count == len(batch.ids) == 4
        assert len({tuple(row[: len(source.tasks[1].prompt)].tolist()) for row in batch.ids}) == 1
        assert batch.advantages.sum().item() == pytest.approx(0, abs=1e-6)
        source.reward = lambda answer, line: 1.0
        empty = source.make(0)
        assert (empty.count, empty.figures["reward"], empty.figures["equal_groups"]) == (0, 1, 3)
        objective = PolicyLoss(source.cfg, source.logprobs)
        loss = objective(source.policy, empty)  # beside others in an accumulated step
        loss.backward()
        assert loss.item() == 0

    def test_serve_several_updates(self) -> None:
        source = sampler(updates=2)
        batches = [source.batch(i) for i in range(4)]
        assert batches[0] is batches[1]
        assert batches[2] is batches[3]
        assert batches[0] is not batches[2]
        assert batches[0].old is not None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("46", 1), ("12+34=46", 1), ("It is 46.", 1), ("46.0 apples", 1), ("46\n", 1), ("４６", 1),
        ("", 0), ("no idea", 0), ("46 or 47", 0), ("-46", 0), ("146", 0), ("4 6", 0), ("50-46", 1),
    ],
)  # fmt: skip
def test_arithmetic(answer: str, right: int) -> None:
    assert arithmetic(answer, {"answer": 46}) == right
    assert arithmetic(answer, {"answer": "46"}) == right


def test_arithmetic_beyond_whole_numbers() -> None:
    assert arithmetic("so 3-5 = -2", {"answer": -2}) == 1
    assert arithmetic("about −2", {"answer": -2}) == 1
    assert arithmetic("1,234.5", {"answer": 1234.5}) == 1


def test_format() -> None:
    reward = make_reward("format:^<think>.*</think>.+$")
    assert reward("<think>a\nb</think>\n4", {}) == 1
    assert reward("4", {}) == 0


def test_a_function_of_the_users(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def half(answer, line):\n    print(answer)\n    return len(answer) / line['answer']\n"
        "def bad(answer, line):\n    return float('nan')\n",
        encoding="utf-8",
    )
    assert make_reward(f"{file}:half")("abc", {"answer": 6}) == 0.5
    assert capsys.readouterr() == ("", "abc\n")
    with pytest.raises(TrainingError, match=r"mine.py:half failed on the answer 'abc': KeyError"):
        make_reward(f"{file}:half")("abc", {})
    with pytest.raises(TrainingError, match=r"mine.py:bad gave nan for 'abc'"):
        make_reward(f"{file}:bad")("abc", {})


def test_rewards_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n", encoding="utf-8")
    for name, error, said in (
        ("arithmetik", ConfigError, "'arithmetik' must be arithmetic, format:REGEX or file.py:fun"),
        ("format:(", ConfigError, r"'\(' is no regular expression"),
        (f"{tmp_path}/no.py:f", FileError, "there is no file .*no.py"),
        (f"{file}:f", FileError, "broken.py cannot be run: ZeroDivisionError"),
        (f"{__file__}:nothing", FileError, r"has no function nothing; write def nothing\(answer"),
    ):
        with pytest.raises(error, match=said):
            make_reward(name)


def test_lines_that_cannot_be_checked() -> None:
    writer = Writer(tokenizer(), chat=False)
    for answer in ({}, {"answer": "many"}, {"answer": None}, {"answer": [1]}):
        line = Line("sums.jsonl:3", {"prompt": "1+1=", **answer})
        with pytest.raises(DataError, match=r"^sums.jsonl:3: answer must be the number"):
            encode_task(line, writer, "arithmetic")
        encode_task(line, writer, "format:a")


def test_a_prompt_without_room_for_an_answer_is_skipped(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * (size - tokenizer().adds_bos)} for size in (46, 47, 48, 60)]
    data, writer = write_lines(tmp_path / "p.jsonl", lines), Writer(tokenizer(), chat=False)
    run = replace(reward_run(tmp_path, data), held_out=str(data))
    parts = read_parts(run, lambda line: encode_task(line, writer, "format:a"), CONTEXT, "prompt")
    assert [len(task.prompt) for task in parts.train] == [46, 47]
    assert parts.skipped == 4  # of both files
    write_lines(data, lines[2:])
    with pytest.raises(DataError, match="no prompt to train on: none fits into 48 tokens"):
        read_parts(run, lambda line: encode_task(line, writer, "format:a"), CONTEXT, "prompt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", SUMS)


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_reward_rises(lora: LoraConfig | None, model: Path, data: Path, tmp_path: Path) -> None:
    cfg = small_reward(reward="format:^[ -~]", group_size=8, kl=0.001)
    run = reward_run(model, data, cfg, lora, steps=25, lr=0.01, eval_every=25)
    tune_reward(run, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(26))
    assert lines[0]["held_out_reward"] == -lines[0]["held_out_loss"]
    assert lines[-1]["held_out_reward"] > lines[0]["held_out_reward"] + 0.3
    start = sum(line["reward"] for line in lines[1:4]) / 3
    end = sum(line["reward"] for line in lines[-3:]) / 3
    assert end > start + 0.3
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[15]["kl"] > 0.01
    assert {"equal_groups", "answer_tokens", "clipped"} <= set(lines[15])
    if lora is not None:
        check_adapters(tmp_path / "run", model, lora)


@pytest.mark.parametrize(("updates", "lora"), [(1, None), (2, None), (2, LORA)])
def test_resumed_is_as_undisturbed(
    updates: int, lora: LoraConfig | None, data: Path, tmp_path: Path
) -> None:
    """Stopped between checkpoints and, with two updates, at one in the middle of the samples."""
    dropping = make_model(tmp_path, dropout=0.1)
    cfg = small_reward(updates=updates)
    run = reward_run(dropping, data, cfg, lora, accumulate=2, eval_every=3)
    tune_reward(run, tmp_path / "whole")
    for step in (0, 2, 5):  # the last goes on from step 3

        def fail(line: dict[str, Any], step: int = step) -> None:
            if line["step"] == step:
                raise RuntimeError

        with pytest.raises(RuntimeError):
            tune_reward(run, tmp_path / "run", resume=step > 0, report=fail)
    tune_reward(run, tmp_path / "run", resume=True)
    check_same(tmp_path / "run", tmp_path / "whole")
    assert len({line["reward"] for line in metrics(tmp_path / "run")[1:]}) > 1


def test_more_updates_clip(model: Path, data: Path, tmp_path: Path) -> None:
    cfg = small_reward(updates=3, clip_ratio=0.01)
    tune_reward(reward_run(model, data, cfg, warmup_steps=0), tmp_path / "run")
    clipped = [line["clipped"] for line in metrics(tmp_path / "run")[1:]]
    assert clipped[0] == clipped[3] == 0
    assert min(clipped[1:3]) > 0


def test_rewards_that_never_differ(model: Path, data: Path, tmp_path: Path) -> None:
    cfg = small_reward(reward="format:never that")
    with pytest.raises(TrainingError, match=r"all answers .* the same reward format:never that"):
        tune_reward(reward_run(model, data, cfg, steps=2), tmp_path / "run")


def test_resumed_with_other_settings(model: Path, data: Path, tmp_path: Path) -> None:
    tune_reward(reward_run(model, data), tmp_path / "run")
    other = reward_run(model, data, small_reward(kl=0.5))
    with pytest.raises(ConfigError, match=r"was begun with kl=0\.04, not 0\.5"):
        tune_reward(other, tmp_path / "run", resume=True)
    sums = write_lines(tmp_path / "sums.jsonl", SUMS)
    tune_reward(reward_run(model, sums), tmp_path / "other")
    write_lines(sums, [*SUMS[:-1], {"prompt": "1+1=", "answer": 2}])
    with pytest.raises(ConfigError, match=r"sums.jsonl is no longer what .* was begun with"):
        tune_reward(reward_run(model, sums, steps=8), tmp_path / "other", resume=True)


@pytest.mark.parametrize("lora", [None, LORA])
def test_bf16(lora: LoraConfig | None, model: Path, data: Path, tmp_path: Path) -> None:
    """Samples, their log-probabilities and the reference are those of the copy that computes; in
    bf16 a pass with a backward rounds its attention elsewhere than one without."""
    cfg = small_reward(updates=2)
    tune_reward(reward_run(model, data, cfg, lora, dtype="bf16"), tmp_path / "run")
    first = metrics(tmp_path / "run")[1]
    assert first["kl"] == pytest.approx(0, abs=1e-3)
    assert first["loss"] == pytest.approx(0, abs=1e-2)


def test_settings(tmp_path: Path) -> None:
    run = reward_run(Path("m"), Path("d")).set(['reward="format:a=b"', "variant=dr-grpo", "kl=0"])
    assert run.method.replace(kl=0) == small_reward(reward="format:a=b", variant="dr-grpo", kl=0)
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        RewardConfig(group_size=1)
    (tmp_path / "config.toml").write_text(run.to_toml(), encoding="utf-8")
    assert Tuning.read(tmp_path / "config.toml", RewardConfig) == run
