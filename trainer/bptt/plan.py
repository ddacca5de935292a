"""How an optimizer step is cut into chunks, decided with integers before any tensor moves.

All ranks agree on the plan in one exchange per step (`StepPlan.agree`), so that every rank makes the same
number of forward and backward calls however unequal its documents are. A rank whose rows have ended runs
chunks of a few masked tokens instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.config.schema import BpttWindow

__all__ = ["Chunk", "MicroPlan", "StepPlan", "boundary_stride", "plan_chunks", "plan_windows"]


class Chunk(NamedTuple):
    """Tokens [start, stop) of the first `rows` rows of a micro-batch; rows = 0: masked tokens only."""

    start: int
    stop: int
    rows: int


def plan_chunks(lengths: Sequence[int], ctx_len: int) -> tuple[Chunk, ...]:
    """Chunks of `ctx_len` tokens; rows that have ended are no longer part of a chunk.

    Args:
        lengths: tokens per row, descending.
        ctx_len: tokens per chunk; the last one is as long as the longest row left.
    """
    longest = lengths[0] if lengths else 0
    starts = range(0, longest, ctx_len)
    return tuple(Chunk(s, min(s + ctx_len, longest), sum(length > s for length in lengths)) for s in starts)


def plan_windows(first: int, num_chunks: int, window: BpttWindow) -> tuple[range, ...]:
    """Runs of chunks within which gradients flow, from chunk `first` on; none flows between two runs."""
    size = max(1, num_chunks - first) if window == "full" else window
    return tuple(range(s, min(s + size, num_chunks)) for s in range(first, num_chunks, size))


def boundary_stride(num_boundaries: int, max_kept: int) -> int:
    """Every how many chunks a boundary state is kept, when at most `max_kept` fit.

    With stride k, ceil(n / k) states stay kept and k - 1 more exist while one stretch is replayed.
    If no stride fits, the one that needs least.
    """
    best = max(1, math.isqrt(max(0, num_boundaries - 1)) + 1)
    for stride in range(1, best):
        if math.ceil(num_boundaries / stride) + stride - 1 <= max_kept:
            return stride
    return best


@dataclass(frozen=True)
class MicroPlan:
    """Plan of one micro-batch, equal in length on all ranks."""

    chunks: tuple[Chunk, ...]
    """This rank's chunks, then masked ones up to the agreed number."""
    first_trained: int
    """Chunks before this one only build the state."""
    windows: tuple[range, ...]


def _untrained_chunks(lengths: Sequence[int], ctx_len: int, learning_range: int) -> int:
    """Leading chunks of a micro-batch in which no row trains."""
    if learning_range <= 0 or not lengths:
        return 0
    return min(max(0, math.ceil(length / ctx_len) - learning_range) for length in lengths)


@dataclass(frozen=True)
class StepPlan:
    """Plan of one optimizer step on one rank."""

    micro: tuple[MicroPlan, ...]
    total_weight: float
    """Sum of the weights of all trained tokens of the step, over all ranks; never 0."""
    num_backwards: int
    waiting_share: float = 0.0
    """Of the chunks of all ranks, the share that is masked: ranks whose rows have ended wait for the others."""

    @classmethod
    def agree(
        cls,
        lengths: Sequence[Sequence[int]],
        weight: float,
        *,
        ctx_len: int,
        window: BpttWindow,
        learning_range: int,
        num_micro: int,
        gather: Callable[[list[float]], list[list[float]]],
        untrained: Sequence[int] = (),
    ) -> StepPlan:
        """Make the plan that all ranks share.

        Args:
            lengths: tokens per row, for each of this rank's micro-batches.
            weight: sum of this rank's token weights in the step.
            ctx_len: tokens per chunk.
            window: chunks that a gradient may cross.
            learning_range: trailing chunks of a row that train; -1 = all.
            num_micro: most micro-batches that any rank can have.
            gather: exchanges one list of numbers between all ranks (a single collective).
            untrained: leading tokens of each micro-batch that no row trains. Where gradients stop at each chunk, chunks
                of such tokens alone need none.
        """
        own = [plan_chunks(rows, ctx_len) for rows in lengths]
        idle = [_untrained_chunks(rows, ctx_len, learning_range) for rows in lengths]
        if window == 1:
            leading = [min(num // ctx_len, len(chunks) - 1) for num, chunks in zip(untrained, own, strict=False)]
            idle = [max(num, *leading[i : i + 1], 0) for i, num in enumerate(idle)]
        message = [weight]
        for i in range(num_micro):
            message += [len(own[i]), idle[i]] if i < len(own) and own[i] else [0, math.inf]
        ranks = gather(message)
        micro = []
        slots = 0
        for i in range(num_micro):
            count = int(max(rank[1 + 2 * i] for rank in ranks))
            if count == 0:
                continue
            slots += count * len(ranks)
            first = int(min(rank[2 + 2 * i] for rank in ranks))
            chunks = own[i] if i < len(own) else ()
            chunks += (Chunk(0, 0, 0),) * (count - len(chunks))
            micro.append(MicroPlan(chunks, first, plan_windows(first, count, window)))
        total = sum(rank[0] for rank in ranks)
        busy = sum(sum(rank[1::2]) for rank in ranks)
        backwards = sum(len(m.chunks) - m.first_trained for m in micro)
        return cls(tuple(micro), total if total > 0 else 1.0, backwards, 1 - busy / slots if slots else 0.0)
