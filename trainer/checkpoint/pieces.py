"""Optimizer state by parameter name, in pieces: one form for every strategy and number of processes.

Under ZeRO each process keeps a piece of the float32 masters and of Adam's moments, elsewhere one process has all of
them. Each process writes what it keeps, with the place of every piece in its parameter; a reader asks for any range
of any parameter. So a run goes on under another strategy, ZeRO stage or number of processes.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.tensorfile import load_safetensors, safetensors_metadata, save_safetensors
from trainer.checkpoint.verify import read_manifest
from trainer.checkpoint.write import ADAPTER_FILE, MODEL_FILE
from trainer.errors import CheckpointError

__all__ = ["MASTER", "Piece", "SavedPieces", "master_files", "save_pieces"]

MASTER = "master"
"""Kind of the values of the parameters themselves, in full precision; other kinds are moments."""
_MASTER_FILE = re.compile(r"master-\d{5}\.safetensors")
_PIECE_FILE = re.compile(r"(master|moments)-\d{5}\.safetensors")
_PLACES = "pieces"


class Piece(NamedTuple):
    """What one process keeps of one parameter."""

    name: str
    """Official name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element, counted in the flattened parameter."""
    tensors: dict[str, Tensor]
    """Kind (`master`, `exp_avg`, `exp_avg_sq`) -> flat view of the elements from `start` on; all of one length."""


def save_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> None:
    """Write one process's pieces: masters in a file of their own, so that weights can be read without moments.

    Raises:
        OSError: if a file cannot be written.
    """
    pieces = list(pieces)
    places = json.dumps({piece.name: [piece.start, list(piece.shape)] for piece in pieces})
    for stem, chosen in (("master", True), ("moments", False)):
        tensors = {
            f"{kind}.{piece.name}": tensor
            for piece in pieces
            for kind, tensor in piece.tensors.items()
            if (kind == MASTER) == chosen
        }
        if tensors:
            save_safetensors(folder / f"{stem}-{rank:05d}.safetensors", tensors, {_PLACES: places})


def master_files(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's file names that hold pieces of masters."""
    return sorted(name for name in names if _MASTER_FILE.fullmatch(name))


class SavedPieces:
    """All pieces of a verified checkpoint, read where they are asked for.

    Args:
        folder: the checkpoint.
        only_masters: leave the moments out.

    Raises:
        CheckpointError: a file is damaged, or a part of a parameter is in none.
    """

    def __init__(self, folder: Path, *, only_masters: bool = False) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of each parameter."""
        self._parts: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
        files = read_manifest(folder).files
        pattern = _MASTER_FILE if only_masters else _PIECE_FILE
        for name in sorted(name for name in files if pattern.fullmatch(name)):
            self._add(folder / name)
        # Weights in full precision are their own masters.
        for file in (MODEL_FILE, ADAPTER_FILE) if not master_files(files) else ():
            for name, tensor in load_safetensors(folder / file).items() if file in files else ():
                self.shapes[name] = tuple(tensor.shape)
                self._parts[MASTER, name].append((0, tensor.reshape(-1)))
        for (kind, name), parts in self._parts.items():
            parts.sort(key=lambda part: part[0])
            self._check_whole(kind, name, parts)

    def _add(self, path: Path) -> None:
        tensors = load_safetensors(path)
        try:
            places = json.loads(safetensors_metadata(path)[_PLACES])
            for key, tensor in tensors.items():
                kind, name = key.split(".", 1)
                start, shape = places[name]
                self.shapes[name] = tuple(shape)
                self._parts[kind, name].append((int(start), tensor))
        except (KeyError, ValueError, TypeError) as err:
            raise CheckpointError(path, "does not say where its pieces belong") from err

    def _check_whole(self, kind: str, name: str, parts: list[tuple[int, Tensor]]) -> None:
        at, size = 0, math.prod(self.shapes[name])
        for start, tensor in parts:
            if start != at:
                break
            at += tensor.numel()
        if at != size:
            problem = f"{kind} of {name} is not whole: elements from {at} on are missing or there twice"
            raise CheckpointError(self.folder, problem, fix="use another checkpoint")

    def read(self, kind: str, name: str, start: int, size: int) -> Tensor:
        """Elements start .. start + size - 1 of a flattened parameter, on the CPU; may be a view of the file.

        Raises:
            CheckpointError: if the checkpoint has no such parameter.
        """
        if (kind, name) not in self._parts:
            raise CheckpointError(
                self.folder, f"has no {kind} of {name}", fix="start from its weights: model.load_model"
            )
        found = []
        for first, tensor in self._parts[kind, name]:
            low, high = max(start, first), min(start + size, first + tensor.numel())
            if low < high:
                found.append(tensor[low - first : high - first])
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0)

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole parameter in its shape."""
        shape = self.shapes.get(name, ())
        return self.read(kind, name, 0, math.prod(shape)).view(shape)

    def restore(self, pieces: Iterable[Piece]) -> None:
        """Fill pieces, which may be cut in another way than those that were saved.

        Raises:
            CheckpointError: if a parameter is missing or has another shape.
        """
        for piece in pieces:
            found = self.shapes.get(piece.name)
            if found is not None and found != piece.shape:
                problem = f"{piece.name} has shape {list(found)} instead of {list(piece.shape)}"
                raise CheckpointError(self.folder, problem)
            for kind, tensor in piece.tensors.items():
                tensor.copy_(self.read(kind, piece.name, piece.start, tensor.numel()))
