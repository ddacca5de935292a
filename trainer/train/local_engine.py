"""Chunks on one device without a strategy in between, on a GPU as CUDA graphs.

At batch 1 a chunk takes a GPU less time than Python takes to launch its kernels. A graph holds all launches of a
chunk's forward and backward pass and replays them at once. It is captured the third time that a chunk of the same
form comes by (the first times compile, build and choose algorithms), and reads its inputs from buffers of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.bptt.step import ChunkInput, EagerEngine
from trainer.config import ModelConfig
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import LayerState, ModelState, map_state, state_tensors
from trainer.ops.loss import GroupSums, linear_cross_entropy

__all__ = ["LocalEngine", "chunk_loss"]

_EAGER_RUNS = 2


@contextlib.contextmanager
def _seeded(chunk: ChunkInput) -> Iterator[None]:
    """Random numbers of the chunk's own, whatever came before; afterwards the generators are as they were."""
    if chunk.seed is None:
        yield
        return
    devices = [chunk.ids_BT.device] if chunk.ids_BT.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(chunk.seed)
        yield


def chunk_loss(
    model: RWKV7, chunk: ChunkInput, settings: ModelConfig, *, with_loss: bool, head_total: Tensor | None = None
) -> tuple[Tensor | None, ModelState]:
    """Weighted loss of a chunk (None without `with_loss`) and the state after it.

    `head_total`: where the head's gradient is summed, see `linear_cross_entropy`.
    """
    with _seeded(chunk):
        hidden_BTC, state = model(chunk.ids_BT, chunk.state, chunk.reset_BT, chunk.is_start)
    if not with_loss:
        return None, state
    groups = None
    if chunk.group_BT is not None and chunk.group_sums_2G is not None:
        groups = GroupSums(chunk.group_BT.flatten(), chunk.group_sums_2G)
    loss = linear_cross_entropy(
        hidden_BTC.flatten(0, 1),
        model.head.weight,
        chunk.targets_BT.flatten(),
        chunk.weight_BT.flatten(),
        settings.l2wrap,
        settings.loss_chunk_rows,
        head_total,
        groups,
        settings.token_loss_threshold,
    )
    return loss, state


@dataclass(frozen=True)
class _Form:
    """What two chunks must share to replay the same graph."""

    shape: tuple[int, ...]
    """Rows and tokens."""
    has_reset: bool
    trains: bool
    has_gradient: bool
    wants_gradient: bool
    with_loss: bool
    group_sums: int
    """Address of the tensor that the chunk adds losses by group to; 0 = none."""
    is_start: bool


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    chunk: ChunkInput
    gradient: list[Tensor] | None
    loss: Tensor | None
    state: ModelState
    new: list[Tensor] | None


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def _input_tensors(chunk: ChunkInput) -> list[Tensor]:
    plain = [chunk.ids_BT, chunk.targets_BT, chunk.weight_BT, *state_tensors(chunk.state)]
    return [*plain, *(optional for optional in (chunk.reset_BT, chunk.group_BT) if optional is not None)]


def _sums_address(chunk: ChunkInput) -> int:
    return 0 if chunk.group_sums_2G is None else chunk.group_sums_2G.data_ptr()


