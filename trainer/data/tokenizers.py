"""Text to token ids and back.

Three kinds: `world` (the RWKV vocabulary of 2023-04-24), `byte`, and any local Hugging Face tokenizer. In all
of them id 0 ends a document and has no text. The world vocabulary is read from an installed package, never
from this repository.
"""

from __future__ import annotations

import abc
import ast
import codecs
import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.added_tokens import AddedTokens, read_added_tokens
from trainer.data.hf_tokenizer import AutoTokenizerOptions, HuggingFaceTokenizer
from trainer.data.tokenizer_base import Tokenizer, utf8
from trainer.errors import ConfigError
from trainer.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BYTE_VOCABULARY_FILE",
    "END_OF_TEXT",
    "VERSION",
    "WORLD_VOCABULARY_FILE",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "WorldTokenizer",
    "built_in_tokenizer",
    "get_tokenizer",
    "holds_tokenizer",
    "read_world_vocabulary",
]

VERSION = 1
"""Raise it when the ids of any text change; prepared data sets are then rebuilt."""

END_OF_TEXT = "<|endoftext|>"
WORLD_VOCABULARY_FILE = "rwkv_vocab_v20230424.txt"
BYTE_VOCABULARY_FILE = "byte_vocab.txt"
"""Name of the byte tokenizer's vocabulary in a Hugging Face folder."""
_SHORT_NAMES = {"neox": "EleutherAI/gpt-neox-20b"}
_WORLD_VOCAB_SIZE = 65536
_BUILT_IN_BY_SIZE = {_WORLD_VOCAB_SIZE: "world", 257: "byte", 272: "byte", 512: "byte"}
_WORLD_SHA256 = "e6dee3d4e31b4d5c40ac99508ac6c701ceef4bed681bf2167ce9a908552bca89"
_WORLD_FILES = (
    ("pyrwkv_tokenizer", WORLD_VOCABULARY_FILE),
    ("rwkv", WORLD_VOCABULARY_FILE),
)
# Long texts are encoded in pieces of this many characters, because the Rust core returns Python integers (36 bytes each).
_PIECE_CHARS = 1 << 20
_LONGEST_TOKEN_BYTES = 128

logger = get_logger(__name__)


