"""Head, cross-entropy and L2Wrap in one operation that never holds more than a slice of the logits.

Each row (token) has a weight q >= 0. The value is  sum_row q_row * CE_row.  The gradient is that of

    sum_row q_row * (CE_row + l2wrap / 2 * max(logits_row)^2)

with the position of the largest logit (the first on ties) held fixed: the official trainer's L2Wrap, which
is q * l2wrap * max at that logit. The penalty is part of the gradient only. With q = 1 / rows and
l2wrap = 1e-4 this is the official loss; a row with q = 0 gets neither term.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.ops.step_kernels import cross_entropy_rows, has_cross_entropy_kernel

__all__ = ["GroupSums", "linear_cross_entropy", "linear_cross_entropy_reference"]


class GroupSums(NamedTuple):
    """Losses by group, summed on the device that computes them, so that nobody waits for them."""

    group_R: Tensor
    """int32 [R], group of each row."""
    sums_2G: Tensor
    """float64 [2, G]: weighted losses and weights are added to it."""


def linear_cross_entropy_reference(
    hidden_RC: Tensor, head_VC: Tensor, target_R: Tensor, weight_R: Tensor, l2wrap: float
) -> Tensor:
    """The surrogate whose gradient `linear_cross_entropy` has, written out with whole logits (for tests)."""
    logits_RV = F.linear(hidden_RC, head_VC)
    entropy_R = F.cross_entropy(logits_RV, target_R, reduction="none")
    largest_R = logits_RV.gather(1, logits_RV.detach().argmax(1, keepdim=True)).squeeze(1)
    return (weight_R * (entropy_R + 0.5 * l2wrap * largest_R.square())).sum()


def _slice_loss(
    logits_RV: Tensor, target_R: Tensor, weight_R: Tensor, l2wrap: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Weighted loss of each row, and the gradient of the logits in their dtype; may overwrite the logits."""
    if has_cross_entropy_kernel(logits_RV):
        return cross_entropy_rows(logits_RV, target_R, weight_R, l2wrap, with_gradient), logits_RV
    wide = logits_RV.to(weight_R.dtype)
    largest_R, position_R = wide.max(1, keepdim=True)
    log_sum_R = torch.logsumexp(wide, 1, keepdim=True)
    losses_R = weight_R * (log_sum_R - wide.gather(1, target_R[:, None])).squeeze(1)
    if not with_gradient:
        return losses_R, logits_RV
    grad = (wide - log_sum_R).exp_()
    grad.scatter_add_(1, target_R[:, None], torch.full_like(largest_R, -1.0))
    if l2wrap:
        grad.scatter_add_(1, position_R, largest_R * l2wrap)
    return losses_R, grad.mul_(weight_R[:, None]).to(logits_RV.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Both gradients are made in the forward pass, slice by slice, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RC: Tensor, head_VC: Tensor, target_R: Tensor, weight_R: Tensor, l2wrap: float, slice_rows: int,
        total_VC: Tensor | None, groups: GroupSums | None, threshold: float, with_gradient: bool,
    ) -> Tensor:  # fmt: skip
        wide = torch.float64 if hidden_RC.dtype == torch.float64 else torch.float32
        weight_R = weight_R.to(wide)
        need_hidden, need_head = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=wide, device=hidden_RC.device)
        d_hidden = torch.empty_like(hidden_RC) if need_hidden else None
        d_head = total_VC if need_head else None
        if need_head and d_head is None:
            d_head = torch.zeros(head_VC.shape, dtype=wide, device=head_VC.device)
        for start in range(0, hidden_RC.shape[0], slice_rows):
            rows = slice(start, start + slice_rows)
            hidden = hidden_RC[rows]
            logits = F.linear(hidden, head_VC)
            losses_R, d_logits = _slice_loss(logits, target_R[rows], weight_R[rows], l2wrap, need_hidden or need_head)
            if threshold and with_gradient:
                d_logits *= (losses_R >= threshold * weight_R[rows])[:, None]
            loss += losses_R.sum()
            if groups is not None:
                groups.sums_2G[0].index_add_(0, groups.group_R[rows], losses_R.double())
            if d_hidden is not None:
                torch.mm(d_logits, head_VC, out=d_hidden[rows])
            if d_head is not None:
                _add_outer(d_head, d_logits, hidden)
        if groups is not None:
            groups.sums_2G[1].index_add_(0, groups.group_R, weight_R.double())
        returned = d_head is not None and d_head is not total_VC
        ctx.save_for_backward(d_hidden, d_head.to(head_VC.dtype) if returned and d_head is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        d_hidden = None if d_hidden is None else d_hidden * upstream.to(d_hidden.dtype)
        d_head = None if d_head is None else d_head * upstream.to(d_head.dtype)
        return d_hidden, d_head, None, None, None, None, None, None, None, None


def _add_outer(total_VC: Tensor, d_logits_RV: Tensor, hidden_RC: Tensor) -> None:
    """Add d_logits^T hidden to the total, accumulated in the dtype of `total`."""
    if d_logits_RV.dtype == total_VC.dtype:
        total_VC.addmm_(d_logits_RV.mT, hidden_RC)
    elif d_logits_RV.is_cuda:
        if hasattr(torch.ops.aten.addmm, "dtype_out"):
            torch.addmm(total_VC, d_logits_RV.mT, hidden_RC, out_dtype=total_VC.dtype, out=total_VC)
        else:  # PyTorch before 2.8 rounds each slice's product.
            total_VC += torch.mm(d_logits_RV.mT, hidden_RC)
    else:
        total_VC.addmm_(d_logits_RV.mT.to(total_VC.dtype), hidden_RC.to(total_VC.dtype))


def linear_cross_entropy(
    hidden_RC: Tensor,
    head_VC: Tensor,
    target_R: Tensor,
    weight_R: Tensor,
    l2wrap: float = 1e-4,
    slice_rows: int = 4096,
    head_total_VC: Tensor | None = None,
    groups: GroupSums | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """Weighted sum of cross-entropies of `hidden @ head^T`, with L2Wrap in the gradient only.

    Args:
        hidden_RC: [R, C], rows of the last normalised residual stream.
        head_VC: [V, C] in the dtype of `hidden_RC`.
        target_R: int64 [R], each in [0, V).
        weight_R: float [R], weight of each row divided by the normaliser of the whole optimizer step.
        l2wrap: strength of the penalty on the largest logit; 0 = off.
        slice_rows: rows of logits that exist at one time.
        head_total_VC: if given, the gradient of `head_VC` is added to it here, in its dtype, instead of in the
            backward pass. Only for a loss whose backward follows with an upstream gradient of 1.
        threshold: rows whose cross-entropy is below have no gradient; their loss counts all the same.
        groups: where losses and weights are summed by group, besides the loss itself.

    Returns:
        float32 scalar (float64 for float64 inputs), differentiable in `hidden_RC` and `head_VC`.
    """
    return _LinearCrossEntropy.apply(  # type: ignore[no-any-return, no-untyped-call]
        hidden_RC,
        head_VC,
        target_R,
        weight_R,
        l2wrap,
        slice_rows,
        head_total_VC,
        groups,
        threshold,
        torch.is_grad_enabled(),
    )
