"""Records to token ids and loss masks, in several processes, in the order of the source.

The main process cuts the source into batches, workers parse, render and tokenize them, and the main process
writes the results to one Arrow stream file. A few batches are on their way at a time, so memory does not grow
with the source.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data.formats import RecordFault, RecordFormat, TextFormat, TokenizedFormat, merge_segments
from trainer.data.source_files import SourceBatch
from trainer.data.tokenizers import Tokenizer, get_tokenizer
from trainer.errors import DataError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "VERSION",
    "EncodedBatch",
    "EncodedFile",
    "Encoder",
    "encode_batches",
    "encode_records",
    "encoded_schema",
    "flat_array",
    "list_array",
    "skip_prefixes",
    "trained_targets",
]

VERSION = 2
"""Raise it when the ids or masks of any document change; prepared data sets are then rebuilt."""

_BATCHES_PER_PROCESS = 3


class EncodedBatch(NamedTuple):
    """Documents as tokens, end to end."""

    ids: np.ndarray
    """uint16 or int32 [tokens]."""
    mask: np.ndarray | None
    """uint8 [tokens], 1 where a token is trained as a target; None = all are."""
    sizes: np.ndarray
    """int64 [documents]."""


@dataclass(frozen=True)
class Encoder:
    """Encodes batches of records. Holds settings only, so that it travels to worker processes.

    A tokenizer's Rust core cannot be pickled: each process makes its own on first use.
    """

    tokenizer: str
    """data.tokenizer."""
    world_add_endoftext_token: bool = True
    auto_tokenizer: Mapping[str, Any] | None = None
    append_end_of_document: bool = True
    record_format: RecordFormat = field(default_factory=TextFormat)
    train_on_end: bool = True
    """Train token 0 at the end of a document whose last segment is trained."""
    prefix_skip: int = 0
    """The first so many tokens of a document are not trained."""

    @property
    def has_mask(self) -> bool:
        """Whether some tokens may be untrained."""
        return self.record_format.has_mask or self.prefix_skip > 0 or not self.train_on_end

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """Integer type of the ids: uint16 for vocabularies of up to 65536."""
        return np.uint16 if self._tokenizer().vocab_size <= 1 << 16 else np.int32

    def __call__(self, batch: SourceBatch) -> EncodedBatch:
        """Ids and masks of all records of a batch.

        Raises:
            DataError: names the record that cannot be used.
        """
        tokenizer = self._tokenizer()
        ids: list[np.ndarray] = [np.empty(0, self.dtype)]
        masks: list[np.ndarray] = [np.empty(0, np.uint8)]
        sizes: list[int] = []
        has_mask = self.has_mask
        for place, record in batch.records():
            try:
                num = 0
                for part, learn in self._encode(record, tokenizer):
                    ids.append(part)
                    num += len(part)
                    if has_mask:
                        masks.append(np.full(len(part), learn, np.uint8) if isinstance(learn, bool) else learn)
            except RecordFault as fault:
                raise fault.located(place) from None
            except DataError as error:
                raise DataError(place, error.problem, found=error.found, rule=error.rule, fix=error.fix) from None
            sizes.append(num)
        all_sizes = np.array(sizes, np.int64)
        mask = np.concatenate(masks, dtype=np.uint8, casting="unsafe") if has_mask else None
        if mask is not None and self.prefix_skip:
            skip_prefixes(mask, all_sizes, self.prefix_skip)
        return EncodedBatch(np.concatenate(ids, dtype=self.dtype, casting="unsafe"), mask, all_sizes)

    def _encode(self, record: dict[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool | np.ndarray]]:
        """Pieces of the document, each with whether it is trained, for all of its tokens or for each."""
        if isinstance(self.record_format, TokenizedFormat):
            yield self.record_format.tokens(record, tokenizer.vocab_size)
            return
        segments = merge_segments(self.record_format.segments(record))
        for text, learn in segments:
            yield tokenizer.encode_array(text), learn
        if self.append_end_of_document:
            yield np.zeros(1, self.dtype), self.train_on_end and bool(segments) and segments[-1].learn

    def _tokenizer(self) -> Tokenizer:
        return get_tokenizer(
            self.tokenizer,
            world_add_endoftext_token=self.world_add_endoftext_token,
            auto_tokenizer=self.auto_tokenizer,
        )


def skip_prefixes(mask: np.ndarray, sizes: np.ndarray, num: int) -> None:
    """Untrain the first `num` tokens of each document of a flat mask, in place."""
    starts = np.cumsum(sizes) - sizes
    for offset in range(num):
        mask[starts[sizes > offset] + offset] = 0


@dataclass(frozen=True)
class EncodedFile:
    """All documents of a source as one Arrow stream file."""

    path: Path
    sizes: np.ndarray
    """int64 [documents], tokens of each, its end-of-document token included."""
    trained: np.ndarray
    """int64 [documents], tokens that are trained as targets."""
    max_token_id: int
    num_bytes: int
    """Of the source, as read."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.sizes)


