"""Adapters in runs: what is trained, what is saved, and that interruptions change nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from adapter_runs import fit, make_run, random_weights, write_base, write_documents

from trainer.checkpoint.adapter import ADAPTER_FILE, MergedWeights, read_adapter
from trainer.checkpoint.export import save_weights
from trainer.checkpoint.read import read_weights
from trainer.checkpoint.tensorfile import load_safetensors
from trainer.config.checks import check_run
from trainer.errors import CheckpointError, ConfigError
from trainer.train.run import execute

METHODS = {
    "lora": {"lora": {"r": 4, "dropout": 0.2}},
    "pissa": {"lora": {"r": 4, "init": "pissa", "targets": ["att.key", "ffn.value"]}},
    "lora-parts": {"lora": {"r": 4}, "train_parts": ["norms", "emb"]},
    "parts": {"train_parts": ["mixes", "gates", "head"]},
    "state": {"state_tuning": {"shifts": True}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("method", METHODS)
def test_interrupted_runs_end_with_the_same_bits(method, base, data, tmp_path):
    whole = make_run(tmp_path / "whole", base, data, **METHODS[method])
    rows = fit(whole)
    parts = dataclasses.replace(whole, checkpoint=dataclasses.replace(whole.checkpoint, dir=str(tmp_path / "parts")))
    fit(dataclasses.replace(parts, max_steps=2))
    resumed = fit(dataclasses.replace(parts, resume="auto"))
    assert [row["loss_hex"] for row in resumed] == [row["loss_hex"] for row in rows]
    assert len({row["loss_hex"] for row in rows}) == 4
    for name in (ADAPTER_FILE, "adapter.json", "moments-00000.safetensors"):
        assert (tmp_path / "whole/step-4" / name).read_bytes() == (tmp_path / "parts/step-4" / name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_hold_what_was_trained_and_nothing_else(method, base, data, tmp_path):
    fit(make_run(tmp_path, base, data, **METHODS[method]))
    first, last = read_adapter(tmp_path / "step-2"), read_adapter(tmp_path)
    assert last.source == tmp_path / "step-4"
    assert not (last.source / "model.safetensors").exists()
    weights = read_weights(base)
    for name, tensor in last.tensors.items():
        unused = name.startswith("blocks.0.att.v") and name[-2:] in ("v0", "v1", "v2")
        assert tensor.equal(first.tensors[name]) == (".init_lora_" in name or unused), name
        assert name not in weights or not tensor.equal(weights[name]) or unused, name
    moments = load_safetensors(last.source / "moments-00000.safetensors")
    trained = sum(x.numel() for n, x in last.tensors.items() if ".init_lora_" not in n)
    # Flat moments are padded, each parameter to 64 elements.
    assert trained <= sum(x.numel() for n, x in moments.items() if n.startswith("exp_avg.")) < trained + 64 * 80


def test_grad_cp_does_not_change_dropout(base, data, tmp_path):
    runs = [
        fit(make_run(tmp_path / str(grad_cp), base, data, lora={"r": 4, "dropout": 0.5}, grad_cp=grad_cp))
        for grad_cp in (True, False)
    ]
    for a, b in zip(*runs, strict=True):
        assert a["loss_hex"] == b["loss_hex"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)


def test_a_fresh_adapter_changes_nothing(base, data, tmp_path, caplog):
    losses = {}
    for name, lora in {"none": None, "zero": {"r": 4}, "pissa": {"r": 4, "init": "pissa"}}.items():
        run = dataclasses.replace(make_run(tmp_path / name, base, data, lora=lora), max_steps=1)
        losses[name] = fit(run)[0]["loss"]
    assert losses["zero"] == losses["pissa"] == losses["none"]


def test_an_adapter_is_validated_and_trained_on(base, data, tmp_path, caplog):
    run = make_run(tmp_path / "first", base, data, **METHODS["lora"])
    fit(run)
    with caplog.at_level("INFO", logger="trainer"):
        execute("validate", dataclasses.replace(run, resume="auto"), {"accelerator": "cpu", "logger": False})
    merged = tmp_path / "merged.pth"
    save_weights(MergedWeights(read_weights(base), read_adapter(tmp_path / "first")), merged, dtype="fp32")
    plain = make_run(tmp_path / "plain", merged, data)
    with caplog.at_level("INFO", logger="trainer"):
        execute("validate", plain, {"accelerator": "cpu", "logger": False})
    losses = [float(r.getMessage().split("=")[1]) for r in caplog.records if "validation/loss=" in r.getMessage()]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    second = make_run(tmp_path / "second", base, data, **METHODS["lora"], load_adapter=str(tmp_path / "first"))
    fit(dataclasses.replace(second, max_steps=1))
    before, after = read_adapter(tmp_path / "first").tensors, read_adapter(tmp_path / "second").tensors
    change = max(float((after[n] - before[n]).abs().max()) for n in after)
    assert 0 < change < 0.02


# ---- errors


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"lora": {"targets": ["att.kye"]}}, ["model.lora.targets", "att.kye", "att.receptance", "ffn.value"]),
        ({"lora": {"rank": 4}}, ["model.lora.rank", "r, alpha"]),
        ({"lora": {"r": 0}}, ["model.lora.r", "1 or more"]),
        ({"lora": {"dropout": 1}}, ["model.lora.dropout", "below 1"]),
        ({"lora": {"init": "svd"}}, ["model.lora.init", "zero, pissa"]),
        ({"lora": {"init": "pissa", "alpha": 8}}, ["model.lora.alpha", "leave alpha out"]),
        ({"lora": {"dropout": 0.1}, "compile": "on"}, ["model.lora.dropout", "compile: off"]),
        ({"lora": {"dropout": 0.1}, "cuda_graphs": "on"}, ["model.lora.dropout", "cuda_graphs: off"]),
        ({"lora": {}, "load_model": None, "n_layer": 2, "n_embd": 64}, ["model.lora", "model.load_model"]),
        ({"train_parts": ["ln"]}, ["model.train_parts", "norms"]),
        ({"state_tuning": {"shift": True}}, ["model.state_tuning.shift", "shifts"]),
        ({"state_tuning": {}, "lora": {}}, ["model.state_tuning", "model.lora"]),
        ({"load_adapter": "x"}, ["model.load_adapter", "model.lora"]),
    ],
)
def test_settings_that_cannot_be(model, words, base, data, tmp_path):
    with pytest.raises(ConfigError) as error:
        make_run(tmp_path, base, data, **model)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_state_tuning_wants_documents_of_their_own(base, data, tmp_path):
    run = make_run(tmp_path, base, data, state_tuning={})
    for change in ({"packing_enable": True}, {"batching": "stream"}):
        with pytest.raises(ConfigError, match="state_tuning.*before each document"):
            check_run(dataclasses.replace(run, data=dataclasses.replace(run.data, **change)))


def test_foreign_adapters_and_bases_are_refused(base, data, tmp_path):
    run = make_run(tmp_path / "run", base, data, **METHODS["lora"])
    fit(dataclasses.replace(run, max_steps=1))
    other = write_base(tmp_path, seed=2)
    with pytest.raises(CheckpointError, match="other weights.*base-1.pth"):
        fit(dataclasses.replace(make_run(tmp_path / "run", other, data, **METHODS["lora"]), resume="auto"))
    with pytest.raises(CheckpointError, match="other weights"):
        MergedWeights(random_weights(2), read_adapter(tmp_path / "run"))
    with pytest.raises(ConfigError, match="resume.*other parts"):
        fit(dataclasses.replace(make_run(tmp_path / "run", base, data, lora={"r": 8}), resume="auto"))
    with pytest.raises(CheckpointError, match="its r differs.*found '4'.*must be 8"):
        fit(make_run(tmp_path / "new", base, data, lora={"r": 8}, load_adapter=str(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"adapter\.json"):
        fit(make_run(tmp_path / "new", base, data, lora={}, load_adapter=str(base.parent)))
    with pytest.raises(CheckpointError, match="holds an adapter, not a whole model.*merge_adapter"):
        read_weights(tmp_path / "run/step-1")
