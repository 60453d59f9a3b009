"""The classifier's head equals transformers' LlamaForSequenceClassification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_toys import TEXT, toy
from torch.testing import assert_close
from transformers import LlamaForSequenceClassification

from gpt2llama.finetune.classifier import label_logits, put_head
from gpt2llama.weights import load

LABELS, PAD = 3, 0


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_logits_under_right_padding(name: str, tmp_path: Path) -> None:
    causal: Any = toy(name)
    causal.save_pretrained(tmp_path)
    causal.config.num_labels, causal.config.pad_token_id = LABELS, PAD
    theirs: Any = LlamaForSequenceClassification(causal.config).eval()
    theirs.model.load_state_dict(causal.model.state_dict())
    torch.manual_seed(0)
    torch.nn.init.normal_(theirs.score.weight)
    ours, _ = load(tmp_path)
    put_head(ours, LABELS)
    ours.load_state_dict({"lm_head.weight": theirs.score.weight}, strict=False)
    lengths = torch.tensor([1, 7, 40, 41])
    real = torch.arange(41) < lengths[:, None]
    ids = torch.where(real, TEXT.view(4, 40).repeat(1, 2)[:, :41].clamp(min=1), PAD)
    with torch.no_grad():
        wanted = theirs(input_ids=ids, attention_mask=real.long()).logits
        assert_close(label_logits(ours, ids, real), wanted)
    assert wanted.std() > 0.3  # sharp enough for a wrong token to show
