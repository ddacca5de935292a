"""Token documents as optimizer steps of one rank, prepared ahead by a thread and resumable at any step.

`orders` decides with integers which tokens a step has; here they are read and laid out as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.schema import DataConfig
from trainer.data.ahead import prepared_ahead
from trainer.data.curriculum import Curriculum
from trainer.data.orders import (
    BatchOrder,
    DocumentOrder,
    LanePlan,
    MicroRows,
    PackedOrder,
    Position,
    Row,
    WindowOrder,
)
from trainer.data.packing import PackPlan
from trainer.data.positions import group_of, position_buckets
from trainer.data.store import TokenStore
from trainer.data.stream_order import StreamOrder
from trainer.errors import CheckpointError, ConfigError
from trainer.logs import get_logger, log_once
from trainer.types import Batch

__all__ = [
    "LanePlan",
    "Lanes",
    "StepBatch",
    "ValidationLanes",
    "build_batch",
    "check_order_settings",
    "steps_ahead",
]

At = TypeVar("At")
logger = get_logger(__name__)

# Which targets of a document are trained: see `Curriculum.keep`.
Keep = Callable[[int, int, int], "NDArray[np.bool_] | None"]


class StepBatch:
    """All that one rank trains in one optimizer step.

    A plain class on purpose. Lightning looks into tuples, dicts and dataclasses and casts their floating
    tensors to the training precision: token weights in bf16 no longer sum up to the number of tokens.

    Args:
        microbatches: see the attribute.
        epoch: see the attribute.
        step_in_epoch: see the attribute.
        position: see the attribute.
    """

    __slots__ = ("epoch", "microbatches", "num_tokens", "position", "step_in_epoch")

    def __init__(
        self, microbatches: tuple[Batch, ...], epoch: int, step_in_epoch: int, position: dict[str, Any] | None = None
    ) -> None:
        self.microbatches = microbatches
        """Empty if the rank has no rows in this step (the last, short step of an epoch of documents)."""
        self.epoch = epoch
        """Counted from 0."""
        self.step_in_epoch = step_in_epoch
        """Counted from 0."""
        self.num_tokens = sum(sum(batch.lengths) for batch in microbatches)
        """Input tokens of this rank in this step; padding is not counted."""
        self.position = position
        """What `Lanes.state_dict` gives once this step is handed out; None in validation."""


class Lanes:
    """Iterable of one rank's `StepBatch`es, with an exact position.

    One `iter()` gives the rest of the current epoch: all of it, or what follows the last step handed out,
    be that in this process or before `load_state_dict`. Every step, at any position, is a function of the
    data, the seed, the plan and the position alone. Ranks agree on the number of steps and on each step's
    rows without talking to each other.

    Args:
        store: tokens of the training set.
        data: uses `batching`, `chunks_per_step` and the three `dataloader_` settings.
        plan: how rows are shared out.

    Raises:
        ConfigError: if the rows of a step do not divide into lanes or windows.
        DataError: if there is nothing to train on.
    """

    def __init__(self, store: TokenStore, data: DataConfig, plan: LanePlan) -> None:
        self.plan = plan
        """How rows are shared out."""
        self._store, self._data = store, data
        self._order = _make_order(store, data, plan)
        self._order_settings = _order_settings(store, data, plan)
        self._position = self._order.first()
        self.num_skipped_documents = 0 if data.batching == "windows" else int((store.sizes < 2).sum())
        if self.num_skipped_documents:
            log_once(logger, "documents without a target token, skipped: %d", self.num_skipped_documents)

    @property
    def total_trained_tokens(self) -> int:
        """(input, target) pairs of one epoch over all ranks, for progress and time left."""
        return self._order.tokens_per_epoch

    def __len__(self) -> int:
        """Optimizer steps of a whole epoch: exact, the same for every epoch, rank and position."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        built = (
            (StepBatch(batches, at.epoch, at.step, self._state_at(after)), after)
            for batches, at, after in _build_epoch(self._store, self._order, self._position, self.plan.curriculum)
        )
        for step, after in steps_ahead(built, self._data):
            self._position = after
            yield step

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step handed out: global, equal on every rank, JSON, small.

        Steps that were prepared ahead and not handed out do not count.
        """
        return self._state_at(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position that `state_dict` gave, on any number of ranks.

        The number of ranks, the micro-batch size, prefetching and, except in `windows`, ctx_len may differ.

        Raises:
            ConfigError: if a setting that decides the order differs from the checkpoint's.
            CheckpointError: if the state is not one of ours.
        """
        check_order_settings(state.get("order"), self._order_settings)
        try:
            self._position = self._read_position(state)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as err:
            raise CheckpointError("data position", "cannot be read", found=repr(err)) from err

    def _read_position(self, state: dict[str, Any]) -> Position:
        position = Position(int(state["epoch"]), int(state["step_in_epoch"]))
        if position.epoch < 0 or not 0 <= position.step < len(self):
            raise ValueError(f"step {position.step} of epoch {position.epoch}, which has {len(self)} steps")
        if not isinstance(self._order, StreamOrder):
            return position
        lanes = np.array(state["lanes"], np.int64).reshape(self.plan.rows_per_step, 2)
        return self._order.resume(position, int(state["next_in_queue"]), lanes[:, 0].copy(), lanes[:, 1].copy())

    def _state_at(self, position: Position) -> dict[str, Any]:
        state: dict[str, Any] = {
            "epoch": position.epoch,
            "step_in_epoch": position.step,
            "order": dict(self._order_settings),
        }
        if position.lanes is not None:
            lanes = position.lanes
            state["next_in_queue"] = lanes.next_in_queue
            state["lanes"] = np.stack([lanes.numbers, lanes.offsets], axis=1).tolist()
        return state


