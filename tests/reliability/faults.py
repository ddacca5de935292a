"""Planted faults: each breaks one thing. They run in a child before the trainer, named in `WarmParent.start`."""

from __future__ import annotations

import builtins
import ctypes
import errno
import itertools
import os
import resource
import shutil
import signal
import struct
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import atomic, tensorfile
from trainer.checkpoint.pieces import MASTER, SavedPieces
from trainer.config import RunConfig
from trainer.data import lanes
from trainer.data.lanes import Lanes
from trainer.data.module import LanesDataModule
from trainer.model.rwkv7 import RWKV7
from trainer.train import callbacks, checkpointing, connection, lit_module, watchdog
from trainer.train.lane_states import LaneStates
from trainer.train.lit_module import LitRWKV7
from trainer.train.optim import MasterAdamW

BAD_STEP = 5
"""Step whose numbers go wrong, counted from 1."""


# ---- what an exact resume needs


def write_in_place() -> None:
    """Checkpoints grow under their final name."""

    def begin(target: Path) -> Path:
        target.mkdir()
        return target

    checkpointing.begin_folder = begin
    atomic._replace_folder = lambda temp, target: None


def use_random_numbers() -> None:
    """Training consumes random numbers, as dropout would."""
    forward = RWKV7.forward

    def noisy(self: RWKV7, *args: Any) -> Any:
        hidden_BTC, state = forward(self, *args)
        return hidden_BTC * (1 + 0.01 * torch.rand(())), state

    RWKV7.forward = noisy


def forget_random_state() -> None:
    checkpointing.restore_rng = lambda tensors, numbers: None


def forget_data_position() -> None:
    LanesDataModule.seek = lambda self, position: None
    Lanes.load_state_dict = lambda self, state: None


def forget_lane_states() -> None:
    LaneStates.restore = lambda self, tensors, device: None


