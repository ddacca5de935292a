"""Reader and writer of .bin/.idx pairs ("MMIDIDX"), the data format of the official RWKV trainer.

The .bin file holds the token ids of all items end to end; the .idx file holds, little-endian and unaligned:
magic (9 bytes), version u64 = 1, dtype code u8, number of items u64, number of document entries u64, sizes
i32 per item in tokens, pointers i64 per item in bytes, and the item at which each document starts plus a
final end, i64. The official writer makes each document one item; other writers put several items into one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from trainer.data.store import FlatStore, TokenStore, check_token_ids
from trainer.errors import DataError, StorageError

__all__ = ["BinIdx", "BinIdxWriter", "binidx_prefix", "check_token_ids", "write_binidx"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_CODES = (6, 7)
_CHECK_BLOCK = 1 << 20


def binidx_prefix(path: str | Path) -> Path:
    """`path` without a .bin or .idx at its end."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


class BinIdx(FlatStore):
    """A memory-mapped .bin/.idx pair, every field of the index checked when it is opened.

    Args:
        path: the prefix, or one of the two files.

    Raises:
        DataError: a half is missing, a field is wrong, or the sizes of the files and the index disagree.
    """

    def __init__(self, path: str | Path) -> None:
        self._prefix = binidx_prefix(path)
        self._bin_file = _with(self._prefix, ".bin")
        idx_file = _with(self._prefix, ".idx")
        for file in (self._bin_file, idx_file):
            if not file.is_file():
                raise DataError(file, "does not exist", fix="give the prefix of a pair PREFIX.bin and PREFIX.idx")
        dtype, item_sizes, pointers, item_of_document = _read_index(idx_file)
        self._bin_bytes = _check_layout(idx_file, self._bin_file, dtype, item_sizes, pointers)
        starts = np.append(pointers, self._bin_bytes)[item_of_document] // dtype.itemsize
        tokens = np.memmap(self._bin_file, dtype, mode="r") if self._bin_bytes else np.empty(0, dtype)
        super().__init__(str(self._prefix), [tokens.view(np.ndarray)], np.diff(starts))

    def read_flat(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start:stop] of the whole file; documents play no role."""
        # A mapped file that shrank would kill the process with SIGBUS, without a word.
        found = self._bin_file.stat().st_size if self._bin_file.exists() else 0
        if found != self._bin_bytes:
            raise DataError(
                self._bin_file, "changed while it was in use", found=f"{found} bytes", rule=f"{self._bin_bytes} bytes"
            )
        return super().read_flat(start, stop)

    def __reduce__(self) -> tuple[Callable[..., BinIdx], tuple[Path]]:
        return type(self), (self._prefix,)


def _read_index(file: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Dtype of the ids, sizes i32 [items], pointers i64 [items] and document starts i64 [documents + 1]."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise DataError(file, "has the wrong magic bytes", found=repr(header[:9]), rule=repr(_MAGIC))
    if len(header) < _HEADER.size:
        raise DataError(file, "is cut off", found=f"{size} bytes", rule=f"at least {_HEADER.size} bytes")
    _, version, code, items, entries = _HEADER.unpack(header)
    if version != 1:
        raise DataError(file, "has an unknown version", found=version, rule="version 1")
    if code not in _CODES:
        kind = "holds floating-point numbers, not token ids" if code in _FLOAT_CODES else "has an unknown dtype code"
        raise DataError(file, kind, found=f"dtype code {code}", rule=f"one of {sorted(_CODES)}")
    expected = _HEADER.size + 12 * items + 8 * entries
    if size != expected:
        raise DataError(
            file,
            "is cut off or has bytes too many",
            found=f"{size} bytes",
            rule=f"{expected} bytes for {items} items and {entries} document entries",
        )
    if items == 0 or entries < 2:
        raise DataError(file, f"holds {max(entries - 1, 0)} documents", found=f"{items} items", rule="at least one")
    content = np.memmap(file, np.uint8, mode="r")
    pointer_start = _HEADER.size + 4 * items
    document_start = pointer_start + 8 * items
    item_of_document = content[document_start:].view("<i8")
    _check_documents(file, item_of_document, items)
    sizes, pointers = (
        content[_HEADER.size : pointer_start].view("<i4"),
        content[pointer_start:document_start].view("<i8"),
    )
    return np.dtype(_CODES[code]), sizes, pointers, item_of_document


def _check_documents(file: Path, item_of_document: np.ndarray, items: int) -> None:
    first, last = int(item_of_document[0]), int(item_of_document[-1])
    if first != 0 or last != items:
        raise DataError(
            file, "the document entries do not span all items", found=f"{first} to {last}", rule=f"0 to {items}"
        )
    backwards = np.diff(item_of_document) < 0
    if backwards.any():
        entry = int(np.argmax(backwards)) + 1
        raise DataError(file, f"document entry {entry} lies before the one in front of it")


def _check_layout(idx_file: Path, bin_file: Path, dtype: np.dtype, sizes: np.ndarray, pointers: np.ndarray) -> int:
    """Check that items lie end to end and fill the .bin file; returns its bytes."""
    end = 0
    for start in range(0, len(sizes), _CHECK_BLOCK):
        block = sizes[start : start + _CHECK_BLOCK].astype(np.int64)
        if int(block.min()) < 0:
            item = start + int(np.argmax(block < 0))
            raise DataError(idx_file, f"item {item} has a negative size", found=int(sizes[item]))
        ends = end + np.cumsum(block) * dtype.itemsize
        wrong = pointers[start : start + _CHECK_BLOCK] != ends - block * dtype.itemsize
        if wrong.any():
            item = start + int(np.argmax(wrong))
            expected = int((ends - block * dtype.itemsize)[item - start])
            raise DataError(
                idx_file,
                f"item {item} does not start where the one before it ends",
                found=int(pointers[item]),
                rule=f"byte {expected}",
            )
        end = int(ends[-1])
    found = bin_file.stat().st_size
    if found != end:
        raise DataError(
            bin_file, "is cut off or has bytes too many", found=f"{found} bytes", rule=f"{end} bytes, as its index says"
        )
    return end


class BinIdxWriter:
    """Writes a .bin/.idx pair; nothing appears under its name before `close`.

    Args:
        path: the prefix; its folder must exist.
        dtype: integer type of the ids; uint16 for vocabularies of up to 65536.

    Use as a context manager: leaving it through an exception removes what was written.
    """

    def __init__(self, path: str | Path, dtype: np.dtype | type = np.uint16) -> None:
        self._prefix = binidx_prefix(path)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = {np.dtype(name): code for code, name in _CODES.items()}[self._dtype]
        self._sizes: list[int] = []
        self._item_of_document = [0]
        self._temporary = {
            suffix: self._prefix.with_name(f".{self._prefix.name}{suffix}.tmp-{os.getpid()}")
            for suffix in (".bin", ".idx")
        }
        try:
            self._stream: BinaryIO = self._temporary[".bin"].open("wb")
        except OSError as error:
            raise StorageError(self._prefix, f"cannot be written ({error.strerror})") from error

    def __enter__(self) -> BinIdxWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def add_item(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the current document; DataError if an id does not fit the file's integer type."""
        array = np.asarray(ids)
        limits = np.iinfo(self._dtype)
        if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise DataError(
                self._prefix,
                f"item {len(self._sizes)} has ids that do not fit {self._dtype.name}",
                found=f"{array.min()} to {array.max()}",
            )
        if len(array) > np.iinfo(np.int32).max:
            raise DataError(self._prefix, "an item is too long for this format", found=f"{len(array)} tokens")
        try:
            self._stream.write(array.astype(self._dtype).tobytes())
        except OSError as error:
            raise StorageError(self._prefix, f"cannot be written ({error.strerror})") from error
        self._sizes.append(len(array))

    def end_document(self) -> None:
        """Let the next item start a new document."""
        self._item_of_document.append(len(self._sizes))

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append a document of one item, as the official writer does."""
        self.add_item(ids)
        self.end_document()

    def close(self) -> None:
        """Write the index and give both files their names."""
        sizes = np.array(self._sizes, "<i4")
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        pointers = (ends - sizes.astype("<i8") * self._dtype.itemsize).astype("<i8")
        header = _HEADER.pack(_MAGIC, 1, self._code, len(sizes), len(self._item_of_document))
        index = header + sizes.tobytes() + pointers.tobytes() + np.array(self._item_of_document, "<i8").tobytes()
        try:
            with self._stream as stream:
                _sync(stream)
            with self._temporary[".idx"].open("wb") as stream:
                stream.write(index)
                _sync(stream)
            # Without an index the pair is visibly incomplete, whatever happens between the two renames.
            _with(self._prefix, ".idx").unlink(missing_ok=True)
            for suffix, file in self._temporary.items():
                file.replace(_with(self._prefix, suffix))
        except OSError as error:
            self.discard()
            raise StorageError(self._prefix, f"cannot be written ({error.strerror})") from error

    def discard(self) -> None:
        """Remove what was written so far."""
        self._stream.close()
        for file in self._temporary.values():
            file.unlink(missing_ok=True)


def write_binidx(store: TokenStore, path: str | Path) -> None:
    """Write all documents of a store as a .bin/.idx pair in the official layout: one item per document, in order.

    Args:
        store: any documents. Which of their tokens are trained cannot be kept.
        path: the prefix; its folder must exist.
    """
    with BinIdxWriter(path, store.dtype) as writer:
        for document, size in enumerate(store.sizes.tolist()):
            writer.add_document(store.read(document, 0, size))


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
