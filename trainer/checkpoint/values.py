"""Tensors as they are written: alone in their storage, in one dtype, and compared bit for bit when read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import ConfigError, StorageError
from trainer.model.lazy import LazyWeights, shapes_of

__all__ = ["own_copies", "require_same"]


def own_copies(weights: Mapping[str, Tensor], dtype: torch.dtype) -> LazyWeights:
    """Contiguous CPU tensors of one dtype, each alone in a storage of exactly its own size, made when asked for.

    Args:
        weights: name -> finite tensor; values are rounded to nearest even where `dtype` is narrower.
        dtype: stored type.

    Making one raises ConfigError if a value is out of the range of `dtype`.
    """
    return LazyWeights(shapes_of(weights), lambda name: _in_range(name, _own_copy(weights[name], dtype)), dtype)


def _in_range(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float16 and not tensor.isfinite().all():
        problem = f"{name} holds values above 65504, the largest of float16"
        raise ConfigError("--dtype", problem, fix="use bf16 or fp32")
    return tensor


def _own_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    is_alone = converted.untyped_storage().nbytes() == converted.numel() * converted.element_size()
    return converted if is_alone and converted.data_ptr() != tensor.data_ptr() else converted.clone()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def require_same(stored: Mapping[str, Tensor], weights: Mapping[str, Tensor], out: Path) -> None:
    """Compare what was read back from a file with what was written.

    Raises:
        StorageError: if a key, shape, dtype or bit differs.
    """
    fix = "check the disk and export again"
    if set(stored) != set(weights):
        raise StorageError(out, "does not read back: other tensors", fix=fix)
    different = next((name for name in weights if not _same_bits(stored[name], weights[name])), None)
    if different is not None:
        raise StorageError(out, f"does not read back: {different} differs", fix=fix)
