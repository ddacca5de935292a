"""Head and loss in slices against the whole logits written out, values and gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from trainer.ops.loss import linear_cross_entropy, linear_cross_entropy_reference

ROWS, WIDTH, VOCAB = 23, 12, 37


class Case(NamedTuple):
    hidden: Tensor
    head: Tensor
    target: Tensor
    weight: Tensor


def draw(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    weight = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    weight[::4] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(hidden.to(dtype), head.to(dtype), target, weight.to(wide))


def run(loss, case: Case, *arguments, upstream: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head = case.hidden.clone().requires_grad_(), case.head.clone().requires_grad_()
    value = loss(hidden, head, case.target, case.weight, *arguments)
    return (value.detach(), *torch.autograd.grad(value * upstream, (hidden, head)))


def plain_loss(case: Case) -> Tensor:
    return (case.weight * F.cross_entropy(case.hidden @ case.head.mT, case.target, reduction="none")).sum()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("slice_rows", [1, 7, ROWS, 4096])
@pytest.mark.parametrize("l2wrap", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_slices_equal_whole_logits(slice_rows, l2wrap, upstream):
    case = draw()
    value, *grads = run(linear_cross_entropy, case, l2wrap, slice_rows, upstream=upstream)
    _, *expected = run(linear_cross_entropy_reference, case, l2wrap, upstream=upstream)
    assert value.item() == pytest.approx(plain_loss(case).item(), rel=1e-12)
    for found, wanted in zip(grads, expected, strict=True):
        assert relative_error(found, wanted) <= 1e-12


@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_penalty_is_the_largest_logit_times_its_weight(upstream):
    """The official rule: upstream x weight x 1e-4 x max is added to the gradient of the largest logit."""
    case = draw()
    logits = (case.hidden @ case.head.mT).requires_grad_()
    (d_logits,) = torch.autograd.grad(
        (case.weight * F.cross_entropy(logits, case.target, reduction="none")).sum(), logits
    )
    largest, position = logits.detach().max(1)
    d_logits = d_logits * upstream
    d_logits[torch.arange(ROWS), position] += upstream * case.weight * 1e-4 * largest
    _, d_hidden, d_head = run(linear_cross_entropy, case, 1e-4, 5, upstream=upstream)
    torch.testing.assert_close(d_hidden, d_logits @ case.head, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(d_head, d_logits.mT @ case.hidden, rtol=1e-12, atol=1e-14)


def test_first_of_equal_largest_logits_is_pulled():
    hidden, head = (
        torch.ones(1, 1, dtype=torch.float64),
        torch.tensor([[1.0], [5.0], [5.0], [2.0]], dtype=torch.float64),
    )
    case = Case(hidden, head, torch.tensor([0]), torch.ones(1, dtype=torch.float64))
    _, _, without = run(linear_cross_entropy, case, 0.0)
    _, _, with_penalty = run(linear_cross_entropy, case, 0.5)
    torch.testing.assert_close(
        (with_penalty - without).flatten(), torch.tensor([0.0, 2.5, 0.0, 0.0], dtype=torch.float64)
    )
    _, _, reference = run(linear_cross_entropy_reference, case, 0.5)
    torch.testing.assert_close(with_penalty, reference)


def test_a_negative_largest_logit_is_pulled_up():
    hidden, head = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[-3.0], [-5.0]], dtype=torch.float64)
    case = Case(hidden, head, torch.tensor([1]), torch.ones(1, dtype=torch.float64))
    _, _, without = run(linear_cross_entropy, case, 0.0)
    _, _, with_penalty = run(linear_cross_entropy, case, 0.1)
    torch.testing.assert_close((with_penalty - without).flatten(), torch.tensor([-0.3, 0.0], dtype=torch.float64))


def test_rows_of_weight_zero_have_no_part():
    case = draw()
    _, d_hidden, d_head = run(linear_cross_entropy, case, 0.1, 7)
    assert not d_hidden[case.weight == 0].any()
    kept = Case(*(x[case.weight > 0] if len(x) == ROWS else x for x in case))
    _, _, d_head_kept = run(linear_cross_entropy, kept, 0.1, 7)
    assert relative_error(d_head, d_head_kept) <= 1e-14
    nothing = case._replace(weight=torch.zeros_like(case.weight))
    value, *grads = run(linear_cross_entropy, nothing, 0.1, 7)
    assert value == 0
    assert not any(grad.any() for grad in grads)


def test_no_rows():
    case = Case(*(x[:0] if len(x) == ROWS else x for x in draw()))
    value, d_hidden, d_head = run(linear_cross_entropy, case)
    assert value == 0
    assert d_hidden.shape == (0, WIDTH)
    assert not d_head.any()


@pytest.mark.parametrize("frozen", ["hidden", "head", "both"])
def test_frozen_parts_get_no_gradient(frozen):
    case = draw()
    hidden = case.hidden.clone().requires_grad_(frozen == "head")
    head = case.head.clone().requires_grad_(frozen == "hidden")
    value = linear_cross_entropy(hidden, head, case.target, case.weight, 1e-4, 7)
    assert value.requires_grad == (frozen != "both")
    with torch.no_grad():
        torch.testing.assert_close(value, plain_loss(case))
    if frozen == "both":
        return
    value.backward()
    trained, index = (head, 2) if frozen == "hidden" else (hidden, 1)
    assert torch.equal(trained.grad, run(linear_cross_entropy, case, 1e-4, 7)[index])


def test_large_logits_stay_finite():
    value, *grads = run(linear_cross_entropy, draw(torch.float32, scale=1e4), 1e-4, 7)
    assert value.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


def test_float32():
    exact = draw()
    case = draw(torch.float32)
    value, *grads = run(linear_cross_entropy, case, 1e-4, 7)
    _, *wanted = run(linear_cross_entropy_reference, exact, 1e-4)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(plain_loss(exact).item(), rel=1e-6)
    for found, expected in zip(grads, wanted, strict=True):
        assert relative_error(found, expected) <= 1e-5


@pytest.mark.parametrize("slice_rows", [1, 7, ROWS])
def test_bfloat16_is_as_good_as_plain_pytorch(slice_rows):
    low = draw(torch.bfloat16)
    exact = Case(low.hidden.double(), low.head.double(), low.target, low.weight.double())
    value, *grads = run(linear_cross_entropy, low, 1e-4, slice_rows)
    _, *plain = run(linear_cross_entropy_reference, low, 1e-4)
    _, *wanted = run(linear_cross_entropy_reference, exact, 1e-4)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(plain_loss(exact).item(), rel=4e-3)
    for found, plain_grad, expected in zip(grads, plain, wanted, strict=True):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, expected) <= max(4e-3, 2 * relative_error(plain_grad, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_is_read_before_it_is_written(dtype):
    expected = run(linear_cross_entropy, draw(dtype), 1e-4, 7)
    torch.use_deterministic_algorithms(True)  # uninitialised memory holds NaN now
    try:
        found = run(linear_cross_entropy, draw(dtype), 1e-4, 7)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_recomputed_in_the_backward_pass():
    case = draw()

    def recomputed(*arguments):
        return torch.utils.checkpoint.checkpoint(linear_cross_entropy, *arguments, use_reentrant=False)

    found, expected = run(recomputed, case, 1e-4, 7), run(linear_cross_entropy, case, 1e-4, 7)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("slice_rows", [1, 7, 4096])
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_rows_below_the_threshold_count_but_are_not_trained(slice_rows, share):
    case = draw()
    losses = F.cross_entropy(case.hidden @ case.head.mT, case.target, reduction="none")
    threshold = float(losses.quantile(share))
    is_trained = losses >= threshold
    value, *grads = run(linear_cross_entropy, case, 1e-4, slice_rows, None, None, threshold)
    assert value.item() == pytest.approx(plain_loss(case).item(), rel=1e-12)
    _, *expected = run(linear_cross_entropy_reference, case._replace(weight=case.weight * is_trained), 1e-4)
    for found, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
    assert 0 < int(is_trained.sum()) < ROWS
