"""The order of `stream` batching: endless lanes that draw whole documents from one queue. Integers only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.orders import (
    LanePlan,
    LaneState,
    MicroRows,
    Position,
    Row,
    Span,
    cut_rows,
    next_step,
    rows_per_rank,
    trainable_documents,
)
from trainer.data.sampler import epoch_permutation

__all__ = ["StreamOrder"]

IntArray = NDArray[np.int64]


class _QueueEpoch(NamedTuple):
    epoch: int
    documents: IntArray
    """In the order in which they are handed out."""
    ends: IntArray
    """Pairs up to and with each document."""


class _Queue:
    """The one queue of documents: epoch permutations one after another, numbered through."""

    def __init__(self, sizes: IntArray, seed: int, *, shuffle: bool) -> None:
        self._sizes, self._seed, self._shuffle = sizes, seed, shuffle
        self._trainable = trainable_documents(sizes)
        self._epochs: tuple[_QueueEpoch, ...] = ()
        self.num_targets = int(sizes[self._trainable].sum()) - len(self._trainable)

    def _epoch(self, epoch: int) -> _QueueEpoch:
        for kept in self._epochs:
            if kept.epoch == epoch:
                return kept
        documents = self._trainable
        if self._shuffle:
            documents = documents[epoch_permutation(len(documents), self._seed, epoch)]
        made = _QueueEpoch(epoch, documents, np.cumsum(self._sizes[documents] - 1))
        # Replaced, never changed: an abandoned iterator's thread may still be looking.
        self._epochs = (made, *self._epochs[:1])
        return made

    def documents(self, numbers: IntArray) -> IntArray:
        """Documents of the store behind queue numbers, each >= 0."""
        epochs, places = np.divmod(numbers, len(self._trainable))
        documents = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            documents[chosen] = self._epoch(epoch).documents[places[chosen]]
        return documents

    def draw(self, number: int, num_targets: int) -> tuple[int, int]:
        """Take whole documents from `number` on until they hold `num_targets` >= 1 pairs.

        Returns:
            the number after the last document taken, and how many of the pairs lie in that document.
        """
        while True:
            epoch, place = divmod(number, len(self._trainable))
            ends = self._epoch(epoch).ends
            before = int(ends[place - 1]) if place else 0
            last = int(np.searchsorted(ends, before + num_targets))
            if last < len(ends):
                start_of_last = int(ends[last - 1]) if last else 0
                return number - place + last + 1, before + num_targets - start_of_last
            num_targets -= int(ends[-1]) - before
            number += len(ends) - place


class StreamOrder:
    """A row is an endless lane of documents, and every step trains exactly `pairs_per_lane` pairs of each lane.

    All lanes draw from one queue: the epochs' permutations one after another. In a step lanes draw in the
    order of their numbers, each until it has its pairs. Every rank simulates all lanes, with integers
    only, so the state is global. Rank r owns the lanes r * rows_per_step / world_size and following.

    A document of L tokens gives L - 1 pairs: inputs are tokens 0 .. L-2, targets 1 .. L-1. The next
    document's token 0 is the next input, with a reset there. So no target crosses a document, no document's
    last token (its end mark) is an input, and nothing is padding.

    An epoch is the fewest steps that train as many pairs as the data set holds, the same number each time.
    After k epochs the queue has handed out every document at least k times, and a lane in the middle of a
    document carries on with it in the next epoch. A fixed number is what Lightning needs to know the last
    step of an epoch (validation, end-of-epoch checkpoints).

    Args:
        sizes: int64 [num_documents], tokens. Documents with fewer than 2 have no target and are skipped.
        plan: how rows are shared out.
        pairs_per_lane: chunks_per_step * ctx_len.
        shuffle: new order each epoch.

    Raises:
        ConfigError: if rows_per_step is not a multiple of world_size * microbatch_size.
    """

    def __init__(self, sizes: IntArray, plan: LanePlan, pairs_per_lane: int, *, shuffle: bool) -> None:
        self._sizes, self._plan, self._pairs_per_lane = sizes, plan, pairs_per_lane
        self._rows_per_rank = rows_per_rank(plan)
        self._queue = _Queue(sizes, plan.seed, shuffle=shuffle)
        pairs_per_step = plan.rows_per_step * pairs_per_lane
        self.steps_per_epoch = -(-self._queue.num_targets // pairs_per_step)
        self.tokens_per_epoch = self.steps_per_epoch * pairs_per_step

    def first(self) -> Position:
        """Position of the first step of a run: every lane is about to draw its first document."""
        none = np.full(self._plan.rows_per_step, -1, np.int64)
        return Position(0, 0, LaneState(0, none, none, np.zeros_like(none)))

    def resume(self, position: Position, next_in_queue: int, numbers: IntArray, offsets: IntArray) -> Position:
        """Position with its lane state rebuilt from the three parts that are saved; see `LaneState`.

        Raises:
            ValueError: if no run can have such lanes.
        """
        started = numbers >= 0
        if numbers.min() < -1 or numbers.max() >= max(next_in_queue, 0):
            raise ValueError(f"lanes {numbers.tolist()} of a queue at {next_in_queue}")
        documents = np.full_like(numbers, -1)
        documents[started] = self._queue.documents(numbers[started])
        if offsets.min() < 0 or (offsets > np.where(started, self._sizes[documents] - 1, 0)).any():
            raise ValueError(f"offsets {offsets.tolist()} beyond the lanes' documents")
        return Position(position.epoch, position.step, LaneState(next_in_queue, numbers, documents, offsets))

    def step(self, position: Position) -> tuple[tuple[MicroRows, ...], Position]:
        """This rank's micro-batches of the step at `position`, and the position after it."""
        before = position.lanes
        assert before is not None
        first_own = self._plan.rank * self._rows_per_rank
        own = range(first_own, first_own + self._rows_per_rank)
        rest = np.where(before.documents >= 0, self._sizes[before.documents] - 1 - before.offsets, 0)
        carried = np.minimum(rest, self._pairs_per_lane)
        queue, numbers, offsets = before.next_in_queue, before.numbers.copy(), before.offsets + carried
        rows: list[Row] = []
        for lane, (document, start, num) in enumerate(
            zip(before.documents.tolist(), before.offsets.tolist(), carried.tolist(), strict=True)
        ):
            drawn_from = queue
            if num < self._pairs_per_lane:
                queue, offsets[lane] = self._queue.draw(queue, self._pairs_per_lane - num)
                numbers[lane] = queue - 1
            if lane in own:
                head = (Span(document, start, num),) if num else ()
                rows.append(head + self._drawn_spans(drawn_from, queue, int(offsets[lane])))
        documents = before.documents.copy()
        drew = numbers != before.numbers
        documents[drew] = self._queue.documents(numbers[drew])
        lanes = LaneState(queue, numbers, documents, offsets)
        return cut_rows(rows, self._plan.microbatch_size, first_own), next_step(position, self.steps_per_epoch, lanes)

    def _drawn_spans(self, start: int, stop: int, used_of_last: int) -> Row:
        """Documents start .. stop - 1 of the queue from their first token on, the last one only in part."""
        if start == stop:
            return ()
        documents = self._queue.documents(np.arange(start, stop))
        num_targets = self._sizes[documents] - 1
        num_targets[-1] = used_of_last
        return tuple(Span(doc, 0, num) for doc, num in zip(documents.tolist(), num_targets.tolist(), strict=True))
