"""Gradients of adapters and of a trained initial state through many chunks, against differences of losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.bptt.step import StepOptions, run_step
from trainer.config import ModelConfig
from trainer.config.adapters import LoraSettings, StateTuning
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.train.adapter import freeze
from trainer.train.local_engine import LocalEngine
from trainer.types import Batch

SHAPE = ModelShape.official(2, 32, 48, head_size=16)
CTX = 16


def make_model(settings: ModelConfig, grad_cp: bool, **kinds) -> RWKV7:
    model = RWKV7(SHAPE, "chunked", grad_cp, **kinds).double()
    generator = torch.Generator().manual_seed(1)
    weights = init_weights(SHAPE, 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(weights.get(name, torch.zeros(tensor.shape)).double() + noise)
    freeze(model, settings)
    return model


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    lengths = (75, 75, 40, 10)
    ids = torch.randint(0, 48, (4, 75), generator=generator)
    weight = (torch.arange(75) < torch.tensor(lengths)[:, None]).float()
    reset = torch.zeros(4, 75, dtype=torch.bool)
    reset[:, 0] = True
    return Batch(ids, ids.roll(-1, 1), weight, reset, lengths)


def loss_of(model: RWKV7, settings: ModelConfig, batch: Batch, ctx_len: int = CTX, host_bytes: int = 1 << 30) -> float:
    for parameter in model.parameters():
        parameter.grad = None
    options = StepOptions(ctx_len, "full", -1, host_bytes, 1, 4, seed="some step" if model.has_dropout else None)
    engine = LocalEngine(model, settings, graphs=False)
    result = run_step(
        engine, [batch], [None], options, device=torch.device("cpu"), world_size=1, gather=lambda numbers: [numbers]
    )
    return float(sum(result.losses))


def trained(model: RWKV7) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


KINDS = {
    "lora": (ModelConfig(lora={}), {"lora": LoraSettings(r=4, dropout=0.3)}),
    "pissa": (ModelConfig(lora={}), {"lora": LoraSettings(r=4, alpha=4, init="pissa", targets=("att.value",))}),
    "state": (ModelConfig(state_tuning={}), {"tuning": StateTuning(shifts=True)}),
}


@pytest.mark.parametrize("grad_cp", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_slope_of_the_loss(kind, grad_cp):
    """Also with dropout: replayed and recomputed chunks drop what the first pass has dropped."""
    settings, kinds = KINDS[kind]
    settings = ModelConfig(**{**vars(settings), "l2wrap": 0.0, "ctx_len": CTX})
    model, batch = make_model(settings, grad_cp, **kinds), make_batch()
    before = torch.get_rng_state()
    loss_of(model, settings, batch, host_bytes=1)
    assert torch.get_rng_state().equal(before)
    gradients = {name: p.grad.clone() for name, p in trained(model).items()}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen
    assert all(p.grad is None for p in frozen)
    generator = torch.Generator().manual_seed(3)
    directions = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in trained(model).items()
    }
    losses = []
    for step in (1e-5, -2e-5):
        for name, parameter in trained(model).items():
            parameter.data += step * directions[name]
        losses.append(loss_of(model, settings, batch))
    parts = {name: float((gradients[name] * direction).sum()) for name, direction in directions.items()}
    assert all(abs(part) > 1e-6 for part in parts.values())
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(sum(parts.values()), rel=1e-5)


def test_a_trained_state_has_one_gradient_however_documents_are_cut():
    settings = ModelConfig(state_tuning={}, ctx_len=CTX)
    model, batch = make_model(settings, True, tuning=StateTuning(shifts=True)), make_batch()
    grads = []
    for ctx_len in (CTX, 32, 80):
        loss_of(model, settings, batch, ctx_len)
        grads.append({name: p.grad.clone() for name, p in trained(model).items()})
    assert sorted(grads[0]) == ["shift_state", "time_state"]
    for name in grads[0]:
        for other in grads[1:]:
            torch.testing.assert_close(grads[0][name], other[name], rtol=1e-10, atol=1e-14)
