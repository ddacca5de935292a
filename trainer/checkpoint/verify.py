"""Manifests: reading them, and checking a checkpoint folder against its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer.checkpoint.atomic import FORMAT_VERSION, MANIFEST_NAME, SEAL, STEP_FOLDER, file_sha256, manifest_digest
from trainer.errors import CheckpointError

__all__ = ["FileRecord", "Manifest", "read_manifest", "verify_file", "verify_folder"]

_HASH_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Seal of a checkpoint folder, written after everything else was on the disk."""

    step: int
    """Optimizer steps done."""
    world_size: int
    """Processes of the run that wrote it."""
    config_digest: str
    """Digest of the run's settings."""
    files: Mapping[str, FileRecord]
    """Path relative to the folder -> record."""
    extra: Mapping[str, object]
    """Anything else that the writer noted."""


def _parse(content: object) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT_VERSION:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"format {found!r} instead of {FORMAT_VERSION}")
    facts = dict(content)
    if facts.pop(SEAL, None) != manifest_digest(content):
        raise ValueError("its own checksum differs")
    facts.pop("format")
    files = {
        name: FileRecord(int(record["bytes"]), str(record["sha256"])) for name, record in facts.pop("files").items()
    }
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"file {name!r} outside of the folder")
    step, world_size = int(facts.pop("step")), int(facts.pop("world_size", 1))
    return Manifest(step, world_size, str(facts.pop("config_digest", "")), files, facts)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; files are not looked at.

    Raises:
        CheckpointError: if it is missing, malformed, or belongs to another step than the folder's name says.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as err:
        if folder.is_dir():
            raise CheckpointError(folder, f"no {MANIFEST_NAME}: not a finished checkpoint of this trainer") from err
        raise CheckpointError(folder, "no such checkpoint folder") from err
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(folder, f"unreadable {MANIFEST_NAME} ({type(err).__name__}: {err})") from err
    name = STEP_FOLDER.fullmatch(folder.resolve().name)
    if name and int(name[1]) != manifest.step:
        raise CheckpointError(folder, f"{MANIFEST_NAME} is that of step {manifest.step}")
    return manifest


def _check_size(folder: Path, name: str, manifest: Manifest) -> Path:
    record = manifest.files.get(name)
    if record is None:
        raise CheckpointError(folder, f"{name} is not part of this checkpoint")
    path = folder / name
    try:
        size = path.stat().st_size
    except OSError as err:
        raise CheckpointError(path, f"missing from the checkpoint ({err.strerror})") from err
    if size != record.size_bytes:
        raise CheckpointError(path, f"truncated or altered: {size} bytes instead of {record.size_bytes}")
    return path


def verify_file(folder: Path, name: str, manifest: Manifest) -> Path:
    """Path of a file whose size and SHA-256 are those of the manifest.

    Raises:
        CheckpointError: if the manifest does not list it, or it is missing, cut or altered.
    """
    path = _check_size(folder, name, manifest)
    try:
        digest = file_sha256(path)
    except OSError as err:
        raise CheckpointError(path, f"cannot be read: {err.strerror}") from err
    if digest != manifest.files[name].sha256:
        raise CheckpointError(path, "checksum differs from the manifest's: the file is damaged")
    return path


def verify_folder(folder: Path) -> Manifest:
    """Manifest of a checkpoint whose every file has the size and SHA-256 that it lists.

    Raises:
        CheckpointError: naming the first file that is missing, cut or altered.
    """
    manifest = read_manifest(folder)
    # Sizes first: a truncated file is seen before gigabytes are hashed.
    for name in manifest.files:
        _check_size(folder, name, manifest)
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        list(pool.map(lambda name: verify_file(folder, name, manifest), manifest.files))
    return manifest
