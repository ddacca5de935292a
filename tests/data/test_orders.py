from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.orders import DocumentOrder, LanePlan, WindowOrder
from trainer.data.sampler import magic_prime, official_offsets
from trainer.data.stream_order import StreamOrder
from trainer.errors import ConfigError

OFFICIAL = json.loads((Path(__file__).parents[1] / "fixtures" / "official_order.json").read_text())


def make_plan(**changes):
    values = {"world_size": 1, "rank": 0, "rows_per_step": 4, "microbatch_size": 2, "ctx_len": 8, "seed": 7}
    return LanePlan(**(values | changes))


@pytest.mark.parametrize("run", OFFICIAL["recorded_runs"], ids=lambda run: f"ctx{run['ctx_len']}")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_window_order_equals_recorded_official_runs(run, world_size):
    rows = run["micro_bsz"]
    offsets = [[0] * rows for _ in run["offsets"]]
    for rank in range(world_size):
        plan = make_plan(
            world_size=world_size,
            rank=rank,
            rows_per_step=rows,
            microbatch_size=rows // world_size,
            ctx_len=run["ctx_len"],
        )
        order = WindowOrder(run["num_tokens"], plan)
        position = order.first()
        for step in offsets:
            (micro,), position = order.step(position)
            step[rank::world_size] = [row[0].start for row in micro.rows]
    assert offsets == run["offsets"]


def test_window_order_counts_on_where_the_batch_does_not_divide_the_mini_epoch():
    plan = make_plan(rows_per_step=11, microbatch_size=11)
    order = WindowOrder(10_000, plan)
    assert order.steps_per_epoch == 3666
    position, starts = order.first(), []
    for _ in range(order.steps_per_epoch + 2):
        (micro,), position = order.step(position)
        starts += [row[0].start for row in micro.rows]
    assert (position.epoch, position.step) == (1, 2)
    assert starts == official_offsets(magic_prime(10_000, 8), 8, range(11 * 3668))


@pytest.mark.parametrize(
    ("rows", "world_size", "microbatch_size", "fix"), [(6, 4, 1, "set it to 8"), (8, 2, 3, "set it to 12")]
)
def test_rows_that_do_not_divide_are_refused(rows, world_size, microbatch_size, fix):
    plan = make_plan(rows_per_step=rows, world_size=world_size, microbatch_size=microbatch_size)
    with pytest.raises(ConfigError, match=rf"trainer\.target_batch_size.*found {rows}.*{fix}"):
        WindowOrder(1000, plan)
    with pytest.raises(ConfigError, match=r"trainer\.target_batch_size"):
        StreamOrder(np.array([5, 6]), plan, 8, shuffle=True)


@pytest.mark.parametrize(
    ("field", "setting"),
    [
        ("rows_per_step", "trainer.target_batch_size"),
        ("microbatch_size", "trainer.microbatch_size"),
        ("ctx_len", "model.ctx_len"),
    ],
)
def test_plan_refuses_counts_below_one(field, setting):
    with pytest.raises(ConfigError, match=f"{setting}.*at least 1"):
        make_plan(**{field: 0})


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda sizes: max(sizes) > 1),
    lanes=st.integers(1, 5),
    pairs_per_lane=st.integers(1, 40),
)
def test_stream_epochs_hand_out_every_document(sizes, lanes, pairs_per_lane):
    order = StreamOrder(
        np.array(sizes), make_plan(rows_per_step=lanes, microbatch_size=1), pairs_per_lane, shuffle=True
    )
    num_documents = sum(size > 1 for size in sizes)
    position = order.first()
    for epoch in range(1, 4):
        for _ in range(order.steps_per_epoch):
            _, position = order.step(position)
        assert (position.epoch, position.step) == (epoch, 0)
        assert position.lanes.next_in_queue >= epoch * num_documents


def test_document_order_never_changes_between_versions():
    sizes = np.array([9, 4, 7, 1, 5, 8, 3, 6, 2, 10, 12, 11, 14, 13])
    order = DocumentOrder(sizes, make_plan(rows_per_step=2), shuffle=True)
    position, epochs = order.first(), {}
    while position.epoch < 2:
        epoch = position.epoch
        (micro,), position = order.step(position)
        epochs.setdefault(epoch, []).append([row[0].document for row in micro.rows])
    assert epochs == {
        0: [[0, 5], [13, 10], [6, 8], [11, 9], [4, 1], [2, 7], [12]],
        1: [[5, 2], [7, 4], [10, 11], [12, 13], [9, 0], [6, 8], [1]],
    }


def test_stream_order_never_changes_between_versions():
    order = StreamOrder(np.array([9, 4, 7, 1, 5, 8]), make_plan(rows_per_step=2), 8, shuffle=True)
    position, steps = order.first(), []
    for _ in range(3):
        (micro,), position = order.step(position)
        steps.append([[span[:3] for span in row] for row in micro.rows])
    assert steps == [
        [[(0, 0, 8)], [(2, 0, 6), (4, 0, 2)]],
        [[(5, 0, 7), (1, 0, 1)], [(4, 2, 2), (2, 0, 6)]],
        [[(1, 1, 2), (0, 0, 6)], [(4, 0, 4), (5, 0, 4)]],
    ]
