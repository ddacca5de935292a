"""What is read back has the bits that were written: tensors of every kind, random states."""

import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer.checkpoint.rng import capture_rng, restore_rng
from trainer.checkpoint.tensorfile import load_safetensors, safetensors_shapes, save_safetensors
from trainer.checkpoint.write import (
    CheckpointPayload,
    rank_file,
    read_checkpoint_json,
    read_checkpoint_tensors,
    write_checkpoint,
)
from trainer.errors import CheckpointError


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def odd_tensors():
    words = torch.tensor([0, -1, 1 << 15, 0x7FC1, 0x7F81, -128], dtype=torch.int32).to(torch.int16)
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "bf16_with_nan_payloads": words.view(torch.bfloat16),
        "fp16": words.view(torch.float16),
        "fp32": torch.tensor([0.0, -0.0, math.inf, math.nan, 1e-45]),
        "fp64": torch.tensor([math.pi, -0.0], dtype=torch.float64),
        "int64": torch.tensor([-(1 << 63), (1 << 63) - 1]),
        "int32": torch.tensor([-5], dtype=torch.int32),
        "uint8": torch.arange(255, dtype=torch.uint8),
        "uint32": torch.tensor([0, (1 << 32) - 1], dtype=torch.uint32),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 7),
        "transposed": base.t(),
        "slice_of_shared_storage": base[1:3, ::2],
        "same_storage": base,
        "expanded": torch.ones(1).expand(3, 2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_every_kind_of_tensor_survives(tmp_path):
    tensors = odd_tensors()
    payload = CheckpointPayload(tensors={rank_file(0): tensors}, documents={"s.json": {"loss": float("inf")}})
    folder = write_checkpoint(tmp_path, 1, payload)
    found = read_checkpoint_tensors(folder, "rank-00000.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor.detach())), name
    assert read_checkpoint_json(folder, "s.json") == {"loss": float("inf")}


def test_files_are_ordinary_safetensors(tmp_path):
    tensors = {name: tensor for name, tensor in odd_tensors().items() if name != "uint32"}
    save_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    theirs = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(bits(theirs[name]), bits(tensor.detach())) for name, tensor in tensors.items())
    assert safetensors_shapes(tmp_path / "x.safetensors") == {n: tuple(t.shape) for n, t in tensors.items()}


def test_loaded_tensors_can_be_changed_without_touching_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": torch.zeros(3)})
    load_safetensors(path)["a"].fill_(1)
    assert not load_safetensors(path)["a"].any()


def test_payload_knows_its_size(tmp_path):
    payload = CheckpointPayload(tensors={"a.safetensors": {"x": torch.zeros(3, dtype=torch.bfloat16)}})
    assert payload.num_bytes() == 6


def test_manifest_facts_cannot_be_overwritten(tmp_path):
    folder = write_checkpoint(tmp_path, 4, CheckpointPayload(extra={"step": 9, "tokens": 12}))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["step"], manifest["tokens"]) == (4, 12)


def test_old_checkpoints_are_removed(tmp_path):
    for step in range(1, 5):
        write_checkpoint(tmp_path, step, CheckpointPayload(), keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4"}


def test_only_listed_files_are_read(tmp_path):
    folder = write_checkpoint(tmp_path, 1, CheckpointPayload(documents={"a.json": {}}))
    (folder / "b.json").write_text("{}")
    (folder / "a.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"b.json is not part of this checkpoint"):
        read_checkpoint_json(folder, "b.json")
    with pytest.raises(CheckpointError, match=r"a.json: holds a list"):
        read_checkpoint_json(folder, "a.json")


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.randint(1 << 30),
        torch.randn(5).tolist(),
        torch.rand(3).tolist(),
    ]


def test_random_states_survive_with_half_used_pairs(tmp_path):
    random.gauss(0, 1)
    np.random.normal()
    torch.randn(3)
    tensors, numbers = capture_rng()
    expected = [draw() for _ in range(3)]
    payload = CheckpointPayload(tensors={rank_file(0): tensors}, documents={rank_file(0, ".json"): {"rng": numbers}})
    folder = write_checkpoint(tmp_path, 1, payload)
    restored = read_checkpoint_json(folder, rank_file(0, ".json"))["rng"]
    restore_rng(read_checkpoint_tensors(folder, rank_file(0)), restored)
    assert [draw() for _ in range(3)] == expected


def test_gpu_state_without_a_gpu_is_left_out():
    tensors, numbers = capture_rng()
    if not torch.cuda.is_available():
        tensors["rng.cuda"] = torch.zeros(16, dtype=torch.uint8)
    restore_rng(tensors, numbers)
    assert random.random() != random.random()
