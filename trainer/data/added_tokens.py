"""Tokens that were added to a tokenizer: texts with ids of their own, found before anything else is encoded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.data.tokenizers import Tokenizer

__all__ = ["AddedTokens", "read_added_tokens"]


def read_added_tokens(folder: Path) -> dict[str, int]:
    """Text -> id of the tokens that a Hugging Face folder adds, without that of id 0, which ends documents.

    Raises:
        ConfigError: if its files cannot be read.
    """
    added: dict[str, int] = {}
    try:
        for name in ("tokenizer_config.json", "added_tokens.json"):
            path = folder / name
            content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
            if name == "added_tokens.json":
                added |= {str(text): int(token_id) for text, token_id in content.items()}
            else:
                entries = content.get("added_tokens_decoder", {}).items()
                added |= {str(entry["content"]): int(token_id) for token_id, entry in entries}
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError("data.tokenizer", f"{path} cannot be read ({error})") from error
    return {text: token_id for text, token_id in added.items() if token_id > 0 and text}


class AddedTokens:
    """A tokenizer with further tokens; where several begin at one place, the longest is taken.

    Args:
        base: what everything else is encoded with.
        added: text -> id.
        name: as shown to the user.
    """

    def __init__(self, base: Tokenizer, added: Mapping[str, int], name: str) -> None:
        self._base, self._ids = base, dict(added)
        self._texts = {token_id: text.encode() for text, token_id in added.items()}
        alternatives = "|".join(re.escape(text) for text in sorted(added, key=len, reverse=True))
        self._pattern = re.compile(f"({alternatives})")
        self.name = name
        self.vocab_size = max(base.vocab_size, *(token_id + 1 for token_id in added.values()))
        listing = json.dumps(sorted(added.items()))
        self.digest = f"{base.digest}-added-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
        self.end_of_document = base.end_of_document

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document id."""
        return list(self.encode_array(text).tolist())

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as uint16, or int32 for more than 65536 tokens."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        # The pattern has one group: added tokens are at odd places.
        pieces = [
            np.array([self._ids[piece]]) if place % 2 else self._base.encode_array(piece)
            for place, piece in enumerate(self._pattern.split(text))
        ]
        return np.concatenate(pieces).astype(dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of the id; b"" for 0 and unknown ids."""
        return self._texts[token_id] if token_id in self._texts else self._base.token_bytes(token_id) or b""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Id 0 and unknown ids give nothing; incomplete UTF-8 gives U+FFFD."""
        return b"".join(self.token_bytes(int(token_id)) for token_id in ids).decode("utf-8", errors="replace")
