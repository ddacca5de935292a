"""The network against golden values made with the official code: logits, states, and every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.checkpoint.read import read_weights
from trainer.model.naming import shape_from_weights
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import LayerState, ModelState
from trainer.ops.loss import linear_cross_entropy

VECTORS = Path(__file__).parents[1] / "fixtures" / "vectors"
UNUSED = {f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")}
# Stored outputs are float64; stored gradients are float32.
OUTPUT_TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-11}, torch.float32: {"rtol": 0, "atol": 2e-5}}
GRAD_TOLERANCE = {torch.float64: {"rtol": 1e-6, "atol": 1e-8}, torch.float32: {"rtol": 1e-4, "atol": 1e-6}}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
kernels = pytest.mark.parametrize("kernel", ["chunked", "reference"])


def golden(name: str) -> dict[str, Tensor]:
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def tiny_model(dtype: torch.dtype, kernel: str = "chunked", checkpoint_blocks: bool = False) -> RWKV7:
    weights = read_weights(VECTORS / "tiny_L2_D128_V256.pth")
    model = RWKV7(shape_from_weights(weights), kernel, checkpoint_blocks)
    model.load_state_dict(weights)
    return model.to(dtype)


def state_from(shift: Tensor, wkv: Tensor) -> ModelState:
    """From the official arrays: shift [L, 2, C] (attention, feed-forward), wkv [L, H, value, key]."""
    return tuple(LayerState(shift[i, 0][None], shift[i, 1][None], wkv[i][None]) for i in range(len(wkv)))


def stacked(state: ModelState) -> tuple[Tensor, Tensor]:
    """The same arrays from a state with one row."""
    shift = torch.stack([torch.cat((layer.shift_att, layer.shift_ffn)) for layer in state])
    return shift, torch.cat([layer.wkv for layer in state])


def assert_grads(model: RWKV7, wanted: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, expected in wanted.items():
        torch.testing.assert_close(
            grads[name].double(),
            expected.double(),
            **GRAD_TOLERANCE[dtype],
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert all(grads[name] is None for name in UNUSED)


@dtypes
@kernels
def test_forward(kernel, dtype):
    vectors, model = golden("tiny_forward"), tiny_model(dtype, kernel)
    with torch.no_grad():
        hidden, state = model(vectors["tokens"][None])
        logits = model.head(hidden)[0].double()
    shift, wkv = stacked(state)
    torch.testing.assert_close(logits, vectors["logits64"], **OUTPUT_TOLERANCE[dtype])
    torch.testing.assert_close(shift.double(), vectors["final_shift"], **OUTPUT_TOLERANCE[dtype])
    torch.testing.assert_close(wkv.double(), vectors["final_wkv"], **OUTPUT_TOLERANCE[dtype])
    loss = F.cross_entropy(logits, vectors["targets"])
    assert loss.item() == pytest.approx(vectors["loss"].item(), abs=1e-10 if dtype == torch.float64 else 1e-6)


@kernels
def test_forward_in_bfloat16(kernel):
    vectors, model = golden("tiny_forward"), tiny_model(torch.bfloat16, kernel)
    with torch.no_grad():
        hidden, state = model(vectors["tokens"][None])
        error = model.head(hidden)[0].double() - vectors["logits64"]
    assert error.square().mean().sqrt() <= 0.012
    # The largest of 17920 errors moves between 0.045 and 0.075 with any change of rounding order.
    assert error.abs().flatten().kthvalue(17900).values <= 0.045
    assert error.abs().max() <= 0.08
    assert {layer.wkv.dtype for layer in state} == {torch.float32}
    assert {layer.shift_att.dtype for layer in state} == {torch.bfloat16}


def backward_of_loss(model: RWKV7, l2wrap: float) -> None:
    vectors = golden("tiny_forward")
    hidden, _ = model(vectors["tokens"][None])
    weight = torch.full((70,), 1 / 70, dtype=hidden.dtype)
    linear_cross_entropy(hidden[0], model.head.weight, vectors["targets"], weight, l2wrap, slice_rows=16).backward()


@dtypes
@kernels
def test_gradients_of_the_loss(kernel, dtype):
    vectors, model = golden("tiny_grads"), tiny_model(dtype, kernel)
    backward_of_loss(model, l2wrap=0.0)
    wanted = {key.removeprefix("ce/"): value for key, value in vectors.items() if key.startswith("ce/")}
    assert set(wanted) | UNUSED == {name for name, _ in model.named_parameters()}
    assert_grads(model, wanted, dtype)


@dtypes
def test_gradients_of_the_loss_and_the_penalty(dtype):
    vectors, model = golden("tiny_grads"), tiny_model(dtype)
    backward_of_loss(model, l2wrap=1e-4)
    names = [key.removeprefix("l2/") for key in vectors if key.startswith("l2/")]
    assert set(names) == {"head.weight", "ln_out.weight", "ln_out.bias", "emb.weight"}
    assert_grads(model, {name: vectors[f"ce/{name}"] + vectors[f"l2/{name}"] for name in names}, dtype)


def test_gradient_of_the_penalty_alone():
    vectors, with_penalty, without = golden("tiny_grads"), tiny_model(torch.float64), tiny_model(torch.float64)
    backward_of_loss(with_penalty, l2wrap=1e-4)
    backward_of_loss(without, l2wrap=0.0)
    for name in ("head.weight", "ln_out.weight", "ln_out.bias", "emb.weight"):
        found = with_penalty.get_parameter(name).grad - without.get_parameter(name).grad
        torch.testing.assert_close(found, vectors[f"l2/{name}"].double(), rtol=1e-5, atol=1e-11)


@dtypes
@pytest.mark.parametrize("pieces", [[70], [16, 48, 6], [1, 15, 17, 37]], ids=str)
@pytest.mark.parametrize("checkpoint_blocks", [False, True], ids=["kept", "recomputed"])
def test_state_in_and_out(checkpoint_blocks, pieces, dtype):
    """From a given state to a loss on the outputs and on the final state, in any pieces, with all gradients."""
    vectors, tokens = golden("tiny_state_io"), golden("tiny_forward")
    model = tiny_model(dtype, checkpoint_blocks=checkpoint_blocks)
    shift0, wkv0 = (vectors[key].to(dtype).requires_grad_() for key in ("shift0", "wkv0"))
    state, hidden = state_from(shift0, wkv0), []
    for ids in tokens["tokens"].split(pieces):
        piece, state = model(ids[None], state)
        hidden.append(piece[0])
    logits = model.head(torch.cat(hidden))
    shift, wkv = stacked(state)
    loss = F.cross_entropy(logits, tokens["targets"])
    on_state = (shift * vectors["cot_shift"]).sum() / 100 + (wkv * vectors["cot_wkv"]).sum() / 100
    (loss + on_state).backward()

    close = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(logits.double(), vectors["logits"], **close)
    torch.testing.assert_close(shift.double(), vectors["final_shift"], **close)
    torch.testing.assert_close(wkv.double(), vectors["final_wkv"], **close)
    torch.testing.assert_close(loss.double(), vectors["loss_ce"], **close)
    torch.testing.assert_close((loss + on_state).double(), vectors["objective"], **close)
    torch.testing.assert_close(shift0.grad.double(), vectors["d_shift0"].double(), **GRAD_TOLERANCE[dtype])
    torch.testing.assert_close(wkv0.grad.double(), vectors["d_wkv0"].double(), **GRAD_TOLERANCE[dtype])
    assert_grads(model, golden("tiny_state_grads"), dtype)


def test_state_is_value_by_key():
    vectors, tokens, model = golden("tiny_state_io"), golden("tiny_forward")["tokens"], tiny_model(torch.float64)
    shift0, wkv0 = vectors["shift0"].double(), vectors["wkv0"].double()
    with torch.no_grad():
        transposed = model.head(model(tokens[None], state_from(shift0, wkv0.mT.contiguous()))[0])[0]
    assert (transposed - vectors["logits"]).abs().max() > 0.01