class ValidationLanes:
    """Iterable of one rank's `StepBatch`es of a validation set: each document once, in the store's order.

    Every `iter()` starts at the first document. A step has microbatch_size documents for each rank; all
    ranks have the same number of steps, and in the last one a rank may have no row. `plan.rows_per_step`
    is not used.

    Raises:
        DataError: if there is no document with a target.
    """

    def __init__(self, store: TokenStore, data: DataConfig, plan: LanePlan) -> None:
        self._store, self._data = store, data
        plan = replace(plan, rows_per_step=plan.world_size * plan.microbatch_size, curriculum=Curriculum())
        self._order = DocumentOrder(store.sizes, plan, shuffle=False)

    def __len__(self) -> int:
        """Steps of one pass."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        built = (
            (StepBatch(batches, at.epoch, at.step), after)
            for batches, at, after in _build_epoch(self._store, self._order, self._order.first(), Curriculum())
        )
        for step, _ in steps_ahead(built, self._data):
            yield step


def _make_order(store: TokenStore, data: DataConfig, plan: LanePlan) -> BatchOrder:
    if data.batching == "windows":
        return WindowOrder(store.num_tokens, plan)
    shuffle = data.dataloader_shuffle_training and not data.sort_by_length
    if data.packing_enable:
        return PackedOrder(store.sizes, plan, _pack_plan(data, plan), shuffle=shuffle)
    if data.batching == "stream":
        return StreamOrder(store.sizes, plan, data.chunks_per_step * plan.ctx_len, shuffle=shuffle)
    return DocumentOrder(store.sizes, plan, shuffle=shuffle)


def _pack_plan(data: DataConfig, plan: LanePlan) -> PackPlan:
    return PackPlan(
        multiple=data.packing_chunksize or plan.ctx_len,
        least=max(0, data.packing_min_ctx_len),
        pool_size=data.packing_batchsize,
        in_sequence=data.packing_in_sequence,
        seed=plan.seed,
    )


def _order_settings(store: TokenStore, data: DataConfig, plan: LanePlan) -> dict[str, object]:
    """The settings that decide which tokens a position means, by their names in the config."""
    settings: dict[str, object] = {
        "data.batching": data.batching,
        "data.data_path": store.digest,
        "trainer.target_batch_size": plan.rows_per_step,
    }
    if data.batching == "windows":
        return settings | {"model.ctx_len": plan.ctx_len}
    if data.packing_enable:
        pack = _pack_plan(data, plan)
        settings["data.packing_enable"] = [pack.multiple, pack.least, pack.pool_size, pack.in_sequence]
    return settings | {
        "data.dataloader_shuffle_training": data.dataloader_shuffle_training and not data.sort_by_length,
        "trainer.deterministic_order_seed": plan.seed,
    }


def check_order_settings(saved: object, current: dict[str, object]) -> None:
    """Refuse a position that was made with other settings of the order.

    Raises:
        ConfigError: names the first setting that differs.
        CheckpointError: `saved` holds no settings.
    """
    if not isinstance(saved, dict):
        raise CheckpointError("data position", "has no settings of its order", found=repr(saved))
    for name, value in current.items():
        if name not in saved or saved[name] != value:
            raise ConfigError(
                name,
                "differs from the checkpoint's, so its position in the data means nothing here",
                found=value,
                rule=f"{saved.get(name)!r} to resume",
                fix="restore the setting (for data_path: the data), or start a new run from the weights",
            )


def _build_epoch(
    store: TokenStore, order: BatchOrder, position: Position, curriculum: Curriculum
) -> Iterator[tuple[tuple[Batch, ...], Position, Position]]:
    """The steps from `position` to the end of its epoch, each with its position and the one after it."""
    epoch = position.epoch
    while position.epoch == epoch:
        micro_rows, after = order.step(position)
        keep = partial(curriculum.keep, epoch)
        yield tuple(build_batch(store, micro, keep) for micro in micro_rows), position, after
        position = after


def build_batch(store: TokenStore, micro: MicroRows, keep: Keep | None = None) -> Batch:
    """The tokens of a micro-batch as tensors; `keep` says which of a document's targets are trained."""
    lengths = tuple(sum(span.num_targets for span in row) for row in micro.rows)
    shape = (len(lengths), lengths[0])
    ids_BT, targets_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    weight_BT, reset_BT = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    group_BT = np.zeros(shape, np.int32)
    for i, row in enumerate(micro.rows):
        _fill_row(store, row, (ids_BT[i], targets_BT[i], weight_BT[i], reset_BT[i], group_BT[i]), keep)
    return Batch(
        torch.from_numpy(ids_BT),
        torch.from_numpy(targets_BT),
        torch.from_numpy(weight_BT),
        torch.from_numpy(reset_BT),
        lengths,
        micro.lane_ids,
        torch.from_numpy(group_BT),
    )


