"""From `data:` settings to a prepared data set: built once, checked at every use.

Stages: source -> records -> segments -> token ids -> filter -> split -> shape -> save + manifest. The folder
`data_path` appears by one rename when everything is in it, so a killed build leaves nothing half-used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import DataConfig, TrainerConfig
from trainer.data.binidx import BinIdx
from trainer.data.encode import EncodedFile, Encoder, encode_records
from trainer.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    describe_change,
    list_files,
    read_manifest,
    sync_folder,
    verify_files,
    write_manifest,
)
from trainer.data.mixing import document_passes, read_datapack, source_epochs
from trainer.data.npy import open_npy
from trainer.data.progress import report_progress
from trainer.data.remote import RemoteFolder
from trainer.data.remote_files import is_remote
from trainer.data.saving import Part, SplitWriter
from trainer.data.selection import document_window, in_words, keep_documents, order_documents, split_documents
from trainer.data.sources import Source, find_flat, read_batches
from trainer.data.store import ArrowStore, FlatStore, SubsetStore, TokenStore, check_token_ids
from trainer.data.work import VERSION, Work, binidx_work, encoder_of, find_work, has_source, recipe_of, tokenizer_of
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import get_logger, log_once, mask_secrets

__all__ = ["VERSION", "PreparedSummary", "open_prepared", "prepare"]

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
    """documents, tokens, train_documents, train_tokens, train_trained_tokens, and the same of validation."""
    dropped: dict[str, int]
    """Documents left out, by reason."""
    dtype: str
    seconds: float
    """Wall time of the whole call."""
    record_formats: tuple[str, ...] = ()
    """What each source's records were taken for."""
    sources: tuple[dict[str, Any], ...] = ()
    """Of each source of a mixture: name, epochs, documents, tokens."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens prepared per second; 0 if nothing was built."""
        return self.counts["tokens"] / self.seconds if self.reason and self.seconds else 0.0


def prepare(
    data: DataConfig,
    *,
    seed: int = _SEED,
    vocab_size: int | None = None,
    force: bool = False,
    from_binidx: Path | None = None,
) -> PreparedSummary:
    """Build the data set of `data` unless it is there and up to date.

    Safe to call from several processes at once: one builds, the others wait and find it done.

    Args:
        data: the `data:` settings.
        seed: of the validation split, if `test_split_shuffle` is set (trainer.deterministic_order_seed).
        vocab_size: rows of the model's embedding, if known; every token id is checked against it.
        force: build even if it is up to date.
        from_binidx: prefix of a .bin/.idx pair to build from instead of `data.source`.

    Raises:
        ConfigError: settings are missing or contradict each other.
        DataError: a source file cannot be used; the text names the file and line.
        StorageError: `data_path` cannot be written.
    """
    started = time.monotonic()
    flat = find_flat(data) if from_binidx is None else None
    where = flat or mask_secrets(data.data_path)
    if flat is not None or not (from_binidx or has_source(data)) or data.skip_datapath_setup:
        reason, manifest = None, open_prepared(data, seed=seed, vocab_size=vocab_size)[2]
    else:
        data, work = find_work(data) if from_binidx is None else binidx_work(data, from_binidx)
        where = mask_secrets(data.data_path)
        reason, manifest = _prepare_anywhere(data, work, seed, force)
        _check_vocabulary(_local(data), manifest, vocab_size)
    return PreparedSummary(
        where=str(where),
        reason=reason,
        counts=manifest.counts,
        dropped=manifest.dropped,
        dtype=manifest.dtype,
        seconds=time.monotonic() - started,
        record_formats=tuple(manifest.record_formats),
        sources=tuple(manifest.sources),
    )


def _prepare_anywhere(data: DataConfig, work: list[Work], seed: int, force: bool) -> tuple[str | None, Manifest]:
    if not is_remote(data.data_path):
        return _prepare_folder(data, work, seed, force)
    remote = RemoteFolder(data)
    with _build_lock(remote.local):
        remote.fetch()
    reason, manifest = _prepare_folder(_local(data), work, seed, force)
    if reason is not None or not remote.is_current():
        remote.upload()
    return reason, manifest


def _local(data: DataConfig) -> DataConfig:
    """The settings with the local copy of a remote data_path."""
    if not is_remote(data.data_path):
        return data
    return dataclasses.replace(data, data_path=str(RemoteFolder(data).local))


