"""Tokenizer of RWKV-7 models for transformers: greedy longest match over a list of byte strings.

The vocabulary file has one token per line: its id, a Python literal, its length in bytes. Id 0 is
`<|endoftext|>`, which ends a document; it is the padding too.
"""

from __future__ import annotations

import ast
import os
import shutil
from typing import Any

from transformers import PreTrainedTokenizer

VOCABULARY_FILE = "rwkv_vocab_v20230424.txt"
END_OF_TEXT = "<|endoftext|>"


def as_text(token: bytes) -> str:
    """A token as a string; bytes that are no UTF-8 become lone surrogates, so that nothing is lost."""
    return token.decode("utf-8", errors="surrogateescape")


def as_bytes(token: str) -> bytes:
    """The inverse of `as_text`."""
    return token.encode("utf-8", errors="surrogateescape")


def read_vocabulary(path: str) -> dict[bytes, int]:
    """Token -> id of a vocabulary file."""
    vocabulary: dict[bytes, int] = {}
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            line = line.strip("\r\n")
            if line:
                token_id, rest = line.split(" ", 1)
                literal = ast.literal_eval(rest.rsplit(" ", 1)[0])
                vocabulary[literal.encode() if isinstance(literal, str) else literal] = int(token_id)
    return vocabulary


class RWKV7Tokenizer(PreTrainedTokenizer):
    """Ids are those of the official tokenizer. No normalisation, no special tokens but `<|endoftext|>` and added ones."""

    vocab_files_names = {"vocab_file": VOCABULARY_FILE}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self, vocab_file: str, eos_token: Any = END_OF_TEXT, pad_token: Any = END_OF_TEXT, **kwargs: Any
    ) -> None:
        self.vocab_file = vocab_file
        self._ids = read_vocabulary(vocab_file)
        self._tokens = {token_id: as_text(token) for token, token_id in self._ids.items()}
        self._tokens.setdefault(0, END_OF_TEXT)
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        super().__init__(eos_token=eos_token, pad_token=pad_token, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without added ones. The model may have more rows."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, with added tokens."""
        return {token: token_id for token_id, token in self._tokens.items()} | dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        content, position, found = text.encode(), 0, []
        while position < len(content):
            for length in self._lengths.get(content[position : position + 2], ()):
                token = content[position : position + length]
                if token in self._ids:
                    break
            else:
                token = content[position : position + 1]
            found.append(as_text(token))
            position += len(token)
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return 0 if token == END_OF_TEXT else self._ids[as_bytes(token)]

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens.get(index, "")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens; incomplete UTF-8 gives U+FFFD."""
        return b"".join(map(as_bytes, tokens)).decode("utf-8", errors="replace")

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The ids as they are: nothing is added around a text."""
        return token_ids_0 + (token_ids_1 or [])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the vocabulary file."""
        name = (f"{filename_prefix}-" if filename_prefix else "") + VOCABULARY_FILE
        path = os.path.join(save_directory, name)
        if os.path.abspath(path) != os.path.abspath(self.vocab_file):
            shutil.copyfile(self.vocab_file, path)
        return (path,)
