"""From `data.source` to records: `find_source` says which files, `read_batches` reads them.

To add a kind of file, name its endings in `_SUFFIXES`, its arguments in `_PARAMS`, and its reader in `_READERS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.binidx import BinIdx, binidx_prefix
from trainer.data.remote_files import RemoteFile, SourcePath, expand_remote, is_remote
from trainer.data.source_files import JsonOptions, SourceBatch, TextOptions, TokenBatch, json_batches, text_batches
from trainer.data.store import saved_files
from trainer.data.table_files import arrow_batches, csv_batches, pandas_batches, parquet_batches, table_batches
from trainer.errors import ConfigError, DataError
from trainer.logs import get_logger, log_once, mask_secrets

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.config.schema import DataConfig

__all__ = [
    "VERSION",
    "Source",
    "binidx_source",
    "files_of_hub",
    "find_flat",
    "find_source",
    "find_test_source",
    "first_record",
    "read_batches",
]

VERSION = 2
"""Raise it when the records of any source change; prepared data sets are then rebuilt."""

_SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst"),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "pandas": (".pkl", ".pickle", ".pandas"),
}
_BUILDERS = tuple(_SUFFIXES)
_ALIASES = {"jsonl": "json", "tsv": "csv"}
_PARAMS = {
    "text": {"sample_by", "encoding", "encoding_errors", "keep_linebreaks"},
    "json": {"field", "encoding"},
    "csv": {"delimiter", "sep", "quotechar", "encoding", "column_names"},
    "parquet": {"filters", "batch_size"},
    "arrow": set(),
    "pandas": set(),
    "saved": set(),
}
_BATCH_TOKENS = 1 << 21
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_FLAT_SUFFIXES = (".bin", ".idx", ".npy")
_KINDS = "text, json, csv, parquet, arrow or pandas"

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files that documents come from."""

    kind: str
    """text, json, csv, parquet, arrow, pandas, saved (a folder of datasets' save_to_disk) or hub."""
    files: tuple[SourcePath, ...]
    """Every file whose content matters, in reading order."""
    root: Path
    """Folder of a saved data set, else the nearest folder that holds all local files."""
    hub_name: str | None = None
    """Name of a data set of the Hugging Face Hub."""
    split: str = "train"
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of datasets.load_dataset, without data_files."""

    @property
    def named(self) -> str:
        """The first files, for messages."""
        if self.hub_name:
            return f"{self.hub_name} (split {self.split})"
        shown = ", ".join(str(file) for file in self.files[:3])
        return shown if len(self.files) <= 3 else f"{shown} and {len(self.files) - 3} more"

    @property
    def num_bytes(self) -> int | None:
        """Bytes that reading it will count; None if that is not known, as for packed and columnar files."""
        if self.kind not in ("text", "json", "csv", "pandas") or any(_is_packed(file) for file in self.files):
            return None
        return sum(file.stat().st_size for file in self.files)


def _is_packed(file: SourcePath) -> bool:
    return file.suffix in (".gz", ".bz2", ".xz")


def find_flat(data: DataConfig) -> Path | None:
    """The .npy file, or the prefix of the .bin/.idx pair, that the settings name; None if they name something else.

    Raises:
        ConfigError: `source: binidx` or `npy` without the companion that says where, or with arguments of datasets.
    """
    if data.source in ("binidx", "npy"):
        if data.source_data_dir is None:
            what = "the prefix of PREFIX.bin and PREFIX.idx" if data.source == "binidx" else "the .npy file"
            raise ConfigError("data.source_data_dir", "is not set", fix=f"give {what}")
        if data.source_dataset_params:
            raise ConfigError("data.source_dataset_params", f"has no meaning for {data.source}", fix="leave it out")
        path = Path(data.source_data_dir).expanduser()
        return path if data.source == "npy" else binidx_prefix(path)
    as_it_is = data.source is None or (data.skip_datapath_setup and data.data_path is not None)
    name = data.data_path if as_it_is else data.source
    if name is None or name in _BUILDERS:
        return None
    if is_remote(name):
        if name.endswith(_FLAT_SUFFIXES):
            raise ConfigError("data.source", "is mapped into memory", found=name, rule="a local file", fix="copy it")
        return None
    path = Path(name).expanduser()
    if path.suffix in _FLAT_SUFFIXES:
        return binidx_prefix(path)
    has_pair = any(path.with_name(path.name + suffix).exists() for suffix in (".bin", ".idx"))
    return path if has_pair and not path.exists() else None


def find_source(data: DataConfig) -> Source:
    """Resolve `data.source` and its companions to files; no file is read.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: a file or folder is missing.
    """
    assert data.source is not None
    params = dict(data.source_dataset_params or {})
    options = params.pop("storage_options", None) or data.data_path_storage_options or {}
    kind = _ALIASES.get(data.source, data.source)
    if kind in _BUILDERS:
        return _source(data, kind, _builder_files(data, kind, params, options), params)
    if is_remote(data.source):
        return _remote_source(data, params, options)
    path = Path(data.source).expanduser()
    if path.is_dir():
        return _folder(data, path, params)
    if path.is_file():
        return _source(data, _kind_of(path), [path], params)
    if glob.has_magic(data.source):
        files = _match(Path(), data.source, data.data_path)
        return _source(data, _kind_of(files[0]), files, params)
    if _is_hub_name(data.source):
        if data.source_data_dir is not None:
            params["data_dir"] = data.source_data_dir
        return Source(
            kind="hub", files=(), root=Path(), hub_name=data.source, split=data.source_dataset_split, params=params
        )
    raise DataError(
        "data.source",
        "is no such file, folder, pattern or .bin/.idx prefix",
        found=data.source,
        rule=f"{_KINDS}, binidx, npy, a local path, or the name of a data set of the Hub",
    )


def _is_hub_name(name: str | None) -> bool:
    """Whether a name that is no kind of files, and no path that exists, can be one of the Hub."""
    is_free = name is not None and name not in (*_BUILDERS, *_ALIASES) and not Path(name).expanduser().exists()
    return is_free and bool(_HUB_NAME.fullmatch(str(name))) and not str(name).endswith(sum(_SUFFIXES.values(), ()))


def find_test_source(data: DataConfig) -> Source | None:
    """The source's own validation documents, as `data.source_test_split` says; None if there are none.

    `auto` does not ask the Hub, so that prepared data need no network.

    Raises:
        ConfigError: the split that is named is not there, or trains.
        DataError: a file or folder is missing, or the Hub cannot be reached.
    """
    wanted = data.source_test_split
    if wanted is None:
        return None
    splits = _splits_of(data)
    name = "test" if wanted == "auto" else wanted
    if wanted == "auto" and (name not in splits or data.source_dataset_split.split("[")[0] == name):
        return None
    if name not in splits and not _is_hub_name(data.source):
        found = ", ".join(splits) or "a source without named splits"
        raise ConfigError("data.source_test_split", "is no split of the source", found=name, rule=f"one of {found}")
    if name == data.source_dataset_split.split("[")[0]:
        raise ConfigError("data.source_test_split", "is the split that trains", found=name, fix="name another one")
    log_once(logger, "data: the source's split %s validates; data.test_split has no effect", name)
    return find_source(dataclasses.replace(data, source_dataset_split=name))


def _splits_of(data: DataConfig) -> list[str]:
    """Names of the splits that the source has, as far as it names them."""
    assert data.source is not None
    params = dict(data.source_dataset_params or {})
    if isinstance(params.get("data_files"), dict):
        return list(params["data_files"])
    folder = Path(data.source).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
    return []


def _remote_source(data: DataConfig, params: dict[str, Any], options: dict[str, Any]) -> Source:
    """A URL as `data.source`: a file, a pattern, or a folder of files of one kind."""
    assert data.source is not None
    found = _match_remote(data.source, options)
    if data.source.endswith(sum(_SUFFIXES.values(), ())):
        return _source(data, _kind_of(found[0]), found, params)
    by_kind = {kind: [file for file in found if file.name.endswith(_SUFFIXES[kind])] for kind in _BUILDERS}
    kinds = [kind for kind, files in by_kind.items() if files]
    if len(kinds) != 1:
        counts = ", ".join(f"{len(by_kind[kind])} {kind} files" for kind in kinds) or "none"
        raise _no_one_kind(str(RemoteFile(data.source)), counts)
    return _source(data, kinds[0], by_kind[kinds[0]], params)


def _source(data: DataConfig, kind: str, files: Sequence[SourcePath], params: dict[str, Any]) -> Source:
    unknown = sorted(set(params) - _PARAMS[kind])
    if unknown:
        allowed = ", ".join(sorted(_PARAMS[kind] | {"data_files"}))
        raise ConfigError(
            f"data.source_dataset_params.{unknown[0]}", f"has no meaning for {kind} sources", rule=f"one of {allowed}"
        )
    local = [file for file in files if isinstance(file, Path)]
    for file in local:
        if not file.is_file():
            raise DataError(file, "does not exist", fix="check data.source, source_data_dir and data_files")
    return Source(
        kind=kind,
        files=tuple(files),
        root=Path(os.path.commonpath([file.resolve().parent for file in local])) if local else Path(),
        split=data.source_dataset_split,
        params=params,
    )


def _kind_of(path: SourcePath) -> str:
    for kind, suffixes in _SUFFIXES.items():
        if path.name.endswith(suffixes):
            return kind
    known = ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    raise ConfigError(
        "data.source", "has an unknown ending", found=str(path), rule=f"one of {known}",
        fix=f"set data.source to {_KINDS}, and source_data_dir to the file",
    )  # fmt: skip


def _folder(data: DataConfig, path: Path, params: dict[str, Any]) -> Source:
    """A folder as `data.source`: a saved data set, or files of one kind."""
    has_splits = (path / "dataset_dict.json").is_file()
    if has_splits or (path / "state.json").is_file():
        split = data.source_dataset_split
        if "[" in split:
            raise ConfigError("data.source_dataset_split", "must be whole for a saved data set", found=split)
        root = path / split if has_splits else path
        return _source(data, "saved", saved_files(root), params)
    counts = {kind: len(_files_below(path, kind, data.data_path)) for kind in _BUILDERS}
    kinds = [kind for kind, count in counts.items() if count]
    if len(kinds) != 1:
        found = ", ".join(f"{counts[kind]} {kind} files" for kind in kinds) or "none"
        raise _no_one_kind(str(path), found)
    return _source(data, kinds[0], _files_below(path, kinds[0], data.data_path), params)


def _no_one_kind(folder: str, found: str) -> ConfigError:
    return ConfigError(
        "data.source", f"{folder} does not hold files of one known kind", found=found,
        fix=f"set data.source to {_KINDS}, and source_data_dir to the folder",
    )  # fmt: skip


def _files_below(folder: Path, kind: str, data_path: str | None) -> list[Path]:
    """Files of one kind in `folder` and below it, without hidden ones and without the prepared data set."""
    found = (path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES[kind]) and path.is_file())
    visible = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(path for path in visible if not _is_inside(path, data_path))


def _is_inside(path: Path, folder: str | None) -> bool:
    return folder is not None and Path(folder).resolve() in path.resolve().parents


def _builder_files(
    data: DataConfig, kind: str, params: dict[str, Any], options: dict[str, Any]
) -> Sequence[SourcePath]:
    """Files of `source: text|json|parquet`: data_files, else everything of that kind in source_data_dir."""
    root = Path(data.source_data_dir or ".").expanduser()
    patterns = params.pop("data_files", None)
    if isinstance(patterns, dict):
        split = data.source_dataset_split.split("[")[0]
        if split not in patterns:
            raise ConfigError(
                "data.source_dataset_split", "is not in data_files", found=split, rule=", ".join(patterns)
            )
        patterns = patterns[split]
    if patterns is None:
        if data.source_data_dir is None:
            raise ConfigError(
                "data.source_data_dir", f"is not set, and source: {kind} says only what kind of files to read",
                fix="set it to the folder or file, or set source_dataset_params: {data_files: ...}",
            )  # fmt: skip
        files: list[SourcePath]
        if is_remote(data.source_data_dir):
            found = expand_remote(data.source_data_dir, options)
            files = [file for file in found if len(found) == 1 or file.name.endswith(_SUFFIXES[kind])]
        else:
            files = [*_files_below(root, kind, data.data_path)] if root.is_dir() else [root]
        if not files:
            shown = mask_secrets(data.source_data_dir)
            raise DataError(shown, f"holds no {kind} files", rule=f"files ending in {', '.join(_SUFFIXES[kind])}")
        return files
    patterns = [patterns] if isinstance(patterns, str) else patterns
    base = data.source_data_dir if is_remote(data.source_data_dir) else None
    files = []
    for pattern in map(str, patterns):
        url = pattern if is_remote(pattern) or base is None else f"{base.rstrip('/')}/{pattern}"
        files += _match_remote(url, options) if is_remote(url) else _match(root, pattern, data.data_path)
    return list({str(file): file for file in files}.values())


def _match_remote(url: str, options: dict[str, Any]) -> list[SourcePath]:
    found = expand_remote(url, options)
    if not found:
        raise DataError(RemoteFile(url), "no such file or folder, and no file matches it", fix="check the name")
    return [*found]


def _match(root: Path, pattern: str, data_path: str | None) -> list[SourcePath]:
    path = root / Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    names = (Path(name) for name in glob.glob(str(path), recursive=True))
    found = sorted(name for name in names if name.is_file() and not _is_inside(name, data_path))
    if not found:
        raise DataError(path, "no file matches this pattern", fix="check source_data_dir and data_files")
    return [*found]


def binidx_source(prefix: Path) -> Source:
    """A .bin/.idx pair as a source of documents that are token ids already."""
    prefix = binidx_prefix(prefix)
    files = tuple(prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    BinIdx(prefix)
    return Source(kind="binidx", files=files, root=prefix.parent)


def _binidx_batches(source: Source) -> Iterator[TokenBatch]:
    store = BinIdx(str(source.files[0]))
    start = 0
    for stop in np.append(
        np.flatnonzero(np.diff(np.cumsum(store.sizes) // _BATCH_TOKENS)) + 1, len(store.sizes)
    ).tolist():
        sizes = store.sizes[start:stop]
        first = int(store.sizes[:start].sum())
        ids = store.read_flat(first, first + int(sizes.sum()))
        yield TokenBatch(str(source.files[0]), start, np.array(ids), sizes)
        start = stop


def first_record(source: Source) -> tuple[str, dict[str, Any]]:
    """The first record, from which the format is told, and its place.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    for batch in read_batches(source, None):
        for place, record in batch.records():
            return place, record
    raise DataError(source.named, "holds no documents")


