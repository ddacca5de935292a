"""Writes the tables of docs/reliability.md from the markers of the tests: `python -m tests.reliability.matrix`.

A test says with `@pytest.mark.fault(17)` which row of FAULTS it covers and with `@pytest.mark.promise(3)` which
promise it proves. The markers are read from the source, so nothing has to be imported or run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"

PROMISES = {
    1: "kill -9 at any point, resume: bit for bit the run that was never stopped",
    2: "a checkpoint is whole or absent",
    3: "resume takes the newest checkpoint that is valid, and never starts afresh in silence",
    4: "another number of processes: what stays exact, what is to rounding, what is refused",
    5: "a failed write names path, free and needed bytes; older checkpoints stay",
    6: "corrupt input is one line: file, place, found, rule",
    7: "nothing in a file runs",
    8: "token ids are checked against the vocabulary",
    9: "numbers that are not finite never reach the weights or a checkpoint",
    10: "a loss that jumps is said",
    11: "a signal ends a run saved, with its exit code",
    12: "unequal documents hang nothing",
    13: "a document of any length: finite loss, flat memory",
    14: "any valid text survives; lone surrogates are refused",
    15: "one run per folder; a dead run holds no lock",
    16: "a kernel build cannot block",
    17: "clock, time zone, locale, host name, hash seed and folder change nothing",
    18: "secrets stay out of everything that is written",
    19: "a wrong setting is refused before anything is built",
    20: "processes that do not find each other end in time and say what to do",
    21: "exports hold the same bits; an interrupted one leaves nothing",
    22: "everything an exact resume needs is in the checkpoint",
    23: "silent faults of hardware can be looked for",
}


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    what: str
    promise: int
    lacks: str = ""
    """What of it is not tested, for want of which hardware or tool."""


FAULTS = {
    1: Fault("killed between steps", 1),
    2: Fault("killed in the backward pass", 1),
    3: Fault("killed after the update, before the log", 1),
    4: Fault("killed while the temporary folder is made", 2),
    5: Fault("killed half way in a tensor file", 2),
    6: Fault("killed after the files are written, before they are forced to the disk", 2),
    7: Fault("killed before the manifest", 2),
    8: Fault("killed after the manifest, before the rename", 2),
    9: Fault("killed after the rename", 2),
    10: Fault("killed while an old checkpoint is removed", 2),
    11: Fault("power cut: what was not forced to the disk is gone", 2),
    12: Fault("one process killed in a save", 2, "under NCCL (needs two GPUs)"),
    13: Fault("SIGTERM in a step, save, wait for data, validation, start", 11),
    14: Fault("a second SIGTERM", 11),
    15: Fault("SIGTERM to one process", 11, "under NCCL (needs two GPUs)"),
    16: Fault("Ctrl-C", 11),
    17: Fault("SIGHUP; output that nobody reads", 11),
    18: Fault("disk full in a tensor file", 5),
    19: Fault("disk full in the manifest or the metrics", 5),
    20: Fault("$TMPDIR full", 2),
    21: Fault("$TMPDIR on another device", 2),
    22: Fault("read-only folder", 5),
    23: Fault("folder deleted during the run", 5),
    24: Fault("a checkpoint that cannot be read (EIO)", 3),
    25: Fault("newest checkpoint cut off", 3),
    26: Fault("one bit flipped", 3),
    27: Fault("manifest missing, damaged, of another step", 3),
    28: Fault("time stamps in another order than steps", 3),
    29: Fault("foreign files in the folder", 3),
    30: Fault("steps 9, 10, 100", 3),
    31: Fault("no valid checkpoint", 3),
    32: Fault("checkpoint or weights of another shape", 3),
    33: Fault("other data or order at resume", 3),
    34: Fault("other learning rate, clipping, batch at resume", 3),
    35: Fault("2 processes, then 1, then 2", 4),
    36: Fault("other ZeRO stage at resume", 4, "on GPUs (needs two)"),
    37: Fault("killed between the micro-batches of a step", 1),
    38: Fault("resumed in the middle of a document", 22),
    39: Fault("resumed at the edge of an epoch, in the last step, after the end", 1),
    40: Fault("validation after a resume in mid-epoch", 1),
    41: Fault("NaN in the loss of one process", 9, "under NCCL (needs two GPUs)"),
    42: Fault("infinite gradient, finite loss", 9),
    43: Fault("non-finite weight in a file", 9),
    44: Fault("chunk without a trained token", 13),
    45: Fault("loss spike", 10),
    46: Fault("bit flipped in a gradient", 23),
    47: Fault("documents of 0, 1, ctx_len, ctx_len + 1, very many tokens", 13),
    48: Fault("documents of unequal length on the processes", 12, "under NCCL (needs two GPUs)"),
    49: Fault("a process without data", 12),
    50: Fault("token id out of range, negative", 8),
    51: Fault("bad JSON line, encoding, type", 6),
    52: Fault("damaged arrow or parquet file", 6),
    53: Fault("data file changed during the run", 6),
    54: Fault("killed while data are prepared", 6),
    55: Fault("two preparations at once", 6),
    56: Fault("hostile pickle", 7),
    57: Fault("shape or header that claims terabytes", 7),
    58: Fault("two runs in one folder", 15),
    59: Fault("stale build lock, killed compiler", 16, "a killed nvcc (needs a machine with nvcc)"),
    60: Fault("no compiler", 16),
    61: Fault("network of the GPUs fails", 20, "broken InfiniBand itself (needs GPUs on such a network)"),
    62: Fault("a process never joins, hangs or dies", 20, "under NCCL (needs two GPUs)"),
    63: Fault("port in use", 20),
    64: Fault("other time zone, clock, locale, hash seed, folder", 17),
    65: Fault("other number of threads at resume", 17),
    66: Fault("secrets in settings, environment, URLs", 18),
    67: Fault("experiment tracker that cannot be reached", 18),
    68: Fault("out of memory in a step", 5),
    69: Fault("thread or process that prepares data fails, hangs or is killed", 6),
    70: Fault("few open files allowed, many shards", 6),
    71: Fault("paths with spaces, other letters, great length, links", 19),
    72: Fault("export interrupted or to a full device", 21),
}


def tests_by_marker(marker: str) -> dict[int, list[str]]:
    """Ids of tests, as pytest takes them without parameters, by the numbers in their marker."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in sorted(_numbers(node, marker)):
                    found[number].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return dict(sorted(found.items()))


