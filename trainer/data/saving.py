"""Chosen documents of encoded files, written as a folder that `datasets.load_from_disk` reads too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.encode import EncodedFile, encoded_schema, flat_array, list_array, skip_prefixes

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Part", "SplitWriter", "rechunk"]

_SHARD_BYTES = 500_000_000
_TAKE_TOKENS = 1 << 22


@dataclass(frozen=True)
class Part:
    """Documents of one encoded file, in the order in which they are to be written."""

    file: EncodedFile
    documents: np.ndarray
    """int64, their numbers in the file; a document may come more than once in other parts."""
    source_id: int | None = None
    """Number of the source, kept for losses per source; None where there is but one."""
    block_size: int | None = None
    """Join the documents and cut them into blocks of so many tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.file.sizes[self.documents].sum())


@dataclass(frozen=True)
class SplitWriter:
    """Writes the documents of a split.

    Columns: input_ids; loss_mask (1 = trained as a target) unless everything is trained; doc_id, the number of
    the record in its source (of the first token's record for blocks); source_id if there are several sources.
    """

    dtype: type
    has_mask: bool
    has_source: bool
    prefix_skip: int = 0
    """Tokens at the start of each block that are not trained."""

    def write(self, parts: list[Part], folder: Path) -> None:
        """Write one split as shards of at most about 500 MB, with the metadata of `datasets`."""
        import pyarrow as pa

        schema = self._schema()
        bytes_per_token = np.dtype(self.dtype).itemsize + self.has_mask
        total = sum(part.num_tokens for part in parts) * bytes_per_token
        num_shards = max(1, -(-total // _SHARD_BYTES))
        names = [f"data-{index:05d}-of-{num_shards:05d}.arrow" for index in range(num_shards)]
        folder.mkdir(parents=True)
        batches = (batch for part in parts for batch in self._batches(part, schema))
        written = 0
        pending = next(batches, None)
        for index, name in enumerate(names, 1):
            with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                while pending is not None and (written < index * _SHARD_BYTES or index == num_shards):
                    writer.write_batch(pending)
                    written += len(pending.column(0).values) * bytes_per_token
                    pending = next(batches, None)
        info = {"citation": "", "description": "", "features": self._features(), "homepage": "", "license": ""}
        (folder / "dataset_info.json").write_text(json.dumps(info, indent=2), "utf-8")
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": folder.name,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": folder.name,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=2), "utf-8")

    def _features(self) -> dict[str, Any]:
        """The columns in the words of `datasets`, whose import alone would take a second."""
        kinds = {"input_ids": np.dtype(self.dtype).name, "loss_mask": "uint8"}
        features: dict[str, Any] = {
            name: {"feature": {"dtype": kinds[name], "_type": "Value"}, "_type": "LargeList"}
            for name in (["input_ids", "loss_mask"] if self.has_mask else ["input_ids"])
        }
        features["doc_id"] = {"dtype": "int64", "_type": "Value"}
        if self.has_source:
            features["source_id"] = {"dtype": "int32", "_type": "Value"}
        return features

    def _schema(self) -> pa.Schema:
        import pyarrow as pa

        fields = list(encoded_schema(self.dtype, self.has_mask))
        if self.has_source:
            fields.append(pa.field("source_id", pa.int32()))
        metadata = {"huggingface": json.dumps({"info": {"features": self._features()}})}
        return pa.schema(fields, metadata=metadata)

    def _batches(self, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        chosen = _chosen_batches(part)
        for batch in chosen if part.block_size is None else rechunk(chosen, part.block_size, self.prefix_skip):
            yield self._complete(batch, part, schema)

    def _complete(self, batch: pa.RecordBatch, part: Part, schema: pa.Schema) -> pa.RecordBatch:
        """The batch with all columns of the schema."""
        import pyarrow as pa

        columns = {name: batch.column(name) for name in batch.schema.names}
        if self.has_mask and "loss_mask" not in columns:
            ids = columns["input_ids"]
            offsets = np.concatenate([[0], np.cumsum(_lengths(ids))])
            columns["loss_mask"] = list_array(offsets, np.ones(int(offsets[-1]), np.uint8))
        if self.has_source:
            columns["source_id"] = flat_array(np.full(batch.num_rows, part.source_id, np.int32))
        return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _bool_array(values: np.ndarray) -> pa.Array:
    import pyarrow as pa

    packed = np.packbits(values, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(packed)])


def _lengths(lists: pa.LargeListArray) -> np.ndarray:
    return np.diff(lists.offsets.to_numpy(zero_copy_only=False))


def _chosen_batches(part: Part) -> Iterator[pa.RecordBatch]:
    """The part's documents. In ascending order the file is read once from end to end and not kept in memory."""
    import pyarrow as pa

    documents = part.documents
    if len(documents) == 0:
        return
    if (np.diff(documents) > 0).all():
        is_chosen = np.zeros(part.file.num_documents, bool)
        is_chosen[documents] = True
        row = 0
        with pa.OSFile(str(part.file.path), "rb") as source:
            for batch in pa.ipc.open_stream(source):
                wanted = is_chosen[row : row + batch.num_rows]
                row += batch.num_rows
                if wanted.any():
                    yield batch if wanted.all() else batch.filter(_bool_array(wanted))
        return
    with pa.memory_map(str(part.file.path)) as source:
        table = pa.ipc.open_stream(source).read_all()
        ends = np.cumsum(part.file.sizes[documents])
        borders = np.flatnonzero(np.diff(ends // _TAKE_TOKENS)) + 1
        for group in np.split(documents, borders):
            yield table.take(pa.array(group)).combine_chunks().to_batches()[0]


def rechunk(batches: Iterable[pa.RecordBatch], size: int, prefix_skip: int = 0) -> Iterator[pa.RecordBatch]:
    """Documents joined and cut into blocks of `size` tokens; only the last block may be shorter. No token is lost.

    Args:
        batches: columns input_ids, doc_id and perhaps loss_mask.
        size: tokens of a block.
        prefix_skip: the first so many tokens of each block are not trained.
    """
    rest: list[np.ndarray] | None = None
    has_mask = False
    for batch in batches:
        has_mask = "loss_mask" in batch.schema.names
        ids = batch.column("input_ids")
        flat = [ids.flatten().to_numpy(), np.repeat(batch.column("doc_id").to_numpy(), _lengths(ids))]
        flat.append(batch.column("loss_mask").flatten().to_numpy() if has_mask else np.ones(len(flat[0]), np.uint8))
        rest = flat if rest is None else [np.concatenate(pair) for pair in zip(rest, flat, strict=True)]
        whole = len(rest[0]) // size * size
        if whole:
            yield _as_blocks([column[:whole] for column in rest], size, prefix_skip, has_mask)
            rest = [column[whole:] for column in rest]
    if rest is not None and len(rest[0]):
        yield _as_blocks(rest, size, prefix_skip, has_mask)


def _as_blocks(flat: list[np.ndarray], size: int, prefix_skip: int, has_mask: bool) -> pa.RecordBatch:
    import pyarrow as pa

    ids, documents, mask = flat
    starts = np.arange(0, len(ids), size)
    offsets = np.append(starts, len(ids))
    columns = {"input_ids": list_array(offsets, ids)}
    if has_mask:
        mask = mask.copy()
        skip_prefixes(mask, np.diff(offsets), prefix_skip)
        columns["loss_mask"] = list_array(offsets, mask)
    columns["doc_id"] = flat_array(documents[starts])
    return pa.record_batch(columns)
