from __future__ import annotations

import pytest

from gpt2llama.tokenizer import BPETokenizer, train_bpe

TEXTS = [
    "却说曹操引军至赤壁。周瑜笑曰：“公瑾之计，吾已知矣！”\n\n\t却说曹操大喜，曰：“善。”\n" * 4,
    "The attention of the model, the attention of the reader: 2017, 2019 and 2026.\n" * 4,
    "模型看不见字，只看见字节；字节合成词，词合成句。模型有4096个词。😀😀👨‍👩‍👧\n" * 3,
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def tokenizer() -> BPETokenizer:
    return train_bpe(TEXTS, 400)