def get_tokenizer(
    name: str, *, world_add_endoftext_token: bool = True, auto_tokenizer: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Args:
        name: `world`, `byte`, the path of a local Hugging Face tokenizer (folder or tokenizer.json; a folder with the
            world or byte vocabulary is that tokenizer, with the tokens added there), the name of one in the local
            cache of the Hub, or `neox`, short for EleutherAI/gpt-neox-20b.
        world_add_endoftext_token: let the text `<|endoftext|>` encode to 0 with the world tokenizer.
        auto_tokenizer: data.autoTokenizer, for Hugging Face tokenizers.

    Raises:
        ConfigError: the name is none of these, the vocabulary cannot be read, or the options do not fit.
    """
    options = AutoTokenizerOptions.from_setting(auto_tokenizer)
    return _cached_tokenizer(name, world_add_endoftext_token, json.dumps(dataclasses.asdict(options)))


def built_in_tokenizer(vocab_size: int) -> str | None:
    """Name of the tokenizer that models with this many embedding rows are trained with, if the size tells."""
    return _BUILT_IN_BY_SIZE.get(vocab_size)


@functools.lru_cache(maxsize=8)
def _cached_tokenizer(name: str, world_add_endoftext_token: bool, options: str) -> Tokenizer:
    auto = AutoTokenizerOptions(**json.loads(options))
    tokenizer = _make_tokenizer(name, world_add_endoftext_token, auto)
    if auto != AutoTokenizerOptions() and not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ConfigError("data.autoTokenizer", f"acts only with a Hugging Face tokenizer, not {name}", fix="remove it")
    return tokenizer


def _make_tokenizer(name: str, world_add_endoftext_token: bool, auto: AutoTokenizerOptions) -> Tokenizer:
    if name == "world":
        return WorldTokenizer(add_endoftext_token=world_add_endoftext_token)
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.exists():
        base = _base_in_folder(path, world_add_endoftext_token)
        if base is None:
            return HuggingFaceTokenizer(path, auto)
        added = read_added_tokens(path)
        return AddedTokens(base, added, str(path)) if added else base
    cached = _in_hub_cache(_SHORT_NAMES.get(name, name))
    if cached is not None:
        return HuggingFaceTokenizer(cached, auto)
    raise ConfigError(
        "data.tokenizer",
        "is no built-in tokenizer and no local path",
        found=name,
        rule="world, byte, the path of a folder that holds tokenizer.json, or a name in the local cache of the Hub",
        fix=f"hf download {_SHORT_NAMES.get(name, name)} tokenizer.json"
        if name in _SHORT_NAMES or "/" in name
        else None,
    )


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has tokenizer files that `get_tokenizer` reads."""
    return any((folder / name).is_file() for name in (WORLD_VOCABULARY_FILE, BYTE_VOCABULARY_FILE, "tokenizer.json"))


def _base_in_folder(folder: Path, world_add_endoftext_token: bool) -> WorldTokenizer | ByteTokenizer | None:
    """The tokenizer of our own whose vocabulary lies in a Hugging Face folder."""
    if (folder / BYTE_VOCABULARY_FILE).is_file():
        return ByteTokenizer()
    vocabulary = folder / WORLD_VOCABULARY_FILE
    if not vocabulary.is_file():
        return None
    _check_world_vocabulary(vocabulary, "copy it from a model with that tokenizer")
    return WorldTokenizer(add_endoftext_token=world_add_endoftext_token)


def _in_hub_cache(name: str) -> Path | None:
    """tokenizer.json of a model of the Hugging Face Hub, if it was downloaded before; never asks the network."""
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None


def read_world_vocabulary() -> list[bytes]:
    """Bytes of each of the 65536 ids of the world tokenizer; b"" for 0 and the unused ids 65530 and above.

    Raises:
        ConfigError: no installed package holds the vocabulary, or it is not the known one.
    """
    content = _check_world_vocabulary(_find_world_vocabulary(), "pip install --force-reinstall pyrwkv-tokenizer")
    table = [b""] * _WORLD_VOCAB_SIZE
    for line in content.decode().split("\n"):
        if line:
            token_id, rest = line.split(" ", 1)
            literal = ast.literal_eval(rest.rsplit(" ", 1)[0])
            table[int(token_id)] = literal.encode() if isinstance(literal, str) else literal
    return table


def _check_world_vocabulary(path: Path, fix: str) -> bytes:
    content = path.read_bytes().replace(b"\r\n", b"\n")
    digest = hashlib.sha256(content).hexdigest()
    if digest != _WORLD_SHA256:
        raise ConfigError(
            path,
            "is not the world vocabulary of 2023-04-24",
            found=f"sha256 {digest[:16]}...",
            rule=f"sha256 {_WORLD_SHA256[:16]}...",
            fix=fix,
        )
    return content


def _find_world_vocabulary() -> Path:
    for package, filename in _WORLD_FILES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / filename
            if path.is_file():
                return path
    raise ConfigError("data.tokenizer", "the world vocabulary is not installed", fix="pip install pyrwkv-tokenizer")


@functools.cache
def _world_table() -> list[bytes]:
    return read_world_vocabulary()


class _GreedyMatcher:
    """Longest match at every position, in plain Python: the definition of the world encoding.

    Tokens are grouped by their first two bytes, so that a position tries a few lengths only.
    """

    def __init__(self, table: list[bytes]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(table) if token}
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}

    def encode(self, content: bytes) -> list[int]:
        """Ids of any bytes; single bytes always match."""
        ids, lengths = self._ids, self._lengths
        found: list[int] = []
        position = 0
        while position < len(content):
            for length in lengths.get(content[position : position + 2], ()):
                token_id = ids.get(content[position : position + length])
                if token_id is not None:
                    break
            else:
                length, token_id = 1, ids[content[position : position + 1]]
            found.append(token_id)
            position += length
        return found


@functools.cache
def _world_matcher() -> _GreedyMatcher:
    return _GreedyMatcher(_world_table())


@functools.cache
def _world_core() -> Callable[[str], list[int]]:
    """The fast encoder of valid text: the Rust core, or the Python definition where that cannot be loaded."""
    try:
        import pyrwkv_tokenizer

        encode: Callable[[str], list[int]] = pyrwkv_tokenizer.RWKVTokenizer().encode
        return encode
    except ImportError as error:
        logger.warning("pyrwkv-tokenizer cannot be loaded (%s): encoding runs about 25 times slower", error)
        return lambda text: _world_matcher().encode(text.encode())


