"""Preference losses by hand, what never counts, the cached reference, and whole runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefer_run import (
    CONTEXT,
    PAIRS,
    check_adapters,
    check_same,
    make_model,
    metrics,
    preference_run,
    random_pairs,
    sharp_model,
    tokenizer,
    write_lines,
)
from torch import Tensor

from gpt2llama.data.batches import IGNORED
from gpt2llama.errors import ConfigError, DataError, TokenizerError
from gpt2llama.finetune.answers import Line, Writer, hold_out, read_parts, shuffled, token_logprobs
from gpt2llama.finetune.lora import LoraConfig
from gpt2llama.finetune.preference import (
    KINDS,
    PairBatch,
    PreferenceConfig,
    PreferenceLoss,
    encode_pair,
    pair_batch,
    reference_logprobs,
    tune_preference,
)
from gpt2llama.finetune.settings import Tuning, digest
from gpt2llama.model.transformer import Transformer
from gpt2llama.train.step import Step

LORA = LoraConfig(rank=4, alpha=4, dropout=0.1, modules="q_proj v_proj up_proj down_proj")
# An answer of 4 tokens at -12 nats (the reference: -14) beside one of 5 at -20 (-19).
BY_HAND = [
    ({"loss": "dpo"}, 3.0, math.log1p(math.exp(-0.3))),
    ({"loss": "dpo", "beta": 0.5}, 3.0, math.log1p(math.exp(-1.5))),
    (
        {"loss": "dpo", "label_smoothing": 0.2},
        3.0,
        0.8 * math.log1p(math.exp(-0.3)) + 0.2 * math.log1p(math.exp(0.3)),
    ),
    ({"loss": "dpo-norm"}, 2 / 4 + 1 / 5, math.log1p(math.exp(-3.5))),
    ({"loss": "ipo"}, 3.0, (3 - 5) ** 2),
    ({"loss": "ipo-norm", "beta": 1.0}, 0.7, (0.7 - 0.5) ** 2),
    ({"loss": "simpo"}, -12 / 4 + 20 / 5, math.log1p(math.exp(-(2 * 1 - 1)))),
    ({"loss": "simpo", "beta": 3.0, "margin": 0.5}, 1.0, math.log1p(math.exp(-2.5))),
]


@pytest.mark.parametrize(("settings", "margin", "loss"), BY_HAND)
def test_by_hand(settings: Any, margin: float, loss: float, monkeypatch: Any) -> None:
    targets = torch.full((2, 8), IGNORED)
    targets[0, 2:6] = 1
    targets[1, 1:6] = 1
    told = torch.zeros(2, 8, dtype=torch.float64)
    told[0, 2:6] = torch.tensor([-1.0, -2.0, -4.0, -5.0])
    told[1, 1:6] = -4.0
    monkeypatch.setattr(
        "gpt2llama.finetune.preference.token_logprobs", lambda model, ids, targets: told
    )
    batch = PairBatch(targets, targets, reference=torch.tensor([-14.0, -19.0]))
    objective = PreferenceLoss(PreferenceConfig(**settings))
    model: Any = None
    found, logprobs = objective.margins(model, batch)
    torch.testing.assert_close(found, torch.tensor([margin], dtype=torch.float64))
    assert logprobs.tolist() == [-12.0, -20.0]
    assert objective(model, batch).item() == pytest.approx(loss, rel=1e-12)


def one_by_one(model: Transformer, prompt: list[int], answer: list[int]) -> float:
    """An answer's log-probability, a token at a time, each from all before it."""
    text, total = [*prompt], 0.0
    for token in answer:
        logits: Tensor = model(torch.tensor([text]))[0, -1]
        total += (logits - logits.logsumexp(0))[token].item()
        text.append(token)
    return total


@torch.no_grad()
def test_log_probabilities_are_the_models_own_token_by_token() -> None:
    model, pairs = sharp_model().double(), random_pairs()
    batch = pair_batch(pairs)
    found = token_logprobs(model, batch.ids, batch.targets).double().sum(1)
    wanted = [one_by_one(model, p.prompt, p.chosen) for p in pairs]
    wanted += [one_by_one(model, p.prompt, p.rejected) for p in pairs]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-5)
    assert len(set(wanted)) == 8


