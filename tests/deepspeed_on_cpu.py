"""DeepSpeed under Lightning's CPU accelerator, for tests of gradients on machines without a GPU.

DeepSpeed itself runs on CPUs with gloo; Lightning's strategy refuses. This subclass skips what needs a GPU.
"""

from __future__ import annotations

import argparse
import os
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from trainer.train.zero import ZeroStrategy


class CpuDeepSpeedStrategy(ZeroStrategy):
    """ZeRO on CPU processes."""

    def __init__(self, config: dict) -> None:
        super().__init__(config=config, process_group_backend="gloo", logging_batch_size_per_gpu=1)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        import deepspeed.ops

        # An operator of inference only, whose build takes minutes here and can hang on a stale lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model, optimizer, lr_scheduler=None):
        import deepspeed

        engine, optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=0),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, optimizer

    def _initialize_deepspeed_inference(self, model) -> None:
        # DeepSpeed wants a device with a number.
        with mock.patch.object(type(self), "root_device", torch.device("cpu", 0)):
            super()._initialize_deepspeed_inference(model)
