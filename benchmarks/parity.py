"""Reproduce the official trainer's loss curve and compare it with the official band.

    python benchmarks/parity.py --init rwkv-init.pth [--final rwkv-final.pth] [--precision bf16-mixed] [--ctx 512]

The run is `lightning_trainer.py fit` with the official trainer's settings on the King James Bible: 8 layers, width
384, 400 steps of 8192 tokens, the state zero at the start of every sample. The official losses and their
tolerances are in tests/fixtures/parity/band.json (mean of four identical official runs, with the noise seen
between them). Prints one row per criterion; exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "parity"
sys.path.insert(0, str(ROOT))

from trainer.checkpoint.read import read_weights  # noqa: E402
from trainer.model.naming import shape_from_weights  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402
from trainer.train.callbacks import read_metrics  # noqa: E402


def unpack(folder: Path) -> None:
    """Write the data set and the held-out text into `folder`."""
    for name in ("kjv", "heldout"):
        (folder / f"{name}.bin").write_bytes(lzma.decompress((FIXTURES / f"{name}.bin.xz").read_bytes()))
        shutil.copyfile(FIXTURES / f"{name}.idx", folder / f"{name}.idx")


def settings(folder: Path, args: argparse.Namespace) -> dict:
    """The official run as a config of ours."""
    rows = 8192 // args.ctx
    return {
        "trainer": {
            "accelerator": args.accelerator,
            "devices": 1,
            "strategy": args.strategy,
            "precision": args.precision,
            "max_steps": args.steps,
            "max_tokens": 3276800,
            "target_batch_size": rows,
            "microbatch_size": rows,
        },
        "model": {
            "load_model": str(args.init),
            "ctx_len": args.ctx,
            "kernel": args.kernel,
            "grad_cp": args.grad_cp,
            "compile": args.compile,
            "lr_init": 6e-4,
            "lr_final": 6e-5,
            "warmup_steps": 10,
            "adam_eps": 1e-18,
            "weight_decay": 0.001,
            "grad_clip": 1.0,
        },
        "data": {
            "source": "binidx",
            "source_data_dir": str(folder / "kjv"),
            "tokenizer": "byte",
            "batching": "windows",
            "test_split": 0,
        },
        "checkpoint": {"dir": str(folder / "run"), "every_steps": 0},
    }


@torch.no_grad()
def heldout_loss(weights: Path, folder: Path, device: str, dtype: torch.dtype, window: int = 512) -> float:
    """Mean loss over windows of the held-out text, each from zero state."""
    tensors = read_weights(weights)
    model = RWKV7(shape_from_weights(tensors)).to(device, dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()})
    tokens = torch.from_numpy(np.fromfile(folder / "heldout.bin", np.uint16).astype(np.int64))
    count = (len(tokens) - 1) // window
    ids = tokens[: count * window].view(count, window)
    targets = tokens[1 : count * window + 1].view(count, window)
    total = 0.0
    for start in range(0, count, 25):
        hidden, _ = model(ids[start : start + 25].to(device))
        logits = model.head(hidden).float().flatten(0, 1)
        total += F.cross_entropy(logits, targets[start : start + 25].to(device).flatten(), reduction="sum").item()
    return total / (count * window)


def single_step_reference(args: argparse.Namespace, band: dict) -> list[float]:
    """Losses to compare single steps with: the bf16 runs' mean; for float32 the float32 loop's first 20."""
    losses = list(band["losses"])
    if args.precision.startswith("32") and args.ctx == 512:
        with (FIXTURES / "loss_512_fp32.csv").open(newline="") as file:
            losses[:20] = [float(row["loss"]) for row in csv.DictReader(file)][:20]
    return losses


def compare(losses: list[float], args: argparse.Namespace, band: dict) -> list[tuple[str, float, float]]:
    """Rows (criterion, largest deviation, tolerance)."""
    reference = single_step_reference(args, band)
    rows = []
    for rule in band["single_step"]:
        first, last = rule["steps"]
        worst = max((abs(losses[i] - reference[i]) for i in range(first, min(last + 1, len(losses)))), default=0.0)
        rows.append((f"steps {first}-{last}, each", worst, rule["tolerance"]))
    if len(losses) >= 400:
        means = [sum(losses[i : i + 50]) / 50 for i in range(0, 400, 50)]
        worst = max(abs(a - b) for a, b in zip(means, band["mean_of_50"]["values"], strict=True))
        rows.append(("each mean of 50 steps", worst, band["mean_of_50"]["tolerance"]))
        total = abs(sum(losses[:400]) / 400 - band["mean_of_400"]["value"])
        rows.append(("mean of 400 steps", total, band["mean_of_400"]["tolerance"]))
    return rows


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", type=Path, required=True, help="initial weights of the official runs")
    parser.add_argument("--final", type=Path, help="weights of the official run a after 400 steps: also evaluated")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--compile", default="off")
    parser.add_argument("--grad_cp", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--ctx", type=int, default=512, choices=(512, 2048))
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    args.init = args.init.resolve()
    band = json.loads((FIXTURES / "band.json").read_text())[f"ctx_{args.ctx}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(folder)
        config = folder / "parity.yaml"
        config.write_text(yaml.safe_dump(settings(folder, args)))
        command = [sys.executable, str(ROOT / "lightning_trainer.py"), "fit", "-c", str(config)]
        subprocess.run(command, check=True)
        metrics = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in row]
        rows = compare([row["loss"] for row in metrics], args, band)
        if "heldout_512" in band and len(metrics) >= 400:
            device = "cuda" if torch.cuda.is_available() and args.accelerator != "cpu" else "cpu"
            dtype = torch.bfloat16 if args.precision.startswith("bf16") else torch.float32
            for label, weights in (("own weights", folder / "run" / "step-400"), ("official weights", args.final)):
                if weights is not None:
                    expected = band["heldout_512"]["value"] if label == "own weights" else 1.149275
                    loss = heldout_loss(weights, folder, device, dtype)
                    rows.append(
                        (
                            f"held-out loss, {label} ({loss:.6f})",
                            abs(loss - expected),
                            0.006 if label == "own weights" else 0.001,
                        )
                    )
        elapsed = metrics[-1]["time"] - metrics[0]["time"]
    print(
        f"\n{args.precision} {args.strategy} kernel={args.kernel} compile={args.compile} ctx={args.ctx}: {len(metrics)} steps, {8192 * (len(metrics) - 1) / elapsed:,.0f} tokens/s"
    )
    print(f"{'criterion':48s} {'deviation':>10s} {'tolerance':>10s}")
    for label, worst, tolerance in rows:
        print(f"{label:48s} {worst:10.6f} {tolerance:10.6f} {'ok' if worst <= tolerance else 'FAIL'}")
    return int(any(worst > tolerance for _, worst, tolerance in rows))


if __name__ == "__main__":
    sys.exit(main())
