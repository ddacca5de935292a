"""Two processes: one that is told to stop, cannot write or dies ends both, and their number may change."""

from __future__ import annotations

import dataclasses
import signal
import socket

import pytest
from harness import DONE, KILLED, Record, Workplace, checkpoints, make_run, read_rows

from trainer.checkpoint.find import newest_valid

pytestmark = pytest.mark.slow
TERM = int(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Ranks:
    """Runs of two processes, which nothing but the trainer itself ends."""

    workplace: Workplace
    always: tuple[str, ...] = ()
    """Faults of every run and rank."""

    def run(self, name: str) -> Workplace:
        return dataclasses.replace(self.workplace, run=self.workplace.folder / name)

    def fit(self, name: str, *options: str, failpoint: str = "", **faults: str) -> tuple[list[int], str]:
        """Exit codes and the output of both; `rank0` and `rank1` name a fault, `failpoint` is rank 1's."""
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": name, "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        children = [
            self.run(name).start(
                *options,
                faults=(*self.always, *([faults[f"rank{rank}"]] if f"rank{rank}" in faults else [])),
                environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                failpoint=failpoint if rank == 1 else "",
            )
            for rank in (0, 1)
        ]
        codes = [child.wait() for child in children]
        return codes, "".join(child.output() for child in children)

    def record(self, name: str) -> Record:
        return self.run(name).record()


@pytest.fixture(scope="module")
def make_ranks(parent, corpus, tmp_path_factory):
    """A function that makes Ranks with a run named `truth`."""

    def make(strategy: str, *always: str) -> Ranks:
        trainer = {"devices": 2, "strategy": strategy, "microbatch_size": 1, "max_steps": 8}
        folder = tmp_path_factory.mktemp(strategy) / "work"
        ranks = Ranks(make_run(parent, corpus, folder, {"trainer": trainer}), always)
        codes, output = ranks.fit("truth", "--checkpoint.every_steps=1", "--checkpoint.keep=0")
        assert codes == [DONE, DONE], output
        return ranks

    return make


@pytest.fixture(scope="module")
def ddp(make_ranks):
    return make_ranks("ddp")


def test_one_rank_is_told_to_stop_and_both_save_the_same_step(ddp):
    codes, output = ddp.fit("stopped", rank1=f"signal_at:optimizer:3:{TERM}")
    assert codes == [143, 143], output
    # The ranks have talked about signals before the update: the next step is the one that ends.
    assert output.count("SIGTERM: saved step 4 and stopped") == 2
    assert ddp.fit("stopped")[0] == [DONE, DONE]
    assert ddp.record("stopped").differences(ddp.record("truth")) == []


@pytest.mark.parametrize(
    "fault",
    [{"rank1": "full_at:half:3"}, {"rank0": "full_at:half:9"}, {"rank0": "full_at:half:11"},
     {"rank0": "full_at:manifest:3"}],
    ids=["states of rank 1", "states of rank 0", "moments", "manifest"],
)  # fmt: skip
def test_one_rank_cannot_write_and_the_other_does_not_wait(ddp, fault):
    name = "full-" + "-".join(fault.values()).replace(":", "-")
    codes, output = ddp.fit(name, **fault)
    assert codes == [4, 4], output
    assert output.count("step-6: cannot write: No space left") == 2
    assert newest_valid(ddp.run(name).run)[0].name == "step-4"
    assert list(ddp.run(name).run.glob(".step-*")) == []


def test_one_rank_is_killed_in_a_save(ddp):
    codes, output = ddp.fit("killed", failpoint="half:3")
    assert codes == [6, KILLED], output
    assert "connection to another process was lost" in output
    assert checkpoints(ddp.run("killed").run)[-1].name == "step-4"
    assert ddp.fit("killed")[0] == [DONE, DONE]
    assert ddp.record("killed").differences(ddp.record("truth")) == []


def test_lanes_go_on_with_another_number_of_ranks(ddp):
    one, start = ddp.run("one"), ddp.run("truth").run / "step-3"
    output = one.fit(f"--resume={start}", "--trainer.devices=1", "--trainer.strategy=auto")
    assert "devices 2 -> 1" in output
    alone, both = ([row["loss"] for row in read_rows(run.run) if "loss" in row] for run in (one, ddp.run("truth")))
    assert alone == pytest.approx(both[3:], rel=1e-5)
    assert ddp.fit("two", f"--resume={one.run}/step-6")[0] == [DONE, DONE]
    again = [row["loss"] for row in read_rows(ddp.run("two").run) if "loss" in row]
    assert again == pytest.approx(alone[3:], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_resumes_bit_for_bit(make_ranks, stage):
    """DeepSpeed's own files, and ours with what it leaves out."""
    zero = make_ranks(f"deepspeed_stage_{stage}", "deepspeed_on_cpu")
    codes, output = zero.fit("stopped", rank0=f"signal_at:optimizer:3:{TERM}")
    assert codes == [143, 143], output
    codes, output = zero.fit("killed", failpoint="half:3")
    assert codes[1] == KILLED
    for name in ("stopped", "killed"):
        codes, output = zero.fit(name)
        assert codes == [DONE, DONE], output
        assert "resumed from" in output
        assert zero.record(name).differences(zero.record("truth")) == []
