"""Exporting a folder in Hugging Face's form: config, weights in one file or shards, tokenizer, code."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.atomic import atomic_folder, file_sha256
from trainer.checkpoint.hf_tokenizer import REMOTE_CODE, TOKENIZER_FILES, as_json, tokenizer_files
from trainer.checkpoint.shards import INDEX_SUFFIX, SINGLE_FILE, UNUSED_FILE, plan_shards, shard_index
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.values import own_copies, require_same
from trainer.errors import CheckpointError, ConfigError, StorageError
from trainer.model.hf_layout import hf_config, to_hf, unused_names
from trainer.model.lazy import shapes_of
from trainer.model.naming import shape_from_weights

__all__ = ["HfOptions", "tokenizer_folder", "write_hf_folder"]

_CODE_FILES = ("configuration_rwkv7.py", "modeling_rwkv7.py")
_REPLACEABLE = TOKENIZER_FILES | {
    "config.json",
    "generation_config.json",
    UNUSED_FILE,
    SINGLE_FILE,
    SINGLE_FILE + INDEX_SUFFIX,
    *_CODE_FILES,
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_AUTO_MAP = {
    "AutoConfig": "configuration_rwkv7.RWKV7Config",
    "AutoModel": "modeling_rwkv7.RWKV7Model",
    "AutoModelForCausalLM": "modeling_rwkv7.RWKV7ForCausalLM",
}


@dataclass(frozen=True)
class HfOptions:
    """What an export has besides the weights."""

    with_code: bool = True
    """Bring the Python files that let transformers load the folder without another package."""
    tokenizer: str | Mapping[str, bytes] = "auto"
    """A name for `tokenizer_files`, or such files."""
    max_shard_bytes: int = 5 * 10**9
    """Size of a weight file."""


def _check_target(out: Path) -> None:
    _check_replaceable(out, _REPLACEABLE)
    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise StorageError(out, "exists and is no export", fix="choose another output folder")


def _check_replaceable(out: Path, known: Collection[str]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise StorageError(out, "exists and is no folder", fix="choose another output folder")
    names = sorted(path.name for path in out.iterdir())
    foreign = next((name for name in names if name not in known and not _SHARD.fullmatch(name)), None)
    if foreign is not None:
        problem = f"exists and holds {foreign}, which no export writes"
        raise StorageError(out, problem, fix="choose another output folder")


@contextmanager
def tokenizer_folder(files: Mapping[str, bytes], out: Path) -> Iterator[None]:
    """Write tokenizer files as a folder once the block has ended well; what could be in the way is refused before.

    Raises:
        StorageError: if it cannot be written, or `out` holds something else.
    """
    _check_replaceable(out, TOKENIZER_FILES)
    yield
    with atomic_folder(out, None) as temp:
        for name, content in files.items():
            (temp / name).write_bytes(content)


def _config(weights: Mapping[str, Tensor], dtype: torch.dtype, options: HfOptions) -> dict[str, Any]:
    shape = shape_from_weights(shapes_of(weights))
    if shape.head_size != 64:
        raise ConfigError(
            "--format hf",
            "this layout ties the norm's epsilon to the head size",
            found=f"head_size {shape.head_size}",
            rule="head_size 64",
            fix="use --format pth or safetensors",
        )
    config = hf_config(shape, str(dtype).removeprefix("torch."))
    if options.with_code:
        config |= {
            "num_attention_heads": shape.num_heads,
            "attention_hidden_size": shape.n_embd,
            "auto_map": _AUTO_MAP,
            "rwkv7_hf_adapter_layout": "reference",
        }
    return config


def _small_files(config: dict[str, Any], options: HfOptions) -> dict[str, bytes]:
    files = {
        "config.json": as_json(config),
        "generation_config.json": as_json({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}),
    }
    if options.with_code:
        files |= {name: (REMOTE_CODE / name).read_bytes() for name in _CODE_FILES}
    if not isinstance(options.tokenizer, str):
        return files | dict(options.tokenizer)
    return files | tokenizer_files(options.tokenizer, int(config["vocab_size"]))


def write_hf_folder(
    weights: Mapping[str, Tensor], out: Path, dtype: torch.dtype, options: HfOptions
) -> tuple[int, str]:
    """Write a folder that transformers, `rwkv7-hf` and flash-linear-attention load; whole and read back, or not at all.

    Args:
        weights: official name -> tensor.
        out: folder to write; an earlier export there is replaced, anything else refused.
        dtype: stored type.
        options: code, tokenizer, shards.

    Returns:
        Bytes of all files, and a SHA-256 over the names and digests of the weight files.

    Raises:
        ConfigError: if the model does not fit the layout, or the tokenizer cannot be read.
        StorageError: if it cannot be written, does not read back, or `out` holds something else.
    """
    _check_target(out)
    files = _small_files(_config(weights, dtype, options), options)
    converted = to_hf(weights)
    sizes = {name: math.prod(size) * dtype.itemsize for name, size in converted.shapes.items()}
    shards, total = plan_shards(sizes, options.max_shard_bytes), sum(sizes.values())
    if len(shards) > 1:
        files[SINGLE_FILE + INDEX_SUFFIX] = as_json(shard_index(shards, total))
    contents = {file: own_copies(converted.only(names), dtype) for file, names in shards.items()}
    contents[UNUSED_FILE] = own_copies({name: weights[name] for name in unused_names()}, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out, None, total + sum(map(len, files.values()))) as temp:
        for name, content in files.items():
            (temp / name).write_bytes(content)
        digest = hashlib.sha256()
        for file, copies in contents.items():
            save_safetensors(temp / file, copies, metadata={"format": "pt"})
            try:
                require_same(load_safetensors(temp / file), copies, out / file)
            except CheckpointError as err:
                raise StorageError(out / file, f"does not read back: {err.problem}", fix="export again") from err
            digest.update(f"{file} {file_sha256(temp / file)}\n".encode())
        size = sum(path.stat().st_size for path in temp.iterdir())
    return size, digest.hexdigest()
