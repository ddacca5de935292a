"""kill -9 at any moment: the run resumes, and everything it computes is bit for bit what it would have been.

Truth is an uninterrupted run. A killed and resumed run must write the same metrics, in hexadecimal, in exactly
one line per step, and end with the same bytes of weights, moments, masters, lane states and random states.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import COMPARED, DONE, KILLED, Record, WarmParent, Workplace, read_rows, write_config, write_corpus

MODES = {
    "stream-full": {"batching": "stream", "window": "full"},
    "stream-1": {"batching": "stream", "window": 1},
    "documents-full": {"batching": "documents", "window": "full"},
    "documents-1": {"batching": "documents", "window": 1},
}
SEEDS = (1, 2, 3)
# (failpoint, passage), or `backward`, which is within the k-th. A run has 11 steps, saves 6 times or more, and validates after each epoch. `half` is
# passed four times in a save: once in each tensor file and once between the files.
POINTS = [
    ("step", 1), ("step", 4), ("step", 7), ("step", 11),
    ("backward", 1), ("backward", 12), ("backward", 21),
    ("optimizer", 2), ("optimizer", 11),
    ("metrics", 1), ("metrics", 6),
    ("mkdir", 1), ("mkdir", 4),
    ("half", 1), ("half", 6), ("half", 12), ("half", 19),
    ("written", 1), ("written", 4),
    ("fsynced", 1), ("fsynced", 3),
    ("manifest", 1), ("manifest", 5),
    ("renamed", 1), ("renamed", 3), ("renamed", 5),
    ("pruning", 1), ("pruning", 3),
]  # fmt: skip
FAST = {
    "stream-full": [("backward", 12), ("half", 6), ("renamed", 3), ("pruning", 1), ("optimizer", 11)],
    "documents-1": [("step", 7), ("half", 1), ("manifest", 5)],
}
RANDOM_ROUNDS = 4


@dataclasses.dataclass
class Bench:
    """Uninterrupted runs, made when first asked for, and rounds of killing and resuming."""

    parent: WarmParent
    folder: Path
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    truths: dict[tuple, tuple[Record, float]] = dataclasses.field(default_factory=dict)

    def workplace(self, mode: str, seed: int, name: str, precision: str = "32-true") -> Workplace:
        base = self.folder / f"{mode}-{seed}-{precision}"
        if not base.exists():
            base.mkdir()
            is_stream = MODES[mode]["batching"] == "stream"
            # Stream: a document spans several steps. Documents: it has up to three chunks.
            shortest, longest = (40, 120) if is_stream else (10, 48)
            corpus = write_corpus(base / "docs", documents=14, shortest=shortest, longest=longest, seed=seed)
            write_config(
                base / "config.yaml",
                {
                    "seed_everything": seed,
                    "model": {"bptt_window": MODES[mode]["window"]},
                    "data": {
                        "source_data_dir": str(corpus), "test_split": 2,
                        "batching": MODES[mode]["batching"], "chunks_per_step": 2 if is_stream else 1,
                    },
                    "trainer": {"max_steps": 11, "deterministic_order_seed": 100 + seed, "precision": precision},
                    "checkpoint": {"best": True},
                },
            )  # fmt: skip
        return Workplace(self.parent, base, base / "config.yaml", base / name)

    def truth(self, mode: str, seed: int, precision: str = "32-true", faults: tuple[str, ...] = ()) -> Record:
        key = (mode, seed, precision, faults)
        if key not in self.truths:
            workplace = self.workplace(mode, seed, f"truth{len(self.truths)}", precision)
            started = time.monotonic()
            workplace.fit(faults=faults)
            record = workplace.record()
            assert [row["step"] for row in record.rows] == list(range(1, 12))
            assert len({row["epoch"] for row in record.rows}) > 1, "the run must cross the edge of an epoch"
            assert record.validation, "the run must validate"
            self.truths[key] = record, time.monotonic() - started
        return self.truths[key][0]

    def seconds(self, mode: str, seed: int) -> float:
        """How long an uninterrupted run takes."""
        self.truth(mode, seed)
        return self.truths[(mode, seed, "32-true", ())][1]

    def killed(self, mode: str, seed: int, point: tuple[str, int]) -> list[str]:
        """Kill at a failpoint, resume, and say what differs from the truth; [] is what we want."""
        truth = self.truth(mode, seed)
        workplace = self.workplace(mode, seed, f"{next(self.numbers)}-{point[0]}-{point[1]}")
        name, passage = point
        if name == "backward":
            code = workplace.start(faults=(f"kill_in_backward:{passage}",)).wait()
        else:
            code = workplace.start(failpoint=f"{name}:{passage}").wait()
        if code != KILLED:
            return [f"the point was not reached: exit code {code}"]
        return _wrong_rows(workplace, truth) + self.resumed(workplace, truth)

    def resumed(self, workplace: Workplace, truth: Record, faults: tuple[str, ...] = ()) -> list[str]:
        child = workplace.start(faults=faults)
        code = child.wait()
        if code != DONE:
            return [f"stuck: exit code {code}: {child.output()[-300:]}"]
        left = [path.name for path in workplace.run.glob(".step-*")]
        return workplace.record().differences(truth) + [f"leftover {name}" for name in left]


def _wrong_rows(workplace: Workplace, truth: Record) -> list[str]:
    """Lines that a killed run has written and that are not those of the truth."""
    rows = [{key: row[key] for key in COMPARED} for row in read_rows(workplace.run) if "loss_hex" in row]
    return [f"before the kill: {row}" for row, right in zip(rows, truth.rows, strict=False) if row != right]


@pytest.fixture(scope="module")
def bench(parent, tmp_path_factory):
    return Bench(parent, tmp_path_factory.mktemp("kill"))


def _assert_exact(found: dict[str, list[str]]) -> None:
    wrong = {name: problems for name, problems in found.items() if problems}
    stuck = sum(any(text.startswith("stuck") for text in problems) for problems in wrong.values())
    assert not wrong, f"{len(found)} kills, {stuck} stuck, {len(wrong) - stuck} differ: {wrong}"


@pytest.mark.parametrize("mode", FAST)
@pytest.mark.fault(3, 10, 37)
def test_a_killed_run_resumes_bit_for_bit(bench, mode):
    _assert_exact({f"{name}:{k}": bench.killed(mode, 1, (name, k)) for name, k in FAST[mode]})


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.fault(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 37)
def test_killed_at_every_failpoint(bench, mode):
    found = {}
    for number, point in enumerate(POINTS if mode.endswith("full") else POINTS[::2]):
        found[f"{point[0]}:{point[1]}"] = bench.killed(mode, SEEDS[number % len(SEEDS)], point)
    _assert_exact(found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.promise(1)
def test_killed_again_and_again_at_random_instants(bench, mode):
    instants, found = random.Random(mode), {}
    for number in range(RANDOM_ROUNDS):
        seed = SEEDS[number % len(SEEDS)]
        truth = bench.truth(mode, seed)
        workplace = bench.workplace(mode, seed, f"random-{number}")
        problems = []
        for _ in range(2):
            child = workplace.start()
            time.sleep(instants.uniform(0.1, 1.0) * bench.seconds(mode, seed))
            child.signal(signal.SIGKILL)
            child.wait()
            problems += _wrong_rows(workplace, truth)
        found[f"random {number}"] = problems + bench.resumed(workplace, truth)
    _assert_exact(found)


# (fault, mode, precision): what is left out of the resume.
FORGOTTEN = [
    ("forget_weights", "documents-1", "32-true"),
    ("forget_moments", "documents-1", "32-true"),
    ("forget_masters", "documents-1", "bf16-true"),
    ("forget_counters", "documents-1", "32-true"),
    ("forget_data_position", "documents-1", "32-true"),
    ("forget_data_position", "stream-1", "32-true"),
    ("forget_lane_states", "stream-1", "32-true"),
    ("forget_random_state", "stream-1", "32-true"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "mode", "precision"), FORGOTTEN)
@pytest.mark.promise(22)
def test_a_resume_that_forgets_something_is_seen(bench, fault, mode, precision):
    """Without the fault the same round is exact, so it is the fault that shows."""
    consumer = ("use_random_numbers",) if fault == "forget_random_state" else ()
    truth = bench.truth(mode, 1, precision, consumer)
    killed = bench.workplace(mode, 1, f"{fault}-{next(bench.numbers)}", precision)
    assert killed.start(failpoint="step:7", faults=consumer).wait() == KILLED
    faulty = dataclasses.replace(killed, run=killed.folder / f"{killed.run.name}-faulty")
    shutil.copytree(killed.run, faulty.run)
    assert bench.resumed(killed, truth, consumer) == []
    assert any("step " in text for text in bench.resumed(faulty, truth, (*consumer, fault)))


@pytest.mark.slow
@pytest.mark.promise(1, 2)
def test_a_checkpoint_written_in_place_is_seen(bench):
    """Killed in its first save, such a run cannot go on."""
    truth = bench.truth("stream-1", 1)
    workplace = bench.workplace("stream-1", 1, f"in-place-{next(bench.numbers)}")
    assert workplace.start(failpoint="half:3", faults=("write_in_place",)).wait() == KILLED
    assert bench.resumed(workplace, truth)[0].startswith("stuck: exit code 3")
