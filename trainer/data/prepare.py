"""From `data:` settings to a prepared data set: built once, checked at every use.

Stages: source -> texts -> token ids -> size filter -> split -> save + manifest. The folder `data_path` appears
by one rename when everything is in it, so a killed build leaves nothing half-used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.schema import DataConfig, TrainerConfig
from trainer.data import encode, sources, tokenizers
from trainer.data.binidx import BinIdx
from trainer.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    describe_change,
    fingerprint_source,
    list_files,
    read_manifest,
    sync_folder,
    verify_files,
    write_manifest,
)
from trainer.data.selection import in_words, keep_documents, split_documents
from trainer.data.sources import Source, find_binidx, find_source, load_documents
from trainer.data.store import ArrowStore, SubsetStore, TokenStore, check_token_ids
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import get_logger, log_once

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["VERSION", "PreparedSummary", "open_prepared", "prepare"]

VERSION = 1
"""Raise it when filtering, splitting or saving change; prepared data sets are then rebuilt."""

_SEED = TrainerConfig.deterministic_order_seed

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedSummary:
    """What `prepare` did and what the training set now is."""

    where: str
    """data_path, or the prefix of a binidx pair."""
    reason: str | None
    """Why it was built; None if it was there and up to date."""
    counts: dict[str, int]
    """documents, tokens, train_documents, train_tokens, validation_documents, validation_tokens."""
    dropped: dict[str, int]
    """Documents left out, by reason."""
    dtype: str
    seconds: float
    """Wall time of the whole call."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens prepared per second; 0 if nothing was built."""
        return self.counts["tokens"] / self.seconds if self.reason and self.seconds else 0.0


def prepare(
    data: DataConfig, *, seed: int = _SEED, vocab_size: int | None = None, force: bool = False
) -> PreparedSummary:
    """Build the data set of `data` unless it is there and up to date.

    Safe to call from several processes at once: one builds, the others wait and find it done.

    Args:
        data: the `data:` settings.
        seed: of the validation split, if `test_split_shuffle` is set (trainer.deterministic_order_seed).
        vocab_size: rows of the model's embedding, if known; every token id is checked against it.
        force: build even if it is up to date.

    Raises:
        ConfigError: settings are missing or contradict each other.
        DataError: a source file cannot be used; the text names the file and line.
        StorageError: `data_path` cannot be written.
    """
    started = time.monotonic()
    prefix = find_binidx(data)
    if prefix is not None or data.source is None or data.skip_datapath_setup:
        reason, manifest = None, open_prepared(data, seed=seed, vocab_size=vocab_size)[2]
    else:
        reason, manifest = _prepare_folder(data, find_source(data), seed, force)
        _check_vocabulary(data, manifest, vocab_size)
    return PreparedSummary(
        where=str(prefix or data.data_path),
        reason=reason,
        counts=manifest.counts,
        dropped=manifest.dropped,
        dtype=manifest.dtype,
        seconds=time.monotonic() - started,
    )


def _prepare_folder(data: DataConfig, source: Source, seed: int, force: bool) -> tuple[str | None, Manifest]:
    if data.data_path is None:
        raise ConfigError("data.data_path", "is not set", fix="name a folder that will hold the prepared data set")
    target = Path(data.data_path)
    manifest, reason = _state(target, data, source, seed)
    if reason is None and not force:
        assert manifest is not None
        logger.info("data: %s is up to date", target)
        return None, manifest
    with _build_lock(target):
        # Another process may have built it while this one waited.
        manifest, reason = _state(target, data, source, seed)
        if reason is None and not force:
            assert manifest is not None
            return None, manifest
        reason = reason or "asked for"
        logger.info("data: %s %s: %s", "rebuilding" if manifest else "building", target, reason)
        return reason, _build(data, source, seed, target)


def _state(target: Path, data: DataConfig, source: Source, seed: int) -> tuple[Manifest | None, str | None]:
    """The manifest of `target`, and why it must be built anew (None: it need not be)."""
    if not target.exists():
        return None, "it does not exist yet"
    try:
        manifest = read_manifest(target)
        if manifest is None:
            return None, _reason_without_manifest(target)
        reason = describe_change(manifest.recipe, _recipe(data, source, seed, manifest.source_files)[0])
        if reason is None:
            verify_files(target, manifest)
        return manifest, reason
    except DataError as error:
        if Path(str(error.where)).is_relative_to(target):
            return None, str(error)
        raise


def _reason_without_manifest(target: Path) -> str:
    if not target.is_dir() or any(target.iterdir()):
        raise ConfigError(
            "data.data_path",
            f"{target} exists and was not made by preload_datapath.py",
            rule="a new or empty folder",
            fix="name another one, or set data.skip_datapath_setup: true to use it as it is",
        )
    return "it is empty"