def _prepare_folder(data: DataConfig, work: list[Work], seed: int, force: bool) -> tuple[str | None, Manifest]:
    if data.data_path is None:
        raise ConfigError("data.data_path", "is not set", fix="name a folder that will hold the prepared data set")
    target = Path(data.data_path)
    manifest, reason = _state(target, data, work, seed)
    if reason is None and not force:
        assert manifest is not None
        logger.info("data: %s is up to date", target)
        return None, manifest
    with _build_lock(target):
        # Another process may have built it while this one waited.
        manifest, reason = _state(target, data, work, seed)
        if reason is None and not force:
            assert manifest is not None
            return None, manifest
        reason = reason or "asked for"
        logger.info("data: %s %s: %s", "rebuilding" if manifest else "building", target, reason)
        return reason, _build(data, work, seed, target)


def _state(target: Path, data: DataConfig, work: list[Work], seed: int) -> tuple[Manifest | None, str | None]:
    """The manifest of `target`, and why it must be built anew (None: it need not be)."""
    if not target.exists():
        return None, "it does not exist yet"
    try:
        manifest = read_manifest(target)
        if manifest is None:
            return None, _reason_without_manifest(target)
        reason = describe_change(manifest.recipe, recipe_of(data, work, seed, manifest.source_files)[0])
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


def _build(data: DataConfig, work: list[Work], seed: int, target: Path) -> Manifest:
    """Build into a folder beside `target`, then put it in its place."""
    for pattern in (f".{target.name}.build-*", f".{target.name}.old-*"):
        for leftover in target.parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    workspace = target.parent / f".{target.name}.build-{os.getpid()}"
    try:
        workspace.mkdir()
        manifest = _build_into(workspace, data, work, seed)
        _replace(workspace / "data", target)
        return manifest
    except OSError as error:
        where = error.filename or target
        raise StorageError("data.data_path", f"{where} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _build_into(workspace: Path, data: DataConfig, work: list[Work], seed: int) -> Manifest:
    recipe, files = recipe_of(data, work, seed, [])
    logger.info("data: reading %d files, %.1f MB", len(files), sum(file.size for file in files) / 1e6)
    encoders = [encoder_of(part) for part in work]
    encoded = [
        _encode(part, encoder, workspace / f"encoded-{index}.arrow")
        for index, (part, encoder) in enumerate(zip(work, encoders, strict=True))
    ]
    tests = [
        None if part.test is None else _encode(part, encoder, workspace / f"test-{index}.arrow", part.test)
        for index, (part, encoder) in enumerate(zip(work, encoders, strict=True))
    ]
    splits, dropped, described = _choose(data, work, encoded, tests, seed)
    writer = SplitWriter(
        dtype=encoders[0].dtype,
        has_mask=any(encoder.has_mask for encoder in encoders),
        has_source=len(work) > 1,
        prefix_skip=data.data_prefix_skip_mask,
    )
    stores = _save(splits, writer, workspace / "data")
    now = recipe_of(data, work, seed, files)[1]
    if [file.identity for file in now] != [file.identity for file in files]:
        raise DataError(work[0].source.named, "changed while it was read", fix="run preload_datapath.py again")
    manifest = Manifest(
        recipe=recipe,
        source_files=files,
        counts=_counts(stores["train"], stores.get("test")),
        dropped=dropped,
        dtype=stores["train"].dtype.name,
        max_token_id=max(file.max_token_id for file in [*encoded, *filter(None, tests)]),
        files=list_files(workspace / "data"),
        record_formats=[encoder.record_format.name for encoder in encoders],
        sources=described,
    )
    write_manifest(workspace / "data", manifest)
    if dropped:
        logger.info("data: dropped %s", in_words(dropped))
    return manifest


def _encode(part: Work, encoder: Encoder, path: Path, test: Source | None = None) -> EncodedFile:
    """All documents of a source that `dataset_length` may want, or of its own `test` split, as token ids."""
    data, source = part.data, test or part.source
    limit = None
    if test is None and data.dataset_length >= 1 and (data.dataset_offset < 0 or data.dataset_offset >= 1):
        limit = int(data.dataset_length) + max(0, int(data.dataset_offset))
    batches = read_batches(source, encoder.record_format.columns)
    with report_progress("tokenizing", source.num_bytes) as progress:
        encoded = encode_records(batches, encoder, path, num_proc=data.num_proc, limit=limit, progress=progress)
    if not encoded.num_documents:
        raise DataError(source.named, "holds no documents", found=f"split {source.split}")
    return encoded


def _choose(
    data: DataConfig, work: list[Work], encoded: list[EncodedFile], tests: list[EncodedFile | None], seed: int
) -> tuple[dict[str, list[Part]], dict[str, int], list[dict[str, Any]]]:
    """Documents of each split, counts of the others by reason, and what is known of each source."""
    dropped: dict[str, int] = {}
    trains: list[np.ndarray] = []
    parts: dict[str, list[Part]] = {"train": [], "test": []}
    for index, (part, file, test_file) in enumerate(zip(work, encoded, tests, strict=True)):
        source_id = index if len(work) > 1 else None
        kept = _keep(part, file, _window(part, file.num_documents), dropped)
        if test_file is not None:
            train = np.arange(len(kept))
            held_out = _keep(part, test_file, slice(None), dropped)
            parts["test"].append(_part(part, test_file, held_out, source_id))
        else:
            train, test = split_documents(len(kept), part.data.test_split, part.data.test_split_shuffle, seed)
            parts["test"].append(_part(part, file, kept[test], source_id))
        trains.append(kept[train])
    tokens = [int(file.sizes[train].sum()) for file, train in zip(encoded, trains, strict=True)]
    epochs = source_epochs([part.settings for part in work], tokens)
    for index, (part, file, train, number) in enumerate(zip(work, encoded, trains, epochs, strict=True)):
        for documents in document_passes(train, file.sizes, number, seed + index):
            ordered = order_documents(data, documents, file.sizes)
            parts["train"].append(_part(part, file, ordered, index if len(work) > 1 else None))
    if data.reverse_train_dataset_before_save:
        parts["train"].reverse()
    described = [
        {"name": part.settings.name, "epochs": number, "documents": len(train), "tokens": num}
        for part, train, num, number in zip(work, trains, tokens, epochs, strict=True)
    ]
    return parts, dropped, described


def _keep(part: Work, file: EncodedFile, window: slice, dropped: dict[str, int]) -> np.ndarray:
    """Numbers of the documents that stay; the others are added to the counts in `dropped`."""
    kept, gone = keep_documents(part.data, file.sizes, file.trained, window)
    for reason, count in gone.items():
        dropped[reason] = dropped.get(reason, 0) + count
    if not len(kept):
        raise DataError(part.source.named, "no documents are left", found=in_words(gone))
    return kept


def _window(part: Work, num: int) -> slice:
    """Documents of the split's slice and of dataset_offset and dataset_length."""
    window = document_window(num, part.data.dataset_offset, part.data.dataset_length)
    if part.source.kind == "hub" or "[" not in part.source.split:
        return window
    import datasets

    name = part.source.split.split("[")[0]
    try:
        instruction = datasets.ReadInstruction.from_spec(part.source.split).to_absolute({name: num})[0]
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            "data.source_dataset_split", f"is no valid slice ({error})", found=part.source.split
        ) from error
    return slice(max(window.start, instruction.from_ or 0), min(window.stop, instruction.to or num))


