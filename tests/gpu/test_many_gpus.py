"""Strategies on real GPUs: on one, and on two where two are there. Prints a table of what was measured.

The small form of all of it runs on CPUs in tests/reliability/test_ranks.py.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.checkpoint.pieces import MASTER, SavedPieces
from trainer.checkpoint.tensorfile import load_safetensors
from trainer.data.binidx import BinIdxWriter

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
GPUS = [1, 2] if torch.cuda.device_count() >= 2 else [1]
LONG = 65_536
SMALL = ("--model.n_layer=12", "--model.n_embd=768", "--model.vocab_size=512")


@dataclass
class Result:
    """A run's exit code, output, and lines of metrics."""

    code: int
    output: str
    rows: list[dict] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def step_s(self) -> float:
        """Median time between steps, without the first ones, which compile and build."""
        times = [row["time"] for row in self.rows][3:]
        return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def documents(prefix: Path, lengths: list[int]) -> Path:
    rng = np.random.default_rng(1)
    with BinIdxWriter(prefix) as writer:
        for length in lengths:
            start, stride = rng.integers(1, 200, 2)
            writer.add_document((start + stride * np.arange(length) + rng.integers(0, 4, length)) % 500 + 1)
    return prefix


def fit(folder: Path, data: Path, strategy: str, gpus: int, *options: str, failpoint: str = "") -> Result:
    config = folder.parent / "config.yaml"
    config.write_text("trainer: {accelerator: gpu}\n")
    words = [
        "fit", "-c", str(config), f"--checkpoint.dir={folder}", f"--trainer.strategy={strategy}", f"--trainer.devices={gpus}",
        "--data.source=binidx", f"--data.source_data_dir={data}", "--data.tokenizer=byte", "--data.test_split=0",
        "--checkpoint.every_steps=0", "--model.lr_schedule=constant", "--trainer.target_batch_size=2", *options,
    ]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    environment = {**os.environ, **({"RWKV_FAILPOINT": failpoint} if failpoint else {})}
    done = subprocess.run(
        [*launch, "lightning_trainer.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Result(done.returncode, done.stdout + done.stderr, [row for row in rows if "loss" in row])


def show(*columns: object) -> None:
    print("| " + " | ".join(f"{c:.4f}" if isinstance(c, float) else str(c) for c in columns) + " |", flush=True)


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    return documents(tmp_path_factory.mktemp("even") / "docs", [1025] * 64)


@pytest.mark.parametrize("gpus", GPUS)
def test_a_run_goes_on_under_other_strategies(tmp_path, even, gpus):
    """Losses are those of one strategy, and masters and moments those that were saved."""
    same = (*SMALL, "--model.ctx_len=512", "--model.bptt_window=full", "--model.compile=off")
    chain = [
        "deepspeed_stage_2",
        "deepspeed_stage_3",
        "auto",
        "deepspeed_stage_2_offload",
        "deepspeed_stage_3_offload",
        "auto",
    ]
    truth = fit(tmp_path / "truth", even, "auto", 1, *same, f"--trainer.max_steps={len(chain)}")
    assert truth.code == 0, truth.output[-3000:]
    last = None
    for number, strategy in enumerate(chain, start=1):
        resume = (f"--resume={last}",) if last else ()
        processes = 1 if strategy == "auto" else gpus
        folder = tmp_path / f"{number}"
        result = fit(folder, even, strategy, processes, *same, f"--trainer.max_steps={number}", *resume)
        assert result.code == 0, result.output[-3000:]
        expected = truth.losses[number - 1]
        saved = re.search(r"saved \S+ \(([\d.]+) s\)", result.output)
        show(strategy, processes, result.losses[-1], expected, saved[1] if saved else "")
        assert result.losses[-1] == pytest.approx(expected, rel=2e-3)
        last = folder / f"step-{number}"


def test_compiled_blocks_under_deepspeed_give_the_same_losses(tmp_path, even):
    runs = {
        choice: fit(
            tmp_path / choice, even, "deepspeed_stage_2", 1, *SMALL, "--model.ctx_len=512", f"--model.compile={choice}",
            "--trainer.max_steps=12",
        )
        for choice in ("off", "on")
    }  # fmt: skip
    for choice, result in runs.items():
        assert result.code == 0, result.output[-3000:]
        show("ZeRO 2, compile", choice, result.losses[-1], result.step_s)
    assert runs["on"].losses == pytest.approx(runs["off"].losses, rel=2e-3)


@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3"])
@pytest.mark.parametrize("gpus", GPUS)
def test_unequal_documents_a_lost_rank_one_gpu_and_an_export(tmp_path, strategy, gpus):
    data = documents(tmp_path / "docs", [2, LONG + 1] * 6)
    options = (*SMALL, "--model.ctx_len=4096", "--model.bptt_window=full", "--checkpoint.every_steps=2")
    options += ("--data.dataloader_shuffle_training=false", "--model.compile=off")
    run = tmp_path / "run"
    lost = fit(run, data, strategy, gpus, *options, "--trainer.max_steps=4", failpoint="fsynced:2")
    assert lost.code != 0
    assert [path.name for path in run.glob("step-*")] == ["step-2"]
    again = fit(run, data, strategy, gpus, *options, "--trainer.max_steps=4", "--resume=auto")
    assert again.code == 0, again.output[-3000:]
    alone = fit(run, data, "auto", 1, *options, "--trainer.max_steps=6", "--resume=auto")
    assert alone.code == 0, alone.output[-3000:]
    show(strategy, gpus, "documents of 1 and 65,536 tokens", *alone.losses)
    out = tmp_path / "model.safetensors"
    export = [sys.executable, "export_checkpoint.py", str(run / "step-4"), str(out), "--dtype", "fp32"]
    subprocess.run(export, cwd=ROOT, check=True, capture_output=True)
    saved = SavedPieces(run / "step-4")
    assert all(torch.equal(x, saved.whole(MASTER, name).view(x.shape)) for name, x in load_safetensors(out).items())


def test_a_checkpoint_costs_little(tmp_path, even):
    """Time of a save over that of 100 steps, L12-D768."""
    result = fit(
        tmp_path / "run", even, "auto", 1, *SMALL, "--model.vocab_size=65536", "--model.ctx_len=1024",
        "--trainer.microbatch_size=8", "--trainer.target_batch_size=8", "--trainer.max_steps=24",
        "--checkpoint.every_steps=12",
    )  # fmt: skip
    assert result.code == 0, result.output[-3000:]
    save_s = [float(text) for text in re.findall(r"saved \S+ \(([\d.]+) s\)", result.output)]
    show("save s", *save_s, "step s", result.step_s, "share at every 100 steps", max(save_s) / (100 * result.step_s))


@pytest.mark.parametrize("gpus", GPUS[1:])
def test_streams_scale(tmp_path, gpus):
    data = documents(tmp_path / "docs", [5000] * 400)
    options = (
        "--model.n_layer=24", "--model.n_embd=1024", "--model.vocab_size=65536", "--model.ctx_len=4096",
        "--data.batching=stream", "--trainer.max_steps=24", "--trainer.microbatch_size=2",
    )  # fmt: skip
    one = fit(tmp_path / "one", data, "auto", 1, *options)
    both = fit(tmp_path / "both", data, "ddp", gpus, *options, f"--trainer.target_batch_size={2 * gpus}")
    factor = gpus * one.step_s / both.step_s
    show("stream, L24-D1024, ctx 4096", gpus, "GPUs", factor, "times one")
    assert factor >= 0.95 * gpus
