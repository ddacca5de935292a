"""Mean loss of all tokens, of each source, and by how much of its document stands before a token.

Training, validation during a run and `evaluate.py` all sum losses here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.data.positions import NUM_BUCKETS, bucket_start

__all__ = ["LossSums", "LossTable", "PositionLoss"]

Gather = Callable[[list[float]], list[list[float]]]


class PositionLoss(NamedTuple):
    """Loss of the tokens that have `first` to `last` tokens of their document before them."""

    first: int
    last: int
    tokens: float
    """Sum of their weights: their number, where each counts 1."""
    loss: float
    """Mean, in nats per token."""


@dataclass(frozen=True)
class LossTable:
    """Sums of losses and token weights, and the means that follow from them."""

    names: Sequence[str]
    """Sources by number; empty if there is but one."""
    sums_2SP: np.ndarray
    """float64 [2, sources, buckets]: weighted losses in nats, and weights."""

    @property
    def tokens(self) -> float:
        """Sum of the weights of all tokens."""
        return float(self.sums_2SP[1].sum())

    @cached_property
    def loss(self) -> float:
        """Mean over all tokens, in nats; NaN if there are none."""
        return float(self.sums_2SP[0].sum()) / self.tokens if self.tokens else float("nan")

    def by_source(self) -> dict[str, float]:
        """Mean loss of each named source that has tokens."""
        totals, weights = self.sums_2SP.sum(axis=2).tolist()
        return {n: total / weight for n, total, weight in zip(self.names, totals, weights, strict=False) if weight}

    def by_position(self) -> list[PositionLoss]:
        """Mean loss of each bucket of positions that has tokens, from the start of documents on."""
        totals, weights = self.sums_2SP.sum(axis=1).tolist()
        return [
            PositionLoss(bucket_start(bucket), bucket_start(bucket + 1) - 1, weights[bucket], total / weights[bucket])
            for bucket, total in enumerate(totals)
            if weights[bucket]
        ]

    def metrics(self, prefix: str) -> dict[str, float]:
        """For a log: `PREFIX/loss/SOURCE`, and `PREFIX/loss_at/FIRST` by the fewest tokens before."""
        by_source = {f"{prefix}/loss/{name}": loss for name, loss in self.by_source().items()}
        return by_source | {f"{prefix}/loss_at/{at.first}": at.loss for at in self.by_position()}


class LossSums:
    """Sums of losses and token weights by group, kept on the device until `take` asks for them.

    Args:
        names: of the sources; empty if there is but one.
        device: where losses are computed.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        size = max(1, len(self.names)) * NUM_BUCKETS
        self.step_2G: Tensor = torch.zeros(2, size, dtype=torch.float64, device=device)
        """Where a step adds its losses and weights; the same tensor each time."""
        self._sums_2G = torch.zeros_like(self.step_2G)

    def end_step(self, scale: float = 1.0) -> None:
        """Take over a step's sums, times `scale`, so that every token of all steps counts by its own weight."""
        self._sums_2G.add_(self.step_2G, alpha=scale)
        self.step_2G.zero_()

    def reset(self) -> None:
        """Forget what was summed."""
        self._sums_2G.zero_()

    def take(self, gather: Gather) -> LossTable:
        """What was summed since the last call, over all ranks; starts anew.

        Args:
            gather: one exchange of a list of numbers between all ranks; every rank must call this.
        """
        ranks = gather(self._sums_2G.flatten().tolist())
        self.reset()
        return LossTable(self.names, np.sum(ranks, axis=0).reshape(2, -1, NUM_BUCKETS))
