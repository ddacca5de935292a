"""Opening a prepared data set, or flat files that need no preparing: checked against the settings first."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.config.schema import DataConfig, TrainerConfig
from trainer.data.binidx import BinIdx
from trainer.data.manifest import MANIFEST_NAME, Manifest, describe_change, read_manifest, verify_files
from trainer.data.mixing import read_datapack
from trainer.data.npy import open_npy
from trainer.data.remote import RemoteFolder
from trainer.data.remote_files import is_remote
from trainer.data.selection import in_words, keep_documents, split_documents
from trainer.data.sources import find_flat
from trainer.data.store import ArrowStore, FlatStore, SubsetStore, TokenStore, check_token_ids
from trainer.data.work import find_work, has_source, recipe_of, tokenizer_of
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import get_logger, log_once

__all__ = ["ORDER_SEED", "build_lock", "check_vocabulary", "count_documents", "local_settings", "open_prepared"]

ORDER_SEED = TrainerConfig.deterministic_order_seed
logger = get_logger(__name__)


def open_prepared(
    data: DataConfig, *, seed: int = ORDER_SEED, vocab_size: int | None = None
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
    flat = find_flat(data)
    if flat is not None:
        return _open_flat(data, flat, seed, vocab_size)
    if data.datapack_config_path is not None:
        data = read_datapack(data)
    if data.data_path is None:
        raise ConfigError("data", "neither data_path nor source is set", fix="set data.source, or data.data_path")
    if is_remote(data.data_path):
        remote = RemoteFolder(data)
        with build_lock(remote.local):
            remote.fetch()
        data = local_settings(data)
    folder = Path(str(data.data_path))
    if not folder.is_dir():
        raise DataError("data.data_path", "does not exist", found=str(folder), fix="run preload_datapath.py")
    manifest = read_manifest(folder)
    if manifest is not None:
        verify_files(folder, manifest)
        _refuse_stale(data, folder, manifest, seed)
    elif has_source(data) and not data.skip_datapath_setup:
        raise DataError(folder, f"is not prepared: it has no {MANIFEST_NAME}", fix="run preload_datapath.py")
    train, validation = _open_splits(folder)
    if data.dataloader_swap_train_test_split:
        if validation is None:
            raise ConfigError("data.dataloader_swap_train_test_split", "there are no validation documents to train on")
        train, validation = validation, train
    if manifest is None:
        log_once(logger, "data: %s was made by another program; its files are checked only for damage", folder)
        manifest = _manifest_of(train, validation, {})
    check_vocabulary(data, manifest, vocab_size, (train, validation))
    return train, validation, manifest


def _open_flat(
    data: DataConfig, path: Path, seed: int, vocab_size: int | None
) -> tuple[TokenStore, TokenStore | None, Manifest]:
    store: FlatStore = open_npy(path) if path.suffix == ".npy" else BinIdx(path)
    if vocab_size is not None:
        check_token_ids(store, vocab_size)
    # The official windows are cut from the whole stream of tokens, whatever its documents are.
    every = np.arange(store.num_documents)
    kept, dropped = (every, {}) if data.batching == "windows" else keep_documents(data, store.sizes)
    if not len(kept):
        raise DataError(path, "no documents are left", found=in_words(dropped))
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
        counts=count_documents(train, validation),
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
    if not has_source(data) or data.skip_datapath_setup:
        tokenizer = tokenizer_of(data)
        new = {**old, "tokenizer": tokenizer.name, "tokenizer_digest": tokenizer.digest}
    else:
        try:
            new = recipe_of(*find_work(data), seed, manifest.source_files)[0]
        except DataError as error:
            log_once(logger, "data: using %s without a look at its source (%s)", folder, error)
            new = {**old, **recipe_of(data, None, seed, [])[0]}
    change = describe_change(old, new)
    if change is not None:
        raise DataError(
            folder,
            f"does not fit the settings: {change}",
            fix="run preload_datapath.py, or set data.skip_datapath_setup: true",
        )


def check_vocabulary(
    data: DataConfig, manifest: Manifest, vocab_size: int | None, stores: tuple[TokenStore | None, ...] | None = None
) -> None:
    """Check every token id, unless the manifest says that all fit; DataError names the first that does not."""
    if vocab_size is None or 0 <= manifest.max_token_id < vocab_size:
        return
    for store in stores if stores is not None else _open_splits(Path(str(data.data_path))):
        if store is not None:
            check_token_ids(store, vocab_size)


def local_settings(data: DataConfig) -> DataConfig:
    """The settings with the local copy of a remote data_path."""
    if not is_remote(data.data_path):
        return data
    return dataclasses.replace(data, data_path=str(RemoteFolder(data).local))


@contextlib.contextmanager
def build_lock(target: Path) -> Iterator[None]:
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


def count_documents(train: TokenStore, validation: TokenStore | None) -> dict[str, int]:
    """The counts of a manifest."""
    counts: dict[str, int] = {}
    for name, store in (("train", train), ("validation", validation)):
        counts[f"{name}_documents"] = store.num_documents if store else 0
        counts[f"{name}_tokens"] = store.num_tokens if store else 0
        counts[f"{name}_trained_tokens"] = store.num_trained_tokens if store else 0
    return {
        "documents": counts["train_documents"] + counts["validation_documents"],
        "tokens": counts["train_tokens"] + counts["validation_tokens"],
        **counts,
    }
