"""Mean loss of each source of a mixture, over several steps or a whole validation set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["SourceLosses"]


class SourceLosses:
    """Sums of losses and token weights by source, kept on the device until `means` asks for them.

    A data set of one source has none: then everything here does nothing.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Sources by number; known after the first `sums`."""
        self.latest: dict[str, float] = {}
        """What `means` returned last."""
        self._step_2S: Tensor | None = None
        self._sums_2S: Tensor | None = None

    def sums(self, module: pl.LightningModule) -> Tensor | None:
        """Where a step adds its losses and weights: float [2, sources], the same tensor each time; None for one source."""
        if self._step_2S is None:
            data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
            self.names = data.source_names
            if self.names:
                dtype = torch.float64 if module.dtype == torch.float64 else torch.float32
                self._step_2S = torch.zeros(2, len(self.names), dtype=dtype, device=module.device)
                self._sums_2S = torch.zeros_like(self._step_2S)
        return self._step_2S

    def end_step(self, scale: float) -> None:
        """Take over a step's sums, times `scale`, so that every token of all steps counts by its own weight."""
        if self._step_2S is not None and self._sums_2S is not None:
            self._sums_2S.add_(self._step_2S, alpha=scale)
            self._step_2S.zero_()

    def means(self, prefix: str, gather: Callable[[list[float]], list[list[float]]]) -> dict[str, float]:
        """Mean loss per token of each source that had any since the last call, by `prefix` and name; starts anew.

        Args:
            prefix: of the names.
            gather: one exchange of a list of numbers between all ranks; every rank must call this.
        """
        if self._sums_2S is None:
            return {}
        ranks = gather(self._sums_2S.flatten().tolist())
        sums = [sum(column) for column in zip(*ranks, strict=True)]
        self.reset()
        pairs = zip(self.names, sums[: len(self.names)], sums[len(self.names) :], strict=True)
        self.latest = {f"{prefix}{name}": total / weight for name, total, weight in pairs if weight}
        return dict(self.latest)

    def reset(self) -> None:
        """Forget what was summed."""
        if self._sums_2S is not None:
            self._sums_2S.zero_()
