"""DeepSpeed's settings: those that the trainer decides are refused with the reason, others reach DeepSpeed."""

from __future__ import annotations

import dataclasses

import pytest

from trainer.config import DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.config.checks import check_values
from trainer.errors import ConfigError
from trainer.train.strategy import deepspeed_config, make_strategy


def run_with(block: dict, **settings) -> RunConfig:
    run = RunConfig(
        model=ModelConfig(n_layer=1, n_embd=64),
        data=DataConfig(data_path="data"),
        trainer=TrainerConfig(deepspeed=block),
        strategy="deepspeed_stage_2",
    )
    return dataclasses.replace(run, **settings)


@pytest.mark.parametrize(
    ("block", "key", "reason"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "trainer.target_batch_size"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "trainer.microbatch_size"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "model.grad_clip"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation", "last"),
        ({"optimizer": {"type": "Adam"}}, "optimizer", "AdamW"),
        ({"bf16": {"enabled": True}}, "bf16", "trainer.precision"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "trainer.strategy"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device", "trainer.strategy",
        ),
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com", "overlap_comm"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype", "fp32, or bf16"),
    ],
)  # fmt: skip
def test_what_the_trainer_decides_is_refused(block, key, reason):
    with pytest.raises(ConfigError) as caught:
        check_values(run_with(block))
    assert str(caught.value).startswith(f"trainer.deepspeed.{key}: ")
    assert reason in str(caught.value)


def test_float32_gradients_are_not_summed_in_bf16():
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        check_values(run_with({"data_types": {"grad_accum_dtype": "bf16"}}, precision="32-true"))


def test_a_block_without_deepspeed_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed: acts only with"):
        check_values(run_with({"steps_per_print": 5}, strategy="ddp"))


def test_other_settings_are_laid_over_the_strategy():
    block = {
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 10**7},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    run = run_with(block, strategy="deepspeed_stage_3_offload")
    check_values(run)
    config = deepspeed_config(run)
    assert config["zero_optimization"] == {
        "stage": 3, "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 10**7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }  # fmt: skip
    assert config["data_types"] == {"grad_accum_dtype": "bf16"}
    assert config["communication_data_type"] == "fp32"


def test_deepspeed_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.strategy: needs a GPU"):
        make_strategy(run_with({}, accelerator="cpu"))
