"""Documents read from their source while training, for sets larger than the disk: nothing is prepared or stored.

A source is read in blocks: whole batches of a file, then of the next file, until a block holds enough documents.
The order of files is shuffled for each pass over the source, and the documents of a block are shuffled together.
A block is a function of its `Mark`, so a position is a few numbers, and a resume reads the blocks at hand again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.config.schema import DataConfig
from trainer.data.encode import EncodedBatch, encode_batches, trained_targets
from trainer.data.manifest import Manifest, list_source
from trainer.data.sampler import epoch_permutation, keyed_permutation
from trainer.data.selection import in_words, keep_documents
from trainer.data.source_files import SourceBatch
from trainer.data.sources import Source, files_of_hub, read_batches
from trainer.data.store import FlatStore
from trainer.data.work import Work, encoder_of, find_work, recipe_of
from trainer.errors import ConfigError, DataError
from trainer.logs import get_logger, mask_secrets

__all__ = ["Block", "Document", "DocumentStream", "Mark", "StreamedSet", "documents_store", "open_streamed"]

_SHARE_OF = 10_000
logger = get_logger(__name__)


class Mark(NamedTuple):
    """Where a block starts."""

    epoch: int
    """Pass over the source, counted from 0."""
    file: int
    """Place in that pass's order of files."""
    batch: int
    """Number of the batch in its file."""


class Document(NamedTuple):
    """Tokens of a document and, unless all are trained, their mask."""

    ids: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True)
class Block:
    """Documents that are read and shuffled together."""

    mark: Mark
    batches: list[EncodedBatch]
    places: np.ndarray
    """int64 [documents, 3]: batch, first token, tokens; in the order of training."""

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.places)

    def document(self, index: int) -> Document:
        """A copy, so that a document does not keep its block alive."""
        number, start, size = self.places[index].tolist()
        batch = self.batches[number]
        mask = None if batch.mask is None else batch.mask[start : start + size].copy()
        return Document(batch.ids[start : start + size].copy(), mask)


