"""Tokenizers in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.tokenizer_base import id_dtype, utf8
from trainer.errors import ConfigError

__all__ = ["AutoTokenizerOptions", "HuggingFaceTokenizer"]


@dataclass(frozen=True)
class AutoTokenizerOptions:
    """`data.autoTokenizer`."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of AutoTokenizer.from_pretrained."""
    props: Mapping[str, Any] = field(default_factory=dict)
    """Attributes set afterwards."""
    add_special_tokens: bool = False
    """Whether each text gets the special tokens of the tokenizer, such as one for its beginning."""

    @classmethod
    def from_setting(cls, value: Mapping[str, Any] | None) -> AutoTokenizerOptions:
        """The setting's value, checked.

        Raises:
            ConfigError: a key or value is not allowed.
        """
        values = {key: given for key, given in (value or {}).items() if given is not None}
        kinds = {"kwargs": dict, "props": dict, "add_special_tokens": bool}
        for key, given in values.items():
            if key not in kinds:
                raise ConfigError(f"data.autoTokenizer.{key}", "is unknown", rule=", ".join(kinds))
            if not isinstance(given, kinds[key]):
                rule = "true or false" if kinds[key] is bool else "a mapping"
                raise ConfigError(f"data.autoTokenizer.{key}", "has the wrong type", found=str(given), rule=rule)
        if values.get("kwargs", {}).get("trust_remote_code"):
            problem = "would run code from the tokenizer's folder"
            raise ConfigError("data.autoTokenizer.kwargs.trust_remote_code", problem, fix="remove it")
        return cls(**values)

    def suffix(self) -> str:
        """Part of a tokenizer's digest; "" for the defaults."""
        if self == AutoTokenizerOptions():
            return ""
        text = json.dumps([dict(self.kwargs), dict(self.props), self.add_special_tokens], sort_keys=True, default=str)
        return f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class HuggingFaceTokenizer:
    """A local tokenizer in Hugging Face's format. No code from the folder runs.

    Args:
        path: a tokenizer.json, or a folder. Without tokenizer.json, or with `options`, transformers reads it.
        options: how transformers makes it, and whether special tokens are added.

    Raises:
        ConfigError: the files cannot be read.
    """

    end_of_document = 0

    def __init__(self, path: Path, options: AutoTokenizerOptions = AutoTokenizerOptions()) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        is_plain = file.is_file() and not options.kwargs and not options.props
        try:
            self._core, vocabulary = _fast_tokenizer(file) if is_plain else _transformers_tokenizer(path, options)
        except ConfigError:
            raise
        # Both libraries raise bare Exception for malformed files.
        except Exception as error:
            raise ConfigError(
                "data.tokenizer",
                f"{path} cannot be read as a tokenizer ({error})",
                rule="world, byte, or a folder with a valid tokenizer.json",
            ) from error
        self.name = str(path)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self._add_special_tokens = options.add_special_tokens
        self.digest = f"hf-{_files_digest([file] if is_plain else sorted(_folder(path).iterdir()))}{options.suffix()}"

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens unless the options ask for them."""
        utf8(text)
        encoded = self._core.encode(text, add_special_tokens=self._add_special_tokens)
        return list(encoded if isinstance(encoded, list) else encoded.ids)

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as uint16, or int32 for more than 65536 tokens."""
        return np.array(self.encode(text), id_dtype(self.vocab_size))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Id 0 and unknown ids give nothing."""
        known = [int(token_id) for token_id in ids if 0 < int(token_id) < self.vocab_size]
        return str(self._core.decode(known, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> None:
        """None: the bytes of a single token are not defined for every Hugging Face tokenizer."""


def _fast_tokenizer(file: Path) -> tuple[Any, dict[str, int]]:
    import tokenizers

    core = tokenizers.Tokenizer.from_file(str(file))
    core.no_truncation()
    core.no_padding()
    return core, core.get_vocab(with_added_tokens=True)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _transformers_tokenizer(path: Path, options: AutoTokenizerOptions) -> tuple[Any, dict[str, int]]:
    import transformers

    core = transformers.AutoTokenizer.from_pretrained(
        str(_folder(path)), **{**options.kwargs, "trust_remote_code": False, "local_files_only": True}
    )
    for name, value in options.props.items():
        if not hasattr(core, name):
            raise ConfigError("data.autoTokenizer.props", f"this tokenizer has no {name}")
        setattr(core, name, value)
    return core, core.get_vocab()


def _files_digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        if file.is_file() and file.stat().st_size < 1 << 27:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
