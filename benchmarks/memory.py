"""Peak memory and speed of training against the length of a document.

    python benchmarks/memory.py [--lengths 65536 1000000] [--windows 1 full] [--layers 12 --width 768 --ctx 4096]

Each row is a process of its own: `lightning_trainer.py fit` for --steps optimizer steps of one random document each,
batch 1. Memory is PyTorch's peak of allocated GPU memory (on a CPU: peak resident memory). The window `rows` trains as
many tokens per step as independent documents of ctx tokens, one by one: what carrying the state costs. Speed is that
of the last step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.data.binidx import BinIdxWriter  # noqa: E402
from trainer.train.callbacks import read_metrics  # noqa: E402


def run(length: int, window: str, args: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """(peak GiB, tokens/s of the last step, loss) of one row."""
    per_step, size = (length // args.ctx, args.ctx) if window == "rows" else (1, length)
    prefix = folder / f"doc{size}x{per_step}"
    if not prefix.with_suffix(".idx").exists():
        generator = np.random.default_rng(0)
        with BinIdxWriter(prefix, np.uint16) as writer:
            for _ in range(args.steps * per_step):
                writer.add_document(generator.integers(1, args.vocab, size + 1))
    directory = folder / f"run-{length}-{window}"
    config = {
        "trainer": {"accelerator": args.accelerator, "devices": 1, "max_steps": args.steps, "precision": args.precision, "target_batch_size": per_step},
        "model": {
            "n_layer": args.layers, "n_embd": args.width, "vocab_size": args.vocab, "ctx_len": args.ctx, "compile": args.compile,
            "bptt_window": window if window == "full" else 1, "grad_cp": args.grad_cp, "bptt_host_memory_gib": 32.0,
        },
        "data": {"source": "binidx", "source_data_dir": str(prefix), "tokenizer": "byte", "test_split": 0},
        "checkpoint": {"dir": str(directory), "every_steps": 0},
    }  # fmt: skip
    path = folder / f"{length}-{window}.yaml"
    path.write_text(yaml.safe_dump(config))
    subprocess.run([sys.executable, str(ROOT / "lightning_trainer.py"), "fit", "-c", str(path)], check=True)
    rows = read_metrics(directory / "metrics.jsonl")
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    seconds = rows[-1]["time"] - rows[-2]["time"]
    return rows[-1]["memory_gib"], per_step * size / seconds, rows[-1]["loss"]


def main() -> int:
    """Run all rows, print the table; exit code 1 if the longest document needs over 2 % more than the shortest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 1_000_000])
    parser.add_argument("--windows", nargs="+", default=["1", "full"])
    parser.add_argument("--steps", type=int, default=2, help="at least 2: the first one compiles")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--compile", default="off")
    parser.add_argument("--grad_cp", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    table = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        for window in args.windows:
            for length in args.lengths:
                table[window, length] = run(length, window, args, Path(name))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\nL{args.layers}-D{args.width} V{args.vocab} ctx {args.ctx} batch 1 {args.precision} grad_cp={args.grad_cp} on {device}, torch {torch.__version__}"
    )
    print(f"{'window':>8s} {'tokens':>10s} {'peak GiB':>10s} {'ratio':>8s} {'tokens/s':>10s} {'loss':>8s}")
    worst = 0.0
    for (window, length), (memory, speed, loss) in table.items():
        ratio = memory / table[window, args.lengths[0]][0]
        worst = max(worst, ratio)
        print(f"{window:>8s} {length:10d} {memory:10.3f} {ratio:8.4f} {speed:10,.0f} {loss:8.4f}")
    return int(worst > 1.02)


if __name__ == "__main__":
    sys.exit(main())