def _numbers(function: ast.FunctionDef, marker: str) -> set[int]:
    """Arguments of `pytest.mark.MARKER(...)` in the decorators, those inside parameters included."""
    calls = [n for decorator in function.decorator_list for n in ast.walk(decorator) if isinstance(n, ast.Call)]
    return {
        argument.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == marker
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
    }


def _cell(tests: list[str], lacks: str = "") -> str:
    return "<br>".join([*(f"`{test}`" for test in tests), *([f"not tested: {lacks}"] if lacks else [])])


def fault_table() -> str:
    """The fault matrix."""
    tests = tests_by_marker("fault")
    lines = ["| # | fault | promise | tests |", "|---|---|---|---|"]
    for number, fault in FAULTS.items():
        cell = _cell(tests.get(number, []), fault.lacks)
        lines.append(f"| {number} | {fault.what} | P{fault.promise} | {cell} |")
    return "\n".join(lines)


def promise_table() -> str:
    """Promises and what proves each."""
    tests = tests_by_marker("promise")
    for number, found in tests_by_marker("fault").items():
        tests.setdefault(FAULTS[number].promise, []).extend(found)
    lines = ["| promise | files of tests |", "|---|---|"]
    for number, what in PROMISES.items():
        files = sorted({test.partition("::")[0] for test in tests.get(number, [])})
        lines.append(f"| P{number}: {what} | {_cell(files)} |")
    return "\n".join(lines)


def page() -> str:
    """docs/reliability.md with both tables as the markers say."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("promises", promise_table()), ("faults", fault_table())):
        pattern = rf"(<!-- generated: {name} -->\n\n).*?(\n\n<!-- end: {name} -->)"
        text, count = re.subn(pattern, lambda match, table=table: f"{match[1]}{table}{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE}: no place for {name}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
