"""Tasks of lm-evaluation-harness on a model of this trainer: `pip install lm_eval`, then `evaluate.py tasks`.

`Scorer` answers the harness's three kinds of requests and needs nothing of it; `run_tasks` connects the two. Every
text follows token 0, which ends a document in the official training data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.checkpoint.atomic import atomic_file
from trainer.data.tokenizers import Tokenizer
from trainer.errors import ConfigError
from trainer.evaluate.documents import EvaluationOptions
from trainer.evaluate.progress import TokenProgress
from trainer.evaluate.rows import read_rows, score_continuations
from trainer.generate.engine import token_model
from trainer.generate.sampling import Sampler, Sampling
from trainer.model.rwkv7 import RWKV7

__all__ = ["Scorer", "run_tasks", "write_results"]

_START_OF_TEXT = 0
_MAX_NEW_TOKENS = 256

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


class Scorer:
    """Log-probabilities and continuations of texts, several texts at a time.

    Args:
        model: on its device.
        tokenizer: the one that the model was trained with.
        options: tokens per chunk, and texts side by side.
    """

    def __init__(self, model: RWKV7, tokenizer: Tokenizer, options: EvaluationOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._token_model = token_model(model)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log-probability of the continuation, and whether greedy decoding gives it."""
        return self._score([self._split(context, continuation) for context, continuation in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of whole texts of any length, each token after all before it."""
        pairs = [([_START_OF_TEXT], self.tokenizer.encode(text)) for text in texts]
        return [log_probability for log_probability, _ in self._score(pairs)]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue each context until a stop text, as its settings say: until, max_gen_toks, do_sample, temperature, top_p, top_k."""
        contexts = [([_START_OF_TEXT, *self.tokenizer.encode(context)], settings) for context, settings in requests]
        return self._batched(contexts, lambda item: -len(item[0]), lambda item: len(item[0]), self._generate)

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of context and continuation, as they are in the joined text; spaces before a word belong to it."""
        stem = context.rstrip()
        continuation, context = context[len(stem) :] + continuation, stem
        whole, before = self.tokenizer.encode(context + continuation), self.tokenizer.encode(context)
        if whole[: len(before)] != before or len(whole) == len(before):
            # A token spans the border: then each part is encoded alone.
            return [_START_OF_TEXT, *before], self.tokenizer.encode(continuation)
        return [_START_OF_TEXT, *before], whole[len(before) :]

    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        def score(part: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
            scores = score_continuations(self.model, part, self.options.ctx_len)
            return [(found.log_probability, found.is_greedy) for found in scores]

        # Questions with several answers have one context, which is read once if they come together.
        def place(pair: tuple[list[int], list[int]]) -> tuple[int, list[int], int]:
            return -len(pair[0]), pair[0], -len(pair[1])

        return self._batched(pairs, place, lambda pair: len(pair[0]) + len(pair[1]), score)

    def _batched(
        self,
        items: list[_Request],
        place: Callable[[_Request], Any],
        size: Callable[[_Request], int],
        answer: Callable[[list[_Request]], list[_Result]],
    ) -> list[_Result]:
        """Answers in the order of the items, made for neighbours by `place` together; `size` is in tokens."""
        order = sorted(range(len(items)), key=lambda index: place(items[index]))
        results: dict[int, _Result] = {}
        progress = TokenProgress(sum(map(size, items)))
        for start in range(0, len(order), self.options.rows):
            part = order[start : start + self.options.rows]
            results.update(zip(part, answer([items[index] for index in part]), strict=True))
            progress(sum(size(items[index]) for index in part))
        progress.finish()
        return [results[index] for index in range(len(items))]

    @torch.no_grad()
    def _generate(self, part: list[tuple[list[int], Mapping[str, Any]]]) -> list[str]:
        for chunk in read_rows(self.model, [tokens for tokens, _ in part], self.options.ctx_len):
            last = chunk
        hidden_BC, state = last.hidden_BTC[:, -1], last.state
        rows = [_Row(self.tokenizer, settings) for _, settings in part]
        while not all(row.is_done for row in rows):
            logits_BV = self.model.head(hidden_BC).float()
            ids = [row.pick(logits_V) for row, logits_V in zip(rows, logits_BV, strict=True)]
            hidden_BTC, state = self._token_model(torch.tensor(ids, device=hidden_BC.device)[:, None], state)
            hidden_BC = hidden_BTC[:, -1]
        return [row.text for row in rows]


class _Row:
    """The text that is written after one context."""

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        until = settings.get("until") or []
        self.stop = [until] if isinstance(until, str) else [text for text in until if text]
        self.left = int(settings.get("max_gen_toks", settings.get("max_new_tokens", _MAX_NEW_TOKENS)))
        is_random = bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
        sampling = Sampling(
            temperature=float(settings.get("temperature", 1.0)) if is_random else 0.0,
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k") or 0),
        )
        self.sampler = Sampler(sampling, 0)
        self.tokenizer, self.ids, self.text, self.is_done = tokenizer, list[int](), "", self.left < 1

    def pick(self, logits_V: torch.Tensor) -> int:
        """The next token; that of a row that is done has no effect."""
        if self.is_done:
            return _START_OF_TEXT
        token = self.sampler.pick(logits_V)
        self.left -= 1
        if token == self.tokenizer.end_of_document:
            self.is_done = True
            return token
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.text = text[: min(ends)] if ends else text
        self.is_done = bool(ends) or self.left < 1
        return token


def _adapter(scorer: Scorer) -> Any:
    """The model as a class of the harness."""
    from lm_eval.api.model import LM

    class HarnessModel(LM):  # type: ignore[misc]  # untyped
        """Hands requests on, and answers to the harness's cache."""

        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return self._remember("loglikelihood", requests, scorer.loglikelihood([r.args for r in requests]))

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            texts = [request.args[0] for request in requests]
            return self._remember("loglikelihood_rolling", requests, scorer.loglikelihood_rolling(texts))

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return self._remember("generate_until", requests, scorer.generate_until([r.args for r in requests]))

        def _remember(self, kind: str, requests: list[Any], results: list[Any]) -> list[Any]:
            for request, result in zip(requests, results, strict=True):
                self.cache_hook.add_partial(kind, request.args, result)
            return results

    return HarnessModel()


def run_tasks(
    model: RWKV7,
    tokenizer: Tokenizer,
    names: Sequence[str],
    options: EvaluationOptions,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    task_folder: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of tasks of lm-evaluation-harness, by task.

    Args:
        model: on its device.
        tokenizer: the one that the model was trained with.
        names: of the tasks.
        options: tokens per chunk, and texts side by side.
        num_fewshot: examples before each question; None = as the task says.
        limit: use only so many questions of each task.
        task_folder: a folder with tasks of the user's own.

    Raises:
        ConfigError: the harness is not installed, or does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as err:
        raise ConfigError("evaluate.py tasks", "needs lm-evaluation-harness", fix="pip install lm_eval") from err
    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise ConfigError(
            "--tasks", "is no task of lm_eval", found=", ".join(unknown), fix="lm_eval ls tasks lists them"
        )
    scorer = Scorer(model, tokenizer, options)
    found = simple_evaluate(
        model=_adapter(scorer), tasks=list(names), num_fewshot=num_fewshot, limit=limit, task_manager=manager
    )
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def write_results(results: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Write metrics by task as JSON.

    Raises:
        StorageError: if it cannot be written.
    """
    with atomic_file(out) as temp:
        temp.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
