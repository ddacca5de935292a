"""One optimizer step's gradients: every chunk forward and backward, the state handed on.

Exact gradients across chunks need no more GPU memory than truncated ones. A window of several chunks is run
forward without a graph, keeping only the state at each border (on the host, for a GPU). Then its chunks are
replayed from the last to the first: forward with a graph, backward of

    loss_j + <state after chunk j, G_{j+1}>,        G_j = gradient of the state that enters chunk j.

The sum over chunks is the gradient of the whole window's loss, to rounding.

This module knows neither Lightning nor DeepSpeed: an `Engine` runs chunks and backwards.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.bptt.plan import Chunk, MicroPlan, StepPlan, boundary_stride
from trainer.config.schema import BpttWindow
from trainer.model.state import LayerState, ModelState, detach_state, map_state, state_tensors
from trainer.types import Batch

__all__ = ["ChunkInput", "EagerEngine", "Engine", "StepOptions", "StepResult", "run_step"]

MASKED_TOKENS = 16
"""Tokens of a chunk that only keeps this rank in step with the others."""


@dataclass(frozen=True)
class ChunkInput:
    """What the model sees of one chunk, on its device."""

    ids_BT: Tensor
    targets_BT: Tensor
    weight_BT: Tensor
    """Weights times world size over the step's total weight: the loss needs no further scaling."""
    reset_BT: Tensor | None
    state: ModelState
    group_BT: Tensor | None = None
    """int32, group of each target; None: losses by group are not wanted."""
    group_sums_2G: Tensor | None = None
    """Where they are summed, see `trainer.ops.loss.GroupSums`."""
    is_start: bool = False
    """All rows start here, so that a trained initial state is added to the zero one."""
    seed: int | None = None
    """Of what is random in the chunk, the same whenever it is computed again; None: nothing is."""


class Engine(Protocol):
    """Runs chunks through the training strategy, so that sharded gradients come out right."""

    def zero_state(self, rows: int) -> ModelState:
        """State before a document, for `rows` rows."""

    def evaluate(self, chunk: ChunkInput, *, with_loss: bool) -> tuple[Tensor | None, ModelState]:
        """Weighted loss (None without `with_loss`) and the state after the chunk, without a graph."""

    def train(
        self, chunk: ChunkInput, gradient: list[Tensor] | None, *, want_gradient: bool, is_last: bool
    ) -> tuple[Tensor, ModelState, list[Tensor] | None]:
        """Forward and backward of a chunk; parameter gradients are added to those of the step.

        Args:
            chunk: tokens and the state before them.
            gradient: gradient of the state after the chunk, by `state_tensors`; None = zero.
            want_gradient: whether to return the gradient of the state before the chunk.
            is_last: this backward completes the optimizer step's gradient.

        Returns:
            The weighted loss, the state after the chunk, and the gradient asked for; all without a graph.
        """


class EagerEngine(ABC):
    """An `Engine` from one differentiable forward call and one backward call."""

    @abstractmethod
    def zero_state(self, rows: int) -> ModelState:
        """State before a document, for `rows` rows."""

    @abstractmethod
    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """Weighted loss (None without `with_loss`) and the state after the chunk."""

    @abstractmethod
    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of `loss` to that of the step."""

    def evaluate(self, chunk: ChunkInput, *, with_loss: bool) -> tuple[Tensor | None, ModelState]:
        """See `Engine`."""
        with torch.no_grad():
            return self.forward(chunk, with_loss=with_loss, is_last=False)

    def train(
        self, chunk: ChunkInput, gradient: list[Tensor] | None, *, want_gradient: bool, is_last: bool
    ) -> tuple[Tensor, ModelState, list[Tensor] | None]:
        """See `Engine`."""
        entering = detach_state(chunk.state)
        if want_gradient:
            entering = map_state(lambda x: x.requires_grad_(), entering)
        loss, after = self.forward(replace(chunk, state=entering), with_loss=True, is_last=is_last)
        assert loss is not None
        total = loss
        if gradient is not None:
            total = _StateGradient.apply(gradient, loss, *state_tensors(after))  # type: ignore[no-untyped-call]
        self.backward(total, is_last=is_last)
        new = [x.grad for x in state_tensors(entering) if x.grad is not None] if want_gradient else None
        return loss.detach(), detach_state(after), new


@dataclass
class StepResult:
    """What a step leaves behind besides gradients."""

    total_weight: float = 1.0
    """Sum of token weights over all ranks."""
    waiting_share: float = 0.0
    """See `StepPlan`."""
    losses: list[Tensor] = field(default_factory=list)
    """Weighted loss of each trained chunk; their sum over all ranks / world size is the step's mean loss."""
    labels: list[tuple[int, int]] = field(default_factory=list)
    """(micro-batch, chunk) of each loss."""
    states: list[ModelState | None] = field(default_factory=list)
    """State after each micro-batch, for rows that are continued in the next step."""