def _recipe(
    data: DataConfig, source: Source | None, seed: int, known: list[SourceFile]
) -> tuple[dict[str, Any], list[SourceFile]]:
    """Everything that decides the content of the prepared data set, and the source files as they are now."""
    tokenizer = _tokenizer(data)
    recipe = {
        "tokenizer": tokenizer.name,
        "tokenizer_digest": tokenizer.digest,
        "append_end_of_document": data.append_end_of_document,
        "min_token_size": data.min_token_size,
        "max_token_size": data.max_token_size,
        "test_split": data.test_split,
        "test_split_shuffle": data.test_split_shuffle,
        "seed": seed if data.test_split_shuffle else None,
    }
    files = [] if source is None else fingerprint_source(source, known)
    if source is not None:
        recipe |= {
            "source": source.kind,
            "text_key": source.text_key,
            "source_dataset_split": source.split,
            "source_dataset_params": source.params,
            "source_files": [file.identity for file in files],
        }
    recipe["versions"] = {
        "sources": sources.VERSION,
        "tokenizers": tokenizers.VERSION,
        "encode": encode.VERSION,
        "prepare": VERSION,
    }
    return json.loads(json.dumps(recipe)), files


def _tokenizer(data: DataConfig) -> tokenizers.Tokenizer:
    return tokenizers.get_tokenizer(data.tokenizer, world_add_endoftext_token=data.world_add_endoftext_token)


