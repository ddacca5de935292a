"""One record of a source as segments: pieces of text, each trained or not. Detected from the columns if not given.

Formats of conversations are in `conversations`. To add a format, write a class with the four members of
`RecordFormat` and let `find_format` return it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trainer.errors import ConfigError, DataError

__all__ = [
    "VERSION",
    "MultiColumnFormat",
    "PromptCompletionFormat",
    "RecordFault",
    "RecordFormat",
    "Segment",
    "TextFormat",
    "TokenizedFormat",
    "kind_of",
    "merge_segments",
    "refuse_escapes",
    "text_of",
]

VERSION = 1
"""Raise it when the segments of any record change; prepared data sets are then rebuilt."""

_ESCAPES = {"\\n": "a newline", "\\r": "a carriage return", "\\t": "a tab"}
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "an array"}


class Segment(NamedTuple):
    """A piece of a document's text."""

    text: str
    learn: bool
    """Whether its tokens are trained, as targets."""


class RecordFault(Exception):
    """A record that cannot be used; the caller knows where it is and says so, see `located`.

    Args:
        problem: what is wrong, such as `prompt is null`.
        found: the offending value, if there is one.
        rule: what a usable value looks like.
        fix: what to do about it.
    """

    def __init__(
        self, problem: str, *, found: str | None = None, rule: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(problem)
        self.problem, self.found, self.rule, self.fix = problem, found, rule, fix

    def located(self, place: str) -> DataError:
        """The error for the user; `place` is the file and its line or row."""
        return DataError(
            place, self.problem, found=self.found, rule=self.rule, fix=self.fix or "repair or drop the row"
        )


class RecordFormat(Protocol):
    """Turns records into segments. Holds settings only, so that it travels to worker processes."""

    @property
    def name(self) -> str:
        """As shown to the user, with the columns it reads."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns that it reads, some of which a record may lack; None = all."""

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may be untrained."""

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """The segments of a record, in order. RecordFault if it cannot be used."""


def kind_of(value: object) -> str:
    """The type of a value in the words of JSON: `null`, `a number`, `a list`."""
    return _KINDS.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)


def text_of(record: Mapping[str, Any], key: str, *, may_lack: bool = False) -> str:
    """The text under `key`; "" if it is missing or null and `may_lack`. RecordFault if it is no text."""
    value = record.get(key)
    if value is None and may_lack:
        return ""
    if key not in record:
        raise RecordFault(f"has no {key}", found=", ".join(map(str, record)) or "nothing")
    if not isinstance(value, str):
        shown = None if value is None else str(value)[:60]
        raise RecordFault(f"{key} is {kind_of(value)}", found=shown, rule="a text")
    return value


def merge_segments(segments: Sequence[Segment]) -> list[Segment]:
    """The same text in as few segments as possible: neighbours that are both trained, or both not, are joined.

    Segments are tokenized apart, so this leaves borders only where training starts or ends.
    """
    merged: list[Segment] = []
    for text, learn in segments:
        if not text:
            continue
        if merged and merged[-1].learn == learn:
            merged[-1] = Segment(merged[-1].text + text, learn)
        else:
            merged.append(Segment(text, learn))
    return merged


def refuse_escapes(key: str, text: str) -> None:
    """Refuse a template text that holds the two characters backslash and n: single quotes in YAML leave them as they are.

    Raises:
        ConfigError: names the setting.
    """
    for escape, meaning in _ESCAPES.items():
        if escape in text:
            raise ConfigError(
                key,
                f"holds the two characters {escape}, not {meaning}: YAML reads them so in single quotes and without quotes",
                found=text,
                fix=f'write it in double quotes, such as "...{escape}..."',
            )


@dataclass(frozen=True)
class TextFormat:
    """Plain text in one column, all of it trained."""

    key: str = "text"

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"text (column {self.key})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column."""
        return (self.key,)

    @property
    def has_mask(self) -> bool:
        """False: everything is trained."""
        return False

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """The text."""
        return [Segment(text_of(record, self.key), True)]


@dataclass(frozen=True)
class PromptCompletionFormat:
    """A prompt and what follows it; nothing is put between them."""

    train_prompt: bool = False
    prompt_key: str = "prompt"
    completion_key: str = "completion"

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"prompt_completion (columns {self.prompt_key}, {self.completion_key})"

    @property
    def columns(self) -> tuple[str, ...]:
        """Both columns."""
        return self.prompt_key, self.completion_key

    @property
    def has_mask(self) -> bool:
        """Whether the prompt is untrained."""
        return not self.train_prompt

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Prompt, completion."""
        prompt, completion = text_of(record, self.prompt_key), text_of(record, self.completion_key)
        return [Segment(prompt, self.train_prompt), Segment(completion, True)]


@dataclass(frozen=True)
class MultiColumnFormat:
    """Several columns, each with a prefix and a suffix that are trained if and only if the column is.

    Empty columns are left out together with their prefix and suffix. A separator is trained only between two
    trained columns.
    """

    keys: tuple[str, ...] = ("instruction", "input", "output")
    prefix: tuple[str, ...] = ("Instruction:\n", "Input:\n", "Output:\n")
    suffix: tuple[str, ...] = ("", "", "")
    train_mask: tuple[bool, ...] = (True, False, True)
    separator: str = "\n\n"

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"multi_column (columns {', '.join(self.keys)})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in order."""
        return self.keys

    @property
    def has_mask(self) -> bool:
        """Whether a column is untrained."""
        return not all(self.train_mask)

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Prefix, value and suffix of each column that is not empty, with separators between."""
        parts = zip(self.keys, self.prefix, self.suffix, self.train_mask, strict=True)
        segments: list[Segment] = []
        for key, prefix, suffix, learn in parts:
            value = text_of(record, key, may_lack=True)
            if not value:
                continue
            if segments:
                segments.append(Segment(self.separator, learn and segments[-1].learn))
            segments.append(Segment(prefix + value + suffix, learn))
        if not segments:
            raise RecordFault(
                f"all of {', '.join(self.keys)} are empty or missing", found=", ".join(record) or "nothing"
            )
        return segments


@dataclass(frozen=True)
class TokenizedFormat:
    """Records that are token ids already; nothing is put at their end.

    loss_mask or attention_mask says which tokens are trained as targets, or labels with -100 where none is.
    """

    mask_key: str | None = None

    @property
    def name(self) -> str:
        """As shown to the user."""
        return f"tokenized (columns input_ids{f', {self.mask_key}' if self.mask_key else ''})"

    @property
    def columns(self) -> tuple[str, ...]:
        """Ids and mask."""
        return ("input_ids", self.mask_key) if self.mask_key else ("input_ids",)

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask."""
        return self.mask_key is not None

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Nothing: there is no text."""
        return []

    def tokens(self, record: Mapping[str, Any], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int64, and mask, bool. RecordFault if they cannot be used."""
        ids = _integers(record, "input_ids")
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
            rule = f"0 <= id < {vocab_size}, the size of data.tokenizer's vocabulary"
            raise RecordFault(f"input_ids[{position}] is not in the vocabulary", found=str(ids[position]), rule=rule)
        if self.mask_key is None:
            return ids, np.ones(len(ids), bool)
        mask = _integers(record, self.mask_key)
        if len(mask) != len(ids):
            raise RecordFault(f"{self.mask_key} and input_ids differ in length", found=f"{len(mask)} and {len(ids)}")
        return ids, mask != -100 if self.mask_key == "labels" else mask != 0


def _integers(record: Mapping[str, Any], key: str) -> np.ndarray:
    value = record.get(key)
    if isinstance(value, np.ndarray):
        return value.astype(np.int64)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RecordFault(f"{key} is no list of integers", found=kind_of(value))
    return np.array(value, np.int64)
