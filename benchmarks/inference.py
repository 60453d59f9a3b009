"""Decoding and prefill of gpt2llama beside its peers, which README.md describes.

Same weights, prompt and threads, greedy. Every system is a process of its own; rounds run them in
turn, so that a machine that slows down slows them all, and measure the limit before each.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

INSTALL = {  # litgpt pins an older huggingface-hub than transformers needs: no dependencies
    "llama.cpp": "pip install llama-cpp-python",
    "hf": "pip install 'transformers>=5'",
    "litgpt": "pip install --no-deps litgpt lightning lightning-utilities torchmetrics psutil",
}
Row = dict[str, Any]
Tokens = Iterator[int]  # one at a time, as they are chosen
Generate = Callable[[list[int], int], Tokens]  # prompt, how many new


class Case(NamedTuple):
    """The prompt's tokens and the new ones; with one new token the prompt's pass is the subject."""

    model: str
    prompt: int
    new: int
    systems: str  # "NAME:KIND …"


OURS = "gpt2llama:fp32 gpt2llama:bf16 gpt2llama:int8 gpt2llama:int4"
LLAMA_CPP = "llama.cpp:F32 llama.cpp:BF16 llama.cpp:Q8_0 llama.cpp:Q4_0 llama.cpp:Q4_1"
HF, LITGPT = "hf:fp32 hf:bf16", "litgpt:fp32 litgpt:bf16"
CASES = {
    "decode": Case("smollm2-135m", 64, 256, f"{OURS} {LLAMA_CPP} {HF} {LITGPT}"),
    "context": Case("smollm2-135m", 3900, 100, f"{OURS} {LLAMA_CPP} {HF}"),
    "prefill": Case("smollm2-135m", 512, 1, f"{OURS} {LLAMA_CPP} {HF} {LITGPT}"),
    "gpt2": Case("gpt2", 64, 256, f"{OURS} {LLAMA_CPP} {HF}"),  # litgpt has no GPT-2
    "zh-3m": Case("zh-3m", 64, 64, f"{OURS} {LLAMA_CPP} {HF} {LITGPT}"),
}
PEER_OF = {  # whose speed is a ratio of whose: the same bits a weight, as nearly as there are
    "fp32": ("F32", "fp32"),
    "bf16": ("BF16", "bf16"),
    "int8": ("Q8_0",),
    "int4": ("Q4_0", "Q4_1"),
}


# --- The systems, each in its process -----------------------------------------------------------


def ours(files: dict[str, str], kind: str, _: int) -> tuple[Generate, Row]:
    import torch

    from gpt2llama import load
    from gpt2llama.generate import SamplingConfig, decode
    from gpt2llama.generate.generation import Generation
    from gpt2llama.inference_speed import model_facts, weights_read

    quant = kind if kind.startswith("int") else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(kind)
    source = files["fp32" if quant else kind]
    model, _tokenizer = load(source, dtype=dtype, quant=quant)

    def generate(prompt: list[int], new: int) -> Tokens:
        row = Generation(prompt)
        settings: Row = {"max_new_tokens": new, "stop_ids": (), "sampling": SamplingConfig()}
        for _ in decode(model, [row], **settings):
            yield row.ids[-1]

    return generate, {**model_facts(model), "weights_read": weights_read(model)}


@cache
def quiet() -> Any:
    """A log that drops everything; kept, since ctypes does not keep a callback alive."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """llama.cpp's C interface: no Python in a token but one call, and numpy's argmax.

    Its own sampler copies the logits into records first, which is slower.
    """

    def __init__(self, files: dict[str, str], kind: str, threads: int) -> None:
        import llama_cpp

        self.lib, self.threads = llama_cpp, threads
        llama_cpp.llama_log_set(quiet(), None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(files[kind].encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {Path(files[kind]).name}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.context: Any = None
        self.settings: Row = {}

    def tune(self, prompt: list[int], new: int) -> None:
        """Keeps the fastest of its own settings for this prompt."""
        took = {}
        for flash in (0, 1):
            for batch in (512, 256, 128) if new == 1 else (512,):
                self._open(len(prompt) + new, batch, flash)
                for _ in range(2):  # the first warms up
                    begun = time.perf_counter()
                    first = begun
                    for i, _id in enumerate(self(prompt, min(new, 16))):
                        if i == 0 and new > 1:
                            first = time.perf_counter()
                    took[batch, flash] = time.perf_counter() - first
        self._open(len(prompt) + new, *min(took, key=lambda settings: took[settings]))

    def _open(self, length: int, batch: int, flash: int) -> None:
        if self.context is not None:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.flash_attn_type, params.no_perf = length, flash, False
        params.n_batch = params.n_ubatch = batch
        params.n_threads = params.n_threads_batch = self.threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {length} tokens")
        self.settings = {"n_batch": batch, "n_ubatch": batch, "flash_attn": bool(flash)}

    def __call__(self, prompt: list[int], new: int) -> Tokens:
        import numpy as np

        lib, context, size = self.lib, self.context, self.settings["n_batch"]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        lib.llama_perf_context_reset(context)
        parts = [prompt[i : i + size] for i in range(0, len(prompt), size)]
        for part in parts:
            self._decode((ctypes.c_int32 * len(part))(*part), len(part))
        token = (ctypes.c_int32 * 1)()
        for left in range(new, 0, -1):
            logits = lib.llama_get_logits_ith(context, -1)
            token[0] = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            yield token[0]
            if left > 1:
                self._decode(token, 1)

    def _decode(self, tokens: Any, count: int) -> None:
        status = self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(tokens, count))
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def own_speed(self) -> float:
        """Tokens a second of the last run by llama.cpp's counters, which leave sampling out."""
        counted = self.lib.llama_perf_context(self.context)
        if counted.n_eval > 1:
            return 1000 * counted.n_eval / counted.t_eval_ms
        return 1000 * counted.n_p_eval / counted.t_p_eval_ms


