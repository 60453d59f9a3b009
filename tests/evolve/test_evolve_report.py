"""The report, from invented results: what it says is what it was given, in both languages."""

from __future__ import annotations

import ast
import copy
import csv
import json
import math
import random
import re
import shutil
import string
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2llama.evolve import charts
from gpt2llama.evolve.page import page
from gpt2llama.evolve.report import as_csv, as_markdown, ladder_svg, write_report
from gpt2llama.evolve.sentences import columns, summary
from gpt2llama.evolve.words import WORDS
from gpt2llama.model.presets import ladder
from gpt2llama.plan import flops_per_token, kv_bytes_per_token, parameters

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SVG = "{http://www.w3.org/2000/svg}"
LEARNED = ("learned", "rmsnorm")
CHANGES = {
    "2017": ("", ""),
    "pre-norm": ("norm_placement: post → pre", ""),
    "gelu": ("activation: relu → gelu_tanh", ""),
    "learned": ("position: sinusoidal → learned", ""),
    "rmsnorm": ("norm: layernorm → rmsnorm", ""),
    "rope": ("position: learned → rope", ""),
    "swiglu": ("gated_mlp: false → true", "d_ff 624 → 416"),
    "gqa": ("n_kv_heads: 4 → 2", "d_ff 416 → 512"),
    "no-bias": ("qkv_bias, out_bias, mlp_bias: true → false", ""),
    "untied": ("tie_embeddings: true → false", "d_ff 512 → 171"),
}


def invented(rungs: int = 10, seeds: int = 3, steps: int = 195) -> dict[str, Any]:
    """Plausible results of a ladder: one diverged seed, learned positions without a loss beyond."""
    draw = random.Random(7)
    gains = (0, -0.21, -0.012, 0.004, -0.003, -0.083, -0.041, 0.026, 0.001, -0.028)
    verdicts = (None, "helps", *["no difference shown"] * 3, "helps", "helps", "hurts")
    verdicts += ("no difference shown", "helps")
    out, loss, before = [], 2.71, None
    for i, (name, cfg) in enumerate(list(ladder().items())[:rungs]):
        loss += gains[i]
        flops = flops_per_token(cfg)
        runs = [
            _run(loss + draw.gauss(0, 0.006), seed, steps, (i, seed) == (0, 1), draw)
            for seed in range(seeds)
        ]
        several = seeds > 1 and i > 0
        half = 0.011 + draw.random() * 0.004
        shown = verdicts[i] if several else None
        kept = [run["bits_per_byte"] for run in runs if not run["diverged"]]
        out.append(
            {
                "name": name,
                "change": CHANGES[name][0],
                "adjusted": CHANGES[name][1],
                "previous": before,
                "config": cfg.to_dict(),
                "parameters": parameters(cfg)["total"],
                "flops_per_token": flops,
                "kv_bytes_per_token": kv_bytes_per_token(cfg),
                "bits_per_byte": sum(kept) / len(kept) if kept else None,
                "difference": gains[i] if i else None,
                "low": gains[i] - half if several else None,
                "high": gains[i] + half if several else None,
                "p": 0.00001 * 10 ** draw.uniform(0, 4) if several else None,
                "p_holm": 0.0001 * 10 ** draw.uniform(0, 4) if several else None,
                "verdict": shown,
                "detectable": 0.0193 + draw.random() * 0.002 if several else None,
                "correlation": draw.uniform(0.3, 0.95) if several else None,
                "train_tokens_per_s": 2600 + draw.random() * 500,
                "decode_tokens_per_s": 190 + draw.random() * 60,
                "peak_rss_bytes": 700_000_000 + draw.randrange(90_000_000),
                "int8_bits_per_byte": loss + 0.0007,
                "int4_bits_per_byte": loss + 0.05 + draw.random() * 0.02,
                "by_position": {
                    str(size): _by_position(name, size, loss, draw) for size in (128, 256, 512)
                },
                "runs": runs,
            }
        )
        before = name
    return {
        "version": "0.1.0",
        "created": "2026-11-29T23:50:00Z",
        "command": "gpt2llama evolve --data sanguo --seeds 3 --tokens 400000 --out runs/ladder",
        "machine": {
            "cpu": "Intel Xeon E5-2680 v4 @ 2.40GHz",
            "cores": 2,
            "torch": "2.13.0+cpu",
            "python": "3.11.2",
            "dtype": "fp32",
            "threads": 1,
        },
        "design": "ladder",
        "base": "zh-3m-2017",
        "to": "zh-3m",
        "match": "params",
        "seeds": list(range(seeds)),
        "tokens": steps * 2048,
        "steps": steps,
        "data": {
            "name": "sanguo",
            "train_tokens": 437_545,
            "held_out_bytes": 160_006,
            "held_out_tokens": 45_675,
            "vocab_size": 4096,
        },
        "statistics": {
            "pooled": True,
            "equal_variance_p": 0.4312,
            "degrees_of_freedom": 17.0,
            "confidence": 0.95,
        },
        "rungs": out,
    }


def _run(last: float, seed: int, steps: int, diverged: bool, draw: random.Random) -> dict[str, Any]:
    speed = 2700 + draw.random() * 200

    def loss(step: int) -> float:
        if diverged and step > steps / 2:
            return 3.1 + 0.02 * (step - steps / 2)
        return last + 6 * math.exp(-14 * step / steps) + 0.9 * (1 - step / steps) ** 2

    held_out = [*range(0, steps, max(1, steps // 13)), steps]
    seconds = steps * 2048 / speed
    return {
        "seed": seed,
        "bits_per_byte": None if diverged else last,
        "diverged": diverged,
        "seconds": seconds,
        "tokens_per_s": speed,
        "peak_rss_bytes": 700_000_000 + draw.randrange(90_000_000),
        "curve": [
            [step, step * 2048, seconds * step / steps, loss(step) * 2.4]
            for step in range(1, steps + 1)
        ],
        "held_out_curve": [[step, loss(step)] for step in held_out],
    }


def _by_position(name: str, size: int, loss: float, draw: random.Random) -> list[float] | None:
    if name in LEARNED and size > 128:
        return None
    broken = 0.9 if name in ("rope", "swiglu", "gqa") else 0.05
    values = []
    for bucket in range(16):
        at = (bucket + 0.5) * size / 16
        beyond = max(0.0, at / 128 - 1) * broken
        values.append(loss * 2.4 + 1.3 * math.exp(-at / 14) + beyond + draw.gauss(0, 0.02))
    return values
