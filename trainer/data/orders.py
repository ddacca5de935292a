"""Which tokens train when: integers only, a function of the seed and the position, equal on every rank.

Three orders, one per value of `data.batching`: `DocumentOrder`, `StreamOrder` (in `stream_order`), `WindowOrder`. Each turns a
`Position` into the rows of one optimizer step and the position after it. No order looks at a clock, at the
number of workers or at a random generator with hidden state, so any position can be resumed from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.curriculum import Curriculum
from trainer.data.packing import PackPlan, pack_documents
from trainer.data.sampler import epoch_permutation, keyed_permutation, magic_prime, official_offsets
from trainer.errors import ConfigError, DataError

__all__ = [
    "SAMPLES_PER_MINI_EPOCH",
    "BatchOrder",
    "DocumentOrder",
    "LanePlan",
    "LaneState",
    "MicroRows",
    "PackedOrder",
    "Position",
    "Row",
    "Span",
    "WindowOrder",
    "cut_rows",
    "next_step",
    "rows_per_rank",
    "trainable_documents",
]

SAMPLES_PER_MINI_EPOCH = 40320
"""Samples, over all ranks, that the official trainer calls one epoch."""

_POOL_STEPS = 8
_MIN_DOCUMENT_TOKENS = 2

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """How the rows of an optimizer step are shared out.

    Raises:
        ConfigError: if a count is below 1.
    """

    world_size: int
    """Processes that train together."""
    rank: int
    """Number of this process, 0 .. world_size - 1."""
    rows_per_step: int
    """Rows of one optimizer step over all processes (`trainer.target_batch_size`)."""
    microbatch_size: int
    """Rows of one forward pass on one process."""
    ctx_len: int
    """Tokens per chunk."""
    seed: int
    """Seed of the document order."""
    curriculum: Curriculum = Curriculum()
    """What steps leave out of their documents."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        for name, value in (
            ("trainer.target_batch_size", self.rows_per_step),
            ("trainer.microbatch_size", self.microbatch_size),
            ("model.ctx_len", self.ctx_len),
        ):
            if value < 1:
                raise ConfigError(name, "is too small", found=value, rule="at least 1")


class Span(NamedTuple):
    """A run of (input, target) pairs from one place: inputs start .. start + num_targets - 1, targets one later."""

    document: int | None
    """Number of the document in the store; None: `start` counts in the flat token stream."""
    start: int
    """First input token."""
    num_targets: int
    """Pairs; reads num_targets + 1 tokens."""
    num_untrained: int = 0
    """Leading pairs that only build the state."""


Row = tuple[Span, ...]


class MicroRows(NamedTuple):
    """The rows of one micro-batch of one rank, longest first."""

    rows: tuple[Row, ...]
    lane_ids: tuple[int, ...] | None
    """Global lane numbers in `stream` batching, else None."""


class LaneState(NamedTuple):
    """Where the lanes of `stream` batching are: global, the same on every rank.

    The queue numbers its documents 0, 1, 2, ... over all epochs.
    """

    next_in_queue: int
    """Number of the document that the queue hands out next."""
    numbers: IntArray
    """int64 [rows_per_step], number of the document that each lane reads; -1 before its first one."""
    documents: IntArray
    """int64 [rows_per_step], that document's number in the store; -1 before the first one."""
    offsets: IntArray
    """int64 [rows_per_step], pairs of that document already trained."""


@dataclass(frozen=True)
class Position:
    """The optimizer step that comes next."""

    epoch: int = 0
    step: int = 0
    """Step in the epoch, below `steps_per_epoch`."""
    lanes: LaneState | None = None
    """Only in `stream` batching."""


class BatchOrder(Protocol):
    """Deals the rows of optimizer steps to one rank."""

    steps_per_epoch: int
    tokens_per_epoch: int
    """(input, target) pairs of one epoch over all ranks."""

    def first(self) -> Position:
        """Position of the first step of a run."""

    def step(self, position: Position) -> tuple[tuple[MicroRows, ...], Position]:
        """This rank's micro-batches of the step at `position`, and the position after it."""


def trainable_documents(sizes: IntArray) -> IntArray:
    """Numbers of the documents that have a target; DataError if there are none."""
    documents = np.flatnonzero(sizes >= _MIN_DOCUMENT_TOKENS)
    if len(documents) == 0:
        raise DataError(
            "data.data_path",
            "holds no document that can be trained on",
            found=f"{len(sizes)} documents, all shorter than {_MIN_DOCUMENT_TOKENS} tokens",
            fix="prepare the data set again from a source with text in it",
        )
    return documents


