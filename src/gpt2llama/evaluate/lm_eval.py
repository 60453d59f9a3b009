"""lm-eval's tasks (EleutherAI's lm-evaluation-harness, an extra) on our Transformer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, InputError, MissingExtraError, did_you_mean
from ..generate.batch import complete_all
from ..generate.sampling import SamplingConfig
from .scoring import encode_pair, score_continuations

try:
    from lm_eval import utils
    from lm_eval.api.model import LM
except ModuleNotFoundError as error:
    raise MissingExtraError("lm-eval", "eval") from error

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..tokenizer import Tokenizer

_MAX_NEW_TOKENS = 256  # lm-eval's, where a task says nothing


class TransformerLM(LM):  # type: ignore[misc]  # lm-eval is no dependency: Any to mypy
    """What lm-eval asks of a model: likelihoods of texts, greedy or sampled continuations.

    A text gets the tokenizer's BOS where the tokenizer adds one; one without a context follows
    BOS, or else EOS. What is too long for the model's context loses its beginning.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch_size: int = 16) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.start = [tokenizer.bos_id] if tokenizer.adds_bos else []
        prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if prefix is None:
            raise InputError("lm-eval needs a tokenizer with a BOS or EOS, and this one has none")
        self.prefix = prefix

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding says it) of each (context, continuation)."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            first, rest = encode_pair(self.tokenizer, context, continuation)
            pairs.append(([*self.start, *first] or [self.prefix], rest))
        scores = score_continuations(self.model, pairs)
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Of each whole text, in lm-eval's windows: every token once, the last window full."""
        pairs, owners = [], []
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
        for i, score in zip(owners, score_continuations(self.model, pairs), strict=True):
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
            for batch in complete_all(
                self.model,
                self.tokenizer,
                prompts,
                max_new_tokens=count,
                stop=[until] if isinstance(until, str) else [text for text in until if text],
                batch_size=self.batch_size,
                sampling=_sampling(how),
            ):
                for number, row in batch:
                    texts[numbers[number]] = row.text
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        raise NotImplementedError("lm-eval's chats are not supported; --tasks FILE.jsonl has them")


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
) -> dict[str, dict[str, Any]]:
    """Of each task its metrics, as lm-eval names them, with their `_stderr`.

    names: lm-eval's, or the paths of task files (.yaml). Data sets come from the local cache of
    `datasets`, or from the network where there is one. Raises MissingExtraError (on import),
    InputError for a name that lm-eval does not know, DataError for data that cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager()
    tasks: list[Any] = []
    for name in names:
        if Path(name).suffix == ".yaml":
            tasks.append(_from_file(Path(name)))
            continue
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise InputError(f"lm-eval has no task {name!r}{near}; a local one ends in .jsonl")
        tasks.append(name)
    try:
        found = simple_evaluate(
            model=TransformerLM(model, tokenizer, batch_size),
            tasks=tasks,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (OSError, ConnectionError) as error:
        if isinstance(error, (DataError, InputError)):
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


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"there is no task file {path}")
    config: dict[str, Any] = utils.load_yaml_config(str(path))
    return config