class DocumentStream:
    """The documents of one source, from any place, pass after pass.

    Args:
        part: the source and its settings.
        seed: of all orders.
        vocab_size: rows of the model's embedding; every token id must be below it.

    Raises:
        ConfigError: the source's settings do not fit.
        DataError: the source cannot be read, or the validation documents would be all of it.
    """

    def __init__(self, part: Work, seed: int, vocab_size: int) -> None:
        if part.source.kind == "hub":
            test = None if part.test is None else files_of_hub(part.test)
            part = dataclasses.replace(part, source=files_of_hub(part.source), test=test)
        self.part, self._seed, self._vocab_size = part, seed, vocab_size
        self._data, self._source = part.data, part.source
        self.encoder = encoder_of(part)
        self._shuffles = self._data.dataloader_shuffle_training and self._data.streaming_shuffle_buffer > 0
        self._orders: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._first_trained: tuple[int, int, int] = (0, 0, 0)
        """(file, batch, document in it): all before it are validation documents."""
        self.validation = (
            self._hold_out(_num_validation(self._data)) if part.test is None else self._own_validation(part.test)
        )

    @functools.cached_property
    def digest(self) -> str:
        """Of all that decides which documents there are and how they are tokenized; of local files, name and size."""
        recipe, _ = recipe_of(self._data, None, self._seed, [])
        files = [(file.name, file.size, file.tag) for file in list_source(self._source)]
        settings = [self._source.hub_name, self._source.kind, mask_secrets(self._source.params)]
        return hashlib.sha256(json.dumps([recipe, settings, files], sort_keys=True).encode()).hexdigest()

    def blocks(self, start: Mark, num_proc: int = 1) -> Iterator[Block]:
        """Blocks from the one at `start` on, without end. A pass ends its last block.

        Raises:
            DataError: names the file, and the line or row, that cannot be used.
        """
        marks: deque[Mark] = deque()

        def noted() -> Iterator[SourceBatch]:
            for mark, batch in self._batches(start):
                marks.append(mark)
                yield batch

        parts: list[tuple[Mark, EncodedBatch, np.ndarray]] = []
        epoch, tally = start.epoch, _Tally()
        for _, encoded in encode_batches(noted(), self.encoder, num_proc):
            mark = marks.popleft()
            if mark.epoch != epoch:
                yield from self._block(parts)
                self._end_pass(epoch, tally, was_whole=epoch > start.epoch or start[1:] == (0, 0))
                parts, epoch, tally = [], mark.epoch, _Tally()
            parts.append((mark, encoded, self._kept(mark, encoded, tally)))
            if sum(len(kept) for _, _, kept in parts) >= max(1, self._data.streaming_shuffle_buffer):
                yield from self._block(parts)
                parts = []

    def _end_pass(self, epoch: int, tally: _Tally, *, was_whole: bool) -> None:
        dropped = f"; dropped {in_words(tally.dropped)}" if tally.dropped else ""
        if was_whole and not tally.documents:
            raise DataError(self._source.named, f"has no documents to train on{dropped}")
        logger.info(
            "data: end of pass %d over %s: %d documents, %d tokens%s%s",
            epoch + 1, self._source.named, tally.documents, tally.tokens, dropped,
            "" if was_whole else ", since this process started",
        )  # fmt: skip

    def _batches(self, start: Mark) -> Iterator[tuple[Mark, SourceBatch]]:
        epoch, first_file, first_batch = start
        while True:
            order = self._order(epoch)
            for place in range(first_file, len(order)):
                for number, batch in enumerate(self._file_batches(int(order[place]))):
                    if number >= first_batch:
                        yield Mark(epoch, place, number), batch
                first_batch = 0
            epoch, first_file = epoch + 1, 0

    def _file_batches(self, file: int) -> Iterator[SourceBatch]:
        source = dataclasses.replace(self._source, files=(self._source.files[file],))
        return read_batches(source, self.encoder.record_format.columns)

    def _order(self, epoch: int) -> np.ndarray:
        """Numbers of the source's files in the order of a pass."""
        if self._orders[0] != epoch:
            num = len(self._source.files)
            # Replaced, never changed: another thread may be looking.
            self._orders = epoch, epoch_permutation(num, self._seed, epoch) if self._shuffles else np.arange(num)
        kept_epoch, order = self._orders
        return order if kept_epoch == epoch else self._order(epoch)

    def _kept(self, mark: Mark, batch: EncodedBatch, tally: _Tally) -> np.ndarray:
        """Numbers of the batch's documents that are trained."""
        self._check_ids(mark, batch)
        kept, dropped = keep_documents(self._data, batch.sizes, trained_targets(batch))
        place = (int(self._order(mark.epoch)[mark.file]), mark.batch)
        if place < self._first_trained[:2]:
            kept = kept[:0]
        elif place == self._first_trained[:2]:
            kept = kept[kept >= self._first_trained[2]]
        kept = kept[batch.sizes[kept] > 1]
        tally.add(batch, kept, dropped)
        return kept

    def _check_ids(self, mark: Mark, batch: EncodedBatch) -> None:
        if len(batch.ids) and int(batch.ids.max()) >= self._vocab_size:
            raise DataError(
                self._source.files[int(self._order(mark.epoch)[mark.file])],
                f"token id {batch.ids.max()} is not in the vocabulary",
                rule=f"0 <= id < vocab_size {self._vocab_size}",
                fix="use the tokenizer that the model was made for, or a model with a larger vocabulary",
            )

    def _block(self, parts: list[tuple[Mark, EncodedBatch, np.ndarray]]) -> Iterator[Block]:
        """The block of some batches, unless none of their documents is trained."""
        if not parts:
            return
        places = [_places(number, batch, kept) for number, (_, batch, kept) in enumerate(parts)]
        together = np.concatenate(places)
        mark = parts[0][0]
        if self._shuffles:
            together = together[keyed_permutation(len(together), self._seed, *mark)]
        if len(together):
            yield Block(mark, [batch for _, batch, _ in parts], together)

    def _own_validation(self, test: Source) -> list[Document]:
        """All documents of the source's own validation split."""
        found: list[Document] = []
        batches = read_batches(test, self.encoder.record_format.columns)
        for _, batch in encode_batches(batches, self.encoder, 1):
            kept, _ = keep_documents(self._data, batch.sizes, trained_targets(batch))
            block = Block(Mark(0, 0, 0), [batch], _places(0, batch, kept[batch.sizes[kept] > 1]))
            found += map(block.document, range(block.num_documents))
        return found

    def _hold_out(self, num: int) -> list[Document]:
        """The first `num` documents in the order of the source; training leaves them out."""
        found: list[Document] = []
        for file in range(len(self._source.files) if num else 0):
            for number, (_, batch) in enumerate(encode_batches(self._file_batches(file), self.encoder, 1)):
                kept, _ = keep_documents(self._data, batch.sizes, trained_targets(batch))
                kept = kept[batch.sizes[kept] > 1][: num - len(found)]
                block = Block(Mark(0, 0, 0), [batch], _places(0, batch, kept))
                found += map(block.document, range(block.num_documents))
                if len(found) == num:
                    self._first_trained = (file, number, int(kept[-1]) + 1)
                    return found
        if num:
            raise DataError(
                self._source.named, f"holds {len(found)} documents, and validation takes the first {num}",
                fix="set data.test_split to a smaller number",
            )  # fmt: skip
        return found


