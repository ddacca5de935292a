"""A tuned state teaches a frozen model facts that nothing in the text says."""

from __future__ import annotations

import torch

from trainer.bptt.step import StepOptions, run_step
from trainer.config import ModelConfig
from trainer.config.adapters import StateTuning
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.train.adapter import freeze
from trainer.train.local_engine import LocalEngine
from trainer.train.optim import MasterAdamW, parameter_groups
from trainer.types import Batch

SHAPE = ModelShape.official(2, 64, 48, head_size=32)
CTX, TOKENS = 16, 36
SETTINGS = ModelConfig(state_tuning={}, ctx_len=CTX, lr_init=0.03, adam_eps=1e-8, l2wrap=0.0)


def make_rows(number: int, seed: int) -> Batch:
    """Noise over three chunks; the last of 4 question tokens has an answer that is said nowhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 48, (number, TOKENS), generator=generator)
    ids[:, -1] = torch.arange(number) % 4
    weight = torch.zeros(number, TOKENS)
    weight[:, -1] = 1
    targets = torch.zeros_like(ids)
    targets[:, -1] = ids[:, -1] + 4
    reset = torch.zeros(number, TOKENS, dtype=torch.bool)
    reset[:, 0] = True
    return Batch(ids, targets, weight, reset, (TOKENS,) * number)


@torch.no_grad()
def recall(model: RWKV7) -> float:
    rows = make_rows(64, 99)
    hidden, _ = model(rows.ids_BT)
    return float((model.head(hidden[:, -1]).argmax(-1) == rows.targets_BT[:, -1]).float().mean())


def test_state_tuning_learns_what_the_frozen_model_cannot_know():
    model = RWKV7(SHAPE, "chunked", tuning=StateTuning())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weights = init_weights(SHAPE, 1)
        for name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(weights[name] + noise if name in weights else torch.zeros_like(noise))
            # A model that keeps its state over three chunks and reads it more loudly than the noise before the question.
            if name.endswith("att.w0"):
                parameter.fill_(-8.0)
            if name.endswith("att.value.weight"):
                parameter.mul_(0.02)
            if name.endswith("att.output.weight"):
                parameter.mul_(3.0)
            if name == "emb.weight":
                parameter.normal_(generator=generator)
    freeze(model, SETTINGS)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert recall(model) < 0.6
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), SETTINGS), SETTINGS)
    engine, options = LocalEngine(model, SETTINGS, graphs=False), StepOptions(CTX, "full", -1, 1 << 30, 1, 16)
    for step in range(80):
        run_step(
            engine, [make_rows(16, step)], [None], options, device=torch.device("cpu"), world_size=1, gather=lambda x: [x]
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    assert recall(model) == 1.0
    assert all(p.equal(frozen[name]) for name, p in model.named_parameters() if name in frozen)