def llama_cpp(files: dict[str, str], kind: str, threads: int) -> tuple[Generate, Row]:
    from gpt2llama.weights.gguf_file import read_header

    stored = read_header(Path(files[kind]))[1]
    size = sum(tensor.size for tensor in stored.values())
    weights = sum(tensor.size // tensor.kind.size * tensor.kind.block for tensor in stored.values())
    unread = "position_embd.weight", *(["token_embd.weight"] if "output.weight" in stored else [])
    read = size - sum(stored[name].size for name in unread if name in stored)
    return LlamaCpp(files, kind, threads), {
        "bits_per_weight": 8 * size / weights,
        "weights_read": read,
    }


def hf(files: dict[str, str], kind: str, _: int) -> tuple[Generate, Row]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    model = AutoModelForCausalLM.from_pretrained(files["hf"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # it runs to the end
    model.generation_config.pad_token_id = 0

    class Stamps(BaseStreamer):  # type: ignore[misc]
        """The prompt, then each token, with its time."""

        def __init__(self) -> None:
            self.seen: list[tuple[float, Any]] = []

        def put(self, value: Any) -> None:
            self.seen.append((time.perf_counter(), value))

        def end(self) -> None:
            pass

    def generate(prompt: list[int], new: int) -> Tokens:
        stamps, ids = Stamps(), torch.tensor([prompt])
        settings: Row = {"max_new_tokens": new, "do_sample": False, "streamer": stamps}
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        for stamp, value in stamps.seen[1:]:
            yield At(int(value), stamp)

    return generate, plain_facts(model, dtype)


def litgpt(files: dict[str, str], kind: str, _: int) -> tuple[Generate, Row]:
    import torch
    from litgpt import GPT, Config
    from litgpt.generate.base import generate_fn
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    folder = Path(files["hf"])
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = Config(
        block_size=sizes["max_position_embeddings"],
        vocab_size=sizes["vocab_size"],
        padded_vocab_size=sizes["vocab_size"],
        n_layer=sizes["num_hidden_layers"],
        n_head=sizes["num_attention_heads"],
        n_query_groups=sizes["num_key_value_heads"],
        n_embd=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        norm_eps=sizes["rms_norm_eps"],
        rope_base=int(rope_theta(sizes)),
        rotary_percentage=1.0,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        bias=False,
    )
    state: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, state, load_file(folder / "model.safetensors"), dtype=dtype)
    model = GPT(config).to(dtype)
    model.load_state_dict(state)
    model.lm_head.weight = model.transformer.wte.weight
    model.eval()
    cached = 0

    def generate(prompt: list[int], new: int) -> Tokens:
        nonlocal cached
        length = len(prompt) + new
        if cached != length:
            model.clear_kv_cache()
            model.max_seq_length = cached = length
            model.set_kv_cache(batch_size=1)
        settings: Row = {"temperature": 0.0, "include_prompt": False, "include_eos": True}
        with torch.inference_mode():
            for token in generate_fn(model, torch.tensor(prompt), length, **settings):
                yield int(token)

    return generate, plain_facts(model, dtype)


SYSTEMS = {"gpt2llama": ours, "llama.cpp": llama_cpp, "hf": hf, "litgpt": litgpt}


class At(int):
    """A token that was chosen earlier than it is handed over."""

    stamp: float

    def __new__(cls, token: int, stamp: float) -> At:
        new = super().__new__(cls, token)
        new.stamp = stamp
        return new


def rope_theta(config: Row) -> float:
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]


def plain_facts(model: Any, dtype: Any) -> Row:
    tensors = {t.data_ptr(): t for t in model.parameters()}  # a tied head once
    read = sum(t.nbytes for t in tensors.values())
    return {"bits_per_weight": 8 * dtype.itemsize, "weights_read": read}


def work(system: str, kind: str, threads: int) -> None:
    """Answers a line of JSON with a line of JSON; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(values: Row) -> None:
        print(json.dumps(values), file=answers, flush=True)

    files = json.loads(sys.stdin.readline())
    try:
        generate, facts = SYSTEMS[system](files, kind, threads)
    except ModuleNotFoundError as error:
        return answer({"error": f"{error}; it comes with: {INSTALL.get(system, 'pip')}"})
    except Exception as error:  # a peer's own; the row says it
        return answer({"error": f"{type(error).__name__}: {error}"})
    answer(facts)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt, new = asked["prompt"], asked["new"]
        try:
            if isinstance(generate, LlamaCpp) and generate.context is None:
                generate.tune(prompt, new)
            begun, ids, stamps = time.perf_counter(), [], []
            for token in generate(prompt, new):
                stamps.append(getattr(token, "stamp", time.perf_counter()))
                ids.append(int(token))
        except Exception as error:
            return answer({"error": f"{type(error).__name__}: {error}"})
        figures = {"first": stamps[0] - begun, "rest": stamps[-1] - stamps[0], "ids": ids}
        if isinstance(generate, LlamaCpp):
            figures |= {"own_speed": generate.own_speed(), "settings": generate.settings}
        answer(figures)
    return None


# --- The parent ---------------------------------------------------------------------------------


class Peer:
    """A system in a process of its own, so that no other's settings and caches are in it."""

    def __init__(self, name: str, kind: str, files: dict[str, str], args: Any) -> None:
        python = args.python_litgpt if name == "litgpt" else sys.executable
        command = [python, __file__, "--work", name, kind, "--threads", str(args.threads)]
        threads = {"OMP_NUM_THREADS": str(args.threads)}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if args.verbose else subprocess.DEVNULL,
            env={**os.environ, **threads},
            encoding="utf-8",
        )
        self.facts = self.ask(files)

    def ask(self, values: Row) -> Row:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process died"}
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def write_files(model: str, source: str | None, folder: Path) -> tuple[dict[str, str], Any]:
    """The same weights in every format, by kind, and the tokenizer; llama.cpp's Q4_1 by its own
    quantiser, the others by `save`. All matrices are of the kind, the head among them."""
    import torch

    from gpt2llama import Transformer, load, preset, save

    if source is None:
        torch.manual_seed(0)
        weights, tokenizer = Transformer(preset(model)).eval(), None
    else:
        weights, tokenizer = load(source, dtype=torch.float32)
    files = {"fp32": str(folder / "fp32"), "bf16": str(folder / "bf16"), "hf": str(folder / "hf")}
    save(weights, tokenizer, files["fp32"])
    save(weights, tokenizer, files["hf"], "hf")
    for kind in ("F32", "BF16", "Q8_0", "Q4_0"):
        files[kind] = str(folder / f"{kind}.gguf")
        save(weights, tokenizer, files[kind], "gguf", dtype=kind)
    save(weights.to(torch.bfloat16), tokenizer, files["bf16"])
    files["Q4_1"] = str(folder / "Q4_1.gguf")
    with contextlib.suppress(ImportError):
        import llama_cpp

        llama_cpp.llama_log_set(quiet(), None)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1, True
        params.output_tensor_type = params.token_embedding_type = llama_cpp.GGML_TYPE_Q4_1
        names = (files["F32"].encode(), files["Q4_1"].encode())
        if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
            raise RuntimeError("llama.cpp's quantiser failed on F32.gguf")
    return files, tokenizer


