"""Durable all-or-nothing writing of checkpoint folders and single files.

A folder is built beside its target under a hidden name, forced to the disk, sealed by a manifest, and renamed.
A kill, a full disk or a power cut at any moment leaves either the whole new folder or the old state.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.checkpoint.failpoints import failpoint
from trainer.errors import StorageError, TrainerError
from trainer.logs import get_logger

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "SEAL",
    "STEP_FOLDER",
    "abandon_folder",
    "atomic_file",
    "atomic_folder",
    "begin_folder",
    "commit_folder",
    "file_sha256",
    "manifest_digest",
    "prepare_directory",
    "prune",
    "require_space",
    "step_folders",
    "set_aside_newer",
    "storage_error",
    "storage_errors",
    "sweep",
]

MANIFEST_NAME = "MANIFEST.json"
FORMAT_VERSION = 1
SEAL = "manifest_sha256"
"""Entry of a manifest with the digest of all others."""
STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)")
"""Full match of a checkpoint folder's name; the group is the step."""

logger = get_logger(__name__)

_LEFTOVER = re.compile(r"\.(step-\d+)\.(tmp|old|doomed)-\d+")
_HASH_THREADS = 8
_STORAGE_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.EIO,
        errno.ESTALE,
        errno.EINVAL,
        errno.ENODEV,
    }
)
# torch's zip writer and the safetensors library report a failed write as these texts.
_LIBRARY_WRITE_ERROR = re.compile(r"PytorchStreamWriter|unexpected pos|os error (28|30|122|5|27)\b|file write failed")


def _free_bytes(path: Path) -> int | None:
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def storage_error(path: Path, err: BaseException, needed_bytes: int | None = None) -> StorageError:
    """The StorageError that tells a user about a failed write.

    Args:
        path: what was being written.
        err: the OSError (or a library's error about a failed write).
        needed_bytes: size of what was being written, if known.
    """
    reason = err.strerror or str(err) if isinstance(err, OSError) else "the disk took only part of the data"
    free = _free_bytes(path)
    needed = "unknown" if needed_bytes is None else f"{needed_bytes} bytes"
    return StorageError(
        path,
        f"cannot write: {reason} (free {'unknown' if free is None else f'{free} bytes'}, needed {needed})",
        fix="make room or choose another folder; older checkpoints are untouched",
    )


def _write_failure(err: BaseException) -> BaseException | None:
    """The failed write behind an exception, if there is one that is not explained yet."""
    if isinstance(err, TrainerError):
        return None
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRNOS:
            return cause
        cause = cause.__cause__
    return err if _LIBRARY_WRITE_ERROR.search(str(err)) else None


@contextmanager
def storage_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a failed write inside the block into the StorageError of `storage_error`."""
    try:
        yield
    except Exception as err:
        failure = _write_failure(err)
        if failure is None:
            raise
        raise storage_error(path, failure, needed_bytes) from err


def require_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to start writing `needed_bytes` where they do not fit.

    Raises:
        StorageError: naming the folder, the free and the needed bytes.
    """
    free = _free_bytes(directory)
    if free is not None and free < needed_bytes:
        raise storage_error(directory, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed_bytes)


def prepare_directory(directory: Path, needed_bytes: int = 0) -> None:
    """Make a run's checkpoint folder, and show that it can be written, before any work depends on it.

    Raises:
        StorageError: if it is read-only, cannot be made, or has too little room.
    """
    probe = directory / f".probe-{os.getpid()}"
    with storage_errors(directory, needed_bytes):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
    require_space(directory, needed_bytes)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as err:
        # Some network file systems cannot sync a folder; their renames are synchronous.
        if err.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def manifest_digest(manifest: Mapping[str, object]) -> str:
    """SHA-256 over all entries of a manifest but the seal itself."""
    entries = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _write_manifest(folder: Path, files: Collection[Path], facts: Mapping[str, object]) -> None:
    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        digests = list(pool.map(file_sha256, files))
    records = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }
    # Through JSON once, so that the digest is that of what a reader sees.
    manifest = json.loads(json.dumps({"format": FORMAT_VERSION, **facts, "files": records}))
    manifest[SEAL] = manifest_digest(manifest)
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _fsync(path)


def begin_folder(target: Path) -> Path:
    """Make the hidden folder in which the content of `target` is built; follow with commit_folder or abandon_folder.

    In a run of several processes one of them calls this, and all write their files into the result.

    Raises:
        StorageError: if the parent vanished or cannot be written.
    """
    temp = target.parent / f".{target.name}.tmp-{os.getpid()}"
    with storage_errors(target):
        # A folder of the same name can only be left over from a dead process with the same id.
        if temp.exists():
            shutil.rmtree(temp)
        temp.mkdir()
        failpoint("mkdir")
    return temp


def abandon_folder(temp: Path) -> None:
    """Remove a folder of begin_folder that will not be committed."""
    shutil.rmtree(temp, ignore_errors=True)


