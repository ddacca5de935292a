"""Losses that jump."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from trainer.data.lanes import StepBatch
from trainer.errors import NonFiniteError
from trainer.logs import get_logger
from trainer.train.callbacks import read_metrics
from trainer.train.lit_module import LitRWKV7

__all__ = ["LossSpikes", "SpikeWatch"]

_logger = get_logger(__name__)


class SpikeWatch:
    """Tells when losses stay far above what they were.

    A loss of at least twice the mean of the last 100 is a spike. Spikes do not enter that mean. Five in a row are
    taken for the new level.
    """

    FACTOR, IN_A_ROW, WINDOW, FEWEST = 2.0, 5, 100, 20

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=self.WINDOW)
        self._spikes: list[float] = []

    @property
    def mean(self) -> float:
        """Mean of the losses that a new one is compared with; 0 before there are enough of them."""
        return sum(self._window) / len(self._window) if len(self._window) >= self.FEWEST else 0.0

    def add(self, loss: float) -> int:
        """Number of spikes in a row up to this loss; 0 = it is none."""
        if not (self.mean > 0 and loss >= self.FACTOR * self.mean):
            self._window.append(loss)
            self._spikes.clear()
            return 0
        self._spikes.append(loss)
        count = len(self._spikes)
        if count == self.IN_A_ROW:
            self._window = deque(self._spikes, maxlen=self.WINDOW)
            self._spikes.clear()
        return count


class LossSpikes(Callback):
    """Says when the loss spikes, and ends the run after several in a row if asked to.

    Args:
        policy: `log` or `stop`.
        metrics: the run's metrics file, from which a resumed run knows the losses before.
    """

    def __init__(self, policy: Literal["log", "stop"], metrics: Path) -> None:
        self.policy, self.metrics = policy, metrics
        self.watch = SpikeWatch()
        self._first = "an earlier run"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the losses before this start."""
        self.watch = SpikeWatch()
        for row in read_metrics(self.metrics):
            if "loss" in row and row["step"] <= trainer.global_step:
                self.watch.add(row["loss"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: StepBatch, batch_idx: int
    ) -> None:
        """Judge the step. Its loss is the same on all ranks, so all stop or none."""
        assert isinstance(pl_module, LitRWKV7)
        if pl_module.skipped.last is not None:
            return
        loss, mean = pl_module.last_metrics["train/loss"], self.watch.mean
        count = self.watch.add(loss)
        if count == 1:
            self._first = f"epoch {batch.epoch}, batch {batch.step_in_epoch}"
            if trainer.is_global_zero:
                text = "step=%d loss=%.4f is a spike: the mean before is %.4f; %s"
                _logger.warning(text, trainer.global_step, loss, mean, self._first)
        if count < SpikeWatch.IN_A_ROW:
            return
        where = f"step {trainer.global_step}"
        problem = f"the loss has been twice its mean or more for {count} steps"
        found = f"{loss:.4f}, the mean before is {mean:.4f}; the first was in {self._first}"
        if self.policy == "stop":
            fix = (
                "resume from a checkpoint before the spike, with a lower model.lr_init or model.grad_clip, or without "
                "these data (data.skip_batches)"
            )
            raise NonFiniteError(where, problem, found=found, fix=fix)
        if trainer.is_global_zero:
            _logger.warning("%s: %s; found %s", where, problem, found)
