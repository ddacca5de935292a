"""What a prepared data set was made from and what is in it: manifest.json, written last.

A folder with a valid manifest is whole. The recipe says from which files and settings it was made, so that a
changed file, setting, tokenizer or program version leads to a rebuild with a reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.remote_files import RemoteFile, SourcePath
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.data.sources import Source

__all__ = [
    "MANIFEST_NAME",
    "Manifest",
    "SourceFile",
    "describe_change",
    "fingerprint_source",
    "list_files",
    "list_source",
    "read_manifest",
    "sync_folder",
    "verify_files",
    "write_manifest",
]

MANIFEST_NAME = "manifest.json"
FORMAT = 1
# Larger source files are told apart by size and time stamp: hashing them would take minutes at every start.
_HASH_SOURCE_BYTES = 1 << 26
_HASH_PREPARED_BYTES = 1 << 30
_FIX = "run preload_datapath.py again"


@dataclass(frozen=True)
class SourceFile:
    """A source file as it was when it was read."""

    name: str
    """Path relative to the source's folder."""
    size: int
    mtime_ns: int
    sha256: str | None
    """None for files of 64 MiB and more."""
    tag: str | None = None
    """Of a remote file: its ETag, or what else its storage has instead of a time stamp."""

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay equal for the prepared data to stay valid."""
        content: dict[str, Any] = {"sha256": self.sha256} if self.sha256 else {"mtime_ns": self.mtime_ns}
        if self.tag is not None:
            content = {"tag": self.tag}
        return {"name": self.name, "size": self.size, **content}

    def moved(self, old: str, new: str) -> SourceFile:
        """The same file under a name that begins with `new` instead of `old`."""
        return dataclasses.replace(self, name=new + self.name.removeprefix(old))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of manifest.json."""

    recipe: dict[str, Any]
    """Everything that decides the content: settings, tokenizer, source files, program versions."""
    source_files: list[SourceFile]
    counts: dict[str, int]
    """documents, tokens, train_documents, train_tokens, train_trained_tokens, and the same of validation."""
    dropped: dict[str, int]
    """Documents left out, by reason."""
    dtype: str
    """Integer type of the ids on disk."""
    max_token_id: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bytes and sha256 of every other file in the folder."""
    record_formats: list[str] = field(default_factory=list)
    """What each source's records were taken for."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Of each source, by source_id: name, epochs, documents, tokens, trained_tokens."""
    format: int = FORMAT


def list_source(source: Source) -> list[SourceFile]:
    """Name, size and time stamp or tag of each file of a source; contents are not read.

    Raises:
        DataError: a file cannot be read.
    """
    return [_status(path, source) for path in source.files]


def _status(path: SourcePath, source: Source) -> SourceFile:
    if isinstance(path, RemoteFile):
        # The URL holds the commit, and asking for each of thousands of files takes minutes.
        if source.hub_name is not None:
            return SourceFile(str(path), 0, 0, None, path.url)
        remote = path.stat()
        return SourceFile(str(path), remote.st_size, 0, None, remote.tag)
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})") from error
    return SourceFile(os.path.relpath(path, source.root), status.st_size, status.st_mtime_ns, None)


def fingerprint_source(source: Source, known: Iterable[SourceFile] = ()) -> list[SourceFile]:
    """Identity of each file of a source.

    Args:
        source: from `find_source`.
        known: earlier results; a file of equal name, size and time stamp is not hashed again.

    Raises:
        DataError: a file cannot be read.
    """
    seen = {file.name: file for file in known}
    result: list[SourceFile] = []
    for path in source.files:
        now = _status(path, source)
        old = seen.get(now.name)
        if isinstance(path, RemoteFile) or (old is not None and (old.size, old.mtime_ns) == (now.size, now.mtime_ns)):
            result.append(now if old is None else dataclasses.replace(now, sha256=old.sha256))
            continue
        try:
            sha256 = file_sha256(path) if now.size < _HASH_SOURCE_BYTES else None
        except OSError as error:
            raise DataError(path, f"cannot be read ({error.strerror})") from error
        result.append(dataclasses.replace(now, sha256=sha256))
    return result


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes and sha256 of every file below `folder` except the manifest; each file is flushed to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in files
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json to a folder that is complete otherwise, and flush both to disk."""
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as stream:
        json.dump(dataclasses.asdict(manifest), stream, indent=1, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a prepared folder, or None if it has none.

    Raises:
        DataError: the file is damaged or of a newer program version.
    """
    path = folder / MANIFEST_NAME
    try:
        values = json.loads(path.read_text("utf-8"))
        if values["format"] != FORMAT:
            raise DataError(path, "has another format", found=values["format"], rule=str(FORMAT), fix=_FIX)
        values["source_files"] = [SourceFile(**entry) for entry in values["source_files"]]
        return Manifest(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(path, f"is damaged ({error})", fix=_FIX) from error


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare a prepared folder with its manifest: sizes, and checksums if all files together are below 1 GiB.

    Raises:
        DataError: names the first file that is missing or differs.
    """
    total = sum(entry["bytes"] for entry in manifest.files.values())
    for name, entry in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise DataError(path, "is missing from the prepared data set", fix=_FIX)
        if found != entry["bytes"]:
            raise DataError(
                path, "changed since it was prepared", found=f"{found} bytes", rule=f"{entry['bytes']} bytes", fix=_FIX
            )
    for name, entry in manifest.files.items() if total < _HASH_PREPARED_BYTES else ():
        if file_sha256(folder / name) != entry["sha256"]:
            raise DataError(folder / name, "changed since it was prepared: its checksum differs", fix=_FIX)


def describe_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """The first difference between two recipes in words, or None if they are equal."""
    for key in [*new, *(key for key in old if key not in new)]:
        if old.get(key) == new.get(key):
            continue
        if key == "tokenizer" and old.get("tokenizer_digest") == new.get("tokenizer_digest"):
            continue
        if key.endswith("source_files"):
            return _describe_files(old.get(key) or [], new.get(key) or [])
        before, after = (_short(recipe.get(key)) for recipe in (old, new))
        return f"{key} changed from {before} to {after}"
    return None


def _describe_files(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    before, after = ({entry["name"]: entry for entry in entries} for entries in (old, new))
    for name in after:
        if name not in before:
            return f"source file {name} is new"
        if before[name] != after[name]:
            return f"source file {name} changed"
    gone = [name for name in before if name not in after]
    return f"source file {gone[0]} is gone" if gone else "the order of source files changed"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
