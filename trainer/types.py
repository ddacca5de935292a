"""Data that passes between layers.

Axis legend, used as a suffix of tensor names everywhere: B rows of a batch, T tokens, C width of the
residual stream, H heads, N head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch", "LazyTensors"]


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors of which each is made or read when it is asked for, and not kept.

    Args:
        names: in order.
        make: gives the tensor of a name.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Batch(NamedTuple):
    """One micro-batch: what one rank feeds through the model between two row changes.

    Rows are sorted by `lengths`, longest first; T is the longest row's length. Tokens past a row's
    length have id 0, target 0, weight 0.
    """

    ids_BT: Tensor
    """int64, input tokens."""
    targets_BT: Tensor
    """int64, the token that follows each input token."""
    weight_BT: Tensor
    """float32 >= 0, how much each target counts in the loss; 0 = not trained."""
    reset_BT: Tensor
    """bool, true where the recurrent state is zeroed before this token (a document starts here)."""
    lengths: tuple[int, ...]
    """Tokens in each row, descending."""
    lane_ids: tuple[int, ...] | None = None
    """`stream` batching: the global number of the lane that each row continues. None: rows start anew."""
    group_BT: Tensor | None = None
    """int32, group of each target, see `trainer.data.positions`. None: losses by group are not wanted."""
