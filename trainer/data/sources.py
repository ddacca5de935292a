"""Documents as text, from local files: `find_source` says which files, `load_documents` reads them.

Text, parquet and Arrow files go through `datasets.load_dataset` after a check of every file. JSON is parsed
here and handed over as Arrow, because the JSON reader of `datasets` changes texts that look like dates.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.binidx import binidx_prefix
from trainer.data.source_files import JsonOptions, check_arrow, check_parquet, check_text, read_json_texts
from trainer.data.store import saved_files
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import get_logger

if TYPE_CHECKING:
    from datasets import Dataset

    from trainer.config.schema import DataConfig

__all__ = ["VERSION", "Source", "find_binidx", "find_source", "load_documents"]

VERSION = 1
"""Raise it when the documents of any source change; prepared data sets are then rebuilt."""

_SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst"),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_BUILDERS = tuple(_SUFFIXES)
_PARAMS = {
    "text": {"sample_by", "encoding", "encoding_errors", "keep_linebreaks"},
    "json": {"field", "encoding"},
    "parquet": {"filters", "batch_size"},
    "arrow": set(),
    "saved": set(),
}
_STAGE_CHARS, _STAGE_ROWS = 1 << 23, 4096

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files that documents come from."""

    kind: str
    """text, json, parquet, arrow or saved (a folder of datasets' save_to_disk)."""
    files: tuple[Path, ...]
    """Every file whose content matters, in reading order."""
    root: Path
    """Folder of a saved data set, else the nearest folder that holds all files."""
    text_key: str = "text"
    split: str = "train"
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of datasets.load_dataset, without data_files."""

    @property
    def named(self) -> str:
        """The first files, for messages."""
        shown = ", ".join(str(file) for file in self.files[:3])
        return shown if len(self.files) <= 3 else f"{shown} and {len(self.files) - 3} more"


def find_binidx(data: DataConfig) -> Path | None:
    """Prefix of the .bin/.idx pair that the settings name, or None if they name something else.

    Raises:
        ConfigError: `source: binidx` without the companion that says where, or with arguments of datasets.
    """
    if data.source == "binidx":
        if data.source_data_dir is None:
            raise ConfigError("data.source_data_dir", "is not set", fix="give the prefix of PREFIX.bin and PREFIX.idx")
        if data.source_dataset_params:
            raise ConfigError("data.source_dataset_params", "has no meaning for binidx", fix="leave it out")
        return binidx_prefix(Path(data.source_data_dir).expanduser())
    as_it_is = data.source is None or (data.skip_datapath_setup and data.data_path is not None)
    name = data.data_path if as_it_is else data.source
    if name is None or name in _BUILDERS:
        return None
    path = Path(name).expanduser()
    if path.suffix in (".bin", ".idx"):
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
    if data.source in _BUILDERS:
        return _source(data, data.source, _builder_files(data, data.source, params), params)
    path = Path(data.source).expanduser()
    if path.is_dir():
        return _folder(data, path, params)
    if path.is_file():
        return _source(data, _kind_of(path), [path], params)
    raise DataError(
        "data.source",
        "is no such file, folder or .bin/.idx prefix",
        found=data.source,
        rule="text, json, parquet, binidx, or a local path",
        fix="save a data set of the Hub once with datasets' save_to_disk and give its folder",
    )


def _source(data: DataConfig, kind: str, files: list[Path], params: dict[str, Any]) -> Source:
    unknown = sorted(set(params) - _PARAMS[kind])
    if unknown:
        allowed = ", ".join(sorted(_PARAMS[kind] | {"data_files"}))
        raise ConfigError(
            f"data.source_dataset_params.{unknown[0]}", f"has no meaning for {kind} sources", rule=f"one of {allowed}"
        )
    for file in files:
        if not file.is_file():
            raise DataError(file, "does not exist", fix="check data.source, source_data_dir and data_files")
    return Source(
        kind=kind,
        files=tuple(files),
        root=Path(os.path.commonpath([file.resolve().parent for file in files])),
        text_key=data.custom_text_key or "text",
        split=data.source_dataset_split,
        params=params,
    )


def _kind_of(path: Path) -> str:
    for kind, suffixes in _SUFFIXES.items():
        if path.name.endswith(suffixes):
            return kind
    known = ", ".join(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)
    raise ConfigError(
        "data.source", "has an unknown ending", found=str(path), rule=f"one of {known}",
        fix="set data.source to text, json or parquet and source_data_dir to the file",
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
        raise ConfigError(
            "data.source", f"{path} does not hold files of one known kind", found=found,
            fix="set data.source to text, json or parquet and source_data_dir to the folder",
        )  # fmt: skip
    return _source(data, kinds[0], _files_below(path, kinds[0], data.data_path), params)


def _files_below(folder: Path, kind: str, data_path: str | None) -> list[Path]:
    """Files of one kind in `folder` and below it, without hidden ones and without the prepared data set."""
    found = (path for path in folder.rglob("*") if path.name.endswith(_SUFFIXES[kind]) and path.is_file())
    visible = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(path for path in visible if not _is_inside(path, data_path))


def _is_inside(path: Path, folder: str | None) -> bool:
    return folder is not None and Path(folder).resolve() in path.resolve().parents


def _builder_files(data: DataConfig, kind: str, params: dict[str, Any]) -> list[Path]:
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
        files = _files_below(root, kind, data.data_path) if root.is_dir() else [root]
        if not files:
            raise DataError(root, f"holds no {kind} files", rule=f"files ending in {', '.join(_SUFFIXES[kind])}")
        return files
    patterns = [patterns] if isinstance(patterns, str) else patterns
    files = [file for pattern in patterns for file in _match(root, str(pattern), data.data_path)]
    return list(dict.fromkeys(files))


def _match(root: Path, pattern: str, data_path: str | None) -> list[Path]:
    path = root / Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    names = (Path(name) for name in glob.glob(str(path), recursive=True))
    found = sorted(name for name in names if name.is_file() and not _is_inside(name, data_path))
    if not found:
        raise DataError(path, "no file matches this pattern", fix="check source_data_dir and data_files")
    return found


def load_documents(source: Source, workspace: Path) -> Dataset:
    """All documents of `source`, in order, as a data set with the one column `source.text_key`.

    Args:
        source: from `find_source`.
        workspace: empty folder for temporary files, which the result maps into memory.

    Raises:
        DataError: names the file, and the line or row, that cannot be used.
        StorageError: the disk is full.
    """
    rows: int | None
    if source.kind == "saved":
        documents, rows = _load_saved(source), _check_rows(source, check_arrow)
    else:
        builder, files, rows, params = _checked(source, workspace)
        if rows == 0:
            raise DataError(source.named, "holds no documents")
        documents = _load(source, builder, files, workspace / "cache", params)
    is_whole = "[" not in source.split and "filters" not in source.params and rows is not None
    if is_whole and len(documents) != rows:
        raise DataError(source.named, "was not read whole", found=f"{len(documents)} rows", rule=f"{rows} rows")
    if len(documents) == 0:
        raise DataError(source.named, "holds no documents", found=f"split {source.split}")
    return documents


def _checked(source: Source, workspace: Path) -> tuple[str, list[Path], int | None, dict[str, Any]]:
    """Builder, files, number of rows and arguments for load_dataset, once every file has passed its check."""
    if source.kind == "json":
        staged = workspace / "documents.arrow"
        return "arrow", [staged], _stage_json(source, staged), {}
    if source.kind == "parquet":
        num_rows = _check_rows(source, check_parquet)
        return "parquet", list(source.files), num_rows, {**source.params, "columns": [source.text_key]}
    if source.kind == "arrow":
        return "arrow", list(source.files), _check_rows(source, check_arrow), {}
    # The default encoding drops a byte order mark, which is no part of the text.
    params = {"sample_by": "document", "encoding": "utf-8-sig", **source.params}
    encoding, errors = params["encoding"], params.get("encoding_errors") or "strict"
    with_returns = sum(check_text(file, encoding.removesuffix("-sig"), errors) for file in source.files)
    if with_returns:
        logger.info("source: carriage returns of %d files are read as newlines", with_returns)
    rows = len(source.files) if params["sample_by"] == "document" else None
    return "text", list(source.files), rows, params


def _check_rows(source: Source, check: Callable[[Path, str], int]) -> int:
    counts = Counter({file: check(file, source.text_key) for file in source.files})
    for file in (file for file, rows in counts.items() if rows == 0):
        logger.warning("%s holds no documents", file)
    return counts.total()


def _stage_json(source: Source, staged: Path) -> int:
    """Write the texts of all JSON files to one Arrow stream file; returns their number."""
    import pyarrow as pa

    options = JsonOptions(source.text_key, **source.params)
    schema = pa.schema([(source.text_key, pa.large_string())])
    rows = 0
    try:
        with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for texts in _batches(_json_texts(source, options)):
                writer.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema=schema))
                rows += len(texts)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(staged, f"cannot be written ({error})") from error
    return rows


def _json_texts(source: Source, options: JsonOptions) -> Iterator[str]:
    for file in source.files:
        rows = 0
        for text in read_json_texts(file, options):
            rows += 1
            yield text
        if rows == 0:
            logger.warning("%s holds no documents", file)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= _STAGE_CHARS or len(batch) >= _STAGE_ROWS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _load(source: Source, builder: str, files: list[Path], cache: Path, params: dict[str, Any]) -> Dataset:
    import datasets

    split = source.split.split("[")[0]
    if builder == "text":
        params = {**params, "features": datasets.Features({source.text_key: datasets.Value("large_string")})}
    try:
        documents = datasets.load_dataset(
            builder,
            data_files={split: [glob.escape(str(file.resolve())) for file in files]},
            split=source.split,
            cache_dir=str(cache),
            **params,
        )
    # datasets raises many unrelated types, several of them bare.
    except Exception as error:
        cause = _root_cause(error)
        if isinstance(cause, OSError) and cause.errno is not None:
            raise StorageError(cause.filename or cache, f"cannot be used ({cause.strerror})") from error
        raise DataError(source.named, f"cannot be loaded ({type(cause).__name__}: {cause})") from error
    return documents.select_columns([source.text_key])


def _load_saved(source: Source) -> Dataset:
    import datasets

    documents = datasets.load_from_disk(str(source.root))
    if source.text_key not in documents.column_names:
        raise DataError(
            source.root,
            f"has no column {source.text_key}",
            found=", ".join(documents.column_names),
            fix="set data.custom_text_key; a data set that is tokenized already is given as data_path without source",
        )
    return documents.select_columns([source.text_key])


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