def next_step(position: Position, steps_per_epoch: int, lanes: LaneState | None = None) -> Position:
    """The position one step later."""
    if position.step + 1 < steps_per_epoch:
        return Position(position.epoch, position.step + 1, lanes)
    return Position(position.epoch + 1, 0, lanes)


def rows_per_rank(plan: LanePlan) -> int:
    """Rows of one process in a step; ConfigError if they do not divide into whole micro-batches."""
    unit = plan.world_size * plan.microbatch_size
    if plan.rows_per_step % unit:
        raise ConfigError(
            "trainer.target_batch_size",
            "does not divide into whole micro-batches",
            found=plan.rows_per_step,
            rule=f"a multiple of {unit} ({plan.world_size} processes x microbatch_size {plan.microbatch_size})",
            fix=f"set it to {-(-plan.rows_per_step // unit) * unit}",
        )
    return plan.rows_per_step // plan.world_size


def cut_rows(rows: list[Row], size: int, first_lane: int | None = None) -> tuple[MicroRows, ...]:
    """Micro-batches of at most `size` rows; rows that continue lanes count them from `first_lane`."""
    micro = []
    for start in range(0, len(rows), size):
        part = tuple(rows[start : start + size])
        lane_ids = None if first_lane is None else tuple(range(first_lane + start, first_lane + start + len(part)))
        micro.append(MicroRows(part, lane_ids))
    return tuple(micro)


# ---- documents ---------------------------------------------------------------------------------------


