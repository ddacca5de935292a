"""Peak memory of full training, LoRA and state tuning by model size, and their losses with and without compile.

    python benchmarks/finetune.py [--sizes 0.1B 0.4B 1.5B 2.9B] [--tokens 32768] [--ctx 4096] [--steps 100]

Random weights, one document of --tokens tokens, exact gradients, grad_cp, two optimizer steps: the second one has
moments. Then --steps steps of the smallest size per method, compile off and on, and the largest difference of their
losses. Exit code 1 if LoRA of the 1.5B size needs over 0.45 of the memory of full training.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.bptt.step import StepOptions, run_step  # noqa: E402
from trainer.config import ModelConfig  # noqa: E402
from trainer.config.adapters import lora_settings, state_tuning  # noqa: E402
from trainer.model.naming import ModelShape  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402
from trainer.train.adapter import freeze  # noqa: E402
from trainer.train.local_engine import LocalEngine  # noqa: E402
from trainer.train.optim import MasterAdamW, clip_by_global_norm, parameter_groups  # noqa: E402
from trainer.types import Batch  # noqa: E402

SIZES = {"tiny": (2, 128), "0.1B": (12, 768), "0.4B": (24, 1024), "1.5B": (24, 2048), "2.9B": (32, 2560)}
METHODS = {"full": {}, "lora": {"lora": {"r": 32, "alpha": 64}}, "state": {"state_tuning": {}}}
BAR = 0.45


def document(tokens: int, vocab: int, seed: int) -> Batch:
    """One row of random tokens."""
    ids = torch.randint(1, vocab, (1, tokens), generator=torch.Generator().manual_seed(seed))
    reset = torch.zeros(1, tokens, dtype=torch.bool)
    return Batch(ids, ids.roll(-1, 1), torch.ones(1, tokens), reset, (tokens,))


def train(size: str, method: str, tokens: int, steps: int, args: argparse.Namespace, compiled: bool) -> list[float]:
    """Loss of each step; the same document again and again, so that it falls."""
    layers, width = SIZES[size]
    settings = ModelConfig(
        ctx_len=min(args.ctx, tokens), bptt_window="full", lr_init=1e-2 if method == "state" else 1e-4, **METHODS[method]
    )  # fmt: skip
    shape, device = ModelShape.official(layers, width, args.vocab), torch.device(args.device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = RWKV7(
            shape, "auto", True, settings.ctx_len if compiled else 0, lora=lora_settings(settings), tuning=state_tuning(settings)
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            starts_at_zero = name.endswith(("lora_B", "time_state"))
            is_norm = ".ln" in name or name.startswith("ln")
            with torch.no_grad():
                parameter.normal_(std=0.0 if starts_at_zero else 0.02).add_(
                    1.0 if is_norm and "weight" in name else 0.0
                )
    torch.set_default_dtype(torch.float32)
    freeze(model, settings)
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), settings), settings)
    engine = LocalEngine(model, settings, graphs=False)
    options = StepOptions(settings.ctx_len, "full", -1, 32 << 30, 1, 1)
    losses = []
    for _ in range(steps):
        result = run_step(
            engine, [document(tokens, args.vocab, 0)], [None], options, device=device, world_size=1, gather=lambda x: [x]
        )  # fmt: skip
        clip_by_global_norm(optimizer.flat_gradients(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(result.losses)))
    return losses


def peak_gib(size: str, method: str, args: argparse.Namespace) -> float:
    """Peak of allocated GPU memory; 0 on a CPU."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(size, method, args.tokens, 2, args, False)
    return torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.1B", "0.4B", "1.5B", "2.9B"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=100, help="of the comparison of losses; 0 = leave it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    print(
        f"peak GiB, document of {args.tokens} tokens, ctx {args.ctx}, window full, grad_cp, bf16, torch {torch.__version__}"
    )
    print(f"{'size':>6s} {'full':>9s} {'lora r=32':>10s} {'state':>9s} {'lora/full':>10s}", flush=True)
    worst = 0.0
    for size in args.sizes:
        full, lora, state = (peak_gib(size, method, args) for method in METHODS)
        ratio = lora / full if full else 0.0
        worst = max(worst, ratio) if size == "1.5B" else worst
        print(f"{size:>6s} {full:9.2f} {lora:10.2f} {state:9.2f} {ratio:10.3f}", flush=True)
    for method in METHODS if args.steps else ():
        plain, fast = (train(args.sizes[0], method, 1024, args.steps, args, compiled) for compiled in (False, True))
        apart = max(abs(a - b) for a, b in zip(plain, fast, strict=True))
        print(
            f"{method:>6s} loss {plain[0]:.4f} -> {plain[-1]:.4f}, compiled {fast[-1]:.4f}, most apart {apart:.4f}",
            flush=True,
        )
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