@contextlib.contextmanager
def _build_lock(target: Path) -> Iterator[None]:
    """Hold the lock of one data_path. The kernel frees it when its owner dies, so it is never stale."""
    path = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    except OSError as error:
        raise StorageError("data.data_path", f"{target} cannot be written ({error.strerror})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            logger.info("data: waiting for process %s, which is building %s", stream.read().strip() or "?", target)
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        stream.truncate()
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def _build(data: DataConfig, source: Source, seed: int, target: Path) -> Manifest:
    """Build into a folder beside `target`, then put it in its place."""
    for pattern in (f".{target.name}.build-*", f".{target.name}.old-*"):
        for leftover in target.parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    workspace = target.parent / f".{target.name}.build-{os.getpid()}"
    try:
        workspace.mkdir()
        manifest = _build_into(workspace, data, source, seed)
        _replace(workspace / "data", target)
        return manifest
    except OSError as error:
        where = error.filename or target
        raise StorageError("data.data_path", f"{where} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _build_into(workspace: Path, data: DataConfig, source: Source, seed: int) -> Manifest:
    recipe, files = _recipe(data, source, seed, [])
    logger.info("data: reading %d files, %.1f MB", len(files), sum(file.size for file in files) / 1e6)
    with _progress_bars():
        documents = load_documents(source, workspace)
        encoder = encode.Encoder(data.tokenizer, data.world_add_endoftext_token, data.append_end_of_document)
        encoded = encode.encode_documents(documents, encoder, workspace / "encoded.arrow", data.num_proc)
        kept, dropped = keep_documents(data, encode.token_sizes(encoded))
        if not len(kept):
            raise DataError(source.named, "no documents are left", found=in_words(dropped))
        train, validation = split_documents(len(kept), data.test_split, data.test_split_shuffle, seed)
        stores = _save(encoded, {"train": kept[train], "test": kept[validation]}, workspace / "data")
    if [file.identity for file in fingerprint_source(source, files)] != [file.identity for file in files]:
        raise DataError(source.named, "changed while it was read", fix="run preload_datapath.py again")
    manifest = Manifest(
        recipe=recipe,
        source_files=files,
        counts=_counts(stores["train"], stores.get("test")),
        dropped=dropped,
        dtype=stores["train"].dtype.name,
        max_token_id=max(_max_id(store) for store in stores.values()),
        files=list_files(workspace / "data"),
    )
    write_manifest(workspace / "data", manifest)
    if dropped:
        logger.info("data: dropped %s", in_words(dropped))
    return manifest


@contextlib.contextmanager
def _progress_bars() -> Iterator[None]:
    """Show the progress bars of datasets on a terminal only."""
    import datasets

    hide = not sys.stderr.isatty() and datasets.are_progress_bars_disabled() is False
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


def _save(encoded: Dataset, documents: dict[str, np.ndarray], folder: Path) -> dict[str, ArrowStore]:
    """Save the chosen documents of each split, and read them back as a check."""
    import datasets

    splits = {name: numbers for name, numbers in documents.items() if len(numbers)}
    parts = {name: encoded.select(numbers) for name, numbers in splits.items()}
    datasets.DatasetDict(parts).save_to_disk(str(folder))
    stores = {name: ArrowStore(folder / name) for name in splits}
    sizes = encode.token_sizes(encoded)
    for name, numbers in splits.items():
        assert np.array_equal(stores[name].sizes, sizes[numbers]), f"split {name} was not saved whole"
    return stores


def _counts(train: TokenStore, validation: TokenStore | None) -> dict[str, int]:
    counts = {
        "train_documents": train.num_documents,
        "train_tokens": train.num_tokens,
        "validation_documents": validation.num_documents if validation else 0,
        "validation_tokens": validation.num_tokens if validation else 0,
    }
    return {
        "documents": counts["train_documents"] + counts["validation_documents"],
        "tokens": counts["train_tokens"] + counts["validation_tokens"],
        **counts,
    }


def _max_id(store: TokenStore) -> int:
    step = 1 << 22
    return max(int(store.read_flat(start, start + step).max()) for start in range(0, store.num_tokens, step))


def _replace(folder: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    folder.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def open_prepared(
    data: DataConfig, *, seed: int = _SEED, vocab_size: int | None = None
) -> tuple[TokenStore, TokenStore | None, Manifest]:
    """Training set, validation set and manifest of a data set that is there.

    Args:
        data: the `data:` settings.
        seed: of the validation split of binidx files, if `test_split_shuffle` is set.
        vocab_size: rows of the model's embedding, if known; every token id is checked against it.

    Raises:
        ConfigError: settings are missing or contradict each other.
        DataError: it is missing, damaged, made with other settings, or holds ids outside the vocabulary.
    """
    prefix = find_binidx(data)
    if prefix is not None:
        return _open_binidx(data, prefix, seed, vocab_size)
    if data.data_path is None:
        raise ConfigError("data", "neither data_path nor source is set", fix="set data.source, or data.data_path")
    folder = Path(data.data_path)
    if not folder.is_dir():
        raise DataError("data.data_path", "does not exist", found=str(folder), fix="run preload_datapath.py")
    manifest = read_manifest(folder)
    if manifest is not None:
        verify_files(folder, manifest)
        _refuse_stale(data, folder, manifest, seed)
    elif data.source is not None and not data.skip_datapath_setup:
        raise DataError(folder, f"is not prepared: it has no {MANIFEST_NAME}", fix="run preload_datapath.py")
    train, validation = _open_splits(folder)
    if manifest is None:
        log_once(logger, "data: %s was made by another program; its files are checked only for damage", folder)
        manifest = _manifest_of(train, validation, {})
    _check_vocabulary(data, manifest, vocab_size, (train, validation))
    return train, validation, manifest


def _open_binidx(
    data: DataConfig, prefix: Path, seed: int, vocab_size: int | None
) -> tuple[TokenStore, TokenStore | None, Manifest]:
    store = BinIdx(prefix)
    if vocab_size is not None:
        check_token_ids(store, vocab_size)
    # The official windows are cut from the whole stream of tokens, whatever its documents are.
    every = np.arange(store.num_documents)
    kept, dropped = (every, {}) if data.batching == "windows" else keep_documents(data, store.sizes)
    if not len(kept):
        raise DataError(prefix, "no documents are left", found=in_words(dropped))
    train, validation = split_documents(len(kept), data.test_split, data.test_split_shuffle, seed)
    if len(train) == store.num_documents:
        return store, None, _manifest_of(store, None, dropped)
    parts = SubsetStore(store, kept[train]), SubsetStore(store, kept[validation]) if len(validation) else None
    return *parts, _manifest_of(*parts, dropped)


def _manifest_of(train: TokenStore, validation: TokenStore | None, dropped: dict[str, int]) -> Manifest:
    """A manifest of files that have none; it is not written."""
    return Manifest(
        recipe={},
        source_files=[],
        counts=_counts(train, validation),
        dropped=dropped,
        dtype=train.dtype.name,
        max_token_id=-1,
    )


def _open_splits(folder: Path) -> tuple[ArrowStore, ArrowStore | None]:
    if not (folder / "dataset_dict.json").is_file():
        return ArrowStore(folder), None
    has_validation = (folder / "test" / "state.json").is_file()
    return ArrowStore(folder / "train"), ArrowStore(folder / "test") if has_validation else None


def _refuse_stale(data: DataConfig, folder: Path, manifest: Manifest, seed: int) -> None:
    """DataError if the folder was made with another tokenizer, or, unless skipped, from another source."""
    old = manifest.recipe
    if data.source is None or data.skip_datapath_setup:
        tokenizer = _tokenizer(data)
        new = {**old, "tokenizer": tokenizer.name, "tokenizer_digest": tokenizer.digest}
    else:
        try:
            new = _recipe(data, find_source(data), seed, manifest.source_files)[0]
        except DataError as error:
            log_once(logger, "data: using %s without a look at its source (%s)", folder, error)
            new = {**old, **_recipe(data, None, seed, [])[0]}
    change = describe_change(old, new)
    if change is not None:
        raise DataError(
            folder,
            f"does not fit the settings: {change}",
            fix="run preload_datapath.py, or set data.skip_datapath_setup: true",
        )


def _check_vocabulary(
    data: DataConfig, manifest: Manifest, vocab_size: int | None, stores: tuple[TokenStore | None, ...] | None = None
) -> None:
    if vocab_size is None or 0 <= manifest.max_token_id < vocab_size:
        return
    for store in stores if stores is not None else _open_splits(Path(str(data.data_path))):
        if store is not None:
            check_token_ids(store, vocab_size)
