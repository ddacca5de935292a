"""Lanes whose documents are read from their source while training, with an exact position.

All processes read all documents and keep the tokens of their own lanes, so that they agree on every lane without
talking, and a position means the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.config.schema import DataConfig
from trainer.data.ahead import prepared_ahead
from trainer.data.lanes import StepBatch, build_batch, check_order_settings, steps_ahead
from trainer.data.orders import LanePlan, Row, Span, cut_rows, rows_per_rank
from trainer.data.store import FlatStore
from trainer.data.streaming import Block, Document, DocumentStream, Mark, StreamedSet, documents_store
from trainer.errors import CheckpointError

__all__ = ["STEPS_PER_EPOCH", "StreamingLanes"]

STEPS_PER_EPOCH = 1000
"""Steps that are called an epoch where the length of the data is not known."""


class _Place(NamedTuple):
    """A document of a source."""

    source: int
    mark: Mark
    number: int
    """Place in its block."""


@dataclass
class _Lane:
    place: _Place | None = None
    """None: between two documents."""
    document: Document | None = None
    """None in lanes of other processes."""
    num_targets: int = 0
    offset: int = 0
    """Pairs of the document already trained."""


class _Cursor:
    """Hands out the documents of one source."""

    def __init__(self, stream: DocumentStream, mark: Mark, index: int, drawn: int, num_proc: int) -> None:
        self._blocks = prepared_ahead(stream.blocks(mark, num_proc), 1)
        self.block = next(self._blocks)
        self.index, self.drawn = index, drawn
        if not 0 <= index <= self.block.num_documents:
            raise ValueError(f"document {index} of a block of {self.block.num_documents}")

    def take(self) -> tuple[Block, int]:
        """The next document's block and its place there."""
        if self.index == self.block.num_documents:
            self.block, self.index = next(self._blocks), 0
        self.index += 1
        self.drawn += int(self.block.places[self.index - 1, 2]) - 1
        return self.block, self.index - 1


class _Reader:
    """All lanes, with the tokens of a process's own, and the places in the sources.

    Args:
        streamed: the sources.
        state: a state of `StreamingLanes`; the blocks at hand are read again.
        own: lanes of this process.
        num_proc: processes that tokenize.
    """

    def __init__(self, streamed: StreamedSet, state: dict[str, Any], own: range, num_proc: int) -> None:
        self._weights, self._own = streamed.weights, own
        places = [_saved_lane(entry) for entry in state["lanes"]]
        starts = [[int(number) for number in entry] for entry in state["sources"]]
        self._cursors = [
            _Cursor(stream, Mark(*start[:3]), start[3], start[4], num_proc)
            for stream, start in zip(streamed.streams, starts, strict=True)
        ]
        blocks = {(source, cursor.block.mark): cursor.block for source, cursor in enumerate(self._cursors)}
        self._lanes: list[_Lane] = []
        for number, saved in enumerate(places):
            lane = _Lane()
            if saved is not None:
                place, offset = saved
                if place[:2] not in blocks:
                    blocks[place[:2]] = next(streamed.streams[place.source].blocks(place.mark))
                self._enter(lane, number, place, blocks[place[:2]])
                lane.offset = offset
            self._lanes.append(lane)

    def _enter(self, lane: _Lane, number: int, place: _Place, block: Block) -> None:
        lane.place, lane.offset = place, 0
        lane.num_targets = int(block.places[place.number, 2]) - 1
        lane.document = block.document(place.number) if number in self._own else None

    def rows(self, pairs_per_lane: int) -> tuple[FlatStore, list[Row]]:
        """The next pairs of each lane: the documents that own lanes need, and the own rows over them."""
        documents: list[Document] = []
        sources: list[int] = []
        rows: list[Row] = []
        for number, lane in enumerate(self._lanes):
            spans: list[Span] = []
            need = pairs_per_lane
            while need:
                if lane.place is None:
                    self._draw(lane, number)
                taken = min(need, lane.num_targets - lane.offset)
                if lane.document is not None and lane.place is not None:
                    spans.append(Span(len(documents), lane.offset, taken))
                    documents.append(lane.document)
                    sources.append(lane.place.source)
                need -= taken
                lane.offset += taken
                if lane.offset == lane.num_targets:
                    lane.place = lane.document = None
            if number in self._own:
                rows.append(tuple(spans))
        store = documents_store("data.source", documents)
        if len(self._cursors) > 1:
            store.source_ids = np.array(sources, np.int32)
        return store, rows

    def _draw(self, lane: _Lane, number: int) -> None:
        """Start the next document in a lane: of the source that has given the fewest tokens for its weight."""
        behind = [cursor.drawn / weight for cursor, weight in zip(self._cursors, self._weights, strict=True)]
        source = behind.index(min(behind))
        block, index = self._cursors[source].take()
        self._enter(lane, number, _Place(source, block.mark, index), block)

    def state(self) -> dict[str, Any]:
        """The places, as JSON."""
        return {
            "sources": [[*cursor.block.mark, cursor.index, cursor.drawn] for cursor in self._cursors],
            "lanes": [
                None if lane.place is None else [lane.place.source, *lane.place.mark, lane.place.number, lane.offset]
                for lane in self._lanes
            ],
        }


