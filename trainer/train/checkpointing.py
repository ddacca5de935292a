"""When checkpoints are written and what is in them.

A checkpoint is what Lightning's `trainer.save_checkpoint` writes through `FolderCheckpointIO`, in one form for all
strategies, plus one file per rank with what that leaves out: random states and the states of stream lanes.
All of it goes into a temporary folder that appears under its name, step-N, only when it is whole.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from trainer.checkpoint.adapter import ADAPTER_INFO
from trainer.checkpoint.atomic import abandon_folder, begin_folder, commit_folder, prune, storage_error
from trainer.checkpoint.failpoints import failpoint
from trainer.checkpoint.pieces import MASTER, Piece, SavedPieces, save_pieces
from trainer.checkpoint.rng import capture_rng, restore_rng
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.verify import read_manifest
from trainer.checkpoint.write import (
    ADAPTER_FILE,
    MODEL_FILE,
    CheckpointPayload,
    rank_file,
    read_checkpoint_json,
    read_checkpoint_tensors,
    step_folder,
    write_payload_files,
)
from trainer.config import CheckpointConfig
from trainer.errors import CheckpointError, DistributedError, NonFiniteError, StorageError, TrainerError
from trainer.logs import get_logger
from trainer.train.callbacks import METRICS_FILE, read_metrics
from trainer.train.lit_module import LitRWKV7
from trainer.train.signals import StopSignals, interrupted
from trainer.types import LazyTensors

__all__ = ["Checkpointing", "FolderCheckpointIO"]

_logger = get_logger(__name__)
_LOOP_FILE = "lightning.pt"
_PREFIX = "model."


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint as a folder: tensors by parameter name as safetensors, the small rest as plain values."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write into the existing folder `path`.

        Args:
            checkpoint: what Lightning saves.
            path: the folder.
            storage_options: a list that gets a failure. Other ranks wait in Lightning's barrier: this one has to
                get there too before it may fail.
        """
        try:
            self._write(checkpoint, Path(path))
        except (OSError, TrainerError) as err:
            if storage_options is None:
                raise
            storage_options.append(err)

    def _write(self, checkpoint: dict[str, Any], folder: Path) -> None:
        rest = dict(checkpoint)
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in rest.pop("state_dict").items()}
        optimizers = rest.pop("optimizer_states", [])
        pieces: list[Piece] = []
        rank = 0
        if optimizers:
            rest["updates"], pieces = optimizers[0]["updates"], optimizers[0]["pieces"]
            rank = optimizers[0].get("rank", 0)
        kept = {f"{kind} of {piece.name}": x for piece in pieces for kind, x in piece.tensors.items()}
        _require_finite(checkpoint["global_step"], weights | kept)
        if weights and rank == 0:
            save_safetensors(folder / (ADAPTER_FILE if "adapter" in rest else MODEL_FILE), weights)
        if "adapter" in rest and rank == 0:
            (folder / ADAPTER_INFO).write_text(json.dumps(rest["adapter"], indent=2) + "\n", encoding="utf-8")
        save_pieces(folder, rank, pieces)
        failpoint("half")
        if rank > 0:
            return
        # torch.save to a path hides a full disk behind an error of its own.
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        (folder / _LOOP_FILE).write_bytes(buffer.getbuffer())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder written by `save_checkpoint`, under whatever strategy; weights are the rounded masters.

        Raises:
            CheckpointError: if it is not of this form.
        """
        folder = Path(path)
        if not (folder / _LOOP_FILE).is_file():
            problem, fix = "was written by DeepSpeed itself", "start from its weights: model.load_model"
            raise CheckpointError(folder, problem, fix=fix)
        checkpoint: dict[str, Any] = torch.load(folder / _LOOP_FILE, map_location="cpu", weights_only=True)
        saved = SavedPieces(folder)
        checkpoint["state_dict"] = LazyTensors(
            (_PREFIX + name for name in saved.shapes), lambda name: saved.whole(MASTER, name.removeprefix(_PREFIX))
        )
        if "adapter" in checkpoint:
            tensors = load_safetensors(folder / ADAPTER_FILE)
            checkpoint["state_dict"] = {_PREFIX + name: tensor for name, tensor in tensors.items()}
        if "updates" in checkpoint:
            checkpoint["optimizer_states"] = [{"updates": checkpoint.pop("updates"), "saved": saved}]
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Pruning is ours, see `Checkpointing`."""


