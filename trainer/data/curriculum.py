"""What a step of training leaves out of its documents: length limits that rise with the steps, and dropped targets.

Everything is a function of the seed, the epoch, the document and the step, so a resumed run leaves out the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config.schema import ModelConfig

__all__ = ["Curriculum"]

_CUT, _DROP = 1, 2
_NUMBERS_PER_COUNT = 4
"""64-bit numbers that the generator makes at each count."""


@dataclass(frozen=True)
class Curriculum:
    """Length limits and the share of dropped targets."""

    limits: tuple[tuple[int, int], ...] = ()
    """(step, tokens): before this step, documents train at most so many tokens. Both rise."""
    dropout: float = 0.0
    """Share of targets that are not trained."""
    seed: int = 0

    @classmethod
    def from_config(cls, model: ModelConfig, seed: int) -> Curriculum:
        """The curriculum of a run."""
        limits = zip(model.ctx_len_warmup_steps or (), model.ctx_len_cutoffs or (), strict=True)
        return cls(tuple(limits), model.token_dropout_rate, seed)

    def limit(self, step: int) -> int | None:
        """Most tokens of a document that the step trains; None = all."""
        return next((tokens for until, tokens in self.limits if step < until), None)

    def window(self, num_targets: int, limit: int | None, epoch: int, document: int) -> tuple[int, int]:
        """First and end of the targets of a document that are trained: all, or `limit` of them at a random place."""
        if limit is None or num_targets <= limit:
            return 0, num_targets
        first = int(self._random(_CUT, epoch, document).integers(num_targets - limit + 1))
        return first, first + limit

    def keep(self, epoch: int, place: int, start: int, num_targets: int) -> NDArray[np.bool_] | None:
        """Which of a document's targets [start, start + num_targets) are not dropped; None = all.

        Args:
            epoch: passes over the data before this one.
            place: number of the document, or -1 for the flat token stream.
            start: first target, counted in the document or the stream.
            num_targets: how many.
        """
        if self.dropout == 0:
            return None
        random = self._random(_DROP, epoch, place + 1)
        skipped, rest = divmod(start, _NUMBERS_PER_COUNT)
        random.bit_generator.advance(skipped)  # type: ignore[attr-defined]
        return random.random(rest + num_targets)[rest:] >= self.dropout

    def _random(self, use: int, epoch: int, place: int) -> np.random.Generator:
        key = np.random.SeedSequence((self.seed, use, epoch, place)).generate_state(2, np.uint64)
        return np.random.Generator(np.random.Philox(key=key))
