"""resize_model.py, add_tokens.py and merge_model.py: files of every kind in and out, nothing half written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import add_tokens
import merge_model
import resize_model
from trainer.checkpoint.export import save_weights, write_weights
from trainer.checkpoint.hf_folder import HfOptions
from trainer.checkpoint.read import peek_shape, read_weights
from trainer.data.tokenizers import get_tokenizer
from trainer.errors import CheckpointError, ConfigError, DataError, StorageError, TrainerError
from trainer.generate.engine import load_generator
from trainer.model.naming import ModelShape, parameter_shapes

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape.official(1, 64, 272)


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """model.pth in bf16, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(size, generator=generator) for name, size in parameter_shapes(SHAPE).items()}
    save_weights(weights, tmp_path / "model.pth")
    return read_weights(tmp_path / "model.pth")


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    assert module.main() == 0


def test_resize_to_each_format(monkeypatch, capsys, model):
    for out in ("deep.pth", "deep.safetensors"):
        run(resize_model, monkeypatch, "model.pth", out, "--n_layer=3", "--rank_g=72")
        assert peek_shape(Path(out)) == ModelShape(3, 64, 272, 64, 256, 32, 32, 32, 72)
        assert {tensor.dtype for tensor in read_weights(Path(out)).values()} == {torch.bfloat16}
    assert "blocks from: 0 0+ 0+" in capsys.readouterr().out
    run(resize_model, monkeypatch, "model.pth", "deep", "--n_layer=3", "--rank_g=72", "--format=hf", "--dtype=fp32")
    again = read_weights(Path("deep"))
    assert again["emb.weight"].dtype == torch.float32
    assert all(torch.equal(tensor.float(), again[name]) for name, tensor in read_weights(Path("deep.pth")).items())


def test_resize_onto_itself(monkeypatch):
    run(resize_model, monkeypatch, "model.pth", "model.pth", "--n_embd=128")
    assert peek_shape(Path("model.pth")) == ModelShape(1, 128, 272, 64, 512, 32, 32, 32, 32)


def test_tokens_are_added_to_files(monkeypatch, capsys, model):
    Path("more.txt").write_text("<c>\n\n<d>\n")
    run(add_tokens, monkeypatch, "model.pth", "new.pth", "--tokens", "<a>", "<b>", "--tokens-file", "more.txt")
    printed = capsys.readouterr().out
    assert "257 <a>\n258 <b>\n259 <c>\n260 <d>\n" in printed
    assert sorted(os.listdir()) == ["model.pth", "more.txt", "new-tokenizer", "new.pth"]
    extended = read_weights(Path("new.pth"))
    assert peek_shape(Path("new.pth")) == SHAPE
    mean = model["emb.weight"][1:257].float().mean(0).bfloat16()
    assert torch.equal(extended["emb.weight"][260], mean)
    assert get_tokenizer("new-tokenizer").encode("x<d>") == [121, 260]
    run(add_tokens, monkeypatch, "new.pth", "again.pth", "--tokens", "<e>", "--tokenizer", "new-tokenizer")
    assert get_tokenizer("again-tokenizer").encode("<d><e>") == [260, 261]


def test_tokens_are_added_to_folders(monkeypatch, model):
    run(add_tokens, monkeypatch, "model.pth", "one", "--tokens", *(f"<{n}>" for n in range(20)), "--format=hf")
    assert peek_shape(Path("one")).vocab_size == 277
    run(add_tokens, monkeypatch, "one", "two", "--tokens", "<new>", "--format=hf-fla")
    assert get_tokenizer("two").encode("<19><new>") == [276, 277]
    run(resize_model, monkeypatch, "two", "three", "--n_layer=2", "--format=hf")
    generator = load_generator(Path("three"), device="cpu")
    assert generator.tokenizer.encode("<new>") == [277]


def test_merge(monkeypatch, model):
    other = {name: tensor.float() + 1 for name, tensor in model.items()}
    write_weights(other, Path("other"), "fp32", "hf-fla", HfOptions(tokenizer="none"))
    run(merge_model, monkeypatch, "mean.safetensors", "model.pth", "other", "--weights", "3", "1", "--dtype=fp32")
    found = read_weights(Path("mean.safetensors"))
    used = [name for name in found if not name.startswith("blocks.0.att.v")]
    for name in used:
        wanted = 0.75 * model[name].float() + 0.25 * other[name]
        torch.testing.assert_close(found[name].bfloat16(), wanted.bfloat16(), rtol=1e-2, atol=1e-3)
    run(merge_model, monkeypatch, "same.pth", "model.pth", "model.pth")
    assert Path("same.pth").read_bytes() == Path("model.pth").read_bytes()


@pytest.mark.parametrize(
    ("module", "arguments", "kind", "mention"),
    [
        (resize_model, ["model.pth", "x.pth", "--n_embd=100"], ConfigError, "multiple of head_size 64"),
        (resize_model, ["none.pth", "x.pth"], CheckpointError, "none.pth: no such file"),
        (resize_model, ["model.pth", "x", "--format=hf", "--max-shard-gb=0"], ConfigError, "above 0"),
        (add_tokens, ["model.pth", "x.pth"], ConfigError, "one or more different texts"),
        (add_tokens, ["model.pth", "x.pth", "--tokens=<a>", "--tokenizer=world"], ConfigError, "knows 65530 tokens"),
        (add_tokens, ["model.pth", "x.pth", "--tokens=<a>", "--tokenizer=none"], ConfigError, "none to extend"),
        (add_tokens, ["model.pth", "x.pth", "--tokens-file=none.txt"], DataError, "none.txt: cannot be read"),
        (add_tokens, ["model.pth", "taken.pth", "--tokens=<a>"], StorageError, "taken-tokenizer: exists and is no folder"),
        (merge_model, ["x.pth", "model.pth", "deep.pth"], CheckpointError, "deep.pth: has n_layer 2 where model.pth has 1"),
        (merge_model, ["x.pth", "model.pth", "--weights", "1", "2"], ConfigError, "2 numbers for 1 models"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(monkeypatch, module, arguments, kind, mention):
    run(resize_model, monkeypatch, "model.pth", "deep.pth", "--n_layer=2")
    Path("taken-tokenizer").write_text("mine")
    with pytest.raises(kind, match=mention) as caught:
        run(module, monkeypatch, *arguments)
    assert issubclass(kind, TrainerError)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir()) == ["deep.pth", "model.pth", "taken-tokenizer"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["resize_model.py", "add_tokens.py", "merge_model.py"])
def test_programs_end_with_exit_code_2_for_mistakes(program):
    command = [sys.executable, str(ROOT / program), "none.pth", "x.pth"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no such file" in done.stderr