class StreamingLanes:
    """Iterable of one rank's `StepBatch`es over endless lanes, as `Lanes` in `stream` batching.

    An epoch is `STEPS_PER_EPOCH` steps; passes over the sources are not aligned with it. The next document
    comes from the source that has given the fewest tokens for its weight.

    Args:
        streamed: the sources.
        data: uses `chunks_per_step`, `num_proc`, and the `dataloader_` and `streaming_` settings.
        plan: how rows are shared out.

    Raises:
        ConfigError: if the rows of a step do not divide into lanes.
    """

    def __init__(self, streamed: StreamedSet, data: DataConfig, plan: LanePlan) -> None:
        self.plan = plan
        """How rows are shared out."""
        self._streamed, self._data = streamed, data
        rows = rows_per_rank(plan)
        self._own = range(plan.rank * rows, (plan.rank + 1) * rows)
        self._pairs_per_lane = data.chunks_per_step * plan.ctx_len
        self._order_settings: dict[str, object] = {
            "data.streaming": True,
            "data.source": streamed.digest,
            "data.streaming_shuffle_buffer": data.streaming_shuffle_buffer,
            "data.dataloader_shuffle_training": data.dataloader_shuffle_training,
            "data.sources": streamed.weights,
            "trainer.deterministic_order_seed": plan.seed,
            "trainer.target_batch_size": plan.rows_per_step,
        }
        start = [*Mark(0, 0, 0), 0, 0]
        self._state: dict[str, Any] = {
            "epoch": 0,
            "step_in_epoch": 0,
            "order": self._order_settings,
            "sources": [start for _ in streamed.streams],
            "lanes": [None] * plan.rows_per_step,
        }
        self._ready: tuple[dict[str, Any], _Reader] | None = None
        """A reader that stands at this state, after a whole epoch."""

    @property
    def total_trained_tokens(self) -> int:
        """(input, target) pairs of one epoch over all ranks."""
        return len(self) * self.plan.rows_per_step * self._pairs_per_lane

    def __len__(self) -> int:
        """Optimizer steps of an epoch."""
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[StepBatch]:
        for step, state in steps_ahead(self._steps(self._reader(), self._state), self._data):
            self._state = state
            yield step

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step handed out: global, equal on every rank, JSON, small."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position that `state_dict` gave, on any number of ranks.

        Raises:
            ConfigError: if a setting that decides the order differs from the checkpoint's.
            CheckpointError: if the state is not one of ours.
        """
        check_order_settings(state.get("order"), self._order_settings)
        self._state = state

    def _reader(self) -> _Reader:
        """A reader at the current position: the one that ended the last epoch, or a new one that reads blocks again."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is self._state:
            return ready[1]
        state = self._state
        try:
            if not 0 <= state["step_in_epoch"] < STEPS_PER_EPOCH or len(state["lanes"]) != self.plan.rows_per_step:
                raise ValueError(f"step {state['step_in_epoch']}, {len(state['lanes'])} lanes")
            return _Reader(self._streamed, state, self._own, self._data.num_proc)
        except (KeyError, TypeError, ValueError, IndexError) as err:
            raise CheckpointError("data position", "cannot be read", found=repr(err)) from err

    def _steps(self, reader: _Reader, state: dict[str, Any]) -> Iterator[tuple[StepBatch, dict[str, Any]]]:
        """The steps to the end of the epoch, each with the state after it."""
        epoch = state["epoch"]
        while state["epoch"] == epoch:
            store, rows = reader.rows(self._pairs_per_lane)
            micro_rows = cut_rows(rows, self.plan.microbatch_size, self._own.start)
            step, is_last = state["step_in_epoch"], state["step_in_epoch"] + 1 == STEPS_PER_EPOCH
            state = {
                "epoch": epoch + is_last,
                "step_in_epoch": 0 if is_last else step + 1,
                "order": self._order_settings,
                **reader.state(),
            }
            if is_last:
                self._ready = state, reader
            yield StepBatch(tuple(build_batch(store, micro) for micro in micro_rows), epoch, step, state), state


def _saved_lane(entry: list[int] | None) -> tuple[_Place, int] | None:
    if entry is None:
        return None
    source, epoch, file, batch, index, offset = (int(number) for number in entry)
    return _Place(source, Mark(epoch, file, batch), index), offset
