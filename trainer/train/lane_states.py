"""Recurrent states of stream lanes, carried from one optimizer step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.model.state import LayerState, ModelState, map_state, state_tensors

__all__ = ["LaneStates"]


class LaneStates:
    """This rank's lanes by global lane number. Micro-batches keep their lanes, so states are not re-cut."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ModelState] = {}

    def get(self, lane_ids: tuple[int, ...] | None) -> ModelState | None:
        """State that the rows of a micro-batch continue; None if all of them start anew."""
        return None if lane_ids is None else self._groups.get(lane_ids)

    def keep(self, lane_ids: tuple[int, ...] | None, state: ModelState | None) -> None:
        """Remember the state after a micro-batch; rows that are no lanes are not continued."""
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

    def restore(self, tensors: Mapping[str, Tensor], micro_rows: int, device: torch.device) -> None:
        """Inverse of `tensors`, for micro-batches of `micro_rows` consecutive lanes."""
        lanes: dict[int, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            _, lane, index = name.split(".")
            lanes.setdefault(int(lane), {})[int(index)] = tensor
        order = sorted(lanes)
        for start in range(0, len(order), micro_rows):
            group = tuple(order[start : start + micro_rows])
            rows = [torch.stack([lanes[lane][i] for lane in group]) for i in range(len(lanes[group[0]]))]
            state = tuple(LayerState(*rows[i : i + 3]) for i in range(0, len(rows), 3))
            self._groups[group] = map_state(lambda x: x.to(device), state)
