"""Two processes: one that is told to stop, cannot write or dies ends both, and their number may change."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import DONE, KILLED, ROOT, Record, Workplace, checkpoints, make_run, read_rows, write_documents

from trainer.checkpoint.export import export_checkpoint
from trainer.checkpoint.find import newest_valid
from trainer.checkpoint.pieces import MASTER, SavedPieces
from trainer.checkpoint.tensorfile import load_safetensors
from trainer.train.optim import MOMENTS

pytestmark = pytest.mark.slow
TERM = int(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Ranks:
    """Runs of a few processes, which nothing but the trainer itself ends."""

    workplace: Workplace
    always: tuple[str, ...] = ()
    """Faults of every run and rank."""

    def run(self, name: str) -> Workplace:
        return dataclasses.replace(self.workplace, run=self.workplace.folder / name)

    def fit(
        self,
        name: str,
        *options: str,
        failpoint: str = "",
        processes: int = 2,
        ranks: tuple[int, ...] | None = None,
        port: int = 0,
        every: str = "",
        machines: int = 1,
        command: str = "fit",
        **faults: str,
    ) -> tuple[list[int], str]:
        """Exit codes and the output of `ranks`, all by default.

        `rank0` and `rank1` name a fault of one, `every` one of all; `failpoint` is rank 1's. With `machines` each
        has an equal part of the processes, as far as they can tell.
        """
        world, here = str(processes), processes // machines
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(here), "TORCHELASTIC_RUN_ID": name, "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        children = [
            self.run(name).start(
                *options,
                faults=tuple(filter(None, (*self.always, every, faults.get(f"rank{rank}")))),
                environment={
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % here),
                    "GROUP_RANK": str(rank // here),
                },  # fmt: skip
                failpoint=failpoint if rank == 1 else "",
                command=command,
            )
            for rank in (range(processes) if ranks is None else ranks)
        ]
        codes = [child.wait() for child in children]
        return codes, "".join(child.output() for child in children)

    def record(self, name: str) -> Record:
        return self.run(name).record()


@pytest.fixture(scope="module")
def make_ranks(parent, corpus, tmp_path_factory):
    """A function that makes Ranks with a run named `truth`, once for each strategy."""

    @functools.cache
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


@pytest.mark.fault(15)
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
@pytest.mark.fault(18, 19)
def test_one_rank_cannot_write_and_the_other_does_not_wait(ddp, fault):
    name = "full-" + "-".join(fault.values()).replace(":", "-")
    codes, output = ddp.fit(name, **fault)
    assert codes == [4, 4], output
    assert output.count("step-6: cannot write: No space left") == 2
    assert newest_valid(ddp.run(name).run)[0].name == "step-4"
    assert list(ddp.run(name).run.glob(".step-*")) == []


@pytest.mark.fault(18)
def test_both_go_on_if_one_rank_cannot_write(ddp):
    codes, output = ddp.fit("warned", "--checkpoint.on_failure=warn", rank1="full_at:half:3")
    assert codes == [DONE, DONE], output
    assert output.count("not saved (1 so far)") == 2
    assert [path.name for path in checkpoints(ddp.run("warned").run)] == ["step-4", "step-8"]
    assert ddp.record("warned").differences(ddp.record("truth")) == []


@pytest.mark.fault(12, 62)
def test_one_rank_is_killed_in_a_save(ddp):
    codes, output = ddp.fit("killed", failpoint="half:3")
    assert codes == [6, KILLED], output
    assert "connection to another process was lost" in output
    assert checkpoints(ddp.run("killed").run)[-1].name == "step-4"
    assert ddp.fit("killed")[0] == [DONE, DONE]
    assert ddp.record("killed").differences(ddp.record("truth")) == []


def state(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Masters and moments of a checkpoint, whole."""
    saved = SavedPieces(folder)
    return {(kind, name): saved.whole(kind, name) for name in saved.shapes for kind in (MASTER, *MOMENTS)}


def losses_of(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run) if "loss" in row]