class LocalEngine(EagerEngine):
    """`Engine` for a module on this process's device.

    Args:
        model: the network.
        settings: loss settings and the chunk length.
        graphs: replay full chunks as CUDA graphs. Gradient buffers must then stay where they are between
            steps: zero them, do not free them.
    """

    def __init__(self, model: RWKV7, settings: ModelConfig, *, graphs: bool) -> None:
        self.model, self.settings, self.graphs, self.chunk_tokens = model, settings, graphs, settings.ctx_len
        self._seen: dict[_Form, int] = {}
        self._captured: dict[_Form, _Captured] = {}
        self._pool: Any = None

    def use_chunks_of(self, num_tokens: int) -> None:
        """Full chunks have this length from now on; graphs of another one are dropped."""
        self.chunk_tokens = num_tokens
        self._captured.clear()
        self._seen.clear()

    def zero_state(self, rows: int) -> ModelState:
        """See `Engine`."""
        return self.model.zero_state(rows)

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """See `EagerEngine`."""
        head_total = getattr(self.model.head.weight, "main_grad", None)
        return chunk_loss(self.model, chunk, self.settings, with_loss=with_loss, head_total=head_total)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """See `EagerEngine`."""
        loss.backward()

    def evaluate(self, chunk: ChunkInput, *, with_loss: bool) -> tuple[Tensor | None, ModelState]:
        """See `Engine`."""
        has_reset, sums = chunk.reset_BT is not None, _sums_address(chunk)
        form = _Form((*chunk.ids_BT.shape,), has_reset, False, False, False, with_loss, sums, chunk.is_start)
        if not self._is_due(form, chunk):
            return super().evaluate(chunk, with_loss=with_loss)
        loss, state, _ = self._replay(form, chunk, None)
        return loss, state

    def train(
        self, chunk: ChunkInput, gradient: list[Tensor] | None, *, want_gradient: bool, is_last: bool
    ) -> tuple[Tensor, ModelState, list[Tensor] | None]:
        """See `Engine`."""
        has_reset, has_gradient, sums = chunk.reset_BT is not None, gradient is not None, _sums_address(chunk)
        form = _Form((*chunk.ids_BT.shape,), has_reset, True, has_gradient, want_gradient, True, sums, chunk.is_start)
        if not self._is_due(form, chunk):
            return super().train(chunk, gradient, want_gradient=want_gradient, is_last=is_last)
        loss, state, new = self._replay(form, chunk, gradient)
        assert loss is not None
        return loss, state, new

    def _is_due(self, form: _Form, chunk: ChunkInput) -> bool:
        """Whether this chunk runs as a graph: a full one, of a form that has run eagerly before."""
        if not self.graphs or not chunk.ids_BT.is_cuda or form.shape[1] != self.chunk_tokens:
            return False
        self._seen[form] = self._seen.get(form, 0) + 1
        return self._seen[form] > _EAGER_RUNS

    def _replay(
        self, form: _Form, chunk: ChunkInput, gradient: list[Tensor] | None
    ) -> tuple[Tensor | None, ModelState, list[Tensor] | None]:
        held = self._captured.get(form)
        if held is None:
            held = self._captured[form] = self._capture(form, chunk, gradient)
        _copy_all(_input_tensors(held.chunk), _input_tensors(chunk))
        if gradient is not None and held.gradient is not None:
            _copy_all(held.gradient, gradient)
        held.graph.replay()
        # The next replay overwrites what this one left; states outlive it.
        fresh = [torch.empty_like(x) for x in state_tensors(held.state)]
        _copy_all(fresh, state_tensors(held.state))
        state = tuple(LayerState(*fresh[i : i + 3]) for i in range(0, len(fresh), 3))
        return None if held.loss is None else held.loss.clone(), state, held.new

    def _capture(self, form: _Form, chunk: ChunkInput, gradient: list[Tensor] | None) -> _Captured:
        """Record a chunk's launches; nothing is computed yet."""
        own = ChunkInput(
            chunk.ids_BT.clone(),
            chunk.targets_BT.clone(),
            chunk.weight_BT.clone(),
            None if chunk.reset_BT is None else chunk.reset_BT.clone(),
            map_state(torch.clone, chunk.state),
            None if chunk.group_BT is None else chunk.group_BT.clone(),
            chunk.group_sums_2G,
            chunk.is_start,
        )
        own_gradient = None if gradient is None else [g.clone() for g in gradient]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            if form.trains:
                loss, state, new = super().train(
                    replace(own), own_gradient, want_gradient=form.wants_gradient, is_last=False
                )
            else:
                loss, state = super().evaluate(own, with_loss=form.with_loss)  # type: ignore[assignment]
                new = None
        return _Captured(graph, own, own_gradient, loss, state, new)
