"""Whether the processes of a run reach each other: a first exchange with a time limit, and errors that say what to do."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from trainer.config import TrainerConfig
from trainer.errors import DistributedError
from trainer.logs import get_logger
from trainer.train.watchdog import Watchdog

__all__ = ["TimeLimits", "connection_errors", "remedy"]

_logger = get_logger(__name__)


def remedy(backend: str, cuda: str | None) -> str:
    """What helps when processes cannot talk.

    Args:
        backend: nccl or gloo.
        cuda: version that PyTorch is built for; None on a CPU.
    """
    if backend != "nccl":
        return "look at the messages of the other processes, and whether all reach MASTER_ADDR and MASTER_PORT"
    old = (
        "this PyTorch is built for CUDA 12.0, which hangs with several GPUs: use a newer one; "
        if cuda == "12.0"
        else ""
    )
    return f"{old}NCCL_IB_DISABLE=1 if there is InfiniBand; NCCL_DEBUG=INFO shows what NCCL uses"


def _remedy_here(device: torch.device) -> str:
    return remedy("nccl" if device.type == "cuda" else "gloo", torch.version.cuda)


class TimeLimits(Callback):
    """Ends a run, with the stacks of all threads, whose processes do not find each other or whose steps do not end.

    To be entered around the run.

    Args:
        config: the limits.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._watchdog = Watchdog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.close()

    def wait_for_ranks(self, trainer: pl.Trainer) -> None:
        """From now on the processes must find each other in time."""
        if trainer.world_size > 1 and self.config.start_timeout_s > 0:
            limit = self.config.start_timeout_s
            self._watchdog.watch(limit, lambda: _not_started(trainer, limit))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """One exchange between all processes; Lightning has connected them just before."""
        device = trainer.strategy.root_device
        if trainer.world_size > 1:
            ones = torch.ones(1, device=device)
            try:
                dist.all_reduce(ones)
            except RuntimeError as err:
                problem = f"the processes have found each other, but their first exchange failed ({err})"
                raise DistributedError("start", problem, fix=_remedy_here(device)) from err
            if int(ones) != trainer.world_size:
                found = f"{int(ones)} of {trainer.world_size} processes have answered"
                raise DistributedError("start", "the first exchange went wrong", found=found, fix=_remedy_here(device))
        self._watchdog.rest()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From now on steps must end in time."""
        limit = self.config.step_timeout_s
        if limit > 0:
            self._watchdog.watch(limit, lambda: _hangs(trainer, limit))

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self._watchdog.beat()

    def on_validation_batch_end(self, *_: Any) -> None:
        """A step of the validation has ended."""
        self._watchdog.beat()

    def on_save_checkpoint(self, *_: Any) -> None:
        """A checkpoint is being written."""
        self._watchdog.beat()

    def on_train_end(self, *_: Any) -> None:
        """What is left is the last checkpoint."""
        self._watchdog.beat()


def _not_started(trainer: pl.Trainer, limit_s: float) -> DistributedError:
    here = f"rank {trainer.global_rank} of {trainer.world_size} on {socket.gethostname()}"
    problem = f"the processes have not exchanged a first message within trainer.start_timeout_s {limit_s:g}"
    found = f"{here} waits; another has not started, or cannot be reached"
    return DistributedError("start", problem, found=found, fix=_remedy_here(trainer.strategy.root_device))


def _hangs(trainer: pl.Trainer, limit_s: float) -> DistributedError:
    problem = f"nothing has ended for trainer.step_timeout_s {limit_s:g}"
    found = f"rank {trainer.global_rank} on {socket.gethostname()}; the stacks of its threads follow"
    fix = "see where they wait, then go on with resume: auto; raise the limit if steps take that long"
    return DistributedError(f"step {trainer.global_step + 1}", problem, found=found, fix=fix)


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Say so if another process is gone or cannot be reached: what libraries raise then is about sockets."""
    try:
        yield
    except RuntimeError as err:
        first = str(err).splitlines()[0] if str(err) else ""
        if "EADDRINUSE" in str(err) or "address already in use" in str(err):
            problem = f"the port at which the processes meet is taken ({first})"
            raise DistributedError("start", problem, fix="set another MASTER_PORT") from err
        if not re.search(r"gloo|NCCL|Connection (closed|reset|refused)", str(err)):
            raise
        problem = f"the connection to another process was lost ({first})"
        raise DistributedError("training", problem, fix="look at its message, then go on with resume: auto") from err
