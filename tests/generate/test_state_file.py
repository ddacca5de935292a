"""Files of recurrent states: layout, orientation, exactness, and what is refused."""

from __future__ import annotations

import pytest
import torch

from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.errors import CheckpointError, StorageError
from trainer.generate.state_file import Snapshot, load_state, save_state
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import map_state, state_tensors

SHAPE = ModelShape.official(2, 48, 272, head_size=16)
IDS = torch.arange(1, 41)[None]


def make_model(shape=SHAPE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = RWKV7(shape)
    fresh = init_weights(shape, 0, emb_scale=1.0)
    model.load_state_dict(
        {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in fresh.items()}
    )
    return model.to(dtype).requires_grad_(False)


def snapshot_after(model, ids=IDS):
    hidden, state = model(ids)
    return Snapshot(state, model.head(hidden[0, -1]).float())


def tuned_state(**changes):
    generator = torch.Generator().manual_seed(1)
    return {f"blocks.{i}.att.time_state": torch.randn(3, 16, 16, generator=generator) for i in range(2)} | changes


def write(path, tensors):
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        save_safetensors(path, tensors)
    return path


def assert_same_bits(found, wanted):
    pairs = zip(
        [*state_tensors(found.state), found.logits_V], [*state_tensors(wanted.state), wanted.logits_V], strict=True
    )
    for left, right in pairs:
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["s.safetensors", "s.st", "s.pth", "new folder/s.state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_what_is_loaded(tmp_path, name, dtype):
    model = make_model(dtype=dtype)
    saved = snapshot_after(model)
    save_state(tmp_path / name, saved)
    loaded = load_state(tmp_path / name, model)
    assert_same_bits(loaded, saved)
    found, wanted = (model(IDS, snapshot.state)[0] for snapshot in (loaded, saved))
    assert torch.equal(found, wanted)


def test_layout_is_head_value_key_in_float32(tmp_path):
    model = make_model(dtype=torch.bfloat16)
    snapshot = snapshot_after(model)
    save_state(tmp_path / "s.safetensors", snapshot)
    tensors = load_safetensors(tmp_path / "s.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for index, layer in enumerate(snapshot.state):
        stored = tensors.pop(f"blocks.{index}.att.time_state")
        assert stored.shape == (3, 16, 16)
        assert torch.equal(stored, layer.wkv[0])
        assert not torch.allclose(stored, stored.mT, atol=0.1)
        assert torch.equal(tensors.pop(f"blocks.{index}.att.shift_state"), layer.shift_att[0].float())
        assert torch.equal(tensors.pop(f"blocks.{index}.ffn.shift_state"), layer.shift_ffn[0].float())
    assert torch.equal(tensors.pop("logits"), snapshot.logits_V)
    assert not tensors


def test_rows_of_the_file_are_values(tmp_path):
    """The read-out is file[head] @ r: a state whose row i is constant gives output i, whatever the key."""
    model = make_model()
    rows = torch.arange(16.0)[:, None].expand(16, 16)
    tensors = {name: rows.expand(3, 16, 16).clone() for name in tuned_state()}
    state = load_state(write(tmp_path / "s.pth", tensors), model).state
    receptance = torch.randn(16, generator=torch.Generator().manual_seed(2))
    read_out = state[0].wkv[0, 1] @ receptance
    torch.testing.assert_close(read_out, torch.arange(16.0) * receptance.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["s.pth", "s.safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_state_tuning(tmp_path, name, dtype):
    """Their recurrent state starts a text: not transposed, with zero shifts, and nothing read."""
    model = make_model()
    tensors = {key: value.to(dtype) for key, value in tuned_state().items()}
    loaded = load_state(write(tmp_path / name, tensors), model)
    assert loaded.logits_V is None
    for index, layer in enumerate(loaded.state):
        assert torch.equal(layer.wkv[0], tensors[f"blocks.{index}.att.time_state"].float())
        assert not layer.shift_att.any()
        assert not layer.shift_ffn.any()
    transposed = tuple(layer._replace(wkv=layer.wkv.mT.contiguous()) for layer in loaded.state)
    right, wrong = (model.head(model(IDS, state)[0]) for state in (loaded.state, transposed))
    assert (right - wrong).abs().max() > 0.05


def test_logits_may_be_left_out(tmp_path):
    model = make_model()
    saved = snapshot_after(model)._replace(logits_V=None)
    save_state(tmp_path / "s.pth", saved)
    loaded = load_state(tmp_path / "s.pth", model)
    assert loaded.logits_V is None
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(loaded.state), state_tensors(saved.state), strict=True))


def test_loaded_state_does_not_depend_on_the_file(tmp_path):
    model = make_model()
    save_state(tmp_path / "s.pth", snapshot_after(model))
    loaded = load_state(tmp_path / "s.pth", model)
    kept = map_state(torch.clone, loaded.state)
    save_state(tmp_path / "s.pth", snapshot_after(model, IDS[:, :5]))
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(loaded.state), state_tensors(kept), strict=True))


SHIFTS = {f"blocks.{i}.{part}.shift_state": torch.zeros(48) for i in range(2) for part in ("att", "ffn")}
REFUSED = {
    "other_heads": (
        tuned_state(**{"blocks.1.att.time_state": torch.zeros(4, 16, 16)}),
        r"blocks.1.att.time_state has shape \[4, 16, 16\] instead of \[3, 16, 16\]; fix: use the model",
    ),
    "with_a_batch": (
        tuned_state(**{"blocks.0.att.time_state": torch.zeros(1, 3, 16, 16)}),
        r"has shape \[1, 3, 16, 16\]",
    ),
    "one_layer_less": (
        {"blocks.0.att.time_state": torch.zeros(3, 16, 16)},
        "no tensor blocks.1.att.time_state; must be a state for 2",
    ),
    "one_layer_more": (
        tuned_state(**{"blocks.2.att.time_state": torch.zeros(3, 16, 16)}),
        "unknown tensor blocks.2.att.time_state",
    ),
    "one_shift": (tuned_state(**dict(list(SHIFTS.items())[:1])), "no tensor blocks.0.ffn.shift_state"),
    "wide_shift": (
        tuned_state(**(SHIFTS | {"blocks.1.ffn.shift_state": torch.zeros(49)})),
        r"blocks.1.ffn.shift_state has shape \[49\] instead of \[48\]",
    ),
    "other_vocabulary": (
        tuned_state(**SHIFTS, logits=torch.zeros(271)),
        r"logits has shape \[271\] instead of \[272\]",
    ),
    "not_finite": (
        tuned_state(**{"blocks.0.att.time_state": torch.full((3, 16, 16), torch.nan)}),
        "blocks.0.att.time_state holds no finite numbers",
    ),
    "integers": (
        tuned_state(**{"blocks.0.att.time_state": torch.zeros(3, 16, 16, dtype=torch.int64)}),
        "found torch.int64",
    ),
    "a_model": (init_weights(ModelShape.official(1, 16, 20, head_size=16), 0), "no tensor blocks.0.att.time_state"),
}


@pytest.mark.parametrize(("tensors", "match"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path, tensors, match):
    path = write(tmp_path / "s.pth", tensors)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_state(path, make_model())
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.pth", "missing.safetensors"])
def test_missing_file(tmp_path, name):
    with pytest.raises(CheckpointError, match="no such file"):
        load_state(tmp_path / name, make_model())


def test_a_failed_save_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        save_state(tmp_path / "file" / "s.pth", snapshot_after(make_model()))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
