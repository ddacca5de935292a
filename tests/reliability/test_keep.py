"""Which checkpoints are written and which stay."""

from __future__ import annotations

import pytest
from harness import checkpoints, read_rows


def names(workplace) -> list[str]:
    return [path.name for path in checkpoints(workplace.run)]


@pytest.mark.parametrize(
    ("keep", "left"), [pytest.param(1, [11], marks=pytest.mark.slow), (3, [8, 10, 11]), (0, [2, 4, 6, 8, 10, 11])]
)
def test_the_newest_are_kept(another, keep, left):
    another.fit(f"--checkpoint.keep={keep}")
    assert names(another) == [f"step-{step}" for step in left]


def test_without_an_interval_only_the_end_is_saved(another):
    another.fit("--checkpoint.every_steps=0", "--checkpoint.keep=0")
    assert names(another) == ["step-11"]


def test_time_since_the_last_save_counts(another):
    """Half a minute a step: every third minute is every sixth step, counted from the last save."""
    another.fit(
        "--checkpoint.every_steps=4", "--checkpoint.every_minutes=1.5", "--checkpoint.keep=0", faults=("minutes_pass",)
    )
    assert names(another) == ["step-3", "step-4", "step-7", "step-8", "step-11"]


BEST = ("--checkpoint.best=true", "--checkpoint.keep=1", "--checkpoint.every_steps=1", "--trainer.max_epochs=5",
        "--trainer.max_steps=-1", "--data.chunks_per_step=4")  # fmt: skip
LOSSES = "losses_of_validation:nan:1.0:2.0:1.5"


def test_the_best_is_kept(another):
    """Its loss is that of the second epoch; the newest is there too."""
    another.fit(*BEST, faults=(LOSSES,))
    validations = [row for row in read_rows(another.run) if "validation_loss" in row]
    assert [row["validation_loss"] for row in validations[1:]] == [1.0, 2.0, 1.5, 1.5]
    assert names(another) == [f"step-{validations[1]['step']}", f"step-{validations[-1]['step']}"]


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_the_best_survives_kills(another, epoch):
    """Killed right after the save at the end of an epoch: the next run knows the best of the earlier ones."""
    another.fit(*BEST, faults=(LOSSES,))
    expected = names(another)
    edges = [row["step"] for row in read_rows(another.run) if "validation_loss" in row]
    another.run.rename(another.folder / "whole")
    killed = another.start(*BEST, faults=(LOSSES,), failpoint=f"renamed:{edges[epoch - 1]}")
    assert killed.wait() == -9
    another.fit(*BEST, faults=(LOSSES,))
    assert names(another) == expected