def make_prompt(tokenizer: Any, vocab_size: int, length: int) -> list[int]:
    """The package's own Chinese prose, repeated; random ids where there is no tokenizer."""
    if tokenizer is None:
        import torch

        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (length,), generator=generator).tolist()
    from importlib.resources import files

    prose = files("gpt2llama").joinpath("data", "prose.zh.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(prose)
    return (ids * (length // len(ids) + 1))[:length]


def measure(case: Case, source: str | None, args: Any) -> Row:
    """A row of figures for each system."""
    from gpt2llama.plan import kv_bytes_per_token
    from gpt2llama.weights import open_model

    with TemporaryDirectory() as folder:
        files, tokenizer = write_files(case.model, source, Path(folder))
        cfg = open_model(files["fp32"]).config
        length = min(case.prompt, cfg.max_seq_len - case.new)
        request = {"prompt": make_prompt(tokenizer, cfg.vocab_size, length), "new": case.new}
        rows: list[Row] = []
        ready: list[tuple[Row, Peer]] = []
        for system in case.systems.split():
            name, kind = system.split(":")
            rows.append(row := Row(name=name, kind=kind, rounds=[], shares=[]))
            try:
                peer = Peer(name, kind, files, args)
                ready.append((row, peer))
                row |= peer.facts
            except RuntimeError as error:
                row["not_measured"] = str(error)
        seen = length + case.new / 2
        for row, _ in ready:
            cache = "fp32" if row["kind"] == "fp32" else "bf16"  # llama.cpp's default is fp16
            row["bytes_per_token"] = row["weights_read"] + kv_bytes_per_token(cfg, cache) * seen
        for r in range(-1, args.rounds):  # round -1 warms up
            print(f"{case.model}: round {r + 1} of {args.rounds}", file=sys.stderr)
            for i in range(len(ready)):
                row, peer = ready[(i + r) % len(ready)]
                try:
                    limit = rate_limit(cfg, length, case.new, row)
                    got = peer.ask(request)
                except RuntimeError as error:
                    row["not_measured"] = str(error)
                    continue
                if r < 0:
                    continue
                speed = (case.new - 1) / got["rest"] if case.new > 1 else length / got["first"]
                row["rounds"].append(speed)
                row["shares"].append(speed / limit)
                row |= {key: got[key] for key in ("settings", "own_speed") if key in got}
                row["first_ids"] = got["ids"][:8]
            ready = [(row, peer) for row, peer in ready if "not_measured" not in row]
        for _, peer in ready:
            peer.close()
    own = {row["kind"]: row for row, _ in ready if row["name"] == "gpt2llama"}
    for row, _ in ready:
        row["tokens_per_second"] = median(row["rounds"])
        row["fraction_of_limit"] = median(row["shares"])
        row["ours_times"] = {
            kind: median(a / b for a, b in zip(mine["rounds"], row["rounds"], strict=True))
            for kind, mine in own.items()
        }
    return {"model": case.model, "prompt": length, "new": case.new, "systems": rows}


def rate_limit(cfg: Any, prompt: int, new: int, row: Row) -> float:
    """Tokens a second at most, now: by the bandwidth, or for a prompt's pass by the products."""
    import torch

    from gpt2llama.machine import bf16_if_native, gemm_limit, read_bandwidth
    from gpt2llama.plan import prefill_step

    if new > 1:
        size = round(row["bytes_per_token"])
        return read_bandwidth(size) / size
    fp32 = row["kind"] in ("fp32", "F32")
    dtype = torch.float32 if fp32 else bf16_if_native(torch.device("cpu"))
    return gemm_limit(dtype) * prompt / prefill_step(cfg, prompt).flops


def ratio(row: Row) -> str:
    """How many times its speed ours is, at about its bits a weight."""
    times = (t for own, t in row["ours_times"].items() if row["kind"] in PEER_OF[own])
    return "" if row["name"] == "gpt2llama" else next((f"{t:.2f} x" for t in times), "")


def cells(row: Row) -> list[str]:
    return [
        row["name"],
        row["kind"],
        f"{row['bits_per_weight']:.2f}",
        f"{row['tokens_per_second']:,.1f}",
        f"{row['fraction_of_limit']:.0%}",
        ratio(row),
    ]


HEADS = ["system", "weights", "bits a weight", "tokens/s", "of the limit", "ours / it"]


def title(name: str, result: Row) -> str:
    new = f", {result['new']} tokens after it" if result["new"] > 1 else ""
    return f"{name}: {result['model']}, a prompt of {result['prompt']} tokens{new}"


def show(name: str, result: Row) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADS, title=title(name, result), title_justify="left")
    for row in result["systems"]:
        if "not_measured" in row:
            print(f"{row['name']} {row['kind']} not measured: {row['not_measured']}")
        else:
            table.add_row(*cells(row))
    Console().print(table)


def markdown(cases: dict[str, Row]) -> str:
    """For the docs: a table of each case."""
    lines = []
    for name, result in cases.items():
        lines += [f"**{title(name, result)}**", "", "| " + " | ".join(HEADS) + " |"]
        lines += ["| --- | --- |" + " ---: |" * (len(HEADS) - 2)]
        for row in result["systems"]:
            if "not_measured" in row:
                lines += [
                    f"| {row['name']} | {row['kind']} | not measured: {row['not_measured']} |"
                ]
            else:
                lines += ["| " + " | ".join(cells(row)) + " |"]
        lines += [""]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help="NAME or NAME:KIND …; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed, of every system")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--smollm2", default="smollm2-135m", help="its weights: path or asset")
    parser.add_argument("--zh-3m", help="a run folder; random weights unless given")
    parser.add_argument("--python-litgpt", default=sys.executable, help="where litgpt is installed")
    parser.add_argument("--quick", action="store_true", help="a check: one round of few tokens")
    parser.add_argument("--verbose", action="store_true", help="what the systems print")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/inference.json"))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    systems = {*SYSTEMS, *(s for case in CASES.values() for s in case.systems.split())}
    for asked, known in ((args.cases, CASES), (args.systems, systems)):
        if unknown := set(asked.split(",")) - set(known):
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if min(args.rounds, args.threads) < 1:
        parser.error("--rounds and --threads are at least 1")
    return args


def write(out: Path, figures: Row) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out)
    out.with_suffix(".md").write_text(markdown(figures["cases"]), encoding="utf-8")


