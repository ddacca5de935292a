"""What a GPU may do otherwise: kernels, graphs and memory of its own. One process."""

from __future__ import annotations

import signal

import pytest
from harness import DONE, KILLED, checkpoints, make_run, read_rows

pytestmark = pytest.mark.gpu

SECTIONS = {
    "model": {"n_layer": 2, "n_embd": 128, "head_size": 64, "ctx_len": 16, "compile": "off", "cuda_graphs": "off"},
    "trainer": {"accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 11},
}


@pytest.fixture(scope="module")
def make_gpu_run(parent, corpus, tmp_path_factory):
    def make(name: str):
        return make_run(parent, corpus, tmp_path_factory.mktemp("gpu") / name, SECTIONS)

    return make


@pytest.fixture(scope="module")
def losses(make_gpu_run):
    """Of a run that nothing interrupted."""
    whole = make_gpu_run("truth")
    whole.fit()
    return [row["loss"] for row in read_rows(whole.run) if "loss" in row]


def losses_of(workplace) -> list[float]:
    rows = {row["step"]: row["loss"] for row in read_rows(workplace.run) if "loss" in row}
    assert list(rows) == list(range(1, 12))
    return list(rows.values())


@pytest.mark.fault(1, 2, 5, 9)
@pytest.mark.promise(1)
def test_a_killed_run_goes_on(make_gpu_run, losses):
    run = make_gpu_run("killed")
    for point in ("step:3", "half:6", "renamed:1", "optimizer:2"):
        assert run.start(failpoint=point).wait() == KILLED
    run.fit()
    assert losses_of(run) == pytest.approx(losses, abs=1e-3)


@pytest.mark.fault(13)
def test_a_signal_saves_the_step(make_gpu_run, losses):
    run = make_gpu_run("stopped")
    run.fit(code=143, faults=(f"signal_at:optimizer:3:{int(signal.SIGTERM)}",))
    assert checkpoints(run.run)[-1].name == "step-3"
    run.fit()
    assert losses_of(run) == pytest.approx(losses, abs=1e-3)


@pytest.mark.fault(41, 42)
@pytest.mark.parametrize("fault", ["nan_loss", "infinite_gradient"])
def test_bad_steps_stop_the_run_or_are_left_out(make_gpu_run, fault):
    run = make_gpu_run(fault)
    output = run.fit(code=5, faults=(fault,))
    assert "weights as before" in output
    assert checkpoints(run.run)[-1].name == "step-4"
    output = run.fit("--trainer.skip_non_finite=2", faults=(f"{fault}:2",))
    assert "left out, 2 in a row: step 5" in output
    losses_of(run)


@pytest.mark.fault(46)
@pytest.mark.parametrize("fast", ["off", "on"])
def test_steps_computed_twice_are_equal(make_gpu_run, fast):
    """Also with compiled blocks and recorded launches, after the first passes."""
    run = make_gpu_run(f"twice-{fast}")
    run.fit(
        f"--trainer.rerun_every_steps={1 if fast == 'off' else 4}",
        f"--model.compile={fast}",
        f"--model.cuda_graphs={fast}",
    )
    output = run.fit("--resume=never", "--trainer.rerun_every_steps=3", code=16, faults=("flip_a_gradient_bit:4",))
    assert "step 3: computed twice" in output


@pytest.mark.fault(62)
def test_a_hung_step_ends(make_gpu_run):
    output = make_gpu_run("hung").fit("--trainer.step_timeout_s=10", code=6, faults=("hang:5",))
    assert "step 5: nothing has ended" in output
    assert "in waiting" in output


@pytest.mark.fault(68)
def test_too_little_memory_names_the_settings(make_gpu_run, losses):
    run = make_gpu_run("small")
    output = run.fit(code=2, faults=("out_of_memory:6",))
    assert "memory: not enough for a step" in output
    assert "Traceback" not in output
    assert run.start().wait() == DONE
    assert losses_of(run) == pytest.approx(losses, abs=1e-3)
