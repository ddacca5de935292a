"""Which of DeepSpeed's settings may be given in `trainer.deepspeed`, and why the others may not."""

from __future__ import annotations

import difflib
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import ConfigError

__all__ = ["check_deepspeed"]

_WHERE = "trainer.deepspeed"
_BATCH = (
    "the step loop counts chunks and micro-batches itself: set trainer.target_batch_size and trainer.microbatch_size"
)
_ADAM = "the optimizer is PyTorch's AdamW with the official groups: set model.lr_init, model.beta1, ..."
_SCALE = "the loss of each chunk has its final scale already"
_PRECISION = "set trainer.precision"
_STAGE = "set trainer.strategy"
_OURS = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "managed_gradient_accumulation": "the step loop says which chunk is a step's last",
    "gradient_clipping": "set model.grad_clip",
    "optimizer": _ADAM,
    "zero_allow_untested_optimizer": _ADAM,
    "zero_force_ds_cpu_optimizer": _ADAM,
    "scheduler": "set model.lr_schedule",
    "prescale_gradients": _SCALE,
    "gradient_predivide_factor": _SCALE,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "activation_checkpointing": "set model.grad_cp",
    "checkpoint": "checkpoints have the trainer's own form",
    "zero_optimization.stage": _STAGE,
    "zero_optimization.offload_optimizer.device": _STAGE,
    "zero_optimization.cpu_offload": _STAGE,
}
"""Key -> why it is not the user's."""
_FREE = {
    "communication_data_type", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "comms_logger", "data_types.grad_accum_dtype",
    *(f"zero_optimization.{name}" for name in (
        "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
        "allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "offload_optimizer.pin_memory",
    )),
}  # fmt: skip
_DTYPES = ("fp32", "bf16")


def _leaves(block: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys; a mapping that is a free setting itself counts as one."""
    found = []
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in _FREE and key not in _OURS:
            found += _leaves(value, f"{key}.")
        else:
            found.append(key)
    return found


def check_deepspeed(run: RunConfig) -> None:
    """Refuse what the trainer decides itself, what DeepSpeed would ignore, and a block without effect.

    Raises:
        ConfigError: by the name of the key, with the reason.
    """
    block = run.trainer.deepspeed
    if not block:
        return
    if not run.strategy.startswith("deepspeed"):
        problem = f"acts only with trainer.strategy: deepspeed_stage_N, not {run.strategy}"
        raise ConfigError(_WHERE, problem, fix="remove it")
    for key in _leaves(block):
        if key in _OURS:
            raise ConfigError(f"{_WHERE}.{key}", f"is not set here: {_OURS[key]}", fix="remove it")
        if key not in _FREE:
            near = difflib.get_close_matches(key, sorted(_FREE), n=1)
            fix = f"did you mean {near[0]}?" if near else "docs/many-gpus.md lists what may be given"
            raise ConfigError(f"{_WHERE}.{key}", "is not among the settings that are known to work here", fix=fix)
    for key, value in (
        ("communication_data_type", block.get("communication_data_type", "fp32")),
        ("data_types.grad_accum_dtype", block.get("data_types", {}).get("grad_accum_dtype", "fp32")),
    ):
        if value not in _DTYPES or (value == "bf16" and not run.precision.startswith("bf16")):
            rule = "fp32, or bf16 with a bf16 trainer.precision"
            raise ConfigError(f"{_WHERE}.{key}", "not a choice of dtype", found=value, rule=rule)
