"""Official names and shapes to those of Hugging Face's RWKV-7 layout, and back.

The layout is the one that flash-linear-attention's `RWKV7ForCausalLM` and the package `rwkv7-hf` share. Low-rank
matrices are transposed there, most vectors are flat, and block 0 has no v0, v1, v2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.model.lazy import LazyWeights, shapes_of
from trainer.model.naming import ModelShape

__all__ = ["from_hf", "hf_config", "is_hf_layout", "to_hf", "unused_names"]

TensorOrShape = TypeVar("TensorOrShape", Tensor, tuple[int, ...])

_TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_MODULES = {
    "ln0": "pre_norm",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "att.ln_x": "attn.g_norm",
    "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj",
    "att.value": "attn.v_proj",
    "att.output": "attn.o_proj",
    "ffn.key": "ffn.key",
    "ffn.value": "ffn.value",
}
_VECTORS = {f"att.x_{mix}": f"attn.x_{mix}" for mix in "rwkvag"} | {
    "att.k_k": "attn.k_k",
    "att.k_a": "attn.k_a",
    "att.r_k": "attn.r_k",
    "ffn.x_k": "ffn.x_k",
}
_LOW_RANK = {
    f"att.{gate}{part}": f"attn.{gate}_lora.lora.{place}"
    for gate in "wavg"
    for part, place in ((1, "0.weight"), (2, "2.weight"), (0, "2.bias"))
    if (gate, part) != ("g", 0)
}
_LOCAL = (
    {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in _MODULES.items() for part in ("weight", "bias")}
    | _VECTORS
    | _LOW_RANK
)
_TO_OURS = {theirs: ours for ours, theirs in _LOCAL.items()}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_HF_SIGNATURE = re.compile(r"(^|\.)layers\.\d+\.(attn|ffn|pre_norm|attn_norm|ffn_norm)\.|(^|\.)embeddings\.weight$")
_TRANSPOSED = re.compile(r"att\.[wavg][12]")
# Vectors of [1, 1, C] that are [C] there; the six token-shift mixes stay [1, 1, C].
_FLAT = re.compile(r"att\.([wav]0|k_k|k_a)|ffn\.x_k")
# Files of the first version of flash-linear-attention: one [6, 1, 1, C] tensor, in this order.
_STACKED_MIX = "attn.x_x"
_STACKED_ORDER = "rwkvag"


def unused_names() -> tuple[str, ...]:
    """Official names that the layout has no place for: the value gate of block 0, which no forward pass reads."""
    return tuple(f"blocks.0.att.{name}" for name in ("v0", "v1", "v2"))


def is_hf_layout(names: Iterable[str]) -> bool:
    """Whether tensor names are those of the Hugging Face layout."""
    return any(_HF_SIGNATURE.search(name) for name in names)


def to_hf(weights: Mapping[str, Tensor]) -> LazyWeights:
    """Weights under the names and shapes of the layout, as views, without those of `unused_names`.

    Args:
        weights: under exactly the official names and shapes; lazy ones stay lazy.
    """
    ours: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in shapes_of(weights).items():
        if name not in unused_names():
            theirs, like = _converted(name, torch.empty(size, device="meta"))
            ours[theirs], shapes[theirs] = name, tuple(like.shape)
    return LazyWeights(shapes, lambda theirs: _converted(ours[theirs], weights[ours[theirs]])[1])


def _converted(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _TOP[name], tensor
    local = block[2]
    if _TRANSPOSED.fullmatch(local):
        tensor = tensor.T
    elif _FLAT.fullmatch(local):
        tensor = tensor.reshape(-1)
    return f"model.layers.{block[1]}.{_LOCAL[local]}", tensor


def from_hf(state: Mapping[str, TensorOrShape], source: object = "weights") -> dict[str, TensorOrShape]:
    """Tensors (or shapes) of the layout under official names; shapes as `canonical_weights` accepts them.

    Args:
        state: name -> tensor or shape; a name that the layout does not know is kept, for whoever checks names.
        source: file name for error messages.

    Raises:
        CheckpointError: if two names mean the same tensor.
    """
    converted: dict[str, TensorOrShape] = {}
    for name, value in state.items():
        for ours, part in _official(name, value):
            if ours in converted:
                raise CheckpointError(source, f"two tensors for {ours}, one of them {name}")
            converted[ours] = part
    return converted


def _official(name: str, value: TensorOrShape) -> list[tuple[str, TensorOrShape]]:
    bare = name.removeprefix("model.")
    for ours, theirs in _TOP.items():
        if bare == theirs.removeprefix("model."):
            return [(ours, value)]
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return [(name, value)]
    prefix = f"blocks.{layer[1]}."
    if layer[2] == _STACKED_MIX and _size(value)[:1] == (len(_STACKED_ORDER),):
        return [(f"{prefix}att.x_{mix}", _row(value, index)) for index, mix in enumerate(_STACKED_ORDER)]
    local = _TO_OURS.get(layer[2])
    if local is None:
        return [(name, value)]
    return [(prefix + local, _transposed(value) if _TRANSPOSED.fullmatch(local) else value)]


def _size(value: Tensor | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _transposed(value: TensorOrShape) -> TensorOrShape:
    if isinstance(value, Tensor):
        return value.t().contiguous() if value.dim() == 2 else value
    return value[::-1]


def _row(value: TensorOrShape, index: int) -> TensorOrShape:
    return value[index] if isinstance(value, Tensor) else value[1:]


def hf_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """config.json of the layout, without what only one program needs.

    Args:
        shape: sizes of the model; its head size must be 64, because the layout ties the norm's epsilon to it.
        dtype: torch's name of the stored type, such as bfloat16.
    """
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn_mode": "chunk",
        "attn": None,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.n_embd,
        "num_hidden_layers": shape.n_layer,
        "head_dim": shape.head_size,
        "num_heads": shape.num_heads,
        "value_dim": [shape.n_embd] * shape.n_layer,
        "hidden_ratio": shape.dim_ffn / shape.n_embd,
        "intermediate_size": shape.dim_ffn,
        "decay_low_rank_dim": shape.rank_w,
        "a_low_rank_dim": shape.rank_a,
        "v_low_rank_dim": shape.rank_v,
        "gate_low_rank_dim": shape.rank_g,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        # The fused norm adds 1e-6 under the root where the official model has max(norm, 1e-12).
        "fuse_norm": False,
        "fuse_cross_entropy": True,
        "fuse_linear_cross_entropy": False,
        "use_l2warp": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
