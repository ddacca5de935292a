"""Weights from files of any origin: damaged, hostile and foreign ones are refused in one line."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.checkpoint.atomic import atomic_folder
from trainer.checkpoint.pieces import MASTER, Piece, save_pieces
from trainer.checkpoint.read import peek_shape, read_weights
from trainer.checkpoint.tensorfile import save_safetensors
from trainer.checkpoint.write import MODEL_FILE, CheckpointPayload, write_checkpoint
from trainer.errors import CheckpointError
from trainer.model.naming import ModelShape, parameter_shapes

CKPT = Path(__file__).parents[1] / "fixtures" / "ckpt"
GOOD = CKPT / "good.pth"
GOOD_SHAPE = ModelShape(2, 64, 512, 64, 256, 32, 32, 32, 32)


@pytest.fixture
def stored():
    """The tensors of the good file, as they are in it."""
    return torch.load(GOOD, weights_only=True)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(tensors, name="x.pth"):
    path = Path(name).absolute()
    torch.save(tensors, path)
    return path


def assert_equals_good(weights, stored):
    assert list(weights) == list(parameter_shapes(GOOD_SHAPE))
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name


def test_good_file_is_read_in_official_order(stored):
    assert list(stored) != list(parameter_shapes(GOOD_SHAPE))
    weights = read_weights(GOOD)
    assert_equals_good(weights, stored)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert peek_shape(GOOD) == GOOD_SHAPE


def test_safetensors_file_is_read(stored):
    save_file(stored, "x.safetensors")
    assert_equals_good(read_weights(Path("x.safetensors")), stored)
    assert peek_shape(Path("x.safetensors")) == GOOD_SHAPE


@pytest.mark.promise(6)
def test_truncated_file_is_named_with_its_size():
    Path("truncated.pth").write_bytes(GOOD.read_bytes()[:311603])
    with pytest.raises(CheckpointError, match=r"truncated.pth: truncated.*311603 bytes"):
        read_weights(Path("truncated.pth"))
    with pytest.raises(CheckpointError, match=r"truncated.pth: truncated"):
        peek_shape(Path("truncated.pth"))


@pytest.mark.parametrize("name", ["zero_byte.pth", "zero_byte.safetensors"])
def test_empty_file_is_called_empty(name):
    Path(name).touch()
    with pytest.raises(CheckpointError, match=rf"{name}: the file is empty"):
        read_weights(Path(name))


@pytest.mark.fault(26)
def test_one_flipped_bit_is_seen():
    with pytest.raises(CheckpointError, match=r"bitflip.pth: checksum differs"):
        read_weights(CKPT / "bitflip.pth")


@pytest.mark.parametrize("part", ["start", "end", "anywhere"])
@pytest.mark.fault(26)
def test_altered_bytes_never_load_as_other_weights(stored, part):
    content = GOOD.read_bytes()
    first, last = {"start": (0, 12000), "end": (len(content) - 9000, len(content))}.get(part, (0, len(content)))
    refused = 0
    for position in range(first, last, (last - first) // 60):
        altered = bytearray(content)
        altered[position] ^= 0x95
        Path("x.pth").write_bytes(altered)
        try:
            weights = read_weights(Path("x.pth"))
        except CheckpointError:
            refused += 1
        else:
            # The byte was in the padding between tensors.
            assert_equals_good(weights, stored)
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "mention"),
    [("hostile_pickle_zip.pth", "asks to run posix.mkdir"), ("hostile_pickle_raw.pth", "could run code")],
)
@pytest.mark.fault(56)
def test_hostile_files_run_nothing(name, mention):
    for read in (read_weights, peek_shape):
        with pytest.raises(CheckpointError, match=f"{name}.*{mention}"):
            read(CKPT / name)
    assert os.listdir() == []


@pytest.mark.fault(56)
def test_zip_named_safetensors_is_never_unpickled():
    shutil.copy(CKPT / "hostile_pickle_zip.pth", "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x.safetensors: this is a .pth"):
        read_weights(Path("x.safetensors"))
    assert os.listdir() == ["x.safetensors"]


def test_safetensors_named_pth_is_refused(stored):
    save_file(stored, "x.pth")
    with pytest.raises(CheckpointError, match=r"x.pth: this is a safetensors file"):
        read_weights(Path("x.pth"))


def test_other_bytes_are_refused():
    Path("x.pth").write_text("weights")
    with pytest.raises(CheckpointError, match=r"x.pth: not a weight file"):
        read_weights(Path("x.pth"))


@pytest.mark.parametrize("name", ["none.pth", "none.safetensors", "none"])
def test_missing_file_is_named(name):
    for read in (read_weights, peek_shape):
        with pytest.raises(CheckpointError, match=f"{name}: no such file"):
            read(Path(name))


def test_overlapping_tensors_are_refused():
    with pytest.raises(CheckpointError, match=r"st_overlap.safetensors: not a valid safetensors file"):
        read_weights(CKPT / "st_overlap.safetensors")


def test_truncated_safetensors_is_refused(stored):
    save_file(stored, "x.safetensors")
    content = Path("x.safetensors").read_bytes()
    for size in (4, 100, len(content) - 1000):
        Path("x.safetensors").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=rf"x.safetensors: not a valid safetensors file of {size} bytes"):
            read_weights(Path("x.safetensors"))


@pytest.mark.fault(57)
def test_huge_safetensors_header_is_refused():
    Path("x.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        read_weights(Path("x.safetensors"))


@pytest.mark.fault(57)
def test_shape_bomb_is_refused_without_allocating(stored):
    stored["emb.weight"] = torch.zeros(1, dtype=torch.bfloat16).expand(10**9, 64)
    path = saved(stored)
    with pytest.raises(CheckpointError, match=r"emb.weight claims shape \[1000000000, 64\] .* stores 2 bytes"):
        read_weights(path)


def test_compressed_zip_is_refused():
    with zipfile.ZipFile(GOOD) as source, zipfile.ZipFile("x.pth", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="compressed entries"):
        read_weights(Path("x.pth"))


def test_zip_of_something_else_is_refused():
    with zipfile.ZipFile("x.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match=r"x.pth: malformed"):
        read_weights(Path("x.pth"))


def test_file_written_without_checksums_is_read(stored):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(stored)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_equals_good(read_weights(path), stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.fault(43)
def test_non_finite_weights_are_refused_by_name(stored, value):
    stored["blocks.1.att.key.weight"][3, 5] = value
    with pytest.raises(CheckpointError, match=r"x.pth: blocks.1.att.key.weight holds NaN or infinite"):
        read_weights(saved(stored))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_other_float_types_are_kept_but_float64_is_narrowed(stored, dtype):
    weights = read_weights(saved({name: tensor.to(dtype) for name, tensor in stored.items()}))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32 if dtype == torch.float64 else dtype}
    if dtype != torch.float16:
        assert_equals_good({name: tensor.bfloat16() for name, tensor in weights.items()}, stored)


def test_integer_tensor_is_refused(stored):
    stored["blocks.0.att.x_r"] = stored["blocks.0.att.x_r"].to(torch.int64)
    with pytest.raises(CheckpointError, match=r"blocks.0.att.x_r has dtype torch.int64"):
        read_weights(saved(stored))


@pytest.mark.parametrize(("entry", "found"), [({"a": 1}, "dict"), (3, "int")])
def test_entry_that_is_no_tensor_is_refused(stored, entry, found):
    with pytest.raises(CheckpointError, match=f"entry config is a {found}"):
        read_weights(saved(stored | {"config": entry}))


def test_table_is_demanded():
    with pytest.raises(CheckpointError, match="holds a list"):
        read_weights(saved([torch.zeros(1)]))


def test_sparse_tensor_is_refused(stored):
    stored["emb.weight"] = stored["emb.weight"].to_sparse()
    with pytest.raises(CheckpointError, match="emb.weight is not a plain dense tensor"):
        read_weights(saved(stored))


def test_lightning_file_and_prefix_are_read(stored):
    wrapped = {f"_forward_module.{name}": tensor for name, tensor in stored.items()}
    path = saved({"state_dict": wrapped, "epoch": 1}, "x.ckpt")
    assert_equals_good(read_weights(path), stored)
    assert peek_shape(path) == GOOD_SHAPE


def test_block_0_without_value_gate_is_read(stored):
    for name in ("v0", "v1", "v2"):
        del stored[f"blocks.0.att.{name}"]
    weights = read_weights(saved(stored))
    assert list(weights) == list(parameter_shapes(GOOD_SHAPE))
    assert peek_shape(saved(stored)) == GOOD_SHAPE


def test_checkpoint_folder_gives_its_master_weights(tmp_path, stored):
    low = {MODEL_FILE: {name: tensor.bfloat16() for name, tensor in stored.items()}}
    folder = write_checkpoint(tmp_path, 1, CheckpointPayload(tensors=low))
    assert_equals_good(read_weights(folder), stored)
    assert peek_shape(folder) == GOOD_SHAPE
    with atomic_folder(tmp_path / "step-2", {"step": 2}) as temp:
        save_safetensors(temp / MODEL_FILE, low[MODEL_FILE])
        for rank in (0, 1):  # two processes that keep half of each parameter
            halves = ((name, x.float().flatten() + 1e-6, x.numel() // 2) for name, x in stored.items())
            parts = ((name, x[h:] if rank else x[:h], h * rank) for name, x, h in halves)
            save_pieces(temp, rank, [Piece(n, tuple(stored[n].shape), at, {MASTER: x}) for n, x, at in parts])
    weights = read_weights(tmp_path / "step-2")
    assert torch.equal(weights["emb.weight"], stored["emb.weight"].float() + 1e-6)
    assert peek_shape(tmp_path / "step-2") == GOOD_SHAPE


def test_damaged_checkpoint_folder_is_refused(tmp_path, stored):
    folder = write_checkpoint(tmp_path, 1, CheckpointPayload(tensors={MODEL_FILE: stored}))
    content = bytearray((folder / MODEL_FILE).read_bytes())
    content[-5] ^= 1
    (folder / MODEL_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{MODEL_FILE}: checksum differs"):
        read_weights(folder)


def test_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="a folder without weights"):
        read_weights(tmp_path / "a")
    folder = write_checkpoint(tmp_path, 1, CheckpointPayload(documents={"a.json": {}}))
    with pytest.raises(CheckpointError, match=f"without {MODEL_FILE}"):
        read_weights(folder)


@pytest.mark.fault(56)
def test_foreign_deepspeed_folder_is_refused_unless_trusted(tmp_path):
    (tmp_path / "x.ckpt").mkdir()
    (tmp_path / "x.ckpt" / "latest").write_text("checkpoint")
    for read in (read_weights, peek_shape):
        with pytest.raises(CheckpointError, match="could run code when opened.*--trust"):
            read(tmp_path / "x.ckpt")


@pytest.mark.promise(7)
def test_unsafe_ways_of_loading_are_nowhere_in_the_package():
    package = Path(__file__).parents[2] / "trainer"
    forbidden = ("weights_only=" + "False", "pickle." + "load", "yaml." + "load(", "trust_remote_code=" + "True")
    found = [
        (path.name, text)
        for path in package.rglob("*.py")
        for text in forbidden
        if text in path.read_text(encoding="utf-8")
    ]
    assert json.dumps(found) == "[]"
