"""Strategies: what we ask of Lightning and DeepSpeed, and how chunks run through them. All facts in one place.

Several backwards per optimizer step are silently wrong by default under ZeRO: DeepSpeed must be told before
each forward whether its backward completes the step, and under ZeRO-3 each chunk must be a call of the engine.
Under `ddp` chunks run on the bare module and the summed gradients are averaged once per step, in float32: DDP itself
would average in every backward, in bf16, and stumble over the parameters that official models carry unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from trainer.bptt.step import ChunkInput, EagerEngine
from trainer.config import RunConfig
from trainer.errors import ConfigError, NonFiniteError
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState
from trainer.train.zero import ZeroStrategy, writable

if TYPE_CHECKING:
    from trainer.train.lit_module import LitRWKV7

__all__ = [
    "DeepSpeedChunks",
    "average_over_ranks",
    "check_gradients",
    "deepspeed_config",
    "is_deepspeed",
    "is_offload",
    "lightning_precision",
    "load_weights",
    "make_strategy",
    "watch_gradients",
    "weight_dtype",
]

_BUCKET_ELEMENTS = 1 << 25


def weight_dtype(precision: str) -> torch.dtype:
    """Dtype of the weights in the forward pass."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float64 if precision.startswith("64") else torch.float32


def is_deepspeed(strategy: Strategy) -> bool:
    """Whether gradients and updates belong to a DeepSpeed engine."""
    return isinstance(strategy, ZeroStrategy)


def lightning_precision(run: RunConfig) -> str:
    """Precision to tell Lightning: never one that enters an autocast region.

    The module holds its weights in the dtype of `weight_dtype`, and the optimizer keeps masters. DeepSpeed
    must know about bf16 to keep its own float32 masters.
    """
    if run.strategy.startswith("deepspeed") and run.precision.startswith("bf16"):
        return "bf16-true"
    return "64-true" if run.precision.startswith("64") else "32-true"


def deepspeed_config(run: RunConfig) -> dict[str, Any]:
    """DeepSpeed settings: float32 accumulation and communication of gradients, then `trainer.deepspeed` over it."""
    stage = int(run.strategy.split("_")[2])
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if is_offload(run.strategy):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if run.model.grad_clip > 0:
        config["gradient_clipping"] = run.model.grad_clip
    return _merged(config, run.trainer.deepspeed or {})


def is_offload(strategy: str) -> bool:
    """Whether masters and moments are kept, and updated, on the host."""
    return strategy.endswith("_offload")


def _merged(config: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def make_strategy(run: RunConfig) -> Strategy | str:
    """What Lightning's Trainer gets as `strategy`.

    Raises:
        ConfigError: DeepSpeed is asked for without a GPU.
    """
    if not run.strategy.startswith("deepspeed"):
        return run.strategy
    if run.accelerator == "cpu" or (run.accelerator == "auto" and not torch.cuda.is_available()):
        raise ConfigError("trainer.strategy", "needs a GPU", found=run.strategy, fix="on a CPU use ddp")
    return ZeroStrategy(config=deepspeed_config(run), logging_batch_size_per_gpu=1)


def load_weights(model: RWKV7, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by official name into the model, whether its parameters are whole or sharded by ZeRO-3."""
    for name, parameter in model.named_parameters():
        with writable(parameter) as is_mine, torch.no_grad():
            if is_mine:
                parameter.copy_(weights[name].view(parameter.shape))
    for name, buffer in model.named_buffers():
        buffer.copy_(weights[name])


class DeepSpeedChunks(EagerEngine):
    """`trainer.bptt.step.Engine` over a DeepSpeed engine.

    Args:
        module: the LightningModule of a running trainer.
    """

    def __init__(self, module: LitRWKV7) -> None:
        self.module = module
        self.wrapped: Any = module.trainer.strategy.model

    def zero_state(self, rows: int) -> ModelState:
        """See `Engine`."""
        return self.module.model.zero_state(rows)

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """Run a chunk as a call of the engine, which has been told whether its backward is the step's last."""
        if torch.is_grad_enabled():
            self.wrapped.set_gradient_accumulation_boundary(is_last)
        loss, state = self.wrapped(
            chunk.ids_BT, chunk.targets_BT, chunk.weight_BT, chunk.reset_BT, chunk.state, with_loss,
            chunk.group_BT, chunk.group_sums_2G, chunk.is_start, chunk.seed,
        )  # fmt: skip
        return loss, state

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add a chunk's gradient through the engine."""
        self.module.manual_backward(loss)


def average_over_ranks(gradients: list[Tensor], world_size: int) -> None:
    """Mean over ranks in place, in buckets, for runs without DeepSpeed."""
    start = 0
    while world_size > 1 and start < len(gradients):
        stop, size = start, 0
        while stop < len(gradients) and size < _BUCKET_ELEMENTS:
            size += gradients[stop].numel()
            stop += 1
        bucket = gradients[start:stop]
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat)
        flat /= world_size
        parts = torch.split(flat, [g.numel() for g in bucket])
        torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
        start = stop


def watch_gradients(module: LitRWKV7) -> None:
    """DeepSpeed updates without showing gradients: note any that is not finite as autograd makes it."""
    module.bad_gradient = torch.zeros((), device=module.device)

    def note(gradient: Tensor) -> None:
        # 0 * x is NaN for NaN and infinite x; no synchronisation.
        module.bad_gradient += gradient.sum(dtype=torch.float32) * 0

    for parameter in module.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(note)  # type: ignore[no-untyped-call]


def check_gradients(module: LitRWKV7) -> None:
    """Stop all ranks before the update if any has seen a gradient that is not finite.

    Raises:
        NonFiniteError: naming the rank.
    """
    ranks = module.gather_numbers([float(module.bad_gradient)])
    bad = [rank for rank, (flag,) in enumerate(ranks) if flag != 0]
    if bad:
        raise NonFiniteError(
            f"step {module.global_step + 1}",
            "the gradient is not finite",
            found=f"on rank {bad[0]}",
            fix="lower model.lr_init or model.grad_clip, or look at the data of this step; the weights are unchanged",
        )
