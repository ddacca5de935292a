"""Recurrent states of stream lanes, carried from one optimizer step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.model.state import LayerState, ModelState, state_tensors

__all__ = ["LaneStates"]


class LaneStates:
    """This rank's lanes by global lane number. Micro-batches keep their lanes, so states are not re-cut."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ModelState] = {}
        self._restored: dict[int, dict[int, Tensor]] = {}
        self._device = torch.device("cpu")

    def get(self, lane_ids: tuple[int, ...] | None) -> ModelState | None:
        """State that the rows of a micro-batch continue; None if all of them start anew.

        Raises:
            CheckpointError: the run was resumed without the state of one of these lanes.
        """
        if lane_ids is None:
            return None
        if not self._restored:
            return self._groups.get(lane_ids)
        missing = [lane for lane in lane_ids if lane not in self._restored]
        if missing:
            raise CheckpointError("lane states", "the checkpoint has no state of a lane", found=missing[0])
        lanes = [self._restored[lane] for lane in lane_ids]
        rows = [torch.stack([lane[i] for lane in lanes]).to(self._device) for i in range(len(lanes[0]))]
        return tuple(LayerState(*rows[i : i + 3]) for i in range(0, len(rows), 3))

    def keep(self, lane_ids: tuple[int, ...] | None, state: ModelState | None) -> None:
        """Remember the state after a micro-batch; rows that are no lanes are not continued.

        Comes after the `get` of all micro-batches of a step, so that restored states are spent by then.
        """
        self._restored.clear()
        if lane_ids is not None and state is not None:
            self._groups[lane_ids] = state

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors of single lanes, for a checkpoint."""
        return {
            f"lane.{lane}.{index}": tensor[row]
            for lane_ids, state in self._groups.items()
            for index, tensor in enumerate(state_tensors(state))
            for row, lane in enumerate(lane_ids)
        }

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Inverse of `tensors`; lanes of other ranks may be among them, and micro-batches may be cut anew."""
        self._device = device
        for name, tensor in tensors.items():
            _, lane, index = name.split(".")
            self._restored.setdefault(int(lane), {})[int(index)] = tensor