class _StateGradient(torch.autograd.Function):
    """Identity on the loss whose backward also feeds given gradients into the outgoing state.

    The gradients are handed on as they are, not times the upstream gradient: they were made from losses that
    had the same factor already, and a second one would compound over the chunks.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], loss: Tensor, *state: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, upstream, *ctx.gradients)


def _rows(state: ModelState, rows: int) -> ModelState:
    """The first `rows` rows of a state."""
    if state[0].wkv.shape[0] == rows:
        return state
    return map_state(lambda x: x[:rows], state)


def _pad_rows(gradient: Tensor, like: Tensor) -> Tensor:
    """Gradient of the rows that go on, zero for the rows that ended with this chunk."""
    if gradient.shape[0] == like.shape[0]:
        return gradient
    return torch.cat((gradient, gradient.new_zeros(like.shape[0] - gradient.shape[0], *gradient.shape[1:])))


class _Boundaries:
    """States at chunk borders: pinned host memory for a GPU, as they are on a CPU."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}

    def put(self, index: int, state: ModelState) -> None:
        tensors = [x.detach() for x in state_tensors(state)]
        if tensors[0].is_cuda:
            tensors = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        self._kept[index] = tensors

    def __contains__(self, index: int) -> bool:
        return index in self._kept

    def pop(self, index: int, device: torch.device) -> ModelState:
        moved = [x.to(device, non_blocking=True) for x in self._kept.pop(index)]
        return tuple(LayerState(*moved[i : i + 3]) for i in range(0, len(moved), 3))


