"""Optimizer state that one set of processes wrote and another reads."""

from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.atomic import atomic_folder
from trainer.checkpoint.pieces import MASTER, Piece, SavedPieces, master_files, save_pieces
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.checkpoint.verify import read_manifest
from trainer.checkpoint.write import MODEL_FILE
from trainer.errors import CheckpointError

SHAPES = {"a.weight": (5, 7), "b": (1, 1, 3), "c": (64,)}
KINDS = (MASTER, "exp_avg")


@pytest.fixture
def values():
    generator = torch.Generator().manual_seed(1)
    return {(kind, name): torch.randn(shape, generator=generator) for name, shape in SHAPES.items() for kind in KINDS}


def cut(values, processes: int) -> list[list[Piece]]:
    """Equal parts of each parameter, as ZeRO-3 keeps them: the last ones may be short or nothing."""
    ranks = []
    for rank in range(processes):
        pieces = []
        for name, shape in SHAPES.items():
            flat = {kind: values[kind, name].flatten() for kind in KINDS}
            size = -(-flat[MASTER].numel() // processes)
            part = slice(rank * size, (rank + 1) * size)
            if flat[MASTER][part].numel():
                pieces.append(Piece(name, shape, rank * size, {kind: x[part].clone() for kind, x in flat.items()}))
        ranks.append(pieces)
    return ranks


def write(folder, ranks: list[list[Piece]]):
    with atomic_folder(folder, {"step": 1}) as temp:
        for rank, pieces in enumerate(ranks):
            save_pieces(temp, rank, pieces)
    return folder


@pytest.mark.parametrize("readers", [1, 2, 3, 4])
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_any_number_reads_what_any_number_wrote(tmp_path, values, writers, readers):
    saved = SavedPieces(write(tmp_path / "step-1", cut(values, writers)))
    wanted = cut(values, readers)
    blank = [[p._replace(tensors={k: torch.full_like(x, -1) for k, x in p.tensors.items()}) for p in r] for r in wanted]
    for pieces in blank:
        saved.restore(pieces)
    for found, expected in zip(sum(blank, []), sum(wanted, []), strict=True):
        assert all(torch.equal(found.tensors[kind], expected.tensors[kind]) for kind in KINDS)
    assert saved.shapes == SHAPES
    assert all(torch.equal(saved.whole(kind, name), x) for (kind, name), x in values.items())


def test_masters_are_read_without_moments(tmp_path, values):
    folder = write(tmp_path / "step-1", cut(values, 2))
    assert master_files(read_manifest(folder).files) == ["master-00000.safetensors", "master-00001.safetensors"]
    saved = SavedPieces(folder, only_masters=True)
    assert torch.equal(saved.whole(MASTER, "c"), values[MASTER, "c"])
    with pytest.raises(CheckpointError, match="has no exp_avg of c"):
        saved.whole("exp_avg", "c")


def test_weights_in_full_precision_are_their_own_masters(tmp_path, values):
    with atomic_folder(tmp_path / "step-1", {"step": 1}) as temp:
        save_safetensors(temp / MODEL_FILE, {name: values[MASTER, name] for name in SHAPES})
        save_pieces(temp, 0, [p._replace(tensors={"exp_avg": p.tensors["exp_avg"]}) for p in cut(values, 1)[0]])
    saved = SavedPieces(tmp_path / "step-1")
    assert all(torch.equal(saved.whole(kind, name), x) for (kind, name), x in values.items())


def test_a_missing_part_is_found(tmp_path, values):
    ranks = cut(values, 3)
    for broken in (ranks[:2], [ranks[0], ranks[2]], [*ranks, ranks[1]]):
        folder = write(tmp_path / "step-1", broken)
        with pytest.raises(CheckpointError, match="is not whole"):
            SavedPieces(folder)


def test_another_shape_is_refused(tmp_path, values):
    saved = SavedPieces(write(tmp_path / "step-1", cut(values, 1)))
    with pytest.raises(CheckpointError, match=r"c has shape \[64\] instead of \[8, 8\]"):
        saved.restore([Piece("c", (8, 8), 0, {MASTER: torch.empty(64)})])


def test_a_file_that_does_not_say_where_its_pieces_belong(tmp_path, values):
    with atomic_folder(tmp_path / "step-1", {"step": 1}) as temp:
        save_pieces(temp, 0, cut(values, 1)[0])
        path = temp / "moments-00000.safetensors"
        save_safetensors(path, {name: x.clone() for name, x in load_safetensors(path).items()})
    with pytest.raises(CheckpointError, match=r"moments-00000.safetensors: does not say"):
        SavedPieces(tmp_path / "step-1")
