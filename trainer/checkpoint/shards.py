"""Weight files of a folder in Hugging Face's form: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from trainer.errors import CheckpointError

__all__ = [
    "INDEX_SUFFIX",
    "SINGLE_FILE",
    "UNUSED_FILE",
    "check_model_type",
    "plan_shards",
    "shard_index",
    "weight_files",
]

SINGLE_FILE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
UNUSED_FILE = "unused_block0.safetensors"
"""Official tensors that the layout has no place for; loaders of the layout pass it over, ours reads it back."""
_PLAIN_FILES = (SINGLE_FILE, "pytorch_model.bin")


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(path, f"cannot be read ({err})", fix="copy or download it again") from err
    if not isinstance(content, dict):
        raise CheckpointError(path, f"holds a {type(content).__name__}", rule="a JSON object")
    return content


def check_model_type(folder: Path) -> None:
    """Refuse a folder whose config.json names another architecture.

    Raises:
        CheckpointError: naming it; or if config.json cannot be read.
    """
    path = folder / "config.json"
    if path.is_file():
        kind = _read_json(path).get("model_type", "rwkv7")
        if kind != "rwkv7":
            raise CheckpointError(path, "is of another architecture", found=str(kind), rule="model_type rwkv7")


def weight_files(path: Path) -> list[Path] | None:
    """Files that hold the weights of a folder or of an index file; None if it is neither.

    Raises:
        CheckpointError: if an index cannot be read, or a file that it names is missing.
    """
    if path.name.endswith(INDEX_SUFFIX):
        return _files_of_index(path)
    for name in _PLAIN_FILES:
        if (path / f"{name}{INDEX_SUFFIX}").is_file():
            return _files_of_index(path / f"{name}{INDEX_SUFFIX}")
        if (path / name).is_file():
            return [path / name]
    return None


def _files_of_index(index: Path) -> list[Path]:
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(index, "has no weight_map", rule="the index of sharded weights")
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if PurePosixPath(name).name != name:
            raise CheckpointError(index, "names a file outside of its folder", found=name)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        problem = f"names {len(names)} files, of which {len(missing)} are missing, such as {missing[0]}"
        raise CheckpointError(index, problem, fix="copy or download the folder again")
    return [index.parent / name for name in names]


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> names of the tensors in it; files of at most `max_bytes` unless one tensor is larger.

    Args:
        sizes: name of a tensor -> bytes as stored.
        max_bytes: size of a file.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, 1)}


def shard_index(shards: Mapping[str, list[str]], total_bytes: int) -> dict[str, object]:
    """Content of the index file of shards."""
    table = {name: file for file, names in shards.items() for name in names}
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(table.items()))}
