"""Running out of memory, said in settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.config import RunConfig
from trainer.errors import MemoryLimitError

__all__ = ["memory_errors"]

_FIX = (
    "in this order: model.grad_cp: true, less trainer.microbatch_size, less model.loss_chunk_rows, model.cuda_graphs: off, "
    "less model.ctx_len, trainer.strategy: deepspeed_stage_1 to 3; then resume: auto, older checkpoints are untouched"
)


@contextlib.contextmanager
def memory_errors(run: RunConfig) -> Iterator[None]:
    """Name the settings that memory depends on if it runs out in the block.

    Raises:
        MemoryLimitError: instead of what PyTorch and Python raise.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as err:
        # For host memory PyTorch has no error of its own.
        is_memory = isinstance(err, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(err)
        if not is_memory:
            raise
        rows, ctx_len = run.trainer.microbatch_size, run.model.ctx_len
        found = f"trainer.microbatch_size {rows} x model.ctx_len {ctx_len} = {rows * ctx_len} tokens at a time"
        problem = f"not enough for a step ({' '.join(str(err).split())[:300] or type(err).__name__})"
        raise MemoryLimitError("memory", problem, found=found, fix=_FIX) from err
