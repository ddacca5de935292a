"""A small base, a data set, and runs that train adapters on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.export import save_weights
from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.config.checks import check_run
from trainer.data.binidx import BinIdxWriter
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.train.callbacks import METRICS_FILE, read_metrics
from trainer.train.run import execute

SHAPE = ModelShape.official(2, 32, 48, head_size=16)


def random_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """Official initial weights, with noise where they are zero."""
    generator = torch.Generator().manual_seed(seed)
    return {n: w + 0.05 * torch.randn(w.shape, generator=generator) for n, w in init_weights(SHAPE, seed).items()}


def write_base(folder: Path, seed: int = 1) -> Path:
    path = folder / f"base-{seed}.pth"
    save_weights(random_weights(seed), path, dtype="fp32")
    return path


def write_documents(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    with BinIdxWriter(folder / "docs", np.uint16) as writer:
        for length in (50, 90, 33, 70, 41, 60, 85, 52):
            writer.add_document(generator.integers(1, 48, length))
    return folder / "docs"


def make_run(folder: Path, base: Path, data: Path, **model: Any) -> RunConfig:
    """Three chunks per document and exact gradients, in float32."""
    settings = {
        "load_model": str(base), "ctx_len": 32, "bptt_window": "full", "kernel": "chunked", "lr_init": 5e-3,
        "lr_schedule": "constant", "warmup_steps": 1, "weight_decay": 0.0,
    }  # fmt: skip
    run = RunConfig(
        model=ModelConfig(**(settings | model)),
        data=DataConfig(source="binidx", source_data_dir=str(data), tokenizer="byte", test_split=2, dataloader_prefetch_factor=0),
        trainer=TrainerConfig(target_batch_size=2, microbatch_size=2),
        checkpoint=CheckpointConfig(dir=str(folder), every_steps=2, keep=0),
        precision="32-true", accelerator="cpu", max_steps=4,
    )  # fmt: skip
    check_run(run)
    return run


def fit(run: RunConfig, **trainer: Any) -> list[dict[str, Any]]:
    """Train; the metrics of all steps so far."""
    execute("fit", run, {"accelerator": "cpu", "enable_progress_bar": False, "logger": False} | trainer)
    return [row for row in read_metrics(Path(run.checkpoint.dir) / METRICS_FILE) if "loss" in row]
