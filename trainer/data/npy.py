"""Token ids in a numpy .npy file, memory-mapped: one long stream, or one row per document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.data.store import FlatStore
from trainer.errors import DataError

__all__ = ["NpyStore", "open_npy"]

_BLOCK = 1 << 24


class NpyStore(FlatStore):
    """A .npy file of integers.

    One dimension: the stream of tokens; a document ends with each token 0, and with the file. Two dimensions:
    each row is a document; the zeros at its end, but for one that ends the document, are padding, which is never
    trained nor counted.

    Args:
        path: the file.

    Raises:
        DataError: the file is cut off, damaged, or holds anything but integers in one or two dimensions.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(path, "does not exist") from None
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            size = path.stat().st_size
            raise DataError(path, f"cannot be read as a .npy file ({error})", found=f"{size} bytes") from error
        if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            found = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else "an archive"
            raise DataError(path, "holds no token ids", found=found, rule="integers in one or two dimensions")
        if tokens.size == 0:
            raise DataError(path, "holds no documents", found=str(tokens.shape))
        native = tokens.view(np.ndarray)
        if tokens.ndim == 1:
            super().__init__(str(path), [native], _stream_sizes(native))
            return
        sizes = _row_sizes(native)
        # Rows without their padding: whole ones lie end to end, so that runs of them are one segment.
        super().__init__(str(path), _row_segments(native, sizes), sizes)

    def __reduce__(self) -> tuple[Callable[..., NpyStore], tuple[Path]]:
        return type(self), (self._path,)


def open_npy(path: Path) -> NpyStore:
    """The documents of a .npy file; DataError if it cannot be used."""
    return NpyStore(path)


def _stream_sizes(tokens: np.ndarray) -> np.ndarray:
    ends = [start + np.flatnonzero(tokens[start : start + _BLOCK] == 0) + 1 for start in range(0, len(tokens), _BLOCK)]
    borders = np.concatenate([[0], *ends, [len(tokens)]]).astype(np.int64)
    sizes = np.diff(borders)
    return sizes[:-1] if sizes[-1] == 0 else sizes


def _row_sizes(rows: np.ndarray) -> np.ndarray:
    width = rows.shape[1]
    step = max(1, _BLOCK // max(1, width))
    sizes = []
    for start in range(0, len(rows), step):
        is_text = rows[start : start + step] != 0
        last = width - np.argmax(is_text[:, ::-1], axis=1)
        sizes.append(np.where(is_text.any(axis=1), np.minimum(last + 1, width), 0))
    return np.concatenate(sizes).astype(np.int64)


def _row_segments(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    width = rows.shape[1]
    flat = rows.reshape(-1)
    segments = []
    start = 0
    for row in [*np.flatnonzero(sizes < width).tolist(), len(rows) - 1]:
        stop = row * width + int(sizes[row])
        if stop > start:
            segments.append(flat[start:stop])
        start = (row + 1) * width
    return segments
