"""Documents as token ids on disk, memory-mapped: any document, any range of it, without reading the rest.

Two formats give the same view: a .bin/.idx pair (`binidx.BinIdx`) and a folder written by
`datasets.Dataset.save_to_disk` (`ArrowStore`, columns input_ids and optionally loss_mask).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from trainer.data.remote_files import SourcePath
from trainer.errors import DataError
from trainer.logs import get_logger, log_once

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ArrowStore",
    "FlatStore",
    "SubsetStore",
    "TokenStore",
    "check_token_ids",
    "open_store",
    "read_arrow_batches",
    "saved_files",
]

_BLOCK_TOKENS = 1 << 22
# A stream without this end may have lost its last rows.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_MAGIC = b"ARROW1"
_DIGEST_ALL_TOKENS = 1 << 25
_DIGEST_SAMPLES, _DIGEST_SAMPLE_TOKENS = 512, 1 << 16

logger = get_logger(__name__)


class TokenStore(Protocol):
    """Read access to documents as token ids. Safe in threads; a pickled copy reopens its files."""

    where: str
    """Path, for messages."""
    num_documents: int
    num_tokens: int
    sizes: np.ndarray
    """int64 [num_documents], tokens of each document, its end-of-document token included."""
    dtype: np.dtype
    """Type of the ids that `read` returns."""
    source_ids: np.ndarray | None
    """int32 [num_documents], number of each document's source in the manifest's list; None for one source."""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that are trained as targets."""

    @property
    def digest(self) -> str:
        """Of all sizes and ids (of spread samples of the ids above 2**25 tokens), whatever the file format."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of a document, in the file's integer type; read-only, do not write to it."""

    def read_flat(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of all documents laid end to end."""

    def loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """How much each token of [start:stop] counts when it is the target, float32; None = all count 1."""


def _content_digest(store: TokenStore) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(store.sizes, "<i8").tobytes())
    total = store.num_tokens
    if total <= _DIGEST_ALL_TOKENS:
        ranges = [(start, min(start + _BLOCK_TOKENS, total)) for start in range(0, total, _BLOCK_TOKENS)]
    else:
        starts = np.linspace(0, total - _DIGEST_SAMPLE_TOKENS, _DIGEST_SAMPLES).astype(np.int64).tolist()
        ranges = [(start, start + _DIGEST_SAMPLE_TOKENS) for start in starts]
    for start, stop in ranges:
        digest.update(store.read_flat(start, stop).astype("<i8").tobytes())
    return digest.hexdigest()


class FlatStore:
    """Documents that lie end to end in a few memory-mapped arrays.

    Args:
        where: path, for messages.
        segments: integer arrays of one type; together they are the token stream.
        sizes: int64 [num_documents], summing up to the length of the stream.
        masks: arrays shaped like `segments`, or None.
    """

    def __init__(
        self,
        where: str,
        segments: list[np.ndarray],
        sizes: np.ndarray,
        masks: list[np.ndarray] | None = None,
    ) -> None:
        self.where = where
        self.sizes = sizes.astype(np.int64, copy=False)
        self.num_documents = len(sizes)
        self.dtype = segments[0].dtype if segments else np.dtype(np.uint16)
        self.source_ids: np.ndarray | None = None
        self._segments, self._masks = segments, masks
        self._segment_starts = np.cumsum([0] + [len(segment) for segment in segments], dtype=np.int64)
        self._document_starts = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(self.sizes, out=self._document_starts[1:])
        self.num_tokens = int(self._document_starts[-1])
        assert self.num_tokens == self._segment_starts[-1]

    @functools.cached_property
    def num_trained_tokens(self) -> int:
        """Tokens that are trained as targets; the first of a document never is, for it follows nothing."""
        if self._masks is None:
            return self.num_tokens - int((self.sizes > 0).sum())
        starts = self._document_starts[:-1][self.sizes > 0]
        firsts = self._slice_at(self._masks, starts)
        return sum(int(np.count_nonzero(mask)) for mask in self._masks) - int(np.count_nonzero(firsts))

    def _slice_at(self, segments: list[np.ndarray], places: np.ndarray) -> np.ndarray:
        """Values at ascending places of the stream."""
        borders = np.searchsorted(places, self._segment_starts)
        parts = [
            segment[places[start:stop] - base]
            for segment, base, start, stop in zip(
                segments, self._segment_starts[:-1], borders[:-1], borders[1:], strict=True
            )
        ]
        return np.concatenate([np.empty(0, np.uint8), *parts])

    @functools.cached_property
    def digest(self) -> str:
        """See TokenStore.digest."""
        return _content_digest(self)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of a document."""
        return self.read_flat(*self._flat_range(document, start, stop))

    def read_flat(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of all documents laid end to end."""
        return self._slice(self._segments, start, stop, self.dtype)

    def loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Weight of each token of [start:stop] as a target, float32; None = all count 1."""
        if self._masks is None:
            return None
        flat_start, flat_stop = self._flat_range(document, start, stop)
        return self._slice(self._masks, flat_start, flat_stop, np.dtype(np.float32)).astype(np.float32)

    def _flat_range(self, document: int, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents} in {self.where}")
        base, size = int(self._document_starts[document]), int(self.sizes[document])
        return base + max(0, min(start, size)), base + max(0, min(stop, size))

    def _slice(self, segments: list[np.ndarray], start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        start, stop = max(0, start), min(stop, self.num_tokens)
        if start >= stop:
            return np.empty(0, dtype)
        index = int(np.searchsorted(self._segment_starts, start, side="right")) - 1
        parts: list[np.ndarray] = []
        while start < stop:
            base = int(self._segment_starts[index])
            part = segments[index][start - base : stop - base]
            parts.append(part)
            start += len(part)
            index += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class SubsetStore:
    """Some documents of another store, in the given order, numbered from 0.

    Args:
        parent: where the documents are.
        documents: int64 [num_documents], their numbers in `parent`.
    """

    def __init__(self, parent: TokenStore, documents: np.ndarray) -> None:
        self.where = parent.where
        self.dtype = parent.dtype
        self._parent = parent
        self._documents = documents.astype(np.int64, copy=False)
        self.sizes = parent.sizes[self._documents]
        self.source_ids = None if parent.source_ids is None else parent.source_ids[self._documents]
        self.num_documents = len(self.sizes)
        self._document_starts = np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(self.sizes, out=self._document_starts[1:])
        self.num_tokens = int(self._document_starts[-1])

    @functools.cached_property
    def num_trained_tokens(self) -> int:
        """Tokens that are trained as targets."""
        num = self.num_tokens - int((self.sizes > 0).sum())
        if self.num_documents == 0 or self.loss_mask(0, 0, 1) is None:
            return num
        masks = (self.loss_mask(document, 1, size) for document, size in enumerate(self.sizes.tolist()))
        return sum(int(np.count_nonzero(mask)) for mask in masks if mask is not None)

    @functools.cached_property
    def digest(self) -> str:
        """See TokenStore.digest."""
        return _content_digest(self)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of a document."""
        return self._parent.read(self.parent_document(document), start, stop)

    def loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Weight of each token of [start:stop] as a target, float32; None = all count 1."""
        return self._parent.loss_mask(self.parent_document(document), start, stop)

    def read_flat(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of the documents of this subset laid end to end."""
        start, stop = max(0, start), min(stop, self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        document = int(np.searchsorted(self._document_starts, start, side="right")) - 1
        parts: list[np.ndarray] = []
        while start < stop:
            base = int(self._document_starts[document])
            part = self.read(document, start - base, stop - base)
            parts.append(part)
            start += len(part)
            document += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parent_document(self, document: int) -> int:
        """Number of a document of this subset in the store it was taken from."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents} in {self.where}")
        return int(self._documents[document])


class ArrowStore(FlatStore):
    """One split saved by `datasets.Dataset.save_to_disk`.

    Columns: input_ids (lists of integers) and optionally loss_mask, or the older trainer's attention_mask.
    Both masks say which tokens are targets. source_id, if there, is the number of each document's source.

    Args:
        folder: holds state.json and data-*.arrow.

    Raises:
        DataError: a file is missing, damaged or of another kind.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        segments: list[np.ndarray] = []
        masks: list[np.ndarray] | None = None
        sizes: list[np.ndarray] = []
        source_ids: list[np.ndarray] = []
        for file, batch in _saved_batches(self._folder):
            values, offsets = _integer_lists(file, batch, "input_ids")
            segments.append(values)
            sizes.append(np.diff(offsets))
            mask = _mask_of(file, batch, offsets)
            if mask is not None:
                masks = [*masks, mask] if masks else [mask]
            if "source_id" in batch.schema.names:
                source_ids.append(batch.column("source_id").to_numpy(zero_copy_only=False))
        if masks and len(masks) != len(segments):
            raise DataError(self._folder, "some files have a loss mask and others have none")
        super().__init__(str(self._folder), segments, np.concatenate(sizes) if sizes else np.zeros(0, np.int64), masks)
        self.source_ids = np.concatenate(source_ids) if source_ids else None

    def __reduce__(self) -> tuple[Callable[..., ArrowStore], tuple[Path]]:
        return type(self), (self._folder,)


def _saved_batches(folder: Path) -> Iterator[tuple[Path, pa.RecordBatch]]:
    for file in saved_files(folder):
        for batch in read_arrow_batches(file):
            if batch.num_rows:
                yield file, batch


def saved_files(folder: Path) -> list[Path]:
    """The data-*.arrow files of one split, in order.

    Raises:
        DataError: state.json is missing or malformed, or names a file that is not there.
    """
    state = folder / "state.json"
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text("utf-8"))["_data_files"]]
    except FileNotFoundError:
        raise DataError(folder, "is no saved data set: it has no state.json", fix="run preload_datapath.py") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(state, f"cannot be read ({error})", fix="run preload_datapath.py") from error
    files = [folder / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise DataError(file, "is missing", fix="run preload_datapath.py")
    return files


def read_arrow_batches(file: SourcePath) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file in the stream or the file format, memory-mapped and fully checked.

    `datasets` itself reads a damaged stream up to the damage and says nothing; here a stream that ends
    before the file does is an error.

    Raises:
        DataError: the file is damaged or no Arrow stream.
    """
    import pyarrow as pa

    if file.stat().st_size == 0:
        raise DataError(file, "is empty", found="0 bytes", rule="an Arrow stream")
    rows = 0
    try:
        source = pa.memory_map(str(file)) if isinstance(file, Path) else pa.PythonFile(file.open(), mode="r")
        is_indexed = source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
        source.seek(0)
        if is_indexed:
            indexed = pa.ipc.open_file(source)
            for number in range(indexed.num_record_batches):
                batch = indexed.get_batch(number)
                batch.validate(full=True)
                rows += batch.num_rows
                yield batch
            return
        reader = pa.ipc.open_stream(source)
        for batch in reader:
            batch.validate(full=True)
            rows += batch.num_rows
            yield batch
        read, size = source.tell(), source.size()
        # Of a remote file this moves the place of reading.
        ends = source.read_at(len(_END_OF_STREAM), max(0, size - len(_END_OF_STREAM))) == _END_OF_STREAM
    except (pa.ArrowException, OSError) as error:
        raise DataError(file, f"is damaged after {rows} rows ({error})", fix="make or copy the file anew") from error
    if read != size or not ends:
        raise DataError(
            file,
            f"is damaged: the stream of rows ends after {rows} rows",
            found=f"an end at byte {read} of {size}" if read != size else "no end mark, as if cut off",
            fix="make or copy the file anew",
        )


def _integer_lists(file: Path, batch: pa.RecordBatch, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and int64 offsets of a column of integer lists, without copying the values."""
    import pyarrow as pa

    if column not in batch.schema.names:
        raise DataError(
            file,
            f"has no column {column}",
            found=", ".join(batch.schema.names),
            fix="set data.source, so that the text is tokenized",
        )
    lists = batch.column(column)
    is_list = pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)
    if not (is_list and pa.types.is_integer(lists.type.value_type)):
        raise DataError(file, f"column {column} has the wrong type", found=str(lists.type), rule="lists of integers")
    if lists.null_count or lists.values.null_count:
        raise DataError(file, f"column {column} holds null", fix="remove those rows")
    offsets = lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=True)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


def _mask_of(file: Path, batch: pa.RecordBatch, offsets: np.ndarray) -> np.ndarray | None:
    names = batch.schema.names
    column = "loss_mask" if "loss_mask" in names else "attention_mask"
    if column not in names:
        return None
    if column == "attention_mask":
        log_once(
            logger,
            "%s: attention_mask marks the tokens that are trained as targets (the older trainer applied it one "
            "token late: it skipped the first token of each marked stretch and trained one after its end)",
            file.parent,
        )
    mask, mask_offsets = _integer_lists(file, batch, column)
    if not np.array_equal(mask_offsets, offsets):
        row = int(np.argmax(np.diff(mask_offsets) != np.diff(offsets)))
        raise DataError(
            file,
            f"row {row}: {column} and input_ids differ in length",
            found=f"{mask_offsets[row + 1] - mask_offsets[row]} and {offsets[row + 1] - offsets[row]}",
        )
    return mask


def open_store(path: str | Path, split: str = "train") -> TokenStore:
    """The token ids at `path`: a saved data set (or the split of one), or the prefix of a .bin/.idx pair.

    Raises:
        DataError: nothing is there, or it is damaged.
    """
    folder = Path(path)
    if folder.is_dir():
        has_splits = (folder / "dataset_dict.json").is_file()
        return ArrowStore(folder / split if has_splits else folder)
    from trainer.data.binidx import BinIdx

    return BinIdx(path)


def check_token_ids(store: TokenStore, vocab_size: int) -> None:
    """Make sure that every id of `store` has a row in an embedding of `vocab_size` rows.

    Raises:
        DataError: names the first bad id, its document and its offset in tokens.
    """
    limits = np.iinfo(store.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return
    for start in range(0, store.num_tokens, _BLOCK_TOKENS):
        ids = store.read_flat(start, start + _BLOCK_TOKENS)
        if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
            continue
        position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        document, offset = _locate(store, start + position)
        raise DataError(
            store.where,
            f"token id {ids[position]} in document {document} at offset {offset} is not in the vocabulary",
            rule=f"0 <= id < vocab_size {vocab_size}",
            fix="use the tokenizer that made the data, or a model with a larger vocabulary",
        )


def _locate(store: TokenStore, position: int) -> tuple[int, int]:
    ends = np.cumsum(store.sizes)
    document = int(np.searchsorted(ends, position, side="right"))
    return document, position - int(ends[document] - store.sizes[document])
