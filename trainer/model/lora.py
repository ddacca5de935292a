"""Adapters: low-rank additions to frozen matrices, and which parameters a run trains.

Names are those of RWKV-PEFT: `blocks.3.att.key.lora_A` [r, in] and `.lora_B` [out, r]. With PiSSA the weights stay
as they are, and the part that A and B start from is subtracted in the forward pass (`init_lora_A`, `init_lora_B`):
a model with a fresh adapter is bit for bit the product it was, and merging needs no other file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.adapters import LoraSettings
from trainer.model.init import tensor_generator

__all__ = ["LoraLinear", "adapter_names", "initial_adapter", "linear", "merged_matrix", "part_of"]

_PARTS = {
    "emb": re.compile(r"emb\.weight"),
    "head": re.compile(r"head\.weight"),
    "norms": re.compile(r"(.*\.)?ln\w*\.(weight|bias)"),
    "gates": re.compile(r".*\.att\.[wavg][012]"),
    "mixes": re.compile(r".*\.(x_[rwkvag]|k_k|k_a|r_k)"),
    "att": re.compile(r".*\.att\.(receptance|key|value|output)\.weight"),
    "ffn": re.compile(r".*\.ffn\.(key|value)\.weight"),
}
_POWER_ITERATIONS = 8


def part_of(name: str) -> str | None:
    """The group of `model.train_parts` that an official parameter belongs to; None for adapters and states."""
    return next((part for part, pattern in _PARTS.items() if pattern.fullmatch(name)), None)


class LoraLinear(nn.Linear):
    """A matrix with an adapter; its own weight is not trained unless the run says so.

    Args:
        in_features: columns.
        out_features: rows.
        lora: rank, strength, dropout, and how the adapter starts.
    """

    def __init__(self, in_features: int, out_features: int, lora: LoraSettings) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.scale, self.dropout, self.has_init = lora.scale, lora.dropout, lora.init == "pissa"
        self.lora_A = nn.Parameter(torch.empty(lora.r, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, lora.r))
        self.init_lora_A: Tensor
        self.init_lora_B: Tensor
        if self.has_init:
            self.register_buffer("init_lora_A", torch.empty(lora.r, in_features))
            self.register_buffer("init_lora_B", torch.empty(out_features, lora.r))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        kept = F.dropout(input, self.dropout, self.training) if self.dropout else input
        added = F.linear(F.linear(kept, self.lora_A), self.lora_B)
        if self.has_init:
            added = added - F.linear(F.linear(input, self.init_lora_A), self.init_lora_B)
        return F.linear(input, self.weight) + self.scale * added


def linear(in_features: int, out_features: int, target: str, lora: LoraSettings | None) -> nn.Linear:
    """A matrix of a block, with an adapter where the settings want one on `target`, such as att.key."""
    if lora is not None and target in lora.targets:
        return LoraLinear(in_features, out_features, lora)
    return nn.Linear(in_features, out_features, bias=False)


def adapter_names(matrix: str, *, has_init: bool) -> list[str]:
    """Names of the tensors beside `blocks.i.att.key.weight`, say."""
    prefix = matrix.removesuffix("weight")
    return [f"{prefix}{name}" for name in ("lora_A", "lora_B", *(("init_lora_A", "init_lora_B") if has_init else ()))]


def _adapted(names: Iterable[str], lora: LoraSettings) -> list[str]:
    wanted = re.compile(rf"blocks\.\d+\.({'|'.join(map(re.escape, lora.targets))})\.weight")
    return [name for name in names if wanted.fullmatch(name)]


def initial_adapter(base: Mapping[str, Tensor], lora: LoraSettings, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a fresh adapter by name, float32 on the CPU; each depends on the seed and its name alone.

    Args:
        base: official name -> weight.
        lora: rank, targets and kind of start.
        seed: any integer.
        dtype: of the weights in the forward pass. PiSSA's start is rounded to it, so that the subtracted part is
            exactly the part that is trained.
    """
    tensors: dict[str, Tensor] = {}
    for name in _adapted(base, lora):
        weight, names = base[name], adapter_names(name, has_init=lora.init == "pissa")
        if lora.init == "pissa":
            down, up = (x.to(dtype).float() for x in _principal(weight.float(), lora.r, seed))
            tensors |= dict(zip(names, (down, up, down.clone(), up.clone()), strict=True))
            continue
        bound = 1 / math.sqrt(weight.shape[1])
        # DeepSpeed's sharding context would choose another device and dtype.
        down = torch.empty(lora.r, weight.shape[1], dtype=torch.float32, device="cpu")
        down.uniform_(-bound, bound, generator=tensor_generator(seed, names[0]))
        tensors |= {names[0]: down, names[1]: torch.zeros(weight.shape[0], lora.r, dtype=torch.float32, device="cpu")}
    return tensors


def _principal(weight: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] whose product is the part of the weight with the largest singular values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        size = min(rank + 8, *weight.shape)
        left, values, right = torch.svd_lowrank(weight, q=size, niter=_POWER_ITERATIONS)
    pad = max(0, rank - size)
    roots = F.pad(values[:rank].sqrt(), (0, pad))
    left, right = (F.pad(x[:, :rank], (0, pad)) for x in (left, right))
    return (right * roots).mT.contiguous(), (left * roots).contiguous()


def merged_matrix(weight: Tensor, tensors: Mapping[str, Tensor], name: str, scale: float) -> Tensor:
    """The weight `name` with its adapter in it, float32; the weight itself where it has none."""
    names = adapter_names(name, has_init=True)
    if names[0] not in tensors:
        return weight
    down, up = (tensors[n].float() for n in names[:2])
    product = up @ down
    if names[2] in tensors:
        product -= tensors[names[3]].float() @ tensors[names[2]].float()
    return weight.float() + scale * product
