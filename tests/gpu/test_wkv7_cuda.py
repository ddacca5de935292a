"""The CUDA WKV-7 kernels against a float64 token loop, and their timing. Needs a GPU and nvcc.

Also runs without pytest: `python tests/gpu/test_wkv7_cuda.py` prints every check and the timings.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:
    import pytest
except ImportError:  # the file is also a program, for machines with PyTorch alone
    pytest = None

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.ops.wkv7 import cuda

OUTPUTS = ("y", "state_out", "dr", "dw_raw", "dk", "dv", "da", "db", "dstate")
IN_STATE_DTYPE = ("state_out", "dstate")
KINDS = ("model", "floor", "slow", "same_key", "zero_key", "huge_v")
RESETS = ("none", "many", "not_first")
TINY = 1e-30  # below this norm an expected result is compared absolutely
GUARD_BYTES = 4096


class Row(NamedTuple):
    """One line of the report: a check passes if `value` <= `limit`."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.value <= self.limit


class Case(NamedTuple):
    """Inputs in float64, all representable in bfloat16 but for the two states, which are in float32."""

    inputs: tuple[Tensor, ...]  # r, w_raw, k, v, a, b
    state: Tensor
    reset: Tensor
    dy: Tensor
    dstate_out: Tensor

    def rows(self, rows: slice, heads: slice) -> Case:
        """The same for some batch rows and heads."""
        return Case(
            tuple(x[rows, :, heads].contiguous() for x in self.inputs),
            self.state[rows, heads].contiguous(),
            self.reset[rows].contiguous(),
            self.dy[rows, :, heads].contiguous(),
            self.dstate_out[rows, heads].contiguous(),
        )

    def tokens(self, begin: int, end: int) -> Case:
        """The same for some tokens."""
        return Case(
            tuple(x[:, begin:end].contiguous() for x in self.inputs),
            self.state,
            self.reset[:, begin:end].contiguous(),
            self.dy[:, begin:end].contiguous(),
            self.dstate_out,
        )