def _read_otherwise(change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    read = SavedPieces.read
    SavedPieces.read = lambda self, kind, *args: change(kind, read(self, kind, *args))


def forget_moments() -> None:
    _read_otherwise(lambda kind, x: x if kind == MASTER else torch.zeros_like(x))


def forget_masters() -> None:
    """Masters start from the rounded weights."""
    _read_otherwise(lambda kind, x: x.bfloat16().float() if kind == MASTER else x)


def forget_counters() -> None:
    load = LitRWKV7.on_load_checkpoint

    def reset(self: LitRWKV7, checkpoint: dict[str, Any]) -> None:
        load(self, checkpoint)
        self.progress = dict.fromkeys(self.progress, 0)

    LitRWKV7.on_load_checkpoint = reset


def forget_weights() -> None:
    load = checkpointing.FolderCheckpointIO.load_checkpoint

    def fresh(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = load(self, *args, **kwargs)
        checkpoint["state_dict"] = {name: x + 1e-3 for name, x in checkpoint["state_dict"].items()}
        return checkpoint

    checkpointing.FolderCheckpointIO.load_checkpoint = fresh


def deepspeed_on_cpu() -> None:
    """Not a fault: ZeRO without a GPU."""
    from deepspeed_on_cpu import CpuDeepSpeedStrategy

    from trainer.train import run
    from trainer.train.strategy import deepspeed_config

    def make(settings: RunConfig) -> Any:
        is_zero = settings.strategy.startswith("deepspeed")
        return CpuDeepSpeedStrategy(deepspeed_config(settings)) if is_zero else settings.strategy

    run.make_strategy = make


def save_at_start() -> None:
    """Not a fault: what a resumed run has restored is saved before its first step."""
    start = checkpointing.Checkpointing.on_train_start

    def start_and_save(self: Any, trainer: Any, module: LitRWKV7) -> None:
        start(self, trainer, module)
        self.save(trainer, module)

    checkpointing.Checkpointing.on_train_start = start_and_save


def say_initial_weights() -> None:
    """Not a fault: each time that a process reads or makes a whole set of weights is said."""
    initial = LitRWKV7.initial_weights

    def said(self: LitRWKV7) -> Any:
        os.write(2, b"a whole set of weights\n")
        return initial(self)

    LitRWKV7.initial_weights = said


# ---- numbers that are not finite


def _in_bad_step(spoil: Callable[[LitRWKV7, Any], list[Any]], times: float) -> None:
    """Let `spoil` register hooks for step BAD_STEP, and say whether that step has changed the weights.

    If it is left out the next one has the same number, and is spoilt too, up to `times`.
    """
    step, seen = LitRWKV7.training_step, itertools.count(1)

    def poisoned(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        if self.global_step != BAD_STEP - 1 or next(seen) > times:
            step(self, batch, batch_idx)
            return
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        hooks = spoil(self, batch)
        try:
            step(self, batch, batch_idx)
        finally:
            is_same = all(map(torch.equal, before, self.model.parameters()))
            os.write(2, b"weights as before\n" if is_same else b"weights changed\n")
            for hook in hooks:
                hook.remove()

    LitRWKV7.training_step = poisoned


def nan_loss(times: str = "inf") -> None:
    """The second block's output is NaN in chunk 1 of micro-batch 1, whenever that chunk is run."""

    def spoil(self: LitRWKV7, batch: Any) -> list[Any]:
        bad, seen = batch.microbatches[1].ids_BT[:, 16:32].to(self.device), []

        def poison(module: Any, inputs: Any, output: Any) -> Any:
            return (output[0] * float("nan"), *output[1:]) if torch.equal(seen[-1], bad) else output

        return [
            self.model.emb.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
            self.model.blocks[1].register_forward_hook(poison),
        ]

    _in_bad_step(spoil, float(times))


def infinite_gradient(times: str = "inf") -> None:
    """One gradient is infinite while the loss is finite."""

    def spoil(self: LitRWKV7, batch: Any) -> list[Any]:
        weight = dict(self.model.named_parameters())["blocks.1.att.key.weight"]
        return [weight.register_hook(lambda gradient: gradient * float("inf"))]

    _in_bad_step(spoil, float(times))


def infinite_weight() -> None:
    """The update of step BAD_STEP makes a weight infinite."""
    update, done = MasterAdamW.step, itertools.count(1)

    def spoil(self: MasterAdamW, closure: Any = None) -> Any:
        result = update(self, closure)
        if next(done) == BAD_STEP:
            self.param_groups[0]["params"][0].data[0] = float("inf")
        return result

    MasterAdamW.step = spoil


def loss_jumps(first: str, last: str) -> None:
    """Five times the loss in these steps."""
    log = LitRWKV7._log_step

    def scripted(self: LitRWKV7, loss: float, *rest: Any) -> None:
        log(self, loss * 5 if int(first) <= self.global_step <= int(last) else loss, *rest)

    LitRWKV7._log_step = scripted


def flip_a_gradient_bit(occurrence: str) -> None:
    """The lowest bit of one number flips when the gradients are computed for the k-th time."""
    run_step, seen = lit_module.run_step, itertools.count(1)

    def faulty(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = run_step(engine, *args, **kwargs)
        if next(seen) == int(occurrence):
            engine.model.head.weight.main_grad.view(torch.int32)[3, 3] ^= 1
        return result

    lit_module.run_step = faulty


# ---- hangs and lost processes


def hang(step: str) -> None:
    """This step waits for ever."""
    train = LitRWKV7.training_step

    def waiting(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        if self.global_step == int(step) - 1:
            time.sleep(3600)
        train(self, batch, batch_idx)

    LitRWKV7.training_step = waiting


def slow_steps(seconds: str) -> None:
    train = LitRWKV7.training_step

    def slow(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        time.sleep(float(seconds))
        train(self, batch, batch_idx)

    LitRWKV7.training_step = slow


def hang_the_interpreter(step: str) -> None:
    """This step waits for ever inside a library, and lets no thread run."""
    watchdog._GRACE_S = 0.5
    train = LitRWKV7.training_step

    def waiting(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        if self.global_step == int(step) - 1:
            ctypes.PyDLL(None).sleep(3600)
        train(self, batch, batch_idx)

    LitRWKV7.training_step = waiting


def hang_in_the_first_exchange() -> None:
    connection.dist = types.SimpleNamespace(all_reduce=lambda tensor: time.sleep(3600))


def first_exchange_fails() -> None:
    """As with InfiniBand that is there and does not work."""

    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")

    connection.dist = types.SimpleNamespace(all_reduce=fail)


def prefetching_fails(occurrence: str, kind: str) -> None:
    """The thread that prepares data meets an error of this kind in its k-th micro-batch, or `hang`s there."""
    build, seen = lanes.build_batch, itertools.count(1)

    def faulty(*args: Any) -> Any:
        if next(seen) == int(occurrence):
            if kind == "hang":
                time.sleep(3600)
            raise getattr(builtins, kind)("planted")
        return build(*args)

    lanes.build_batch = faulty


# ---- kills, signals, clocks, folders


def out_of_memory(step: str) -> None:
    """This step asks for more than any machine has."""
    train = LitRWKV7.training_step

    def greedy(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        if self.global_step == int(step) - 1:
            torch.empty(1 << (45 if self.device.type == "cuda" else 55), device=self.device)
        train(self, batch, batch_idx)

    LitRWKV7.training_step = greedy


def few_open_files(limit: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))


def kill_in_backward(occurrence: str) -> None:
    """Between the gradients of the head and of the blocks, in the k-th backward."""
    forward, seen = RWKV7.forward, itertools.count(1)

    def kill(_gradient: torch.Tensor) -> None:
        if next(seen) == int(occurrence):
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(self: RWKV7, *args: Any) -> Any:
        hidden_BTC, state = forward(self, *args)
        if hidden_BTC.requires_grad:
            hidden_BTC.register_hook(kill)
        return hidden_BTC, state

    RWKV7.forward = watched


def _at_point(name: str, occurrence: int, action: Callable[[], object]) -> None:
    """Do something when a failpoint is passed."""
    seen = itertools.count(1)

    def point(passed: str) -> None:
        if passed == name and next(seen) == occurrence:
            action()

    for module in (atomic, callbacks, checkpointing, tensorfile):
        module.failpoint = point


def _send(number: str, times: str = "1") -> None:
    for _ in range(int(times)):
        os.kill(os.getpid(), int(number))


def signal_at(name: str, occurrence: str, number: str, times: str = "1") -> None:
    """Send this process a signal when a failpoint is passed."""
    _at_point(name, int(occurrence), lambda: _send(number, times))


def full_at(name: str, occurrence: str) -> None:
    """The disk is full when a failpoint is passed."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _at_point(name, int(occurrence), fail)


def signal_in_model_building(number: str) -> None:
    build = LitRWKV7.configure_model

    def signalled(self: LitRWKV7) -> None:
        _send(number)
        build(self)

    LitRWKV7.configure_model = signalled


def signal_in_validation(number: str) -> None:
    """In the first of the batches."""
    validate, seen = LitRWKV7.validation_step, itertools.count(1)

    def signalled(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        if next(seen) == 1:
            _send(number)
        validate(self, batch, batch_idx)

    LitRWKV7.validation_step = signalled


def signal_in_data_wait(number: str) -> None:
    """While the fifth step's data is awaited."""
    ahead, seen = lanes.steps_ahead, itertools.count(1)

    def signalled(built: Any, data: Any) -> Iterator[Any]:
        for item in ahead(built, data):
            if next(seen) == 5:
                _send(number)
            yield item

    lanes.steps_ahead = signalled


def minutes_pass() -> None:
    """Each step takes half a minute."""
    start = checkpointing.time.monotonic()
    step = LitRWKV7.training_step
    passed = [0.0]
    checkpointing.time = types.SimpleNamespace(monotonic=lambda: start + passed[0])

    def slow(self: LitRWKV7, batch: Any, batch_idx: int) -> None:
        step(self, batch, batch_idx)
        passed[0] += 30

    LitRWKV7.training_step = slow


def year_2038() -> None:
    """The wall clock is beyond 32 bits."""
    now = time.time
    time.time = lambda: now() + 0x7FFFFFFF


def two_threads() -> None:
    torch.set_num_threads(2)


def closed_output() -> None:
    """Nobody reads stdout and stderr, as after `| head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def folder_vanishes(point: str, occurrence: str, folder: str) -> None:
    """Someone deletes the checkpoint folder while the run is on."""
    _at_point(point, int(occurrence), lambda: shutil.rmtree(folder))


def small_files(limit: str) -> None:
    """No file can grow beyond `limit` bytes: writes fail in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))


def little_room(limit: str) -> None:
    """The disk has only `limit` bytes left."""
    atomic._free_bytes = lambda path: int(limit)


def unprivileged() -> None:
    """Root may write anywhere: keep its identity and give up its powers."""
    header = struct.pack("<Ii", 0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, struct.pack("<6I", *[0] * 6)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def losses_of_validation(*values: str) -> None:
    """Validation losses as given, the last one for good."""
    found = list(values)
    log = LitRWKV7.log

    def scripted(self: LitRWKV7, name: str, value: Any, **options: Any) -> None:
        if name == "validation/loss":
            value = float(found[min(self.trainer.current_epoch, len(found) - 1)])
        log(self, name, value, **options)

    LitRWKV7.log = scripted
