"""Steps whose numbers are not finite are left out or end the run; steps can be computed twice and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.bptt.step import StepResult
from trainer.checkpoint.rng import capture_rng, restore_rng
from trainer.data.lanes import StepBatch
from trainer.errors import NonFiniteError, RerunError
from trainer.logs import get_logger
from trainer.train.optim import MasterAdamW

if TYPE_CHECKING:
    from trainer.train.lit_module import LitRWKV7

__all__ = ["SkippedSteps", "run_twice"]

_logger = get_logger(__name__)
_DIGEST_ELEMENTS = 1 << 26


def _data_of(batch: StepBatch) -> str:
    """Which data a rank has in a step, so that they can be looked at or found again."""
    digest = hashlib.sha256()
    for micro in batch.microbatches:
        digest.update(micro.ids_BT.numpy().tobytes())
    return f"epoch {batch.epoch}, batch {batch.step_in_epoch}, token ids sha256 {digest.hexdigest()[:16]}"


class SkippedSteps:
    """Leaves out steps that are not finite, up to `limit` in a row, and batches that are to be passed over.

    Losses are summed and gradients averaged over all ranks before they are judged: every rank comes to the same
    decision without asking the others.

    Args:
        limit: `trainer.skip_non_finite`.
        batches: `data.skip_batches`.
    """

    def __init__(self, limit: int, batches: Sequence[Sequence[int]]) -> None:
        self.limit, self.batches = limit, batches
        self.in_a_row = 0
        self.last: str | None = None
        """What was wrong with the step that has just been left out; None if it was trained."""

    def trained(self) -> None:
        """The step was finite."""
        self.in_a_row, self.last = 0, None

    def passes_over(self, batch: StepBatch) -> bool:
        """Whether the settings want this batch left out."""
        at = batch.step_in_epoch
        if not any(epoch == batch.epoch and first <= at <= last for epoch, first, last in self.batches):
            return False
        self.last = f"passed over by data.skip_batches: epoch {batch.epoch}, batch {at}"
        _logger.info("%s", self.last)
        return True

    def leave_out(self, error: NonFiniteError, batch: StepBatch) -> None:
        """Note a step that was not finite.

        Raises:
            NonFiniteError: `error` with the data of the step, if there were more than `limit` in a row.
        """
        found = f"{error.found}; {_data_of(batch)}" if error.found else _data_of(batch)
        if self.in_a_row >= self.limit:
            steps = f" ({self.in_a_row} steps before it are left out already)" if self.in_a_row else ""
            fix = (
                "lower model.lr_init or model.grad_clip, look at the data, or leave such steps out with "
                "trainer.skip_non_finite or this one with data.skip_batches; the weights are unchanged"
            )
            raise NonFiniteError(error.where, error.problem + steps, found=found, fix=fix) from error
        self.in_a_row += 1
        self.last = f"{error.where}: {error.problem}; {found}"
        _logger.warning("left out, %d in a row: %s", self.in_a_row, self.last)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        for part in tensor.detach().flatten().split(_DIGEST_ELEMENTS):
            digest.update(part.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def run_twice(module: LitRWKV7, optimizer: MasterAdamW, run: Callable[[], StepResult]) -> StepResult:
    """Compute the gradients of a step twice from the same state and compare them bit for bit.

    Args:
        module: the module in training.
        optimizer: holds the gradients.
        run: computes them.

    Returns:
        The result of the second time, whose gradients the optimizer now holds.

    Raises:
        RerunError: on all ranks, if they differ on any.
    """
    rng = capture_rng()
    sums_2G = module.loss_sums("train").step_2G
    sums_before_2G = sums_2G.clone()
    first = run()
    digest = _digest([*optimizer.flat_gradients(), *first.losses])
    optimizer.zero_grad()
    restore_rng(*rng)
    sums_2G.copy_(sums_before_2G)
    second = run()
    again = _digest([*optimizer.flat_gradients(), *second.losses])
    ranks = [bool(rank[0]) for rank in module.gather_numbers([float(digest != again)])]
    if any(ranks):
        raise RerunError(
            f"step {module.global_step + 1}",
            f"computed twice from the same state it differs on rank {ranks.index(True)}",
            found=f"sha256 of gradients {digest} and {again} on rank {module.global_rank}",
            fix="look for a faulty device or memory; older checkpoints are untouched. trainer.rerun_every_steps: 0 = off",
        )
    return second
