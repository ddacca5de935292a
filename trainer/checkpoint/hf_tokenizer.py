"""Tokenizer files of Hugging Face exports: our own for the world and byte tokenizers, a copy of any other."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.tokenizers import (
    BYTE_VOCABULARY_FILE,
    END_OF_TEXT,
    WORLD_VOCABULARY_FILE,
    built_in_tokenizer,
    get_tokenizer,
    holds_tokenizer,
    read_world_vocabulary,
)
from trainer.errors import ConfigError
from trainer.logs import get_logger

__all__ = [
    "CHAT_TEMPLATE",
    "REMOTE_CODE",
    "TOKENIZER_FILES",
    "as_json",
    "extended_tokenizer",
    "pick_tokenizer_name",
    "tokenizer_files",
]

logger = get_logger(__name__)

REMOTE_CODE = Path(__file__).parent / "remote_code"
"""Folder of the Python files that exports bring along."""
_CODE_FILE = "tokenization_rwkv7.py"
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    WORLD_VOCABULARY_FILE,
    BYTE_VOCABULARY_FILE,
    _CODE_FILE,
)
TOKENIZER_FILES = frozenset(_COPIED)
"""Names of all files that an export's tokenizer may consist of."""

# Renders what the chat template rwkv_g1 of this trainer does: turns apart by blank lines, none inside a user's turn.
CHAT_TEMPLATE = r"""
{%- macro without_blank_lines(text) -%}
{%- for line in text.replace('\r\n', '\n').split('\n') if line.strip(' \t') -%}
{{ line }}{{ '' if loop.last else '\n' }}
{%- endfor -%}
{%- endmacro -%}
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro listing(items) -%}
{%- for item in items -%}{{ item | tojson }}{{ '' if loop.last else '\n' }}{%- endfor -%}
{%- endmacro -%}
{%- if tools and messages[0].role not in ('system', 'developer') -%}
{{ 'System: Tools:\n' + listing(tools) + '\n\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message.role -%}
{%- if role == 'assistant' -%}
{%- set text = text_of(message.content).replace('\r\n', '\n') | trim -%}
{%- set reasoning = message.reasoning_content or message.thinking -%}
{%- if reasoning -%}{%- set text = '<think>\n' + reasoning | trim + '\n</think>\n' + text -%}{%- endif -%}
{%- if message.tool_calls -%}
{%- set text = text + ('\n' if text else '') + '```json\n' + listing(message.tool_calls) + '\n```' -%}
{%- endif -%}
{{ 'Assistant:' + (' ' + text if text else '') }}
{%- else -%}
{%- set text = without_blank_lines(text_of(message.content)) | trim -%}
{%- if role == 'tool' -%}{%- set text = 'Function output:\n' + text -%}{%- endif -%}
{%- set text = ('System:' if role in ('system', 'developer') else 'User:') + (' ' + text if text else '') -%}
{%- if tools and loop.first and role in ('system', 'developer') -%}
{%- set text = text + '\nTools:\n' + listing(tools) -%}
{%- endif -%}
{{ text }}
{%- endif -%}
{{ '' if loop.last else '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\n\nAssistant:' if messages else 'Assistant:' }}{%- endif -%}
""".strip()


def tokenizer_files(name: str, vocab_size: int) -> dict[str, bytes]:
    """File name -> content of the tokenizer files of an export.

    Args:
        name: `auto` (by the vocabulary's size), `world`, `byte`, `none`, or the path of a Hugging Face tokenizer.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: if the tokenizer cannot be read.
    """
    if name == "auto":
        found = built_in_tokenizer(vocab_size)
        if found is None:
            logger.warning(
                "a vocabulary of %d tells no tokenizer: none is exported (--tokenizer gives one)", vocab_size
            )
        name = found or "none"
    if name == "none":
        return {}
    if name == "world":
        return _own_files(WORLD_VOCABULARY_FILE, read_world_vocabulary())
    if name == "byte":
        return _own_files(BYTE_VOCABULARY_FILE, [b"", *(bytes([value]) for value in range(256))])
    return _copied_files(Path(name).expanduser())


def pick_tokenizer_name(name: str, source: Path) -> str:
    """`auto` becomes the path of the source if that is a folder with tokenizer files."""
    return str(source) if name == "auto" and holds_tokenizer(source) else name


