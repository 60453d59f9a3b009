"""Mutated files by the thousand: each must give a model or one of our errors, in time and bounds.

python tests/hostile/fuzz.py --count 10000 [--target gguf] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpt2llama as g
from gpt2llama.errors import Gpt2LlamaError
from gpt2llama.finetune.lora import AdapterStore, LoraConfig, add_lora
from gpt2llama.quant.apply import quantise
from gpt2llama.quant.scheme import scheme
from gpt2llama.tokenizer import train_bpe
from gpt2llama.tokenizer.sandbox import render
from gpt2llama.weights import open_model
from gpt2llama.weights.report import report

SECONDS, MEMORY = 5, 1 << 30
EXTREMES = (
    0,
    1,
    2,
    127,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    3,
    7,
    2**31,
    10**18,
    10**400,
    0.5,
    -1e30,
    1e308,
    "",
    "x" * 1000,
    [],
    {},
    [[]],
)
TEMPLATES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ 'You are ' ~ 'helpful' }}{% endif %}{% set ns.n = ns.n + 1 %}{{ m['content'][0:99] }}"
    "{{ raise_exception('odd') if ns.n > 9 }}{% endfor %}{{ messages | tojson }}"
    "{{ range(9) | list }}",
    "{{ 'a' * 3 }}{% for i in range(3) %}{% for j in range(2) %}{{ i ** j % 5 }}{% endfor %}"
    "{% endfor %}{{ messages | map(attribute='role') | join(', ') }}{{ bos_token }}{{ eos_token }}",
)
TOKENS = """\
9
99999999
**
*
range
{% for x in range(999999) %}
{% endfor %}
|
messages
.__class__
['__init__']
{{
}}
%}
lipsum
cycler
self
~
|center(999999999)
|join
'%999999999d'%1
|list
{% include 'x' %}
|tojson(indent=9999999)
{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}""".splitlines()


def mutate_bytes(data: bytes, random: random.Random, header: int) -> bytes:
    """One to four changes, most of them in the first `header` bytes."""
    new = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(max(1, min(len(new), header)))
        match random.randrange(6):
            case 0:
                new[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                new[at : at + 8] = struct.pack("<Q", random.choice(EXTREMES))
            case 2:
                new[at : at + 4] = struct.pack("<I", random.choice(EXTREMES) % 2**32)
            case 3:
                del new[at : at + random.choice((1, 4, 8, 100))]
            case 4:
                new[at:at] = new[at : at + random.choice((1, 4, 8, 100))]
            case 5:
                del new[random.randrange(len(new) + 1) :]
        if not new:
            break
    return bytes(new)


def mutate_json(value: Any, random: random.Random) -> Any:
    """The same with one value somewhere inside replaced, renamed, doubled or gone."""
    value = json.loads(json.dumps(value))
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        key = random.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and random.random() < 0.8:
            place = place[key]
            continue
        match random.randrange(4):
            case 0:
                place[key] = random.choice(VALUES)
            case 1:
                del place[key]
            case 2 if isinstance(place, dict):
                place[f"{key}{random.choice(('', 'x', '_'))}"] = random.choice(VALUES)
            case _:
                number = place[key]
                place[key] = number * 10**6 if isinstance(number, int | float) else [number]
        return value


class Target:
    """A valid file, how to spoil it, and what reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.tokenizer = train_bpe(["却说曹操引军至赤壁。the reader and the model\n" * 3], 280)
        sizes = {"vocab_size": 280, "max_seq_len": 16, "n_layers": 1, "n_heads": 2}
        self.model = g.Transformer(g.ModelConfig(**sizes, n_kv_heads=1, d_model=8, d_ff=12))
        g.save(self.model, self.tokenizer, folder / "ours")
        g.save(self.model, self.tokenizer, folder / "hf", format="hf")
        listed = {"0": {"content": "<|endoftext|>", "special": True}}
        self.tokenizer.config["added_tokens_decoder"] = listed
        self.tokenizer.save(folder / "hf")
        g.save(self.model, self.tokenizer, folder / "model.gguf", format="gguf")
        wide = self.model.config.replace(d_model=32, d_ff=32)
        small = quantise(g.Transformer(wide), scheme("int4"))
        g.save(small, self.tokenizer, folder / "small")
        g.save(small, self.tokenizer, folder / "small.gguf", format="gguf", dtype="Q4_0")
        adapted = g.Transformer(self.model.config)
        add_lora(adapted, LoraConfig(rank=2, modules="q_proj k_proj lm_head"))
        (folder / "adapter").mkdir()
        AdapterStore(folder / "hf", LoraConfig(rank=2)).write(folder / "adapter", adapted, None)
        self.ids = torch.arange(9)[None]

    def load(self, path: Path, quant: str | None = None) -> None:
        """What loads must also run: a model that cannot is silently wrong."""
        opened = open_model(path)
        opened.facts()
        model, tokenizer = g.load(path, quant=quant)
        report(opened)
        if model.config.vocab_size > 8 and model.config.max_seq_len > 8:
            model(self.ids)
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode("却说 the model 42"))

    def safetensors(self, random: random.Random) -> None:
        header = random.choice((900, 10**6))
        self._file(random, random.choice(("ours", "hf")), "model.safetensors", header)

    def gguf(self, random: random.Random) -> None:
        data = (self.folder / "model.gguf").read_bytes()
        header = random.choice((24, 600, len(data)))
        path = self.folder / "spoilt.gguf"
        path.write_bytes(mutate_bytes(data, random, header))
        self.load(path)

    def config(self, random: random.Random) -> None:
        name = random.choice(("ours", "hf"))
        if random.random() < 0.2:
            self._file(random, name, "config.json", 10**6)
        else:
            self._json(random, name, "config.json")

    def quantised(self, random: random.Random) -> None:
        """A folder of integers, or a GGUF whose blocks are kept."""
        match random.randrange(3):
            case 0:
                self._json(random, "small", "config.json")
            case 1:
                self._file(random, "small", "model.safetensors", random.choice((2000, 10**6)))
            case 2:
                data = (self.folder / "small.gguf").read_bytes()
                path = self.folder / "spoilt.gguf"
                path.write_bytes(mutate_bytes(data, random, random.choice((600, len(data)))))
                self.load(path, "keep")

    def adapter(self, random: random.Random) -> None:
        if random.random() < 0.5:
            self._json(random, "adapter", "adapter_config.json")
        else:
            header = random.choice((900, 10**6))
            self._file(random, "adapter", "adapter_model.safetensors", header)

    def tokenizer_json(self, random: random.Random) -> None:
        beside = random.choice(("tokenizer_config.json", "generation_config.json"))
        name = random.choice(("tokenizer.json", "tokenizer.json", beside))
        if random.random() < 0.2:
            self._file(random, "hf", name, 10**6)
        else:
            self._json(random, "hf", name)

    def jinja(self, random: random.Random) -> None:
        text = random.choice(TEMPLATES)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(text) + 1)
            cut = at + random.choice((0, 0, 1, 5, 30))
            text = text[:at] + random.choice(TOKENS) + text[cut:]
        messages = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "hi"}]
        render(text, messages, bos="<s>", eos="</s>")

    def _file(self, random: random.Random, folder: str, name: str, header: int) -> None:
        path = self.folder / folder / name
        data = path.read_bytes()
        try:
            path.unlink()  # mapped tensors keep the old one
            path.write_bytes(mutate_bytes(data, random, header))
            self.load(path.parent)
        finally:
            path.unlink()
            path.write_bytes(data)

    def _json(self, random: random.Random, folder: str, name: str) -> None:
        path = self.folder / folder / name
        text = path.read_text(encoding="utf-8")
        try:
            path.write_text(json.dumps(mutate_json(json.loads(text), random)), encoding="utf-8")
            self.load(path.parent)
        finally:
            path.write_text(text, encoding="utf-8")


TARGETS = ("safetensors", "gguf", "config", "quantised", "adapter", "tokenizer_json", "jinja")


def attack(read: Callable[[random.Random], None], seed: int) -> str:
    """The outcome of one mutated file; raises what is none of our errors, or took too long."""
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(random.Random(seed))
        return "loaded"
    except Gpt2LlamaError as error:
        return type(error).__name__
    finally:
        signal.alarm(0)


def too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def run(target: str, count: int, seed: int = 0) -> dict[str, int]:
    """How often each outcome came; the seed of one that must not is in what is raised."""
    signal.signal(signal.SIGALRM, too_long)
    outcomes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        read = getattr(Target(Path(folder)), target)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(seed, seed + count):
            try:
                outcome = attack(read, i)
            except BaseException as error:
                raise AssertionError(
                    f"{target}, seed {i}: {type(error).__name__}: {error}"
                ) from error
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY, f"{target}: memory grew by {grown >> 20} MiB"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="files of each target")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for target in [args.target] if args.target else TARGETS:
        begun = time.perf_counter()
        outcomes = run(target, args.count, args.seed)
        print(f"{target}: {outcomes} in {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
