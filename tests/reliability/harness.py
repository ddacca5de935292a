"""Whole runs of `lightning_trainer.py`, killed and resumed within a second each.

Importing torch and Lightning takes seconds. One warm parent does it once and forks a child per run; a child is
an ordinary run in a process of its own, with its own signals, environment, working folder and exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
COMPARED = ("step", "epoch", "loss_hex", "loss", "grad_norm", "lr", "tokens", "samples")
"""Entries of a metrics line that must not depend on whether a run was interrupted."""
DONE, KILLED = 0, -signal.SIGKILL
_TIMEOUT_S = 120.0


# ---- the side of the tests


@dataclass
class Child:
    """A run in progress or ended; its output is in `log`."""

    parent: WarmParent
    pid: int
    log: Path

    def wait(self, timeout_s: float = _TIMEOUT_S) -> int:
        """Exit code; negative = the signal that killed it. A run that takes too long is killed."""
        end = time.monotonic() + timeout_s
        while (code := self.parent.ask(poll=self.pid)["code"]) is None:
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"still running after {timeout_s} s:\n{self.output()}")
            time.sleep(0.005)
        return code

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended stays addressable until `wait` has returned."""
        os.kill(self.pid, number)

    def output(self) -> str:
        """What the run has written to stdout and stderr."""
        return self.log.read_text(errors="replace")


class WarmParent:
    """A process that has imported the trainer and forks."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # Else looking for a GPU would make it unusable after a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER, FOLDER.parent))),
        }
        for name in ("RWKV_FAILPOINT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, str(FOLDER / "harness.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(
        self,
        words: list[str],
        *,
        log: Path,
        failpoint: str = "",
        faults: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Child:
        """Fork a child that runs the trainer's command line `words`.

        Args:
            words: such as ["fit", "-c", "config.yaml"].
            log: file that gets the child's stdout and stderr.
            failpoint: value of RWKV_FAILPOINT.
            faults: functions in `faults.py` that are called first, as "name" or "name:argument:...".
            environment: variables to set.
            cwd: working folder.
        """
        variables = {**(environment or {}), **({"RWKV_FAILPOINT": failpoint} if failpoint else {})}
        answer = self.ask(words=words, log=str(log), faults=faults, environment=variables, cwd=str(cwd))
        return Child(self, answer["pid"], log)

    def close(self) -> None:
        """End the parent."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


# ---- runs and what they leave


@dataclass
class Workplace:
    """A folder with a config and the runs made from it."""

    parent: WarmParent
    folder: Path
    config: Path
    run: Path

    def start(self, *options: str, command: str = "fit", **arguments: Any) -> Child:
        """Start `fit` or `validate`; options are words such as --trainer.max_steps=4."""
        number = len(list(self.folder.glob("*.log")))
        log = self.folder / f"{number:03d}.log"
        log.touch()
        return self.parent.start(
            [command, "-c", str(self.config), f"--checkpoint.dir={self.run}", *options], log=log, **arguments
        )

    def fit(self, *options: str, code: int = DONE, **arguments: Any) -> str:
        """Run `fit` to its end, which must have this exit code; returns its output."""
        child = self.start(*options, **arguments)
        found = child.wait()
        assert found == code, f"exit code {found} instead of {code}:\n{child.output()}"
        return child.output()

    def record(self) -> Record:
        """Everything that must not depend on interruptions."""
        return Record.of(self.run)