def draw(tokens: int, heads: int, size: int, rows: list[tuple[str, str]], seed: int = 0) -> Case:
    """One batch row per (kind of values, kind of resets)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = [_draw_row(kind, normal, tokens, heads, size) for kind, _ in rows]
    inputs = tuple(torch.stack(x).bfloat16().double().cuda() for x in zip(*drawn, strict=True))
    reset = torch.stack([_draw_resets(kind, tokens, generator) for _, kind in rows])
    states = (normal(len(rows), heads, size, size).float().double().cuda() for _ in range(2))
    state, dstate_out = (x * 0.5 for x in states)
    dy = normal(len(rows), tokens, heads, size).bfloat16().double().cuda()
    return Case(inputs, state, reset.cuda(), dy, dstate_out)


def _draw_row(kind: str, normal: Callable[..., Tensor], tokens: int, heads: int, size: int) -> tuple[Tensor, ...]:
    shape = (tokens, heads, size)
    r, k, v, key, gate = normal(*shape), normal(*shape), normal(*shape), normal(*shape), torch.sigmoid(normal(*shape))
    w_raw = normal(*shape) * 2 - 1
    if kind == "floor":
        w_raw = torch.full_like(w_raw, 12.0)
    elif kind == "slow":
        w_raw = torch.full_like(w_raw, -12.0)
    elif kind == "same_key":
        key, gate, w_raw = key[:1].expand(shape), torch.full_like(gate, 0.99), torch.full_like(w_raw, -8.0)
    elif kind == "zero_key":
        k, key = torch.zeros_like(k), torch.zeros_like(key)
    elif kind == "huge_v":
        v = v * 1000
    key = torch.nn.functional.normalize(key, dim=-1)
    return r, w_raw, k, v, -key, key * gate


def _draw_resets(kind: str, tokens: int, generator: torch.Generator) -> Tensor:
    reset = torch.zeros(tokens, dtype=torch.bool)
    if kind == "none":
        return reset
    reset |= torch.rand(tokens, generator=generator) < 0.02
    for token in (5, 6, 7, 16, 31, 32, 47, 48, 49, tokens - 1):
        if token < tokens:
            reset[token] = True
    reset[0] = kind == "many"
    return reset


def reference(case: Case, with_dy: bool = True, with_dstate: bool = True) -> dict[str, Tensor]:
    """The definition, token by token, differentiated by autograd."""
    leaves = [x.clone().requires_grad_() for x in (*case.inputs, case.state)]

    def segment(begin: int, end: int, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        r, w_raw, k, v, a, b = (x[:, begin:end].unbind(1) for x in inputs)
        outputs = []
        for t in range(end - begin):
            state = state.masked_fill(case.reset[:, begin + t, None, None, None], 0.0)
            decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(w_raw[t]))
            removed = (state @ a[t][..., None]) * b[t][..., None, :]
            state = state * decay[..., None, :] + removed + v[t][..., None] * k[t][..., None, :]
            outputs.append((state @ r[t][..., None])[..., 0])
        return torch.stack(outputs, 1), state

    *inputs, state = leaves
    tokens, outputs = inputs[0].shape[1], []
    for begin in range(0, tokens, 64):
        end = min(tokens, begin + 64)
        y, state = checkpoint(segment, begin, end, state, *inputs, use_reentrant=False)
        outputs.append(y)
    y = torch.cat(outputs, 1)
    loss = (y * case.dy).sum() * with_dy + (state * case.dstate_out).sum() * with_dstate
    gradients = torch.autograd.grad(loss, leaves)
    return dict(zip(OUTPUTS, (y.detach(), state.detach(), *gradients), strict=True))


def run(case: Case, dtype: torch.dtype, with_dy: bool = True, with_dstate: bool = True) -> dict[str, Tensor]:
    """The kernels through the backend's functions."""
    inputs = [x.to(dtype) for x in case.inputs]
    y, state_out, starts = cuda.forward(*inputs, case.state.float(), case.reset, save=True)
    dy = case.dy.to(dtype) if with_dy else None
    dstate_out = case.dstate_out.float() if with_dstate else None
    return dict(zip(OUTPUTS, (y, state_out, *cuda.backward(*inputs, case.reset, starts, dy, dstate_out)), strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(TINY)).item()


def limit(name: str, dtype: torch.dtype) -> float:
    """Tolerance of the relative L2 error."""
    return 2e-3 if dtype == torch.bfloat16 and name not in IN_STATE_DTYPE else 1e-5


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """Number of results that differ in any bit."""
    return sum(not torch.equal(found[name], expected[name]) for name in OUTPUTS)


def compare(label: str, found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> Iterator[Row]:
    """The worst batch row of each result, and a guard on its largest single error."""
    for name in OUTPUTS:
        rows = range(len(expected[name]))
        yield Row(f"{label} {name}", max(error(found[name][i], expected[name][i]) for i in rows), limit(name, dtype))
        largest = expected[name].abs().flatten(1).amax(1).clamp_min(TINY)
        worst = ((found[name].double() - expected[name]).abs().flatten(1).amax(1) / largest).max().item()
        yield Row(f"{label} {name} max-norm", worst, 10 * limit(name, dtype))


def check_against_reference(tokens: int) -> Iterator[Row]:
    """Every kind of values and resets at once, in both dtypes; then rows and heads alone, bit for bit."""
    case = draw(tokens, 3, 64, [(kind, resets) for kind in KINDS for resets in RESETS])
    expected = reference(case)
    for dtype in (torch.float32, torch.bfloat16):
        label = f"T={tokens} {str(dtype)[6:]}"
        found = run(case, dtype)
        yield from compare(label, found, expected, dtype)
        yield Row(f"{label} second run, differing", differing(run(case, dtype), found), 0)
        for rows, heads in ((slice(1, 2), slice(0, 3)), (slice(5, 6), slice(1, 2)), (slice(2, 5), slice(2, 3))):
            part = run(case.rows(rows, heads), dtype)
            whole = {name: _part(name, found[name], rows, heads) for name in OUTPUTS}
            yield Row(f"{label} rows {rows} heads {heads} alone, differing", differing(part, whole), 0)


def _part(name: str, x: Tensor, rows: slice, heads: slice) -> Tensor:
    return x[rows, heads] if name in IN_STATE_DTYPE else x[rows, :, heads]


def check_absent_gradients() -> Iterator[Row]:
    """No gradient of y, or none of the outgoing state."""
    case = draw(100, 3, 64, [("model", "none"), ("model", "not_first")])
    for with_dy, with_dstate in ((False, True), (True, False)):
        expected = reference(case, with_dy, with_dstate)
        for dtype in (torch.float32, torch.bfloat16):
            found = run(case, dtype, with_dy, with_dstate)
            yield from compare(f"dy {with_dy} dstate_out {with_dstate} {str(dtype)[6:]}", found, expected, dtype)


def check_head_sizes() -> Iterator[Row]:
    """The other compiled head sizes."""
    for size in (16, 32, 128):
        case = draw(100, 3, size, [(kind, resets) for kind in KINDS for resets in RESETS])
        expected = reference(case)
        for dtype in (torch.float32, torch.bfloat16):
            yield from compare(f"N={size} {str(dtype)[6:]}", run(case, dtype), expected, dtype)


def check_no_reset() -> Iterator[Row]:
    """reset=None is reset nowhere; save=False changes no result."""
    case = draw(100, 3, 64, [("model", "none")] * 3)
    inputs = [x.bfloat16() for x in case.inputs]
    y, state_out, _ = cuda.forward(*inputs, case.state.float(), case.reset, save=True)
    plain = cuda.forward(*inputs, case.state.float(), None, save=False)
    yield Row("reset=None save=False, differing", 2 - torch.equal(y, plain[0]) - torch.equal(state_out, plain[1]), 0)


def check_pieces() -> Iterator[Row]:
    """A row in pieces that are multiples of 16 tokens, states handed on, gives the same bits; also a very long row."""
    for tokens, cuts in ((100, (48, 64)), (65537, range(4096, 65537, 4096))):
        for dtype in (torch.float32, torch.bfloat16):
            case = draw(tokens, 1, 64, [("model", "none"), ("model", "not_first")][: 1 if tokens > 100 else 2])
            whole = run(case, dtype)
            in_pieces = run_in_pieces(case, dtype, [0, *cuts, tokens])
            yield Row(f"T={tokens} {str(dtype)[6:]} in pieces, differing", differing(in_pieces, whole), 0)
            finite = all(bool(x.isfinite().all()) for x in whole.values())
            yield Row(f"T={tokens} {str(dtype)[6:]} not finite", float(not finite), 0)


def run_in_pieces(case: Case, dtype: torch.dtype, cuts: list[int]) -> dict[str, Tensor]:
    """All pieces forward, then all backward, last first."""
    pieces = [case.tokens(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]
    state, y, saved = case.state.float(), [], []
    for piece in pieces:
        inputs = [x.to(dtype) for x in piece.inputs]
        y_piece, state, starts = cuda.forward(*inputs, state, piece.reset, save=True)
        y.append(y_piece)
        saved.append((*inputs, piece.reset, starts, piece.dy.to(dtype)))
    dstate, gradients = case.dstate_out.float(), []
    for arguments in reversed(saved):
        *piece_gradients, dstate = cuda.backward(*arguments, dstate)
        gradients.insert(0, piece_gradients)
    joined = [torch.cat(x, 1) for x in zip(*gradients, strict=True)]
    return dict(zip(OUTPUTS, (torch.cat(y, 1), state, *joined, dstate), strict=True))


def check_workspace_pieces() -> Iterator[Row]:
    """The backward pass in pieces of one window of 16 tokens gives the same bits."""
    case = draw(100, 3, 64, [("model", "none"), ("model", "not_first")])
    whole, size = run(case, torch.bfloat16), cuda._WORKSPACE_BYTES
    cuda._WORKSPACE_BYTES = 1
    try:
        yield Row("workspace of one window, differing", differing(run(case, torch.bfloat16), whole), 0)
    finally:
        cuda._WORKSPACE_BYTES = size


def check_permutation() -> Iterator[Row]:
    """Batch rows in another order give the same bits."""
    case = draw(100, 3, 64, [(kind, "not_first") for kind in KINDS])
    order = torch.tensor([3, 0, 5, 1, 4, 2], device="cuda")
    mixed = Case(tuple(x[order] for x in case.inputs), *(x[order] for x in case[1:]))
    for dtype in (torch.float32, torch.bfloat16):
        expected = {name: x[order] for name, x in run(case, dtype).items()}
        yield Row(f"{str(dtype)[6:]} rows permuted, differing", differing(run(mixed, dtype), expected), 0)


class Guarded:
    """Buffers that lie in larger ones full of NaN."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer full of NaN with NaN on both sides."""
        count, guard = math.prod(shape), GUARD_BYTES // dtype.itemsize
        buffer = torch.full((count + 2 * guard,), math.nan, dtype=dtype, device="cuda")
        bits = buffer.view(torch.uint8)
        self._buffers.append((bits, bits.clone()))
        return buffer[guard : guard + count].view(shape)

    def copy(self, x: Tensor) -> Tensor:
        """A copy of an input with NaN on both sides."""
        return self.empty(tuple(x.shape), x.dtype).copy_(x)

    def overwritten(self) -> int:
        """Number of guard bands that were written to."""
        return sum(
            not torch.equal(now[band], before[band])
            for now, before in self._buffers
            for band in (slice(0, GUARD_BYTES), slice(-GUARD_BYTES, None))
        )


def check_guard_bands() -> Iterator[Row]:
    """Everything is written, nothing beside it, and nothing outside the inputs is read."""
    for tokens in (1, 15, 31, 100):
        for dtype in (torch.float32, torch.bfloat16):
            case = draw(tokens, 3, 64, [("model", "none"), ("model", "not_first")])
            expected = run(case, dtype)
            guarded = Guarded()
            found = run_guarded(case, dtype, guarded)
            label = f"T={tokens} {str(dtype)[6:]} guarded"
            yield Row(f"{label}, differing", differing(found, expected), 0)
            yield Row(f"{label}, bands overwritten", guarded.overwritten(), 0)


def run_guarded(case: Case, dtype: torch.dtype, guarded: Guarded) -> dict[str, Tensor]:
    """The launchers alone, every buffer inside a larger one."""
    shape, heads = case.dy.shape, case.dy.shape[2]
    batch, tokens, _, size = shape
    windows = (tokens + cuda.WINDOW - 1) // cuda.WINDOW
    names = ("r", "w_raw", "k", "v", "a", "b")
    buffers = {name: guarded.copy(x.to(dtype)) for name, x in zip(names, case.inputs, strict=True)}
    buffers["reset"] = case.reset
    square = (batch, heads, size, size)
    starts = guarded.empty((batch, heads, windows, size, size), torch.float32)
    results = {name: guarded.empty(shape, dtype) for name in OUTPUTS if name not in IN_STATE_DTYPE}
    results |= {name: guarded.empty(square, torch.float32) for name in IN_STATE_DTYPE}
    forward = {"state": guarded.copy(case.state.float()), "y": results["y"], "state_out": results["state_out"]}
    cuda.launch("wkv7_forward", buffers["r"], {**buffers, **forward, "starts": starts}, (0, windows))
    backward = {name: x for name, x in results.items() if name not in ("y", "state_out")}
    backward |= {
        "starts": starts,
        "dy": guarded.copy(case.dy.to(dtype)),
        "dstate_in": guarded.copy(case.dstate_out.float()),
        "workspace_du": guarded.empty((batch, heads, windows, cuda.WINDOW, size), torch.float32),
        "workspace_d": guarded.empty((batch, heads, windows, size, size), torch.float32),
    }
    cuda.launch("wkv7_backward", buffers["r"], {**buffers, **backward}, (0, windows))
    return results


def check_misaligned() -> Iterator[Row]:
    """Inputs that begin at an odd element of a larger buffer."""
    case = draw(31, 3, 64, [("model", "not_first")])
    expected = run(case, torch.bfloat16)
    inputs = []
    for x in case.inputs:
        buffer = torch.empty(x.numel() + 1, dtype=torch.bfloat16, device="cuda")
        inputs.append(buffer[1:].view(x.shape).copy_(x))
    y, state_out, starts = cuda.forward(*inputs, case.state.float(), case.reset, save=True)
    gradients = cuda.backward(*inputs, case.reset, starts, case.dy.bfloat16(), case.dstate_out.float())
    found = dict(zip(OUTPUTS, (y, state_out, *gradients), strict=True))
    yield Row("misaligned inputs, differing", differing(found, expected), 0)


def check_stream_and_graph() -> Iterator[Row]:
    """Another stream than the default one, and a captured graph replayed on other inputs."""
    first, second = (draw(100, 3, 64, [("model", "not_first")], seed) for seed in (1, 2))
    expected = run(first, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(first, torch.bfloat16)
    stream.synchronize()
    yield Row("side stream, differing", differing(found, expected), 0)

    inputs = [x.bfloat16() for x in second.inputs]
    state, dy, dstate_out = second.state.float(), second.dy.bfloat16(), second.dstate_out.float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, state_out, starts = cuda.forward(*inputs, state, first.reset, save=True)
        gradients = cuda.backward(*inputs, first.reset, starts, dy, dstate_out)
    for buffer, x in zip((*inputs, state, dy, dstate_out), (*first.inputs, *first[1:2], *first[3:]), strict=True):
        buffer.copy_(x)
    graph.replay()
    found = dict(zip(OUTPUTS, (y, state_out, *gradients), strict=True))
    yield Row("graph replayed, differing", differing(found, expected), 0)


def check_huge_index() -> Iterator[Row]:
    """More than 2^31 elements: the last batch row equals that row alone."""
    batch, tokens, heads, size = 17, 32768, 64, 64
    if torch.cuda.mem_get_info()[0] < 118e9:
        return
    torch.manual_seed(0)
    x = torch.empty(batch, tokens, heads, size, dtype=torch.bfloat16, device="cuda").normal_()
    key = torch.empty_like(x).normal_(std=0.1)
    inputs, state = (x, x, x, x, -key, key), torch.zeros(batch, heads, size, size, device="cuda")
    y, state_out, starts = cuda.forward(*inputs, state, None, save=True)
    gradients = cuda.backward(*inputs, None, starts, x, state)
    whole = [z[-1:].clone() for z in (y, state_out, *gradients)]
    del y, starts, gradients
    inputs = [z[-1:].contiguous() for z in inputs]
    y, state_out, starts = cuda.forward(*inputs, state[-1:], None, save=True)
    gradients = cuda.backward(*inputs, None, starts, x[-1:], state[-1:])
    found = zip((y, state_out, *gradients), whole, strict=True)
    yield Row("2^31 elements, last row, differing", sum(not torch.equal(a, b) for a, b in found), 0)


CHECKS: list[tuple[Callable[..., Iterator[Row]], tuple[int, ...]]] = [
    *((check_against_reference, (tokens,)) for tokens in (1, 15, 16, 17, 31, 64, 100, 1000, 4096)),
    (check_absent_gradients, ()),
    (check_head_sizes, ()),
    (check_no_reset, ()),
    (check_pieces, ()),
    (check_workspace_pieces, ()),
    (check_permutation, ()),
    (check_guard_bands, ()),
    (check_misaligned, ()),
    (check_stream_and_graph, ()),
    (check_huge_index, ()),
]

if pytest is not None:

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(("check", "arguments"), CHECKS, ids=lambda x: getattr(x, "__name__", str(x)))
    def test_cuda_kernels(check: Callable[..., Iterator[Row]], arguments: tuple[int, ...]) -> None:
        failed = [row for row in check(*arguments) if not row.passed]
        assert not failed


def time_ms(call: Callable[[], object]) -> float:
    """Median of ten runs on the GPU."""
    times = []
    for repeat in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def print_timings() -> None:
    """Forward without saving, forward, and backward."""
    for dtype in (torch.bfloat16, torch.float32):
        for batch, tokens, heads in ((1, 4096, 12), (8, 4096, 12), (1, 4096, 32), (8, 4096, 32), (16, 512, 12)):
            x = torch.randn(batch, tokens, heads, 64, device="cuda").to(dtype)
            key = torch.nn.functional.normalize(torch.randn_like(x), dim=-1)
            inputs, state = (x, x, x, x, -key, key * 0.5), torch.zeros(batch, heads, 64, 64, device="cuda")
            starts = cuda.forward(*inputs, state, None, save=True)[2]
            lean = time_ms(lambda: cuda.forward(*inputs, state, None, save=False))  # noqa: B023 - called at once
            full = time_ms(lambda: cuda.forward(*inputs, state, None, save=True))  # noqa: B023
            back = time_ms(lambda: cuda.backward(*inputs, None, starts, x, state))  # noqa: B023
            shape = f"({batch},{tokens},{heads},64) {str(dtype)[6:]}"
            report(f"{shape:28s} forward {lean:7.3f} ms, saving {full:7.3f} ms, backward {back:7.3f} ms")


def report(line: str) -> None:
    """Print at once, so that nothing is lost if the program is stopped."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run everything. The exit code is 1 if a check failed."""
    if not torch.cuda.is_available():
        report("no CUDA device")
        return 1
    began = time.monotonic()
    cuda.architectures()
    run(draw(1, 1, 64, [("model", "none")]), torch.float32)
    report(f"compiled and loaded in {time.monotonic() - began:.1f} s for {cuda.architectures()}")
    print_timings()
    failures = 0
    for check, arguments in CHECKS:
        began = time.monotonic()
        rows = list(check(*arguments))
        failed = [row for row in rows if not row.passed]
        failures += len(failed)
        name = f"{check.__name__}{arguments or ''}"
        report(f"{'FAIL' if failed else 'PASS'} {name}: {len(rows)} values, {time.monotonic() - began:.1f} s")
        for dtype in ("float32", "bfloat16"):
            errors = {
                row.name.split()[-1]: row.value for row in rows if dtype in row.name and row.name.endswith(OUTPUTS)
            }
            if errors:
                report(f"    {dtype:8s} " + " ".join(f"{key}={value:.1e}" for key, value in errors.items()))
        for row in failed[:20]:
            report(f"    {row.name}: {row.value:.3e} > {row.limit:.1e}")
    report("FAIL" if failures else "PASS")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