def main() -> None:
    args = parse()
    if args.work:
        return work(*args.work, args.threads)
    import torch

    torch.set_num_threads(args.threads)
    capabilities = torch.cpu.get_capabilities()
    sources = {"smollm2-135m": args.smollm2, "zh-3m": args.zh_3m, "gpt2": None}
    figures: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/inference.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": capabilities.get("cpu_name"),
        "capabilities": sorted(name for name, has in capabilities.items() if has is True),
        "threads": args.threads,
        "versions": {},
        "cases": {},
    }
    for name in ("torch", "transformers", "litgpt", "llama-cpp-python"):
        with contextlib.suppress(PackageNotFoundError):
            figures["versions"][name] = version(name)
    if args.quick:
        args.rounds = 1
    for name in args.cases.split(","):
        case = CASES[name]
        asked = args.systems.split(",")
        wanted = (s for s in case.systems.split() if s in asked or s.split(":")[0] in asked)
        case = case._replace(systems=" ".join(wanted))
        if args.quick:
            case = case._replace(prompt=min(case.prompt, 64), new=min(case.new, 8))
        figures["cases"][name] = result = measure(case, sources[case.model], args)
        show(name, result)
        write(args.out, figures)  # after each case: a later one may take long, or fail
    return None


if __name__ == "__main__":
    main()
