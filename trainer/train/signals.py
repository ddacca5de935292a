"""Stopping a run from outside: the first signal lets it finish its step and save, the second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from trainer.errors import Interrupted

__all__ = ["EXIT_CODES", "StopSignals", "interrupted"]

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}
"""Exit code of a run that a signal ended. SIGUSR1 is the warning that batch systems send before SIGTERM."""


class StopSignals:
    """Handles SIGTERM, SIGUSR1 and SIGINT inside the block.

    Before `wait_for_step` a signal raises Interrupted: there is nothing to save. After it, the first one is only
    noted. A second one ends the process without unwinding, so that nothing can hold it up.
    """

    def __init__(self) -> None:
        self._received = 0
        self._note: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _install(self) -> None:
        for number in EXIT_CODES:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def wait_for_step(self, note: Callable[[int], None]) -> None:
        """From now on the first signal's number goes to `note`, and training decides when to end.

        Lightning has put its own handler before ours by now, which would end the run unsaved: it is replaced.
        """
        self._note = note
        self._install()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._received:
            _say(f"{name}: stopped at once, unsaved")
            os._exit(EXIT_CODES[signal.Signals(number)])
        self._received = number
        if self._note is None:
            raise interrupted(number, "stopped before the first step")
        _say(f"{name}: finishing the step, then saving; again = stop at once")
        self._note(number)


def interrupted(number: int, text: str) -> Interrupted:
    """The error that ends a run because of a signal."""
    kind = signal.Signals(number)
    return Interrupted(kind.name, text, exit_code=EXIT_CODES[kind])


def _say(text: str) -> None:
    # A handler may run in the middle of a write to the same stream: Python's own are not re-entrant.
    with contextlib.suppress(OSError):
        os.write(2, f"W {text}\n".encode())
