"""Adapters as folders: tensors, what they are, and which base they belong to; merging them into the base.

    adapter.safetensors   lora_A, lora_B (and init_lora_A, init_lora_B with PiSSA), parameters trained whole, or states
    adapter.json          method, r, alpha, targets, ..., and a fingerprint of the base

A checkpoint step-N of a run that trains an adapter is such a folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.atomic import atomic_file
from trainer.checkpoint.find import find_checkpoints, newest_valid
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.write import ADAPTER_FILE
from trainer.config import ModelConfig
from trainer.config.adapters import lora_settings, state_tuning
from trainer.errors import CheckpointError
from trainer.model.lora import adapter_names, merged_matrix, part_of
from trainer.model.naming import ModelShape, parameter_shapes, shape_from_weights

__all__ = [
    "ADAPTER_INFO",
    "Adapter",
    "AdapterInfo",
    "MergedWeights",
    "adapter_shapes",
    "base_fingerprint",
    "check_adapter",
    "info_of_run",
    "is_adapter",
    "parse_info",
    "read_adapter",
    "write_adapter",
]

ADAPTER_INFO = "adapter.json"
_FORMAT = 1
_METHODS = ("lora", "pissa", "state", "parts")


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """What adapter.json says."""

    method: str
    """lora, pissa, state, or parts (only parameters trained whole)."""
    r: int = 0
    """Rank; 0 without LoRA."""
    alpha: float = 0.0
    """The product B A counts alpha / r times."""
    targets: tuple[str, ...] = ()
    """Matrices of a block that have an adapter."""
    train_parts: tuple[str, ...] = ()
    """Groups of parameters that were trained whole."""
    shifts: bool = False
    """method state: whether the token-shift states are there too."""
    base: str = ""
    """Path of the base weights as the run had it: a hint, the fingerprint decides."""
    base_fingerprint: str = ""
    """See `base_fingerprint`."""
    format: int = _FORMAT
    """Of the folder."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.r if self.r else 0.0

    def document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been read."""

    info: AdapterInfo
    tensors: dict[str, Tensor]
    source: Path


def base_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Digest of a model's values, the same for float32 and bf16 files of it: all tensors rounded to bf16.

    Args:
        weights: official name -> tensor.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        flat = weights[name].detach().to("cpu", torch.bfloat16).contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def info_of_run(model: ModelConfig, fingerprint: str) -> AdapterInfo:
    """What a run's settings make of an adapter."""
    lora, tuning = lora_settings(model), state_tuning(model)
    parts, base = tuple(model.train_parts or ()), model.load_model or ""
    if tuning is not None:
        return AdapterInfo(method="state", shifts=tuning.shifts, base=base, base_fingerprint=fingerprint)
    if lora is None:
        return AdapterInfo(method="parts", train_parts=parts, base=base, base_fingerprint=fingerprint)
    return AdapterInfo(
        method="pissa" if lora.init == "pissa" else "lora",
        r=lora.r, alpha=lora.alpha, targets=lora.targets, train_parts=parts, base=base, base_fingerprint=fingerprint,
    )  # fmt: skip


