"""What a user sees of a run and keeps of it: progress, the metrics file, and the token limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from rich.progress import BarColumn, Progress, TextColumn

from trainer.checkpoint.atomic import atomic_file, storage_errors
from trainer.checkpoint.failpoints import failpoint
from trainer.errors import StorageError
from trainer.logs import get_logger
from trainer.train.lit_module import LitRWKV7

__all__ = ["METRICS_FILE", "MetricsFile", "RunProgress", "TokenLimit", "read_metrics"]

METRICS_FILE = "metrics.jsonl"
_logger = get_logger(__name__)
_LINE_EVERY_S = 10.0


class TokenLimit(Callback):
    """Ends the run after `max_tokens` trained tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Ask Lightning to stop once the limit is reached."""
        assert isinstance(pl_module, LitRWKV7)
        if pl_module.progress["tokens"] >= self.max_tokens:
            trainer.should_stop = True

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A run that had reached the limit has no step left."""
        if checkpoint["progress"]["tokens"] >= self.max_tokens:
            trainer.should_stop = True


class MetricsFile(Callback):
    """One JSON line per optimizer step in the run's folder: the record from which curves are drawn.

    Losses also stand in hexadecimal, so that two runs can be compared bit for bit. A resumed run drops the
    lines after the step it resumes from.

    Args:
        directory: the run's folder.
        on_failure: `stop`: a line that cannot be written is an error; `warn`: it is written with a later one.
    """

    def __init__(self, directory: Path, on_failure: Literal["stop", "warn"] = "stop") -> None:
        self.path, self.on_failure = directory / METRICS_FILE, on_failure
        self._unwritten: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the lines up to the first step."""
        if not trainer.is_global_zero or not self.path.exists():
            return
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= trainer.global_step]
        with atomic_file(self.path) as temp:
            temp.write_text("".join(kept), encoding="utf-8")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Append the step."""
        assert isinstance(pl_module, LitRWKV7)
        if pl_module.skipped.last is not None:
            # Under the number of the step that it would have been: a resume from before it drops the line.
            self._append(trainer, {"step": trainer.global_step + 1, "skipped": pl_module.skipped.last})
            return
        row: dict[str, Any] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        row |= {name.removeprefix("train/"): value for name, value in pl_module.last_metrics.items()}
        row["loss_hex"] = float(row["loss"]).hex()
        row["memory_gib"] = round(_memory_gib(pl_module.device), 4)
        row["time"] = round(time.time(), 3)
        self._append(trainer, row)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Append the validation loss, unless a signal has cut the validation short."""
        assert isinstance(pl_module, LitRWKV7)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not pl_module.agreed_signal:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            row = {"step": trainer.global_step, "validation_loss": found["validation/loss"]}
            groups = {name: value for name, value in found.items() if re.match("validation/loss(_at)?/", name)}
            self._append(trainer, row | groups)

    def on_save_checkpoint(self, *_: Any) -> None:
        """A checkpoint must not outlive the lines before it, even if the power fails."""
        if self.path.exists():
            with storage_errors(self.path), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _append(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        self._unwritten.append(json.dumps(row) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
                failpoint("metrics")
                file.write("".join(self._unwritten))
        except StorageError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            if self.on_failure == "stop":
                raise
            if len(self._unwritten) == 1:
                _logger.warning("kept for later: %s", error)
        else:
            self._unwritten.clear()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; lines that a kill or a power failure has damaged are dropped."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def _memory_gib(device: torch.device) -> float:
    """Peak memory of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class RunProgress(ProgressBar):
    """One bar over the whole run: loss, tokens/s, memory, time left.

    The time left comes from the share of the run that is done and the speed of the last steps, so it is right
    after a resume too. Without a terminal a line is logged every ten seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Progress | None = None
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=20)
        self._last_line = 0.0

    def disable(self) -> None:
        """Show nothing."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar."""
        assert isinstance(pl_module, LitRWKV7)
        self._recent.clear()
        self._recent.append((time.monotonic(), self._share(trainer, pl_module), pl_module.progress["tokens"]))
        if self._enabled and trainer.is_global_zero and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("step {task.fields[step]}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                refresh_per_second=4,
            )
            self._bar.add_task("fit", total=1.0, step=trainer.global_step, text="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Show the step."""
        assert isinstance(pl_module, LitRWKV7)
        now, share = time.monotonic(), self._share(trainer, pl_module)
        self._recent.append((now, share, pl_module.progress["tokens"]))
        then, share_then, tokens_then = self._recent[0]
        elapsed = max(1e-9, now - then)
        speed = (pl_module.progress["tokens"] - tokens_then) / elapsed
        rate = (share - share_then) / elapsed
        left = _clock((1 - share) / rate) if rate > 0 else "?"
        metrics = pl_module.last_metrics
        pl_module.log("perf/tokens_per_s", speed, rank_zero_only=True)
        sources = "".join(f"loss/{name}={value:.4f} " for name, value in pl_module.train_sources.items())
        text = f"loss={metrics.get('train/loss', math.nan):.4f} {sources}tokens/s={speed:,.0f} memory={_memory_gib(pl_module.device):.2f} GiB left={left}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, step=trainer.global_step, text=text)
        elif self._enabled and (now - self._last_line > _LINE_EVERY_S or share >= 1):
            self._last_line = now
            _logger.info("step=%d %s", trainer.global_step, text)

    def _share(self, trainer: pl.Trainer, module: LitRWKV7) -> float:
        """Share of the run that is done, by the nearest limit."""
        shares = [0.0]
        if module.schedule.max_tokens > 0:
            shares.append(module.progress["tokens"] / module.schedule.max_tokens)
        if module.schedule.max_steps > 0:
            shares.append(trainer.global_step / module.schedule.max_steps)
        return min(1.0, max(shares))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error stands below it."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