@dataclass
class Record:
    """Result of a run: its log of steps, and the bytes of its last checkpoint's tensors."""

    rows: list[dict[str, Any]]
    validation: list[tuple[int, str]]
    files: dict[str, bytes]

    @classmethod
    def of(cls, run: Path) -> Record:
        rows = read_rows(run)
        steps = [{key: row[key] for key in COMPARED} for row in rows if "loss_hex" in row]
        validation = [(row["step"], row["validation_loss"].hex()) for row in rows if "validation_loss" in row]
        last = checkpoints(run)[-1]
        files = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.suffix == ".safetensors"}
        return cls(steps, validation, files)

    def differences(self, truth: Record) -> list[str]:
        """What is not bit for bit as in `truth`; [] if all is."""
        found = []
        if len(self.rows) != len(truth.rows):
            found.append(f"{len(self.rows)} lines instead of {len(truth.rows)}")
        found += [f"step {b['step']}: {a} != {b}" for a, b in zip(self.rows, truth.rows, strict=False) if a != b]
        if self.validation != truth.validation:
            found.append(f"validation {self.validation} instead of {truth.validation}")
        if self.files.keys() != truth.files.keys():
            found.append(f"files {sorted(self.files)} instead of {sorted(truth.files)}")
        found += [f"{name} differs" for name, data in truth.files.items() if self.files.get(name, data) != data]
        return found


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Whole lines of a run's metrics file, also of one that was killed just now."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def checkpoints(run: Path) -> list[Path]:
    """Folders step-N of a run by number."""
    found = run.glob("step-*") if run.exists() else ()
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def write_corpus(prefix: Path, *, documents: int, shortest: int, longest: int, seed: int = 1) -> Path:
    """Documents of random lengths, see `write_documents`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return write_documents(prefix, [int(length) for length in rng.integers(shortest, longest + 1, documents)], seed)


def write_documents(prefix: Path, lengths: list[int], seed: int = 1) -> Path:
    """Token documents as a .bin/.idx pair; ids follow a rule that a model can learn a little of."""
    import numpy as np

    from trainer.data.binidx import BinIdxWriter

    rng = np.random.default_rng(seed)
    with BinIdxWriter(prefix) as writer:
        for length in lengths:
            start, stride = rng.integers(1, 200, 2)
            noise = rng.integers(0, 4, length)
            writer.add_document((start + stride * np.arange(length) + noise) % 255 + 1)
    return prefix


def write_config(path: Path, sections: dict[str, Any]) -> Path:
    """The small model of these tests, with `sections` merged in."""
    import yaml

    config: dict[str, Any] = {
        "seed_everything": 3,
        "model": {
            "n_layer": 2, "n_embd": 32, "head_size": 16, "vocab_size": 272, "ctx_len": 16, "grad_cp": False,
            "lr_init": 0.002, "lr_final": 0.0002, "warmup_steps": 3, "weight_decay": 0.1,
        },
        "data": {"source": "binidx", "tokenizer": "byte", "test_split": 0, "dataloader_prefetch_factor": 2},
        "trainer": {
            "accelerator": "cpu", "devices": 1, "precision": "32-true", "max_steps": 12,
            "microbatch_size": 2, "target_batch_size": 4,
        },
        "checkpoint": {"every_steps": 2, "keep": 2},
        "resume": "auto",
    }  # fmt: skip
    for section, values in sections.items():
        config[section] = {**config[section], **values} if isinstance(values, dict) else values
    path.write_text(yaml.safe_dump(config))
    return path


def make_run(parent: WarmParent, corpus: Path, folder: Path, sections: dict[str, Any]) -> Workplace:
    """A Workplace in the new folder `folder`: lanes of documents, with `sections` merged in."""
    folder.mkdir()
    data = {"source_data_dir": str(corpus), "batching": "stream", "chunks_per_step": 2, "test_split": 2}
    sections = {**sections, "data": {**data, **sections.get("data", {})}}
    sections["model"] = {"bptt_window": "full", **sections.get("model", {})}
    sections["trainer"] = {"max_steps": 11, **sections.get("trainer", {})}
    config = write_config(folder / "config.yaml", sections)
    return Workplace(parent, folder, config, folder / "checkpoints")


# ---- the side of the parent


def _serve() -> None:
    import faults
    import torch

    import trainer.cli_parser
    import trainer.train.run  # noqa: F401 - what children need is imported here, once

    torch.set_num_threads(1)
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer: dict[str, Any] = {"code": ended.get(pid)}
        else:
            pid = os.fork()
            if pid == 0:
                _become(request, faults)
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _become(request: dict[str, Any], faults: Any) -> None:
    """Be the child: never returns."""
    code = 1
    try:
        os.setsid()
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        time.tzset()
        os.chdir(request["cwd"])
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        from trainer.cli import main

        # Lightning has read it when the parent imported it.
        rank_zero_only.rank = int(os.environ.get("RANK", 0))

        for fault in request["faults"]:
            name, *values = fault.split(":")
            getattr(faults, name)(*values)
        code = main(request["words"])
    except BaseException:  # noqa: BLE001 - as an interpreter does at its end
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def warm_parent() -> Iterator[WarmParent]:
    """A WarmParent that ends with the block."""
    parent = WarmParent()
    try:
        yield parent
    finally:
        parent.close()


if __name__ == "__main__":
    _serve()