class DocumentOrder:
    """A row is a whole document; an epoch visits each document once.

    Shuffled: the epoch's permutation is taken in pools of 8 steps' worth of documents. A pool is sorted by
    length and cut into steps, and its steps are shuffled, so documents of like length meet in a step. The
    last `num_documents % rows_per_step` documents of the permutation make the epoch's last, short step.
    Unshuffled: steps are cut from the documents as they stand.

    Inside a step documents go longest first, in groups of world_size * microbatch_size; rank r gets the
    r-th slice of microbatch_size of each group, so all ranks' k-th micro-batches have similar lengths. In
    the last group a slice may be short or empty: then the rank has a micro-batch less.

    Args:
        sizes: int64 [num_documents], tokens. Documents with fewer than 2 have no target and are skipped.
        plan: how rows are shared out.
        shuffle: new order each epoch.
    """

    def __init__(self, sizes: IntArray, plan: LanePlan, *, shuffle: bool) -> None:
        self._sizes, self._plan, self._shuffle = sizes, plan, shuffle
        self._documents = trainable_documents(sizes)
        self._epoch_documents: tuple[int, IntArray] | None = None
        self.steps_per_epoch = -(-len(self._documents) // plan.rows_per_step)
        self.tokens_per_epoch = int(sizes[self._documents].sum()) - len(self._documents)

    def first(self) -> Position:
        """Position of the first step of a run."""
        return Position()

    def step(self, position: Position) -> tuple[tuple[MicroRows, ...], Position]:
        """This rank's micro-batches of the step at `position`, and the position after it."""
        plan = self._plan
        documents = self._longest_first(self._documents_of_step(position.epoch, position.step))
        group_size = plan.world_size * plan.microbatch_size
        limit = plan.curriculum.limit(position.epoch * self.steps_per_epoch + position.step)
        micro: list[MicroRows] = []
        for group in range(0, len(documents), group_size):
            start = group + plan.rank * plan.microbatch_size
            rows: list[Row] = [
                (self._span(doc, limit, position.epoch),)
                for doc in documents[start : start + plan.microbatch_size].tolist()
            ]
            rows.sort(key=lambda row: -row[0].num_targets)
            micro.extend(cut_rows(rows, plan.microbatch_size))
        return tuple(micro), next_step(position, self.steps_per_epoch)

    def _span(self, document: int, limit: int | None, epoch: int) -> Span:
        num_targets = int(self._sizes[document]) - 1
        first, end = self._plan.curriculum.window(num_targets, limit, epoch, document)
        return Span(document, 0, end, first)

    def _documents_of_step(self, epoch: int, step: int) -> IntArray:
        rows, documents = self._plan.rows_per_step, self._documents_of_epoch(epoch)
        whole_steps = len(documents) // rows
        if not self._shuffle or step >= whole_steps:
            return documents[step * rows : (step + 1) * rows]
        pool = step // _POOL_STEPS
        first_step = pool * _POOL_STEPS
        num_steps = min(_POOL_STEPS, whole_steps - first_step)
        pooled = self._longest_first(documents[first_step * rows : (first_step + num_steps) * rows])
        order = keyed_permutation(num_steps, self._plan.seed, epoch, pool)
        chosen = int(order[step - first_step])
        return pooled[chosen * rows : (chosen + 1) * rows]

    def _documents_of_epoch(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return self._documents
        if self._epoch_documents is None or self._epoch_documents[0] != epoch:
            order = epoch_permutation(len(self._documents), self._plan.seed, epoch)
            self._epoch_documents = (epoch, self._documents[order])
        return self._epoch_documents[1]

    def _longest_first(self, documents: IntArray) -> IntArray:
        return documents[np.argsort(-self._sizes[documents], kind="stable")]


class PackedOrder:
    """A row is several documents, with a reset where each starts; an epoch visits each document once.

    Documents are packed once, and the rows are dealt like the documents of `DocumentOrder`.

    Args:
        sizes: int64 [num_documents], tokens. Documents with fewer than 2 have no target and are skipped.
        plan: how rows are shared out.
        pack: how documents are packed.
        shuffle: new order of rows each epoch.
    """

    def __init__(self, sizes: IntArray, plan: LanePlan, pack: PackPlan, *, shuffle: bool) -> None:
        self._sizes = sizes
        documents = trainable_documents(sizes)
        self._rows = [documents[row] for row in pack_documents(sizes[documents] - 1, pack)]
        # A row of n documents has as many pairs as one document of its length.
        row_sizes = np.array([int((sizes[row] - 1).sum()) + 1 for row in self._rows], np.int64)
        self._order = DocumentOrder(row_sizes, plan, shuffle=shuffle)
        self.steps_per_epoch = self._order.steps_per_epoch
        self.tokens_per_epoch = self._order.tokens_per_epoch

    def first(self) -> Position:
        """Position of the first step of a run."""
        return Position()

    def step(self, position: Position) -> tuple[tuple[MicroRows, ...], Position]:
        """This rank's micro-batches of the step at `position`, and the position after it."""
        micro, after = self._order.step(position)
        return tuple(MicroRows(tuple(self._row(*row) for row in part.rows), None) for part in micro), after

    def _row(self, packed: Span) -> Row:
        assert packed.document is not None
        documents = self._rows[packed.document].tolist()
        return tuple(Span(doc, 0, int(self._sizes[doc]) - 1) for doc in documents)


# ---- windows -----------------------------------------------------------------------------------------


class WindowOrder:
    """The official trainer's order: fixed windows of ctx_len + 1 tokens of the flat token stream.

    Samples are counted through from 0. Step s has the samples s * rows_per_step and following, and rank
    r's i-th row is the sample s * rows_per_step + i * world_size + r: the official order where
    rows_per_step divides 40320, its natural continuation elsewhere. An epoch is the fewest steps that
    hold 40320 samples.

    Args:
        num_tokens: length of the flat token stream.
        plan: how rows are shared out.

    Raises:
        ConfigError: if rows_per_step is not a multiple of world_size * microbatch_size.
        DataError: if the stream is shorter than 3 windows.
    """

    def __init__(self, num_tokens: int, plan: LanePlan) -> None:
        self._plan = plan
        self._rows_per_rank = rows_per_rank(plan)
        self._prime = magic_prime(num_tokens, plan.ctx_len)
        self.steps_per_epoch = -(-SAMPLES_PER_MINI_EPOCH // plan.rows_per_step)
        self.tokens_per_epoch = self.steps_per_epoch * plan.rows_per_step * plan.ctx_len

    def first(self) -> Position:
        """Position of the first step of a run."""
        return Position()

    def step(self, position: Position) -> tuple[tuple[MicroRows, ...], Position]:
        """This rank's micro-batches of the step at `position`, and the position after it."""
        plan = self._plan
        start = (position.epoch * self.steps_per_epoch + position.step) * plan.rows_per_step
        samples = range(start + plan.rank, start + plan.rows_per_step, plan.world_size)
        rows: list[Row] = [
            (Span(None, offset, plan.ctx_len),) for offset in official_offsets(self._prime, plan.ctx_len, samples)
        ]
        return cut_rows(rows, plan.microbatch_size), next_step(position, self.steps_per_epoch)
