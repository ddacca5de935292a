"""Adapters as files: merged, converted to other trainers' forms and back, and refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.adapter import (
    Adapter,
    AdapterInfo,
    MergedWeights,
    adapter_shapes,
    base_fingerprint,
    read_adapter,
    write_adapter,
)
from trainer.checkpoint.export import save_weights
from trainer.checkpoint.foreign_adapters import read_foreign_adapter, write_peft_folder, write_rwkv_peft_file
from trainer.checkpoint.read import read_weights
from trainer.config.adapters import LORA_TARGETS, LoraSettings
from trainer.errors import CheckpointError, ConfigError
from trainer.generate.engine import load_generator
from trainer.generate.state_file import load_state
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape.official(2, 64, 272)
GENERATOR = torch.Generator().manual_seed(0)
BASE = {n: w + 0.05 * torch.randn(w.shape, generator=GENERATOR) for n, w in init_weights(SHAPE, 1).items()}
INFOS = {
    "lora": AdapterInfo(method="lora", r=4, alpha=8.0, targets=LORA_TARGETS),
    "pissa": AdapterInfo(method="pissa", r=4, alpha=4.0, targets=("att.key", "ffn.value")),
    "parts": AdapterInfo(method="lora", r=2, alpha=3.0, targets=("att.output",), train_parts=("norms", "mixes")),
    "state": AdapterInfo(method="state"),
}


def make_adapter(kind: str, source: Path = Path("made")) -> Adapter:
    generator = torch.Generator().manual_seed(2)
    info = dataclasses.replace(INFOS[kind], base_fingerprint=base_fingerprint(BASE), base="base.pth")
    sizes = adapter_shapes(info, SHAPE)
    return Adapter(info, {n: 0.1 * torch.randn(s, generator=generator) for n, s in sizes.items()}, source)


def logits(model: RWKV7) -> torch.Tensor:
    ids = torch.arange(40)[None] * 7 % 272
    with torch.no_grad():
        return model.double().head(model(ids)[0])


@pytest.mark.parametrize("kind", ["lora", "pissa", "parts"])
def test_merged_model_is_base_and_adapter(kind, tmp_path):
    adapter = make_adapter(kind)
    write_adapter(tmp_path, adapter.tensors, adapter.info)
    merged = MergedWeights(BASE, read_adapter(tmp_path))
    plain = RWKV7(SHAPE, "chunked")
    plain.load_state_dict(dict(merged))
    init = "pissa" if kind == "pissa" else "zero"
    lora = LoraSettings(r=adapter.info.r, alpha=adapter.info.alpha, targets=adapter.info.targets, init=init)
    adapted = RWKV7(SHAPE, "chunked", lora=lora)
    adapted.load_state_dict(BASE | adapter.tensors)
    assert (logits(plain) - logits(adapted)).abs().max() < 1e-5
    # Matrix by matrix, in float64.
    name, scale = f"blocks.1.{adapter.info.targets[-1]}", adapter.info.alpha / adapter.info.r
    wide = {n: x.double() for n, x in adapter.tensors.items()}
    product = wide[f"{name}.lora_B"] @ wide[f"{name}.lora_A"]
    if kind == "pissa":
        product -= wide[f"{name}.init_lora_B"] @ wide[f"{name}.init_lora_A"]
    wanted = BASE[f"{name}.weight"].double() + scale * product
    assert (merged[f"{name}.weight"] - wanted).abs().max() < 1e-6
    assert not merged[f"{name}.weight"].equal(BASE[f"{name}.weight"])


@pytest.mark.parametrize("kind", ["lora", "pissa", "parts", "state"])
def test_rwkv_peft_files_come_back_as_the_same_model(kind, tmp_path):
    adapter = make_adapter(kind)
    alpha = write_rwkv_peft_file(adapter, tmp_path / "rwkv-0.pth")
    stored = torch.load(tmp_path / "rwkv-0.pth", weights_only=True)
    assert all(not name.startswith("model.") and "init_" not in name for name in stored)
    again = read_foreign_adapter(tmp_path / "rwkv-0.pth", BASE, alpha or None)
    if kind == "state":
        assert all(again.tensors[name].equal(x) for name, x in adapter.tensors.items())
        return
    assert "blocks.1.att.output.lora_A" in stored or kind == "pissa"
    for name, tensor in MergedWeights(BASE, again).items():
        torch.testing.assert_close(tensor, MergedWeights(BASE, adapter)[name], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="--alpha.*is needed"):
        read_foreign_adapter(tmp_path / "rwkv-0.pth", BASE)


@pytest.mark.parametrize("kind", ["lora", "pissa"])
def test_peft_folders_come_back_as_the_same_model(kind, tmp_path):
    adapter = make_adapter(kind)
    write_peft_folder(adapter, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == (8 if kind == "pissa" else 4)
    again = read_foreign_adapter(tmp_path, BASE)
    for name, tensor in MergedWeights(BASE, again).items():
        torch.testing.assert_close(tensor, MergedWeights(BASE, adapter)[name], rtol=0, atol=1e-6)


def test_peft_names_are_those_of_the_hugging_face_layout(tmp_path):
    from safetensors.torch import load_file

    write_peft_folder(make_adapter("lora"), tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored["base_model.model.model.layers.1.attn.r_proj.lora_A.weight"].shape == (4, 64)
    assert stored["base_model.model.model.layers.0.ffn.key.lora_B.weight"].shape == (256, 4)
    assert len(stored) == 2 * 6 * 2
    with pytest.raises(CheckpointError, match="ln.*no place"):
        write_peft_folder(make_adapter("parts"), tmp_path)


def test_adapters_that_do_not_fit(tmp_path):
    adapter = make_adapter("lora")
    more = Adapter(adapter.info, adapter.tensors | {"blocks.0.att.gate.lora_A": torch.zeros(4, 64)}, tmp_path)
    with pytest.raises(CheckpointError, match="unknown tensor blocks.0.att.gate"):
        MergedWeights(BASE, more)
    less = Adapter(adapter.info, dict(list(adapter.tensors.items())[1:]), tmp_path)
    with pytest.raises(CheckpointError, match="no tensor blocks.0.att.receptance.lora_A"):
        MergedWeights(BASE, less)
    with pytest.raises(CheckpointError, match=r"other weights.*fix: use its base base.pth"):
        MergedWeights(BASE | {"head.weight": BASE["head.weight"] + 0.1}, adapter)
    with pytest.raises(CheckpointError, match="cannot be merged.*--state-in"):
        MergedWeights(BASE, make_adapter("state"))
    (tmp_path / "adapter.json").write_text('{"peft": 1}')
    with pytest.raises(CheckpointError, match="no adapter of this trainer.*merge_adapter.py"):
        read_adapter(tmp_path)
    torch.save({"emb.weight": torch.zeros(2, 2)}, tmp_path / "plain.pth")
    with pytest.raises(CheckpointError, match="holds no lora_A"):
        read_foreign_adapter(tmp_path / "plain.pth", BASE, 1.0)


def test_fingerprint_is_of_values_not_of_files(tmp_path):
    for dtype in ("bf16", "fp32"):
        save_weights(BASE, tmp_path / f"{dtype}.pth", dtype)
    prints = {base_fingerprint(read_weights(tmp_path / f"{dtype}.pth")) for dtype in ("bf16", "fp32")}
    assert prints == {base_fingerprint(BASE)}


def test_texts_start_from_a_tuned_state_as_rows_of_values(tmp_path):
    """The first token reads S r: a state with one row set moves one channel of its head, whatever the token."""
    adapter = make_adapter("state")
    save_weights(BASE, tmp_path / "base.pth", "fp32")
    write_adapter(tmp_path / "adapter", adapter.tensors, adapter.info)
    generator = load_generator(tmp_path / "base.pth", device="cpu", adapter=tmp_path / "adapter", kernel="chunked")
    given = adapter.tensors["blocks.1.att.time_state"]
    assert generator.snapshot.state[1].wkv[0].equal(given)
    assert not given.equal(given.mT)
    flat = load_state(tmp_path / "adapter" / "adapter.safetensors", generator.model)
    assert flat.state[1].wkv[0].equal(given)
    wrong = {name: x[:, :32] for name, x in adapter.tensors.items()}
    torch.save(wrong, tmp_path / "wrong.pth")
    with pytest.raises(CheckpointError, match=r"shape \[1, 32, 64\] instead of \[1, 64, 64\]"):
        load_state(tmp_path / "wrong.pth", generator.model)


@pytest.mark.slow
def test_the_script_merges_and_converts(tmp_path):
    adapter = make_adapter("lora")
    save_weights(BASE, tmp_path / "base.pth", "fp32")
    write_adapter(tmp_path / "a", adapter.tensors, dataclasses.replace(adapter.info, base=str(tmp_path / "base.pth")))

    def script(*words: object) -> str:
        command = [sys.executable, str(ROOT / "merge_adapter.py"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else done.stderr

    script(tmp_path / "a", tmp_path / "merged.pth", "--dtype", "fp32")
    wanted = MergedWeights(BASE, adapter)
    assert all(x.equal(wanted[name]) for name, x in read_weights(tmp_path / "merged.pth").items())
    assert "alpha=8" in script(tmp_path / "a", tmp_path / "flat.pth", "--to", "rwkv-peft")
    text = script(tmp_path / "flat.pth", tmp_path / "b", "--to", "folder", "--base", tmp_path / "base.pth")
    assert text.startswith("error: --alpha")
    script(tmp_path / "flat.pth", tmp_path / "b", "--to", "folder", "--base", tmp_path / "base.pth", "--alpha", 8)
    assert read_adapter(tmp_path / "b").info.r == 4
