"""Learning rate and chunk length as pure functions of how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.schema import ModelConfig

__all__ = ["Position", "Schedule", "chunk_length"]


def chunk_length(model: ModelConfig, step: int) -> int:
    """Tokens per chunk when `step` optimizer steps are done."""
    begun = [tokens for first, tokens in model.ctx_len_schedule or () if first <= step]
    return begun[-1] if begun else model.ctx_len


@dataclass(frozen=True)
class Position:
    """How far a run has come, before the step whose learning rate is asked for."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained."""
    tokens_at_warmup_end: int = 0
    """Tokens trained when the warm-up ended."""


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then decay from `lr_init` to `lr_final` (the official trainer's rule).

    With p the share of the run done since the warm-up, and f = lr_final / lr_init:

        cosine    lr_init * ((1 + f) / 2 + (1 - f) / 2 * cos(pi p))
        linear    lr_init * (1 + (f - 1) p)
        constant  lr_init

    times 0.01 + 0.99 * step / warmup_steps while step < warmup_steps.
    """

    lr_init: float
    lr_final: float
    shape: str
    warmup_steps: int
    max_tokens: int
    """Tokens of the whole run; -1 = not limited by tokens."""
    max_steps: int
    """Optimizer steps of the whole run; -1 = not limited by steps."""

    @classmethod
    def from_config(cls, model: ModelConfig, *, max_tokens: int, max_steps: int) -> Schedule:
        """The schedule of a run; `lr_final` defaults to a tenth of `lr_init`."""
        final = model.lr_init / 10 if model.lr_final is None else model.lr_final
        return cls(model.lr_init, final, model.lr_schedule, max(0, model.warmup_steps), max_tokens, max_steps)

    def progress(self, at: Position) -> float:
        """Share of the run done since the warm-up, in [0, 1], by the limit that is nearest."""
        if at.step < self.warmup_steps:
            return 0.0
        shares = [0.0]
        if self.max_tokens > 0:
            start = at.tokens_at_warmup_end
            shares.append((at.tokens - start) / max(1, self.max_tokens - start))
        if self.max_steps > 0:
            shares.append((at.step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps))
        return min(1.0, max(shares))

    def lr(self, at: Position) -> float:
        """Learning rate of the next step, before the factor of a parameter group."""
        ratio, p = self.lr_final / self.lr_init, self.progress(at)
        factor = 1.0
        if self.shape == "cosine":
            factor = (0.5 + ratio / 2) + (0.5 - ratio / 2) * math.cos(math.pi * p)
        elif self.shape == "linear":
            factor = 1.0 + (ratio - 1.0) * p
        if at.step < self.warmup_steps:
            factor *= 0.01 + 0.99 * at.step / self.warmup_steps
        return self.lr_init * factor
