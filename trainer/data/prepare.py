"""From `data:` settings to a prepared data set: built once, checked at every use.

Stages: source -> records -> segments -> token ids -> filter -> split -> shape -> save + manifest. The folder
`data_path` appears by one rename when everything is in it, so a killed build leaves nothing half-used.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import DataConfig
from trainer.data.encode import EncodedFile, Encoder, encode_records
from trainer.data.manifest import (
    Manifest,
    describe_change,
    list_files,
    read_manifest,
    sync_folder,
    verify_files,
    write_manifest,
)
from trainer.data.mixing import document_passes, source_epochs
from trainer.data.opening import (
    ORDER_SEED,
    build_lock,
    check_vocabulary,
    count_documents,
    local_settings,
    open_prepared,
)
from trainer.data.progress import report_progress
from trainer.data.remote import RemoteFolder
from trainer.data.remote_files import is_remote
from trainer.data.saving import Part, SplitWriter
from trainer.data.selection import document_window, in_words, keep_documents, order_documents, split_documents
from trainer.data.sources import Source, find_flat, read_batches
from trainer.data.store import ArrowStore
from trainer.data.work import VERSION, Work, binidx_work, encoder_of, find_work, has_source, recipe_of
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import get_logger, mask_secrets

__all__ = ["VERSION", "PreparedSummary", "open_prepared", "prepare"]

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
    seed: int = ORDER_SEED,
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
        check_vocabulary(local_settings(data), manifest, vocab_size)
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
    with build_lock(remote.local):
        remote.fetch()
    reason, manifest = _prepare_folder(local_settings(data), work, seed, force)
    if reason is not None or not remote.is_current():
        remote.upload()
    return reason, manifest


def _prepare_folder(data: DataConfig, work: list[Work], seed: int, force: bool) -> tuple[str | None, Manifest]:
    if data.data_path is None:
        raise ConfigError("data.data_path", "is not set", fix="name a folder that will hold the prepared data set")
    target = Path(data.data_path)
    manifest, reason = _state(target, data, work, seed)
    if reason is None and not force:
        assert manifest is not None
        logger.info("data: %s is up to date", target)
        return None, manifest
    with build_lock(target):
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
        counts=count_documents(stores["train"], stores.get("test")),
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


def _replace(folder: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    folder.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
