"""Exports have the official layout and the same bits; a failed one leaves nothing. Also the two root programmes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainer.checkpoint import export as export_module
from trainer.checkpoint import failpoints
from trainer.checkpoint.atomic import atomic_folder
from trainer.checkpoint.export import export_checkpoint, save_weights
from trainer.checkpoint.pieces import MASTER, Piece, save_pieces
from trainer.checkpoint.read import peek_shape, read_weights
from trainer.checkpoint.tensorfile import save_safetensors
from trainer.checkpoint.write import MODEL_FILE
from trainer.errors import ResumeError, StorageError
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape, parameter_shapes

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape.official(2, 64, 128)


@pytest.fixture(scope="module")
def weights():
    return init_weights(SHAPE, seed=3)


@pytest.fixture
def run_folder(tmp_path, weights):
    directory = tmp_path / "run"
    directory.mkdir()
    masters = [Piece(name, tuple(x.shape), 0, {MASTER: x.flatten()}) for name, x in weights.items()]
    for step in (1, 2):
        with atomic_folder(directory / f"step-{step}", {"step": step}) as temp:
            save_safetensors(temp / MODEL_FILE, {name: x.bfloat16() for name, x in weights.items()})
            save_pieces(temp, 0, masters)
    return directory


def programme(name, *arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_pth_has_the_official_layout(tmp_path, weights, dtype, torch_dtype):
    report = save_weights(weights, tmp_path / "x.pth", dtype)
    stored = torch.load(tmp_path / "x.pth", weights_only=True, mmap=True)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == parameter_shapes(SHAPE)
    assert list(stored) == list(parameter_shapes(SHAPE))
    for name, tensor in stored.items():
        assert torch.equal(tensor, weights[name].to(torch_dtype)), name
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert report.num_parameters == SHAPE.num_parameters()
    assert report.size_bytes == (tmp_path / "x.pth").stat().st_size


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.promise(21)
def test_safetensors_holds_the_bits_of_the_pth(tmp_path, weights, dtype):
    save_weights(weights, tmp_path / "x.pth", dtype)
    save_weights(weights, tmp_path / "x.safetensors", dtype)
    pth, plain = read_weights(tmp_path / "x.pth"), load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(pth[name], plain[name]) and pth[name].dtype == plain[name].dtype for name in pth)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shared_storage_is_separated(tmp_path, weights):
    tied = weights | {"head.weight": weights["emb.weight"], "ln_out.weight": torch.zeros(200)[:64]}
    save_weights(tied, tmp_path / "x.pth", "fp32")
    stored = torch.load(tmp_path / "x.pth", weights_only=True)
    assert stored["head.weight"].data_ptr() != stored["emb.weight"].data_ptr()
    assert stored["ln_out.weight"].untyped_storage().nbytes() == 256


def test_bf16_rounds_to_nearest_even(tmp_path, weights):
    ties = weights | {"ln_out.bias": torch.full((64,), 1 + 2**-8)}
    save_weights(ties, tmp_path / "x.pth", "bf16")
    assert (read_weights(tmp_path / "x.pth")["ln_out.bias"] == 1).all()


def test_checkpoint_and_run_folder_export_the_same(run_folder, weights, tmp_path):
    one = export_checkpoint(run_folder / "step-2", tmp_path / "a.pth", dtype="fp32")
    two = export_checkpoint(run_folder, tmp_path / "b.pth", dtype="fp32")
    assert one.sha256 == two.sha256
    assert torch.equal(read_weights(tmp_path / "a.pth")["emb.weight"], weights["emb.weight"])


def test_default_output_is_inside_the_source(run_folder):
    assert export_checkpoint(run_folder / "step-1").path == run_folder / "step-1" / "rwkv_model.pth"
    report = export_checkpoint(run_folder / "step-1" / "rwkv_model.pth", file_format="safetensors")
    assert report.path == run_folder / "step-1" / "rwkv_model.safetensors"


def test_file_can_be_exported_onto_itself(tmp_path, weights):
    save_weights(weights, tmp_path / "x.pth", "fp32")
    export_checkpoint(tmp_path / "x.pth", tmp_path / "x.pth", dtype="bf16")
    assert read_weights(tmp_path / "x.pth")["emb.weight"].dtype == torch.bfloat16


def test_corrupt_newest_is_passed_over(run_folder, tmp_path):
    (run_folder / "step-2" / MODEL_FILE).write_bytes(b"x")
    export_checkpoint(run_folder, tmp_path / "a.pth")
    (run_folder / "step-1" / MODEL_FILE).write_bytes(b"x")
    with pytest.raises(ResumeError, match="no valid checkpoint"):
        export_checkpoint(run_folder, tmp_path / "b.pth")
    assert not (tmp_path / "b.pth").exists()


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
@pytest.mark.fault(72)
def test_full_disk_leaves_the_old_file(tmp_path, weights, name):
    save_weights(weights, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StorageError, match=rf"{name}: cannot write: .*free \d+ bytes, needed \d+ bytes") as caught:
            save_weights(weights, tmp_path / name, "fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 4
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.fault(72)
def test_interrupted_export_leaves_no_output(tmp_path, weights):
    pid = os.fork()
    if pid == 0:
        failpoints.arm("fsynced:1:kill")
        save_weights(weights, tmp_path / "x.pth")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert not (tmp_path / "x.pth").exists()


def test_file_that_does_not_read_back_is_not_published(tmp_path, weights, monkeypatch):
    def other_bits(path):
        stored = load_file(path)
        stored["emb.weight"][0, 0] += 1
        return stored

    monkeypatch.setattr(export_module, "load_safetensors", other_bits)
    with pytest.raises(StorageError, match="does not read back: emb.weight differs"):
        save_weights(weights, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []


def test_export_programme(run_folder):
    done = programme("export_checkpoint.py", run_folder / "step-2", "out.pth", "fp32", cwd=run_folder)
    assert done.returncode == 0, done.stderr
    assert "dtype=fp32" in done.stdout
    assert f"parameters={SHAPE.num_parameters()}" in done.stdout
    assert "sha256=" in done.stdout
    assert peek_shape(run_folder / "out.pth") == SHAPE


def test_export_programme_with_bad_input_leaves_no_file(tmp_path):
    (tmp_path / "resume_all_bad" / "step-10").mkdir(parents=True)
    done = programme("export_checkpoint.py", "resume_all_bad", "out.pth", cwd=tmp_path)
    assert done.returncode == 3
    assert "resume_all_bad: no valid checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["resume_all_bad"]


@pytest.mark.fault(72)
def test_export_programme_to_a_full_device_is_a_storage_error(run_folder):
    done = programme("export_checkpoint.py", run_folder / "step-2", "/dev/full", cwd=run_folder)
    assert done.returncode == 4
    assert "/dev/full" in done.stderr
    assert Path("/dev/full").is_char_device()


def test_init_programme_without_folder_part(tmp_path):
    arguments = ("--n_layer", 1, "--n_embd", 64, "--vocab_size", "byte", "--skip-if-exists", "x.pth")
    done = programme("init_model.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shape = peek_shape(tmp_path / "x.pth")
    assert shape == ModelShape.official(1, 64, 272)
    assert f"{shape.num_parameters():,} parameters" in done.stdout
    before = (tmp_path / "x.pth").stat().st_mtime_ns
    again = programme("init_model.py", *arguments, cwd=tmp_path)
    assert again.returncode == 0
    assert "left as it is" in again.stdout
    assert (tmp_path / "x.pth").stat().st_mtime_ns == before


def test_init_programme_options(tmp_path):
    arguments = ["--n_layer=1", "--n_embd=64", "--vocab_size=300", "--head_size=32", "--dim_ffn=128", "--dtype=fp32"]
    done = programme(
        "init_model.py", *arguments, "--no-safe-init", "--emb-scale=0.5", "new/x.safetensors", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    weights = read_weights(tmp_path / "new" / "x.safetensors")
    assert peek_shape(tmp_path / "new" / "x.safetensors") == ModelShape.official(1, 64, 300, head_size=32, dim_ffn=128)
    assert weights["emb.weight"].dtype == torch.float32
    assert weights["emb.weight"].abs().max() > 0.4


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (["--n_embd=100"], "multiple of head_size 64"),
        (["--n_embd=64", "--vocab_size=pile"], "a number, world, neox or byte"),
        (["--n_embd=64", "--emb-scale=0"], "above 0"),
    ],
)
def test_init_programme_refuses_bad_sizes(tmp_path, arguments, mention):
    done = programme("init_model.py", "--n_layer=1", *arguments, "x.pth", cwd=tmp_path)
    assert done.returncode == 2
    assert mention in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