def adapter_shapes(info: AdapterInfo, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of an adapter, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    size = shape.head_size
    for layer in range(shape.n_layer if info.method == "state" else 0):
        shapes[f"blocks.{layer}.att.time_state"] = (shape.num_heads, size, size)
        for part in ("att", "ffn") if info.shifts else ():
            shapes[f"blocks.{layer}.{part}.shift_state"] = (shape.n_embd,)
    for name, full in parameter_shapes(shape).items():
        if name.startswith("blocks.") and name.split(".", 2)[2].removesuffix(".weight") in info.targets:
            sizes = [(info.r, full[1]), (full[0], info.r)]
            has_init = info.method == "pissa"
            shapes |= dict(zip(adapter_names(name, has_init=has_init), sizes * (1 + has_init), strict=True))
    whole = {name: size for name, size in parameter_shapes(shape).items() if part_of(name) in info.train_parts}
    return shapes | whole


def is_adapter(path: Path) -> bool:
    """Whether a folder is an adapter, or a run's folder of checkpoints that are."""
    return _adapter_folder(path) is not None


def _adapter_folder(path: Path) -> Path | None:
    if (path / ADAPTER_INFO).is_file():
        return path
    if path.is_dir() and any((folder / ADAPTER_INFO).is_file() for folder in find_checkpoints(path)):
        return newest_valid(path)[0]
    return None


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], info: AdapterInfo) -> None:
    """Write an adapter into a folder, which is made; adapter.json last, without which it is none.

    Raises:
        StorageError: if it cannot be written.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    with atomic_file(folder / ADAPTER_FILE, sum(tensor.nbytes for tensor in tensors.values())) as temp:
        save_safetensors(temp, tensors, metadata={"format": "pt"})
    with atomic_file(folder / ADAPTER_INFO) as temp:
        temp.write_text(json.dumps(info.document(), indent=2) + "\n", encoding="utf-8")


def parse_info(content: object, source: Path) -> AdapterInfo:
    """The facts in an adapter.json.

    Raises:
        CheckpointError: if they are not those of an adapter of this trainer.
    """
    known = {field.name for field in dataclasses.fields(AdapterInfo)}
    fix = "convert adapters of other trainers with merge_adapter.py --to folder"
    if not isinstance(content, dict) or content.get("format") != _FORMAT or set(content) - known:
        raise CheckpointError(source, f"is no adapter of this trainer in format {_FORMAT}", fix=fix)
    if content.get("method") not in _METHODS:
        rule = f"one of {', '.join(_METHODS)}"
        raise CheckpointError(source, "unknown method", found=str(content.get("method")), rule=rule)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return AdapterInfo(**values)


def read_adapter(path: Path) -> Adapter:
    """The adapter in a folder, a checkpoint, or the newest valid checkpoint of a run's folder.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    folder = _adapter_folder(path)
    if folder is None:
        problem = "no such folder" if not path.exists() else f"no {ADAPTER_INFO}, so it is no adapter of this trainer"
        fix = "convert adapters of other trainers with merge_adapter.py --to folder"
        raise CheckpointError(path, problem, fix=fix)
    try:
        content = json.loads((folder / ADAPTER_INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(folder / ADAPTER_INFO, f"cannot be read: {err}") from err
    info = parse_info(content, folder / ADAPTER_INFO)
    return Adapter(info, load_safetensors(folder / ADAPTER_FILE), folder)


def check_adapter(adapter: Adapter, shape: ModelShape, fingerprint: str | None = None) -> None:
    """Check that an adapter has exactly the tensors it should, and belongs to a base.

    Args:
        adapter: as read.
        shape: of the base.
        fingerprint: of the base; None = do not compare.

    Raises:
        CheckpointError: naming the tensor or the base that does not fit.
    """
    source, info = adapter.source, adapter.info
    if fingerprint is not None and info.base_fingerprint != fingerprint:
        raise CheckpointError(
            source, f"was trained on other weights (fingerprint {info.base_fingerprint[:8]}, these have {fingerprint[:8]})",
            fix=f"use its base {info.base}" if info.base else "use the base that it was trained on",
        )  # fmt: skip
    expected = adapter_shapes(info, shape)
    missing = [name for name in expected if name not in adapter.tensors]
    unknown = [name for name in adapter.tensors if name not in expected]
    if missing or unknown:
        problem = f"no tensor {missing[0]}" if missing else f"unknown tensor {unknown[0]}"
        more = len(missing) + len(unknown) - 1
        rule = f"exactly the {len(expected)} tensors that its {ADAPTER_INFO} promises for this base"
        raise CheckpointError(source, problem + (f" and {more} more" if more else ""), rule=rule)
    for name, tensor in adapter.tensors.items():
        if tuple(tensor.shape) != expected[name]:
            problem = f"{name} has shape {list(tensor.shape)} instead of {list(expected[name])}"
            raise CheckpointError(source, problem, fix="use the base that it was trained on")
        if not tensor.isfinite().all():
            raise CheckpointError(source, f"{name} holds NaN or infinite values", fix="use an earlier checkpoint")


class MergedWeights(Mapping[str, Tensor]):
    """A base with an adapter in it, by official name; each tensor is made when it is asked for, in float32.

    Args:
        base: official weights.
        adapter: of that base.

    Raises:
        CheckpointError: if it does not belong to the base, or is a tuned state, which weights cannot hold.
    """

    def __init__(self, base: Mapping[str, Tensor], adapter: Adapter) -> None:
        if adapter.info.method == "state":
            problem, fix = "a tuned state cannot be merged into weights", "give its file as --state-in instead"
            raise CheckpointError(adapter.source, problem, fix=fix)
        check_adapter(adapter, shape_from_weights(base), base_fingerprint(base))
        self._base, self._adapter = base, adapter

    def __getitem__(self, name: str) -> Tensor:
        weight = self._adapter.tensors.get(name, self._base[name])
        return merged_matrix(weight, self._adapter.tensors, name, self._adapter.info.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)
