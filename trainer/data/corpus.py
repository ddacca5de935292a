"""A small real corpus without a download: the running Python's own standard library as text files.

It takes pydoc's help topics and the longest source files, so that documents are long. The choice depends on
nothing but the installed Python.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import DataError, StorageError, TrainerError

__all__ = ["CorpusSummary", "write_corpus"]

_TOPICS = Path("pydoc_data", "topics.py")
_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


@dataclass
class CorpusSummary:
    """What was written."""

    folder: Path
    files: list[Path] = field(default_factory=list)
    """The .txt files, in the order of choice."""
    num_bytes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Source files that could not be used, and why."""
    others: list[str] = field(default_factory=list)
    """Other .txt files that were in the folder already."""


def write_corpus(folder: str | Path, num_bytes: int = 4_000_000, library: Path | None = None) -> CorpusSummary:
    """Write about `num_bytes` of standard library text as .txt files, one per source file.

    Args:
        folder: made if it is not there.
        num_bytes: files are added until this many bytes are reached.
        library: folder of the standard library; default: that of the running Python.

    Raises:
        DataError: the standard library holds no readable source files.
        StorageError: `folder` cannot be written.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    summary = CorpusSummary(Path(folder))
    try:
        summary.folder.mkdir(parents=True, exist_ok=True)
        for name in _candidates(library):
            if summary.num_bytes >= num_bytes:
                break
            content = _read(library / name, str(name), summary.skipped)
            if content is not None:
                file = summary.folder / (".".join(name.with_suffix("").parts) + ".txt")
                file.write_bytes(content)
                summary.files.append(file)
                summary.num_bytes += len(content)
        written = {file.name for file in summary.files}
        summary.others = sorted(path.name for path in summary.folder.glob("*.txt") if path.name not in written)
    except OSError as error:
        raise StorageError(summary.folder, f"cannot be written ({error.strerror})") from error
    if not summary.files:
        raise DataError(library, "holds no readable Python source files", fix="use a Python with its standard library")
    return summary


def _candidates(library: Path) -> list[Path]:
    """Relative paths of source files, help topics first, then longest first."""
    names = [path.relative_to(library) for path in library.rglob("*.py") if path.is_file()]
    usable = [name for name in names if not any(part in _LEFT_OUT for part in name.parts)]
    return sorted(usable, key=lambda name: (name != _TOPICS, -(library / name).stat().st_size, name.as_posix()))


def _read(path: Path, name: str, skipped: dict[str, str]) -> bytes | None:
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except OSError as error:
        skipped[name] = str(error.strerror)
    except UnicodeDecodeError:
        skipped[name] = "not utf-8"
    else:
        return content
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m trainer.data.corpus`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data.corpus", description="Write a small corpus of text.")
    parser.add_argument("folder", metavar="OUT_DIR", help="folder for the .txt files")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="about how much text to write")
    options = parser.parse_args(arguments)
    try:
        summary = write_corpus(options.folder, options.bytes)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{summary.folder}: {len(summary.files)} documents, {summary.num_bytes} bytes\n")
    if summary.others:
        sys.stdout.write(f"note: {len(summary.others)} other .txt files are in the folder too\n")
    for name, reason in summary.skipped.items():
        sys.stdout.write(f"skipped {name}: {reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
