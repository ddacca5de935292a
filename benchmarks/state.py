"""What carrying the state costs: a chunk with a state in and out and its gradients over the same chunk from zero state.

    python benchmarks/state.py [--only L12-D768-4096x1 L12-D768-4096x8]

The plain chunk starts from a zero state and gives no state gradient. The other takes a random state and a random
gradient of the outgoing state, and gives the gradient of the incoming one. Both run in turn, replayed as CUDA graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train import CASES, VOCAB, random_batch, random_model
from trainer.bptt.step import ChunkInput
from trainer.config import ModelConfig
from trainer.model.naming import ModelShape
from trainer.model.state import ModelState, map_state, state_tensors
from trainer.train.local_engine import LocalEngine
from trainer.train.optim import MasterAdamW, parameter_groups

BAR = 1.03


def measure(name: str, repeats: int) -> tuple[float, float]:
    """Median GPU ms of the plain chunk and of the one that carries state."""
    layers, width, ctx, rows, grad_cp, slice_rows, *_ = CASES[name]
    model = random_model(ModelShape.official(layers, width, VOCAB), ctx, grad_cp, compile_blocks=True)
    settings = ModelConfig(n_layer=layers, n_embd=width, ctx_len=ctx, loss_chunk_rows=slice_rows)
    MasterAdamW(parameter_groups(model.named_parameters(), settings), settings)  # gives parameters float32 sums
    engine = LocalEngine(model, settings, graphs=not grad_cp)
    batch = random_batch(rows, ctx, 0)
    ids, targets, weight = (x.cuda() for x in (batch.ids_BT, batch.targets_BT, batch.weight_BT))

    def chunk(state: ModelState) -> ChunkInput:
        return ChunkInput(ids, targets, weight / weight.sum(), None, state)

    zero = engine.zero_state(rows)
    carried = map_state(lambda x: torch.randn_like(x) * 0.1, zero)
    gradient = [torch.randn_like(x) * 1e-6 for x in state_tensors(zero)]

    def run(carries: bool) -> None:
        given: list[Tensor] | None = gradient if carries else None
        engine.train(chunk(carried if carries else zero), given, want_gradient=carries, is_last=False)

    times: dict[bool, list[float]] = {False: [], True: []}
    for index in range(2 * repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(index % 2 == 1)
        end.record()
        torch.cuda.synchronize()
        times[index % 2 == 1].append(begin.elapsed_time(end))
    warm = repeats // 3  # compiling and capturing
    return statistics.median(times[False][warm:]), statistics.median(times[True][warm:])


def main() -> int:
    """Print the table; exit code 1 if a ratio is over the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=["L12-D768-4096x1", "L12-D768-4096x8"])
    parser.add_argument("--repeats", type=int, default=24)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':22s} {'zero state ms':>14s} {'carried ms':>11s} {'ratio':>6s} {'bar':>5s}")
    worst = 0.0
    for name in args.only:
        plain, carries = measure(name, args.repeats)
        worst = max(worst, carries / plain)
        print(f"{name:22s} {plain:14.3f} {carries:11.3f} {carries / plain:6.3f} {BAR:5.2f}", flush=True)
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