class _BytesTokenizer(abc.ABC):
    """Shared by tokenizers whose tokens are byte strings."""

    end_of_document = 0

    @abc.abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Ids as uint16."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of the id."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without an end-of-document id."""
        return list(self.encode_array(text).tolist())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`. Id 0 and unknown ids give nothing; incomplete UTF-8 gives U+FFFD."""
        return b"".join(self.token_bytes(int(token_id)) for token_id in ids).decode("utf-8", errors="replace")


class WorldTokenizer(_BytesTokenizer):
    """Greedy longest match over the RWKV vocabulary: no merges, no normalisation, no special tokens.

    Args:
        add_endoftext_token: let each `<|endoftext|>` in a text become id 0.
        use_rust: encode with the Rust core; False runs the Python definition (25 times slower, same ids).
    """

    def __init__(self, *, add_endoftext_token: bool = True, use_rust: bool = True) -> None:
        self.name = "world"
        self.vocab_size = _WORLD_VOCAB_SIZE
        self.digest = f"world-{_WORLD_SHA256[:16]}-{'endoftext' if add_endoftext_token else 'plain'}"
        self._add_endoftext_token = add_endoftext_token
        self._use_rust = use_rust

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as uint16."""
        utf8(text)
        if not self._add_endoftext_token:
            return self._encode_plain(text)
        end = np.zeros(1, np.uint16)
        parts: list[np.ndarray] = []
        for piece in text.split(END_OF_TEXT):
            parts += [end, self._encode_plain(piece)]
        return np.concatenate(parts[1:])

    def encode_bytes(self, content: bytes) -> list[int]:
        """Ids of any bytes, valid UTF-8 or not; `<|endoftext|>` is ordinary text here."""
        return _world_matcher().encode(content)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of the id; b"" for 0 and for ids that the vocabulary lacks."""
        return _world_table()[token_id] if 0 <= token_id < _WORLD_VOCAB_SIZE else b""

    def _encode_plain(self, text: str) -> np.ndarray:
        encode = _world_core() if self._use_rust else lambda piece: _world_matcher().encode(piece.encode())
        parts: list[np.ndarray] = []
        start = 0
        while len(text) - start > _PIECE_CHARS:
            piece = text[start : start + _PIECE_CHARS]
            ids = encode(piece)
            keep, unsure = self._settled(ids)
            parts.append(np.fromiter(ids[:keep], np.uint16, keep))
            start += len(piece) - unsure
        ids = encode(text[start:])
        parts.append(np.fromiter(ids, np.uint16, len(ids)))
        return np.concatenate(parts)

    @staticmethod
    def _settled(ids: list[int]) -> tuple[int, int]:
        """How many ids no later text can change, and how many characters the other ids cover.

        A token depends on the 128 bytes after its start (the longest token) and on nothing before it, so
        encoding may start anew at any token that begins at a character.
        """
        table, keep, tail = _world_table(), len(ids), b""
        while len(tail) < _LONGEST_TOKEN_BYTES or tail[0] & 0xC0 == 0x80:
            keep -= 1
            tail = table[ids[keep]] + tail
        return keep, len(tail.decode())


class ByteTokenizer(_BytesTokenizer):
    """One token per UTF-8 byte: id = byte + 1, and 0 ends a document."""

    def __init__(self) -> None:
        self.name = "byte"
        self.vocab_size = 257
        self.digest = "byte"

    def encode_array(self, text: str) -> np.ndarray:
        """Ids as uint16."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.uint16) + np.uint16(1)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte of the id; b"" for 0 and ids above 256."""
        return bytes([token_id - 1]) if 1 <= token_id <= 256 else b""


class StreamDecoder:
    """Turns ids, one at a time, into text that never ends inside a character.

    The pieces joined are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; "" while a character is unfinished."""
        content = self._tokenizer.token_bytes(int(token_id))
        if content is not None:
            return self._utf8.decode(content)
        self._pending.append(int(token_id))
        text = self._pending_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left: "" or, if the ids end inside a character, U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        if self._pending:
            text += self._pending_text()
            self._pending = []
        return text

    def _pending_text(self) -> str:
        # Decoding a token alone drops the leading space in some vocabularies: decode it behind the tokens before it.
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]
