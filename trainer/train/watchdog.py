"""A limit on how long nothing may happen, kept by a thread that does not depend on the one that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable

from trainer.errors import TrainerError
from trainer.logs import mask_secrets

__all__ = ["Watchdog"]

_LOOK_EVERY_S = 5.0
_GRACE_S = 30.0
_LATE_S = 1.0


class Watchdog:
    """Ends the process with an error, the stacks of all threads and an exit code when a limit is over.

    A hung collective or a dead disk cannot be interrupted from Python: the process ends without unwinding. If even
    the interpreter hangs, faulthandler shows the stacks half a minute later; it cannot tell that from a process that
    was stopped for a while, so it ends nothing.
    """

    def __init__(self) -> None:
        self._limit_s = 0.0
        self._since = 0.0
        self._error: Callable[[], TrainerError] | None = None
        self._ended = threading.Event()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, limit_s: float, error: Callable[[], TrainerError]) -> None:
        """From now on `beat` must be called at least every `limit_s` seconds; `error` says what it means if not."""
        self._since, self._limit_s, self._error = time.monotonic(), limit_s, error
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self) -> None:
        """Something has happened."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Wait for nothing until the next `watch`."""
        self._error = None

    def close(self) -> None:
        """End the thread."""
        self._error = None
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            error, left = self._error, self._since + self._limit_s - time.monotonic()
            if error is not None and left <= 0:
                _end(error())
            faulthandler.dump_traceback_later(self._limit_s + _GRACE_S, file=2)
            # Never shorter than a moment: this thread must not spin while a limit ends.
            pause = _LOOK_EVERY_S if error is None else min(_LOOK_EVERY_S, max(0.01, left))
            before = time.monotonic()
            self._changed.wait(pause)
            late = time.monotonic() - before - pause
            if late > _LATE_S:  # The whole process was stopped, as batch systems do: nobody could beat.
                self._since += late


def _end(error: TrainerError) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"error: {mask_secrets(str(error))}\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
    os._exit(error.exit_code)
