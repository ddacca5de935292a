"""Seconds from the command to the first optimizer step, with cold and with warm caches.

    python benchmarks/start.py [--layers 12 --width 768 --ctx 4096]

Runs `lightning_trainer.py fit` for three steps twice, with the caches of kernels, torch.compile and Triton in an empty
folder that the second run finds filled. Fresh weights, random tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.data.binidx import BinIdxWriter  # noqa: E402
from trainer.train.callbacks import read_metrics  # noqa: E402

BARS_S = {"cold": 60.0, "warm": 15.0}


def run(config: Path, directory: Path, caches: Path) -> tuple[float, float]:
    """Seconds to the end of the first and of the third step."""
    names = ("RWKV_KERNEL_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = os.environ | {name: str(caches / name.lower()) for name in names}
    began = time.time()
    subprocess.run(
        [sys.executable, str(ROOT / "lightning_trainer.py"), "fit", "-c", str(config)], check=True, env=environment
    )
    rows = read_metrics(directory / "metrics.jsonl")
    return rows[0]["time"] - began, rows[-1]["time"] - began


def main() -> int:
    """Print the table; exit code 1 if a start is slower than its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--ctx", type=int, default=4096)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with BinIdxWriter(folder / "doc", np.uint16) as writer:
            writer.add_document(np.random.default_rng(0).integers(1, 65536, 8 * args.ctx))
        for start in BARS_S:
            directory = folder / start
            config = {
                "trainer": {"devices": 1, "max_steps": 3, "precision": "bf16-mixed"},
                "model": {"n_layer": args.layers, "n_embd": args.width, "vocab_size": 65536, "ctx_len": args.ctx},
                "data": {
                    "source": "binidx", "source_data_dir": str(folder / "doc"), "tokenizer": "byte", "test_split": 0,
                    "batching": "stream",
                },
                "checkpoint": {"dir": str(directory), "every_steps": 0},
            }  # fmt: skip
            path = folder / f"{start}.yaml"
            path.write_text(yaml.safe_dump(config))
            results[start] = run(path, directory, folder / "caches")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\nL{args.layers}-D{args.width} ctx {args.ctx} on {device}, torch {torch.__version__}, {os.cpu_count()} cores"
    )
    print(f"{'caches':>8s} {'first step':>11s} {'bar':>6s} {'third step':>11s}")
    for start, (first, third) in results.items():
        print(f"{start:>8s} {first:9.1f} s {BARS_S[start]:4.0f} s {third:9.1f} s")
    return int(any(results[start][0] > bar for start, bar in BARS_S.items()))


if __name__ == "__main__":
    sys.exit(main())
