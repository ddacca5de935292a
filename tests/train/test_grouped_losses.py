"""Losses by source and position against their definition: each document alone through the whole model."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trainer.checkpoint.read import read_weights
from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.data.prepare import open_prepared, prepare
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape, shape_from_weights
from trainer.model.rwkv7 import RWKV7
from trainer.train.callbacks import METRICS_FILE, read_metrics
from trainer.train.run import execute

NAMES = ("first", "second", "rest")
OPTIONS = {"accelerator": "cpu", "log_every_n_steps": 2, "enable_progress_bar": False}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights without the official zeros, under which every token has the same loss."""
    path = tmp_path_factory.mktemp("weights") / "model.pth"
    shape = ModelShape.official(2, 32, 272, head_size=16)
    generator = torch.Generator().manual_seed(7)
    made = init_weights(shape, 1)
    torch.save({name: w + 0.3 * torch.randn(w.shape, generator=generator) for name, w in made.items()}, path)
    return path


@pytest.fixture
def run(tmp_path, weights):
    sources = []
    for index, name in enumerate(NAMES):
        file = tmp_path / f"{name}.jsonl"
        records = [{"prompt": f"{name} {i}: ", "completion": chr(97 + index) * (5 + 7 * i)} for i in range(6)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        sources.append({"name": name, "source": str(file)})
    return RunConfig(
        model=ModelConfig(load_model=str(weights), head_size=16, ctx_len=16, lr_init=1e-30, kernel="chunked"),
        data=DataConfig(sources=sources, data_path=str(tmp_path / "data"), tokenizer="byte", test_split=2),
        trainer=TrainerConfig(target_batch_size=6, microbatch_size=2),
        checkpoint=CheckpointConfig(dir=str(tmp_path / "run"), every_steps=0),
        precision="32-true",
        max_steps=2,
        accelerator="cpu",
    )


def token_losses(store, path):
    """Of each document: its source, and loss and weight of each target."""
    model_weights = read_weights(path)
    model = RWKV7(shape_from_weights(model_weights), "chunked")
    model.load_state_dict(model_weights)
    for document, size in enumerate(store.sizes.tolist()):
        ids = torch.from_numpy(store.read(document, 0, size).astype("int64"))
        mask = store.loss_mask(document, 1, size)
        weight = torch.ones(size - 1) if mask is None else torch.from_numpy(mask.copy())
        with torch.no_grad():
            hidden, _ = model(ids[None, :-1])
            loss = F.cross_entropy(model.head(hidden[0]), ids[1:], reduction="none")
        yield 0 if store.source_ids is None else int(store.source_ids[document]), loss, weight


def expected(store, path):
    sums = torch.zeros(2, len(NAMES))
    for source, loss, weight in token_losses(store, path):
        sums[:, source] += torch.stack([(weight * loss).sum(), weight.sum()])
    means = (sums[0] / sums[1]).tolist()
    return {name: pytest.approx(mean, rel=1e-5) for name, mean in zip(NAMES, means, strict=True)}


def expected_at(store, path):
    sums = {}
    for _, loss, weight in token_losses(store, path):
        for index in range(len(loss)):
            context = index + 1
            first = 1 if context < 16 else 2 ** (context.bit_length() - 1)
            total, count = sums.get(first, (0.0, 0.0))
            sums[first] = total + float(weight[index] * loss[index]), count + float(weight[index])
    return {str(first): pytest.approx(total / count, rel=1e-5) for first, (total, count) in sums.items() if count}


def by_group(row, prefix):
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


@pytest.mark.parametrize("packed", [False, True])
def test_losses_of_the_sources_of_a_mixture(run, packed, weights, caplog):
    data = dataclasses.replace(run.data, packing_enable=packed)
    prepare(data)
    train, validation, _ = open_prepared(data)
    # Packed rows hold documents of several sources.
    steps = 1 if packed else 2
    run = dataclasses.replace(run, data=data, max_steps=steps)
    if packed:
        run = dataclasses.replace(run, trainer=TrainerConfig(target_batch_size=24, microbatch_size=2))
    with caplog.at_level("INFO", "trainer"):
        execute("fit", run, {"accelerator": "cpu", "log_every_n_steps": steps})
    assert re.search(rf"step={steps} loss=\d\.\d+ loss/first=\d\.\d+ loss/second=", caplog.text)
    rows = read_metrics(Path(run.checkpoint.dir) / METRICS_FILE)
    *earlier, last = [row for row in rows if "loss" in row]
    assert not any(by_group(row, "loss/") or by_group(row, "loss_at/") for row in earlier)
    assert by_group(last, "loss/") == expected(train, weights)
    assert by_group(last, "loss_at/") == expected_at(train, weights)
    (checked,) = [row for row in rows if "validation_loss" in row]
    assert by_group(checked, "validation/loss/") == expected(validation, weights)
    assert by_group(checked, "validation/loss_at/") == expected_at(validation, weights)
    with caplog.at_level("INFO", "trainer"):
        execute("validate", run, {"accelerator": "cpu", "enable_progress_bar": False})
    assert all(f"validation/loss/{name}=" in caplog.text for name in NAMES)


def test_one_source_has_no_losses_of_its_own(run, weights):
    data = dataclasses.replace(run.data, sources=None, source=run.data.sources[0]["source"])
    execute("fit", dataclasses.replace(run, data=data), OPTIONS)
    rows = read_metrics(Path(run.checkpoint.dir) / METRICS_FILE)
    assert len([row for row in rows if "loss" in row]) == 2
    assert not any("loss/" in name for row in rows for name in row)