def _part(work: Work, file: EncodedFile, documents: np.ndarray, source_id: int | None) -> Part:
    data = work.data
    is_cut = data.text_rechunk_force or (data.text_rechunk_auto and work.source.kind == "text")
    return Part(file, documents, source_id, data.text_rechunk_size if is_cut else None)


def _save(splits: dict[str, list[Part]], writer: SplitWriter, folder: Path) -> dict[str, ArrowStore]:
    """Save each split that has documents, and read it back as a check."""
    wanted = {name: parts for name, parts in splits.items() if any(len(part.documents) for part in parts)}
    for name, parts in wanted.items():
        writer.write(parts, folder / name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(wanted)}), "utf-8")
    stores = {name: ArrowStore(folder / name) for name in wanted}
    for name, parts in wanted.items():
        assert stores[name].num_tokens == sum(part.num_tokens for part in parts), f"split {name} was not saved whole"
    return stores


def _counts(train: TokenStore, validation: TokenStore | None) -> dict[str, int]:
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
    flat = find_flat(data)
    if flat is not None:
        return _open_flat(data, flat, seed, vocab_size)
    if data.datapack_config_path is not None:
        data = read_datapack(data)
    if data.data_path is None:
        raise ConfigError("data", "neither data_path nor source is set", fix="set data.source, or data.data_path")
    if is_remote(data.data_path):
        remote = RemoteFolder(data)
        with _build_lock(remote.local):
            remote.fetch()
        data = _local(data)
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
    _check_vocabulary(data, manifest, vocab_size, (train, validation))
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


def _check_vocabulary(
    data: DataConfig, manifest: Manifest, vocab_size: int | None, stores: tuple[TokenStore | None, ...] | None = None
) -> None:
    if vocab_size is None or 0 <= manifest.max_token_id < vocab_size:
        return
    for store in stores if stores is not None else _open_splits(Path(str(data.data_path))):
        if store is not None:
            check_token_ids(store, vocab_size)
