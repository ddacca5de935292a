import os
import sysconfig
from pathlib import Path

import pytest

from trainer.data.corpus import main, write_corpus
from trainer.errors import DataError, StorageError


def test_long_documents_of_the_standard_library(tmp_path):
    summary = write_corpus(tmp_path / "a", 1_500_000)
    library = Path(sysconfig.get_paths()["stdlib"])
    assert 1_500_000 <= summary.num_bytes < 2_000_000
    assert summary.files[0].name == "pydoc_data.topics.txt"
    assert summary.files[0].read_bytes() == (library / "pydoc_data" / "topics.py").read_bytes()
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) == summary.num_bytes
    sizes = [path.stat().st_size for path in summary.files[1:]]
    assert sizes == sorted(sizes, reverse=True)
    again = write_corpus(tmp_path / "b", 1_500_000)
    assert [path.name for path in again.files] == [path.name for path in summary.files]


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "lib"
    for name, content in {
        "a.py": b"x = 1\n" * 100,
        "bad.py": b"# caf\xe9\n" * 100,
        "pkg/__init__.py": b"y = 2\n" * 50,
        "test/long.py": b"z" * 9999,
        "site-packages/long.py": b"z" * 9999,
        "pydoc_data/topics.py": b"topics = {}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_files_that_cannot_be_used_are_counted(library, tmp_path):
    summary = write_corpus(tmp_path / "out", 10**9, library)
    assert [path.name for path in summary.files] == ["pydoc_data.topics.txt", "a.txt", "pkg.__init__.txt"]
    assert summary.skipped == {"bad.py": "not utf-8"}


def test_other_files_in_the_folder_are_mentioned(library, tmp_path):
    write_corpus(tmp_path / "out", 10**9, library)
    (library / "a.py").unlink()
    assert write_corpus(tmp_path / "out", 10**9, library).others == ["a.txt"]


def test_no_library_and_no_place_to_write(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="holds no readable Python source files"):
        write_corpus(tmp_path / "out", 10, tmp_path / "nothing")
    with pytest.raises(StorageError, match="/proc/nope: cannot be written"):
        write_corpus("/proc/nope", 10)


def test_command_line(tmp_path, capsys):
    assert main([str(tmp_path / "out"), "--bytes=1000"]) == 0
    assert "1 documents" in capsys.readouterr().out
    assert main([os.devnull]) == 4
    assert "error: /dev/null: cannot be written" in capsys.readouterr().err