@dataclass
class _Tally:
    """What a pass over a source gave."""

    documents: int = 0
    tokens: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, batch: EncodedBatch, kept: np.ndarray, dropped: dict[str, int]) -> None:
        """Count a batch."""
        self.documents += len(kept)
        self.tokens += int(batch.sizes[kept].sum())
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def _places(number: int, batch: EncodedBatch, kept: np.ndarray) -> np.ndarray:
    starts = np.cumsum(batch.sizes) - batch.sizes
    return np.stack([np.full(len(kept), number), starts[kept], batch.sizes[kept]], axis=1)


def _num_validation(data: DataConfig) -> int:
    """Validation documents of a source whose length is not known."""
    return int(data.test_split) if data.test_split >= 1 else round(data.test_split * _SHARE_OF)


@dataclass(frozen=True)
class StreamedSet:
    """The sources of a run that streams."""

    streams: list[DocumentStream]
    weights: list[float]
    """Share of each source in the tokens."""
    digest: str
    validation: FlatStore | None
    manifest: Manifest


def open_streamed(data: DataConfig, *, seed: int, vocab_size: int) -> StreamedSet:
    """Find the sources, read their validation documents, and count what is known.

    Raises:
        ConfigError: settings contradict each other.
        DataError: a source cannot be read.
    """
    data, work = find_work(data)
    _check_sources(work)
    streams = [DocumentStream(part, seed + index, vocab_size) for index, part in enumerate(work)]
    digests = [stream.digest for stream in streams]
    validation = _store_of(streams)
    tokens = validation.num_tokens if validation else 0
    counts = {"validation_documents": validation.num_documents if validation else 0, "validation_tokens": tokens}
    manifest = Manifest(
        recipe={},
        source_files=[],
        counts=counts,
        dropped={},
        dtype=np.dtype(streams[0].encoder.dtype).name,
        max_token_id=-1,
        record_formats=[stream.encoder.record_format.name for stream in streams],
        sources=[{"name": part.settings.name} for part in work],
    )
    for stream in streams:
        logger.info(
            "data: streaming %s; %d documents kept for validation", stream.part.source.named, len(stream.validation)
        )
    weights = [part.settings.weight or 1.0 for part in work]
    return StreamedSet(streams, weights, hashlib.sha256("".join(digests).encode()).hexdigest(), validation, manifest)


def _check_sources(work: list[Work]) -> None:
    for part in work:
        if part.settings.epochs or part.settings.tokens or (len(work) > 1 and part.settings.weight is None):
            raise ConfigError(
                "data.sources", f"{part.settings.name} has no weight", rule="a weight, not epochs or tokens, with data.streaming",
                fix="how long sources are is not known: give all of them a weight, their shares of the tokens",
            )  # fmt: skip
        if part.source.kind == "binidx" or "[" in part.source.split:
            raise ConfigError(
                "data.source", "cannot be streamed", found=part.source.named, rule="whole files of text, json, csv, "
                "parquet or arrow, or a data set of the Hub", fix="set data.streaming: false",
            )  # fmt: skip


def _store_of(streams: list[DocumentStream]) -> FlatStore | None:
    """The validation documents of all sources; None if there are none."""
    documents = [document for stream in streams for document in stream.validation]
    if not documents:
        return None
    store = documents_store("data.source", documents)
    if len(streams) > 1:
        numbers = [len(stream.validation) for stream in streams]
        store.source_ids = np.repeat(np.arange(len(streams), dtype=np.int32), numbers)
    return store


def documents_store(where: str, documents: list[Document]) -> FlatStore:
    """Documents in memory as a store, numbered as they stand."""
    sizes = np.array([len(document.ids) for document in documents], np.int64)
    masks = None
    if any(document.mask is not None for document in documents):
        masks = [np.ones(len(d.ids), np.uint8) if d.mask is None else d.mask for d in documents]
    return FlatStore(where, [document.ids for document in documents], sizes, masks)
