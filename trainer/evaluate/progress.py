"""How far an evaluation is."""

from __future__ import annotations

import sys
import time

from trainer.logs import get_logger

__all__ = ["TokenProgress"]

_logger = get_logger(__name__)
_LINE_EVERY_S = 10.0


class TokenProgress:
    """Tokens read and tokens/s: one changing line in a terminal, a line every ten seconds elsewhere.

    Args:
        total: tokens that will be read.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done, self.begin, self.said = total, 0, time.monotonic(), time.monotonic()

    def __call__(self, num_tokens: int) -> None:
        """Tell of the tokens read since the last call."""
        self.done += num_tokens
        now = time.monotonic()
        is_terminal = sys.stderr.isatty()
        if now - self.said < (0.5 if is_terminal else _LINE_EVERY_S):
            return
        self.said = now
        text = f"{self.done:,} of {self.total:,} tokens, {self.speed():,.0f} tokens/s"
        if is_terminal:
            sys.stderr.write(f"\r{text}\x1b[K")
        else:
            _logger.info("%s", text)

    def speed(self) -> float:
        """Tokens per second so far."""
        return self.done / max(1e-9, time.monotonic() - self.begin)

    def finish(self) -> None:
        """Say how much was read, and how fast."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        _logger.info("read %s tokens at %s tokens/s", f"{self.done:,}", f"{self.speed():,.0f}")
