"""The CUDA WKV-7 kernels against a float64 token loop. Needs a GPU and nvcc.

Also runs without pytest: `python tests/gpu/test_wkv7_cuda.py [check ...]` prints every check. benchmarks/ops.py times.
"""

from __future__ import annotations

import math
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

from trainer.ops.wkv7 import cuda, cuda_chunked, cuda_launch, cuda_nvrtc, cuda_sequential
from trainer.ops.wkv7.cuda_launch import WINDOW, architectures, launch

OUTPUTS = ("y", "state_out", "dr", "dw_raw", "dk", "dv", "da", "db", "dstate")
IN_STATE_DTYPE = ("state_out", "dstate")
KINDS = ("model", "floor", "slow", "same_key", "zero_key", "huge_v")
RESETS = ("none", "many", "not_first")
TINY = 1e-30  # below this norm an expected result is compared absolutely
GUARD_BYTES = 4096


class Setup(NamedTuple):
    """What runs: a kernel and the dtype of its inputs."""

    kernel: str
    dtype: torch.dtype

    def __str__(self) -> str:
        """For the report."""
        return f"{self.kernel}/{str(self.dtype)[6:]}"


TENSOR_CORE = Setup("tensor_core", torch.bfloat16)
SETUPS = (Setup("sequential", torch.float32), Setup("sequential", torch.bfloat16), TENSOR_CORE)
TENSOR_CORE_LIMITS = {"y": 3.3e-3, "state_out": 2e-3, "dstate": 2e-3, "da": 5e-3, "db": 5e-3}
TENSOR_CORE_LIMIT = 3.5e-3  # of the other results
# When all keys are equal, what da and db depend on nearly cancels: S a and D b stay small, as every token removes them,
# while the rest of S and D grows like a random walk. Rounding the decayed a and b turns them by the same angle at every
# token, so the error, a part of that rest, grows with the root of the number of tokens.
SAME_KEY_LIMIT, SAME_KEY_TOKENS = 2.5e-2, 512  # of da and db, up to this many tokens
SLOW_DW_LIMIT = 4e-3  # without decay: dw_raw is S times D summed over the values, both large and saved in bfloat16
FEW_ELEMENTS, FEW_FACTOR = 4096, 1.25  # the error of a short row scatters


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
    kinds: tuple[str, ...]  # of values, per batch row

    def rows(self, rows: slice, heads: slice) -> Case:
        """The same for some batch rows and heads."""
        return Case(
            tuple(x[rows, :, heads].contiguous() for x in self.inputs),
            self.state[rows, heads].contiguous(),
            self.reset[rows].contiguous(),
            self.dy[rows, :, heads].contiguous(),
            self.dstate_out[rows, heads].contiguous(),
            self.kinds[rows],
        )

    def tokens(self, begin: int, end: int) -> Case:
        """The same for some tokens."""
        return Case(
            tuple(x[:, begin:end].contiguous() for x in self.inputs),
            self.state,
            self.reset[:, begin:end].contiguous(),
            self.dy[:, begin:end].contiguous(),
            self.dstate_out,
            self.kinds,
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
    return Case(inputs, state, reset.cuda(), dy, dstate_out, tuple(kind for kind, _ in rows))


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


def run(case: Case, setup: Setup, with_dy: bool = True, with_dstate: bool = True) -> dict[str, Tensor]:
    """The kernels through the backend's functions."""
    inputs = [x.to(setup.dtype) for x in case.inputs]
    y, state_out, starts = cuda.forward(*inputs, case.state.float(), case.reset, save=True, kernel=setup.kernel)
    dy = case.dy.to(setup.dtype) if with_dy else None
    dstate_out = case.dstate_out.float() if with_dstate else None
    return dict(zip(OUTPUTS, (y, state_out, *cuda.backward(*inputs, case.reset, starts, dy, dstate_out)), strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(TINY)).item()


def limit(name: str, setup: Setup, kind: str, tokens: int, elements: int) -> float:
    """Tolerance of the relative L2 error of one result of one batch row of some tokens."""
    if setup.kernel == "tensor_core":
        tolerance = TENSOR_CORE_LIMITS.get(name, TENSOR_CORE_LIMIT)
        if kind == "same_key" and name in ("da", "db"):
            tolerance = SAME_KEY_LIMIT * max(1.0, math.sqrt(tokens / SAME_KEY_TOKENS))
        if kind == "slow" and name == "dw_raw":
            tolerance = SLOW_DW_LIMIT
        return tolerance * (FEW_FACTOR if elements < FEW_ELEMENTS else 1)
    return 2e-3 if setup.dtype == torch.bfloat16 and name not in IN_STATE_DTYPE else 1e-5


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """Number of results that differ in any bit."""
    return sum(not torch.equal(found[name], expected[name]) for name in OUTPUTS)


def compare(
    label: str, found: dict[str, Tensor], expected: dict[str, Tensor], setup: Setup, kinds: tuple[str, ...]
) -> Iterator[Row]:
    """The worst batch row of each result among those of one tolerance, and a guard on its largest single error."""
    for name in OUTPUTS:
        by_limit: dict[float, list[tuple[float, float, str]]] = {}
        for i, kind in enumerate(kinds):
            difference, largest = (found[name][i].double() - expected[name][i]).abs(), expected[name][i].abs().max()
            worst = (difference.max() / largest.clamp_min(TINY)).item()
            tolerance = limit(name, setup, kind, expected["y"].shape[1], expected[name][i].numel())
            by_limit.setdefault(tolerance, []).append((error(found[name][i], expected[name][i]), worst, kind))
        for tolerance, errors in by_limit.items():
            value, _, kind = max(errors)
            yield Row(f"{label} {setup} {kind} {name}", value, tolerance)
            yield Row(f"{label} {setup} {name} max-norm", max(worst for _, worst, _ in errors), 10 * tolerance)


def check_against_reference(tokens: int) -> Iterator[Row]:
    """Every kind of values and resets at once, in every setup; then rows and heads alone, bit for bit."""
    case = draw(tokens, 3, 64, [(kind, resets) for kind in KINDS for resets in RESETS])
    expected = reference(case)
    for setup in SETUPS:
        label = f"T={tokens} {setup}"
        found = run(case, setup)
        yield from compare(f"T={tokens}", found, expected, setup, case.kinds)
        yield Row(f"{label} second run, differing", differing(run(case, setup), found), 0)
        for rows, heads in ((slice(1, 2), slice(0, 3)), (slice(5, 6), slice(1, 2)), (slice(2, 5), slice(2, 3))):
            part = run(case.rows(rows, heads), setup)
            whole = {name: _part(name, found[name], rows, heads) for name in OUTPUTS}
            yield Row(f"{label} rows {rows} heads {heads} alone, differing", differing(part, whole), 0)


def _part(name: str, x: Tensor, rows: slice, heads: slice) -> Tensor:
    return x[rows, heads] if name in IN_STATE_DTYPE else x[rows, :, heads]


def check_absent_gradients() -> Iterator[Row]:
    """No gradient of y, or none of the outgoing state."""
    case = draw(100, 3, 64, [("model", "none"), ("model", "not_first")])
    for with_dy, with_dstate in ((False, True), (True, False)):
        expected = reference(case, with_dy, with_dstate)
        for setup in SETUPS:
            found = run(case, setup, with_dy, with_dstate)
            rows = compare(f"dy {with_dy} dstate_out {with_dstate}", found, expected, setup, case.kinds)
            if setup == TENSOR_CORE and not with_dy:  # what is left of a gradient that has passed through every chunk
                rows = (row._replace(limit=2 * row.limit) for row in rows)
            yield from rows


def check_head_sizes() -> Iterator[Row]:
    """The other compiled head sizes."""
    for size in (16, 32, 128):
        case = draw(100, 3, size, [(kind, resets) for kind in KINDS for resets in RESETS])
        expected = reference(case)
        for setup in SETUPS[:2]:
            yield from compare(f"N={size}", run(case, setup), expected, setup, case.kinds)


def check_no_reset() -> Iterator[Row]:
    """reset=None is reset nowhere; save=False changes no result."""
    case = draw(100, 3, 64, [("model", "none")] * 3)
    inputs = [x.bfloat16() for x in case.inputs]
    for kernel in ("tensor_core", "sequential"):
        y, state_out, _ = cuda.forward(*inputs, case.state.float(), case.reset, save=True, kernel=kernel)
        plain = cuda.forward(*inputs, case.state.float(), None, save=False, kernel=kernel)
        same = torch.equal(y, plain[0]) + torch.equal(state_out, plain[1])
        yield Row(f"{kernel} reset=None save=False, differing", 2 - same, 0)


def check_choice() -> Iterator[Row]:
    """Tensor cores for bfloat16 and head size 64, and what the operators promise of the saved states."""
    for size, dtype, expected in ((64, torch.bfloat16, "tensor_core"), (64, torch.float32, "sequential"),
                                  (128, torch.bfloat16, "sequential")):  # fmt: skip
        r = torch.zeros(1, 1, 1, size, dtype=dtype, device="cuda")
        yield Row(f"kernel for {size} {dtype}, wrong", float(cuda.choose_kernel(r) != expected), 0)
        starts = cuda.forward(r, r, r, r, r, r, torch.zeros(1, 1, size, size, device="cuda"), None, save=True)[2]
        yield Row(f"dtype of starts for {size} {dtype}, wrong", float(cuda.starts_dtype(r) != starts.dtype), 0)


def check_pieces() -> Iterator[Row]:
    """A row in pieces that are multiples of 16 tokens, states handed on, gives the same bits; also a very long row."""
    for tokens, cuts in ((100, (48, 64)), (65537, range(4096, 65537, 4096))):
        for setup in SETUPS:
            case = draw(tokens, 1, 64, [("model", "none"), ("model", "not_first")][: 1 if tokens > 100 else 2])
            whole = run(case, setup)
            in_pieces = run_in_pieces(case, setup, [0, *cuts, tokens])
            yield Row(f"T={tokens} {setup} in pieces, differing", differing(in_pieces, whole), 0)
            finite = all(bool(x.isfinite().all()) for x in whole.values())
            yield Row(f"T={tokens} {setup} not finite", float(not finite), 0)


def run_in_pieces(case: Case, setup: Setup, cuts: list[int]) -> dict[str, Tensor]:
    """All pieces forward, then all backward, last first."""
    pieces = [case.tokens(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]
    state, y, saved = case.state.float(), [], []
    for piece in pieces:
        inputs = [x.to(setup.dtype) for x in piece.inputs]
        y_piece, state, starts = cuda.forward(*inputs, state, piece.reset, save=True, kernel=setup.kernel)
        y.append(y_piece)
        saved.append((*inputs, piece.reset, starts, piece.dy.to(setup.dtype)))
    dstate, gradients = case.dstate_out.float(), []
    for arguments in reversed(saved):
        *piece_gradients, dstate = cuda.backward(*arguments, dstate)
        gradients.insert(0, piece_gradients)
    joined = [torch.cat(x, 1) for x in zip(*gradients, strict=True)]
    return dict(zip(OUTPUTS, (torch.cat(y, 1), state, *joined, dstate), strict=True))


def check_workspace_pieces() -> Iterator[Row]:
    """Pieces of one window of 16 tokens give the same bits."""
    case = draw(100, 3, 64, [("model", "none"), ("model", "not_first")])
    for setup, module in ((SETUPS[1], cuda_sequential), (TENSOR_CORE, cuda_chunked)):
        whole, size = run(case, setup), module._WORKSPACE_BYTES
        module._WORKSPACE_BYTES = 1
        try:
            yield Row(f"{setup} workspace of one window, differing", differing(run(case, setup), whole), 0)
        finally:
            module._WORKSPACE_BYTES = size


def check_warps() -> Iterator[Row]:
    """The number of warps per block of the scan changes no result."""
    case = draw(100, 3, 64, [("model", "none"), ("model", "not_first")])
    whole, choose = run(case, TENSOR_CORE), cuda_chunked._warps
    try:
        for warps in (1, 2, 4):
            cuda_chunked._warps = lambda r, warps=warps: warps
            yield Row(f"{warps} warps, differing", differing(run(case, TENSOR_CORE), whole), 0)
    finally:
        cuda_chunked._warps = choose


def check_permutation() -> Iterator[Row]:
    """Batch rows in another order give the same bits."""
    case = draw(100, 3, 64, [(kind, "not_first") for kind in KINDS])
    order = torch.tensor([3, 0, 5, 1, 4, 2], device="cuda")
    mixed = Case(tuple(x[order] for x in case.inputs), *(x[order] for x in case[1:5]), case.kinds)
    for setup in SETUPS:
        expected = {name: x[order] for name, x in run(case, setup).items()}
        yield Row(f"{setup} rows permuted, differing", differing(run(mixed, setup), expected), 0)


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
        for setup, warps in (*((setup, 4) for setup in SETUPS), (TENSOR_CORE, 2)):
            case = draw(tokens, 3, 64, [("model", "none"), ("model", "not_first")])
            expected = run(case, setup)
            guarded = Guarded()
            found = run_guarded(case, setup, guarded, warps)
            label = f"T={tokens} {setup} {warps} warps guarded"
            yield Row(f"{label}, differing", differing(found, expected), 0)
            yield Row(f"{label}, bands overwritten", guarded.overwritten(), 0)


def run_guarded(case: Case, setup: Setup, guarded: Guarded, warps: int) -> dict[str, Tensor]:
    """The launchers alone, every buffer inside a larger one. `warps`: per block of the tensor cores' scan."""
    shape = case.dy.shape
    batch, tokens, heads, size = shape
    windows = (tokens + WINDOW - 1) // WINDOW
    names = ("r", "w_raw", "k", "v", "a", "b")
    buffers = {name: guarded.copy(x.to(setup.dtype)) for name, x in zip(names, case.inputs, strict=True)}
    buffers["reset"] = case.reset
    square = (batch, heads, size, size)
    results = {name: guarded.empty(shape, setup.dtype) for name in OUTPUTS if name not in IN_STATE_DTYPE}
    results |= {name: guarded.empty(square, torch.float32) for name in IN_STATE_DTYPE}
    forward = {"state": guarded.copy(case.state.float()), "y": results["y"], "state_out": results["state_out"]}
    backward = {name: x for name, x in results.items() if name not in ("y", "state_out")}
    backward |= {"dy": guarded.copy(case.dy.to(setup.dtype)), "dstate_in": guarded.copy(case.dstate_out.float())}
    sizes, prefix = {}, "wkv7"
    if setup.kernel == "tensor_core":
        states = (batch, heads, windows, size, size)
        forward["starts"] = backward["starts"] = guarded.empty(states, torch.bfloat16)
        backward["ends"] = guarded.empty(states, torch.bfloat16)
        for arguments, count in zip((forward, backward), cuda_chunked.OPERANDS_BYTES, strict=True):
            arguments["operands"] = guarded.empty((batch, heads, windows, count // 2), torch.bfloat16)
        backward["pairs"] = guarded.empty((batch, heads, windows, cuda_chunked.PAIRS_BYTES // 2), torch.bfloat16)
        sizes, prefix = {"warps": warps, "piece": windows}, "wkv7_chunked"
    else:
        forward["starts"] = backward["starts"] = guarded.empty((batch, heads, windows, size, size), torch.float32)
        backward["workspace_du"] = guarded.empty((batch, heads, windows, WINDOW, size), torch.float32)
        backward["workspace_d"] = guarded.empty((batch, heads, windows, size, size), torch.float32)
    launch(f"{prefix}_forward", buffers["r"], {**buffers, **forward}, (0, windows), **sizes)
    launch(f"{prefix}_backward", buffers["r"], {**buffers, **backward}, (0, windows), **sizes)
    return results


def check_misaligned() -> Iterator[Row]:
    """Inputs that begin at an odd element of a larger buffer."""
    case = draw(31, 3, 64, [("model", "not_first")])
    for setup in SETUPS[1:]:
        expected = run(case, setup)
        inputs = []
        for x in case.inputs:
            buffer = torch.empty(x.numel() + 1, dtype=torch.bfloat16, device="cuda")
            inputs.append(buffer[1:].view(x.shape).copy_(x))
        y, state_out, starts = cuda.forward(*inputs, case.state.float(), case.reset, save=True, kernel=setup.kernel)
        gradients = cuda.backward(*inputs, case.reset, starts, case.dy.bfloat16(), case.dstate_out.float())
        found = dict(zip(OUTPUTS, (y, state_out, *gradients), strict=True))
        yield Row(f"{setup} misaligned inputs, differing", differing(found, expected), 0)


def check_stream_and_graph() -> Iterator[Row]:
    """Another stream than the default one, and a captured graph replayed on other inputs."""
    # Long enough for several pieces, whose kernels run side by side.
    first, second = (draw(600, 3, 64, [("model", "not_first")], seed) for seed in (1, 2))
    for setup in SETUPS[1:]:
        expected = run(first, setup)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = run(first, setup)
        stream.synchronize()
        yield Row(f"{setup} side stream, differing", differing(found, expected), 0)

        inputs = [x.bfloat16() for x in second.inputs]
        state, dy, dstate_out = second.state.float(), second.dy.bfloat16(), second.dstate_out.float()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, state_out, starts = cuda.forward(*inputs, state, first.reset, save=True, kernel=setup.kernel)
            gradients = cuda.backward(*inputs, first.reset, starts, dy, dstate_out)
        replaced = (*first.inputs, first.state, first.dy, first.dstate_out)
        for buffer, x in zip((*inputs, state, dy, dstate_out), replaced, strict=True):
            buffer.copy_(x)
        graph.replay()
        found = dict(zip(OUTPUTS, (y, state_out, *gradients), strict=True))
        yield Row(f"{setup} graph replayed, differing", differing(found, expected), 0)


def check_nvrtc() -> Iterator[Row]:
    """Compiled by NVRTC and launched one after the other: the same bits."""
    if cuda_nvrtc.find_nvrtc() is None:
        yield Row("NVRTC was not found", 1, 0)
        return
    has_nvcc = cuda_launch.has_nvcc
    for tokens in (40, 600):
        case = draw(tokens, 3, 64, [("model", "many"), ("model", "none")])
        expected = run(case, TENSOR_CORE)
        try:
            cuda_launch.has_nvcc = lambda: False
            found = run(case, TENSOR_CORE)
        finally:
            cuda_launch.has_nvcc = has_nvcc
        yield Row(f"{TENSOR_CORE} NVRTC, differing", differing(found, expected), 0)


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
    (check_choice, ()),
    (check_warps, ()),
    (check_pieces, ()),
    (check_workspace_pieces, ()),
    (check_permutation, ()),
    (check_guard_bands, ()),
    (check_misaligned, ()),
    (check_stream_and_graph, ()),
    (check_nvrtc, ()),
    (check_huge_index, ()),
]

if pytest is not None:

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(("check", "arguments"), CHECKS, ids=lambda x: getattr(x, "__name__", str(x)))
    def test_cuda_kernels(check: Callable[..., Iterator[Row]], arguments: tuple[int, ...]) -> None:
        failed = [row for row in check(*arguments) if not row.passed]
        assert not failed


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
    run(draw(1, 1, 64, [("model", "none")]), SETUPS[0])
    report(f"compiled and loaded in {time.monotonic() - began:.1f} s for {architectures()}")
    failures = 0
    wanted = sys.argv[1:]
    for check, arguments in CHECKS:
        if wanted and check.__name__ not in wanted:
            continue
        began = time.monotonic()
        rows = list(check(*arguments))
        failed = [row for row in rows if not row.passed]
        failures += len(failed)
        name = f"{check.__name__}{arguments or ''}"
        report(f"{'FAIL' if failed else 'PASS'} {name}: {len(rows)} values, {time.monotonic() - began:.1f} s")
        for setup in map(str, SETUPS):
            errors: dict[str, Row] = {}
            for row in rows:
                name = row.name.split()[-1]
                if setup in row.name and name in OUTPUTS:
                    worst = errors.get(name, row)
                    errors[name] = max(worst, row, key=lambda x: x.value / x.limit)
            if errors:
                values = (f"{name}={row.value * 1e3:.2g}({row.value / row.limit:.0%})" for name, row in errors.items())
                report(f"    {setup:22s} e-3: " + " ".join(values))
        for row in failed[:20]:
            report(f"    {row.name}: {row.value:.3e} > {row.limit:.1e}")
    report("FAIL" if failures else "PASS")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