def _require_finite(step: int, tensors: Mapping[str, Tensor]) -> None:
    bad = [n for n, x in tensors.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]
    if bad:
        raise NonFiniteError(
            f"step {step}", "weights or moments are not finite, so it is not saved",
            found=f"{len(bad)} tensors, first {bad[0]}", fix="lower model.lr_init and resume from the last checkpoint",
        )  # fmt: skip


class Checkpointing(Checkpoint):
    """Saves step-N folders, keeps the newest, restores what Lightning does not, and ends a run on a signal.

    A checkpoint that is due at a step after which Lightning validates is written after the validation:
    Lightning would not repeat one that was cut short. As a `Checkpoint` it comes after all other callbacks.

    Args:
        config: when and how many.
        directory: the run's folder.
        config_digest: digest of settings that must not change at resume.
        settings: all settings without secrets, stored in the manifest.
        resumed_from: folder that the run continues from.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        config_digest: str,
        settings: dict[str, object],
        resumed_from: Path | None = None,
    ) -> None:
        self.config, self.directory, self.resumed_from = config, directory, resumed_from
        self.config_digest, self.settings = config_digest, settings
        self.signals = StopSignals()
        """To be entered around the run."""
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._is_due = False
        self._failed_saves = 0
        self._best: tuple[float, Path] | None = None

    # ---- restoring

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lane and random states of this rank, after Lightning has restored the rest."""
        assert isinstance(pl_module, LitRWKV7)
        module = pl_module
        self.signals.wait_for_step(lambda number: setattr(module, "stop_signal", number))
        self._saved_at = time.monotonic()
        if trainer.strategy.broadcast(str(self.resumed_from)) != str(self.resumed_from):
            raise DistributedError("resume", "the ranks chose different checkpoints", found=str(self.resumed_from))
        if self.resumed_from is None:
            return
        self._restore(trainer, pl_module, self.resumed_from)
        if self.resumed_from.resolve().parent == self.directory.resolve():
            self._saved_step = trainer.global_step
            self._best = self._find_best()
        _logger.info("resumed from %s at step %d", self.resumed_from, trainer.global_step)

    def _restore(self, trainer: pl.Trainer, module: LitRWKV7, folder: Path) -> None:
        manifest, rank = read_manifest(folder), trainer.global_rank
        lanes: dict[str, Tensor] = {}
        for number in range(manifest.world_size):
            tensors = read_checkpoint_tensors(folder, rank_file(number))
            lanes |= {name: tensor for name, tensor in tensors.items() if name.startswith("lane.")}
            if number == rank:
                restore_rng(tensors, read_checkpoint_json(folder, rank_file(number, ".json")))
        module.lanes.restore(lanes, module.device)
        threads = manifest.extra.get("threads", torch.get_num_threads())
        if module.device.type == "cpu" and threads != torch.get_num_threads():
            text = "saved with %s CPU threads, resumed with %d: losses may differ in their last bits"
            _logger.warning(text, threads, torch.get_num_threads())

    def _find_best(self) -> tuple[float, Path] | None:
        """The lowest validation loss so far whose checkpoint is still there."""
        losses = [
            (row["validation_loss"], step_folder(self.directory, row["step"]))
            for row in read_metrics(self.directory / METRICS_FILE)
            if row.get("validation_loss", math.inf) < math.inf
        ]
        return min((pair for pair in losses if pair[1].is_dir()), default=None)

    # ---- saving

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Where tests end a run between gradient and update."""
        failpoint("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save when it is time; on a signal save and leave."""
        assert isinstance(pl_module, LitRWKV7)
        failpoint("step")
        step = trainer.global_step
        by_steps = self.config.every_steps > 0 and step > 0 and step % self.config.every_steps == 0
        # Later, in on_train_end, Lightning has counted the epoch as done, even if it has steps left.
        is_last = trainer.should_stop or 0 < trainer.max_steps <= step
        self._is_due = self._is_due or by_steps or is_last or self._is_minute_due(trainer)
        self._save_or_leave(trainer, pl_module, is_due=self._is_due and not _validation_follows(trainer))

    def _is_minute_due(self, trainer: pl.Trainer) -> bool:
        if self.config.every_minutes <= 0:
            return False
        due = time.monotonic() - self._saved_at >= 60 * self.config.every_minutes
        return bool(trainer.strategy.broadcast(due))

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Let all ranks know of a signal; the rest of the validation is passed over."""
        assert isinstance(pl_module, LitRWKV7)
        if trainer.state.fn == "fit":
            ranks = pl_module.gather_numbers([float(pl_module.stop_signal)])
            pl_module.agreed_signal = int(max(number for (number,) in ranks))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what was put off, and the checkpoint with the lowest validation loss if asked to."""
        assert isinstance(pl_module, LitRWKV7)
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self.config.best and not pl_module.agreed_signal:
            loss = float(trainer.callback_metrics["validation/loss"])
            if loss < (self._best[0] if self._best else math.inf):
                self._best, self._is_due = (loss, step_folder(self.directory, trainer.global_step)), True
        self._save_or_leave(trainer, pl_module, is_due=self._is_due)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last step is always saved, whatever has ended the run."""
        assert isinstance(pl_module, LitRWKV7)
        if trainer.global_step > 0:
            self.save(trainer, pl_module)
        _logger.info("finished at step %d: %d tokens trained", trainer.global_step, pl_module.progress["tokens"])

    def _save_or_leave(self, trainer: pl.Trainer, module: LitRWKV7, *, is_due: bool) -> None:
        if is_due:
            self._save_or_warn(trainer, module)
        if trainer.world_size == 1:
            module.agreed_signal = module.stop_signal
        if module.agreed_signal:
            self.save(trainer, module)
            raise interrupted(module.agreed_signal, f"saved step {trainer.global_step} and stopped")

    def _save_or_warn(self, trainer: pl.Trainer, module: LitRWKV7) -> None:
        """Save; a failed write, which all ranks see, is only said if the settings want that."""
        try:
            self.save(trainer, module)
        except StorageError as error:
            if self.config.on_failure == "stop":
                raise
            self._failed_saves += 1
            self._saved_at = time.monotonic()
            _logger.warning("not saved (%d so far): %s", self._failed_saves, error)

    def save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Write the checkpoint of the current step, unless it is there already. All ranks call this.

        Raises:
            StorageError: it cannot be written; on every rank, if on any.
            NonFiniteError: weights or moments are not finite.
        """
        assert isinstance(module, LitRWKV7)
        step, self._is_due = trainer.global_step, False
        if step == self._saved_step:
            return
        target, started = step_folder(self.directory, step), time.monotonic()
        temp = Path(_on_rank_zero(trainer, lambda: str(begin_folder(target))))
        try:
            self._write(trainer, module, temp, target)
        except BaseException:
            abandon_folder(temp)
            raise
        _on_rank_zero(trainer, lambda: self._commit(temp, target, self._facts(trainer, step)))
        self._saved_step, self._saved_at = step, time.monotonic()
        _logger.info("saved %s (%.1f s)", target, self._saved_at - started)

    def _write(self, trainer: pl.Trainer, module: LitRWKV7, folder: Path, target: Path) -> None:
        """All files, into `folder`; errors name `target`."""
        tensors, numbers = capture_rng()
        tensors |= module.lanes.tensors()
        rank = trainer.global_rank
        payload = CheckpointPayload(tensors={rank_file(rank): tensors}, documents={rank_file(rank, ".json"): numbers})
        failures: list[Exception] = []
        try:
            write_payload_files(folder, payload)
        except OSError as err:
            failures.append(err)
        _raise_together(trainer, failures, target)
        trainer.save_checkpoint(folder, storage_options=failures)
        _raise_together(trainer, failures, target)

    def _facts(self, trainer: pl.Trainer, step: int) -> dict[str, object]:
        extra = {
            "settings": self.settings,
            "threads": torch.get_num_threads(),
        }
        return CheckpointPayload(world_size=trainer.world_size, config_digest=self.config_digest, extra=extra).facts(
            step
        )

    def _commit(self, temp: Path, target: Path, facts: dict[str, object]) -> None:
        commit_folder(temp, target, facts)
        prune(self.directory, self.config.keep, protect=[self._best[1]] if self._best else [])


def _validation_follows(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates after this step. It has no public name for that."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(None))  # type: ignore[arg-type]


def _on_rank_zero(trainer: pl.Trainer, work: Callable[[], Any]) -> Any:
    """What `work` returns on rank 0, or its error, on every rank."""
    outcome: Any = None
    if trainer.is_global_zero:
        try:
            outcome = work()
        except TrainerError as err:
            outcome = err
    outcome = trainer.strategy.broadcast(outcome)
    if isinstance(outcome, TrainerError):
        raise outcome
    return outcome


def _raise_together(trainer: pl.Trainer, failures: list[Exception], target: Path) -> None:
    """Raise on every rank what went wrong on any: one that went on alone would wait for the others for ever."""
    found = [storage_error(target, err) if isinstance(err, OSError) else err for err in failures]
    if trainer.world_size > 1:
        ranks: list[list[Exception]] = [[] for _ in range(trainer.world_size)]
        dist.all_gather_object(ranks, found)
        found = [failure for rank in ranks for failure in rank]
    if found:
        raise found[0]
