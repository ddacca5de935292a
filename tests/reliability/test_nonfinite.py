"""NaN and infinity: the run stops before the update, says where they came from, and never saves them."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from harness import checkpoints, read_rows

from trainer.checkpoint.tensorfile import load_safetensors

BAD_STEP = 5


def the_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("nan_loss", ["step 5, micro-batch 1, chunk 1", "loss is not finite", "in blocks.1"]),
        ("infinite_gradient", ["step 5", "gradient is not finite", "blocks.1.att.key.weight"]),
    ],
)
@pytest.mark.fault(42)
def test_a_bad_number_stops_the_run_before_the_update(truth, another, fault, texts):
    output = another.fit(code=5, faults=(fault,))
    assert all(text in the_error(output) for text in texts), the_error(output)
    assert "weights as before" in output
    assert [row["step"] for row in another.record().rows] == [1, 2, 3, 4]
    assert checkpoints(another.run)[-1].name == "step-4"
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-true"])
@pytest.mark.promise(9)
def test_a_bad_weight_is_not_saved(another, precision):
    """Every step is saved; the one that made the weight infinite is not."""
    output = another.fit(
        "--checkpoint.every_steps=1", f"--trainer.precision={precision}", code=5, faults=("infinite_weight",)
    )
    assert "step 5: weights or moments are not finite" in the_error(output)
    assert [path.name for path in checkpoints(another.run)] == ["step-3", "step-4"]
    assert not list(another.run.glob(".step-*"))
    for path in another.run.glob("step-*/*.safetensors"):
        assert all(bool(torch.isfinite(tensor.double()).all()) for tensor in load_safetensors(path).values())


def skipped(workplace) -> list[tuple[int, str]]:
    return [(row["step"], row["skipped"]) for row in read_rows(workplace.run) if "skipped" in row]


@pytest.mark.parametrize(
    ("fault", "text"), [("nan_loss:2", "the loss is not finite"), ("infinite_gradient:2", "the gradient is not finite")]
)
@pytest.mark.fault(42)
def test_bad_steps_are_left_out_up_to_a_limit(another, fault, text):
    output = another.fit("--trainer.skip_non_finite=2", faults=(fault,))
    assert "left out, 2 in a row: step 5" in output
    assert output.count("weights as before") == 2
    assert [step for step, _ in skipped(another)] == [5, 5]
    assert all(text in reason and "token ids sha256" in reason for _, reason in skipped(another))
    assert [row["step"] for row in another.record().rows] == list(range(1, 12))
    for name, tensor in load_safetensors(checkpoints(another.run)[-1] / "rank-00000.safetensors").items():
        assert bool(torch.isfinite(tensor.double()).all()), name


@pytest.mark.slow
@pytest.mark.promise(9)
def test_one_more_than_the_limit_ends_the_run(another):
    output = another.fit("--trainer.skip_non_finite=2", code=5, faults=("nan_loss",))
    assert "(2 steps before it are left out already)" in the_error(output)
    assert output.count("weights as before") == 3
    assert checkpoints(another.run)[-1].name == "step-4"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["step:5", "step:6", "step:9"])
@pytest.mark.promise(1, 9)
def test_a_run_that_leaves_steps_out_resumes_bit_for_bit(another, point):
    """Killed after the first, the second, and a later save: the same steps are left out again, counted once."""
    whole = dataclasses.replace(another, run=another.folder / "whole")
    options, faults = ("--trainer.skip_non_finite=2",), ("nan_loss:2",)
    whole.fit(*options, faults=faults)
    assert another.start(*options, faults=faults, failpoint=point).wait() == -9
    another.fit(*options, faults=faults if point != "step:9" else ())
    assert another.record().differences(whole.record()) == []
    assert skipped(another) == skipped(whole)


@pytest.mark.slow
def test_left_out_steps_are_counted_in_the_checkpoint(another):
    another.fit("--trainer.skip_non_finite=2", "--trainer.max_steps=6", faults=("nan_loss:2",))
    state = torch.load(another.run / "step-6" / "lightning.pt", weights_only=True)
    assert state["progress"]["skipped_steps"] == 2


def test_deepspeed_does_not_leave_steps_out(another):
    options = ("--trainer.skip_non_finite=2", "--trainer.strategy=deepspeed_stage_2")
    assert "trainer.skip_non_finite" in the_error(another.fit(*options, code=2))


# ---- spikes


LONG = ("--trainer.max_steps=29", "--model.warmup_steps=30", "--checkpoint.every_steps=20")


@pytest.mark.slow
@pytest.mark.fault(45)
def test_a_loss_spike_is_said_and_training_goes_on(another):
    output = another.fit(*LONG, faults=("loss_jumps:22:26",))
    assert re.search(r"step=22 .* is a spike: .*; epoch \d+, batch \d+", output)
    assert "step 26: the loss has been twice its mean or more for 5 steps" in output
    assert checkpoints(another.run)[-1].name == "step-29"


@pytest.mark.fault(45)
def test_a_loss_spike_ends_the_run_if_asked_to(another):
    """Also if most of the steps before it were in an earlier run."""
    another.fit(*LONG, "--trainer.max_steps=20")
    output = another.fit(*LONG, "--trainer.loss_spikes=stop", code=5, faults=("loss_jumps:23:29",))
    assert "step 27: the loss has been twice its mean" in the_error(output)
    assert checkpoints(another.run)[-1].name == "step-20"


# ---- silent faults


@pytest.mark.promise(23)
def test_computing_steps_twice_changes_nothing(truth, another):
    another.fit("--trainer.rerun_every_steps=1")
    assert another.record().differences(truth.record) == []


@pytest.mark.slow
@pytest.mark.promise(23)
def test_random_numbers_and_sums_of_losses_are_those_of_one_time(another):
    once, twice = (dataclasses.replace(another, run=another.folder / name) for name in ("once", "twice"))
    once.fit("--trainer.log_every_n_steps=3", faults=("use_random_numbers",))
    twice.fit("--trainer.log_every_n_steps=3", "--trainer.rerun_every_steps=2", faults=("use_random_numbers",))
    assert twice.record().differences(once.record()) == []
    sums = [[{k: v for k, v in row.items() if "loss_at" in k} for row in read_rows(run.run)] for run in (once, twice)]
    assert sums[0] == sums[1]
    assert any(sums[0])


@pytest.mark.parametrize("time", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.fault(46)
def test_a_flipped_bit_is_found_by_computing_twice(another, time):
    """Steps 1 and 2 are computed once, step 3 twice; the bit flips in one of these."""
    output = another.fit("--trainer.rerun_every_steps=3", code=16, faults=(f"flip_a_gradient_bit:{time}",))
    digests = re.search(r"sha256 of gradients (\w{16}) and (\w{16})", the_error(output))
    assert digests[1] != digests[2]
    assert "step 3:" in the_error(output)
    assert checkpoints(another.run)[-1].name == "step-2"


@pytest.mark.slow
def test_a_flipped_bit_is_not_found_in_other_steps(another):
    another.fit("--trainer.rerun_every_steps=3", faults=("flip_a_gradient_bit:2",))


# ---- data that are passed over


@pytest.mark.promise(10)
def test_a_run_goes_on_from_before_a_spike_without_its_data(another):
    """The batches that the messages name; what follows is as if they had not been in the data."""
    another.fit("--checkpoint.every_steps=1", "--checkpoint.keep=0", "--trainer.max_steps=5")
    output = another.fit(f"--resume={another.run}/step-3", "--data.skip_batches=[[0, 3, 4]]")
    assert "passed over by data.skip_batches: epoch 0, batch 4" in output
    assert [(step, text[-16:]) for step, text in skipped(another)] == [(4, "epoch 0, batch 3"), (4, "epoch 0, batch 4")]
    rows = another.record().rows
    assert [row["step"] for row in rows] == list(range(1, 12))
    tokens = [after["tokens"] - before["tokens"] for before, after in itertools.pairwise(rows)]
    assert max(tokens) == tokens[0], "nothing of what was passed over is counted"


def test_passed_over_data_stay_so_after_a_kill(another):
    whole = dataclasses.replace(another, run=another.folder / "whole")
    options = ("--data.skip_batches=[[0, 0, 1], [1, 0, 0]]", "--checkpoint.keep=0")
    whole.fit(*options)
    assert another.start(*options, failpoint="step:9").wait() == -9
    another.fit(*options)
    assert another.record().differences(whole.record()) == []
    assert skipped(another) == skipped(whole)
    assert len(skipped(whole)) == 3
    assert checkpoints(whole.run)[0].name == "step-2", "nothing is saved before the first update"
