"""Time, memory and error of the WKV-7 operators on a GPU.

    python benchmarks/ops.py [--shapes 1,4096,32 8,4096,12] [--backends cuda cuda_sequential chunked] [--json out.json]
                             [--warps 1 2 4] [--pieces 1 4 8] [--workspace 48 96 192]
    python benchmarks/ops.py --backends cuda fla_chunk16 fla_chunk64          (peers: benchmarks/peers.py)

Times are GPU times by CUDA events, the median of repeated calls on inputs that rotate through more than 256 MB; the
queue is held back before every timed call, so that gaps between launches do not count. Before it is timed, a backend
has to agree with a token loop in float64. "bar" is the goal for forward and backward together on an NVIDIA H200.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers import PEERS, installed
from trainer.ops.wkv7 import cuda_chunked, wkv7

HEAD_SIZE = 64
BARS_MS = {
    (1, 4096, 12): 0.30, (1, 4096, 32): 0.40, (1, 16384, 32): 1.6, (8, 4096, 12): 0.90, (8, 4096, 32): 1.9,
    (16, 512, 12): 0.25,
}  # fmt: skip
ROTATE_BYTES = 256 << 20
LARGEST_ERROR = 6e-3
LARGEST_PEER_ERROR = 2e-2  # of y and the state; a peer's decay is rounded in another form
FLOP = 172_200  # forward and backward per token and head, chunks of 16
FORWARD_FLOP = 51_300
FORWARD_BYTES, BOTH_BYTES = 14 * HEAD_SIZE, 40 * HEAD_SIZE  # inputs and outputs alone, bfloat16
HOLD_CYCLES = 10_000_000


def make_inputs(batch: int, tokens: int, heads: int, seed: int) -> list[Tensor]:
    """r, w_raw, k, v, a, b [B,T,H,64] in bfloat16, scaled about as in a trained layer."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(batch, tokens, heads, HEAD_SIZE, generator=generator, device="cuda")

    gate, key = torch.sigmoid(normal()), F.normalize(normal(), dim=-1)
    k = 0.5 * normal() * (1 + (gate - 1) * 1.02)
    return [x.bfloat16() for x in (0.5 * normal(), 2 * normal() - 2.5, k, 0.5 * normal(), -key, key * gate)]


def make_state(batch: int, heads: int, seed: int) -> Tensor:
    """A state or its gradient [B,H,64,64] in float32."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return 0.3 * torch.randn(batch, heads, HEAD_SIZE, HEAD_SIZE, generator=generator, device="cuda")


def operator(backend: str, inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The result y and the outgoing state, in the form of the backend."""
    return PEERS[backend](inputs, state) if backend in PEERS else wkv7(*inputs, state, backend=backend)


def fit_to(backend: str, inputs: list[Tensor]) -> list[Tensor]:
    """The inputs as the backend takes them."""
    if backend not in PEERS:
        return inputs
    r, w_raw, k, v, a, b = inputs
    return [r, PEERS[backend].decay(w_raw), k, v, a, b]


def call(backend: str, inputs: list[Tensor], state: Tensor, dy: Tensor, dstate: Tensor) -> list[Tensor]:
    """y, the outgoing state, and the gradients of the six inputs and the state."""
    leaves = [*inputs, state]
    y, state_out = operator(backend, inputs, state)
    return [y, state_out, *torch.autograd.grad([y, state_out], leaves, [dy, dstate.to(state_out.dtype)])]