def _fill_row(store: TokenStore, row: Row, arrays: Sequence[NDArray[Any]], keep: Keep | None) -> None:
    ids_T, targets_T, weight_T, reset_T, group_T = arrays
    at = 0
    for document, start, num, num_untrained in row:
        stop, here = start + num + 1, slice(at, at + num)
        if document is None:
            tokens, mask = store.read_flat(start, stop), None
            group_T[here] = position_buckets(0, num)
        else:
            tokens, mask = store.read(document, start, stop), store.loss_mask(document, start + 1, stop)
            source = 0 if store.source_ids is None else int(store.source_ids[document])
            group_T[here] = group_of(source, position_buckets(start, num))
        ids_T[here], targets_T[here] = tokens[:-1], tokens[1:]
        weight_T[here] = 1 if mask is None else mask
        weight_T[at : at + num_untrained] = 0
        is_kept = None if keep is None else keep(-1 if document is None else document, start, num)
        if is_kept is not None:
            weight_T[here] *= is_kept
        reset_T[at] = document is None or start == 0
        at += num


def steps_ahead(built: Iterator[tuple[StepBatch, At]], data: DataConfig) -> Iterator[tuple[StepBatch, At]]:
    """The same items, some of them prepared ahead by one background thread, and pinned if there is a GPU."""
    pin_memory = data.dataloader_pin_memory and torch.cuda.is_available()
    if pin_memory:
        built = ((_pin_memory(step), after) for step, after in built)
    # A thread starts on GPU 0; pinning from there would open a second context on it for every process.
    use_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if pin_memory else None
    return prepared_ahead(built, data.dataloader_prefetch_factor, use_device)


def _pin_memory(step: StepBatch) -> StepBatch:
    step.microbatches = tuple(
        batch._replace(
            ids_BT=batch.ids_BT.pin_memory(),
            targets_BT=batch.targets_BT.pin_memory(),
            weight_BT=batch.weight_BT.pin_memory(),
            reset_BT=batch.reset_BT.pin_memory(),
            group_BT=None if batch.group_BT is None else batch.group_BT.pin_memory(),
        )
        for batch in step.microbatches
    )
    return step
