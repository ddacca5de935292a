"""Strict readers of JSON and text files: every fault is named with its file and line.

Reading has two halves. The main process cuts a source into batches of a few megabytes, and a batch's `records`
are parsed where they are used, in several processes. The readers of `datasets` are not used, because they
count bad lines from the start of a block, never name the file, turn numbers and null into text, and change
texts that look like dates.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np

from trainer.data.remote_files import SourcePath
from trainer.errors import DataError
from trainer.logs import get_logger, log_once

__all__ = [
    "JsonOptions",
    "LineBatch",
    "RecordBatch",
    "SourceBatch",
    "TextBatch",
    "TextOptions",
    "TokenBatch",
    "json_batches",
    "text_batches",
]

logger = get_logger(__name__)


class SourceBatch(Protocol):
    """Some records of a source, in order. It travels to worker processes."""

    @property
    def num_bytes(self) -> int:
        """Size in the source, for progress."""

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each; the place names the file and its line or row. DataError at the first bad one."""


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READ_BYTES = 1 << 22
_JSON_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}


@dataclass(frozen=True)
class JsonOptions:
    """How to read JSON files."""

    encoding: str = "utf-8"
    """Encoding of the files."""
    field: str | None = None
    """Key of the one object in a file under which the list of objects is; None: JSON lines or one array."""


def _not_decodable(file: SourcePath, place: str, encoding: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        file,
        f"{place} is not valid {encoding.removesuffix('-sig')}",
        found=f"byte 0x{error.object[error.start]:02x}",
        fix=f"convert the file to utf-8 (error: {error.reason})",
    )


def json_batches(file: SourcePath, options: JsonOptions) -> Iterator[LineBatch | RecordBatch]:
    """Batches of a JSON file: one object per line, one array of objects, or the list under `options.field`.

    Lines are only cut here, and parsed by whoever asks for the records. Blank lines are dropped, a byte order
    mark is no text, and .gz, .bz2 and .xz are unpacked.

    Raises:
        DataError: names the file, line (or entry) and what is wrong there.
    """
    try:
        with file.open("rb") as raw, _OPENERS.get(file.suffix, contextlib.nullcontext)(raw) as stream:
            if options.field is not None:
                yield _list_of_records(file, _list_under(file, stream, options))
                return
            first = stream.readline().removeprefix(codecs.BOM_UTF8)
            content = first.strip()
            if content.startswith(b"[") and not _is_json(content):
                text = _decode(file, "the array", first + stream.read(), options.encoding)
                yield _list_of_records(file, _parse(file, "the array", text, cut_off=False))
                return
            line, block = 1, first + stream.read(max(0, _READ_BYTES - len(first)))
            while block:
                block += stream.readline() if not block.endswith(b"\n") else b""
                yield LineBatch(file, line, block, options.encoding)
                line += block.count(b"\n")
                block = stream.read(_READ_BYTES)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(file, f"cannot be read or unpacked ({error})") from error


@dataclass(frozen=True)
class LineBatch:
    """Whole lines of a JSON file, not parsed yet."""

    file: SourcePath
    first_line: int
    """Counted from 1."""
    content: bytes
    encoding: str = "utf-8"

    @property
    def num_bytes(self) -> int:
        """Size in the source, for progress."""
        return len(self.content)

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each line that is not blank. DataError names the first that is no object."""
        lines = self.content.split(b"\n")
        for number, raw in enumerate(lines, self.first_line):
            content = raw.strip()
            if not content:
                continue
            place = f"line {number}"
            # The last piece ends without a newline, so the file may end inside it.
            cut_off = number == self.first_line + len(lines) - 1
            record = _parse(self.file, place, _decode(self.file, place, content, self.encoding), cut_off=cut_off)
            if number == 1 and isinstance(record, list) and record and isinstance(record[0], dict):
                yield from _list_of_records(self.file, record, "line 1 ").records()
            else:
                yield f"{self.file}: {place}", _object(self.file, place, record)


@dataclass(frozen=True)
class RecordBatch:
    """Records that are parsed already."""

    entries: list[tuple[str, dict[str, Any]]]
    """(place, record)."""
    num_bytes: int = 0

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each."""
        return iter(self.entries)


@dataclass(frozen=True)
class TokenBatch:
    """Documents that are token ids already."""

    where: str
    first: int
    """Number of the first document."""
    ids: np.ndarray
    sizes: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Size in the source, for progress."""
        return self.ids.nbytes

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each document; input_ids is an array."""
        parts = np.split(self.ids, np.cumsum(self.sizes)[:-1])
        for number, ids in enumerate(parts, self.first):
            yield f"{self.where}: document {number}", {"input_ids": ids}


