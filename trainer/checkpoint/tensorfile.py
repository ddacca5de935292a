"""Safetensors files: written one tensor at a time, read with the safetensors library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.failpoints import failpoint
from trainer.errors import CheckpointError
from trainer.model.lazy import LazyWeights

__all__ = ["load_safetensors", "safetensors_metadata", "safetensors_shapes", "save_safetensors"]

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_ALIGNMENT = 8


def _raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _header(kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in kinds.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if isinstance(tensors, LazyWeights) and tensors.dtype is not None:
        return {name: (tensors.dtype, shape) for name, shape in tensors.shapes.items()}
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors bit for bit, bringing one at a time to the host.

    Unlike the library's writer it needs no host copy of everything, takes views and shared storage (each tensor
    is written on its own), and a failed write is an OSError.

    Args:
        path: file to write; it is not replaced atomically here.
        tensors: name -> tensor of any device and stride; lazy ones of a known dtype are made one at a time.
        metadata: text pairs for the header.
    """
    # Larger elements first keep every tensor aligned to its element size.
    kinds = dict(sorted(_kinds(tensors).items(), key=lambda item: -item[1][0].itemsize))
    middle = len(kinds) // 2
    with open(path, "wb") as file:
        file.write(_header(kinds, metadata))
        for index, name in enumerate(kinds):
            data = _raw_bytes(tensors[name])
            if index == middle:
                half = len(data) // 2
                file.write(data[:half])
                file.flush()
                failpoint("half")
                data = data[half:]
            file.write(data)


def _open_error(path: Path, err: Exception) -> CheckpointError:
    with open(path, "rb") as file:
        magic = file.read(4)
    if not magic:
        return CheckpointError(path, "the file is empty (0 bytes)", fix="copy or download it again")
    if magic.startswith(b"PK"):
        problem, fix = "this is a .pth (zip) file named .safetensors", "rename it to .pth"
        return CheckpointError(path, problem, fix=fix)
    size = path.stat().st_size
    return CheckpointError(
        path, f"not a valid safetensors file of {size} bytes ({err})", fix="copy or download it again"
    )


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU, backed by a private mapping of it.

    Raises:
        CheckpointError: if the file is missing, truncated or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError as err:
        raise CheckpointError(path, "no such file") from err
    except (SafetensorError, OSError) as err:
        raise _open_error(path, err) from err


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors, read from the header alone.

    Raises:
        CheckpointError: if the file is missing, truncated or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as err:
        raise CheckpointError(path, "no such file") from err
    except (SafetensorError, OSError) as err:
        raise _open_error(path, err) from err


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Text pairs of a file's header.

    Raises:
        CheckpointError: if the file is missing, truncated or malformed.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError as err:
        raise CheckpointError(path, "no such file") from err
    except (SafetensorError, OSError) as err:
        raise _open_error(path, err) from err
