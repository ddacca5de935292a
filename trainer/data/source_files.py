"""Strict readers of single source files: every fault is named with its file and line or row.

`datasets` alone counts bad lines from the start of a block, never names the file, turns numbers and null into
text, changes texts that look like dates, and reads a damaged Arrow stream up to the damage. These readers run
before it.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer.data.store import read_arrow_batches
from trainer.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["JsonOptions", "check_arrow", "check_parquet", "check_text", "read_json_texts"]

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_READ_BYTES = 1 << 22
# datasets' text builder puts a whole file into one Arrow string with 32-bit offsets.
_LARGEST_TEXT_BYTES = (1 << 31) - 1
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

    text_key: str
    """Key of the text in each object."""
    encoding: str = "utf-8"
    """Encoding of the files."""
    field: str | None = None
    """Key of the one object in a file under which the list of objects is; None: JSON lines or one array."""


def check_text(file: Path, encoding: str = "utf-8", errors: str = "strict") -> bool:
    """Make sure that a text file decodes; true if it holds carriage returns, which reading turns into newlines.

    Raises:
        DataError: names the file, line and byte of the first fault, or says that the file is too large.
    """
    if file.stat().st_size > _LARGEST_TEXT_BYTES:
        raise DataError(file, "is too large", rule="at most 2 GiB per text file", fix="use JSON lines or parquet")
    decoder = _decoder(encoding, errors)
    has_returns, line = False, 1
    with file.open("rb") as stream:
        while True:
            block = stream.read(_READ_BYTES)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise _not_decodable(file, f"line {line}", encoding, error) from None
            if not block:
                return has_returns
            line += block.count(b"\n")
            has_returns = has_returns or b"\r" in block


def _decoder(encoding: str, errors: str) -> codecs.IncrementalDecoder:
    try:
        return codecs.getincrementaldecoder(encoding)(errors)
    except LookupError:
        raise DataError("data.source_dataset_params.encoding", "is unknown", found=encoding) from None


def _not_decodable(file: Path, place: str, encoding: str, error: UnicodeDecodeError) -> DataError:
    return DataError(
        file,
        f"{place} is not valid {encoding}",
        found=f"byte 0x{error.object[error.start]:02x}",
        fix=f"convert the file to utf-8 (error: {error.reason})",
    )


def read_json_texts(file: Path, options: JsonOptions) -> Iterator[str]:
    """Texts of a JSON file: one object per line, one array of objects, or the list under `options.field`.

    Blank lines are dropped, a byte order mark is no text, and .gz, .bz2 and .xz are unpacked.

    Raises:
        DataError: names the file, line (or entry) and what is wrong there.
    """
    try:
        with _OPENERS.get(file.suffix, open)(file, "rb") as stream:
            if options.field is not None:
                yield from _texts_of_list(file, _list_under(file, stream, options), options.text_key)
                return
            for place, record in _json_lines(file, stream, options):
                yield _text_of(file, place, record, options.text_key)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(file, f"cannot be read or unpacked ({error})") from error


def _json_lines(file: Path, stream: IO[bytes], options: JsonOptions) -> Iterator[tuple[str, Any]]:
    for number, raw in enumerate(stream, 1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        content = raw.strip()
        if not content:
            continue
        if number == 1 and content.startswith(b"[") and not _is_json(content):
            rest = raw + stream.read()
            records = _parse(file, "the array", _decode(file, "the array", rest, options.encoding), cut_off=False)
            yield from ((f"entry {index}", record) for index, record in enumerate(records, 1))
            return
        place = f"line {number}"
        cut_off = not raw.endswith(b"\n")
        record = _parse(file, place, _decode(file, place, content, options.encoding), cut_off=cut_off)
        if number == 1 and isinstance(record, list) and record and isinstance(record[0], dict):
            yield from ((f"line 1 entry {index}", entry) for index, entry in enumerate(record, 1))
        else:
            yield place, record


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(file: Path, place: str, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise _not_decodable(file, place, encoding, error) from None
    except LookupError:
        raise DataError("data.source_dataset_params.encoding", "is unknown", found=encoding) from None


def _parse(file: Path, place: str, content: str, *, cut_off: bool) -> Any:
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


def _list_under(file: Path, stream: IO[bytes], options: JsonOptions) -> Any:
    content = _decode(file, "the file", stream.read().removeprefix(codecs.BOM_UTF8), options.encoding)
    whole = _parse(file, "the file", content, cut_off=False)
    if not isinstance(whole, dict) or options.field not in whole:
        found = ", ".join(whole) if isinstance(whole, dict) else _kind(whole)
        raise DataError(file, f"has no field {options.field}", found=found, fix="set data.source_dataset_params.field")
    return whole[options.field]


def _texts_of_list(file: Path, records: Any, text_key: str) -> Iterator[str]:
    if not isinstance(records, list):
        raise DataError(file, "does not hold a list of objects", found=_kind(records))
    for index, record in enumerate(records, 1):
        yield _text_of(file, f"entry {index}", record, text_key)


def _kind(value: object) -> str:
    return _JSON_KINDS.get(type(value), "a text")


def _text_of(file: Path, place: str, record: object, text_key: str) -> str:
    if not isinstance(record, dict):
        raise DataError(file, f"{place} is {_kind(record)}", rule=f'an object such as {{"{text_key}": "..."}}')
    if text_key not in record:
        raise _no_column(file, place, text_key, list(record))
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(
            file,
            f"{place}: {text_key} is {_kind(text)}",
            found=json.dumps(text)[:60],
            rule="a text",
            fix="drop the row",
        )
    try:
        text.encode()
    # json accepts escapes such as \ud83d alone, which are no characters.
    except UnicodeEncodeError:
        raise DataError(
            file, f"{place}: {text_key} holds a lone surrogate", rule="valid Unicode", fix="repair or drop the row"
        ) from None
    return text


def _no_column(file: Path, place: str, text_key: str, found: list[str]) -> DataError:
    where = f"{place} has" if place else "has"
    return DataError(
        file,
        f"{where} no column {text_key}",
        found=", ".join(found) or "no columns",
        fix="set data.custom_text_key to the column that holds the text",
    )


def check_parquet(file: Path, text_key: str) -> int:
    """Read the whole text column of a parquet file once; its number of rows.

    Raises:
        DataError: the file is damaged, lacks the column, or has a row without text.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = file.stat().st_size
    if size == 0:
        raise DataError(file, "is empty", found="0 bytes", rule="a parquet file")
    rows = 0
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as reader:
            names = reader.schema_arrow.names
            if text_key not in names:
                raise _no_column(file, "", text_key, names)
            for batch in reader.iter_batches(batch_size=1024, columns=[text_key]):
                _check_text_column(file, batch, text_key, rows)
                rows += batch.num_rows
            expected = reader.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(file, f"is damaged or no parquet file ({error})", found=f"{size} bytes") from error
    if rows != expected:
        raise DataError(file, "is damaged", found=f"{rows} rows", rule=f"{expected} rows, as its footer says")
    return rows


def check_arrow(file: Path, text_key: str) -> int:
    """Read the text column of an Arrow stream file once; its number of rows.

    Raises:
        DataError: the file is damaged, lacks the column, or has a row without text.
    """
    rows = 0
    for batch in read_arrow_batches(file):
        if text_key not in batch.schema.names:
            raise _no_column(file, "", text_key, batch.schema.names)
        _check_text_column(file, batch, text_key, rows)
        rows += batch.num_rows
    return rows


def _check_text_column(file: Path, batch: pa.RecordBatch, text_key: str, first_row: int) -> None:
    import pyarrow as pa

    column = batch.column(text_key)
    value_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = (
        pa.types.is_string(value_type) or pa.types.is_large_string(value_type) or pa.types.is_string_view(value_type)
    )
    if not is_text:
        raise DataError(
            file,
            f"column {text_key} does not hold text",
            found=str(column.type),
            fix="set data.custom_text_key to the column that holds the text",
        )
    if column.null_count:
        row = first_row + column.is_null().to_pylist().index(True) + 1
        raise DataError(file, f"row {row}: {text_key} is null", fix="drop the row")
    column.validate(full=True)
