"""The state as a value: any number of tokens, any cuts, any model size, documents apart from each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import LayerState, ModelState, detach_state, map_state, state_tensors, zero_state

SHAPES = {
    "one_block": ModelShape.official(1, 64, 48),
    "heads_of_16": ModelShape.official(2, 32, 48, head_size=16),
    "heads_of_32": ModelShape.official(3, 64, 48, head_size=32),
    "other_ranks": ModelShape.official(2, 32, 50, head_size=16, dim_ffn=80, ranks={"w": 8, "a": 5, "v": 3, "g": 7}),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
kernels = pytest.mark.parametrize("kernel", ["chunked", "reference"])


def make_model(shape: ModelShape, kernel: str = "chunked", dtype: torch.dtype = torch.float64) -> RWKV7:
    generator = torch.Generator().manual_seed(1)
    model = RWKV7(shape, kernel)
    # Official initial weights are zero in places, which would hide what does not reach the output.
    model.load_state_dict(
        {
            name: value + 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in init_weights(shape, 0).items()
        }
    )
    return model.to(dtype)


def random_state(shape: ModelShape, batch: int, dtype: torch.dtype = torch.float64) -> ModelState:
    generator = torch.Generator().manual_seed(2)
    zero = zero_state(batch, shape.n_layer, shape.n_embd, shape.head_size, "cpu", dtype)
    return map_state(lambda x: torch.randn(x.shape, generator=generator).to(x.dtype), zero)


def random_ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 48, (batch, tokens), generator=torch.Generator().manual_seed(3))


def assert_states_close(found: ModelState, wanted: ModelState, tolerance: float = 1e-12) -> None:
    for left, right in zip(state_tensors(found), state_tensors(wanted), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


@shapes
@kernels
def test_one_token_at_a_time(kernel, shape):
    model, ids, state = make_model(shape, kernel), random_ids(2, 21), random_state(shape, 2)
    whole, end = model(ids, state)
    outputs = []
    for token in ids.split(1, 1):
        hidden, state = model(token, state)
        outputs.append(hidden)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-11, atol=1e-11)
    assert_states_close(state, end, 1e-11)


@shapes
@kernels
def test_no_tokens(kernel, shape):
    model, state = make_model(shape, kernel), random_state(shape, 2)
    hidden, after = model(random_ids(2, 0), state)
    assert hidden.shape == (2, 0, shape.n_embd)
    assert_same_bits(state_tensors(after), state_tensors(state))
    assert_same_bits(state_tensors(model(random_ids(2, 0))[1]), state_tensors(model.zero_state(2)))


@shapes
def test_backends_agree(shape):
    ids, state = random_ids(2, 35), random_state(shape, 2)
    hidden, after = make_model(shape, "chunked")(ids, state)
    wanted, wanted_after = make_model(shape, "reference")(ids, state)
    torch.testing.assert_close(hidden, wanted, rtol=1e-11, atol=1e-11)
    assert_states_close(after, wanted_after, 1e-11)


@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pieces_of_whole_chunks_give_the_same_bits(dtype, shape):
    """A document cut at multiples of 16 tokens is one pass: outputs, wkv and both shifts."""
    model, ids, state = make_model(shape, dtype=dtype), random_ids(2, 100), random_state(shape, 2, dtype)
    whole, end = model(ids, state)
    outputs = []
    for piece in ids.split([32, 0, 48, 20], 1):
        hidden, state = model(piece, state)
        outputs.append(hidden)
    assert_same_bits([torch.cat(outputs, 1), *state_tensors(state)], [whole, *state_tensors(end)])


def test_gradients_cross_the_cut():
    shape = SHAPES["heads_of_16"]
    ids, gradients = random_ids(1, 40), []
    for cuts in ([40], [16, 24], [7, 1, 32]):
        model = make_model(shape)
        start = map_state(lambda x: x.requires_grad_(), random_state(shape, 1))
        state, total = start, torch.zeros((), dtype=torch.float64)
        for piece in ids.split(cuts, 1):
            hidden, state = model(piece, state)
            total = total + hidden.square().mul(torch.linspace(-1, 1, shape.n_embd)).sum()
        total = total + sum(x.square().sum() for x in state_tensors(state))
        used = [parameter for name, parameter in model.named_parameters() if name != "head.weight"]
        gradients.append(torch.autograd.grad(total, [*state_tensors(start), *used], materialize_grads=True))
    for other in gradients[1:]:
        for found, wanted in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert all(gradient.any() for gradient in gradients[0][: 3 * shape.n_layer])


@shapes
@kernels
def test_a_reset_starts_a_new_document(kernel, shape):
    model, state = make_model(shape, kernel), random_state(shape, 2)
    ids, reset = random_ids(2, 30), torch.zeros(2, 30, dtype=torch.bool)
    reset[0, 0] = reset[0, 11] = reset[1, 16] = reset[1, 29] = True
    hidden, after = model(ids, state, reset)
    first, _ = model(ids[:1, :11])
    second, second_end = model(ids[:1, 11:])
    torch.testing.assert_close(hidden[:1], torch.cat((first, second), 1), rtol=1e-11, atol=1e-11)
    assert_states_close(map_state(lambda x: x[:1], after), second_end, 1e-11)
    own_state = map_state(lambda x: x[1:], state)
    parts = [model(ids[1:, :16], own_state)[0], model(ids[1:, 16:29])[0], model(ids[1:, 29:])[0]]
    torch.testing.assert_close(hidden[1:], torch.cat(parts, 1), rtol=1e-11, atol=1e-11)


def test_rows_are_apart():
    shape = SHAPES["heads_of_32"]
    model, ids, state = make_model(shape), random_ids(3, 20), random_state(shape, 3)
    hidden, _ = model(ids, state)
    alone, _ = model(ids[1:2], map_state(lambda x: x[1:2], state))
    torch.testing.assert_close(hidden[1:2], alone, rtol=1e-12, atol=1e-12)


def test_a_given_state_is_not_changed():
    shape = SHAPES["heads_of_16"]
    model, state = make_model(shape), random_state(shape, 1)
    before = [x.clone() for x in state_tensors(state)]
    model(random_ids(1, 20), state)
    assert_same_bits(state_tensors(state), before)


@pytest.mark.parametrize(
    ("dtype", "wkv_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_dtypes(dtype, wkv_dtype):
    model = make_model(SHAPES["heads_of_16"], dtype=dtype)
    hidden, state = model(random_ids(1, 5))
    assert hidden.dtype == dtype
    for layer in (*state, *model.zero_state(1)):
        assert (layer.shift_att.dtype, layer.shift_ffn.dtype, layer.wkv.dtype) == (dtype, dtype, wkv_dtype)
    assert state[0].wkv.shape == (1, 2, 16, 16)


def test_detached_state_has_the_numbers_and_no_graph():
    _, state = make_model(SHAPES["heads_of_16"])(random_ids(1, 5))
    assert state[0].wkv.requires_grad
    detached = detach_state(state)
    assert not any(x.requires_grad for x in state_tensors(detached))
    assert_same_bits(state_tensors(detached), state_tensors(state))
    assert isinstance(detached[0], LayerState)


def test_recomputed_blocks_give_the_same_gradients():
    shape, gradients = SHAPES["heads_of_32"], []
    for is_recomputed in (False, True):
        model = make_model(shape)
        model.checkpoint_blocks = is_recomputed
        hidden, state = model(random_ids(2, 35), random_state(shape, 2))
        (hidden.sin().sum() + sum(x.sin().sum() for x in state_tensors(state))).backward()
        gradients.append([parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None])
    assert_same_bits(*gradients)
    assert len(gradients[0]) == len(list(model.parameters())) - 4  # head, and v0, v1, v2 of block 0


def test_width_must_hold_whole_heads():
    with pytest.raises(
        ConfigError, match="n_embd: not divisible into heads; found 100; must be a multiple of head_size 64"
    ):
        ModelShape.official(1, 100, 48)
