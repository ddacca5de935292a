"""How far a long preparation is: a bar with the time left on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from trainer.logs import get_logger

__all__ = ["report_progress"]

_LINE_EVERY_S = 30.0

logger = get_logger(__name__)


@contextlib.contextmanager
def report_progress(what: str, total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with the bytes read and the tokens made since the last call.

    Args:
        what: what is being done, such as `tokenizing`.
        total_bytes: bytes to read; None if that is not known.
    """
    if sys.stderr.isatty():
        with _bar(what, total_bytes) as advance:
            yield advance
    else:
        yield _Lines(what, total_bytes)


@contextlib.contextmanager
def _bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]}"),
    )  # fmt: skip
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total_bytes, tokens="")

        def advance(num_bytes: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            progress.update(task, advance=num_bytes, tokens=f"{num_tokens:,} tokens")

        yield advance


class _Lines:
    """Logs how far it is, every half minute."""

    def __init__(self, what: str, total_bytes: int | None) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._started = self._said = time.monotonic()
        self._num_bytes = self._num_tokens = 0

    def __call__(self, num_bytes: int, num_tokens: int) -> None:
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        now = time.monotonic()
        if now - self._said < _LINE_EVERY_S:
            return
        self._said = now
        speed = self._num_bytes / (now - self._started)
        left = ""
        if self._total_bytes:
            minutes = max(0, self._total_bytes - self._num_bytes) / speed / 60
            left = f" of {self._total_bytes / 1e6:,.0f}, {minutes:.1f} minutes left"
        logger.info(
            "data: %s: %.0f MB%s, %.1f MB/s, %d tokens",
            self._what, self._num_bytes / 1e6, left, speed / 1e6, self._num_tokens,
        )  # fmt: skip
