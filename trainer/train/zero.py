"""DeepSpeed's ZeRO with checkpoints in the one form of `trainer.checkpoint.pieces`.

DeepSpeed's own folders only fit the number of processes and the stage that wrote them, and are pickles. Here every
process writes the pieces of masters and moments that it keeps, and reads the pieces that it needs. What is asked of
DeepSpeed for that, beyond its documented calls, is in this module alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from trainer.checkpoint.pieces import MASTER, Piece, SavedPieces
from trainer.train.optim import MOMENTS, adam_state, num_updates, set_num_updates

__all__ = ["ZeroStrategy", "writable"]


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's strategy, saving and restoring by parameter name through the trainer's `CheckpointIO`."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Load the first weights, from which DeepSpeed then makes its masters."""
        module: Any = self.lightning_module
        module.load_initial_weights()
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the weights are the masters, rounded."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Number of updates done, and this process's pieces."""
        return {"rank": self.global_rank, "updates": num_updates(self._adam()), "pieces": list(self._pieces())}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Let every process write: each has its own pieces."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's part of a checkpoint; when training goes on, masters, moments and weights are restored too."""
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path)
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._restore(checkpoint["optimizer_states"][0])
        return checkpoint

    @torch.no_grad()
    def _restore(self, state: dict[str, Any]) -> None:
        saved: SavedPieces = state["saved"]
        saved.restore(self._pieces())
        set_num_updates(self._adam(), state["updates"])
        for name, parameter in self._parameters():
            with writable(parameter) as is_mine:
                if is_mine:
                    parameter.copy_(saved.whole(MASTER, name).view(parameter.shape))

    def _adam(self) -> torch.optim.Optimizer:
        """The torch optimizer that DeepSpeed drives."""
        adam: torch.optim.Optimizer = self.deepspeed_engine.optimizer.optimizer
        return adam

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        module: Any = self.lightning_module
        return ((name, p) for name, p in module.model.named_parameters() if p.requires_grad)

    def _pieces(self) -> Iterator[Piece]:
        zero: Any = self.deepspeed_engine.optimizer
        cut = _piece_of_stage_3 if self.zero_stage_3 else _piece_of_stages_1_and_2
        for name, parameter in self._parameters():
            place = cut(zero, parameter)
            if place is None:
                continue
            shape, start, flat, part = place
            state = adam_state(self._adam(), flat)
            tensors = {MASTER: flat.detach()[part]} | {kind: state[kind][part] for kind in MOMENTS}
            yield Piece(name, shape, start, tensors)


_Place = tuple[tuple[int, ...], int, Tensor, slice]
"""Shape of the parameter, first element kept here, flat masters of this process, and where in them it is kept."""


def _piece_of_stages_1_and_2(zero: Any, parameter: Any) -> _Place | None:
    """None: other processes keep all of the parameter."""
    kept = parameter._hp_mapping
    if kept is None:
        return None
    flat = zero.optimizer.param_groups[kept.param_group_index]["params"][0]
    at = kept.hp_fragment_address
    return tuple(parameter.shape), kept.lp_fragment_address.start, flat, slice(at.start, at.start + at.numel)


def _piece_of_stage_3(zero: Any, parameter: Any) -> _Place | None:
    """Every process keeps an equal part, the last ones perhaps only padding."""
    group, at, size = zero.grad_position[zero.get_param_id(parameter)]
    start = size * dist.get_rank(parameter.ds_process_group)
    num = min(size, parameter.ds_numel - start)
    if num <= 0:
        return None
    return tuple(parameter.ds_shape), start, zero.fp32_partitioned_groups_flat[group], slice(at, at + num)


@contextlib.contextmanager
def writable(parameter: nn.Parameter) -> Iterator[bool]:
    """Context in which a parameter can be set, whether it is whole or sharded by ZeRO-3.

    Yields:
        Whether this process is to write it; the others get the value when the context ends.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank() == 0
