"""When checkpoints are written and what is in them.

A checkpoint is what Lightning's `trainer.save_checkpoint` writes, through `FolderCheckpointIO` or DeepSpeed's own
folder format, plus one file per rank with what those leave out: random states and the states of stream lanes.
All of it goes into a temporary folder that appears under its name, step-N, only when it is whole.
"""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainer.checkpoint.atomic import abandon_folder, begin_folder, commit_folder, prune, storage_error
from trainer.checkpoint.failpoints import failpoint
from trainer.checkpoint.rng import capture_rng, restore_rng
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.write import (
    MODEL_FILE,
    CheckpointPayload,
    rank_file,
    read_checkpoint_json,
    read_checkpoint_tensors,
    step_folder,
    write_payload_files,
)
from trainer.config import CheckpointConfig
from trainer.errors import Interrupted
from trainer.logs import get_logger
from trainer.train.lit_module import LitRWKV7
from trainer.train.strategy import is_deepspeed

__all__ = ["Checkpointing", "FolderCheckpointIO"]

_logger = get_logger(__name__)
_OPTIMIZER_FILE = "optimizer.safetensors"
_LOOP_FILE = "lightning.pt"
_PREFIX = "model."


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint as a folder: weights and optimizer as safetensors, the small rest as plain values."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write into the existing folder `path`."""
        folder, rest = Path(path), dict(checkpoint)
        weights = rest.pop("state_dict")
        save_safetensors(folder / MODEL_FILE, {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()})
        optimizers = rest.pop("optimizer_states", [])
        if optimizers:
            tensors, rest["optimizer"] = _flatten_optimizer(optimizers[0])
            save_safetensors(folder / _OPTIMIZER_FILE, tensors)
        failpoint("half")
        # torch.save to a path hides a full disk behind an error of its own.
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        (folder / _LOOP_FILE).write_bytes(buffer.getbuffer())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder written by `save_checkpoint`."""
        folder = Path(path)
        checkpoint: dict[str, Any] = torch.load(folder / _LOOP_FILE, map_location="cpu", weights_only=True)
        weights = load_safetensors(folder / MODEL_FILE)
        checkpoint["state_dict"] = {_PREFIX + name: tensor for name, tensor in weights.items()}
        if "optimizer" in checkpoint:
            tensors = load_safetensors(folder / _OPTIMIZER_FILE)
            checkpoint["optimizer_states"] = [_unflatten_optimizer(tensors, checkpoint.pop("optimizer"))]
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Pruning is ours, see `Checkpointing`."""


def _flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {
        f"state.{index}.{name}": value for index, entry in state["state"].items() for name, value in entry.items()
    }
    tensors |= {f"masters.{name}": value for name, value in state.get("masters", {}).items()}
    return tensors, {"param_groups": state["param_groups"]}


def _unflatten_optimizer(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"state": {}, "masters": {}, **rest}
    for name, tensor in tensors.items():
        kind, key = name.split(".", 1)
        if kind == "masters":
            state["masters"][key] = tensor
        else:
            index, field = key.split(".")
            state["state"].setdefault(int(index), {})[field] = tensor
    return state


class Checkpointing(Callback):
    """Saves step-N folders, keeps the newest, restores what Lightning does not, and ends a run on a signal.

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
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._best: tuple[float, Path] | None = None
        self._old_handlers: dict[int, Any] = {}

    # ---- restoring

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lane and random states of this rank, after Lightning has restored the rest."""
        assert isinstance(pl_module, LitRWKV7)
        self._install_handlers(pl_module)
        self._saved_at = time.monotonic()
        if self.resumed_from is None:
            return
        self._saved_step = trainer.global_step
        tensors = read_checkpoint_tensors(self.resumed_from, rank_file(trainer.global_rank))
        numbers = read_checkpoint_json(self.resumed_from, rank_file(trainer.global_rank, ".json"))
        lanes = {name: tensor for name, tensor in tensors.items() if name.startswith("lane.")}
        pl_module.lanes.restore(lanes, pl_module.run.trainer.microbatch_size, pl_module.device)
        restore_rng({n: t for n, t in tensors.items() if n not in lanes}, numbers)
        _logger.info("resumed from %s at step %d", self.resumed_from, trainer.global_step)

    # ---- saving

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save when it is time; on a signal save and leave."""
        assert isinstance(pl_module, LitRWKV7)
        failpoint("step")
        step = trainer.global_step
        by_steps = self.config.every_steps > 0 and step % self.config.every_steps == 0
        if by_steps or self._is_minute_due(trainer) or pl_module.agreed_signal:
            self.save(trainer, pl_module)
        if pl_module.agreed_signal:
            name = signal.Signals(pl_module.agreed_signal).name
            raise Interrupted(name, f"saved step {step} and stopped", exit_code=128 + pl_module.agreed_signal)

    def _is_minute_due(self, trainer: pl.Trainer) -> bool:
        if self.config.every_minutes <= 0:
            return False
        due = time.monotonic() - self._saved_at >= 60 * self.config.every_minutes
        return bool(trainer.strategy.broadcast(due))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the checkpoint with the lowest validation loss, if asked to."""
        loss = trainer.callback_metrics.get("validation/loss")
        if not self.config.best or trainer.sanity_checking or trainer.state.fn != "fit" or loss is None:
            return
        if self._best is None or float(loss) < self._best[0]:
            self.save(trainer, pl_module)
            self._best = (float(loss), step_folder(self.directory, trainer.global_step))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last step is always saved."""
        self._restore_handlers()
        if trainer.global_step > 0:
            self.save(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore_handlers()

    def save(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Write the checkpoint of the current step, unless it is there already. All ranks call this."""
        assert isinstance(module, LitRWKV7)
        step = trainer.global_step
        if step == self._saved_step:
            return
        target = step_folder(self.directory, step)
        started = time.monotonic()
        temp = Path(trainer.strategy.broadcast(str(begin_folder(target)) if trainer.is_global_zero else ""))
        try:
            self._write_rank(trainer, module, temp)
            trainer.save_checkpoint(temp)
            trainer.strategy.barrier("checkpoint written")
        except OSError as err:
            abandon_folder(temp)
            raise storage_error(target, err) from err
        if trainer.is_global_zero:
            facts = CheckpointPayload(
                world_size=trainer.world_size,
                config_digest=self.config_digest,
                extra={
                    "settings": self.settings,
                    "strategy": "deepspeed" if is_deepspeed(trainer.strategy) else "plain",
                },
            ).facts(step)
            commit_folder(temp, target, facts)
            prune(self.directory, self.config.keep, protect=[self._best[1]] if self._best else [])
        trainer.strategy.barrier("checkpoint committed")
        self._saved_step, self._saved_at = step, time.monotonic()
        _logger.info("saved %s (%.1f s)", target, self._saved_at - started)

    def _write_rank(self, trainer: pl.Trainer, module: LitRWKV7, folder: Path) -> None:
        tensors, numbers = capture_rng()
        tensors |= module.lanes.tensors()
        rank = trainer.global_rank
        payload = CheckpointPayload(tensors={rank_file(rank): tensors}, documents={rank_file(rank, ".json"): numbers})
        write_payload_files(folder, payload)

    # ---- signals

    def _install_handlers(self, module: LitRWKV7) -> None:
        def note(number: int, _frame: FrameType | None) -> None:
            if module.stop_signal:
                raise Interrupted(signal.Signals(number).name, "stopped at once, unsaved", exit_code=128 + number)
            module.stop_signal = number
            _logger.warning("%s: finishing the step, then saving; again = stop at once", signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._old_handlers[number] = signal.signal(number, note)

    def _restore_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
