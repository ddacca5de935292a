"""Making another model of given ones: more blocks, wider, higher ranks, more tokens, a mean of several.

All results are lazy: one tensor is made at a time.

What `resized` does with each family of tensors, where the old model ends:

| family | new entries |
|---|---|
| matrices that read the residual stream (receptance, key, value, ffn.key, w1, a1, v1, g1, head) | 0 for new channels read; official initial values for new outputs |
| matrices that write into it (output, ffn.value) | official initial values, which are 0 |
| second low-rank matrices (w2, a2, v2) | official initial values; g2: 0 for new ranks |
| vectors over channels, norms, r_k, the embedding | official initial values |

So higher ranks and a wider ffn leave the logits as they are; a wider residual stream does not, because its norms see
more channels. Old channels keep their numbers, and with them whole heads.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.errors import CheckpointError, ConfigError
from trainer.model.init import initial_tensor
from trainer.model.lazy import LazyWeights, shapes_of
from trainer.model.naming import ModelShape, parameter_shapes, shape_from_weights

__all__ = ["NEW_BLOCKS", "NewBlocks", "block_sources", "merged", "resized", "with_token_rows"]

NewBlocks = Literal["identity", "copy", "fresh"]
NEW_BLOCKS: tuple[NewBlocks, ...] = get_args(NewBlocks)
"""identity: a copy of the block before, whose output is 0, so that logits stay. copy: that block again. fresh: initial values."""

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_WRITERS = ("att.output.weight", "ffn.value.weight")
_READERS = re.compile(r"att\.(receptance|key|value)\.weight|ffn\.key\.weight|head\.weight")
# Stored [input, output], unlike the matrices above.
_LOW_RANK_READERS = re.compile(r"att\.[wavg]1")
_VALUE_GATE = re.compile(r"att\.v[012]")


def block_sources(old: int, new: int) -> list[tuple[int, bool]]:
    """For each new block the old one that it comes from, and whether it is an extra copy of it.

    More blocks: extra ones follow their originals, spread evenly. Fewer: the first and the last stay, and blocks
    at even distances between them.
    """
    if new <= old:
        return [(round(index * (old - 1) / max(1, new - 1)), False) for index in range(new)]
    sources = [index * old // new for index in range(new)]
    return [(source, index > 0 and sources[index - 1] == source) for index, source in enumerate(sources)]


def _grown(name: str, old: Tensor, fresh: Tensor) -> Tensor:
    """The old tensor in the leading corner of the new one; what is around it by the rules of this module."""
    if old.shape == fresh.shape:
        return old
    local = name.split(".", 2)[2] if name.startswith("blocks.") else name
    result = fresh.to(old.dtype, copy=True)
    if _READERS.fullmatch(local):
        result[: old.shape[0], old.shape[1] :] = 0
    if _LOW_RANK_READERS.fullmatch(local):
        result[old.shape[0] :, : old.shape[1]] = 0
    if local == "att.g2":
        result[old.shape[0] :] = 0
    result[tuple(slice(size) for size in old.shape)] = old
    return result


def _fresh(shape: ModelShape, name: str, seed: int) -> Tensor:
    if not name.endswith("att.g1"):
        return initial_tensor(shape, name, seed)
    # Officially 0. With 0 in g2 too, all new ranks would get the same gradient for ever.
    size = parameter_shapes(shape)[name]
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.nn.init.orthogonal_(torch.empty(size), gain=0.1, generator=generator)


def _check_growth(old: ModelShape, new: ModelShape) -> None:
    if new.head_size != old.head_size or new.vocab_size != old.vocab_size:
        raise ConfigError(
            "resize", "head size and vocabulary stay as they are", fix="add_tokens.py makes a larger vocabulary"
        )
    for name in ("n_embd", "dim_ffn", "rank_w", "rank_a", "rank_v", "rank_g"):
        before, after = getattr(old, name), getattr(new, name)
        if after < before:
            raise ConfigError(f"--{name}", "cannot shrink", found=after, rule=f"at least {before}")


def resized(
    weights: Mapping[str, Tensor], shape: ModelShape, new_blocks: NewBlocks = "identity", seed: int = 0
) -> LazyWeights:
    """Weights of another size that begin as the given model.

    Args:
        weights: under official names.
        shape: sizes of the result: any number of blocks, the others at least as large.
        new_blocks: what extra blocks are; with `identity`, and no wider n_embd, the logits stay the same.
        seed: of the values that are drawn.

    Raises:
        ConfigError: if a size would shrink, or head size or vocabulary would change.
    """
    old = shape_from_weights(shapes_of(weights))
    _check_growth(old, shape)
    sources = block_sources(old.n_layer, shape.n_layer)

    def make(name: str) -> Tensor:
        block = _BLOCK.fullmatch(name)
        if block is None:
            return _grown(name, weights[name], _fresh(shape, name, seed))
        (source, is_extra), local = sources[int(block[1])], block[2]
        dtype = weights["emb.weight"].dtype
        if is_extra and new_blocks == "fresh":
            return initial_tensor(shape, name, seed).to(dtype)
        # Block 0 never uses its value gate, so a copy of it has to learn one.
        if int(block[1]) > 0 and source == 0 and _VALUE_GATE.fullmatch(local):
            return initial_tensor(shape, name, seed).to(dtype)
        tensor = _grown(name, weights[f"blocks.{source}.{local}"], _fresh(shape, name, seed))
        return torch.zeros_like(tensor) if is_extra and new_blocks == "identity" and local in _WRITERS else tensor

    return LazyWeights(parameter_shapes(shape), make)


def with_token_rows(weights: Mapping[str, Tensor], first: int, count: int) -> LazyWeights:
    """Weights whose embedding and head have rows for new tokens: the mean of the rows before them.

    Args:
        weights: under official names.
        first: id of the first new token: rows from here on are not used by the tokenizer yet.
        count: number of new tokens.

    Raises:
        ConfigError: if `first` is beyond the vocabulary, so that the tokenizer cannot be that of the model.
    """
    old = shape_from_weights(shapes_of(weights))
    if not 1 < first <= old.vocab_size:
        raise ConfigError(
            "--tokenizer", f"knows {first} tokens, the model {old.vocab_size}", rule="the tokenizer of this model"
        )
    shape = replace(old, vocab_size=max(old.vocab_size, first + count))

    def make(name: str) -> Tensor:
        tensor = weights[name]
        if name not in ("emb.weight", "head.weight"):
            return tensor
        result = tensor.new_empty(shape.vocab_size, shape.n_embd)
        result[: old.vocab_size] = tensor
        # Id 0 ends documents: it is no word.
        result[first : first + count] = tensor[1:first].mean(0, dtype=torch.float32).to(tensor.dtype)
        return result

    return LazyWeights(parameter_shapes(shape), make)


def merged(models: Sequence[Mapping[str, Tensor]], parts: Sequence[float], names: Sequence[object]) -> LazyWeights:
    """The weighted mean of several models of one shape, in float32 and in the dtype of the first.

    Args:
        models: each under official names.
        parts: weight of each, above 0; they are divided by their sum.
        names: how each is called in error messages.

    Raises:
        ConfigError: if the number of parts is another, or one is not above 0.
        CheckpointError: if a model has another shape than the first.
    """
    if len(parts) != len(models):
        raise ConfigError("--weights", f"{len(parts)} numbers for {len(models)} models", rule="one for each")
    if not all(0 < part < float("inf") for part in parts):
        raise ConfigError("--weights", "out of range", found=list(parts), rule="numbers above 0")
    shape = shape_from_weights(shapes_of(models[0]))
    for model, name in zip(models[1:], names[1:], strict=True):
        other = shape_from_weights(shapes_of(model))
        different = [field for field, value in vars(shape).items() if getattr(other, field) != value]
        if different:
            field = different[0]
            problem = f"has {field} {getattr(other, field)} where {names[0]} has {getattr(shape, field)}"
            raise CheckpointError(name, problem, rule="models of one shape")
    total = sum(parts)

    def make(name: str) -> Tensor:
        # As differences to the first, so that equal models give the same bits.
        first = models[0][name].float()
        result = first.clone()
        for model, part in zip(models[1:], parts[1:], strict=True):
            result += (part / total) * (model[name].float() - first)
        return result.to(models[0][name].dtype)

    return LazyWeights(parameter_shapes(shape), make)
