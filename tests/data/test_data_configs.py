"""Every config under configs/data prepares its sample and trains five steps."""

import dataclasses
from pathlib import Path

import pytest

from trainer import cli
from trainer.data.prepare import open_prepared, prepare

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "data").glob("*.yaml"))


def prepared(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run = cli.parse_run_config([str(path)], command="preload")
    has_folder = run.data.source != "binidx"
    data = dataclasses.replace(run.data, data_path=str(tmp_path / "data")) if has_folder else run.data
    return data, prepare(data)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sample_is_prepared_and_up_to_date_then(path, tmp_path, monkeypatch):
    data, summary = prepared(path, tmp_path, monkeypatch)
    assert summary.counts["train_documents"] > 0
    assert summary.counts["validation_documents"] > 0
    assert 0 < summary.counts["train_trained_tokens"] < summary.counts["train_tokens"]
    assert set(summary.dropped) <= {"empty"}
    assert prepare(data).reason is None
    train, _, manifest = open_prepared(data)
    assert train.num_tokens == manifest.counts["train_tokens"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sample_trains_five_steps(path, tmp_path, monkeypatch, caplog):
    data, _ = prepared(path, tmp_path, monkeypatch)
    options = ["fit", "-c", str(path), f"--checkpoint.dir={tmp_path / 'run'}", "--trainer.accelerator=cpu"]
    if data.source != "binidx":
        options.append(f"--data.data_path={tmp_path / 'data'}")
    assert cli.main(options) == 0
