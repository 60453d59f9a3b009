"""Losses as `trl`'s own trainers compute them, from `transformers`' logits of the same model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefer_run import random_pairs, sharp_model, small_reward
from torch import Tensor

import gpt2llama as g
from gpt2llama.data.batches import IGNORED
from gpt2llama.finetune.answers import padded
from gpt2llama.finetune.grpo import GroupBatch, PolicyLoss, advantages
from gpt2llama.finetune.preference import PreferenceConfig, PreferenceLoss, pair_batch

with warnings.catch_warnings():  # of the libraries that it loads
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="pip install trl")
    transformers = pytest.importorskip("transformers")
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer


def trainer_of(**settings: Any) -> Any:
    """What a trainer's loss function reads of itself, so that no data set is needed."""
    same: Any = lambda tensor: tensor  # noqa: E731
    one: Any = lambda tensor, reduction: tensor  # noqa: E731
    several = SimpleNamespace(
        gather=same, gather_for_metrics=same, reduce=one, device="cpu", num_processes=1
    )
    no = dict.fromkeys(("aux_loss_enabled", "use_weighting", "use_vllm", "_entropy_bonus_enabled"))
    return SimpleNamespace(
        accelerator=several, model=SimpleNamespace(training=False), _tp_size=1,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, **no, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hf") / "model"
    g.save(sharp_model(), None, folder, format="hf")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def their_logprobs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]


@pytest.mark.parametrize(
    ("ours", "name", "beta"),
    [("dpo", "sigmoid", 0.3), ("dpo-norm", "sigmoid_norm", 2.0), ("ipo-norm", "ipo", 0.2)],
)
@torch.no_grad()
def test_dpo(ours: Any, name: str, beta: float, theirs: Any) -> None:
    pairs = random_pairs(5)
    rows = [(p.prompt, p.chosen) for p in pairs] + [(p.prompt, p.rejected) for p in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, real, answered = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor([*prompt, *answer])
        real[i, :end] = 1
        answered[i, len(prompt) : end] = 1
    logprobs = their_logprobs(theirs, ids, real) * answered[:, 1:]
    reference = torch.randn(5, 2, generator=torch.Generator().manual_seed(2)) * 3 - 20

    def model(**how: Any) -> Any:
        none = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=logprobs, entropy=none, mean_logits=none, is_top1=none.bool()
        )

    trainer = trainer_of(
        beta=beta, loss_types=[name], loss_weights=[1.0], ld_alpha=None, label_smoothing=0.0,
        precompute_ref_logps=True, f_divergence_type="reverse_kl",
    )  # fmt: skip
    inputs = {
        "input_ids": ids, "attention_mask": real, "completion_mask": answered,
        "ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1],
    }  # fmt: skip
    wanted = DPOTrainer._compute_loss(trainer, model, inputs, False)
    objective = PreferenceLoss(PreferenceConfig(loss=ours, beta=beta))
    found = objective(sharp_model(), pair_batch(pairs, reference)) / 5
    torch.testing.assert_close(found, wanted)
    margins = objective.margins(sharp_model(), pair_batch(pairs, reference))[0]
    seen = trainer._metrics["eval"]
    assert seen["rewards/accuracies"] == [(margins > 0).float().mean()] or "norm" in ours


@pytest.mark.parametrize(("variant", "name"), [("grpo", "grpo"), ("dr-grpo", "dr_grpo")])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_grpo(variant: Any, name: str, kl: float) -> None:
    pairs, rng = random_pairs(6), torch.Generator().manual_seed(3)
    ids, targets = padded([(p.prompt, p.rejected) for p in pairs])
    counted = targets != IGNORED
    logprobs, old, reference = (
        (torch.rand(targets.shape, generator=rng) - 3) * counted for _ in range(3)
    )
    rewards = torch.rand(2, 3, generator=rng, dtype=torch.float64)
    advantage = advantages(rewards, variant).flatten().float()
    batch = GroupBatch(
        ids, targets, advantages=advantage, old=old, reference=reference if kl else None
    )
    cfg = small_reward(variant=variant, kl=kl, max_new_tokens=9, clip_ratio=0.1)
    none: Any = None
    objective = PolicyLoss(cfg, none)
    found = objective.of(logprobs, batch) / 6

    trainer = trainer_of(
        beta=kl, loss_type=name, epsilon_low=0.1, epsilon_high=0.1, max_completion_length=9,
        importance_sampling_level="token", top_entropy_quantile=1.0, tools=None,
        off_policy_mask_threshold=None, current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, report_to=[]),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs),
                                                            None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": ids[:, :0], "prompt_mask": counted[:, :0].long(), "completion_ids": ids,
        "completion_mask": counted.long(), "advantages": advantage, "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }  # fmt: skip
    wanted = GRPOTrainer._compute_loss(trainer, None, inputs)
    torch.testing.assert_close(found, wanted)
    ours, theirs = objective.take_figures(), trainer._metrics["eval"]
    assert ours["clipped"] == pytest.approx(theirs["clip_ratio/region_mean"][0])
    assert ours["clipped"] > 0.1
    assert ours.get("kl", 0) == pytest.approx(theirs["kl"][0] if kl else 0)
