"""Official initial weights of RWKV-7."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.model.naming import ModelShape, parameter_shapes

__all__ = ["init_weights", "initial_tensor", "tensor_generator"]

_CONSTANTS = {
    "att.w1": 0.0,
    "att.a1": 0.0,
    "att.v1": 0.0,
    "att.g1": 0.0,
    "att.k_a": 1.02,
    "att.r_k": -0.04,
    "att.output.weight": 0.0,
    "ffn.value.weight": 0.0,
}
_ORTHOGONAL_GAINS = {
    "att.w2": 0.1,
    "att.a2": 0.1,
    "att.v2": 0.1,
    "att.g2": 0.1,
    "att.receptance.weight": 1.0,
    "att.key.weight": 0.1,
    "att.value.weight": 1.0,
    "ffn.key.weight": 1.0,
}
# Token-shift mix of a channel c: 1 - (c / C) ** (power * depth), depth falling from 1 in the first block to 1 / L.
_MIX_POWERS = {"att.x_r": 0.2, "att.x_w": 0.9, "att.x_k": 0.7, "att.x_v": 0.7, "att.x_a": 0.9, "att.x_g": 0.2}
_EMB_SCALE = 1e-4


def tensor_generator(seed: int, name: str) -> torch.Generator:
    """Random source of one tensor: other tensors, their order and their sizes do not change its values."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def _orthogonal(name: str, size: tuple[int, ...], gain: float, seed: int) -> Tensor:
    rows, columns = size
    stretched = gain * math.sqrt(max(1.0, rows / columns)) if name.split(".")[-1] in {"w2", "a2", "v2", "g2"} else gain
    return nn.init.orthogonal_(
        torch.empty(size, dtype=torch.float32), gain=stretched, generator=tensor_generator(seed, name)
    )


@functools.lru_cache(maxsize=128)
def _vectors(shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """float64 [C] values of the per-channel parameters of one block."""
    width, head_size = shape.n_embd, shape.head_size
    channel_C = torch.arange(width, dtype=torch.float64)
    from_0_to_1 = layer / (shape.n_layer - 1) if shape.n_layer > 1 else 0.0
    depth = 1 - layer / shape.n_layer
    ramp_C = channel_C / max(1, width - 1)
    linear_C = ramp_C - 0.5
    half = max(1, head_size - 1) / 2
    in_head_C = (channel_C % head_size - half) / half
    zigzag_C = in_head_C * in_head_C.abs()
    vectors = {name: 1 - (channel_C / width) ** (power * depth) for name, power in _MIX_POWERS.items()}
    return vectors | {
        "att.w0": -6 + 6 * ramp_C ** (1 + from_0_to_1**0.3) + 0.5 + 2.5 * zigzag_C,
        "att.a0": -0.19 + 0.3 * zigzag_C + 0.4 * linear_C,
        "att.v0": 0.73 - 0.4 * linear_C,
        "att.k_k": 0.71 - 0.1 * linear_C,
        "ffn.x_k": 1 - (channel_C / width) ** (depth**4),
        "att.ln_x.weight": torch.full((width,), ((1 + layer) / shape.n_layer) ** 0.7, dtype=torch.float64),
    }


def _block_tensor(name: str, size: tuple[int, ...], vectors: dict[str, Tensor], seed: int) -> Tensor:
    local = name.split(".", 2)[2]
    if local in _ORTHOGONAL_GAINS:
        return _orthogonal(name, size, _ORTHOGONAL_GAINS[local], seed)
    if local in _CONSTANTS:
        return torch.full(size, _CONSTANTS[local])
    if local in vectors:
        return vectors[local].reshape(size).float()
    return torch.ones(size) if local.endswith(".weight") else torch.zeros(size)


def init_weights(shape: ModelShape, seed: int, emb_scale: float = _EMB_SCALE) -> dict[str, Tensor]:
    """Fresh weights with the distribution of the official trainer, float32 on the CPU, official names and order.

    A seed gives the same bits whatever the number of threads, and the global random state is untouched. Each
    tensor depends on the seed, its name and its own size only.

    Args:
        shape: sizes of the model; one block is legal.
        seed: any integer.
        emb_scale: the embedding is uniform in (-emb_scale, emb_scale).

    Source: the initial values of the official trainer's constructor and `generate_init_weight`.
    """
    sizes = parameter_shapes(shape)
    with _one_thread() as num_threads, ThreadPoolExecutor(max_workers=num_threads) as pool:
        tensors = list(pool.map(lambda name: _tensor(shape, name, sizes[name], seed, emb_scale), sizes))
    return dict(zip(sizes, tensors, strict=True))


def initial_tensor(shape: ModelShape, name: str, seed: int) -> Tensor:
    """One tensor of `init_weights`, the same bits."""
    with _one_thread():
        return _tensor(shape, name, parameter_shapes(shape)[name], seed, _EMB_SCALE)


@contextmanager
def _one_thread() -> Iterator[int]:
    """Gives the number of threads, and takes all but one from torch: the bits of a QR factorisation depend on it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _tensor(shape: ModelShape, name: str, size: tuple[int, ...], seed: int, emb_scale: float) -> Tensor:
    if name == "emb.weight":
        return torch.empty(size, dtype=torch.float32).uniform_(
            -emb_scale, emb_scale, generator=tensor_generator(seed, name)
        )
    if name == "head.weight":
        gain = 0.5 * math.sqrt(max(1.0, shape.vocab_size / shape.n_embd))
        return _orthogonal(name, size, gain, seed)
    if name.startswith("ln_out."):
        return torch.ones(size) if name.endswith("weight") else torch.zeros(size)
    return _block_tensor(name, size, _vectors(shape, int(name.split(".")[1])), seed)
