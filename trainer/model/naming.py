"""Official RWKV-7 parameter names: shapes from sizes, sizes from shapes, and strict checking of foreign weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.errors import CheckpointError, ConfigError

__all__ = [
    "ModelShape",
    "canonical_weights",
    "official_ranks",
    "optimizer_group",
    "parameter_shapes",
    "shape_from_weights",
    "without_prefixes",
]

Shape = tuple[int, ...]
TensorOrShape = Tensor | Iterable[int]

# Rank = factor * sqrt(width), rounded to a multiple of 32: the rule of the official trainer since 2025.
_RANK_FACTORS = {"w": 2.5, "a": 2.5, "v": 1.7, "g": 5.0}
_MIN_RANK = 32
_BLOCK_KEY = re.compile(r"blocks\.(\d+)\.")
# DeepSpeed and Lightning wrap a module under the first name, adapter trainers under the second.
_WRAPPER_PREFIXES = ("_forward_module.", "model.")

_VARIANTS = (
    (re.compile(r"rosa", re.IGNORECASE), "a ROSA experiment"),
    (re.compile(r"\.ffn\.enn\.|\.qkv\.(qq|kk|vv|kkup|vvup|ennk|emm)"), "RWKV-8"),
    (re.compile(r"\.qkv\."), "RWKV-7b (DeepEmbed with DEA attention)"),
    (re.compile(r"\.ffn\.(s_emb|s[012]\b)"), "RWKV-7a (DeepEmbed)"),
    (re.compile(r"\.att\.time_maa"), "RWKV-6"),
    (re.compile(r"\.att\.(time_mix|time_faaaa)"), "RWKV-5"),
    (re.compile(r"\.att\.time_first"), "RWKV-4"),
    (re.compile(r"\.att\.time_decay"), "RWKV-4, 5 or 6"),
)
_HINTS = (
    (re.compile(r"lora_[AB]|\.disha$"), "merge the adapter into its base model first"),
    (re.compile(r"\.time_state$"), "this file carries a tuned initial state; use the base model without it"),
    (
        re.compile(r"layers\.\d+\.|embeddings\.weight"),
        "this looks like another architecture in the Hugging Face layout",
    ),
)


@dataclass(frozen=True)
class ModelShape:
    """All sizes that determine the parameters of an RWKV-7 model.

    Raises:
        ConfigError: if a size is below 1 or the width is no multiple of the head size.
    """

    n_layer: int
    """Number of blocks, L."""
    n_embd: int
    """Width of the residual stream, C."""
    vocab_size: int
    """Rows of the embedding and of the head, V."""
    head_size: int
    """Channels per head, N."""
    dim_ffn: int
    """Hidden width of channel mixing."""
    rank_w: int
    """Rank of the decay's low-rank matrices w1, w2."""
    rank_a: int
    """Rank of the in-context learning rate's a1, a2."""
    rank_v: int
    """Rank of the value-mix gate's v1, v2."""
    rank_g: int
    """Rank of the output gate's g1, g2."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"model.{name}", "too small", found=value, rule="at least 1")
        if self.n_embd % self.head_size:
            near = max(1, round(self.n_embd / self.head_size)) * self.head_size
            raise ConfigError(
                "model.n_embd",
                "not divisible into heads",
                found=self.n_embd,
                rule=f"a multiple of head_size {self.head_size}",
                fix=f"try {near}",
            )

    @classmethod
    def official(
        cls,
        n_layer: int,
        n_embd: int,
        vocab_size: int,
        *,
        head_size: int = 64,
        dim_ffn: int | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> ModelShape:
        """Sizes with everything left out filled in as the official trainer does.

        Args:
            n_layer: blocks.
            n_embd: width.
            vocab_size: rows of the embedding.
            head_size: channels per head.
            dim_ffn: hidden width of channel mixing; None = 4 x n_embd.
            ranks: any of w, a, v, g that differ from `official_ranks(n_embd)`.
        """
        unknown = sorted(set(ranks or {}) - set(_RANK_FACTORS))
        if unknown:
            raise ConfigError("model.lora_ranks", "unknown name", found=unknown[0], rule="one of w, a, v, g")
        rank = official_ranks(max(1, n_embd)) | dict(ranks or {})
        ffn = 4 * n_embd if dim_ffn is None else dim_ffn
        return cls(n_layer, n_embd, vocab_size, head_size, ffn, rank["w"], rank["a"], rank["v"], rank["g"])

    @property
    def num_heads(self) -> int:
        """Heads of the recurrent state, H = C / N."""
        return self.n_embd // self.head_size

    def num_parameters(self) -> int:
        """Number of stored parameters, with the unused v0, v1, v2 of block 0."""
        width, ranks = self.n_embd, self.rank_w + self.rank_a + self.rank_v + self.rank_g
        per_block = 19 * width + 4 * width**2 + 2 * width * self.dim_ffn + 2 * width * ranks
        return 2 * self.vocab_size * width + 4 * width + self.n_layer * per_block


def official_ranks(n_embd: int) -> dict[str, int]:
    """Ranks {w, a, v, g} that the official trainer gives a model of this width.

    Released models were made with an older rule: always read ranks from a file's shapes where there is one.
    """
    return {name: max(_MIN_RANK, round(factor * math.sqrt(n_embd) / 32) * 32) for name, factor in _RANK_FACTORS.items()}


def _block_shapes(shape: ModelShape, layer: int) -> dict[str, Shape]:
    width, vector = shape.n_embd, (1, 1, shape.n_embd)
    norms = {"ln1": width, "ln2": width} | ({"ln0": width} if layer == 0 else {})
    shapes: dict[str, Shape] = {}
    for norm, size in norms.items():
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (size,)
    for mix in "rwkvag":
        shapes[f"att.x_{mix}"] = vector
    for name, rank in (("w", shape.rank_w), ("a", shape.rank_a), ("v", shape.rank_v), ("g", shape.rank_g)):
        shapes[f"att.{name}1"] = (width, rank)
        shapes[f"att.{name}2"] = (rank, width)
        if name != "g":
            shapes[f"att.{name}0"] = vector
    shapes["att.k_k"] = shapes["att.k_a"] = vector
    shapes["att.r_k"] = (shape.num_heads, shape.head_size)
    for projection in ("receptance", "key", "value", "output"):
        shapes[f"att.{projection}.weight"] = (width, width)
    shapes["att.ln_x.weight"] = shapes["att.ln_x.bias"] = (width,)
    shapes["ffn.x_k"] = vector
    shapes["ffn.key.weight"] = (shape.dim_ffn, width)
    shapes["ffn.value.weight"] = (width, shape.dim_ffn)
    return shapes


def parameter_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Shape of every parameter, keyed by official name, in the order of the official trainer's files.

    Includes v0, v1, v2 of block 0, which the network never reads but the official loader demands.
    """
    shapes: dict[str, Shape] = {"emb.weight": (shape.vocab_size, shape.n_embd)}
    for layer in range(shape.n_layer):
        shapes |= {f"blocks.{layer}.{name}": size for name, size in _block_shapes(shape, layer).items()}
    shapes["ln_out.weight"] = shapes["ln_out.bias"] = (shape.n_embd,)
    shapes["head.weight"] = (shape.vocab_size, shape.n_embd)
    return shapes


