"""Speed and memory of a training step: forward, loss, backward and update of one chunk per row.

    python benchmarks/train.py [--only L12-D768-4096x1] [--compile on off] [--steps 16] [--profile]

Random tokens, random weights in place of the zero initial matrices, bf16 weights with float32 masters, no clipping,
no data loading, no logging. MFU = 6 x parameters without the
embedding x tokens / (time x 801 TFLOP/s), the matrix rate of an H200; recomputation is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.bptt.step import StepOptions, run_step  # noqa: E402
from trainer.config import ModelConfig  # noqa: E402
from trainer.model.naming import ModelShape  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402
from trainer.train.local_engine import LocalEngine  # noqa: E402
from trainer.train.optim import MasterAdamW, parameter_groups  # noqa: E402
from trainer.types import Batch  # noqa: E402

# name: layers, width, ctx, rows, grad_cp, head slice, bar in tokens/s, bar in GiB
CASES = {
    "L12-D768-4096x8": (12, 768, 4096, 8, False, 4096, 360_000, None),
    "L12-D768-4096x1": (12, 768, 4096, 1, False, 4096, 200_000, None),
    "L12-D768-512x16": (12, 768, 512, 16, False, 4096, 320_000, None),
    "L12-D768-512x16-cp": (12, 768, 512, 16, True, 2048, None, 5.0),
    "L12-D768-4096x8-cp": (12, 768, 4096, 8, True, 4096, 290_000, 6.3),
    "L24-D2048-4096x4-cp": (24, 2048, 4096, 4, True, 4096, 45_000, 31.0),
}
VOCAB, PEAK_FLOPS = 65536, 801e12


def random_model(shape: ModelShape, ctx: int, grad_cp: bool, compile_blocks: bool) -> RWKV7:
    """A model on the GPU with weights of a trained model's scale, made there."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = RWKV7(shape, "auto", grad_cp, ctx if compile_blocks else 0)
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ".ln" in name or "ln_" in name
            parameter.copy_(
                torch.randn(parameter.shape, device="cuda", generator=generator)
                * (0.02 if parameter.dim() > 1 else 0.1)
            )
            if is_norm and name.endswith("weight"):
                parameter.add_(1)
    return model


def random_batch(rows: int, ctx: int, seed: int) -> Batch:
    """Rows of one chunk."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, ctx + 1), generator=generator)
    reset = torch.zeros(rows, ctx, dtype=torch.bool)
    reset[:, 0] = True
    tensors = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.ones(rows, ctx), reset)
    return Batch(*(x.pin_memory() for x in tensors), (ctx,) * rows)


def run_case(name: str, compile_blocks: bool, args: argparse.Namespace) -> dict[str, float]:
    """Median step time and peak memory."""
    layers, width, ctx, rows, grad_cp, slice_rows, *_ = CASES[name]
    shape = ModelShape.official(layers, width, VOCAB)
    model = random_model(shape, ctx, grad_cp, compile_blocks)
    settings = ModelConfig(n_layer=layers, n_embd=width, ctx_len=ctx, loss_chunk_rows=slice_rows)
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), settings), settings)
    engine = LocalEngine(model, settings, graphs=args.graphs and not grad_cp)
    options = StepOptions(ctx, 1, -1, 1 << 33, 1, rows)
    batches = [random_batch(rows, ctx, seed) for seed in range(4)]
    device = torch.device("cuda")

    def step(index: int) -> None:
        run_step(engine, [batches[index % 4]], [None], options, device=device, world_size=1, gather=lambda x: [x])
        optimizer.step()
        optimizer.zero_grad()

    started = time.perf_counter()
    for index in range(args.warmup):
        step(index)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    times = []
    for index in range(args.steps):
        begin = time.perf_counter()
        step(index)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for index in range(args.steps):
        step(index)
    torch.cuda.synchronize()
    median = (time.perf_counter() - begin) / args.steps
    if args.profile:
        profile(step, name)
    tokens = rows * ctx
    flops = 6 * (shape.num_parameters() - VOCAB * width) * tokens
    return {
        "tokens/s": tokens / median,
        "ms": 1e3 * median,
        "spread": (max(times) - min(times)) / median,
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
        "MFU": flops / median / PEAK_FLOPS,
        "warm-up s": first,
    }


def profile(step: Callable[[int], None], name: str) -> None:
    """Kernel time of three steps by kernel name."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as trace:
        for index in range(3):
            step(index)
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows) / 3e3
    kernels = [e for e in rows if e.self_device_time_total > 0]
    print(f"profile {name}: {total:.2f} ms of kernels a step, {sum(e.count for e in kernels) / 3:.0f} launches")
    for event in kernels[:22]:
        print(f"  {event.self_device_time_total / 3e3:8.3f} ms  {event.count / 3:6.0f} x  {event.key[:90]}")


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES))
    parser.add_argument("--compile", nargs="+", default=["on"], choices=("on", "off"))
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, V {VOCAB}, graphs={args.graphs}")
    print(
        f"{'case':22s} {'compile':>7s} {'tokens/s':>10s} {'bar':>8s} {'ms':>8s} {'spread':>7s} {'GiB':>7s} {'bar':>5s} {'MFU':>6s} {'warm-up s':>9s}"
    )
    for name in args.only:
        bar_speed, bar_memory = CASES[name][6:]
        for mode in args.compile:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            row = run_case(name, mode == "on", args)
            print(
                f"{name:22s} {mode:>7s} {row['tokens/s']:10,.0f} {bar_speed or '-':>8} {row['ms']:8.2f} {row['spread']:7.3f} "
                f"{row['GiB']:7.2f} {bar_memory or '-':>5} {row['MFU']:6.1%} {row['warm-up s']:9.1f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
