"""lm-eval's own model class for transformers, and ours, on the same weights and tasks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from toy import TEXT, toy, write_lines

import gpt2llama as g

pytest.importorskip("lm_eval", reason="pip install 'gpt2llama[eval]'")
pytest.importorskip("transformers")
# Both bring old habits of others: no error of ours.
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = {
    "choose": """\
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "roll": """\
task: roll
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
""",
    "say": """\
task: say
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{said}}}}"
generation_kwargs: {{until: ["\\n", "z"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    llama: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "silu"}
    llama |= {"gated_mlp": True, "qkv_bias": False, "out_bias": False, "mlp_bias": False}
    model, tokenizer = toy(ends=0.5, **llama)
    g.save(model, tokenizer, folder / "ours")
    g.save(model, tokenizer, folder / "hf", format="hf")
    choices = ["词元", " reads and writes", " tokens.", "看到它前面的"]
    rows = [
        {"q": q, "choices": choices, "label": i % 4, "text": TEXT[i : i + 150], "said": "x"}
        for i, q in enumerate(["注意力", "a model ", "tokens", "它前面", "reads", "b"])
    ]
    data = write_lines(folder / "data.jsonl", rows)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(data=data), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And without lm-eval's own tasks, which take it ten seconds to list."""
    import datasets
    from lm_eval.tasks import TaskManager

    quick = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", quick)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def both(toys: Path) -> tuple[Any, Any]:
    import transformers
    from lm_eval.models.huggingface import HFLM

    from gpt2llama.evaluate.lm_eval import TransformerLM

    class Reference(HFLM):
        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            """It would score a BOS after BOS, too."""
            self.add_bos_token = False
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self.add_bos_token = None

    reference = Reference(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(toys / "hf"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(toys / "hf"),
        backend="causal",
        device="cpu",
        batch_size=2,
    )
    model, tokenizer = g.load(toys / "ours")
    assert tokenizer is not None
    return TransformerLM(model, tokenizer, batch_size=2), reference


def test_likelihoods_are_those_of_transformers(both: tuple[Any, Any]) -> None:
    pairs = [("", "注意力"), ("a model ", "reads"), ("a model", " reads and"), ("词元" * 80, "它"),
             ("x", TEXT[:40])]  # fmt: skip
    ours, theirs = (lm.loglikelihood(requests("loglikelihood", pairs)) for lm in both)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-4)
        assert mine[1] == other[1]
    texts = [("注意力",), (TEXT[:150],), (TEXT,)]  # the last has several windows
    ours, theirs = (
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for lm in both
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_generations_are_those_of_transformers(both: tuple[Any, Any]) -> None:
    how: dict[str, Any] = {"until": ["z", "\n"], "max_gen_toks": 12, "do_sample": False}
    asked = [(text, how) for text in ("注意力", "a model", "tokens 词元", "b", "词元" * 80)]
    asked.append(("reads", how | {"max_gen_toks": 3}))
    ours, theirs = (lm.generate_until(requests("generate_until", asked)) for lm in both)
    assert ours == theirs
    assert len(set(ours)) > 3


def test_the_command(run: Any, toys: Path, both: tuple[Any, Any]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = [str(toys / f"{name}.yaml") for name in TASKS]
    got = json.loads(run("eval", toys / "ours", "--tasks", ",".join(names), "--json")[0])
    manager = TaskManager(include_path=str(toys))
    wanted = simple_evaluate(
        model=both[1], tasks=[*TASKS], task_manager=manager, bootstrap_iters=0
    )["results"]
    for task, metrics in (
        ("choose", ("acc", "acc_norm")),
        ("roll", ("word_perplexity", "bits_per_byte")),
        ("say", ("exact_match",)),
    ):
        for metric in metrics:
            value = wanted[task][f"{metric},none"]
            assert got["results"][task][metric] == pytest.approx(value, rel=1e-3)
    out, _ = run("eval", toys / "ours", "--tasks", names[0], "--limit", 2)
    assert "acc_norm" in out


def test_ours_choose_as_lm_eval_does(run: Any, toys: Path, tmp_path: Path) -> None:
    """The same questions as a .jsonl task, where there is no chat template."""
    from gpt2llama.evaluate.tasks import answer_tasks, read_tasks
    from gpt2llama.tokenizer import BPETokenizer

    rows = [json.loads(line) for line in (toys / "data.jsonl").read_text("utf-8").splitlines()]
    tasks = write_lines(
        tmp_path / "t.jsonl",
        [{"prompt": row["q"], "choices": row["choices"], "label": row["label"]} for row in rows],
    )
    text = (toys / "choose.yaml").read_text("utf-8").replace("task: choose", "task: choose_bare")
    (tmp_path / "choose_bare.yaml").write_text(text + 'target_delimiter: ""\n', encoding="utf-8")
    out, _ = run("eval", toys / "ours", "--tasks", tmp_path / "choose_bare.yaml", "--json")
    wanted = json.loads(out)["results"]["choose_bare"]["acc_norm"]
    model, tokenizer = g.load(toys / "ours")
    assert isinstance(tokenizer, BPETokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BPETokenizer, "chat_template", None)
        answers = answer_tasks(model, tokenizer, read_tasks(tasks))
    assert sum(answer.right is True for answer in answers) / len(answers) == pytest.approx(wanted)


def test_refusals(run: Any, toys: Path, tmp_path: Path) -> None:
    names = f"{toys / 'choose.yaml'},chose"
    said = run("eval", toys / "ours", "--tasks", names, code=1)[1]
    assert "lm-eval has no task 'chose'; did you mean 'choose'?" in said
    assert "cannot read" in run("eval", toys / "ours", "--tasks", tmp_path / "n.yaml", code=1)[1]
    (tmp_path / "n.yaml").write_text("x: 1\n", encoding="utf-8")
    assert (
        "no task of lm-eval's"
        in run("eval", toys / "ours", "--tasks", tmp_path / "n.yaml", code=1)[1]
    )
    text = (toys / "choose.yaml").read_text(encoding="utf-8").replace("data.jsonl", "gone.jsonl")
    (tmp_path / "gone.yaml").write_text(text.replace("task: choose", "task: gone"), "utf-8")
    said = run("eval", toys / "ours", "--tasks", tmp_path / "gone.yaml", code=1)[1]
    assert "the data of" in said
    assert "cannot be had here" in said
