"""Memory and speed of evaluate.py's loss against the length of a document.

    python benchmarks/evaluation.py [--device cuda] [--lengths 65536 262144 1000000]

A model with fresh official weights reads one document of random tokens of each length. Prints one row per length; exit
code 1 if the peak GPU memory of a length is above 1.02 times that of the first. A CPU has no such figure: there
tests/evaluate/test_documents.py counts live tensors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.data.store import FlatStore  # noqa: E402
from trainer.evaluate.documents import EvaluationOptions, evaluate_documents  # noqa: E402
from trainer.generate.engine import pick_device, pick_dtype  # noqa: E402
from trainer.model.init import init_weights  # noqa: E402
from trainer.model.naming import ModelShape  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402

ALLOWED = 1.02
"""Peak memory that longer documents may have, relative to the shortest."""


def document(num_tokens: int, vocab_size: int) -> FlatStore:
    """One document of random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, num_tokens).astype(np.int32)
    return FlatStore("memory", [tokens], np.array([num_tokens]))


def main(argv: Sequence[str] | None = None) -> int:
    """Read each length, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 262144, 1_000_000])
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    shape = ModelShape.official(args.layers, args.width, args.vocab)
    model = RWKV7(shape)
    model.load_state_dict(init_weights(shape, 1))
    model = model.to(device, pick_dtype(args.dtype, device)).requires_grad_(False)
    options = EvaluationOptions(ctx_len=args.ctx, rows=1)
    evaluate_documents(model, document(2 * args.ctx + 1, args.vocab), options)
    print(f"{'tokens':>10s} {'peak GiB':>9s} {'ratio':>7s} {'tokens/s':>10s} {'loss':>8s}")
    ratios: list[float] = []
    first = 0
    for length in args.lengths:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = evaluate_documents(model, document(length, args.vocab), options).loss
        speed = length / (time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        first = first or peak
        ratios.append(peak / first if first else 1.0)
        print(f"{length:10,d} {peak / 2**30:9.4f} {ratios[-1]:7.4f} {speed:10,.0f} {loss:8.4f}", flush=True)
    return 0 if max(ratios) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
