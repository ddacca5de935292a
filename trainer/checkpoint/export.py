"""Exporting weights as .pth, safetensors or a Hugging Face folder, whole, verified, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.checkpoint.atomic import MANIFEST_NAME, atomic_file, file_sha256
from trainer.checkpoint.find import find_checkpoints, newest_valid
from trainer.checkpoint.hf_folder import HfOptions, write_hf_folder
from trainer.checkpoint.read import read_pth, read_weights
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.values import own_copies, require_same
from trainer.errors import CheckpointError, StorageError
from trainer.model.lazy import shapes_of

__all__ = [
    "DEFAULT_EXPORT_NAME",
    "EXPORT_DTYPES",
    "EXPORT_FORMATS",
    "ExportDtype",
    "ExportFormat",
    "ExportReport",
    "dtype_name",
    "export_checkpoint",
    "save_weights",
    "write_weights",
]

DEFAULT_EXPORT_NAME = "rwkv_model.pth"
DEFAULT_FOLDER_NAME = "rwkv_model_hf"
ExportDtype = Literal["bf16", "fp16", "fp32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = get_args(ExportDtype)
ExportFormat = Literal["pth", "safetensors", "hf", "hf-fla"]
"""pth: official. safetensors: the same names. hf: a folder that transformers loads. hf-fla: without code, for FLA."""
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)

_DTYPES: dict[ExportDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ExportReport:
    """Facts about a written weight file, or a folder (whose digest is over those of its weight files)."""

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


def dtype_name(weights: Mapping[str, Tensor]) -> ExportDtype:
    """The stored type that keeps weights as they are, told from their embedding."""
    dtype = weights["emb.weight"].dtype
    return next(name for name, kind in _DTYPES.items() if kind == dtype)


def _verify_written(path: Path, weights: Mapping[str, Tensor], file_format: ExportFormat, out: Path) -> None:
    """Read a written file back; every key, shape and bit must be there."""
    try:
        stored = read_pth(path) if file_format == "pth" else load_safetensors(path)
    except CheckpointError as err:
        raise StorageError(out, f"does not read back: {err.problem}", fix="check the disk and export again") from err
    require_same(stored, weights, out)


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
    copies = own_copies(weights, _DTYPES[dtype])
    num_parameters = sum(map(math.prod, copies.shapes.values()))
    needed = num_parameters * _DTYPES[dtype].itemsize
    with atomic_file(out, needed) as temp:
        if resolved == "pth":
            with open(temp, "wb") as file:
                torch.save(dict(copies), file)
        else:
            save_safetensors(temp, copies, metadata={"format": "pt"})
        _verify_written(temp, copies, resolved, out)
        size, digest = temp.stat().st_size, file_sha256(temp)
    return ExportReport(out, num_parameters, dtype, size, digest)


def write_weights(
    weights: Mapping[str, Tensor],
    out: Path,
    dtype: ExportDtype = "bf16",
    file_format: ExportFormat | None = None,
    hf: HfOptions | None = None,
) -> ExportReport:
    """Write weights in any export format.

    Args:
        weights: official name -> tensor; lazy ones are made one at a time, but for .pth, which is built in memory.
        out: file, or for `hf` and `hf-fla` folder, to write.
        dtype: stored type.
        file_format: default: by the suffix of `out`, .safetensors or else .pth.
        hf: what a folder has besides the weights; whether there is code is said by the format.

    Raises:
        ConfigError: if the model does not fit the layout or the stored type.
        StorageError: if it cannot be written, does not read back, or would replace something that is no export.
    """
    if file_format in {"pth", "safetensors", None}:
        return save_weights(weights, out, dtype, file_format)
    options = replace(hf or HfOptions(), with_code=file_format == "hf")
    size, digest = write_hf_folder(weights, out, _DTYPES[dtype], options)
    return ExportReport(out, sum(map(math.prod, shapes_of(weights).values())), dtype, size, digest)


def export_checkpoint(
    source: Path,
    out: Path | None = None,
    *,
    dtype: ExportDtype = "bf16",
    file_format: ExportFormat | None = None,
    trust_pickle: bool = False,
    hf: HfOptions | None = None,
) -> ExportReport:
    """Export the weights of a checkpoint or weight file.

    Args:
        source: a checkpoint step-N, a run's folder of them (the newest valid one is taken), a DeepSpeed folder,
            or a weight file.
        out: default: `rwkv_model.pth` (.safetensors, or the folder rwkv_model_hf) inside the source folder, or
            beside a source file.
        dtype: stored type.
        file_format: default by the suffix of `out`.
        trust_pickle: see read_weights.
        hf: see `write_weights`.

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
        is_folder = file_format in {"hf", "hf-fla"}
        out = folder / (
            DEFAULT_FOLDER_NAME if is_folder else Path(DEFAULT_EXPORT_NAME).with_suffix(f".{file_format or 'pth'}")
        )
    return write_weights(weights, out, dtype, file_format, hf)
