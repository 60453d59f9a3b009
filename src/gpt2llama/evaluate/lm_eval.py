"""lm-eval's tasks (EleutherAI's lm-evaluation-harness, an extra) on our Transformer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    DataError,
    FileError,
    Gpt2LlamaError,
    InputError,
    MissingExtraError,
    did_you_mean,
)
from ..generate.batch import complete_all
from ..generate.sampling import SamplingConfig
from .scoring import Pair, encode_pair, score_continuations

try:
    from lm_eval import utils
    from lm_eval.api.model import LM
except ModuleNotFoundError as error:
    raise MissingExtraError("lm-eval", "eval") from error

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

Watch = Callable[[Iterable[Any], int], Iterable[Any]]
_MAX_NEW_TOKENS = 256  # lm-eval's, where a task says nothing


class TransformerLM(LM):  # type: ignore[misc]  # lm-eval is no dependency: Any to mypy
    """What lm-eval asks of a model: likelihoods of texts, greedy or sampled continuations.

    A text gets the tokenizer's BOS where the tokenizer adds one; one without a context follows
    BOS, or else EOS. What is too long for the model's context loses its beginning.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        batch_size: int = 16,
        watch: Watch = lambda batches, count: batches,
    ) -> None:
        """watch: sees the batches as they are taken, and how many there are."""
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.watch = watch
        bos = tokenizer.bos_id
        self.start = [bos] if tokenizer.adds_bos and bos is not None else []
        prefix = tokenizer.eos_id if bos is None else bos
        if prefix is None:
            raise InputError("lm-eval needs a tokenizer with a BOS or EOS, and this one has none")
        self.prefix = prefix

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding says it) of each (context, continuation)."""
        pairs: list[Pair] = []
        for context, continuation in (request.args for request in requests):
            first, rest = encode_pair(self.tokenizer, context, continuation)
            pairs.append(([*self.start, *first] or [self.prefix], rest))
        scores = score_continuations(self.model, pairs, watch=self.watch)
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Of each whole text, in lm-eval's windows: every token once, the last window full. BOS is
        only given (lm-eval's class for transformers also scores it after itself)."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for i, (text,) in enumerate(request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tokenizer.encode(text),
                prefix_token=self.prefix,
                max_seq_len=self.model.config.max_seq_len,
                context_len=1,
            )
            pairs += [utils.make_disjoint_window(window) for window in windows]
            owners += [i] * (len(pairs) - len(owners))
        totals = [0.0] * len(requests)
        scores = score_continuations(self.model, pairs, watch=self.watch)
        for i, score in zip(owners, scores, strict=True):
            totals[i] += score.logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each context's continuation, up to one of the task's `until`."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for numbers in alike.values():
            how = dict(requests[numbers[0]].args[1])
            until, count = how.get("until") or [], int(how.get("max_gen_toks", _MAX_NEW_TOKENS))
            room = self.model.config.max_seq_len - count
            if room < 1:
                raise InputError(
                    f"the task wants {count} new tokens and the model's context has "
                    f"{self.model.config.max_seq_len}; take a model with a longer one"
                )
            prompts = [
                ([*self.start, *self.tokenizer.encode(requests[i].args[0])] or [self.prefix])[
                    -room:
                ]
                for i in numbers
            ]
            batches = complete_all(
                self.model,
                self.tokenizer,
                prompts,
                max_new_tokens=count,
                stop=[until] if isinstance(until, str) else [text for text in until if text],
                batch_size=self.batch_size,
                sampling=_sampling(how),
            )
            for batch in self.watch(batches, -(-len(prompts) // self.batch_size)):
                for number, row in batch:
                    texts[numbers[number]] = row.text
        return texts

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.fingerprint


def _sampling(how: dict[str, Any]) -> SamplingConfig:
    warm = float(how.get("temperature", 0.0) or 0.0)
    if not how.get("do_sample", warm > 0) or warm == 0:
        return SamplingConfig()
    given = {name: how[name] for name in ("top_k", "top_p", "min_p") if how.get(name)}
    return SamplingConfig(temperature=warm, seed=0, **given)


def run(
    model: Transformer,
    tokenizer: Tokenizer,
    names: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 16,
    watch: Watch = lambda batches, count: batches,
) -> dict[str, dict[str, Any]]:
    """Of each task its metrics, as lm-eval names them, with their `_stderr`.

    names: lm-eval's, or the paths of task files (.yaml). Data sets come from the local cache of
    `datasets`, or from the network where there is one. Raises MissingExtraError (on import),
    InputError for a name that lm-eval does not know, DataError for data that cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [Path(name) for name in names if name.endswith(".yaml")]
    tasks = [_task_in(Path(name)) if name.endswith(".yaml") else name for name in names]
    manager = TaskManager(include_path=sorted({str(file.parent.resolve()) for file in files}))
    for name in tasks:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise InputError(f"lm-eval has no task {name!r}{near}; a local one ends in .jsonl")
    try:
        found = simple_evaluate(
            model=TransformerLM(model, tokenizer, batch_size, watch),
            tasks=tasks,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (OSError, ConnectionError) as error:
        if isinstance(error, Gpt2LlamaError):
            raise
        said = " ".join(str(error).split())[:300]
        raise DataError(f"the data of {', '.join(names)} cannot be had here: {said}") from error
    results: dict[str, dict[str, Any]] = found["results"]
    return {
        task: {
            key.removesuffix(",none"): value
            for key, value in figures.items()
            if isinstance(value, int | float)
        }
        for task, figures in results.items()
    }


def _task_in(path: Path) -> str:
    """The name that one of lm-eval's task files gives to its task."""
    try:
        found = re.search(r"^task:\s*(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read {path}: {error}") from error
    if found is None:
        raise DataError(f"{path} is no task of lm-eval's: it has no line 'task: NAME'")
    return found[1].strip("'\"")
