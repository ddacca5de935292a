"""Reading model weights from files of any origin, without ever running code that they hold."""

from __future__ import annotations

import contextlib
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.atomic import MANIFEST_NAME
from trainer.checkpoint.pieces import MASTER, SavedPieces, master_files
from trainer.checkpoint.shards import INDEX_SUFFIX, UNUSED_FILE, check_model_type, weight_files
from trainer.checkpoint.tensorfile import load_safetensors, safetensors_shapes
from trainer.checkpoint.verify import read_manifest, verify_file, verify_folder
from trainer.checkpoint.write import ADAPTER_FILE, MODEL_FILE
from trainer.errors import CheckpointError
from trainer.logs import get_logger
from trainer.model.hf_layout import from_hf, is_hf_layout
from trainer.model.naming import ModelShape, canonical_weights, shape_from_weights, without_prefixes

__all__ = ["peek_shape", "read_pth", "read_weights"]

logger = get_logger(__name__)

_DAMAGED = "copy or download it again"
_SAFETENSORS_SUFFIXES = (".safetensors", ".st")
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_READ_BYTES = 1 << 20
# The pickle inside holds names and shapes only; an official 61-layer file needs 200 kB.
_MAX_PICKLE_BYTES = 64 << 20
_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")
# Whatever torch's restricted unpickler meets in a malformed file ends in one of these.
_MALFORMED = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    MemoryError,
)
_BAD_ZIP = (zipfile.BadZipFile, struct.error, *_MALFORMED)


def _check_magic(path: Path) -> int:
    """Size of a .pth file that at least begins like one."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            magic = file.read(9)
    except FileNotFoundError as err:
        raise CheckpointError(path, "no such file") from err
    except OSError as err:
        raise CheckpointError(path, f"cannot be read: {err.strerror}") from err
    if size == 0:
        raise CheckpointError(path, "the file is empty (0 bytes)", fix=_DAMAGED)
    if magic[8:9] == b"{":
        raise CheckpointError(path, "this is a safetensors file", fix="rename it to .safetensors")
    if magic[:1] == b"\x80":
        raise CheckpointError(
            path, "a bare pickle, which could run code when opened", rule="a zip-format .pth (torch 1.6 or newer)"
        )
    if magic[:4] != b"PK\x03\x04":
        raise CheckpointError(path, f"not a weight file ({size} bytes)", rule="a .pth or .safetensors file")
    return size


def _check_zip(path: Path, size: int, *, check_content: bool) -> None:
    """Refuse a zip that is cut, compressed (a bomb) or, if asked, whose bytes fail their CRC-32."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise CheckpointError(path, "compressed entries", rule="written by torch.save")
            if sum(entry.file_size for entry in entries) > size:
                raise CheckpointError(path, f"claims more content than its {size} bytes")
            if any(entry.file_size > _MAX_PICKLE_BYTES for entry in entries if entry.filename.endswith(".pkl")):
                raise CheckpointError(path, "a pickle part too large for a table of weights")
            if all(entry.CRC == 0 for entry in entries):
                logger.warning("%s was written without checksums: damage to it cannot be seen", path)
            elif check_content:
                _check_entries(path, archive)
    except _BAD_ZIP as err:
        problem = f"truncated or damaged: {size} bytes without a valid zip directory"
        raise CheckpointError(path, problem, fix=_DAMAGED) from err
    except OSError as err:
        raise CheckpointError(path, f"cannot be read: {err.strerror}") from err


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    for entry in archive.infolist():
        try:
            with archive.open(entry) as stream:
                while stream.read(_READ_BYTES):
                    pass
        except _BAD_ZIP as err:
            problem = f"checksum differs in part {entry.filename}: the file is damaged"
            raise CheckpointError(path, problem, fix=_DAMAGED) from err


def read_pth(path: Path, *, check_content: bool = True) -> dict[str, Tensor]:
    """Tensors of a .pth file under the names in it, on the CPU, backed by a private mapping of the file.

    Args:
        path: a zip-format file of torch.save: a flat dict, or a Lightning file with a `state_dict`.
        check_content: verify every byte against the checksums in the zip.

    Raises:
        CheckpointError: if the file is missing, cut, damaged, asks to run code, or holds anything but tensors.
    """
    _check_zip(path, _check_magic(path), check_content=check_content)
    try:
        content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except _MALFORMED as err:
        unsafe = _UNSAFE_GLOBAL.search(str(err))
        if unsafe:
            problem = f"asks to run {unsafe[1]}, which weights never need; nothing was run"
            raise CheckpointError(path, problem, rule="tensors only") from err
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise CheckpointError(path, f"malformed ({reason})", fix=_DAMAGED) from err
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise CheckpointError(path, f"holds a {type(content).__name__}", rule="a table of tensors")
    for name, tensor in content.items():
        _check_stored(name, tensor, path)
    return {name: tensor.detach() for name, tensor in content.items()}


def _check_stored(name: object, tensor: object, path: Path) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        problem = f"entry {name} is a {type(tensor).__name__}"
        raise CheckpointError(path, problem, rule="a flat table of tensors", fix="convert it to a plain .pth first")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(path, f"{name} is not a plain dense tensor")
    # A stride of 0 can claim terabytes on top of four stored bytes.
    needed = tensor.numel() * tensor.element_size()
    stored = tensor.untyped_storage().nbytes()
    if needed > stored:
        problem = f"{name} claims shape {list(tensor.shape)} ({needed} bytes) but stores {stored} bytes"
        raise CheckpointError(path, problem, rule="contiguous tensors")


