"""Hugging Face folders: what is in them, both ways bit for bit, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.checkpoint import failpoints
from trainer.checkpoint.export import export_checkpoint, save_weights, write_weights
from trainer.checkpoint.hf_folder import HfOptions
from trainer.checkpoint.read import peek_shape, read_weights
from trainer.checkpoint.shards import UNUSED_FILE
from trainer.errors import CheckpointError, ConfigError, StorageError
from trainer.model.hf_layout import from_hf, to_hf
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape, parameter_shapes

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "fixtures" / "vectors"
TINY = VECTORS / "tiny_L2_D128_V256.pth"
NO_TOKENIZER = HfOptions(tokenizer="none")


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, weights):
    """An `hf` folder in float32."""
    out = tmp_path_factory.mktemp("export") / "hf"
    write_weights(weights, out, "fp32", "hf", NO_TOKENIZER)
    return out


def assert_same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


def test_names_and_shapes_are_those_of_other_converters(weights):
    wanted = json.loads((VECTORS / "key_map_shapes.json").read_text())["hf"]
    assert {name: list(tensor.shape) for name, tensor in to_hf(weights).items()} == {
        name: entry["shape"] for name, entry in wanted.items()
    }


@pytest.mark.parametrize("file_format", ["hf", "hf-fla", "safetensors"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000])
def test_way_through_a_format_and_back_is_bit_for_bit(tmp_path, weights, file_format, max_shard_bytes):
    options = HfOptions(tokenizer="none", max_shard_bytes=max_shard_bytes)
    out = tmp_path / ("x.safetensors" if file_format == "safetensors" else "x")
    write_weights(weights, out, "bf16", file_format, options)
    assert peek_shape(out) == ModelShape.official(2, 128, 256)
    export_checkpoint(out, tmp_path / "back.pth")
    assert_same(read_weights(tmp_path / "back.pth"), weights)
    save_weights(weights, tmp_path / "direct.pth")
    assert (tmp_path / "back.pth").read_bytes() == (tmp_path / "direct.pth").read_bytes()


def test_shards_have_an_index(tmp_path, weights):
    write_weights(weights, tmp_path / "x", "bf16", "hf-fla", HfOptions(tokenizer="none", max_shard_bytes=300_000))
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        stored = load_file(tmp_path / "x" / file)
        assert all(index["weight_map"][name] == file for name in stored)
        assert sum(tensor.nbytes for tensor in stored.values()) <= 300_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in to_hf(weights).values())
    assert_same(read_weights(tmp_path / "x" / "model.safetensors.index.json"), weights)


def test_config_says_every_size(tmp_path):
    shape = ModelShape.official(3, 128, 300, dim_ffn=320, ranks={"w": 8, "a": 12, "v": 16, "g": 20})
    weights = {name: torch.zeros(size) for name, size in parameter_shapes(shape).items()}
    write_weights(weights, tmp_path / "x", "bf16", "hf-fla", NO_TOKENIZER)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    expected = {
        "model_type": "rwkv7", "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 64,
        "num_heads": 2, "value_dim": [128] * 3, "intermediate_size": 320, "hidden_ratio": 2.5,
        "decay_low_rank_dim": 8, "a_low_rank_dim": 12, "v_low_rank_dim": 16, "gate_low_rank_dim": 20,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "fuse_norm": False, "norm_eps": 1e-5,
        "torch_dtype": "bfloat16", "dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert "auto_map" not in config
    assert sorted(os.listdir(tmp_path / "x")) == [
        "config.json", "generation_config.json", "model.safetensors", UNUSED_FILE,
    ]  # fmt: skip
    assert peek_shape(tmp_path / "x") == shape


def test_file_under_hugging_face_names_is_read(tmp_path, weights, exported):
    found = read_weights(exported / "model.safetensors")
    used = {
        name: tensor for name, tensor in found.items() if name.removeprefix("blocks.0.att.") not in {"v0", "v1", "v2"}
    }
    assert all(torch.equal(tensor, weights[name].float()) for name, tensor in used.items())
    assert len(used) == 69
    torch.save(load_file(exported / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert_same(read_weights(tmp_path), found)


def test_older_files_with_stacked_mixes_are_read(tmp_path, weights, exported):
    stored = load_file(exported / "model.safetensors")
    for layer in range(2):
        mixes = [stored.pop(f"model.layers.{layer}.attn.x_{mix}") for mix in "rwkvag"]
        stored[f"model.layers.{layer}.attn.x_x"] = torch.stack(mixes)
    save_file(stored, tmp_path / "x.safetensors")
    found = read_weights(tmp_path / "x.safetensors")
    assert peek_shape(tmp_path / "x.safetensors") == ModelShape.official(2, 128, 256)
    assert all(
        torch.equal(found[f"blocks.1.att.x_{mix}"], weights[f"blocks.1.att.x_{mix}"].float()) for mix in "rwkvag"
    )


def test_float16_refuses_values_that_do_not_fit(tmp_path, weights):
    write_weights(weights, tmp_path / "x.pth", "fp16")
    assert read_weights(tmp_path / "x.pth")["emb.weight"].dtype == torch.float16
    large = weights | {"ln_out.bias": torch.full((128,), 1e5)}
    with pytest.raises(ConfigError, match=r"--dtype: model.norm.bias holds values above 65504"):
        write_weights(large, tmp_path / "y", "fp16", "hf", NO_TOKENIZER)
    assert os.listdir(tmp_path) == ["x.pth"]


def test_other_head_sizes_are_refused(tmp_path):
    shape = ModelShape.official(1, 64, 300, head_size=32)
    weights = {name: torch.zeros(size) for name, size in parameter_shapes(shape).items()}
    with pytest.raises(ConfigError, match=r"found 'head_size 32'.*--format pth"):
        write_weights(weights, tmp_path / "x", "bf16", "hf", NO_TOKENIZER)
    assert os.listdir(tmp_path) == []


def test_earlier_export_is_replaced_and_nothing_else(tmp_path, weights):
    out = tmp_path / "x"
    write_weights(weights, out, "bf16", "hf", HfOptions(tokenizer="none", max_shard_bytes=300_000))
    write_weights(weights, out, "bf16", "hf-fla", NO_TOKENIZER)
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors", UNUSED_FILE]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"x: exists and holds notes.txt"):
        write_weights(weights, out, "bf16", "hf", NO_TOKENIZER)
    (tmp_path / "y").write_text("file")
    with pytest.raises(StorageError, match=r"y: exists and is no folder"):
        write_weights(weights, tmp_path / "y", "bf16", "hf", NO_TOKENIZER)
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "tokenizer.json").write_text("{}")
    with pytest.raises(StorageError, match=r"z: exists and is no export"):
        write_weights(weights, tmp_path / "z", "bf16", "hf", NO_TOKENIZER)
    assert sorted(os.listdir(tmp_path)) == ["x", "y", "z"]


def test_killed_export_leaves_the_old_folder(tmp_path, weights):
    write_weights(weights, tmp_path / "x", "bf16", "hf", NO_TOKENIZER)
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    pid = os.fork()
    if pid == 0:
        failpoints.arm("written:1:kill")
        write_weights(weights, tmp_path / "x", "fp32", "hf", NO_TOKENIZER)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "mention"),
    [
        (lambda folder: next(folder.glob("model-00002-*")).unlink(), "files, of which 1 are missing"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
            "outside of its folder",
        ),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "found 'llama'"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, weights, damage, mention):
    write_weights(weights, tmp_path / "x", "bf16", "hf-fla", HfOptions(tokenizer="none", max_shard_bytes=300_000))
    damage(tmp_path / "x")
    for read in (read_weights, peek_shape):
        with pytest.raises(CheckpointError, match=mention):
            read(tmp_path / "x")


def test_two_tensors_of_one_meaning_are_refused(tmp_path, exported):
    stored = load_file(exported / "model.safetensors")
    with pytest.raises(CheckpointError, match="two tensors for head.weight"):
        from_hf(stored | {"head.weight": stored["lm_head.weight"]})


def program(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_programs_write_and_read_folders(tmp_path):
    shape = ModelShape.official(1, 64, 272)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(size, generator=generator) for name, size in parameter_shapes(shape).items()}
    save_weights(weights, tmp_path / "x.pth")
    done = program(ROOT / "export_checkpoint.py", "x.pth", "--format", "hf", "--max-shard-gb", "0.0001", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rwkv_model_hf: parameters=" in done.stdout
    assert "dtype=bf16" in done.stdout
    options = ("--tokens", "5", "--seed", "1", "--prompt", "ab")
    texts = [program(ROOT / "generate.py", name, *options, cwd=tmp_path) for name in ("x.pth", "rwkv_model_hf")]
    assert texts[0].returncode == 0, texts[0].stderr
    assert texts[0].stdout == texts[1].stdout
    dragon = program(ROOT / "dragon_test.py", "rwkv_model_hf", "cpu fp32", "3", cwd=tmp_path)
    assert dragon.returncode == 0, dragon.stderr
    bad = program(ROOT / "export_checkpoint.py", "x.pth", "y", "--format=hf", "--tokenizer=none_such", cwd=tmp_path)
    assert bad.returncode == 2
    assert "none_such holds no tokenizer files" in bad.stderr
    assert not (tmp_path / "y").exists()


@pytest.mark.slow
def test_training_starts_from_a_folder_as_from_the_file(tmp_path):
    shape = ModelShape.official(2, 64, 272)
    save_weights(init_weights(shape, 0), tmp_path / "x.pth")
    export_checkpoint(tmp_path / "x.pth", tmp_path / "x", file_format="hf-fla", hf=NO_TOKENIZER)
    for source in ("x.pth", "x"):
        options = [f"--model.load_model={tmp_path / source}", "--model.n_layer=null", "--model.n_embd=null"]
        options += ["--trainer.max_steps=2", f"--checkpoint.dir={tmp_path / 'runs' / source}"]
        options += [f"--data.data_path={tmp_path / 'data'}", "--model.ctx_len=64"]
        config = ROOT / "configs" / "example-min.yaml"
        done = program(ROOT / "lightning_trainer.py", "fit", "-c", config, *options, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    trained = [read_weights(tmp_path / "runs" / source / "step-2") for source in ("x.pth", "x")]
    assert_same(trained[1], trained[0])
    assert not torch.equal(trained[0]["emb.weight"].bfloat16(), read_weights(tmp_path / "x.pth")["emb.weight"])
