"""Steps that do not end, processes that do not come, data that stop coming: the run ends in time and says why."""

from __future__ import annotations

import time

import pytest
from harness import checkpoints, read_rows


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
def test_a_hang_that_stops_the_interpreter_ends_too(another):
    output = another.fit("--trainer.step_timeout_s=1", code=1, faults=("hang_the_interpreter:3",))
    assert "in waiting" in output


@pytest.mark.slow
def test_without_a_limit_nothing_is_watched(truth, another):
    another.fit("--trainer.step_timeout_s=0")
    assert another.record().differences(truth.record) == []


@pytest.mark.parametrize("kind", ["MemoryError", "OSError"])
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
