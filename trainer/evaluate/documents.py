"""Loss of a model on documents of any length, at constant memory.

Documents of like length are read side by side, chunk by chunk, and the state goes from chunk to chunk. Only a part of
a long document is in memory at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.bptt.step import ChunkInput, EagerEngine, StepOptions, evaluate_step
from trainer.data.binidx import BinIdx, binidx_prefix
from trainer.data.manifest import read_manifest, verify_files
from trainer.data.positions import group_of, position_buckets
from trainer.data.store import FlatStore, TokenStore, check_token_ids, open_store
from trainer.data.tokenizers import Tokenizer
from trainer.errors import ConfigError, DataError
from trainer.evaluate.losses import LossSums, LossTable
from trainer.generate.engine import read_prompt
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState, map_state
from trainer.ops.loss import GroupSums, linear_cross_entropy
from trainer.types import Batch

__all__ = ["EvaluationOptions", "ModelEngine", "evaluate_documents", "open_documents"]

_PART_CHUNKS = 16
"""Chunks of a document that are in memory at one time."""
_RECORD_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".npy")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How documents go through the model. But for `context` the result does not depend on it, save for rounding."""

    ctx_len: int = 2048
    """Tokens per chunk. Memory grows with it."""
    rows: int = 8
    """Documents that are read side by side."""
    loss_chunk_rows: int = 4096
    """Rows of logits that exist at one time."""
    context: int | None = None
    """Forget everything after each so many tokens of a document; None = never. Shows what the text further back is worth."""

    def __post_init__(self) -> None:
        if self.ctx_len < 16 or self.ctx_len % 16:
            raise ConfigError("--ctx-len", "out of range", found=self.ctx_len, rule="a multiple of 16")
        if self.context is not None and self.context < 1:
            raise ConfigError("--context", "out of range", found=self.context, rule="at least 1")
        if self.rows < 1:
            raise ConfigError("--batch-size", "out of range", found=self.rows, rule="at least 1")