def losses(model: Transformer, batch: PairBatch, kind: str) -> Tensor:
    objective = PreferenceLoss(PreferenceConfig(loss=kind))  # type: ignore[arg-type]  # a key
    return objective.of(objective.margins(model, batch)[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_never_counts(kind: str) -> None:
    """Neither what stands there nor how much of it."""
    model, pairs = sharp_model().double(), random_pairs()
    reference = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    batch = pair_batch(pairs, reference)
    together = losses(model, batch, kind)
    for i, pair in enumerate(pairs):
        alone = losses(model, pair_batch([pair], reference[i : i + 1]), kind)
        torch.testing.assert_close(alone, together[i : i + 1])
    for row, pair in enumerate([*pairs, *pairs]):
        answer = pair.chosen if row < len(pairs) else pair.rejected
        batch.ids[row, len(pair.prompt) + len(answer) - 1 :] = 7
    assert (batch.ids == 7).sum() > 10
    assert torch.equal(losses(model, batch, kind), together)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_prompt_never_counts(kind: str) -> None:
    """In a model without attention a token sees the one before it alone: a prompt could change
    the loss only as what is counted itself."""
    model, pairs = sharp_model().double(), random_pairs()
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
    batch = pair_batch(pairs, torch.zeros(4, 2))
    before = losses(model, batch, kind)
    for pair in pairs:
        pair.prompt[:-1] = [(id + 1) % 256 for id in pair.prompt[:-1]]
    assert torch.equal(losses(model, pair_batch(pairs, torch.zeros(4, 2)), kind), before)
    pairs[0].prompt[-1] += 1  # the one that the first token of the answer is told from
    changed = losses(model, pair_batch(pairs, torch.zeros(4, 2)), kind)
    assert changed[0] != before[0]
    assert torch.equal(changed[1:], before[1:])


def test_parts_of_a_batch_teach_what_the_whole_does() -> None:
    """A batch of 4 pairs, or of 3 and 1 added up: `count` are pairs, whatever their lengths."""
    pairs, reference = random_pairs(), torch.zeros(4, 2)
    cfg = preference_run(Path(), Path(), lr=0.01).train
    gradients = []
    for parts in ([slice(0, 4)], [slice(0, 3), slice(3, 4)]):
        model = sharp_model().double()
        step = Step(model, cfg, compiled=False, objective=PreferenceLoss(PreferenceConfig()))
        step.optimizers = []
        loss, _ = step([pair_batch(pairs[part], reference[part]) for part in parts], 0.0)
        gradients.append({name: p.grad for name, p in model.named_parameters()} | {"loss": loss})
    torch.testing.assert_close(gradients[0], gradients[1])


def test_every_epoch_has_each_pair_once() -> None:
    drawn = [i for index in range(10) for i in shuffled(5, 3, 0, index)]
    epochs = [drawn[i : i + 5] for i in range(0, 30, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 3
    assert shuffled(5, 6, 0, 1) == drawn[6:12]


class TestReference:
    def test_is_kept(self, tmp_path: Path) -> None:
        model, pairs, path = sharp_model(), random_pairs(7), tmp_path / "reference.safetensors"
        found = reference_logprobs(model, pairs, 2, path)
        wanted = [[one_by_one(model, p.prompt, a) for a in (p.chosen, p.rejected)] for p in pairs]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        no_model: Any = None
        assert torch.equal(reference_logprobs(no_model, pairs, 2, path), found)

    def test_goes_on_where_it_was_stopped(self, tmp_path: Path) -> None:
        model, pairs, path = sharp_model(), random_pairs(7), tmp_path / "reference.safetensors"

        def stop(items: Any, count: int) -> Any:
            assert count == 4
            yield from items[:2]
            raise KeyboardInterrupt

        asked = []

        def watch(items: Any, count: int) -> Any:
            asked.append(count)
            yield from items

        with pytest.raises(KeyboardInterrupt):
            reference_logprobs(model, pairs, 2, path, stop)
        found = reference_logprobs(model, pairs, 2, path, watch)
        assert asked == [2]
        assert torch.equal(found, reference_logprobs(model, pairs, 2, tmp_path / "whole"))

    def test_is_of_this_model_and_these_pairs(self) -> None:
        pairs = random_pairs()
        other = sharp_model()
        other.layers[1].mlp.up_proj.weight.data[3, 4] += 1e-6
        keys = {
            digest(sharp_model(), torch.float32, pairs),
            digest(sharp_model(), torch.float32, pairs),
            digest(sharp_model(), torch.bfloat16, pairs),
            digest(sharp_model(), torch.float32, pairs[::-1]),
            digest(other, torch.float32, pairs),
        }
        assert len(keys) == 4


class TestWriter:
    def test_a_prompt_is_a_users_message(self) -> None:
        ours = tokenizer()
        writer, user = Writer(ours, chat=True), {"role": "user", "content": "Hi?"}
        assert writer.prompt("Hi?") == ours.apply_chat([user]) == writer.prompt([user])
        answer = writer.answer("Hi?", "Yes.")
        assert ours.decode(answer) == "Yes.<|end|>"
        assert answer[-1] in ours.stop_ids
        whole = ours.apply_chat([user, {"role": "assistant", "content": "Yes."}], False)
        assert [*writer.prompt("Hi?"), *answer] == whole

    def test_or_text_that_the_answer_continues(self) -> None:
        ours = tokenizer()
        writer = Writer(ours, chat=False)
        assert writer.prompt("1+1=") == [ours.bos_id, *ours.encode("1+1=")]
        assert writer.answer("1+1=", "2") == [*ours.encode("2"), ours.eos_id]

    def test_a_template_that_is_changed_by_the_answer(self) -> None:
        ours = tokenizer()
        ours._config["chat_template"] = "{{ messages | length }}{{ messages[-1].content }}"
        with pytest.raises(TokenizerError, match="writes the prompt differently"):
            Writer(ours, chat=True).answer("Hi", "Yes")


def encoded(line: dict[str, Any], chat: bool = False) -> Any:
    return encode_pair(Line("pairs.jsonl:7", line), Writer(tokenizer(), chat))


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chosen": ""}, "chosen is empty"),
        ({"rejected": " \n"}, "rejected is empty"),
        ({"rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 3}, "prompt must be a text or a list of messages"),
        ({"chosen": ["b"]}, r"chosen must be a text \(got \['b'\]\)"),
        ({"prompt": [{"role": "bot", "content": ""}]}, "message 0 has role 'bot'"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the last message of prompt"),
    ],
)
def test_bad_pairs_name_their_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^pairs.jsonl:7: {said}"):
        encoded(PAIR | change)
    assert encoded(PAIR).chosen


def test_messages_need_a_template() -> None:
    plain = tokenizer()
    plain._config.pop("chat_template")
    plain._specials = {"<|endoftext|>": 0}
    line = Line("pairs.jsonl:7", PAIR | {"prompt": [{"role": "user", "content": "a"}]})
    with pytest.raises(TokenizerError, match=r"pairs.jsonl:7: .*no chat template"):
        encode_pair(line, Writer(plain, chat=True))


def test_a_pair_beyond_the_context_is_skipped(tmp_path: Path) -> None:
    """48 positions hold a prompt and an answer of 49 tokens, the last of which is only told."""
    prompts = ["p" * (size - tokenizer().adds_bos) for size in (46, 47, 48)]
    data = write_lines(tmp_path / "pairs.jsonl", [PAIR | {"prompt": p} for p in prompts])
    run = replace(preference_run(tmp_path, data), held_out=str(data))
    parts = read_parts(run, lambda line: encoded(line.values), CONTEXT, "pair")
    assert [len(pair.prompt) for pair in parts.train] == [46, 47]
    assert parts.skipped == 2  # of both files


def test_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    lines = [Line(str(i), {"prompt": f"p{i % 30}"}) for i in range(90)]
    train, held_out = hold_out(lines)
    assert len(held_out) == 9
    assert not {line.prompt for line in train} & {line.prompt for line in held_out}  # type: ignore  # texts
    with pytest.raises(DataError, match="one prompt alone"):
        hold_out(lines[:1] * 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), dropout=0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", PAIRS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_held_out_margin_rises(kind: Any, model: Path, data: Path, tmp_path: Path) -> None:
    run = preference_run(model, data, PreferenceConfig(loss=kind, chat=False), steps=12)
    done = tune_preference(run, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    assert done.progress.step == 12
    assert [line["step"] for line in lines if "held_out_margin" in line] == list(range(0, 13, 2))
    first, last = lines[0], lines[-1]
    assert last["held_out_margin"] > first["held_out_margin"] + 0.3
    assert last["held_out_loss"] < first["held_out_loss"]
    assert last["held_out_accuracy"] == 1.0
    moved = last["held_out_chosen"] - first["held_out_chosen"]
    moved -= last["held_out_rejected"] - first["held_out_rejected"]
    assert moved > 0.3
    if KINDS[kind].reference:  # the policy is still the reference
        assert first["held_out_margin"] == 0
        unlearned = {"dpo": math.log(2), "ipo": 25.0}[kind.removesuffix("-norm")]
        assert first["held_out_loss"] == pytest.approx(unlearned)


@pytest.mark.parametrize("lora", [None, LORA])
def test_resumed_is_as_undisturbed(
    lora: LoraConfig | None, model: Path, data: Path, tmp_path: Path
) -> None:
    run = preference_run(model, data, lora=lora, accumulate=2)
    tune_preference(run, tmp_path / "whole")
    before = metrics(tmp_path / "whole")

    def stop(items: Any, count: int) -> Any:
        yield items[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_preference(run, tmp_path / "run", watch=stop)
    for step in (0, 2, 5):

        def fail(line: dict[str, Any], step: int = step) -> None:
            if line["step"] == step:
                raise RuntimeError

        with pytest.raises(RuntimeError):
            tune_preference(run, tmp_path / "run", resume=True, report=fail)
    tune_preference(run, tmp_path / "run", resume=True)
    check_same(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "whole") == before
    files = [sorted(p.name for p in (tmp_path / name).glob("*")) for name in ("run", "whole")]
    assert files[0] == files[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters(dtype: str, model: Path, data: Path, tmp_path: Path) -> None:
    """The margin begins at 0; what the loaded run finds of the held-out pairs was told of it."""
    file = model / "model.safetensors"
    stored = file.read_bytes()
    run = preference_run(model, data, lora=LORA, lr=0.03, steps=12, dtype=dtype)
    done = tune_preference(run, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[0]["held_out_margin"] == 0
    assert lines[-1]["held_out_margin"] > 0.3
    tuned = check_adapters(tmp_path / "run", model, LORA)
    assert file.read_bytes() == stored
    pairs = done.pairs.held_out
    chosen = [one_by_one(tuned, pair.prompt, pair.chosen) for pair in pairs]
    told, near = lines[-1]["held_out_chosen"], 1e-4 if dtype == "fp32" else 0.05
    assert sum(chosen) / len(pairs) == pytest.approx(told, rel=near)
    again = preference_run(tmp_path / "run", data, lora=LORA, steps=2, dtype=dtype)
    tune_preference(again, tmp_path / "again")  # adapters on top of adapters
    first = metrics(tmp_path / "again")[0]
    assert (first["held_out_margin"], first["held_out_chosen"]) == (
        0,
        pytest.approx(told, rel=near),
    )
    check_adapters(tmp_path / "again", tmp_path / "run", LORA)


def test_bf16(model: Path, data: Path, tmp_path: Path) -> None:
    """The reference computes as the policy does: the margin begins at 0."""
    tune_preference(preference_run(model, data, dtype="bf16"), tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[0]["held_out_margin"] == 0
    assert lines[-1]["held_out_margin"] > 0.3


def test_resumed_with_something_else(model: Path, data: Path, tmp_path: Path) -> None:
    run, pairs = preference_run(model, data), tmp_path / "pairs.jsonl"
    pairs.write_bytes(data.read_bytes())
    run = preference_run(model, pairs)
    tune_preference(run, tmp_path / "run")
    with pytest.raises(ConfigError, match="was begun without lora, not with it"):
        tune_preference(replace(run, lora=LORA), tmp_path / "run", resume=True)
    other = preference_run(model, pairs, PreferenceConfig(beta=0.5, chat=False))
    with pytest.raises(ConfigError, match=r"was begun with beta='none', not 0\.5"):
        tune_preference(other, tmp_path / "run", resume=True)
    write_lines(pairs, PAIRS[1:])
    with pytest.raises(ConfigError, match=r"pairs.jsonl is no longer what .* was begun with"):
        tune_preference(run, tmp_path / "run", resume=True)
    write_lines(pairs, PAIRS)
    longer = preference_run(model, pairs, steps=8)
    assert tune_preference(longer, tmp_path / "run", resume=True).progress.step == 8


def test_settings() -> None:
    run = preference_run(Path("m"), Path("d")).set(["loss=simpo", "margin=0.5", "lr=1e-4"])
    assert (run.method.loss, run.method.margin, run.train.lr) == ("simpo", 0.5, 1e-4)
    for pairs, said in (
        (["bete=1"], "no field 'bete'; did you mean 'beta'"),
        (["loss=kto"], "loss must be one of dpo, dpo-norm, ipo, ipo-norm, simpo"),
        (["label_smoothing=0.5"], "label_smoothing must be below 0.5"),
        (["loss=ipo", "label_smoothing=0.1"], "ipo has no label_smoothing"),
        (["margin=1"], "margin is simpo's alone, not dpo's"),
        (["beta=-1"], "beta must be a number above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            preference_run(Path("m"), Path("d")).set(pairs)


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    for lora in (None, LORA):
        run = preference_run(Path("m"), Path("d"), PreferenceConfig(loss="ipo", beta=0.2), lora)
        (tmp_path / "config.toml").write_text(run.to_toml(), encoding="utf-8")
        assert Tuning.read(tmp_path / "config.toml", PreferenceConfig) == run
