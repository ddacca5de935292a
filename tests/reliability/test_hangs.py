"""Steps that do not end, processes that do not come, data that stop coming: the run ends in time and says why."""

from __future__ import annotations

import signal
import time

import pytest
from harness import DONE, checkpoints, read_rows


@pytest.mark.fault(62)
def test_a_hung_step_shows_all_threads_and_ends_the_run(truth, another):
    started = time.monotonic()
    output = another.fit("--trainer.step_timeout_s=2", code=6, faults=("hang:5",))
    assert time.monotonic() - started < 12
    assert "error: step 5: nothing has ended for trainer.step_timeout_s 2" in output
    stacks = output[output.index("error:") :]
    assert stacks.count("hread 0x") >= 2, "the stacks of several threads"
    assert "in waiting" in stacks, "the function that hangs"
    assert checkpoints(another.run)[-1].name == "step-4"
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.slow
@pytest.mark.fault(62)
def test_a_hang_that_stops_the_interpreter_is_shown(another):
    child = another.start("--trainer.step_timeout_s=1", faults=("hang_the_interpreter:3",))
    deadline = time.monotonic() + 30
    while "in waiting" not in child.output():
        assert time.monotonic() < deadline, child.output()
        time.sleep(0.1)
    child.signal(signal.SIGKILL)
    child.wait()


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_goes_on(truth, another):
    """A batch system may do that to let others run: SIGSTOP, and SIGCONT after longer than the limit."""
    child = another.start("--trainer.step_timeout_s=1.5", faults=("slow_steps:0.2",))
    deadline = time.monotonic() + 30
    while len(read_rows(another.run)) < 3:
        assert time.monotonic() < deadline, child.output()
        time.sleep(0.02)
    child.signal(signal.SIGSTOP)
    time.sleep(4)
    child.signal(signal.SIGCONT)
    assert child.wait() == DONE, child.output()
    assert another.record().differences(truth.record) == []


@pytest.mark.slow
def test_without_a_limit_nothing_is_watched(truth, another):
    another.fit("--trainer.step_timeout_s=0")
    assert another.record().differences(truth.record) == []


@pytest.mark.parametrize("kind", ["MemoryError", pytest.param("OSError", marks=pytest.mark.slow)])
@pytest.mark.fault(69)
def test_a_dead_prefetch_thread_ends_the_run(another, kind):
    """Not with a wait for data that never come."""
    child = another.start(faults=(f"prefetching_fails:12:{kind}",))
    assert child.wait(timeout_s=30) != 0
    assert "planted" in child.output()
    assert len(read_rows(another.run)) < 11


@pytest.mark.slow
@pytest.mark.fault(69)
def test_a_hung_prefetch_thread_is_shown(another):
    output = another.fit("--trainer.step_timeout_s=2", code=6, faults=("prefetching_fails:12:hang",))
    assert "lanes.py" in output[output.index("error:") :]