CHAIN = [
    ("deepspeed_stage_2", 2), ("deepspeed_stage_3", 2), ("auto", 1), ("deepspeed_stage_2_offload", 2), ("ddp", 2),
    ("deepspeed_stage_3_offload", 2), ("deepspeed_stage_1", 1), ("ddp", 2),
]  # fmt: skip


@pytest.mark.fault(35, 36)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_on_under_other_strategies_and_numbers_of_ranks(ddp, make_ranks, precision):
    """One step each; masters and moments are carried bit for bit, and the losses are those of one strategy."""
    same = [f"--trainer.precision={precision}", "--model.lr_schedule=constant"]
    ranks = dataclasses.replace(ddp, always=("deepspeed_on_cpu",))
    assert ranks.fit(precision, *same, f"--trainer.max_steps={len(CHAIN)}")[0] == [DONE, DONE]
    last = None
    for number, (strategy, processes) in enumerate(CHAIN, start=1):
        options = [
            *same,
            f"--trainer.strategy={strategy}",
            f"--trainer.devices={processes}",
            f"--trainer.max_steps={number}",
        ]
        options += [f"--resume={last}"] if last else []
        name = f"{precision}-{number}"
        codes, output = ranks.fit(name, *options, processes=processes, every="save_at_start" if last else "")
        assert codes == [DONE] * processes, output
        if last:
            before, restored = state(last), state(ranks.run(name).run / last.name)
            assert before.keys() == restored.keys()
            assert all(torch.equal(before[key], restored[key]) for key in before)
        last = ranks.run(name).run / f"step-{number}"
    names = [f"{precision}-{number}" for number in range(1, len(CHAIN) + 1)]
    losses = [loss for name in names for loss in losses_of(ranks.run(name).run)]
    expected = losses_of(ranks.run(precision).run)
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "32-true" else 2e-3)


@pytest.mark.parametrize(("strategy", "copies"), [("deepspeed_stage_3", 1), ("deepspeed_stage_2", 2)])
def test_zero_3_has_no_copy_of_all_weights_on_every_rank(ddp, strategy, copies):
    ranks = dataclasses.replace(ddp, always=("deepspeed_on_cpu", "say_initial_weights"))
    codes, output = ranks.fit(f"copies-{copies}", f"--trainer.strategy={strategy}", "--trainer.max_steps=1")
    assert codes == [DONE, DONE], output
    assert output.count("a whole set of weights") == copies


@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_checkpoint_is_validated_and_exported(ddp, stage, tmp_path):
    """With the loss that one process finds, and the bits that were saved."""
    ranks, name = dataclasses.replace(ddp, always=("deepspeed_on_cpu",)), f"validated-{stage}"
    zero = f"--trainer.strategy=deepspeed_stage_{stage}"
    codes, output = ranks.fit(name, zero, "--trainer.max_steps=2")
    assert codes == [DONE, DONE], output
    codes, output = ranks.fit(name, zero, command="validate")
    assert codes == [DONE, DONE], output
    one = ("--trainer.strategy=auto", "--trainer.devices=1")
    codes, alone = ranks.fit(name, *one, processes=1, command="validate")
    assert codes == [DONE], alone
    found, expected = (float(re.search(r"validation/loss=([\d.]+)", text)[1]) for text in (output, alone))
    assert found == pytest.approx(expected, rel=1e-5)
    folder = ranks.run(name).run / "step-2"
    report = export_checkpoint(folder, tmp_path / "x.safetensors", dtype="fp32")
    saved = state(folder)
    weights = load_safetensors(report.path)
    assert all(torch.equal(x, saved[MASTER, n].view(x.shape)) for n, x in weights.items())


def test_two_machines_are_two_processes(ddp):
    """Only what launchers tell differs; no second machine is there to try it on."""
    codes, output = ddp.fit("machines", "--trainer.devices=1", "--trainer.num_nodes=2", machines=2)
    assert codes == [DONE, DONE], output
    assert ddp.record("machines").differences(ddp.record("truth")) == []


@pytest.mark.fault(35)
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(ddp):
    codes, output = ddp.fit("three", f"--resume={ddp.run('truth').run}/step-3", "--trainer.devices=3", processes=3)
    assert codes == [2, 2, 2]
    assert output.count("trainer.target_batch_size") == 3


