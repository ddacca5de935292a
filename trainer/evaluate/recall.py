"""Recall of a key that stands somewhere in a long text: by the text's length and the key's place in it.

A row is filling text of a given length with one sentence that holds a random number, then a question for it. The answer
is right if each of its tokens is the most probable one: what greedy generation would write.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.tokenizers import Tokenizer
from trainer.errors import ConfigError
from trainer.evaluate.rows import score_continuations
from trainer.model.rwkv7 import RWKV7

__all__ = ["RecallOptions", "RecallTable", "measure_recall"]

_FILLING = (
    "The river runs slowly past the old mill. Clouds drift over the hills, and a cart rolls home along the road. "
    "Somewhere a dog barks twice. The baker sweeps the step before his door. "
)


@dataclass(frozen=True, kw_only=True)
class RecallOptions:
    """What is asked, and how often."""

    lengths: Sequence[int] = (1024, 4096, 16384)
    """Tokens before the answer, the question included."""
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Place of the key in the filling text: 0 = at its start, 1 = at its end, just before the question."""
    samples: int = 4
    """Keys that are tried for each length and depth."""
    key_digits: int = 5
    needle: str = "The pass key is {key}. Remember it: {key} is the pass key. "
    """Sentence with the key; {key} stands for it."""
    question: str = "\n\nWhat is the pass key? The pass key is"
    """Text after the filling."""
    answer: str = " {key}"
    """What must follow."""
    filling: str = _FILLING
    """Text that is repeated around the key."""
    seed: int = 0
    rows: int = 8
    """Rows that are read side by side."""
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        for option, name in (("--needle", "needle"), ("--answer", "answer")):
            if "{key}" not in getattr(self, name):
                raise ConfigError(
                    option, "has no place for the key", found=getattr(self, name), fix="put {key} into it"
                )
        if not self.filling.strip():
            raise ConfigError("--filling", "is empty")
        for option, value in (
            ("--samples", self.samples),
            ("--key-digits", self.key_digits),
            ("--batch-size", self.rows),
        ):
            if value < 1:
                raise ConfigError(option, "out of range", found=value, rule="at least 1")
        bad = [depth for depth in self.depths if not 0 <= depth <= 1]
        if bad:
            raise ConfigError("--depths", "out of range", found=bad[0], rule="from 0 to 1")


@dataclass(frozen=True)
class RecallTable:
    """Recall by depth (rows) and length (columns)."""

    lengths: list[int]
    depths: list[float]
    right: list[list[float]]
    """Share of right answers."""
    log_probability: list[list[float]]
    """Mean log-probability of the whole right answer, in nats."""
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """One row for each cell."""
        return [
            {
                "length": length, "depth": depth, "samples": self.samples, "right": self.right[row][column],
                "log_probability": self.log_probability[row][column],
            }
            for row, depth in enumerate(self.depths)
            for column, length in enumerate(self.lengths)
        ]  # fmt: skip


class _Texts:
    """Makes rows of exactly the wanted number of tokens."""

    def __init__(self, options: RecallOptions, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.random = random.Random(options.seed)
        self.question = tokenizer.encode(options.question)
        self.filling = tokenizer.encode(options.filling)

    def keys(self) -> Iterator[tuple[list[int], list[int]]]:
        """Tokens of the needle and of the answer."""
        for _ in range(self.options.samples):
            key = str(self.random.randrange(10 ** (self.options.key_digits - 1), 10**self.options.key_digits))
            yield (
                self.tokenizer.encode(self.options.needle.replace("{key}", key)),
                self.tokenizer.encode(self.options.answer.replace("{key}", key)),
            )

    def row(self, needle: list[int], length: int, depth: float) -> list[int]:
        """Filling, needle, filling, question: `length` tokens, the filling cut to fit."""
        room = length - len(needle) - len(self.question)
        if room < 0:
            rule = f"at least {length - room}, the tokens of key sentence and question"
            raise ConfigError("--lengths", "too short", found=length, rule=rule)
        filling = (self.filling * (room // len(self.filling) + 1))[:room]
        before = round(depth * room)
        return [*filling[:before], *needle, *filling[before:], *self.question]


def measure_recall(
    model: RWKV7,
    tokenizer: Tokenizer,
    options: RecallOptions,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> RecallTable:
    """Ask for keys at each depth of texts of each length. Memory does not grow with the length.

    Args:
        model: on its device.
        tokenizer: the one that the model was trained with.
        options: what is asked.
        progress: called with the number of tokens read since the last call.

    Raises:
        ConfigError: a length has no room for key and question.
    """
    texts = _Texts(options, tokenizer)
    keys = list(texts.keys())
    lengths, depths = sorted(set(options.lengths)), sorted(set(options.depths))
    texts.row(max((needle for needle, _ in keys), key=len), lengths[0], 0.0)
    right = [[0.0] * len(lengths) for _ in depths]
    log_probability = [[0.0] * len(lengths) for _ in depths]
    for column, length in enumerate(lengths):
        cells = [(row, key) for row in range(len(depths)) for key in keys]
        for first in range(0, len(cells), options.rows):
            part = cells[first : first + options.rows]
            pairs = [(texts.row(needle, length, depths[row]), answer) for row, (needle, answer) in part]
            for (row, _), score in zip(part, score_continuations(model, pairs, options.chunk_tokens), strict=True):
                right[row][column] += score.is_greedy / len(keys)
                log_probability[row][column] += score.log_probability / len(keys)
            progress(sum(len(context) for context, _ in pairs))
    return RecallTable(lengths, depths, right, log_probability, len(keys))
