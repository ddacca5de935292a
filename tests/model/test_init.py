"""Initial weights against statistics of the official constructor."""

import json
from pathlib import Path

import pytest
import torch

from trainer.model.init import init_weights
from trainer.model.naming import ModelShape, parameter_shapes

VECTORS = Path(__file__).parents[1] / "fixtures" / "vectors"


def check_against_official(golden):
    config = golden["config"]
    shape = ModelShape.official(config["n_layer"], config["n_embd"], config["vocab_size"])
    weights = init_weights(shape, seed=1)
    for name, expected in golden["tensors"].items():
        values = weights[name].double().flatten()
        assert weights[name].dtype == torch.float32
        assert list(weights[name].shape) == expected["shape"]
        if not expected["random"]:
            indices = [int(index) for index in expected["probe"]]
            found = torch.cat([values[:4], values[-4:], values[indices]])
            wanted = [*expected["first4"], *expected["last4"], *expected["probe"].values()]
            torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)
            continue
        assert values.std().item() == pytest.approx(expected["std"], rel=0.01)
        if "orthogonal_gain" in expected:
            assert orthogonal_gain(weights[name]) == pytest.approx(expected["orthogonal_gain"], rel=1e-4)
        else:
            assert values.abs().max().item() <= 1e-4


def orthogonal_gain(matrix):
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = matrix.T @ matrix
    square = gram.diagonal().mean()
    torch.testing.assert_close(gram / square, torch.eye(len(gram)), atol=1e-5, rtol=0)
    return square.sqrt().item()


def test_small_model_has_official_values():
    check_against_official(json.loads((VECTORS / "init_L3-D256.json").read_text()))


@pytest.mark.slow
def test_released_size_has_official_values():
    check_against_official(json.loads((VECTORS / "init_L12-D768.json").read_text()))


def test_one_block_is_legal():
    weights = init_weights(ModelShape.official(1, 64, 272), seed=0)
    assert list(weights) == list(parameter_shapes(ModelShape.official(1, 64, 272)))
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_vocabulary_below_width_has_gain_one_half():
    weights = init_weights(ModelShape.official(1, 64, 16), seed=0)
    assert orthogonal_gain(weights["head.weight"]) == pytest.approx(0.5, rel=1e-4)


def test_rank_above_width_stretches_the_low_rank_gain():
    weights = init_weights(ModelShape.official(1, 32, 16, head_size=32, ranks={"w": 128}), seed=0)
    assert orthogonal_gain(weights["blocks.0.att.w2"]) == pytest.approx(0.2, rel=1e-4)


def test_emb_scale_sets_the_range_of_the_embedding():
    shape = ModelShape.official(1, 64, 272)
    assert 0.4 < init_weights(shape, seed=0, emb_scale=0.5)["emb.weight"].abs().max() <= 0.5


def test_seed_decides_the_bits_and_global_state_is_untouched():
    shape = ModelShape.official(2, 128, 272)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    first = init_weights(shape, seed=5)
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        again = init_weights(shape, seed=5)
    finally:
        torch.set_num_threads(threads)
    other = init_weights(shape, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["emb.weight"], other["emb.weight"])
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_same_shaped_tensors_differ():
    weights = init_weights(ModelShape.official(2, 64, 272), seed=0)
    assert not torch.equal(weights["blocks.0.att.value.weight"], weights["blocks.1.att.value.weight"])
    assert not torch.equal(weights["blocks.0.att.w2"], weights["blocks.0.att.a2"])
