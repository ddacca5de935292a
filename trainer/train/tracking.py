"""Experiment trackers that fail must not end a run: its record is the metrics file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import Logger

from trainer.logs import get_logger

__all__ = ["TolerantLogger"]

_logger = get_logger(__name__)


class TolerantLogger(Logger):
    """Passes everything on to a logger until its first error; then says so once and drops what follows.

    Args:
        inner: such as Lightning's WandbLogger. Attributes of its own can be asked of this one.
    """

    def __init__(self, inner: Logger) -> None:
        super().__init__()
        self.inner = inner
        self.is_on = True

    def _try(self, work: Callable[[], Any], otherwise: Any = None) -> Any:
        if not self.is_on:
            return otherwise
        try:
            return work()
        except Exception as err:  # noqa: BLE001 - whatever a tracker and its network may raise
            self.is_on = False
            name = type(self.inner).__name__
            text = "%s has failed and is switched off; metrics.jsonl goes on (%s: %s)"
            _logger.warning(text, name, type(err).__name__, " ".join(str(err).split()))
            return otherwise

    @property
    def name(self) -> str | None:
        """See `Logger`."""
        return self._try(lambda: self.inner.name)

    @property
    def version(self) -> int | str | None:
        """See `Logger`."""
        return self._try(lambda: self.inner.version)

    @property
    def save_dir(self) -> str | None:
        """See `Logger`."""
        return self._try(lambda: self.inner.save_dir)

    @property
    def root_dir(self) -> str | None:
        """See `Logger`."""
        return self._try(lambda: self.inner.root_dir)

    @property
    def log_dir(self) -> str | None:
        """See `Logger`."""
        return self._try(lambda: self.inner.log_dir)

    @property
    def experiment(self) -> Any:
        """What the tracker calls a run; None if it cannot be reached."""
        return self._try(lambda: getattr(self.inner, "experiment", None))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """See `Logger`."""
        self._try(lambda: self.inner.log_metrics(metrics, step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """See `Logger`."""
        self._try(lambda: self.inner.log_hyperparams(params, *args, **kwargs))

    def save(self) -> None:
        """See `Logger`."""
        self._try(self.inner.save)

    def finalize(self, status: str) -> None:
        """See `Logger`."""
        self._try(lambda: self.inner.finalize(status))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """See `Logger`."""
        self._try(lambda: self.inner.after_save_checkpoint(checkpoint_callback))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
