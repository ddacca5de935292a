"""Signals: the step is finished, saved, and the exit code says what happened."""

from __future__ import annotations

import signal
import time

import pytest
from harness import checkpoints

TERM, INT, USR1, HUP = (int(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))
CODES = {TERM: 143, INT: 130, USR1: 143}


@pytest.mark.parametrize(
    ("fault", "number", "step"),
    [
        pytest.param("signal_at:metrics:3", TERM, 3, marks=pytest.mark.slow),
        pytest.param("signal_at:step:3", USR1, 3, marks=pytest.mark.slow),
        ("signal_at:optimizer:3", INT, 3),
        ("signal_at:half:7", TERM, 4),  # in a tensor file of the second save
        pytest.param("signal_at:renamed:2", TERM, 4, marks=pytest.mark.slow),
        ("signal_in_data_wait", USR1, 5),
        pytest.param("signal_at:optimizer:11", TERM, 11, marks=pytest.mark.slow),  # the last step
    ],
)
@pytest.mark.fault(13, 16)
def test_the_step_is_finished_and_saved(truth, another, fault, number, step):
    output = another.fit(code=CODES[number], faults=(f"{fault}:{number}",))
    name = signal.Signals(number).name
    assert f"{name}: finishing the step" in output
    assert f"{name}: saved step {step} and stopped" in output
    assert checkpoints(another.run)[-1].name == f"step-{step}"
    assert [row["step"] for row in another.record().rows] == list(range(1, step + 1))
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(13)
def test_a_validation_is_cut_short(truth, another):
    """Its loss is not recorded, since it would be that of a part; training goes on as if nothing had been."""
    another.fit(code=143, faults=(f"signal_in_validation:{TERM}",))
    assert checkpoints(another.run)[-1].name == f"step-{truth.edge}"
    another.fit()
    found = another.record()
    found.validation.insert(0, truth.record.validation[0])
    assert found.differences(truth.record) == []


@pytest.mark.fault(13)
def test_before_the_first_step_there_is_nothing_to_save(another):
    output = another.fit(code=143, faults=(f"signal_in_model_building:{TERM}",))
    assert "SIGTERM: stopped before the first step" in output
    assert not another.run.exists()


@pytest.mark.fault(14)
def test_the_second_signal_ends_the_run_at_once(truth, another):
    started = time.monotonic()
    output = another.fit(code=143, faults=(f"signal_at:half:6:{TERM}:2",))
    assert time.monotonic() - started < 10
    assert "SIGTERM: stopped at once, unsaved" in output
    assert [path.name for path in checkpoints(another.run)] == ["step-2"]
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(17)
@pytest.mark.slow
def test_a_closed_terminal_costs_what_a_kill_costs(truth, another):
    """SIGHUP is left to its default, so that a shell can end what it has started."""
    another.fit(code=-HUP, faults=(f"signal_at:optimizer:6:{HUP}",))
    assert checkpoints(another.run)[-1].name == "step-4"
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.fault(17)
def test_a_closed_output_does_not_end_the_run(truth, another):
    another.fit(faults=("closed_output",))
    assert another.record().differences(truth.record) == []