def read_batches(source: Source, columns: Sequence[str] | None) -> Iterator[SourceBatch]:
    """All records of `source`, in order, a few megabytes at a time.

    Args:
        source: from `find_source`.
        columns: those that are wanted, where reading fewer is cheaper; None = all.

    Raises:
        DataError: names the file, and the line or row, that cannot be used. Batches may raise it later, too.
    """
    if source.kind == "text":
        yield from text_batches(source.files, TextOptions(**source.params))
    elif source.kind == "binidx":
        yield from _binidx_batches(source)
    elif source.kind == "hub":
        yield from table_batches(source.named, _hub_rows(source), columns)
    else:
        for file in source.files:
            is_empty = True
            for batch in _READERS[source.kind](file, columns, source.params):
                is_empty = False
                yield batch
            if is_empty:
                logger.warning("%s holds no documents", file)


_READERS: dict[str, Callable[[SourcePath, Sequence[str] | None, dict[str, Any]], Iterator[SourceBatch]]] = {
    "json": lambda file, _, params: json_batches(file, JsonOptions(**params)),
    "csv": lambda file, _, params: csv_batches(file, params),
    "parquet": parquet_batches,
    "arrow": lambda file, columns, _: arrow_batches(file, columns),
    "saved": lambda file, columns, _: arrow_batches(file, columns),
    "pandas": lambda file, *_: pandas_batches(file),
}


