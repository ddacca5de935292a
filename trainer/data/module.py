"""The data set of a run as a Lightning data module: prepared once, opened on every rank, resumed exactly."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from trainer.config.schema import RunConfig
from trainer.data.curriculum import Curriculum
from trainer.data.lanes import LanePlan, Lanes, StepBatch, ValidationLanes
from trainer.data.prepare import open_prepared, prepare
from trainer.data.store import TokenStore
from trainer.data.streaming import StreamedSet, open_streamed
from trainer.data.streaming_lanes import StreamingLanes
from trainer.errors import DataError

__all__ = ["LanesDataModule"]


class LanesDataModule(pl.LightningDataModule):
    """Training and validation batches of a run.

    Args:
        run: all settings.
        vocab_size: rows of the model's embedding; every token id must be below it.
    """

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        super().__init__()
        self.manifest: Any = None
        """Manifest of the prepared data set, after `setup`."""
        self._run, self._vocab_size = run, vocab_size
        self._train: TokenStore | None = None
        self._validation: TokenStore | None = None
        self._streamed: StreamedSet | None = None
        self._lanes: Lanes | StreamingLanes | None = None
        self._position: dict[str, Any] | None = None

    def prepare_data(self) -> None:
        """Build the data set if needed; Lightning calls this on one process of each machine."""
        if self._run.data.streaming:
            return
        prepare(self._run.data, seed=self._run.trainer.deterministic_order_seed, vocab_size=self._vocab_size)

    def setup(self, stage: str) -> None:
        """Open the prepared data set; its token ids are checked against vocab_size.

        Raises:
            DataError: if the data set is missing, damaged or of another vocabulary, or if there is nothing
                to validate on and `stage` is `validate`.
        """
        if self._run.data.streaming:
            self._open_streamed()
        elif self._train is None:
            self._train, self._validation, self.manifest = open_prepared(
                self._run.data, seed=self._run.trainer.deterministic_order_seed, vocab_size=self._vocab_size
            )
        if self._validation is not None:
            return
        if stage == "validate":
            raise DataError(
                "data.test_split",
                "the prepared data set has no validation documents",
                fix="set it above 0, and prepare the data set again unless data.streaming is set",
            )
        if self.trainer:
            # Lightning warns of a loader of length zero; this is how to say that none is wanted.
            self.trainer.limit_val_batches = 0

    def _open_streamed(self) -> None:
        if self._streamed is None:
            seed = self._run.trainer.deterministic_order_seed
            self._streamed = open_streamed(self._run.data, seed=seed, vocab_size=self._vocab_size)
            self._validation, self.manifest = self._streamed.validation, self._streamed.manifest

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of a mixture, by the number that batches have them under; [] if there is but one."""
        has_sources = self._train is not None and self._train.source_ids is not None
        is_mixture = self._streamed is not None and len(self._streamed.streams) > 1
        return [str(source["name"]) for source in self.manifest.sources] if has_sources or is_mixture else []

    def train_dataloader(self) -> Lanes | StreamingLanes:
        """The training set, at the position given to `seek`, else at its start; the same object each time."""
        plan = self._plan()
        # A launcher may have given this process its rank after the first call.
        if self._lanes is None or self._lanes.plan != plan:
            position = self._position if self._lanes is None else self._lanes.state_dict()
            self._lanes = self._make_lanes(plan)
            self.seek(position)
            self._position = None
        return self._lanes

    def _make_lanes(self, plan: LanePlan) -> Lanes | StreamingLanes:
        if self._streamed is not None:
            return StreamingLanes(self._streamed, self._run.data, plan)
        assert self._train is not None
        return Lanes(self._train, self._run.data, plan)

    def val_dataloader(self) -> ValidationLanes:
        """The validation set, which `setup` found."""
        assert self._validation is not None
        return ValidationLanes(self._validation, self._run.data, self._plan())

    def seek(self, position: dict[str, Any] | None) -> None:
        """Let training continue at a `StepBatch.position`, now or when the lanes are made. None: no change.

        A resume from a Lightning checkpoint does this by itself, see `load_state_dict`.
        """
        if position is None:
            return
        if self._lanes is None:
            self._position = position
        else:
            self._lanes.load_state_dict(position)

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step handed out, for Lightning's checkpoint; {} before training."""
        return self._lanes.state_dict() if self._lanes is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seek to a saved position.

        Lightning restores the loader's own state too, but leaves it out for a checkpoint from the end of an
        epoch (tried with 2.6.6: training would start again with the first epoch's documents).
        """
        self.seek(state)

    def teardown(self, stage: str) -> None:
        """Forget the position: another fit of this process starts anew unless it resumes."""
        self._lanes = self._position = None

    def transfer_batch_to_device(self, batch: StepBatch, device: torch.device, dataloader_idx: int) -> StepBatch:
        """The batch as it is: the step loop moves it to the device chunk by chunk."""
        return batch

    def _plan(self) -> LanePlan:
        settings, trainer = self._run.trainer, self.trainer
        world_size = trainer.world_size if trainer else 1
        rows = settings.target_batch_size
        return LanePlan(
            world_size=world_size,
            rank=trainer.global_rank if trainer else 0,
            rows_per_step=settings.microbatch_size * world_size if rows == -1 else rows,
            microbatch_size=settings.microbatch_size,
            ctx_len=self._run.model.ctx_len,
            seed=settings.deterministic_order_seed,
            curriculum=Curriculum.from_config(self._run.model, settings.deterministic_order_seed),
        )