def _checked_values(name: str, tensor: Tensor, source: Path) -> Tensor:
    """The tensor, float64 narrowed to float32; refused if it is not floating or not finite."""
    if tensor.dtype not in _WEIGHT_DTYPES:
        raise CheckpointError(source, f"{name} has dtype {tensor.dtype}", rule="bf16, fp16, fp32 or fp64")
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    if tensor.numel():
        low, high = torch.aminmax(tensor)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(source, f"{name} holds NaN or infinite values", fix="use an earlier checkpoint")
    return tensor


def _zero_folder(folder: Path) -> Path | None:
    """The DeepSpeed checkpoint in a folder: itself or a direct subfolder, known by its `latest` file."""
    if (folder / "latest").is_file():
        return folder
    return next((child.parent for child in sorted(folder.glob("*/latest")) if child.is_file()), None)


def _read_zero_folder(folder: Path) -> dict[str, Tensor]:
    # Reads pickles: callers make sure that they are ours or trusted.
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        # DeepSpeed reports its progress on stdout, which belongs to our programmes' results.
        with contextlib.redirect_stdout(sys.stderr):
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))
    except (OSError, *_MALFORMED) as err:
        raise CheckpointError(folder, f"DeepSpeed cannot merge its shards: {err}") from err


def _read_folder(folder: Path, *, trust_pickle: bool) -> dict[str, Tensor]:
    zero_folder = _zero_folder(folder)
    if (folder / MANIFEST_NAME).is_file():
        manifest = read_manifest(folder)
        if ADAPTER_FILE in manifest.files:
            problem = "holds an adapter, not a whole model"
            fix = "merge it into its base first: merge_adapter.py FOLDER OUT (or generate.py BASE --adapter FOLDER)"
            raise CheckpointError(folder, problem, fix=fix)
        for name in master_files(manifest.files) or [name for name in manifest.files if name == MODEL_FILE]:
            verify_file(folder, name, manifest)
        saved = SavedPieces(folder, only_masters=True)
        if saved.shapes:
            return {name: saved.whole(MASTER, name) for name in saved.shapes}
        if zero_folder is not None:
            verify_folder(folder)
            return _read_zero_folder(zero_folder)
        raise CheckpointError(folder, f"a checkpoint without {MODEL_FILE} or DeepSpeed shards")
    if zero_folder is None:
        raise CheckpointError(
            folder,
            "a folder without weights",
            rule="a checkpoint step-N, a Hugging Face folder, a DeepSpeed checkpoint, or a weight file",
        )
    if not trust_pickle:
        raise CheckpointError(
            folder,
            f"DeepSpeed shards without a {MANIFEST_NAME} of this trainer could run code when opened",
            fix="say that you trust them (export_checkpoint.py --trust)",
        )
    return _read_zero_folder(zero_folder)


def _hf_files(path: Path) -> list[Path] | None:
    """Weight files of a folder in Hugging Face's form, or of an index; None if `path` is neither."""
    if not path.is_dir() and not path.name.endswith(INDEX_SUFFIX):
        return None
    # A checkpoint step-N has a file of the same name, under a manifest.
    if (path / MANIFEST_NAME).is_file():
        return None
    files = weight_files(path)
    if files is None:
        return None
    folder = files[0].parent
    check_model_type(folder)
    return [*files, folder / UNUSED_FILE] if (folder / UNUSED_FILE).is_file() else files


def _read_any(path: Path, *, trust_pickle: bool) -> dict[str, Tensor]:
    files = _hf_files(path)
    if files is not None:
        parts = [_read_any(file, trust_pickle=False) for file in files]
        return {name: tensor for part in parts for name, tensor in part.items()}
    if path.is_dir():
        return _read_folder(path, trust_pickle=trust_pickle)
    if path.suffix in _SAFETENSORS_SUFFIXES:
        return load_safetensors(path)
    return read_pth(path)


def read_weights(path: Path, *, trust_pickle: bool = False) -> dict[str, Tensor]:
    """Complete, finite RWKV-7 weights under official names, shapes and order, on the CPU.

    Args:
        path: a .pth or .safetensors file, under official names or Hugging Face's; a Hugging Face folder, or the
            index of its shards; a checkpoint step-N of this trainer (its float32 master weights where there are
            any); or a DeepSpeed checkpoint folder, whose ZeRO shards are merged to float32.
        trust_pickle: open DeepSpeed shards even where no manifest of ours vouches for them. They are pickles,
            which can run any code.

    Returns:
        Tensors in the dtype of the file, float64 narrowed to float32. They may be backed by the file.

    Raises:
        CheckpointError: if the file is missing, damaged, hostile, incomplete, not finite, or not RWKV-7.
    """
    stored = _read_any(path, trust_pickle=trust_pickle)
    weights = canonical_weights(from_hf(stored, path) if is_hf_layout(stored) else stored, path)
    return {name: _checked_values(name, tensor, path) for name, tensor in weights.items()}


def _shapes_in(path: Path) -> Mapping[str, Tensor | tuple[int, ...]]:
    files = _hf_files(path)
    if files is not None:
        return {name: value for file in files for name, value in _shapes_in(file).items()}
    if path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            saved = SavedPieces(path, only_masters=True)
            if saved.shapes:
                return saved.shapes
        return _read_folder(path, trust_pickle=False)
    if path.suffix in _SAFETENSORS_SUFFIXES:
        return safetensors_shapes(path)
    return read_pth(path, check_content=False)


def peek_shape(path: Path) -> ModelShape:
    """Model sizes of a weight file or checkpoint, without reading the tensors (but for merged ZeRO shards).

    Raises:
        CheckpointError: if it cannot be opened or is not RWKV-7.
    """
    stored = {
        name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in _shapes_in(path).items()
    }
    official = from_hf(stored, path) if is_hf_layout(stored) else stored
    return shape_from_weights({without_prefixes(name): size for name, size in official.items()}, path)
