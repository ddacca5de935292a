"""NaN and infinity: the run stops before the update, says where they came from, and never saves them."""

from __future__ import annotations

import pytest
import torch
from harness import checkpoints

from trainer.checkpoint.tensorfile import load_safetensors

BAD_STEP = 5


def the_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("nan_loss", ["step 5, micro-batch 1, chunk 1", "loss is not finite", "in blocks.1"]),
        ("infinite_gradient", ["step 5", "gradient is not finite", "blocks.1.att.key.weight"]),
    ],
)
def test_a_bad_number_stops_the_run_before_the_update(truth, another, fault, texts):
    output = another.fit(code=5, faults=(fault,))
    assert all(text in the_error(output) for text in texts), the_error(output)
    assert "weights as before" in output
    assert [row["step"] for row in another.record().rows] == [1, 2, 3, 4]
    assert checkpoints(another.run)[-1].name == "step-4"
    another.fit()
    assert another.record().differences(truth.record) == []


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-true"])
def test_a_bad_weight_is_not_saved(another, precision):
    """Every step is saved; the one that made the weight infinite is not."""
    output = another.fit(
        "--checkpoint.every_steps=1", f"--trainer.precision={precision}", code=5, faults=("infinite_weight",)
    )
    assert "step 5: weights or moments are not finite" in the_error(output)
    assert [path.name for path in checkpoints(another.run)] == ["step-3", "step-4"]
    assert not list(another.run.glob(".step-*"))
    for path in another.run.glob("step-*/*.safetensors"):
        assert all(bool(torch.isfinite(tensor.double()).all()) for tensor in load_safetensors(path).values())
