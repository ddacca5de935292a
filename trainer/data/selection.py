"""Which documents stay, and which of them are kept for validation. Works on token counts alone."""

from __future__ import annotations

import random

import numpy as np

from trainer.config.schema import DataConfig
from trainer.errors import ConfigError

__all__ = ["document_window", "in_words", "keep_documents", "order_documents", "split_documents"]

_EMPTY, _SHORT, _LONG = "empty", "shorter than min_token_size", "longer than max_token_size"
_OUTSIDE, _UNTRAINED = "outside of dataset_offset and dataset_length", "without a token to train"


def keep_documents(
    data: DataConfig, sizes: np.ndarray, trained: np.ndarray | None = None, window: slice = slice(None)
) -> tuple[np.ndarray, dict[str, int]]:
    """Numbers of the documents that stay, and how many go for which reason.

    Args:
        data: the `data:` settings.
        sizes: int64 [documents], tokens.
        trained: int64 [documents], tokens that are trained; None = all.
        window: the documents that dataset_offset and dataset_length choose.
    """
    is_outside = np.ones(len(sizes), bool)
    is_outside[window] = False
    left = ~is_outside
    dropped = {_OUTSIDE: int(is_outside.sum())}
    tests = {
        _EMPTY: sizes <= int(data.append_end_of_document),
        _SHORT: sizes < data.min_token_size,
        _LONG: (sizes > data.max_token_size) if data.max_token_size >= 0 else np.zeros(len(sizes), bool),
        # A single token has nothing to predict, but is no fault of the mask.
        _UNTRAINED: (trained == 0) & (sizes > 1) if trained is not None else np.zeros(len(sizes), bool),
    }
    for reason, mask in tests.items():
        dropped[reason] = int((left & mask).sum())
        left &= ~mask
    return np.flatnonzero(left), {reason: count for reason, count in dropped.items() if count}


def document_window(num: int, offset: float, length: float) -> slice:
    """The documents that `dataset_offset` and `dataset_length` choose of `num`.

    Raises:
        ConfigError: none are left.
    """
    start = 0 if offset < 0 else int(offset) if offset >= 1 else round(offset * num)
    count = num if length < 0 else int(length) if length >= 1 else round(length * num)
    if num and (start >= num or count < 1):
        raise ConfigError(
            "data.dataset_offset", f"and dataset_length leave none of {num} records", found=f"{offset:g}, {length:g}"
        )
    return slice(start, start + count)


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


def order_documents(data: DataConfig, documents: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Numbers of the training documents in the order in which they are saved."""
    if data.sort_by_length:
        order = sizes[documents] if data.sort_asc else -sizes[documents]
        documents = documents[np.argsort(order, kind="stable")]
    return documents[::-1].copy() if data.reverse_train_dataset_before_save else documents
