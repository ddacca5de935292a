"""The recurrence: its definition against the written formula, and every CPU backend against the definition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from trainer.errors import KernelError
from trainer.ops.wkv7 import choose_backend, wkv7

CPU_BACKENDS = ("chunked", "auto")
NAMES = ("y", "state_out", "dr", "dw_raw", "dk", "dv", "da", "db", "dstate")
KINDS = ("model", "same_key", "fast_decay", "slow_decay", "zero_key")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
RESETS = {
    "nowhere": (),
    "first_token": (0,),
    "consecutive": (4, 5, 6),
    "chunk_first": (16, 32, 48),
    "chunk_last": (15, 31, 47),
    "chunk_border": (15, 16, 31, 32, 33),
    "last_token": (-1,),
    "everywhere": range(100),
}


class Case(NamedTuple):
    """Inputs and the gradients that arrive from later, in float64 with values that float32 holds too."""

    inputs: tuple[Tensor, ...]  # r, w_raw, k, v, a, b
    state: Tensor
    reset: Tensor | None
    dy: Tensor
    dstate_out: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        return Case(
            tuple(x.to(dtype) for x in self.inputs),
            self.state.to(dtype),
            self.reset,
            self.dy.to(dtype),
            self.dstate_out.to(dtype),
        )


def draw(
    tokens: int, kind: str = "model", resets: str = "nowhere", *, batch: int = 2, heads: int = 2, size: int = 16
) -> Case:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    shape = (batch, tokens, heads, size)
    r, w_raw, k, v, key, dy = (normal(*shape) for _ in range(6))
    rate = torch.sigmoid(normal(*shape))
    if kind == "same_key":
        key, rate, w_raw = key[:, :1].expand(shape), torch.full_like(rate, 0.99), torch.full_like(w_raw, -8.0)
    elif kind == "fast_decay":
        w_raw = torch.full_like(w_raw, 12.0)
    elif kind == "slow_decay":
        w_raw = torch.full_like(w_raw, -12.0)
    elif kind == "zero_key":
        k, key = torch.zeros_like(k), torch.zeros_like(key)
    key = normalize(key, dim=-1)
    inputs = tuple(x.float().double() for x in (r, w_raw, k, v, -key, key * rate))
    return Case(
        inputs,
        normal(batch, heads, size, size),
        reset_mask(batch, tokens, resets),
        dy,
        normal(batch, heads, size, size),
    )


def reset_mask(batch: int, tokens: int, resets: str) -> Tensor | None:
    if resets == "nowhere":
        return None
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    for token in RESETS[resets]:
        if -tokens <= token < tokens:
            mask[0, token] = True
    if batch > 1 and tokens > 8:  # rows are reset apart from each other
        mask[1, 7] = True
    return mask


def run(
    case: Case, backend: str, op: Callable[..., tuple[Tensor, Tensor]] = wkv7, outputs: str = "both"
) -> dict[str, Tensor]:
    """Outputs and gradients of all inputs; `outputs` says which of y and state_out are used later."""
    leaves = [x.clone().requires_grad_() for x in (*case.inputs, case.state)]
    y, state_out = op(*leaves, case.reset, backend)
    loss = (y * case.dy).sum() if outputs != "state" else 0
    loss = loss + (state_out * case.dstate_out).sum() if outputs != "y" else loss
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return dict(zip(NAMES, (y.detach(), state_out.detach(), *grads), strict=True))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name in NAMES:
        assert found[name].shape == expected[name].shape
        if expected[name].numel():
            scale = expected[name].norm().clamp_min(1e-3)
            error = ((found[name].double() - expected[name]).norm() / scale).item()
            assert error <= tolerance, f"{name}: {error:.1e}"


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    differing = [name for name in NAMES if not torch.equal(found[name], expected[name])]
    assert not differing


def check(case: Case, backend: str, outputs: str = "both") -> None:
    expected = run(case, "reference", outputs=outputs)
    for dtype, tolerance in TOLERANCE.items():
        found = run(case.to(dtype), backend, outputs=outputs)
        assert {x.dtype for x in found.values()} == {dtype}
        assert_close(found, expected, tolerance)


def test_reference_is_the_written_formula():
    """S[i,j] <- S[i,j] w[j] + (sum_m S[i,m] a[m]) b[j] + v[i] k[j];  y[i] = sum_j S[i,j] r[j], in plain numbers."""
    case = draw(3, batch=1, heads=1, size=4)
    r, w_raw, k, v, a, b = (x[0, :, 0].tolist() for x in case.inputs)
    state, size = case.state[0, 0].tolist(), range(4)
    outputs = []
    for t in range(3):
        decay = [math.exp(-math.exp(-0.5) / (1 + math.exp(-w))) for w in w_raw[t]]
        removed = [sum(state[i][m] * a[t][m] for m in size) for i in size]
        state = [[state[i][j] * decay[j] + removed[i] * b[t][j] + v[t][i] * k[t][j] for j in size] for i in size]
        outputs.append([sum(state[i][j] * r[t][j] for j in size) for i in size])
    y, state_out = wkv7(*case.inputs, case.state, None, "reference")
    torch.testing.assert_close(y[0, :, 0], torch.tensor(outputs, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state_out[0, 0], torch.tensor(state, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    assert (state_out - state_out.mT).abs().max() > 0.1


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 63, 100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_lengths(backend, tokens):
    check(draw(tokens), backend)
    check(draw(tokens, resets="chunk_border"), backend)


@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("tokens", [15, 49, 64])
def test_resets(tokens, resets):
    check(draw(tokens, resets=resets), "chunked")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(kind):
    check(draw(65, kind, "chunk_last"), "chunked")


@pytest.mark.parametrize("size", [1, 8, 32, 64])
def test_head_sizes(size):
    check(draw(33, resets="consecutive", batch=1, heads=3, size=size), "chunked")


@pytest.mark.parametrize("outputs", ["y", "state"])
def test_one_output_unused(outputs):
    check(draw(40, resets="chunk_last"), "chunked", outputs)


def test_a_reset_forgets_the_past():
    case = draw(48, resets="chunk_last")
    y, state_out = wkv7(*case.inputs, case.state, case.reset, "chunked")
    later = [x[:1, 47:] for x in case.inputs]
    fresh_y, fresh_state = wkv7(*later, None, None, "reference")
    torch.testing.assert_close(y[:1, 47:], fresh_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state_out[:1], fresh_state, rtol=1e-12, atol=1e-12)
    grads = run(case, "chunked", outputs="state")
    assert not grads["dv"][0, :47].any()
    assert not grads["dstate"][0].any()


def test_no_state_is_zero_state():
    case = draw(20)
    without = wkv7(*case.inputs, None, None, "chunked")
    with_zero = wkv7(*case.inputs, torch.zeros_like(case.state), None, "chunked")
    assert all(torch.equal(left, right) for left, right in zip(without, with_zero, strict=True))


def test_no_reset_is_reset_nowhere():
    case = draw(40)
    assert_close(run(case._replace(reset=torch.zeros(2, 40, dtype=torch.bool)), "chunked"), run(case, "chunked"), 1e-14)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_no_tokens_hand_the_state_on(backend):
    case = draw(0)
    y, state_out = wkv7(*case.inputs, case.state, None, backend)
    assert y.shape == (2, 0, 2, 16)
    assert torch.equal(state_out, case.state)
    assert state_out.data_ptr() != case.state.data_ptr()
    assert torch.equal(run(case, backend)["dstate"], case.dstate_out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_inputs_and_outputs_only(dtype):
    case = draw(100, resets="chunk_border")
    rounded = case._replace(inputs=tuple(x.to(dtype).double() for x in case.inputs), dy=case.dy.to(dtype).double())
    expected = run(rounded, "reference")
    low = rounded.to(dtype)._replace(state=case.state.float(), dstate_out=case.dstate_out.float())
    plain, found = run(low, "reference"), run(low, "chunked")
    for name in NAMES:
        is_state = name in ("state_out", "dstate")
        assert found[name].dtype == (torch.float32 if is_state else dtype)
        error, plain_error = (
            (x[name].double() - expected[name]).norm() / expected[name].norm() for x in (found, plain)
        )
        assert error <= 2 * plain_error + 1e-6, f"{name}: {error:.1e}, plain PyTorch {plain_error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resets", ["nowhere", "chunk_border"])
def test_pieces_give_the_same_bits(resets, dtype):
    whole_case = draw(100, resets=resets)
    case = whole_case.to(dtype)._replace(state=whole_case.state.float(), dstate_out=whole_case.dstate_out.float())

    def in_pieces(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, state, reset, backend = arguments
        outputs = []
        for begin, end in ((0, 16), (16, 64), (64, 64), (64, 100)):
            piece = [x[:, begin:end] for x in inputs]
            y, state = wkv7(*piece, state, None if reset is None else reset[:, begin:end], backend)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    assert_same_bits(run(case, "chunked", in_pieces), run(case, "chunked"))


def test_rows_do_not_know_each_other():
    case = draw(40, resets="chunk_border")
    whole = run(case, "chunked")
    row = Case(tuple(x[1:] for x in case.inputs), case.state[1:], case.reset[1:], case.dy[1:], case.dstate_out[1:])
    assert_close(run(row, "chunked"), {name: x[1:] for name, x in whole.items()}, 1e-14)


def test_gradcheck():
    case = draw(18, resets="chunk_last", batch=1, heads=1, size=2)
    leaves = [x.clone().requires_grad_() for x in (*case.inputs, case.state)]
    assert torch.autograd.gradcheck(lambda *x: wkv7(*x, case.reset, "chunked"), leaves)


@pytest.mark.parametrize("resets", ["nowhere", "chunk_last"])
def test_operators_keep_their_promises_to_pytorch(resets):
    case = draw(17, resets=resets, size=4)
    leaves = [x.clone().requires_grad_() for x in (*case.inputs, case.state)]
    forward, backward = torch.ops.rwkv7.wkv_forward.default, torch.ops.rwkv7.wkv_backward.default
    opcheck(forward, (*leaves, case.reset, "chunked", True))
    opcheck(forward, (*case.inputs, case.state, case.reset, "chunked", False))
    starts = forward(*case.inputs, case.state, case.reset, "chunked", True)[2]
    for dy, dstate in ((case.dy, case.dstate_out), (None, case.dstate_out), (case.dy, None)):
        opcheck(backward, (*case.inputs, case.reset, starts, dy, dstate, "chunked"))


def test_compiled_without_a_graph_break():
    case = draw(33, resets="chunk_last").to(torch.float32)
    compiled = torch.compile(wkv7, fullgraph=True, backend="aot_eager")
    assert_same_bits(run(case, "chunked", compiled), run(case, "chunked"))
    torch.compiler.reset()


def test_recomputed_in_the_backward_pass():
    case = draw(33, resets="chunk_last").to(torch.float32)

    def recomputed(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(wkv7, *arguments, use_reentrant=False)

    assert_same_bits(run(case, "chunked", recomputed), run(case, "chunked"))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_an_autocast_region_changes_nothing(backend):
    case = draw(33, resets="chunk_last").to(torch.float32)

    def in_autocast(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return wkv7(*arguments)

    assert_same_bits(run(case, backend, in_autocast), run(case, backend))


def test_any_strides():
    case = draw(33, resets="chunk_last")

    def scattered(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        *inputs, state, reset, backend = arguments
        apart = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in inputs]
        wide_reset = reset.repeat_interleave(2, 1)[:, ::2]
        y, state_out = wkv7(*apart, state.mT.contiguous().mT, wide_reset, backend)
        return y.mT.contiguous().mT, state_out.mT.contiguous().mT

    assert_same_bits(run(case, "chunked", scattered), run(case, "chunked"))
    expanded = case._replace(inputs=(case.inputs[0][:, :1].expand_as(case.inputs[0]), *case.inputs[1:]))
    y, _ = wkv7(*expanded.inputs, case.state, case.reset, "chunked")
    assert torch.equal(y, wkv7(*(x.clone() for x in expanded.inputs), case.state, case.reset, "chunked")[0])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_nothing_is_read_before_it_is_written(tokens):
    case = draw(tokens, resets="chunk_last")
    assert_close(run(case, "chunked"), run(case, "reference"), 1e-12)


def test_gradients_stay_finite_at_extreme_decays():
    case = draw(32).to(torch.float32)
    w_raw = torch.linspace(-1e4, 1e4, case.inputs[1].numel()).view_as(case.inputs[1])
    found = run(case._replace(inputs=(case.inputs[0], w_raw, *case.inputs[2:])), "chunked")
    assert all(x.isfinite().all() for x in found.values())


def test_choice_of_backend():
    r = torch.zeros(1, 1, 1, 16)
    assert choose_backend("auto", r) == "chunked"
    assert choose_backend("reference", r) == "reference"
    with pytest.raises(KernelError, match="on cpu, not on a CUDA device; fix: set model.kernel: auto"):
        wkv7(r, r, r, r, r, r, backend="cuda")


def processor_s(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


@pytest.mark.slow
def test_speed():
    """Forward and backward of one row of 2048 tokens, which two threads must do in 0.4 s, 20 times faster than the loop.

    Here one thread does it: its processor time is the same on an idle and on a busy machine. A second thread halves
    the time of the products, not that of the loop, so 10 times here are 20 there.
    """
    case = draw(2048, resets="chunk_border", batch=1, heads=12, size=64).to(torch.float32)
    part = draw(512, resets="chunk_border", batch=1, heads=12, size=64).to(torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chunked = min(processor_s(lambda: run(case, "chunked")) for _ in range(10))
        reference = 4 * min(processor_s(lambda: run(part, "reference")) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert chunked <= 0.40
    assert reference >= 10 * chunked
