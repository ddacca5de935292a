"""The warm parent, started once per worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Workplace, warm_parent, write_config, write_corpus


@pytest.fixture(scope="session")
def parent():
    with warm_parent() as started:
        yield started


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Documents of several chunks each, as a .bin/.idx pair."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "docs", documents=14, shortest=20, longest=110)


@pytest.fixture
def make_workplace(parent, corpus, tmp_path):
    """A function that makes a Workplace of a config's sections."""

    def make(name: str = "run", **sections) -> Workplace:
        folder = tmp_path / name
        folder.mkdir()
        data = {"source_data_dir": str(corpus), **sections.pop("data", {})}
        config = write_config(folder / "config.yaml", {"data": data, **sections})
        return Workplace(parent, folder, config, folder / "checkpoints")

    return make
