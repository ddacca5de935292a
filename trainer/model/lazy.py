"""Weights that are made one tensor at a time, when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["LazyWeights", "shapes_of"]


class LazyWeights(Mapping[str, Tensor]):
    """Name -> tensor, made anew at each access and kept by nobody: the shapes are known without it.

    Args:
        shapes: name -> shape, in order.
        make: gives the tensor of a name; the same values at every call.
        dtype: of all tensors, if that is known.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str], Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.shapes, self._make, self.dtype = dict(shapes), make, dtype

    def __getitem__(self, name: str) -> Tensor:
        size = self.shapes[name]
        tensor = self._make(name)
        assert tuple(tensor.shape) == size, name
        return tensor

    def only(self, names: Iterable[str]) -> LazyWeights:
        """Some of the tensors, still lazy."""
        return LazyWeights({name: self.shapes[name] for name in names}, self._make, self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of weights, without making lazy ones."""
    if isinstance(weights, LazyWeights):
        return dict(weights.shapes)
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
