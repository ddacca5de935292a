"""What every tokenizer here offers, and what they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from trainer.errors import DataError

__all__ = ["Tokenizer", "id_dtype", "utf8"]


class Tokenizer(Protocol):
    """What the rest of the product needs of a tokenizer."""

    name: str
    vocab_size: int
    """All ids are below this."""
    digest: str
    """Changes when the ids of any text may change."""
    end_of_document: int
    """Id that ends a document; 0 for every tokenizer here."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document id. DataError if it holds a lone surrogate."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same as a uint16 array, int32 if `vocab_size` needs it; made for documents of any length."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Id 0 and unknown ids give nothing; incomplete UTF-8 gives U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """UTF-8 bytes that the id stands for, or None if this tokenizer cannot say."""


def utf8(text: str) -> bytes:
    """UTF-8 of `text`; DataError at a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            "text",
            f"character {error.start} is a lone surrogate, which no text file can hold",
            found=f"U+{ord(text[error.start]):04X}",
            fix="repair or drop the document",
        ) from None


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Integer type of ids below `vocab_size`: uint16 up to 65536."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
