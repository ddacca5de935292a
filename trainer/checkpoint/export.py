"""Exporting weights to the official .pth layout or to plain safetensors, whole, verified, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainer.checkpoint.atomic import MANIFEST_NAME, atomic_file, file_sha256
from trainer.checkpoint.find import find_checkpoints, newest_valid
from trainer.checkpoint.read import read_pth, read_weights
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.errors import CheckpointError, StorageError
from trainer.logs import get_logger

__all__ = ["DEFAULT_EXPORT_NAME", "ExportDtype", "ExportFormat", "ExportReport", "export_checkpoint", "save_weights"]

DEFAULT_EXPORT_NAME = "rwkv_model.pth"
ExportDtype = Literal["bf16", "fp32"]
ExportFormat = Literal["pth", "safetensors"]

logger = get_logger(__name__)

_DTYPES: dict[ExportDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class ExportReport:
    """Facts about a written weight file."""

    path: Path
    num_parameters: int
    dtype: ExportDtype
    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        return (
            f"{self.path}: parameters={self.num_parameters} dtype={self.dtype} "
            f"bytes={self.size_bytes} sha256={self.sha256}"
        )


def _own_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous CPU tensor with a storage of exactly its own size."""
    converted = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    is_alone = converted.untyped_storage().nbytes() == converted.numel() * converted.element_size()
    return converted if is_alone and converted.data_ptr() != tensor.data_ptr() else converted.clone()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _verify_written(path: Path, weights: Mapping[str, Tensor], file_format: ExportFormat, out: Path) -> None:
    """Read a written file back; every key, shape and bit must be there."""
    try:
        stored = read_pth(path) if file_format == "pth" else load_safetensors(path)
    except CheckpointError as err:
        raise StorageError(out, f"does not read back: {err.problem}", fix="check the disk and export again") from err
    if set(stored) != set(weights):
        raise StorageError(out, "does not read back: other tensors", fix="check the disk and export again")
    different = next((name for name in weights if not _same_bits(stored[name], weights[name])), None)
    if different is not None:
        raise StorageError(out, f"does not read back: {different} differs", fix="check the disk and export again")


def _resolved_format(out: Path, file_format: ExportFormat | None) -> ExportFormat:
    if file_format is not None:
        return file_format
    return "safetensors" if out.suffix in {".safetensors", ".st"} else "pth"


def save_weights(
    weights: Mapping[str, Tensor], out: Path, dtype: ExportDtype = "bf16", file_format: ExportFormat | None = None
) -> ExportReport:
    """Write weights as one file that official loaders accept.

    The tensors are contiguous, on the CPU, share no storage, and keep the order given. The file appears whole,
    after it was read back and compared bit for bit, or not at all.

    Args:
        weights: official name -> tensor; values are rounded to nearest even where `dtype` is narrower.
        out: file to write; missing folders are made.
        dtype: bf16 (as official files) or fp32.
        file_format: default: by the suffix of `out`, .safetensors or else .pth.

    Raises:
        StorageError: if it cannot be written or does not read back.
    """
    resolved = _resolved_format(out, file_format)
    copies = {name: _own_copy(tensor, _DTYPES[dtype]) for name, tensor in weights.items()}
    num_parameters = sum(tensor.numel() for tensor in copies.values())
    needed = num_parameters * _DTYPES[dtype].itemsize
    with atomic_file(out, needed) as temp:
        if resolved == "pth":
            with open(temp, "wb") as file:
                torch.save(copies, file)
        else:
            save_safetensors(temp, copies, metadata={"format": "pt"})
        _verify_written(temp, copies, resolved, out)
        size, digest = temp.stat().st_size, file_sha256(temp)
    return ExportReport(out, num_parameters, dtype, size, digest)


def export_checkpoint(
    source: Path,
    out: Path | None = None,
    *,
    dtype: ExportDtype = "bf16",
    file_format: ExportFormat | None = None,
    trust_pickle: bool = False,
) -> ExportReport:
    """Export the weights of a checkpoint or weight file.

    Args:
        source: a checkpoint step-N, a run's folder of them (the newest valid one is taken), a DeepSpeed folder,
            or a weight file.
        out: default: `rwkv_model.pth` (or .safetensors) inside the source folder, or beside a source file.
        dtype: bf16 or fp32.
        file_format: pth or safetensors; default by the suffix of `out`.
        trust_pickle: see read_weights.

    Raises:
        CheckpointError: if the source cannot be read; nothing is written.
        ResumeError: if the source holds checkpoints of which none is valid.
        StorageError: if the output cannot be written.
    """
    chosen = source
    if source.is_dir() and not (source / MANIFEST_NAME).is_file() and find_checkpoints(source):
        newest, _ = newest_valid(source)
        chosen = newest or source
    weights = read_weights(chosen, trust_pickle=trust_pickle)
    if out is None:
        folder = source if source.is_dir() else source.parent
        out = (folder / DEFAULT_EXPORT_NAME).with_suffix(f".{file_format or 'pth'}")
    return save_weights(weights, out, dtype, file_format)
