"""Groups of targets whose losses are summed together: by how much of the document stands before, and by source.

Losses by position show whether a model makes use of long contexts: they fall with the position if it does.
Buckets double in size, so that a million tokens need few of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_BUCKETS", "bucket_start", "group_of", "position_buckets"]

NUM_BUCKETS = 32
"""Enough for documents of 2**35 tokens."""
_FIRST_BITS = 4


def position_buckets(start: int, num_targets: int) -> NDArray[np.int32]:
    """Bucket of each of `num_targets` targets, the first of which has `start` + 1 tokens of its document before it."""
    context = np.arange(start + 1, start + num_targets + 1, dtype=np.float64)
    bits = np.frexp(context)[1]
    return np.clip(bits - _FIRST_BITS, 0, NUM_BUCKETS - 1).astype(np.int32)


def bucket_start(bucket: int) -> int:
    """Fewest tokens before a target of this bucket; the bucket ends before `bucket_start(bucket + 1)`."""
    return 1 << (bucket + _FIRST_BITS - 1) if bucket else 1


def group_of(source: int, buckets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Number of the group of targets of a source: source * NUM_BUCKETS + bucket."""
    return buckets + np.int32(source * NUM_BUCKETS)
