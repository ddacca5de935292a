"""Official names: shapes from sizes, sizes from shapes, foreign weights made canonical or refused."""

import json
from pathlib import Path

import pytest
import torch

from trainer.errors import CheckpointError, ConfigError
from trainer.model.naming import (
    ModelShape,
    canonical_weights,
    official_ranks,
    optimizer_group,
    parameter_shapes,
    shape_from_weights,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHAPE = ModelShape.official(2, 128, 256)


@pytest.fixture
def weights():
    return {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in parameter_shapes(SHAPE).items()}


@pytest.mark.parametrize("name", ["init_L3-D256.json", "init_L12-D768.json"])
def test_names_shapes_and_order_are_official(name):
    golden = json.loads((FIXTURES / "vectors" / name).read_text())
    config = golden["config"]
    shape = ModelShape.official(config["n_layer"], config["n_embd"], config["vocab_size"])
    shapes = parameter_shapes(shape)
    assert list(shapes) == golden["key_order"]
    assert {key: list(size) for key, size in shapes.items()} == {k: v["shape"] for k, v in golden["tensors"].items()}
    assert shape.num_parameters() == golden["n_params"]


@pytest.mark.parametrize(
    ("n_embd", "ranks"),
    [
        (128, (32, 32, 64)),
        (512, (64, 32, 128)),
        (768, (64, 32, 128)),
        (1024, (64, 64, 160)),
        (2048, (128, 64, 224)),
        (2560, (128, 96, 256)),
        (4096, (160, 96, 320)),
    ],
)
def test_official_ranks(n_embd, ranks):
    found = official_ranks(n_embd)
    assert (found["w"], found["v"], found["g"]) == ranks
    assert found["a"] == found["w"]


def test_released_sizes_have_their_published_parameter_counts():
    ranks = {"w": 64, "a": 64, "v": 32, "g": 128}
    assert ModelShape.official(24, 1024, 65536, ranks=ranks).num_parameters() == 450_834_432
    ranks = {"w": 96, "a": 96, "v": 64, "g": 256}
    assert ModelShape.official(24, 2048, 65536, ranks=ranks).num_parameters() == 1_527_668_736


def test_parameter_count_equals_the_sum_of_shapes():
    shape = ModelShape.official(3, 96, 50, head_size=32, dim_ffn=100, ranks={"g": 7})
    total = sum(torch.Size(size).numel() for size in parameter_shapes(shape).values())
    assert shape.num_parameters() == total


def test_optimizer_groups_are_official():
    golden = json.loads((FIXTURES / "vectors" / "tiny_train_trace.json").read_text())["groups"]
    expected = dict(zip(("1x", "2x", "decay"), (group["names"] for group in golden), strict=True))
    shapes = parameter_shapes(SHAPE)
    found = {
        group: sorted(name for name, size in shapes.items() if optimizer_group(name, size) == group)
        for group in expected
    }
    assert found == expected


def test_width_must_divide_into_heads():
    with pytest.raises(ConfigError, match=r"model.n_embd.*found 100.*multiple of head_size 64.*try 128"):
        ModelShape.official(2, 100, 256)


def test_sizes_must_be_positive():
    with pytest.raises(ConfigError, match=r"model.n_layer.*at least 1"):
        ModelShape.official(0, 64, 256)


def test_unknown_rank_is_refused():
    with pytest.raises(ConfigError, match="one of w, a, v, g"):
        ModelShape.official(1, 64, 256, ranks={"q": 32})


@pytest.mark.parametrize("head_size", [32, 64])
def test_shape_survives_the_way_through_names(head_size):
    shape = ModelShape(3, 128, 300, head_size, 200, 8, 12, 16, 20)
    assert shape_from_weights(parameter_shapes(shape)) == shape


def test_shape_of_one_block_without_value_gate():
    shape = ModelShape.official(1, 64, 300)
    shapes = {k: v for k, v in parameter_shapes(shape).items() if ".att.v" not in k or k.endswith("value.weight")}
    assert shape_from_weights(shapes).rank_v == 32


def test_canonical_restores_squeezed_shapes(weights):
    squeezed = {name: tensor.squeeze() for name, tensor in weights.items()}
    squeezed["blocks.1.att.r_k"] = weights["blocks.1.att.r_k"].flatten()
    result = canonical_weights(squeezed)
    assert {name: tuple(tensor.shape) for name, tensor in result.items()} == parameter_shapes(SHAPE)


def test_canonical_accepts_an_entirely_flat_r_k(weights):
    flat = {name: tensor.flatten() if name.endswith("r_k") else tensor for name, tensor in weights.items()}
    assert canonical_weights(flat)["blocks.0.att.r_k"].shape == (2, 64)


@pytest.mark.parametrize("prefix", ["_forward_module.", "model.", "_forward_module.model."])
def test_canonical_strips_wrapper_prefixes_and_restores_order(weights, prefix):
    wrapped = {prefix + name: tensor for name, tensor in reversed(weights.items())}
    assert list(canonical_weights(wrapped)) == list(weights)


def test_names_that_collide_without_prefix_are_refused(weights):
    weights["model.emb.weight"] = weights["emb.weight"]
    with pytest.raises(CheckpointError, match="same name"):
        canonical_weights(weights, "x.pth")


def test_absent_value_gate_of_block_0_is_filled(weights):
    for name in ("v0", "v1", "v2"):
        del weights[f"blocks.0.att.{name}"]
    result = canonical_weights(weights)
    assert list(result) == list(parameter_shapes(SHAPE))
    v0 = result["blocks.0.att.v0"]
    assert v0.dtype == torch.bfloat16
    torch.testing.assert_close(v0.flatten()[[0, -1]].float(), torch.tensor([0.93, 0.53]), atol=4e-3, rtol=0)
    assert not result["blocks.0.att.v1"].any()


def test_half_of_a_value_gate_is_missing(weights):
    del weights["blocks.0.att.v1"]
    with pytest.raises(CheckpointError, match=r"x.pth: missing blocks.0.att.v1"):
        canonical_weights(weights, "x.pth")


def test_missing_and_unexpected_tensors_are_named(weights):
    del weights["blocks.1.att.w1"]
    weights["blocks.1.att.w9"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"missing blocks.1.att.w1 and unexpected blocks.1.att.w9"):
        canonical_weights(weights, "x.pth")


def test_wrong_shape_is_named_with_both_sizes(weights):
    weights["head.weight"] = torch.zeros(300, 128)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \[300, 128\] instead of \[256, 128\]"):
        canonical_weights(weights, "x.pth")


def test_absurd_block_number_is_refused_before_a_table_is_built(weights):
    weights["blocks.999999999.att.x_r"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="block number 999999999"):
        canonical_weights(weights, "x.pth")


@pytest.mark.parametrize(
    ("key", "variant"),
    [
        ("blocks.0.att.time_decay", "RWKV-4, 5 or 6.*RWKV-7"),
        ("blocks.0.att.time_first", "RWKV-4"),
        ("blocks.0.att.time_mix_k", "RWKV-5"),
        ("blocks.0.att.time_maa_x", "RWKV-6"),
        ("blocks.1.ffn.s_emb.weight", "RWKV-7a"),
        ("blocks.1.ffn.s0", "RWKV-7a"),
        ("blocks.1.qkv.k_emb.weight", "RWKV-7b"),
        ("blocks.1.ffn.enn.weight", "RWKV-8"),
        ("blocks.1.qkv.qq.weight", "RWKV-8"),
        ("blocks.1.rosa_qkv.weight", "ROSA"),
    ],
)
def test_other_architectures_are_refused_by_name(weights, key, variant):
    weights[key] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=f"{key}.*{variant}"):
        canonical_weights(weights, "x.pth")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("blocks.0.att.key.lora_A", "merge the adapter"),
        ("blocks.0.att.time_state", "initial state"),
    ],
)
def test_derived_files_are_refused_with_a_hint(weights, key, hint):
    weights[key] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=f"unexpected {key}.*{hint}"):
        canonical_weights(weights, "x.pth")


def test_hugging_face_layout_is_refused_with_a_hint():
    names = {"model.embeddings.weight": torch.zeros(2, 2), "model.layers.0.attn.r_k": torch.zeros(1, 2)}
    with pytest.raises(CheckpointError, match="Hugging Face"):
        canonical_weights(names, "x.safetensors")


def test_heads_must_cover_the_width(weights):
    weights["blocks.0.att.r_k"] = torch.zeros(3, 64)
    with pytest.raises(CheckpointError, match=r"r_k has shape \[3, 64\] while emb.weight has 128"):
        shape_from_weights(weights, "x.pth")