# ---- processes that do not come, or do not answer


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault(62)
def test_a_rank_that_never_joins_is_not_waited_for(ddp, rank):
    started = time.monotonic()
    codes, output = ddp.fit(f"alone-{rank}", "--trainer.start_timeout_s=4", ranks=(rank,))
    assert time.monotonic() - started < 9
    assert codes == [6], output
    error = next(line for line in output.splitlines() if line.startswith("error: start"))
    assert f"rank {rank} of 2 on {socket.gethostname()} waits" in error
    assert "MASTER_ADDR" in error
    assert "hread 0x" in output, "stacks"


@pytest.mark.fault(61, 62)
def test_a_first_exchange_that_hangs_is_ended(ddp):
    """Both have joined; rank 1 does not answer."""
    codes, output = ddp.fit("mute", "--trainer.start_timeout_s=4", rank1="hang_in_the_first_exchange")
    assert codes == [6, 6], output
    assert "in setup" in output, "where rank 1 waits"


@pytest.mark.fault(61)
def test_a_network_that_fails_names_what_to_do(ddp):
    """What NCCL says if InfiniBand is there and does not work, on both ranks."""
    fault = "first_exchange_fails"
    codes, output = ddp.fit("broken", rank0=fault, rank1=fault)
    assert codes == [6, 6], output
    assert output.count("error: start: the processes have found each other, but their first exchange failed") == 2
    assert "NCCL error: unhandled system error" in output


@pytest.mark.fault(63)
def test_a_port_in_use_is_named(ddp):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        codes, output = ddp.fit("taken", "--trainer.start_timeout_s=8", ranks=(0,), port=port)
    assert codes == [6], output
    error = next(line for line in output.splitlines() if line.startswith("error:"))
    assert str(port) in error
    assert "MASTER_PORT" in error


@pytest.mark.fault(62)
def test_a_rank_that_hangs_in_a_step_ends_both(ddp):
    codes, output = ddp.fit("hung", "--trainer.step_timeout_s=3", rank1="hang:3")
    assert codes == [6, 6], output
    assert "step 3: nothing has ended" in output
    assert "in waiting" in output


# ---- numbers of one rank


@pytest.mark.fault(41)
def test_a_loss_that_is_not_finite_on_one_rank_stops_both(ddp):
    codes, output = ddp.fit("nan", "--checkpoint.every_steps=1", rank1="nan_loss")
    assert codes == [5, 5], output
    assert "error: step 5, micro-batch 1, chunk 1: the loss is not finite" in output
    assert "error: step 5: the loss is not finite on another rank" in output
    assert newest_valid(ddp.run("nan").run)[0].name == "step-4"
    assert ddp.fit("nan")[0] == [DONE, DONE]
    assert ddp.record("nan").differences(ddp.record("truth")) == []


@pytest.mark.parametrize(("fault", "rank"), [("nan_loss:1", "rank1"), ("infinite_gradient:1", "rank0")])
@pytest.mark.fault(41, 42)
def test_a_bad_step_of_one_rank_is_left_out_by_both(ddp, fault, rank):
    name = f"skipped-{rank}"
    codes, output = ddp.fit(name, "--trainer.skip_non_finite=1", **{rank: fault})
    assert codes == [DONE, DONE], output
    assert output.count("left out, 1 in a row: step 5") == 2
    assert [row["step"] for row in ddp.record(name).rows] == list(range(1, 9))


@pytest.mark.fault(46)
def test_a_flipped_bit_of_one_rank_stops_both(ddp):
    codes, output = ddp.fit("flipped", "--trainer.rerun_every_steps=2", rank1="flip_a_gradient_bit:2")
    assert codes == [16, 16], output
    assert output.count("step 2: computed twice from the same state it differs on rank 1") == 2


