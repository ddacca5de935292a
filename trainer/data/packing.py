"""Several documents in one row, so that rows fill whole chunks. Integers only; every document lands in one row."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.sampler import keyed_permutation

__all__ = ["PackPlan", "pack_documents"]

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackPlan:
    """How documents are packed into rows."""

    multiple: int
    """Rows have room for a multiple of so many (input, target) pairs: chunks are then full."""
    least: int = 0
    """Smallest room of a row."""
    pool_size: int = 20160
    """Documents that are packed together."""
    in_sequence: bool = False
    """Next fit in the order of the documents; else best fit, longest first, over seeded pools."""
    seed: int = 0


def pack_documents(lengths: IntArray, plan: PackPlan) -> list[IntArray]:
    """Numbers of the documents of each row, int64.

    A document longer than `plan.least` opens a row with room for itself, rounded up to the multiple; shorter ones
    fill what is left.

    Args:
        lengths: int64 [documents], pairs of each, above 0.
        plan: how.
    """
    rows: list[IntArray] = []
    order = np.arange(len(lengths)) if plan.in_sequence else keyed_permutation(len(lengths), plan.seed, 0)
    for start in range(0, len(lengths), plan.pool_size):
        pool = order[start : start + plan.pool_size]
        rows += _next_fit(pool, lengths, plan) if plan.in_sequence else _best_fit(pool, lengths, plan)
    return rows


def _room(length: int, plan: PackPlan) -> int:
    return -(-max(length, plan.least) // plan.multiple) * plan.multiple


def _best_fit(pool: IntArray, lengths: IntArray, plan: PackPlan) -> list[IntArray]:
    rows: list[list[int]] = []
    # (free room, row), ascending: the first that is large enough is the best fit.
    free: list[tuple[int, int]] = []
    for document in pool[np.argsort(-lengths[pool], kind="stable")].tolist():
        length = int(lengths[document])
        place = bisect.bisect_left(free, (length, -1))
        if place < len(free):
            room, row = free.pop(place)
            rows[row].append(document)
        else:
            room, row = _room(length, plan), len(rows)
            rows.append([document])
        if room > length:
            bisect.insort(free, (room - length, row))
    return [np.array(row, np.int64) for row in rows]


def _next_fit(pool: IntArray, lengths: IntArray, plan: PackPlan) -> list[IntArray]:
    rows: list[list[int]] = []
    free = 0
    for document in pool.tolist():
        length = int(lengths[document])
        if length > free or not rows:
            rows.append([])
            free = _room(length, plan)
        rows[-1].append(document)
        free -= length
    return [np.array(row, np.int64) for row in rows]