class ModelEngine(EagerEngine):
    """Chunks through a model in this process, without a strategy.

    Args:
        model: on its device.
        loss_chunk_rows: rows of logits that exist at one time.
        initial: state [1, ...] before each document; None = zero.
    """

    def __init__(self, model: RWKV7, loss_chunk_rows: int = 4096, initial: ModelState | None = None) -> None:
        self.model, self.loss_chunk_rows, self.initial = model, loss_chunk_rows, initial

    def zero_state(self, rows: int) -> ModelState:
        """See `Engine`."""
        if self.initial is None:
            return self.model.zero_state(rows)
        return map_state(lambda x: x.repeat(rows, *[1] * (x.dim() - 1)), self.initial)

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """See `EagerEngine`."""
        hidden_BTC, state = self.model(chunk.ids_BT, chunk.state, chunk.reset_BT)
        if not with_loss:
            return None, state
        groups = None
        if chunk.group_BT is not None and chunk.group_sums_2G is not None:
            groups = GroupSums(chunk.group_BT.flatten(), chunk.group_sums_2G)
        loss = linear_cross_entropy(
            hidden_BTC.flatten(0, 1), self.model.head.weight, chunk.targets_BT.flatten(), chunk.weight_BT.flatten(),
            slice_rows=self.loss_chunk_rows, groups=groups,
        )  # fmt: skip
        return loss, state

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See `EagerEngine`."""
        loss.backward()


def open_documents(paths: Sequence[Path], split: str, tokenizer: Tokenizer) -> tuple[TokenStore, list[str]]:
    """Documents to evaluate, and the names of their sources ([] if there is but one).

    Args:
        paths: UTF-8 text files, each one document, ended with the end-of-document token as in training; or one
            prepared data set; or one .bin/.idx pair.
        split: of a prepared data set that has both: `validation` or `train`.
        tokenizer: for text files.

    Raises:
        DataError: nothing is there, it is damaged, or is no UTF-8.
    """
    prefix = binidx_prefix(paths[0])
    is_pair = prefix.with_name(f"{prefix.name}.idx").is_file()
    if len(paths) > 1 and (is_pair or paths[0].is_dir()):
        problem = "several of them can be given only as text files"
        raise ConfigError("DATA", problem, found=str(paths[0]), fix="evaluate data sets one at a time")
    if is_pair:
        return BinIdx(paths[0]), []
    if paths[0].is_dir():
        return _open_folder(paths[0], split)
    documents = [_encode(path, tokenizer) for path in paths]
    sizes = np.array([len(ids) for ids in documents], np.int64)
    return FlatStore(str(paths[0]), documents, sizes), []


def _open_folder(folder: Path, split: str) -> tuple[TokenStore, list[str]]:
    manifest = read_manifest(folder)
    if manifest is not None:
        verify_files(folder, manifest)
    name = "train" if split == "train" else "test"
    if split != "train" and not (folder / name).is_dir():
        raise DataError(
            folder, "has no validation documents", fix="add --split train, or prepare it with data.test_split"
        )
    store = open_store(folder, name)
    names = [str(source["name"]) for source in manifest.sources] if manifest is not None else []
    return store, [] if store.source_ids is None else names


def _encode(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    if path.is_dir():
        raise DataError(path, "is a folder", rule="text files, or one prepared data set")
    if path.suffix in _RECORD_SUFFIXES:
        fix = "build a data set of it with preload_datapath.py, or give it the suffix .txt to read it as it stands"
        raise DataError(path, "holds records, not one text", fix=fix)
    ids = tokenizer.encode_array(read_prompt(None, path))
    return np.append(ids, np.array([tokenizer.end_of_document], ids.dtype))


def evaluate_documents(
    model: RWKV7,
    store: TokenStore,
    options: EvaluationOptions,
    *,
    names: Sequence[str] = (),
    initial: ModelState | None = None,
    progress: Callable[[int], None] = lambda num_tokens: None,
) -> LossTable:
    """Losses of all trained tokens of a store, by source and by position in their document.

    Args:
        model: on its device, in its dtype.
        store: token documents. The first token of each is read, not predicted.
        options: how they go through the model.
        names: of the sources, by number.
        initial: state [1, ...] before each document, such as a tuned one; None = zero.
        progress: called with the number of tokens read since the last call.

    Raises:
        DataError: there is nothing to evaluate, or a token id is not in the model's vocabulary.
    """
    check_token_ids(store, model.shape.vocab_size)
    documents = np.flatnonzero(store.sizes >= 2)
    if not len(documents):
        raise DataError(store.where, "holds no document of two or more tokens: there is nothing to predict")
    device = model.ln_out.weight.device
    engine, sums = ModelEngine(model, options.loss_chunk_rows, initial), LossSums(names, device)
    step = StepOptions(
        ctx_len=options.ctx_len, window=1, learning_range=-1, host_memory_bytes=1, num_micro=1, micro_rows=options.rows
    )
    longest_first = documents[np.argsort(-store.sizes[documents], kind="stable")]
    for start in range(0, len(longest_first), options.rows):
        states: list[ModelState] = []
        part = longest_first[start : start + options.rows].tolist()
        for batch in _parts(store, part, options.ctx_len * _PART_CHUNKS, options.context):
            states = evaluate_step(
                engine, [batch], step, device=device, gather=lambda numbers: [numbers],
                group_sums_2G=sums.step_2G, states=states,
            )  # fmt: skip
            sums.end_step()
            progress(sum(batch.lengths))
    return sums.take(lambda numbers: [numbers])


def _parts(store: TokenStore, documents: list[int], part_tokens: int, context: int | None) -> Iterator[Batch]:
    """Documents side by side, longest first, `part_tokens` of each at a time; those that have ended drop out."""
    num_targets = [int(store.sizes[document]) - 1 for document in documents]
    for start in range(0, num_targets[0], part_tokens):
        lengths = [min(part_tokens, num - start) for num in num_targets if num > start]
        shape = (len(lengths), lengths[0])
        ids_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        weight_BT, group_BT = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
        for row, (document, length) in enumerate(zip(documents, lengths, strict=False)):
            tokens = torch.from_numpy(store.read(document, start, start + length + 1).astype(np.int64))
            ids_BT[row, :length], targets_BT[row, :length] = tokens[:-1], tokens[1:]
            mask = store.loss_mask(document, start + 1, start + length + 1)
            weight_BT[row, :length] = 1.0 if mask is None else torch.from_numpy(mask.copy())
            source = 0 if store.source_ids is None else int(store.source_ids[document])
            group_BT[row, :length] = torch.from_numpy(group_of(source, position_buckets(start, length)))
        # Rows begin with a zero state, or go on with their own as lanes do.
        reset_BT = torch.zeros(shape, dtype=torch.bool)
        if context is not None:
            reset_BT[:, -start % context :: context] = True
        yield Batch(ids_BT, targets_BT, weight_BT, reset_BT, tuple(lengths), tuple(range(len(lengths))), group_BT)
