"""Resizing, new token rows, merging: what stays the same, what the new entries are, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.read import read_weights
from trainer.errors import CheckpointError, ConfigError
from trainer.model.init import init_weights, initial_tensor
from trainer.model.lazy import LazyWeights
from trainer.model.naming import ModelShape, parameter_shapes, shape_from_weights
from trainer.model.rwkv7 import RWKV7
from trainer.model.surgery import block_sources, merged, resized, with_token_rows

TINY = Path(__file__).parents[1] / "fixtures" / "vectors" / "tiny_L2_D128_V256.pth"
SHAPE = ModelShape.official(2, 128, 256)


@pytest.fixture(scope="module")
def weights():
    return {name: tensor.float() for name, tensor in read_weights(TINY).items()}


def logits(weights, dtype=torch.float32):
    model = RWKV7(shape_from_weights(weights), "reference").to(dtype)
    model.load_state_dict(dict(weights))
    ids = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.head(model(ids)[0])


def test_single_initial_tensors_have_the_bits_of_the_whole():
    shape = ModelShape.official(2, 64, 300)
    whole = init_weights(shape, seed=3)
    for name, tensor in whole.items():
        assert torch.equal(initial_tensor(shape, name, 3), tensor), name


@pytest.mark.parametrize(
    ("old", "new", "sources"),
    [
        (2, 5, [(0, False), (0, True), (0, True), (1, False), (1, True)]),
        (3, 4, [(0, False), (0, True), (1, False), (2, False)]),
        (1, 2, [(0, False), (0, True)]),
        (5, 3, [(0, False), (2, False), (4, False)]),
        (4, 1, [(0, False)]),
        (3, 3, [(0, False), (1, False), (2, False)]),
    ],
)
def test_where_blocks_come_from(old, new, sources):
    assert block_sources(old, new) == sources


@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 3},
        {"n_layer": 7},
        {"dim_ffn": 640},
        {"rank_w": 48, "rank_a": 40, "rank_v": 64, "rank_g": 96},
        {"n_layer": 4, "dim_ffn": 1024, "rank_g": 65},
    ],
)
def test_larger_models_of_the_same_width_give_the_same_logits(weights, change):
    shape = replace(SHAPE, **change)
    larger = resized(weights, shape)
    assert {name: tuple(tensor.shape) for name, tensor in larger.items()} == parameter_shapes(shape)
    # In float32 the sums over more hidden units differ by rounding.
    dtype = torch.float32 if set(change) == {"n_layer"} else torch.float64
    found = logits(larger, dtype)
    assert found.std() > 0.5
    torch.testing.assert_close(found, logits(weights, dtype), rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


def test_new_entries_can_learn(weights):
    """No new entry that the forward pass reads is cut off for ever: after one step of descent all have gradients."""
    shape = replace(SHAPE, n_layer=3, dim_ffn=640, rank_w=40, rank_g=80)
    model = RWKV7(shape, "reference")
    model.load_state_dict(dict(resized(weights, shape)))
    ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.zero_grad()
        output = model.head(model(ids)[0])
        torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    new = {
        "extra block": model.blocks[1].att.receptance.weight.grad,
        "ffn rows": model.blocks[0].ffn.key.weight.grad[512:],
        "rank of w": model.blocks[0].att.w2.grad[32:],
        "rank of g": model.blocks[0].att.g1.grad[:, 64:],
    }
    assert all(gradient.abs().max() > 0 for gradient in new.values()), new
    columns = new["rank of g"].T
    assert not torch.allclose(columns[0], columns[1])


def test_wider_models_keep_old_channels_and_whole_heads(weights):
    shape = replace(SHAPE, n_embd=256, dim_ffn=1024)
    wider = resized(weights, shape)
    assert shape_from_weights(wider.shapes) == shape
    for name, old in weights.items():
        corner = tuple(slice(size) for size in old.shape)
        assert torch.equal(wider[name][corner], old), name
    key = wider["blocks.1.att.key.weight"]
    assert not key[:128, 128:].any()
    assert key[128:].abs().min(1).values.max() > 0
    assert not wider["blocks.1.att.output.weight"][:, 128:].any()
    assert not wider["blocks.1.ffn.value.weight"][:, 512:].any()
    assert not wider["head.weight"][:, 128:].any()
    assert not wider["blocks.1.att.g1"][128:, :64].any()
    torch.testing.assert_close(wider["blocks.1.att.k_a"][..., 128:], torch.full((1, 1, 128), 1.02))
    fresh = init_weights(shape, 0)
    assert torch.equal(wider["blocks.1.att.r_k"][2:], fresh["blocks.1.att.r_k"][2:])
    assert torch.equal(wider["blocks.0.att.w0"][..., 128:], fresh["blocks.0.att.w0"][..., 128:])
    assert logits(wider).isfinite().all()


def test_copied_and_fresh_blocks(weights):
    shape = replace(SHAPE, n_layer=4)
    copied = resized(weights, shape, "copy")
    assert torch.equal(copied["blocks.3.att.output.weight"], weights["blocks.1.att.output.weight"])
    assert torch.equal(copied["blocks.1.att.key.weight"], weights["blocks.0.att.key.weight"])
    # Block 0 has no value gate that was ever trained.
    assert torch.equal(copied["blocks.1.att.v2"], init_weights(shape, 0)["blocks.1.att.v2"])
    assert torch.equal(copied["blocks.3.att.v2"], weights["blocks.1.att.v2"])
    fresh = resized(weights, shape, "fresh", seed=5)
    assert torch.equal(fresh["blocks.1.att.key.weight"], init_weights(shape, 5)["blocks.1.att.key.weight"])
    assert torch.equal(fresh["blocks.2.att.key.weight"], weights["blocks.1.att.key.weight"])
    torch.testing.assert_close(logits(fresh), logits(weights), rtol=0, atol=1e-6)


def test_fewer_blocks_keep_the_first_and_the_last(weights):
    deeper = resized(weights, replace(SHAPE, n_layer=5), "copy")
    fewer = resized(deeper, SHAPE)
    assert all(torch.equal(fewer[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"n_embd": 64}, "--n_embd: cannot shrink; found 64; must be at least 128"),
        ({"rank_g": 32}, "--rank_g: cannot shrink"),
        ({"dim_ffn": 256}, "--dim_ffn: cannot shrink"),
        ({"vocab_size": 300}, "add_tokens.py"),
    ],
)
def test_what_cannot_be_resized_is_refused(weights, change, mention):
    with pytest.raises(ConfigError, match=mention):
        resized(weights, replace(SHAPE, **change))


def test_new_token_rows_are_the_mean_of_those_before(weights):
    extended = with_token_rows(weights, 250, 10)
    assert shape_from_weights(extended.shapes) == replace(SHAPE, vocab_size=260)
    for name in ("emb.weight", "head.weight"):
        assert torch.equal(extended[name][:250], weights[name][:250])
        wanted = weights[name][1:250].mean(0).expand(10, -1)
        torch.testing.assert_close(extended[name][250:], wanted)
    assert extended["ln_out.weight"] is weights["ln_out.weight"]
    assert with_token_rows(weights, 250, 2).shapes["emb.weight"] == (256, 128)
    torch.testing.assert_close(with_token_rows(weights, 250, 2)["emb.weight"][252:], weights["emb.weight"][252:])


def test_token_rows_of_another_tokenizer_are_refused(weights):
    with pytest.raises(ConfigError, match="knows 300 tokens, the model 256"):
        with_token_rows(weights, 300, 1)


def test_merging_is_the_weighted_mean(weights):
    other = {name: tensor + 1 for name, tensor in weights.items()}
    third = {name: tensor - 2 for name, tensor in weights.items()}
    mean = merged([weights, other, third], [1, 2, 1], ["a", "b", "c"])
    for name, tensor in weights.items():
        torch.testing.assert_close(mean[name], tensor + 0.5 - 0.5, rtol=0, atol=1e-6)
    half = merged([weights, other], [3, 1], ["a", "b"])
    torch.testing.assert_close(half["emb.weight"], weights["emb.weight"] + 0.25, rtol=0, atol=1e-6)


def test_merging_equal_models_gives_the_same_bits(weights):
    mean = merged([weights, dict(weights)], [0.3, 0.6], ["a", "b"])
    assert all(torch.equal(mean[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("parts", "mention"), [([1.0], "1 numbers for 2 models"), ([1.0, 0.0], "above 0"), ([1.0, float("nan")], "above 0")]
)
def test_wrong_parts_are_refused(weights, parts, mention):
    with pytest.raises(ConfigError, match=mention):
        merged([weights, weights], parts, ["a", "b"])


def test_models_of_other_shapes_are_refused(weights):
    with pytest.raises(CheckpointError, match=r"b.pth: has rank_g 70 where a.pth has 64"):
        merged([weights, resized(weights, replace(SHAPE, rank_g=70))], [1, 1], ["a.pth", "b.pth"])


def test_lazy_weights_make_one_tensor_at_a_time():
    made = []
    lazy = LazyWeights({"a": (2,), "b": (3,)}, lambda name: made.append(name) or torch.zeros(2 + (name == "b")))
    assert len(lazy) == 2
    assert list(lazy) == ["a", "b"]
    assert lazy.only(["b"])["b"].shape == (3,)
    assert made == ["b"]
