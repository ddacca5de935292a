"""The warm parent, a corpus, and one uninterrupted run, made once per worker."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Record, Workplace, make_run, warm_parent, write_corpus


@pytest.fixture(scope="session")
def parent():
    with warm_parent() as started:
        yield started


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Documents that span several steps of a stream, as a .bin/.idx pair."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "docs", documents=14, shortest=40, longest=110)


@pytest.fixture
def make_workplace(parent, corpus, tmp_path):
    """A function that makes a Workplace: lanes of documents, and what its arguments say (section -> settings)."""

    def make(name: str = "work", **sections) -> Workplace:
        return make_run(parent, corpus, tmp_path / name, sections)

    return make


@dataclasses.dataclass
class Truth:
    """A run that nothing interrupted, with the checkpoint of every step."""

    workplace: Workplace
    record: Record
    edge: int
    """Last step of the first epoch."""

    def step(self, number: int) -> Path:
        return self.workplace.run / f"step-{number}"

    def another(self, folder: Path) -> Workplace:
        """The same config for another run, below `folder`."""
        return dataclasses.replace(self.workplace, folder=folder, run=folder / "checkpoints")


@pytest.fixture(scope="session")
def truth(parent, corpus, tmp_path_factory):
    workplace = make_run(parent, corpus, tmp_path_factory.mktemp("truth") / "work", {})
    workplace.fit("--checkpoint.every_steps=1", "--checkpoint.keep=0")
    record = workplace.record()
    edge = max(row["step"] for row in record.rows if row["epoch"] == 0)
    assert 2 < edge < 9
    assert record.validation[0][0] == edge
    return Truth(workplace, record, edge)


@pytest.fixture
def another(truth, tmp_path):
    """A fresh run with the config of `truth`."""
    return truth.another(tmp_path)