def _own_files(vocabulary_file: str, table: Sequence[bytes]) -> dict[str, bytes]:
    code = (REMOTE_CODE / _CODE_FILE).read_text("utf-8").replace(WORLD_VOCABULARY_FILE, vocabulary_file)
    config: dict[str, Any] = {
        "tokenizer_class": "RWKV7Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_rwkv7.RWKV7Tokenizer", None]},
        "added_tokens_decoder": {"0": _entry(END_OF_TEXT, special=True)},
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        _CODE_FILE: code.encode(),
        vocabulary_file: "".join(map(_vocabulary_line, range(len(table)), table)).encode(),
        "tokenizer_config.json": as_json(config),
        "special_tokens_map.json": as_json({"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}),
    }


def _vocabulary_line(token_id: int, token: bytes) -> str:
    """One line in the form of the world vocabulary: valid UTF-8 as a text literal, other bytes as a bytes literal."""
    if not token:
        return ""
    try:
        literal = repr(token.decode())
    except UnicodeDecodeError:
        literal = repr(token)
    return f"{token_id} {literal} {len(token)}\n"


def as_json(content: object) -> bytes:
    """A JSON file's bytes."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _copied_files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"tokenizer.json": path.read_bytes()}
    files = {name: (path / name).read_bytes() for name in _COPIED if (path / name).is_file()}
    if not files:
        raise ConfigError(
            "--tokenizer", f"{path} holds no tokenizer files", rule="auto, world, byte, none, or such a folder"
        )
    return files


def extended_tokenizer(
    files: Mapping[str, bytes], tokens: Sequence[str], *, special: bool
) -> tuple[dict[str, bytes], int]:
    """Tokenizer files with further tokens, and the id of the first; the others follow it.

    Args:
        files: of `tokenizer_files`: ours, or with a tokenizer.json.
        tokens: texts that become one token each.
        special: leave them out of decoded text when special tokens are skipped.

    Raises:
        ConfigError: if a text is empty, given twice, or a token already; or the files cannot be extended.
    """
    repeated = next((text for index, text in enumerate(tokens) if text in tokens[:index]), None)
    if not tokens or "" in tokens or repeated is not None:
        raise ConfigError("--tokens", "one or more different texts are needed", found=list(tokens))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if not holds_tokenizer(folder):
            raise ConfigError("--tokenizer", "cannot be extended", rule="world, byte, or files with a tokenizer.json")
        if "tokenizer.json" in files:
            return _extended_json(files, folder, tokens, special)
        ours = get_tokenizer(str(folder))
        # The embedding of the world tokenizer has rows that no token uses: they are filled first.
        first = 1 + max(token_id for token_id in range(ours.vocab_size) if ours.token_bytes(token_id))
        known = next((text for text in tokens if len(ours.encode(text)) == 1), None)
    if known is not None:
        raise ConfigError("--tokens", f"{known!r} is a token already")
    config = json.loads(files["tokenizer_config.json"])
    for number, text in enumerate(tokens, first):
        config.setdefault("added_tokens_decoder", {})[str(number)] = _entry(text, special)
    if special:
        config["additional_special_tokens"] = [*config.get("additional_special_tokens", []), *tokens]
    return dict(files) | {"tokenizer_config.json": as_json(config)}, first


def _entry(text: str, special: bool) -> dict[str, object]:
    return {
        "content": text,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }


def _extended_json(
    files: Mapping[str, bytes], folder: Path, tokens: Sequence[str], special: bool
) -> tuple[dict[str, bytes], int]:
    import tokenizers

    path = folder / "tokenizer.json"
    core = tokenizers.Tokenizer.from_file(str(path))
    known = next((text for text in tokens if core.token_to_id(text) is not None), None)
    if known is not None:
        raise ConfigError("--tokens", f"{known!r} is a token already")
    core.add_tokens([tokenizers.AddedToken(text, normalized=False, special=special) for text in tokens])
    core.save(str(path))
    vocabulary = core.get_vocab(with_added_tokens=True)
    ids = [vocabulary[text] for text in tokens]
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ConfigError("--tokenizer", "gives new tokens no ids in order", found=ids[:3])
    extended = dict(files) | {"tokenizer.json": path.read_bytes()}
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] |= {
            str(number): _entry(text, special) for number, text in zip(ids, tokens, strict=True)
        }
        extended["tokenizer_config.json"] = as_json(config)
    return extended, ids[0]