def commit_folder(
    temp: Path, target: Path, facts: Mapping[str, object] | None, needed_bytes: int | None = None
) -> None:
    """Force the files in `temp` to the disk, seal them with a manifest, and let them appear as `target`.

    Args:
        temp: folder of begin_folder; all processes have closed their files.
        target: final name. If it exists it is replaced, and restored by `sweep` after a kill in between.
        facts: further entries of the manifest, such as step, world_size and config_digest; None = no manifest.
        needed_bytes: size of the content, for error messages.

    Raises:
        StorageError: if anything cannot be written; `temp` is removed, `target` is as before.
    """
    try:
        with storage_errors(target, needed_bytes):
            failpoint("written")
            files = sorted(path for path in temp.rglob("*") if path.is_file())
            for path in files:
                _fsync(path)
            failpoint("fsynced")
            if facts is not None:
                _write_manifest(temp, files, facts)
            for path in (*(path for path in temp.rglob("*") if path.is_dir()), temp):
                _fsync(path)
            failpoint("manifest")
            _replace_folder(temp, target)
            failpoint("renamed")
    except BaseException:
        abandon_folder(temp)
        raise


def _replace_folder(temp: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
        failpoint("replacing")
    try:
        temp.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _fsync(target.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_folder(target: Path, facts: Mapping[str, object] | None, needed_bytes: int | None = None) -> Iterator[Path]:
    """Yield a hidden folder to fill; when the block ends well it becomes `target`, else nothing remains of it.

    Args:
        target: final name, such as `<dir>/step-100`; its parent must exist.
        facts: entries of the manifest besides the files: step, world_size, config_digest, ...; None = no manifest.
        needed_bytes: size of the content, for error messages.

    Raises:
        StorageError: if anything cannot be written.
    """
    temp = begin_folder(target)
    try:
        with storage_errors(target, needed_bytes):
            yield temp
    except BaseException:
        abandon_folder(temp)
        raise
    commit_folder(temp, target, facts, needed_bytes)


@contextmanager
def atomic_file(path: Path, needed_bytes: int | None = None) -> Iterator[Path]:
    """Yield a hidden file name to write; when the block ends well it becomes `path`, else nothing remains of it.

    Folders that are missing on the way to `path` are made. A symbolic link is followed.

    Raises:
        StorageError: if it cannot be written, or `path` exists and is no regular file.
    """
    target = Path(os.path.realpath(path))
    temp = target.parent / f".{target.name}.tmp-{os.getpid()}"
    if target.exists() and not target.is_file():
        raise StorageError(path, "exists and is not a regular file", fix="choose another output file")
    try:
        with storage_errors(path, needed_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temp
            failpoint("written")
            _fsync(temp)
            failpoint("fsynced")
            temp.replace(target)
            _fsync(target.parent)
    finally:
        # Where the folder is a file or gone, the error above says so; a second one here would hide it.
        with suppress(OSError):
            temp.unlink()


def step_folders(directory: Path) -> list[Path]:
    """Folders named step-N inside `directory`, in the order of their numbers; nothing is verified."""
    found = ((STEP_FOLDER.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def prune(directory: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Remove all but the newest checkpoints. Call it after the newest is safe.

    A folder first gets a hidden name and is then deleted, so that a kill never leaves a half-deleted step-N.
    Folders without a manifest are not ours and stay.

    Args:
        directory: the run's checkpoint folder.
        keep: how many of the newest stay; 0 = all.
        protect: folders that stay in any case, such as the best one.

    Returns:
        The removed folders.
    """
    if keep < 1:
        return []
    ours = [path for path in step_folders(directory) if (path / MANIFEST_NAME).is_file()]
    kept_names = {path.name for path in protect}
    removed = [path for path in ours[:-keep] if path.name not in kept_names]
    for path in removed:
        doomed = directory / f".{path.name}.doomed-{os.getpid()}"
        try:
            path.rename(doomed)
            failpoint("pruning")
            shutil.rmtree(doomed)
        except OSError as err:
            logger.warning("could not remove the old checkpoint %s: %s", path, err)
    return removed


def set_aside_newer(directory: Path, step: int) -> Path | None:
    """Move checkpoints after `step` into a subfolder. Call it at the start of a run, holding the run's lock.

    They are of an earlier run, or damaged. Left in place they would count as the newest: for the next resume,
    and for `prune`, which would remove what the new run saves.

    Args:
        directory: the run's checkpoint folder.
        step: that the run starts from; below 0 = a new run, whose folder starts empty of every checkpoint.

    Returns:
        The subfolder; None if there was nothing to move.

    Raises:
        StorageError: if they cannot be moved.
    """
    newer = [path for path in step_folders(directory) if int(path.name.removeprefix("step-")) > step]
    if not newer:
        return None
    with storage_errors(directory):
        names = (f"set-aside-{number}" for number in itertools.count(1))
        aside = next(directory / name for name in names if not (directory / name).exists())
        aside.mkdir()
        # The newest first: after a kill in between, what is left is still in order.
        for path in reversed(newer):
            path.rename(aside / path.name)
            failpoint("set_aside")
    logger.info("moved %s to %s", ", ".join(path.name for path in newer), aside)
    return aside


def sweep(directory: Path) -> None:
    """Clear what a killed process left behind. Call it at the start of a run, holding the run's lock.

    Half-written and half-deleted folders go; a checkpoint that was about to be replaced comes back.
    """
    for path in sorted(directory.glob(".step-*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        target = directory / match[1]
        if match[2] == "old" and not target.exists():
            path.rename(target)
            logger.info("restored %s, which a killed process was replacing", target)
        else:
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed the leftover %s", path)
