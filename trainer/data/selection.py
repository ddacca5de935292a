"""Which documents stay, and which of them are kept for validation. Works on token counts alone."""

from __future__ import annotations

import random

import numpy as np

from trainer.config.schema import DataConfig
from trainer.errors import ConfigError

__all__ = ["in_words", "keep_documents", "split_documents"]

_EMPTY, _SHORT, _LONG = "empty", "shorter than min_token_size", "longer than max_token_size"


def keep_documents(data: DataConfig, sizes: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    """Numbers of the documents that stay, and how many go for which reason."""
    is_empty = sizes <= int(data.append_end_of_document)
    is_short = ~is_empty & (sizes < data.min_token_size)
    is_long = (sizes > data.max_token_size) if data.max_token_size >= 0 else np.zeros(len(sizes), bool)
    is_long &= ~is_empty & ~is_short
    reasons = {_EMPTY: is_empty, _SHORT: is_short, _LONG: is_long}
    dropped = {reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()}
    return np.flatnonzero(~(is_empty | is_short | is_long)), dropped


def in_words(dropped: dict[str, int]) -> str:
    """Counts by reason for messages, such as `2 empty, 1 longer than max_token_size`."""
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def split_documents(num_documents: int, test_split: float, shuffle: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the training and the validation documents, int64, ascending.

    A share below 1 keeps at least one document for validation if there are two. At least one document trains.

    Raises:
        ConfigError: the share or number is negative, not whole, or leaves nothing to train on.
    """
    if test_split < 0 or (test_split >= 1 and test_split != int(test_split)):
        raise ConfigError("data.test_split", "is out of range", found=test_split, rule="a share below 1, or a number")
    if test_split >= num_documents:
        raise ConfigError(
            "data.test_split", f"leaves none of {num_documents} documents for training", found=int(test_split)
        )
    count = int(test_split) if test_split >= 1 else round(test_split * num_documents)
    if 0 < test_split < 1:
        count = min(max(count, 1), num_documents - 1)
    if shuffle:
        chosen = np.array(sorted(random.Random(seed).sample(range(num_documents), count)), np.int64)
    else:
        chosen = np.arange(num_documents - count, num_documents)
    return np.setdiff1d(np.arange(num_documents), chosen, assume_unique=True), chosen
