"""One run per checkpoint folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.checkpoint.atomic import storage_error
from trainer.errors import ConfigError
from trainer.logs import get_logger

__all__ = ["LOCK_NAME", "RunLock"]

LOCK_NAME = ".lock"

logger = get_logger(__name__)

# A file system without flock answers one of these.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})


class RunLock:
    """Holds a checkpoint folder for this process, as a context manager or between acquire and release.

    The kernel's lock on the file counts, not the file: it is gone as soon as its owner is dead, so a crashed
    run never blocks the next one. Processes forked later do not inherit it.

    Args:
        directory: the run's checkpoint folder; it is made if it is missing, and a folder made here that holds
            nothing else in the end is removed with the lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._has_made_folder = False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: if another live run holds it, naming its host, process and start.
            StorageError: if the folder cannot be written.
        """
        path = self._directory / LOCK_NAME
        try:
            self._has_made_folder = not self._directory.exists()
            self._directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise storage_error(path, err) from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            owner = _owner(fd)
            os.close(fd)
            raise ConfigError(
                self._directory,
                f"another run uses this folder: {owner}",
                rule="one run per checkpoint folder",
                fix="stop that run or set another checkpoint.dir",
            ) from err
        except OSError as err:
            if err.errno not in _NO_LOCKS:
                os.close(fd)
                raise storage_error(path, err) from err
            logger.warning("%s: this file system has no locks; nothing stops a second run in this folder", path)
        previous = _owner(fd)
        if previous:
            logger.info("taking over %s from a dead run: %s", self._directory, previous)
        _write_owner(fd)
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Give the lock back; does nothing if it is not held."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            if self._has_made_folder:
                self._remove_unused()
            self._drop()

    def _remove_unused(self) -> None:
        with contextlib.suppress(OSError):
            if os.listdir(self._directory) == [LOCK_NAME]:
                (self._directory / LOCK_NAME).unlink()
                self._directory.rmdir()

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


_held: set[RunLock] = set()


def _drop_in_child() -> None:
    # A forked loader process that outlives its killed parent would otherwise keep the folder locked.
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_drop_in_child)


def _owner(fd: int) -> str:
    text = os.pread(fd, 4096, 0).decode(errors="replace")
    try:
        owner = json.loads(text)
        return f"host {owner['host']}, pid {owner['pid']}, start {owner['start']}"
    except (ValueError, KeyError, TypeError):
        return text.strip()


def _write_owner(fd: int) -> None:
    start = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": start})
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)
