"""Ten optimizer steps against a trace made with the official rules, and official learning rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.read import read_weights
from trainer.config.schema import ModelConfig
from trainer.model.naming import shape_from_weights
from trainer.model.rwkv7 import RWKV7
from trainer.ops.loss import linear_cross_entropy
from trainer.train.optim import MasterAdamW, clip_by_global_norm, parameter_groups
from trainer.train.schedule import Position, Schedule

VECTORS = Path(__file__).parents[1] / "fixtures" / "vectors"
TRACE = json.loads((VECTORS / "tiny_train_trace.json").read_text())
HYPER = TRACE["hyper"]
TOKENS_PER_STEP = HYPER["bsz"] * HYPER["ctx_len"]
# Relative to: the loss, the norm, and the sum of magnitudes of each parameter.
TOLERANCE = {torch.float64: (1e-10, 1e-10, 1e-11), torch.float32: (1e-6, 1e-5, 5e-7)}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def settings(**changes) -> ModelConfig:
    names = ("lr_init", "lr_final", "warmup_steps", "weight_decay", "grad_clip")
    official = {name: HYPER[name] for name in names}
    beta1, beta2 = HYPER["betas"]
    return ModelConfig(**(official | {"beta1": beta1, "beta2": beta2, "adam_eps": HYPER["eps"]} | changes))


def tiny_model(dtype: torch.dtype) -> RWKV7:
    weights = read_weights(VECTORS / "tiny_L2_D128_V256.pth")
    model = RWKV7(shape_from_weights(weights), "chunked")
    model.load_state_dict(weights)
    return model.to(dtype)


def position(step: int, warmup_steps: int, tokens_per_step: int) -> Position:
    return Position(step, step * tokens_per_step, warmup_steps * tokens_per_step)


def train(model: RWKV7, config: ModelConfig) -> list[dict[str, float]]:
    """Learning rate, loss and norm before clipping of each step; the model is trained in place."""
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), config), config)
    schedule = Schedule.from_config(config, max_tokens=HYPER["my_exit_tokens"], max_steps=-1)
    steps = []
    for index, rows in enumerate(TRACE["data"][: len(TRACE["steps"])]):
        lr = schedule.lr(position(index, config.warmup_steps, TOKENS_PER_STEP))
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        tokens = torch.tensor(rows)
        hidden, _ = model(tokens[:, :-1])
        weight = torch.full((TOKENS_PER_STEP,), 1 / TOKENS_PER_STEP, dtype=hidden.dtype)
        targets = tokens[:, 1:].flatten()
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.head.weight, targets, weight, config.l2wrap)
        loss.backward()
        norm = clip_by_global_norm(list(optimizer.gradients().values()), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"lr": lr, "loss": loss.item(), "grad_norm": norm.item()})
    return steps


def largest_difference(model: RWKV7) -> float:
    """Between the sums of each parameter and those of the trace, relative to its sum of magnitudes."""
    sums = TRACE["final_param_sums"]
    assert set(sums) == {name for name, _ in model.named_parameters()}
    return max(
        abs(parameter.double().sum().item() - sums[name]["sum"]) / sums[name]["abs_sum"]
        for name, parameter in model.named_parameters()
    )


@dtypes
def test_ten_steps(dtype):
    model = tiny_model(dtype)
    loss_tolerance, norm_tolerance, sum_tolerance = TOLERANCE[dtype]
    for found, wanted in zip(train(model, settings()), TRACE["steps"], strict=True):
        assert found["lr"] == pytest.approx(wanted["lr"], rel=1e-12)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=loss_tolerance)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=norm_tolerance)
    assert largest_difference(model) <= sum_tolerance
    start = tiny_model(dtype)
    for name in ("v0", "v1", "v2"):  # of block 0: never used, never moved
        unused = f"blocks.0.att.{name}"
        assert torch.equal(model.get_parameter(unused), start.get_parameter(unused))


@pytest.mark.parametrize("change", [{"adam_eps": 1e-8}, {"weight_decay": 0.0}, {"l2wrap": 0.0}], ids=str)
def test_the_sums_notice_a_wrong_setting(change):
    model = tiny_model(torch.float32)
    train(model, settings(**change))
    assert largest_difference(model) > 2 * TOLERANCE[torch.float32][2]


def test_groups():
    groups = parameter_groups(tiny_model(torch.float32).named_parameters(), settings())
    found = [{"wd": group["weight_decay"], "scale": group["lr_scale"], "names": group["names"]} for group in groups]
    assert found == TRACE["groups"]
    assert [group["lr"] for group in groups] == [0.001, 0.002, 0.001]


def test_without_weight_decay_there_is_no_such_group():
    groups = parameter_groups(tiny_model(torch.float32).named_parameters(), settings(weight_decay=0.0))
    ordinary, double, decayed = (group["names"] for group in TRACE["groups"])
    assert [group["names"] for group in groups] == [sorted(ordinary + decayed), double]


def test_official_learning_rates():
    golden = json.loads((VECTORS / "sampling_lr.json").read_text())["lr"]
    args, tokens_per_step = golden["args"], golden["args"]["ctx"] * golden["args"]["bsz"]
    config = ModelConfig(lr_init=args["lr_init"], lr_final=args["lr_final"], warmup_steps=args["warmup"])
    schedule = Schedule.from_config(config, max_tokens=args["exit_tokens"], max_steps=-1)
    for step, wanted in golden["steps"].items():
        assert schedule.lr(position(int(step), args["warmup"], tokens_per_step)) == pytest.approx(wanted, rel=1e-12)
