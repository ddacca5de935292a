"""Documents as text to documents as token ids, in several processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.tokenizers import get_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

__all__ = ["VERSION", "Encoder", "encode_documents", "token_sizes"]

VERSION = 1
"""Raise it when the ids of any document change; prepared data sets are then rebuilt."""

# Python integers of one batch of documents take about nine times the text.
_BATCH_BYTES = 1 << 23
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Encoder:
    """Encodes a table of texts. Holds settings only, so that it travels to worker processes.

    A tokenizer's Rust core cannot be pickled: each process makes its own on first use.
    """

    tokenizer: str
    """data.tokenizer."""
    world_add_endoftext_token: bool = True
    append_end_of_document: bool = True

    def __call__(self, texts: pa.Table) -> pa.Table:
        """One column of texts to one column input_ids, large lists of uint16 (int32 above 65536 tokens)."""
        import pyarrow as pa

        encoder = get_tokenizer(self.tokenizer, world_add_endoftext_token=self.world_add_endoftext_token)
        end = [np.zeros(1, np.uint16)] if self.append_end_of_document else []
        dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.int32
        pieces, sizes = [np.empty(0, dtype)], [0]
        for text in texts.column(0):
            ids = encoder.encode_array(text.as_py())
            pieces += [ids, *end]
            sizes.append(len(ids) + len(end))
        values = np.concatenate(pieces, dtype=dtype, casting="unsafe")
        lists = pa.LargeListArray.from_arrays(pa.array(np.cumsum(sizes), pa.int64()), pa.array(values))
        return pa.table({"input_ids": lists})

    @property
    def digest(self) -> str:
        """Changes when the ids of any document may change."""
        tokenizer = get_tokenizer(self.tokenizer, world_add_endoftext_token=self.world_add_endoftext_token)
        return hashlib.sha256(f"{VERSION} {tokenizer.digest} {self.append_end_of_document}".encode()).hexdigest()[:16]


def encode_documents(documents: Dataset, encoder: Encoder, cache_file: Path, num_proc: int = 1) -> Dataset:
    """Token ids of every document, in order, as a data set with the one column input_ids.

    Args:
        documents: one column of texts.
        encoder: how to encode.
        cache_file: where the ids are written; the result maps it into memory.
        num_proc: processes that encode.
    """
    import datasets

    vocab_size = get_tokenizer(encoder.tokenizer).vocab_size
    feature = datasets.Value("uint16" if vocab_size <= 1 << 16 else "int32")
    bytes_per_row = max(1, documents.data.nbytes // max(1, len(documents)))
    encoded = documents.with_format("arrow").map(
        encoder,
        batched=True,
        batch_size=int(np.clip(_BATCH_BYTES // bytes_per_row, 1, _BATCH_ROWS)),
        remove_columns=documents.column_names,
        features=datasets.Features({"input_ids": datasets.LargeList(feature)}),
        cache_file_name=str(cache_file),
        # Explicit, because datasets would hash the pickled callable and could not see a changed tokenizer.
        new_fingerprint=hashlib.sha256(f"{cache_file} {encoder.digest}".encode()).hexdigest()[:16],
        num_proc=num_proc if num_proc > 1 and len(documents) > 1 else None,
        load_from_cache_file=False,
        desc="Tokenizing",
    )
    return encoded.with_format(None)


def token_sizes(encoded: Dataset) -> np.ndarray:
    """Tokens of each document of an encoded data set, int64."""
    return np.concatenate([np.zeros(0, np.int64), *_chunk_sizes(encoded)])


def _chunk_sizes(encoded: Dataset) -> Iterator[np.ndarray]:
    for chunk in encoded.data.column("input_ids").chunks:
        yield np.diff(chunk.offsets.to_numpy(zero_copy_only=False))