def encoded_schema(dtype: type, has_mask: bool) -> pa.Schema:
    """Columns of an encoded file: input_ids, loss_mask unless everything is trained, doc_id."""
    import pyarrow as pa

    ids = pa.field("input_ids", pa.large_list(pa.from_numpy_dtype(np.dtype(dtype))))
    masks = [pa.field("loss_mask", pa.large_list(pa.uint8()))] if has_mask else []
    return pa.schema([ids, *masks, pa.field("doc_id", pa.int64())])


def encode_records(
    batches: Iterable[SourceBatch],
    encoder: Encoder,
    path: Path,
    *,
    num_proc: int = 1,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda num_bytes, num_tokens: None,
) -> EncodedFile:
    """Encode every record, in order, into an Arrow stream file.

    Args:
        batches: from `sources.read_batches`.
        encoder: how to encode.
        path: file to write.
        num_proc: processes that encode.
        limit: stop reading after so many documents (more may be in the file).
        progress: called with the bytes read and the tokens made by each batch.

    Raises:
        DataError: names the record that cannot be used.
        StorageError: the file cannot be written, or a process died.
    """
    import pyarrow as pa

    schema = encoded_schema(encoder.dtype, encoder.has_mask)
    sizes, trained = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    num, num_bytes, max_id = 0, 0, -1
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for read, batch in encode_batches(batches, encoder, num_proc):
                sizes.append(batch.sizes)
                trained.append(trained_targets(batch))
                writer.write_batch(_as_arrow(batch, num, schema))
                num, num_bytes = num + len(batch.sizes), num_bytes + read
                max_id = max(max_id, int(batch.ids.max()) if len(batch.ids) else -1)
                progress(read, len(batch.ids))
                if limit is not None and num >= limit:
                    break
    except (OSError, pa.ArrowException) as error:
        raise StorageError(path, f"cannot be written ({error})") from error
    return EncodedFile(path, np.concatenate(sizes), np.concatenate(trained), max_id, num_bytes)


def trained_targets(batch: EncodedBatch) -> np.ndarray:
    """Trained tokens of each document; its first token follows nothing, so it is never a target."""
    if batch.mask is None:
        return np.maximum(batch.sizes - 1, 0)
    ends = np.cumsum(batch.sizes)
    sums = np.concatenate([[0], np.cumsum(batch.mask, dtype=np.int64)])
    starts = ends - batch.sizes
    return sums[ends] - sums[np.minimum(starts + 1, ends)]


def _as_arrow(batch: EncodedBatch, first: int, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(batch.sizes)])
    values = [batch.ids] if batch.mask is None else [batch.ids, batch.mask]
    numbers = flat_array(np.arange(first, first + len(batch.sizes)))
    return pa.record_batch([*(list_array(offsets, flat) for flat in values), numbers], schema=schema)


def flat_array(values: np.ndarray) -> pa.Array:
    """An Arrow array of integers, without a copy; pyarrow's own conversion imports pandas, which takes a second."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def list_array(offsets: np.ndarray, values: np.ndarray) -> pa.LargeListArray:
    """An Arrow array of lists of integers; `offsets` are int64 [lists + 1]."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(flat_array(offsets.astype(np.int64)), flat_array(values))


def encode_batches(
    batches: Iterable[SourceBatch], encoder: Encoder, num_proc: int
) -> Iterator[tuple[int, EncodedBatch]]:
    """(bytes of the source, result) of each batch, in order; with several processes a few batches are on their way."""
    if num_proc <= 1:
        for batch in batches:
            yield batch.num_bytes, encoder(batch)
        return
    # Forking a process that has threads, as any with torch has, can hang the child.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_proc, context, _start_worker, (os.getpid(),))
    pending: deque[tuple[int, Future[EncodedBatch]]] = deque()
    try:
        for batch in batches:
            pending.append((batch.num_bytes, pool.submit(encoder, batch)))
            if len(pending) >= num_proc * _BATCHES_PER_PROCESS:
                num_bytes, result = pending.popleft()
                yield num_bytes, result.result()
        while pending:
            num_bytes, result = pending.popleft()
            yield num_bytes, result.result()
    except BrokenProcessPool as error:
        raise StorageError(
            "data.num_proc", "a process that tokenizes died, perhaps for lack of memory", fix="lower data.num_proc"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end when it is gone: a killed parent cannot tell its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
