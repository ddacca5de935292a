"""Experiment trackers that cannot be reached, break or hang: the run goes on, and its own record is whole."""

from __future__ import annotations

import json
import socket

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from trainer.train.tracking import TolerantLogger

KEY = "0123456789012345678901234567890123456789"


class Broken(Logger):
    """Fails from the n-th call on."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.calls, self.fails_at = 0, fails_at

    def _call(self) -> str:
        self.calls += 1
        if self.calls >= self.fails_at:
            raise ConnectionError("no route to host")
        return "x"

    name = version = experiment = property(_call)

    def log_metrics(self, metrics, step=None):
        self._call()

    def log_hyperparams(self, *args, **kwargs):
        self._call()


@pytest.fixture
def silent_server():
    """Port at which connections are taken and nothing is said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.fault(67)
def test_nothing_is_asked_of_a_tracker_that_has_failed(caplog):
    broken = Broken(fails_at=3)
    logger = TolerantLogger(broken)
    for _ in range(5):
        logger.log_metrics({"train/loss": 1.0}, 1)
    logger.log_hyperparams({})
    logger.save()
    logger.finalize("success")
    assert logger.experiment is None
    assert broken.calls == 3
    assert [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()] == [
        "Broken has failed and is switched off; metrics.jsonl goes on (ConnectionError: no route to host)"
    ]


def test_a_tracker_that_works_gets_everything(tmp_path):
    logger = TolerantLogger(CSVLogger(tmp_path, name="run"))
    logger.log_metrics({"train/loss": 1.5}, 3)
    logger.save()
    assert "1.5" in (tmp_path / "run" / "version_0" / "metrics.csv").read_text()
    assert logger.log_dir == str(tmp_path / "run" / "version_0")


@pytest.mark.fault(67)
@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "never answers"])
def test_wandb_that_cannot_be_reached_does_not_stop_the_run(truth, another, silent_server, server):
    pytest.importorskip("wandb")
    port = silent_server if server == "never answers" else 9
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": str(another.folder)}}
    environment = {
        "WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "2",
        "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
    }  # fmt: skip
    output = another.fit(f"--trainer.logger={json.dumps(logger)}", environment=environment, cwd=another.folder)
    assert "WandbLogger has failed and is switched off" in output
    assert KEY not in output
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(67)
def test_a_tracker_that_is_not_installed_is_named(another):
    output = another.fit("--trainer.logger=lightning.pytorch.loggers.NeptuneLogger", code=2)
    assert "trainer" in output.splitlines()[-1]
    assert "Traceback" not in output
