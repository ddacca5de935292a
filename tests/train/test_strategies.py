"""Every strategy on two processes gives the gradient of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.checkpoint.tensorfile import load_safetensors
from trainer.data.binidx import BinIdxWriter

WORKER = Path(__file__).with_name("gradient_worker.py")
# Three chunks of 16 at most; ranks get rows of different lengths, and two micro-batches each.
UNUSED = {f"blocks.0.att.v{i}" for i in range(3)}
LENGTHS = (48, 41, 33, 12)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "docs"
    rng = np.random.default_rng(3)
    with BinIdxWriter(prefix) as writer:
        for length in LENGTHS:
            writer.add_document(rng.integers(1, 48, length + 1))
    return prefix


def gradients(folder: Path, data: Path, processes: int, **options) -> dict:
    out = folder / f"{options['strategy']}-{options['window']}.safetensors"
    message = {"folder": str(folder), "out": str(out), "data": str(data), "grad_cp": False, **options}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable]
    if processes > 1 or options["strategy"].startswith("deepspeed"):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    result = subprocess.run(
        [*command, str(WORKER), json.dumps(message)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return load_safetensors(out)


def weights_after_step(folder: Path, **options) -> dict:
    """What the run of `gradients` has made of its weights with AdamW."""
    return load_safetensors(folder / f"{options['strategy']}-{options['window']}.weights")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, data):
    """Gradients of one process in float64, and the weights after one step."""
    folder = tmp_path_factory.mktemp("reference")
    found = {
        window: gradients(folder, data, 1, strategy="auto", window=window, precision="64-true")
        for window in (1, "full")
    }
    weights = {f"weights-{window}": weights_after_step(folder, strategy="auto", window=window) for window in found}
    return found | weights


def assert_equal_weights(folder: Path, reference: dict, **options) -> None:
    got = weights_after_step(folder, **options)
    for name, wanted in reference[f"weights-{options['window']}"].items():
        error = (got[name].view(wanted.shape) - wanted).norm() / wanted.norm().clamp_min(1e-30)
        assert error < 1e-3, f"{name}: {error:.1e}"


def assert_close(got: dict, expected: dict, tolerance: float) -> None:
    unused = {name for name in got if name not in expected}
    # DeepSpeed shows zeros for the parameters that official models carry unused.
    assert all(not got[name].any() for name in unused)
    for name, wanted in expected.items():
        assert wanted.any() or name in UNUSED, name
        error = (got[name] - wanted).norm() / wanted.norm().clamp_min(1e-30)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, "full"])
@pytest.mark.fault(48)
def test_ddp_float64(tmp_path, data, reference, window):
    assert_close(
        gradients(tmp_path, data, 2, strategy="ddp", window=window, precision="64-true"), reference[window], 1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, "full"])
@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [("ddp", 2e-6), ("deepspeed_stage_1", 1e-5), ("deepspeed_stage_2", 1e-5), ("deepspeed_stage_3", 1e-5)],
)
@pytest.mark.fault(48)
def test_float32(tmp_path, data, reference, strategy, tolerance, window):
    assert_close(
        gradients(tmp_path, data, 2, strategy=strategy, window=window, precision="32-true"),
        reference[window],
        tolerance,
    )
    assert_equal_weights(tmp_path, reference, strategy=strategy, window=window)


@pytest.mark.slow
def test_windows_differ(reference):
    """The two references are not the same gradient, so neither test can pass by accident."""
    differences = [(reference[1][n] - g).norm() / g.norm() for n, g in reference["full"].items()]
    assert max(differences) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed_stage_3", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload"])
def test_recomputed_blocks_and_offload(tmp_path, data, reference, strategy):
    got = gradients(tmp_path, data, 2, strategy=strategy, window="full", precision="32-true", grad_cp=True)
    assert_close(got, reference["full"], 1e-5)
    assert_equal_weights(tmp_path, reference, strategy=strategy, window="full")
