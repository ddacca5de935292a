"""The step's fast paths on a GPU against their plain forms. Also a script: `python tests/gpu/test_step_kernels.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from trainer.bptt.step import StepOptions, run_step
from trainer.config import ModelConfig
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.ops.loss import linear_cross_entropy, linear_cross_entropy_reference
from trainer.ops.step_kernels import add_gradients, cross_entropy_rows, has_cross_entropy_kernel
from trainer.train.local_engine import LocalEngine
from trainer.train.optim import MasterAdamW, parameter_groups
from trainer.types import Batch

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
except ModuleNotFoundError:
    pass


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def test_cross_entropy_rows_against_float64():
    generator = torch.Generator("cuda").manual_seed(0)
    # Short rows, rows held in registers (more of them than processors; part of a block's room; all of it), longer ones.
    for rows, vocab in ((1, 8), (3, 264), (37, 4104), (300, 20008), (1, 65536), (300, 65536), (5, 70008)):
        logits = (4 * torch.randn(rows, vocab, device="cuda", generator=generator)).bfloat16()
        logits[0, :] = logits[0, 0]  # all equal: the first one is the largest
        target = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
        weight = torch.rand(rows, device="cuda", generator=generator)
        weight[rows // 2] = 0
        wide = logits.double().requires_grad_()
        largest = wide.gather(1, wide.detach().argmax(1, keepdim=True)).squeeze(1)
        losses = weight * torch.nn.functional.cross_entropy(wide, target, reduction="none")
        (losses + weight * 0.5e-4 * largest.square()).sum().backward()
        own = logits.clone()
        assert has_cross_entropy_kernel(own)
        before = cross_entropy_rows(own, target, weight, 1e-4, with_gradient=False)
        assert torch.equal(own, logits)
        after = cross_entropy_rows(own, target, weight, 1e-4, with_gradient=True)
        assert torch.equal(before, after)
        assert relative(after, losses) < 1e-6
        assert relative(own, wide.grad) < 2.5e-3  # one rounding to bfloat16
        again = logits.clone()
        cross_entropy_rows(again, target, weight, 1e-4, with_gradient=True)
        assert torch.equal(own, again)


def test_loss_and_its_gradients():
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(300, 128, device="cuda", generator=generator).bfloat16().requires_grad_()
    head = (0.1 * torch.randn(1000, 128, device="cuda", generator=generator)).bfloat16().requires_grad_()
    target = torch.randint(0, 1000, (300,), device="cuda", generator=generator)
    weight = torch.rand(300, device="cuda", generator=generator) / 300
    wide = [x.detach().double().requires_grad_() for x in (hidden, head)]
    expected = linear_cross_entropy_reference(*wide, target, weight.double(), 1e-4)
    expected.backward()
    total = torch.zeros(1000, 128, device="cuda")
    for sums in (None, total):
        hidden.grad = head.grad = None
        loss = linear_cross_entropy(hidden, head, target, weight, 1e-4, 128, sums)
        loss.backward()
        assert relative(loss, expected) < 1e-4
        assert relative(hidden.grad, wide[0].grad) < 1e-2
        assert relative(head.grad if sums is None else total, wide[1].grad) < 1e-2


def test_add_gradients():
    counts = [1, 7, 8, 4099, 8192, 8193, 100_000, *range(1, 120)]
    totals = [torch.randn(count, device="cuda") for count in counts]
    gradients = [torch.randn(count, device="cuda").bfloat16() for count in counts]
    totals.append(torch.randn(9, device="cuda")[1:]), gradients.append(torch.randn(8, device="cuda").bfloat16())
    expected = [total + gradient.float() for total, gradient in zip(totals, gradients, strict=True)]
    add_gradients(totals, gradients)
    assert all(torch.equal(*pair) for pair in zip(totals, expected, strict=True))


def _steps(
    graphs: bool, compiled: bool, window: int | str, precision: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    shape = ModelShape.official(3, 128, 512)
    torch.set_default_dtype(precision)
    model = RWKV7(shape, "auto", False, 64 if compiled else 0).cuda()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(3)
    weights = {n: w + 0.03 * torch.randn(w.shape, generator=generator) for n, w in init_weights(shape, 1).items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    settings = ModelConfig(n_layer=3, n_embd=128, ctx_len=64)
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), settings), settings)
    engine = LocalEngine(model, settings, graphs=graphs)
    options = StepOptions(64, window, -1, 1 << 30, 2, 2)
    losses = []
    for step in range(5):
        batches = []
        for micro in range(2):
            g = torch.Generator().manual_seed(10 * step + micro)
            length = 64 * 5 + 17
            ids = torch.randint(0, 512, (2, length + 1), generator=g)
            reset = torch.zeros(2, length, dtype=torch.bool)
            reset[:, 0] = True
            reset[1, 100] = True
            batches.append(Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, length), reset, (length, length)))
        result = run_step(
            engine, batches, [None, None], options, device=torch.device("cuda"), world_size=1, gather=lambda x: [x]
        )
        losses.append(float(torch.stack(result.losses).sum()))
        if step < 4:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {n: g.clone() for n, g in optimizer.gradients().items()}


def test_graphs_are_close():
    for window in (1, "full"):
        plain_losses, plain = _steps(False, False, window, torch.bfloat16)
        losses, grads = _steps(True, False, window, torch.bfloat16)
        # Not the same bits: under capture the matrix library may choose another split of a product.
        worst = max(abs(a - b) / b for a, b in zip(losses, plain_losses, strict=True))
        assert worst < 1e-4, (window, losses, plain_losses)
        for name, gradient in plain.items():
            if gradient.any():
                assert relative(grads[name], gradient) < 5e-2, (window, name, relative(grads[name], gradient))


def test_compiled_blocks_are_close():
    _, plain = _steps(False, False, "full", torch.float32)
    _, compiled = _steps(True, True, "full", torch.float32)
    for name, gradient in plain.items():
        if gradient.any():
            assert relative(compiled[name], gradient) < 5e-3, (name, relative(compiled[name], gradient))


def main() -> int:
    failed = 0
    for name, check in list(globals().items()):
        if name.startswith("test_"):
            try:
                check()
                print("PASS", name)
            except AssertionError as error:
                failed += 1
                print("FAIL", name, str(error)[:300])
    return failed


if __name__ == "__main__":
    sys.exit(main())