class _MicroRun:
    """Runs the chunks of one micro-batch."""

    def __init__(
        self,
        engine: Engine,
        batch: Batch | None,
        plan: MicroPlan,
        scale: float,
        device: torch.device,
        group_sums_2G: Tensor | None,
        *,
        starts_anew: bool,
        seed: str | None = None,
    ) -> None:
        self.engine, self.batch, self.plan, self.scale, self.device = engine, batch, plan, scale, device
        self.group_sums_2G, self.starts_anew, self.seed = group_sums_2G, starts_anew, seed
        self.losses: list[Tensor] = []
        self.labels: list[int] = []

    def _input(self, index: int, state: ModelState) -> ChunkInput:
        chunk, is_start = self.plan.chunks[index], index == 0 and self.starts_anew
        seed = None if self.seed is None else chunk_seed(self.seed, index)
        if not chunk.rows:
            ids = torch.zeros(1, MASKED_TOKENS, dtype=torch.int64, device=self.device)
            weight = torch.zeros(1, MASKED_TOKENS, device=self.device)
            return ChunkInput(ids, ids, weight, None, state, is_start=is_start, seed=seed)
        assert self.batch is not None
        part = (slice(0, chunk.rows), slice(chunk.start, chunk.stop))
        reset = self.batch.reset_BT[part]
        # Rows that start anew have a zero state at token 0 already: no mask is needed for that reset.
        inner = reset[:, 1:] if chunk.start == 0 and self.batch.lane_ids is None else reset
        group = None if self.group_sums_2G is None else self.batch.group_BT
        return ChunkInput(
            self.batch.ids_BT[part].to(self.device, non_blocking=True),
            self.batch.targets_BT[part].to(self.device, non_blocking=True),
            self.batch.weight_BT[part].to(self.device, non_blocking=True) * self.scale,
            reset.to(self.device, non_blocking=True) if bool(inner.any()) else None,
            state,
            None if group is None else group[part].to(self.device, non_blocking=True),
            None if group is None else self.group_sums_2G,
            is_start,
            seed,
        )

    def _entering(self, chunk: Chunk, state: ModelState) -> ModelState:
        """State of the rows that are left, or of one masked row."""
        return _rows(state, chunk.rows) if chunk.rows else self.engine.zero_state(1)

    def _forward_only(self, index: int, state: ModelState) -> ModelState:
        chunk = self.plan.chunks[index]
        _, after = self.engine.evaluate(self._input(index, self._entering(chunk, state)), with_loss=False)
        return after if chunk.rows else state

    def evaluate(self, index: int, state: ModelState) -> ModelState:
        """State after one chunk, whose losses are summed by group."""
        chunk = self.plan.chunks[index]
        _, after = self.engine.evaluate(self._input(index, self._entering(chunk, state)), with_loss=True)
        return after if chunk.rows else state

    def _train(
        self, index: int, state: ModelState, gradient: list[Tensor] | None, want_gradient: bool, is_last: bool
    ) -> tuple[ModelState, list[Tensor] | None]:
        """Forward and backward of one chunk: the state after it, and the gradient of the state before it.

        A masked chunk builds the same graph as any other, because ZeRO-3 compares the order in which ranks
        use their modules; its gradients are zero.
        """
        chunk = self.plan.chunks[index]
        entering = self._entering(chunk, state)
        if gradient is not None:
            gradient = [_pad_rows(g, x) for g, x in zip(gradient, state_tensors(entering), strict=True)]
        loss, after, new = self.engine.train(
            self._input(index, entering), gradient, want_gradient=want_gradient, is_last=is_last
        )
        self.losses.append(loss)
        self.labels.append(index)
        return after if chunk.rows else state, new

    def run(self, state: ModelState, ends_step: bool, max_kept: int) -> ModelState:
        """All chunks; returns the state after the last token, detached."""
        for index in range(self.plan.first_trained):
            state = self._forward_only(index, state)
        for number, window in enumerate(self.plan.windows):
            last = ends_step and number == len(self.plan.windows) - 1
            state = self._run_window(window, state, last, max_kept)
        return state

    def _run_window(self, window: range, state: ModelState, ends_step: bool, max_kept: int) -> ModelState:
        """Forward through all chunks but the last, then train them from the last to the first."""
        stride = boundary_stride(len(window) - 1, max_kept)
        last_head = window[0] + (len(window) - 1) // stride * stride
        kept = _Boundaries()
        for index in window[:-1]:
            if (index - window[0]) % stride == 0 or index > last_head:
                kept.put(index, state)
            state = self._forward_only(index, state)
        final, gradient = self._train(window[-1], state, None, len(window) > 1, ends_step and len(window) == 1)
        for index in reversed(window[:-1]):
            if index not in kept:
                self._replay(window[0] + (index - window[0]) // stride * stride, index, kept)
            is_first = index == window[0]
            entering = kept.pop(index, self.device)
            _, gradient = self._train(index, entering, gradient, not is_first, ends_step and is_first)
        return final

    def _replay(self, head: int, index: int, kept: _Boundaries) -> None:
        """Recompute the states after kept chunk border `head`, up to that of chunk `index`."""
        state = kept.pop(head, self.device)
        for j in range(head, index):
            kept.put(j, state)
            state = self._forward_only(j, state)
        kept.put(index, state)


def chunk_seed(seed: str, index: int) -> int:
    """Seed of one chunk of a micro-batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:7], "little")


def _starts_anew(batch: Batch | None, state: ModelState | None) -> bool:
    """Whether rows begin with a document and no given state. A rank without rows does as the others do."""
    return state is None and (batch is None or batch.lane_ids is None)


def _apply_learning_range(batch: Batch, ctx_len: int, learning_range: int) -> Batch:
    """Weight 0 for all but the last `learning_range` chunks of each row."""
    if learning_range <= 0:
        return batch
    weight = batch.weight_BT.clone()
    for row, length in enumerate(batch.lengths):
        weight[row, : max(0, -(-length // ctx_len) - learning_range) * ctx_len] = 0
    return batch._replace(weight_BT=weight)


def _leading_untrained(weight_BT: Tensor) -> int:
    """Leading tokens that no row trains."""
    is_trained = (weight_BT != 0).any(0)
    return int(is_trained.int().argmax()) if bool(is_trained.any()) else weight_BT.shape[1]


def _state_bytes(state: ModelState) -> int:
    return sum(x.numel() * x.element_size() for x in state_tensors(state))


@dataclass(frozen=True)
class StepOptions:
    """The settings that a step needs; see `trainer.config.schema.ModelConfig`."""

    ctx_len: int
    window: BpttWindow
    learning_range: int
    host_memory_bytes: int
    num_micro: int
    """Most micro-batches that a rank has in a step."""
    micro_rows: int
    """Rows of a full micro-batch."""
    seed: str | None = None
    """Of what is random in the step on this rank, such as dropout; None: nothing is."""


def run_step(
    engine: Engine,
    batches: Sequence[Batch],
    states: Sequence[ModelState | None],
    options: StepOptions,
    *,
    device: torch.device,
    world_size: int,
    gather: Callable[[list[float]], list[list[float]]],
    group_sums_2G: Tensor | None = None,
) -> StepResult:
    """Gradients of one optimizer step, added to those that the engine holds.

    The gradient is that of the step's loss: the weighted mean of all trained tokens on all ranks. How tokens
    are split over chunks, micro-batches and ranks does not change it.

    Args:
        engine: runs chunks through the strategy.
        batches: this rank's micro-batches, on the CPU.
        states: state that each micro-batch continues; None = zero.
        options: settings.
        device: where the model is.
        world_size: ranks; the engine averages gradients over them, so losses carry this factor, here only.
        gather: one exchange of a list of numbers between all ranks.
        group_sums_2G: this rank's losses and weights by group are added here, both times world size over
            `StepResult.total_weight`; no host waits for them.
    """
    batches = [_apply_learning_range(batch, options.ctx_len, options.learning_range) for batch in batches]
    plan = StepPlan.agree(
        [batch.lengths for batch in batches],
        float(sum(batch.weight_BT.sum(dtype=torch.float64) for batch in batches)),
        ctx_len=options.ctx_len,
        window=options.window,
        learning_range=options.learning_range,
        num_micro=options.num_micro,
        gather=gather,
        untrained=[_leading_untrained(batch.weight_BT) for batch in batches],
    )
    scale = world_size / plan.total_weight
    result = StepResult(total_weight=plan.total_weight, waiting_share=plan.waiting_share)
    for number, micro in enumerate(plan.micro):
        batch = batches[number] if number < len(batches) else None
        state = states[number] if number < len(states) else None
        seed = None if options.seed is None else f"{options.seed}:{number}"
        run = _MicroRun(
            engine, batch, micro, scale, device, group_sums_2G, starts_anew=_starts_anew(batch, state), seed=seed
        )
        if state is None:
            state = engine.zero_state(len(batch.lengths) if batch is not None and batch.lengths else 1)
        # As for a full micro-batch, so that all ranks replay the same chunks.
        full_bytes = _state_bytes(state) // len(state[0].wkv) * options.micro_rows
        max_kept = max(1, options.host_memory_bytes // full_bytes)
        final = run.run(state, number == len(plan.micro) - 1, max_kept)
        result.losses += run.losses
        result.labels += [(number, index) for index in run.labels]
        result.states.append(final if batch is not None else None)
    return result


@torch.no_grad()
def evaluate_step(
    engine: Engine,
    batches: Sequence[Batch],
    options: StepOptions,
    *,
    device: torch.device,
    gather: Callable[[list[float]], list[list[float]]],
    group_sums_2G: Tensor,
    states: Sequence[ModelState | None] = (),
) -> list[ModelState]:
    """Add this rank's losses and weights by group to `group_sums_2G`, without gradients; no host waits for them.

    Ranks agree on the number of chunks as in `run_step`.

    Returns:
        The state after each micro-batch, of the rows that are as long as the longest.
    """
    plan = StepPlan.agree(
        [batch.lengths for batch in batches],
        0.0,
        ctx_len=options.ctx_len,
        window=1,
        learning_range=-1,
        num_micro=options.num_micro,
        gather=gather,
    )
    after = []
    for number, micro in enumerate(plan.micro):
        batch = batches[number] if number < len(batches) else None
        state = states[number] if number < len(states) else None
        run = _MicroRun(engine, batch, micro, 1.0, device, group_sums_2G, starts_anew=_starts_anew(batch, state))
        if state is None:
            state = engine.zero_state(len(batch.lengths) if batch is not None and batch.lengths else 1)
        for index in range(len(micro.chunks)):
            state = run.evaluate(index, state)
        after.append(state)
    return after
