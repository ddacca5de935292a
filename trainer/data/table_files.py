"""Strict readers of tables: csv, parquet, Arrow, saved data sets, and pandas' pickled frames.

`datasets` itself reads a damaged Arrow stream up to the damage and says nothing; here every file is checked whole.
"""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.remote_files import SourcePath
from trainer.data.source_files import RecordBatch
from trainer.data.store import read_arrow_batches
from trainer.errors import DataError
from trainer.logs import get_logger

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TableBatch", "arrow_batches", "csv_batches", "pandas_batches", "parquet_batches", "table_batches"]

_BATCH_BYTES = 1 << 22
_BATCH_ROWS = 1024
_FIELD_LIMIT = (1 << 31) - 1
# What a pickled DataFrame of texts, numbers and lists is made of. Anything else could run code when it is loaded.
_SAFE_GLOBALS = {
    "builtins": {"slice", "list", "dict", "tuple", "set", "frozenset", "bytearray", "complex", "range"},
    "collections": {"OrderedDict"},
    "numpy": {"dtype", "ndarray", "str_", "bool_"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
    "pandas": {"DataFrame", "Index", "RangeIndex", "StringDtype", "Series"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.series": {"Series"},
    "pandas.core.internals.managers": {"BlockManager", "SingleBlockManager"},
    "pandas.core.internals.blocks": {"new_block"},
    "pandas._libs.internals": {"_unpickle_block", "BlockPlacement"},
    "pandas._libs.arrays": {"__pyx_unpickle_NDArrayBacked", "NDArrayBacked"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.arrays.string_": {"StringDtype", "StringArray"},
    "pandas.core.arrays.string_arrow": {"ArrowStringArray", "ArrowStringArrayNumpySemantics"},
    "pandas.core.arrays.arrow.array": {"ArrowExtensionArray"},
    "pandas.arrays": {"ArrowStringArray", "StringArray", "ArrowExtensionArray"},
    "pyarrow.lib": {"chunked_array", "_restore_array", "type_for_alias", "py_buffer", "large_string", "string"},
}

logger = get_logger(__name__)


@dataclass(frozen=True)
class TableBatch:
    """Rows of a columnar source."""

    where: str
    """File, or name of the data set."""
    first_row: int
    """Counted from 1."""
    rows: pa.RecordBatch | pa.Table
    num_bytes: int = 0

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, record) of each row."""
        for number, record in enumerate(self.rows.to_pylist(), self.first_row):
            yield f"{self.where}: row {number}", record


def table_batches(where: str, batches: Iterator[pa.RecordBatch], columns: Sequence[str] | None) -> Iterator[TableBatch]:
    """Batches with those of `columns` that are there; all if none is."""
    row = 1
    for batch in batches:
        chosen = batch
        if columns is not None and any(name in batch.schema.names for name in columns):
            chosen = batch.select([name for name in columns if name in batch.schema.names])
        yield TableBatch(where, row, chosen, chosen.nbytes)
        row += batch.num_rows


def parquet_batches(file: SourcePath, columns: Sequence[str] | None, params: dict[str, Any]) -> Iterator[TableBatch]:
    """Rows of a parquet file.

    Raises:
        DataError: the file is damaged, in whatever place.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = file.stat().st_size
    if size == 0:
        raise DataError(file, "is empty", found="0 bytes", rule="a parquet file")
    rows = 0
    try:
        if params.get("filters"):
            table = pq.read_table(
                str(file) if isinstance(file, Path) else file.open(),
                filters=params["filters"],
                page_checksum_verification=True,
            )
            yield from table_batches(str(file), iter(table.to_batches(_BATCH_ROWS)), columns)
            return
        with pq.ParquetFile(file if isinstance(file, Path) else file.open(), page_checksum_verification=True) as reader:
            names = reader.schema_arrow.names
            wanted = [name for name in names if columns is None or name in columns] or names
            batches = reader.iter_batches(batch_size=params.get("batch_size") or _BATCH_ROWS, columns=wanted)
            for batch in table_batches(str(file), batches, None):
                batch.rows.validate(full=True)
                rows += batch.rows.num_rows
                yield batch
            expected = reader.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            file, f"is damaged or no parquet file, after row {rows} ({error})", found=f"{size} bytes"
        ) from error
    if rows != expected:
        raise DataError(file, "is damaged", found=f"{rows} rows", rule=f"{expected} rows, as its footer says")


def arrow_batches(file: SourcePath, columns: Sequence[str] | None) -> Iterator[TableBatch]:
    """Rows of an Arrow file, in the stream format or the file format.

    Raises:
        DataError: the file is damaged, in whatever place.
    """
    for batch in table_batches(str(file), read_arrow_batches(file), columns):
        # Rows of a mapped file would stay mapped until the worker is done with them.
        for start in range(0, batch.rows.num_rows, _BATCH_ROWS):
            rows = batch.rows.slice(start, _BATCH_ROWS)
            yield TableBatch(batch.where, batch.first_row + start, rows, rows.nbytes)


def csv_batches(file: SourcePath, params: dict[str, Any]) -> Iterator[RecordBatch]:
    """Rows of a csv file with a header line.

    Args:
        file: .csv or .tsv.
        params: delimiter (or sep), quotechar, encoding, column_names (then there is no header line).

    Raises:
        DataError: names the line that has too few or too many fields, or cannot be decoded.
    """
    delimiter = params.get("delimiter") or params.get("sep") or ("\t" if file.suffix == ".tsv" else ",")
    encoding = params.get("encoding") or "utf-8-sig"
    csv.field_size_limit(_FIELD_LIMIT)
    entries: list[tuple[str, dict[str, Any]]] = []
    size = line = 0
    with file.open("rb") as raw:
        reader = csv.reader(
            io.TextIOWrapper(raw, encoding, newline=""),
            delimiter=delimiter, quotechar=params.get("quotechar") or '"', strict=True,
        )  # fmt: skip
        try:
            names = params.get("column_names") or next(reader, None)
            if names is None:
                return
            line = reader.line_num
            for fields in reader:
                place, line = f"line {line + 1}", reader.line_num
                if not fields:
                    continue
                if len(fields) != len(names):
                    raise DataError(
                        file, f"{place} has {len(fields)} fields", rule=f"{len(names)}, one for each of {', '.join(names)}",
                        fix="put texts that hold the delimiter, quotes or line breaks in quotes",
                    )  # fmt: skip
                entries.append((f"{file}: {place}", dict(zip(names, fields, strict=True))))
                size += sum(map(len, fields))
                if size >= _BATCH_BYTES or len(entries) >= _BATCH_ROWS:
                    yield RecordBatch(entries, size)
                    entries, size = [], 0
        except UnicodeDecodeError as error:
            raise _not_decodable(file, encoding, line, error) from None
        except csv.Error as error:
            raise DataError(file, f"line {line + 1} is no valid csv ({error})") from error
        except LookupError:
            raise DataError("data.source_dataset_params.encoding", "is unknown", found=encoding) from None
        except OSError as error:
            raise DataError(file, f"cannot be read after line {line} ({error.strerror or error})") from error
    if entries:
        yield RecordBatch(entries, size)


def _not_decodable(file: SourcePath, encoding: str, line: int, error: UnicodeDecodeError) -> DataError:
    """Text is decoded ahead of the rows: look for the place again, line by line."""
    place = f"after line {line}"
    offset = 0
    with file.open("rb") as stream:
        for number, content in enumerate(stream, 1):
            try:
                content.decode(encoding)
            except UnicodeDecodeError as found:
                place, error = f"in line {number}, byte {offset + found.start} of the file", found
                break
            offset += len(content)
    problem = f"is not valid {encoding.removesuffix('-sig')} {place} ({error.reason})"
    return DataError(file, problem, found=f"byte 0x{error.object[error.start]:02x}", fix="convert the file to utf-8")


class _FrameUnpickler(pickle.Unpickler):
    """Knows only the classes of a DataFrame, so that a hostile file cannot run anything."""

    def find_class(self, module: str, name: str) -> Any:
        """The class if it is one of those; UnpicklingError otherwise."""
        if name not in _SAFE_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a table of texts")
        return super().find_class(module, name)


def pandas_batches(file: SourcePath) -> Iterator[RecordBatch]:
    """Rows of a pickled pandas DataFrame.

    Raises:
        DataError: the file is damaged, no DataFrame, or holds anything but plain data.
    """
    try:
        with file.open("rb") as stream:
            frame = _FrameUnpickler(stream).load()
        records = frame.to_dict("records")
    # Damaged pickles raise nearly anything.
    except Exception as error:
        raise DataError(
            file, f"cannot be read as a pickled DataFrame ({error})", fix="save the table as parquet"
        ) from error
    for start in range(0, len(records), _BATCH_ROWS):
        part = [
            (f"{file}: row {row}", _without_nan(record))
            for row, record in enumerate(records[start : start + _BATCH_ROWS], start + 1)
        ]
        yield RecordBatch(part, file.stat().st_size * len(part) // len(records))


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Pandas has NaN where a value is missing."""
    return {str(key): None if isinstance(value, float) and value != value else value for key, value in record.items()}
