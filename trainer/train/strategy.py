"""Strategies: what we ask of Lightning and DeepSpeed, and how chunks run through them. All facts in one place.

Several backwards per optimizer step are silently wrong by default under ZeRO: DeepSpeed must be told before
each forward whether its backward completes the step, and under ZeRO-3 each chunk must be a call of the engine.
DDP averages in every backward; here it runs without, and the summed gradients are averaged once per step, in
float32, so that ranks may differ in their number of backwards and unused parameters do no harm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.bptt.step import ChunkInput
from trainer.config import RunConfig
from trainer.errors import NonFiniteError
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState

if TYPE_CHECKING:
    from trainer.train.lit_module import LitRWKV7

__all__ = [
    "StrategyEngine",
    "deepspeed_config",
    "is_deepspeed",
    "lightning_precision",
    "load_weights",
    "make_strategy",
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
    return isinstance(strategy, DeepSpeedStrategy)


def lightning_precision(run: RunConfig) -> str:
    """Precision to tell Lightning: never one that enters an autocast region.

    The module holds its weights in the dtype of `weight_dtype`, and the optimizer keeps masters. DeepSpeed
    must know about bf16 to keep its own float32 masters.
    """
    if run.strategy.startswith("deepspeed") and run.precision.startswith("bf16"):
        return "bf16-true"
    return "64-true" if run.precision.startswith("64") else "32-true"


def deepspeed_config(run: RunConfig) -> dict[str, Any]:
    """DeepSpeed settings for `deepspeed_stage_N`: float32 accumulation and communication of gradients."""
    stage = int(run.strategy.rsplit("_", 1)[1])
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if run.model.grad_clip > 0:
        config["gradient_clipping"] = run.model.grad_clip
    return config


def make_strategy(run: RunConfig) -> Strategy | str:
    """What Lightning's Trainer gets as `strategy`."""
    if not run.strategy.startswith("deepspeed"):
        return run.strategy
    return DeepSpeedStrategy(config=deepspeed_config(run), logging_batch_size_per_gpu=1)


def load_weights(model: RWKV7, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by official name into the model, whether its parameters are whole or sharded by ZeRO-3."""
    for name, parameter in model.named_parameters():
        context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if hasattr(parameter, "ds_id"):
            import deepspeed

            context = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with context, torch.no_grad():
            if parameter.numel():
                parameter.copy_(weights[name].view(parameter.shape))


class StrategyEngine:
    """`trainer.bptt.step.Engine` over the module as Lightning's strategy has wrapped it.

    Args:
        module: the LightningModule of a running trainer.
    """

    def __init__(self, module: LitRWKV7) -> None:
        self.module = module
        self.wrapped: Any = module.trainer.strategy.model
        self._deepspeed = is_deepspeed(module.trainer.strategy)
        self._ddp = isinstance(self.wrapped, DistributedDataParallel)

    def zero_state(self, rows: int) -> ModelState:
        """State before a document."""
        return self.module.model.zero_state(rows)

    def _local(self) -> contextlib.AbstractContextManager:
        return self.wrapped.no_sync() if self._ddp else contextlib.nullcontext()

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """Run a chunk through the strategy's engine."""
        if self._deepspeed and torch.is_grad_enabled():
            self.wrapped.set_gradient_accumulation_boundary(is_last)
        with self._local():
            return self.wrapped(
                chunk.ids_BT,
                chunk.targets_BT,
                chunk.weight_BT,
                chunk.reset_BT,
                chunk.state,
                with_loss,
                self.module.run.model.l2wrap,
            )

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add a chunk's gradient through the strategy."""
        with self._local():
            self.module.manual_backward(loss)

    def average(self, gradients: list[Tensor]) -> None:
        """Mean over ranks in place, for strategies that do not do it themselves."""
        world = self.module.trainer.world_size
        if world == 1:
            return
        start = 0
        while start < len(gradients):
            stop, size = start, 0
            while stop < len(gradients) and size < _BUCKET_ELEMENTS:
                size += gradients[stop].numel()
                stop += 1
            flat = torch.cat([g.flatten() for g in gradients[start:stop]])
            dist.all_reduce(flat)
            flat /= world
            parts = flat.split([g.numel() for g in gradients[start:stop]])
            torch._foreach_copy_(
                gradients[start:stop], [p.view_as(g) for p, g in zip(parts, gradients[start:stop], strict=True)]
            )
            start = stop

    def watch_gradients(self) -> None:
        """DeepSpeed updates without showing gradients: note any that is not finite as autograd makes it."""
        self.module.bad_gradient = torch.zeros((), device=self.module.device)
        for parameter in self.module.model.parameters():
            parameter.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        # 0 * x is NaN for NaN and infinite x; no synchronisation.
        self.module.bad_gradient += gradient.sum(dtype=torch.float32) * 0

    def check_gradients(self) -> None:
        """Stop all ranks before the update if any has seen a gradient that is not finite."""
        ranks = self.module.gather_numbers([float(self.module.bad_gradient)])
        bad = [rank for rank, (flag,) in enumerate(ranks) if flag != 0]
        if bad:
            raise NonFiniteError(
                f"step {self.module.global_step}", "the gradient is not finite", found=f"on rank {bad[0]}",
                fix="lower model.lr_init or model.grad_clip, or look at the data of this step; the weights are unchanged",
            )  # fmt: skip
