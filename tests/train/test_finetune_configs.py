"""The recipes in configs/finetune/ train: as they stand, but for the model, the data and the number of steps."""

import math
import os
from pathlib import Path

import pytest

from tests.evaluate.small_models import lively_weights
from trainer.checkpoint.export import save_weights
from trainer.cli import parse_run_config
from trainer.model.naming import ModelShape
from trainer.train.callbacks import METRICS_FILE, read_metrics
from trainer.train.run import execute

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("configs/finetune/*.yaml"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pth"
    # Official initial weights have zeros behind which a state has no gradient.
    save_weights(lively_weights(ModelShape.official(2, 64, 272)), path)
    return path


def overrides(path, weights, tmp_path):
    """What must differ here; every other setting is the recipe's own."""
    text = path.read_text(encoding="utf-8")
    source = (
        ["--data.source_data_dir=docs"]
        if "source: text" in text
        else ["--data.source=configs/data/samples/messages.jsonl"]
    )
    return [
        *source, f"--model.load_model={weights}", f"--data.data_path={tmp_path / 'data'}", "--data.tokenizer=byte",
        "--data.test_split=2", f"--checkpoint.dir={tmp_path / 'run'}", "--trainer.max_steps=2",
        "--trainer.target_batch_size=2", "--trainer.microbatch_size=1", "--trainer.precision=32-true",
        "--trainer.accelerator=cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains(path, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = parse_run_config(["-c", os.path.relpath(path), *overrides(path, weights, tmp_path)])
    execute("fit", run, {"accelerator": "cpu", "enable_progress_bar": False})
    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2
    assert all(math.isfinite(row["loss"]) and 0 < row["grad_norm"] < math.inf for row in steps)


def test_recipes_name_no_more_than_they_need():
    """A recipe is short: settings at their defaults are left out."""
    assert len(RECIPES) >= 4
    for path in RECIPES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