def _list_of_records(file: SourcePath, records: Any, before: str = "") -> RecordBatch:
    if not isinstance(records, list):
        raise DataError(file, "does not hold a list of objects", found=_kind(records))
    places = ((f"{before}entry {index}", record) for index, record in enumerate(records, 1))
    entries = [(f"{file}: {place}", _object(file, place, record)) for place, record in places]
    return RecordBatch(entries, file.stat().st_size)


def _object(file: SourcePath, place: str, record: object) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(file, f"{place} is {_kind(record)}", rule='an object such as {"text": "..."}')
    return record


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(file: SourcePath, place: str, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise _not_decodable(file, f"{place}, byte {error.start} of it,", encoding, error) from None
    except LookupError:
        raise DataError("data.source_dataset_params.encoding", "is unknown", found=encoding) from None


def _parse(file: SourcePath, place: str, content: str, *, cut_off: bool) -> Any:
    shown = content if len(content) <= 60 else content[:57] + "..."
    try:
        return json.loads(content)
    except RecursionError:
        raise DataError(file, f"{place} is nested too deeply", found=shown) from None
    # json also raises a plain ValueError, for numbers of thousands of digits.
    except ValueError as error:
        problem = "is cut off: the file ends inside it" if cut_off and content[0] in "{[" else "is not valid JSON"
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            file, f"{place} {problem} ({reason})", found=shown, rule='one object per line, such as {"text": "..."}'
        ) from None


def _list_under(file: SourcePath, stream: IO[bytes], options: JsonOptions) -> Any:
    content = _decode(file, "the file", stream.read().removeprefix(codecs.BOM_UTF8), options.encoding)
    whole = _parse(file, "the file", content, cut_off=False)
    if not isinstance(whole, dict) or options.field not in whole:
        found = ", ".join(whole) if isinstance(whole, dict) else _kind(whole)
        raise DataError(file, f"has no field {options.field}", found=found, fix="set data.source_dataset_params.field")
    return whole[options.field]


def _kind(value: object) -> str:
    return _JSON_KINDS.get(type(value), "a text")


def text_batches(files: Sequence[SourcePath], options: TextOptions) -> Iterator[TextBatch]:
    """Text files, small ones together."""
    group: list[SourcePath] = []
    size = 0
    for file in files:
        size += file.stat().st_size
        group.append(file)
        if size >= _READ_BYTES:
            yield TextBatch(tuple(group), options, size)
            group, size = [], 0
    if group:
        yield TextBatch(tuple(group), options, size)


@dataclass(frozen=True)
class TextOptions:
    """How to read text files."""

    text_key: str = "text"
    """Key of the text in each record."""
    sample_by: str = "document"
    """document (a record is a file), paragraph (up to a blank line) or line."""
    # This encoding drops a byte order mark, which is no part of the text.
    encoding: str = "utf-8-sig"
    encoding_errors: str | None = None
    keep_linebreaks: bool = False
    """sample_by line: lines end with their newline."""


@dataclass(frozen=True)
class TextBatch:
    """Whole text files, not read yet."""

    files: tuple[SourcePath, ...]
    options: TextOptions
    num_bytes: int

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each document. DataError names the line and byte that cannot be decoded."""
        key, sample_by = self.options.text_key, self.options.sample_by
        for file in self.files:
            text = _read_text(file, self.options)
            if sample_by == "document":
                yield str(file), {key: text}
                continue
            line = 1
            for part in _parts_of(text, sample_by):
                kept = part if self.options.keep_linebreaks and sample_by == "line" else part.rstrip("\n")
                if kept or sample_by == "line":
                    yield f"{file}: line {line}", {key: kept}
                line += part.count("\n")


def _parts_of(text: str, sample_by: str) -> Iterator[str]:
    border = re.compile("\n" if sample_by == "line" else "\n\n+")
    start = 0
    for match in border.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _read_text(file: SourcePath, options: TextOptions) -> str:
    try:
        content = file.read_bytes()
        text = content.decode(options.encoding, options.encoding_errors or "strict")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise _not_decodable(file, f"line {line}, byte {error.start},", options.encoding, error) from None
    except LookupError:
        raise DataError("data.source_dataset_params.encoding", "is unknown", found=options.encoding) from None
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror or error})") from error
    if "\r" in text:
        log_once(logger, "source: carriage returns are read as newlines (first in %s)", file)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text