def optimizer_group(name: str, shape: Iterable[int]) -> Literal["1x", "2x", "decay"]:
    """Optimizer group of a parameter: `2x` learning rate, weight `decay`, or neither (`1x`).

    The rule of the official trainer: w0 learns twice as fast; matrices named `.weight` decay; everything
    else, including the low-rank matrices and r_k, does neither. With weight decay 0 `decay` acts as `1x`.
    """
    if "att.w0" in name:
        return "2x"
    is_matrix = sum(size > 1 for size in shape) >= 2
    return "decay" if is_matrix and ".weight" in name else "1x"


def _shape_of(value: TensorOrShape) -> Shape:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(value)


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _name_some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def without_prefixes(name: str) -> str:
    """A parameter's name without those that DeepSpeed, Lightning or adapter trainers put in front."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in _WRAPPER_PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return name


def _refuse_other_models(names: Iterable[str], source: object) -> None:
    for pattern, variant in _VARIANTS:
        found = next((name for name in names if pattern.search(name)), None)
        if found is not None:
            raise CheckpointError(
                source, f"holds {found}, which belongs to {variant}", rule="a plain RWKV-7 (x070) model"
            )


def _hint(names: list[str]) -> str | None:
    return next((hint for pattern, hint in _HINTS if any(pattern.search(name) for name in names)), None)


def _require(shapes: Mapping[str, Shape], name: str, source: object) -> Shape:
    if name not in shapes:
        names = list(shapes)
        problem = f"no tensor {name}, so this is not an RWKV-7 model"
        raise CheckpointError(source, problem, found=_name_some(names) or "no tensors", fix=_hint(names))
    return shapes[name]


def _matrix(shapes: Mapping[str, Shape], name: str, source: object) -> Shape:
    size = _require(shapes, name, source)
    if len(size) != 2 or 0 in size:
        raise CheckpointError(source, f"{name} has shape {list(size)}", rule="a matrix")
    return size


def shape_from_weights(state: Mapping[str, TensorOrShape], source: object = "weights") -> ModelShape:
    """Model sizes of a set of weights, read from tensor shapes alone.

    Args:
        state: official name -> tensor or shape. Vectors may be [1, 1, C] or [C]; r_k may be [H, N] or [H * N].
        source: file name for error messages.

    Raises:
        CheckpointError: if the tensors are not those of one RWKV-7 model.
    """
    shapes = {name: _shape_of(value) for name, value in state.items()}
    _refuse_other_models(shapes, source)
    vocab_size, n_embd = _matrix(shapes, "emb.weight", source)
    for signature in ("att.r_k", "att.w0", "att.a0", "att.k_k"):
        _require(shapes, f"blocks.0.{signature}", source)
    r_k = shapes["blocks.0.att.r_k"]
    # A flat r_k does not tell the head size; every released model has 64.
    head_size = r_k[1] if len(r_k) == 2 else 64
    if math.prod(r_k) != n_embd or n_embd % head_size:
        problem = f"blocks.0.att.r_k has shape {list(r_k)} while emb.weight has {n_embd} columns"
        raise CheckpointError(source, problem, rule="heads x head size = columns")
    layers = {int(match[1]) for match in map(_BLOCK_KEY.match, shapes) if match}
    if max(layers) >= len(shapes):
        raise CheckpointError(source, f"block number {max(layers)} in a file of {len(shapes)} tensors")
    v1_name = next((f"blocks.{layer}.att.v1" for layer in (1, 0) if f"blocks.{layer}.att.v1" in shapes), None)
    return ModelShape(
        n_layer=max(layers) + 1,
        n_embd=n_embd,
        vocab_size=vocab_size,
        head_size=head_size,
        dim_ffn=_matrix(shapes, "blocks.0.ffn.key.weight", source)[0],
        rank_w=_matrix(shapes, "blocks.0.att.w1", source)[1],
        rank_a=_matrix(shapes, "blocks.0.att.a1", source)[1],
        rank_v=_matrix(shapes, v1_name, source)[1] if v1_name else _MIN_RANK,
        rank_g=_matrix(shapes, "blocks.0.att.g1", source)[1],
    )


def _unused_value_gate(shape: ModelShape, like: Tensor) -> dict[str, Tensor]:
    """v0, v1, v2 of block 0, which no forward pass reads: the official initial v0 and v1, and a zero v2."""
    linear_C = torch.linspace(-0.5, 0.5, shape.n_embd, dtype=torch.float64)
    tensors = {
        "v0": (0.73 - 0.4 * linear_C).view(1, 1, -1),
        "v1": torch.zeros(shape.n_embd, shape.rank_v),
        "v2": torch.zeros(shape.rank_v, shape.n_embd),
    }
    return {f"blocks.0.att.{name}": tensor.to(like) for name, tensor in tensors.items()}


def canonical_weights(state: Mapping[str, Tensor], source_path: object = "weights") -> dict[str, Tensor]:
    """Weights under exactly the official names, shapes and order, whoever wrote them.

    Strips wrapper prefixes, restores squeezed shapes, and adds v0, v1, v2 of block 0 where released files
    leave them out. Values and dtypes are untouched.

    Args:
        state: name -> tensor as read from a file.
        source_path: file name for error messages.

    Raises:
        CheckpointError: naming the missing, unexpected or misshapen tensors, or the variant that is not RWKV-7.
    """
    weights = {without_prefixes(name): tensor for name, tensor in state.items()}
    if len(weights) != len(state):
        raise CheckpointError(source_path, "two tensors have the same name once wrapper prefixes are stripped")
    shape = shape_from_weights(weights, source_path)
    expected = parameter_shapes(shape)
    gate = {f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")}
    if not gate & set(weights):
        weights |= _unused_value_gate(shape, like=weights["blocks.0.att.w0"])
    missing = [name for name in expected if name not in weights]
    unexpected = [name for name in weights if name not in expected]
    if missing or unexpected:
        parts = [f"missing {_name_some(missing)}"] if missing else []
        parts += [f"unexpected {_name_some(unexpected)}"] if unexpected else []
        raise CheckpointError(source_path, " and ".join(parts), rule="exactly the RWKV-7 names", fix=_hint(unexpected))
    return {name: _restored(name, weights[name], size, source_path) for name, size in expected.items()}


def _restored(name: str, tensor: Tensor, expected: Shape, source: object) -> Tensor:
    found = tuple(tensor.shape)
    is_flat_r_k = name.endswith(".r_k") and found == (math.prod(expected),)
    if not is_flat_r_k and _squeezed(found) != _squeezed(expected):
        raise CheckpointError(
            source,
            f"{name} has shape {list(found)} instead of {list(expected)}",
            rule="one size throughout (see emb.weight for vocabulary and width)",
        )
    return tensor.reshape(expected)