def _load_hub(source: Source) -> Dataset:
    """A data set of the Hub through `datasets.load_dataset`: from its cache where that has it.

    Raises:
        DataError: it does not exist, cannot be reached, or has no such split.
    """
    import datasets

    assert source.hub_name is not None
    with _hub_errors(source.hub_name):
        return datasets.load_dataset(source.hub_name, split=source.split, **source.params)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    # datasets raises many unrelated types, several of them bare.
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise DataError(
            "data.source",
            f"{name} is no local path, and the Hub's data set of that name cannot be loaded "
            f"({type(cause).__name__}: {cause})",
            fix="check the name, the split and the network; or save it elsewhere with datasets' save_to_disk and give "
            "that folder",
        ) from error


def files_of_hub(source: Source) -> Source:
    """The files of a Hub data set, pinned to the commit of now, as a source that is read in place.

    Raises:
        DataError: it cannot be reached, has no such split, or its files are of no kind that is read here.
    """
    import datasets

    assert source.hub_name is not None
    params = dict(source.params)
    options = params.pop("storage_options", None) or ({"token": params["token"]} if params.get("token") else {})
    with _hub_errors(source.hub_name):
        files = datasets.load_dataset_builder(source.hub_name, **params).config.data_files
        names = [str(name) for name in (files or {})[source.split]]
    found: list[SourcePath] = [RemoteFile(name, options) if is_remote(name) else Path(name) for name in names]
    kinds = {_kind_of(file) for file in found}
    if len(kinds) != 1:
        raise DataError("data.source", f"{source.hub_name} has files of several kinds", found=", ".join(sorted(kinds)))
    return dataclasses.replace(source, kind=kinds.pop(), files=tuple(found), params={})


def _hub_rows(source: Source) -> Iterator[Any]:
    loaded = _load_hub(source).with_format("arrow")
    yield from loaded.iter(batch_size=1024)
