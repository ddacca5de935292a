"""Writing checkpoints step-N, and reading their files back bit for bit.

Layout of a folder: any number of .safetensors and .json files, chosen by the training side, and the manifest.
Fixed names: MODEL_FILE with the weights under official names in the dtype of the forward pass (or ADAPTER_FILE with
what a run has trained, where that is not everything), one rank_file per process, and the files of
`trainer.checkpoint.pieces`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.atomic import atomic_folder, prune, require_space
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.verify import read_manifest
from trainer.errors import CheckpointError

__all__ = [
    "ADAPTER_FILE",
    "MODEL_FILE",
    "CheckpointPayload",
    "rank_file",
    "read_checkpoint_json",
    "read_checkpoint_tensors",
    "step_folder",
    "write_checkpoint",
    "write_payload_files",
]

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"


def rank_file(rank: int, suffix: str = ".safetensors") -> str:
    """Name of the file with what only one process knows: its lane states and random state."""
    return f"rank-{rank:05d}{suffix}"


def step_folder(directory: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return directory / f"step-{step}"


@dataclass(frozen=True, kw_only=True)
class CheckpointPayload:
    """What goes into a checkpoint: files of tensors, files of plain values, and facts for the manifest."""

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """File name ending in .safetensors -> name -> tensor of any dtype, device and stride."""
    documents: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """File name ending in .json -> values that JSON can hold."""
    world_size: int = 1
    """Processes of the run."""
    config_digest: str = ""
    """Digest of the settings that must not change at resume."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further entries of the manifest."""

    def num_bytes(self) -> int:
        """Bytes of all tensors: what the disk must have room for, but for a few kilobytes."""
        files = self.tensors.values()
        return sum(tensor.numel() * tensor.element_size() for file in files for tensor in file.values())

    def facts(self, step: int) -> dict[str, object]:
        """Entries of the manifest."""
        facts = {"step": step, "world_size": self.world_size, "config_digest": self.config_digest}
        return {**self.extra, **facts}


def write_payload_files(folder: Path, payload: CheckpointPayload) -> None:
    """Write a payload's files into a folder of begin_folder. Each process of a run may write its own.

    Raises:
        OSError: if a file cannot be written; atomic_folder and commit_folder explain it to the user.
    """
    for name, tensors in payload.tensors.items():
        save_safetensors(folder / name, tensors)
    for name, document in payload.documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")


def write_checkpoint(directory: Path, step: int, payload: CheckpointPayload, *, keep: int = 0) -> Path:
    """Write the checkpoint step-N whole or not at all, then remove those older than the newest `keep`.

    Args:
        directory: the run's checkpoint folder; it must exist.
        step: optimizer steps done.
        payload: the content.
        keep: newest checkpoints that stay; 0 = all.

    Returns:
        The new folder.

    Raises:
        StorageError: if it cannot be written; older checkpoints are untouched.
    """
    needed = payload.num_bytes()
    target = step_folder(directory, step)
    require_space(directory, needed)
    with atomic_folder(target, payload.facts(step), needed) as temp:
        write_payload_files(temp, payload)
    prune(directory, keep)
    return target


def _listed(folder: Path, name: str) -> Path:
    if name not in read_manifest(folder).files:
        raise CheckpointError(folder, f"{name} is not part of this checkpoint")
    return folder / name


def read_checkpoint_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of one file of a verified checkpoint, on the CPU, with the bits that were written.

    Raises:
        CheckpointError: if the manifest does not list the file, or it cannot be read.
    """
    return load_safetensors(_listed(folder, name))


def read_checkpoint_json(folder: Path, name: str) -> dict[str, Any]:
    """Content of one JSON file of a verified checkpoint.

    Raises:
        CheckpointError: if the manifest does not list the file, or it cannot be read.
    """
    path = _listed(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(path, f"cannot be read: {err}") from err
    if not isinstance(content, dict):
        raise CheckpointError(path, f"holds a {type(content).__name__}", rule="a JSON object")
    return content
