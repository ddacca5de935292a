"""Two processes: one that is told to stop or cannot write stops both, and their number may change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from harness import FOLDER, Record, checkpoints, read_rows

from trainer.checkpoint.find import newest_valid

pytestmark = pytest.mark.slow
TERM = int(signal.SIGTERM)


class Ranks:
    """Runs of two processes from one config."""

    def __init__(self, workplace) -> None:
        self.workplace = workplace

    def fit(self, name: str, *options: str, **faults: str) -> str:
        """Run to the end; `rank0` and `rank1` name a fault. Returns the output of both."""
        words = ["fit", "-c", str(self.workplace.config), f"--checkpoint.dir={self.workplace.folder / name}", *options]
        message = {"words": words, "faults": {key.removeprefix("rank"): [fault] for key, fault in faults.items()}}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        result = subprocess.run(
            [*command, str(FOLDER / "rank_worker.py"), json.dumps(message)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return result.stdout + result.stderr

    def run(self, name: str):
        return self.workplace.folder / name


@pytest.fixture(scope="module")
def ranks(parent, corpus, tmp_path_factory):
    from conftest import make_run

    trainer = {"devices": 2, "strategy": "ddp", "microbatch_size": 1, "max_steps": 8}
    workplace = make_run(parent, corpus, tmp_path_factory.mktemp("ranks") / "work", {"trainer": trainer})
    made = Ranks(workplace)
    output = made.fit("truth", "--checkpoint.every_steps=1", "--checkpoint.keep=0")
    assert "rank 0 ends with 0" in output, output
    assert "rank 1 ends with 0" in output, output
    return made


def test_one_rank_is_told_to_stop_and_all_save_the_same_step(ranks):
    output = ranks.fit("stopped", rank1=f"signal_at:optimizer:3:{TERM}")
    for rank in (0, 1):
        assert f"rank {rank} ends with 143" in output, output
    step = int(checkpoints(ranks.run("stopped"))[-1].name.removeprefix("step-"))
    assert step in (3, 4), "a signal after the ranks have talked counts in the next step"
    assert output.count(f"SIGTERM: saved step {step} and stopped") == 2
    ranks.fit("stopped")
    assert Record.of(ranks.run("stopped")).differences(Record.of(ranks.run("truth"))) == []


@pytest.mark.parametrize(
    "fault", [{"rank1": "full_at:half:3"}, {"rank0": "full_at:half:9"}, {"rank0": "full_at:half:11"},
              {"rank0": "full_at:manifest:3"}], ids=["states of rank 1", "states", "moments", "manifest"]
)  # fmt: skip
def test_one_rank_cannot_write_and_none_waits_for_it(ranks, fault):
    name = "full-" + "-".join(fault.values()).replace(":", "-")
    output = ranks.fit(name, **fault)
    for rank in (0, 1):
        assert f"rank {rank} ends with 4" in output, output
    assert newest_valid(ranks.run(name))[0].name == "step-4"
    assert list(ranks.run(name).glob(".step-*")) == []


def test_lanes_go_on_with_another_number_of_ranks(ranks):
    workplace, truth = ranks.workplace, read_rows(ranks.run("truth"))
    output = workplace.fit(f"--resume={ranks.run('truth')}/step-3", "--trainer.devices=1", "--trainer.strategy=auto")
    assert "devices 2 -> 1" in output
    one = [row["loss"] for row in read_rows(workplace.run) if "loss_hex" in row]
    assert one == pytest.approx([row["loss"] for row in truth if "loss_hex" in row][3:], rel=1e-5)
    ranks.fit("two", f"--resume={workplace.run}/step-6")
    two = [row["loss"] for row in read_rows(ranks.run("two")) if "loss_hex" in row]
    assert two == pytest.approx(one[3:], rel=1e-5)