@pytest.mark.fault(41)
def test_zero_3_names_a_loss_that_is_not_finite_on_one_rank(make_ranks):
    """Without running layers again, for which the other rank would have to help."""
    zero = make_ranks("deepspeed_stage_3", "deepspeed_on_cpu")
    codes, output = zero.fit("nan", "--trainer.step_timeout_s=20", rank1="nan_loss")
    assert codes == [5, 5], output
    assert "step 5, micro-batch 1, chunk 1: the loss is not finite" in output


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.promise(1, 11)
def test_zero_resumes_bit_for_bit(make_ranks, stage):
    """DeepSpeed's own files, and ours with what it leaves out."""
    zero = make_ranks(f"deepspeed_stage_{stage}", "deepspeed_on_cpu")
    codes, output = zero.fit("stopped", rank0=f"signal_at:optimizer:3:{TERM}")
    assert codes == [143, 143], output
    codes, output = zero.fit("killed", failpoint="half:11")
    assert codes[1] == KILLED
    for name in ("stopped", "killed"):
        codes, output = zero.fit(name)
        assert codes == [DONE, DONE], output
        assert "resumed from" in output
        assert zero.record(name).differences(zero.record("truth")) == []


# ---- unequal documents

LENGTHS = {
    "one long, one short": [2, 1500, 17, 17, 17, 17],
    "around chunk borders": [64, 65, 16, 17, 18, 33, 31],  # the last step has data for one rank only
    "random": [23, 140, 5, 71, 2, 300, 9, 88, 41],
}


@pytest.mark.fault(48, 49)
@pytest.mark.parametrize("name", LENGTHS)
def test_unequal_documents_hang_nothing_and_train_the_same(parent, tmp_path, name):
    """Documents of 2 ranks against one process; 2 of them a step, so that a rank may have one, or none."""
    corpus = write_documents(tmp_path / "docs", LENGTHS[name])
    sections = {
        "data": {"batching": "documents", "chunks_per_step": 1, "test_split": 0},
        "trainer": {"devices": 2, "strategy": "ddp", "microbatch_size": 1, "target_batch_size": 2, "max_epochs": 2, "max_steps": -1},
    }  # fmt: skip
    ranks = Ranks(make_run(parent, corpus, tmp_path / "work", sections))
    codes, output = ranks.fit("two", "--trainer.step_timeout_s=20")
    assert codes == [DONE, DONE], output
    ranks.run("one").fit("--trainer.devices=1", "--trainer.strategy=auto")
    two, one = (read_rows(ranks.run(run).run) for run in ("two", "one"))
    assert len(two) == len(one) == 2 * -(-len(LENGTHS[name]) // 2)
    for key in ("loss", "grad_norm", "tokens"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=2e-5), key


# ---- as users start it: one command, which starts the other process


@pytest.mark.fault(12, 15, 62)
@pytest.mark.parametrize(
    ("number", "who", "code"),
    [(signal.SIGKILL, "child", 6), (signal.SIGTERM, "parent", 143)],
)
def test_both_end_when_started_by_lightning(parent, corpus, tmp_path, number, who, code):
    trainer = {"devices": 2, "strategy": "ddp", "microbatch_size": 1, "max_steps": 5000, "step_timeout_s": 20}
    work = make_run(parent, corpus, tmp_path / "work", {"trainer": trainer, "checkpoint": {"every_steps": 10}})
    command = [sys.executable, str(ROOT / "lightning_trainer.py"), "fit", "-c", str(work.config)]
    with (tmp_path / "log").open("w+") as log:
        started = subprocess.Popen(
            [*command, f"--checkpoint.dir={work.run}"],
            stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not checkpoints(work.run):
                assert started.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            os.kill(int(children[0]) if who == "child" else started.pid, number)
            assert started.wait(timeout=30) == code, (tmp_path / "log").read_text()
        finally:
            started.kill()
            started.wait()
    output = (tmp_path / "log").read_text()
    assert "Traceback" not in output
    steps = [int(word) for word in re.findall(r"saved step (\d+) and stopped", output)]
    assert len(steps) == (0 if number == signal.SIGKILL else 2)
    newest = newest_valid(work.run)[0]
    assert newest is not None
    assert not steps or newest.name == f"step-{steps[0]}"
    end = time.monotonic() + 15
    while os.path.exists(f"/proc/{children[0]}"):
        assert time.monotonic() < end, "the other process is still there"
        time.sleep(0.1)
