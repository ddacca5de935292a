"""Files that hold a recurrent state: saved ones to continue from, and those of state tuning.

One row, without a batch axis, under flat names:

    blocks.{i}.att.time_state   [H, N_value, N_key]  the recurrent state
    blocks.{i}.att.shift_state  [C]                  input of time mixing at the last token
    blocks.{i}.ffn.shift_state  [C]                  input of channel mixing at the last token
    logits                      [V]                  what the model expects next

`time_state` alone is what state tuning writes: the shifts are zero then, and no text came before. Rows are
values and columns are keys, as in the model's own state and in other RWKV-7 (x070) files, so nothing is
transposed. (Runners of RWKV-5 and 6 transpose when they load; a file made for those gives wrong text here.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.atomic import atomic_file
from trainer.checkpoint.read import read_pth
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.errors import CheckpointError
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import LayerState, ModelState

__all__ = ["Snapshot", "load_state", "save_state"]

_SAFETENSORS_SUFFIXES = (".safetensors", ".st")
_LOGITS = "logits"


class Snapshot(NamedTuple):
    """All that a model knows of the text so far."""

    state: ModelState
    """One row."""
    logits_V: Tensor | None
    """float32 [V], for the token that comes next; None if nothing was read yet."""


def _state_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    size = shape.head_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.n_layer):
        shapes[f"blocks.{layer}.att.time_state"] = (shape.num_heads, size, size)
        shapes[f"blocks.{layer}.att.shift_state"] = shapes[f"blocks.{layer}.ffn.shift_state"] = (shape.n_embd,)
    return shapes


def save_state(path: Path, snapshot: Snapshot) -> None:
    """Write everything needed to continue exactly, in float32, whole or not at all.

    Args:
        path: .safetensors or .st, or any other suffix for a .pth.
        snapshot: one row.

    Raises:
        StorageError: if it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(snapshot.state):
        tensors[f"blocks.{index}.att.time_state"] = layer.wkv[0]
        tensors[f"blocks.{index}.att.shift_state"] = layer.shift_att[0]
        tensors[f"blocks.{index}.ffn.shift_state"] = layer.shift_ffn[0]
    if snapshot.logits_V is not None:
        tensors[_LOGITS] = snapshot.logits_V
    tensors = {name: tensor.detach().to("cpu", torch.float32).clone() for name, tensor in tensors.items()}
    with atomic_file(path, sum(tensor.nbytes for tensor in tensors.values())) as temp:
        if path.suffix in _SAFETENSORS_SUFFIXES:
            save_safetensors(temp, tensors, metadata={"format": "pt"})
        else:
            with open(temp, "wb") as file:
                torch.save(tensors, file)


def load_state(path: Path, model: RWKV7) -> Snapshot:
    """The snapshot in a file of `save_state` or of state tuning.

    Args:
        path: .safetensors, .st or .pth.
        model: the one that will use it; gives sizes, device, and the dtype of the shifts.

    Raises:
        CheckpointError: if it cannot be read, is not finite, or belongs to a model of other sizes.
    """
    shape, like = model.shape, model.zero_state(1)[0]
    tensors = load_safetensors(path) if path.suffix in _SAFETENSORS_SUFFIXES else read_pth(path)
    expected = _state_shapes(shape) | {_LOGITS: (shape.vocab_size,)}
    optional = {name for name in expected if not name.endswith(".time_state")}
    _check_names(path, set(tensors), expected, optional)
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor, expected[name])
    states = []
    for layer in range(shape.n_layer):
        wkv = tensors[f"blocks.{layer}.att.time_state"]
        shift_att, shift_ffn = (
            tensors.get(f"blocks.{layer}.{part}.shift_state", torch.zeros(shape.n_embd)) for part in ("att", "ffn")
        )
        states.append(LayerState(*(x[None].to(old) for x, old in zip((shift_att, shift_ffn, wkv), like, strict=True))))
    logits = tensors.get(_LOGITS)
    return Snapshot(tuple(states), None if logits is None else logits.to(like.wkv.device, torch.float32))


def _check_names(path: Path, found: set[str], expected: Mapping[str, tuple[int, ...]], optional: set[str]) -> None:
    """All recurrent states, and either everything else or, as after state tuning, nothing."""
    required = set(expected) - optional
    shifts = optional - {_LOGITS}
    if found & shifts:
        required |= shifts
    missing, unknown = sorted(required - found), sorted(found - set(expected))
    if missing or unknown:
        problem = f"no tensor {missing[0]}" if missing else f"unknown tensor {unknown[0]}"
        num_layers = len(set(expected) - optional)
        rule = f"a state for {num_layers} block(s), such as --state-out writes"
        raise CheckpointError(path, problem, rule=rule, fix="use the model that the state was made with")


def _check_tensor(path: Path, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        problem = f"{name} has shape {list(tensor.shape)} instead of {list(expected)}"
        raise CheckpointError(path, problem, fix="use the model that the state was made with")
    if not tensor.dtype.is_floating_point or not tensor.isfinite().all():
        raise CheckpointError(path, f"{name} holds no finite numbers", found=tensor.dtype)