def largest_error(backend: str) -> float:
    """The largest relative L2 error of any result (of a peer: of y) against the token loop in float64."""
    inputs, state, dstate = make_inputs(2, 200, 3, 1), make_state(2, 3, 2), make_state(2, 3, 3)
    dy = make_inputs(2, 200, 3, 4)[0]
    results = []
    for chosen, dtype in ((backend, torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in fit_to(chosen, inputs)]
        first = state.to(torch.float64 if dtype == torch.float64 else torch.float32)
        first = (first.mT.contiguous() if chosen in PEERS else first).requires_grad_()
        found = call(chosen, leaves, first, dy.to(dtype), dstate)
        results.append(found[:1] if backend in PEERS else found)
    return max(((x.double() - ref).norm() / ref.norm()).item() for x, ref in zip(*results, strict=True))


def gpu_ms(run: Callable[[int], object], sets: int, repeats: int) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of the GPU time of run(i) in ms."""
    for i in range(3):
        run(i % sets)
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        run(i % sets)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5]


def measure(backend: str, shape: tuple[int, int, int], repeats: int) -> dict:
    """One row of the table."""
    batch, tokens, heads = shape
    token_heads = batch * tokens * heads
    count = max(1, math.ceil(ROTATE_BYTES / (token_heads * HEAD_SIZE * 14)))
    sets = []
    for i in range(count):
        inputs = [x.detach().requires_grad_() for x in fit_to(backend, make_inputs(*shape, 100 + i))]
        state = make_state(batch, heads, 200 + i).requires_grad_()
        sets.append((inputs, state, make_inputs(*shape, 300 + i)[0], make_state(batch, heads, 400 + i)))

    def forward(i: int) -> tuple[Tensor, Tensor]:
        return operator(backend, *sets[i][:2])

    def both(i: int) -> list[Tensor]:
        return call(backend, *sets[i])

    forward_ms, both_ms = gpu_ms(forward, count, repeats), gpu_ms(both, count, repeats)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both(0)
    torch.cuda.synchronize()
    bar = BARS_MS.get(shape)
    return {
        "shape": shape, "backend": backend, "forward_ms": forward_ms, "both_ms": both_ms,
        "forward_tflops": token_heads * FORWARD_FLOP / forward_ms[0] / 1e9,
        "tflops": token_heads * FLOP / both_ms[0] / 1e9,
        "forward_gbs": token_heads * FORWARD_BYTES / forward_ms[0] / 1e6,
        "gbs": token_heads * BOTH_BYTES / both_ms[0] / 1e6,
        "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
        "bar_ratio": both_ms[0] / bar if bar else None,
    }  # fmt: skip


@contextlib.contextmanager
def tuned(warps: int | None, pieces: int | None, workspace: int | None) -> Iterator[None]:
    """The tensor-core kernels with other choices than their own; None: their own. `workspace` in MiB."""
    names = ("_warps", "_PIECES", "_WORKSPACE_BYTES")
    own = {name: getattr(cuda_chunked, name) for name in names}
    chosen = (warps and (lambda _: warps), pieces, workspace and workspace << 20)
    for name, value in zip(names, chosen, strict=True):
        setattr(cuda_chunked, name, value or own[name])
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(cuda_chunked, name, value)


def print_kernels(backend: str, shape: tuple[int, int, int]) -> None:
    """GPU time of each kernel in one forward and backward pass."""
    batch, _, heads = shape
    inputs = [x.requires_grad_() for x in make_inputs(*shape, 1)]
    arguments = (
        inputs,
        make_state(batch, heads, 2).requires_grad_(),
        make_inputs(*shape, 3)[0],
        make_state(batch, heads, 4),
    )
    call(backend, *arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call(backend, *arguments)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if "wkv7" in event.key:
            total = event.device_time_total / 5
            print(f"{shape!s:16} {backend:16} {total:9.1f} us in {event.count / 5:4.0f} launches  {event.key[:70]}")


def line(row: dict) -> str:
    """A row of the table as text."""
    times = " ".join(f"{row[x][0]:8.3f} ({row[x][1]:.3f}-{row[x][2]:.3f})" for x in ("forward_ms", "both_ms"))
    ratio = "" if row["bar_ratio"] is None else f"{row['bar_ratio']:.2f}"
    rates = f"{row['forward_tflops']:6.1f} {row['tflops']:6.1f} {row['forward_gbs']:6.0f} {row['gbs']:6.0f}"
    return f"{row['shape']!s:16} {row['backend']:16} {times} {rates} {row['peak_mib']:8.0f} {ratio:>6}"


def parse_shape(text: str) -> tuple[int, int, int]:
    """`B,T,H`."""
    batch, tokens, heads = map(int, text.split(","))
    return batch, tokens, heads


def main() -> int:
    """Check and time every backend on every shape. The exit code is 1 if a backend is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=list(BARS_MS))
    parser.add_argument("--backends", nargs="+", default=["cuda", *(PEERS if installed() else [])])
    parser.add_argument(
        "--warps", type=int, nargs="+", help="time the scan with these warps per block instead of its own"
    )
    parser.add_argument("--pieces", type=int, nargs="+", help="and with at least this many pieces of a row in turn")
    parser.add_argument("--workspace", type=int, nargs="+", help="and with this working memory in MiB")
    parser.add_argument("--kernels", action="store_true", help="also print the time of every kernel")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; times in ms: median (p20-p80)")
    print(
        f"{'(B,T,H)':16} {'backend':16} {'forward':>24} {'forward+backward':>24} "
        f"{'TF/s':>6} {'TF/s':>6} {'GB/s':>6} {'GB/s':>6} {'peak MiB':>8} {'/bar':>6}"
    )
    rows, wrong = [], False
    for backend in args.backends:
        worst = largest_error(backend)
        limit = LARGEST_PEER_ERROR if backend in PEERS else LARGEST_ERROR
        if not worst <= limit:
            print(f"{backend}: relative error {worst:.1e} > {limit:.0e}, not timed")
            wrong = True
            continue
        for setting in itertools.product(args.warps or [None], args.pieces or [None], args.workspace or [None]):
            named = {k: v for k, v in zip(("warps", "pieces", "workspace"), setting, strict=True) if v is not None}
            for shape in args.shapes:
                with tuned(*setting):
                    row = measure(backend, shape, args.repeats) | named
                print(line(row) + "".join(f"  {name}={value}" for name, value in named.items()), flush=True)
                rows.append(row)
                if args.json:
                    args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    if args.kernels:
        for backend in (x for x in args.backends if x not in PEERS):
            for shape in args.shapes:
                print_kernels(backend, shape)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
