from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.schema import DataConfig
from trainer.data.curriculum import Curriculum
from trainer.data.lanes import LanePlan, Lanes, StepBatch, ValidationLanes
from trainer.data.positions import NUM_BUCKETS, bucket_start, position_buckets
from trainer.data.sampler import epoch_permutation
from trainer.errors import CheckpointError, ConfigError, DataError

OFFICIAL = json.loads((Path(__file__).parents[1] / "fixtures" / "official_order.json").read_text())
CTX_LEN = 16


class MemoryStore:
    """Documents in memory. By default each token's id is its place in the flat stream, so ids are unique."""

    digest = "memory"
    source_ids = None

    def __init__(self, sizes, masked=False, tokens=None):
        self.sizes = np.array(sizes, np.int64)
        self.num_documents, self.num_tokens = len(sizes), int(self.sizes.sum())
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.masked = masked
        self._flat = np.arange(self.num_tokens) if tokens is None else np.array(tokens)

    def read(self, doc, start, stop):
        assert 0 <= start < stop <= self.sizes[doc]
        return self._flat[self.starts[doc] + start : self.starts[doc] + stop]

    def read_flat(self, start, stop):
        assert 0 <= start < stop <= self.num_tokens
        return self._flat[start:stop]

    def loss_mask(self, doc, start, stop):
        return target_weight(self.read(doc, start, stop)).astype(np.float32) if self.masked else None


def target_weight(ids):
    return (ids % 3) / 2


def make_lanes(store, *, world_size=1, rank=0, rows=4, micro=2, seed=7, ctx_len=CTX_LEN, **data):
    plan = LanePlan(
        world_size=world_size, rank=rank, rows_per_step=rows, microbatch_size=micro, ctx_len=ctx_len, seed=seed
    )
    return Lanes(store, DataConfig(**({"dataloader_prefetch_factor": 0} | data)), plan)


def real_pairs(batch):
    """(input, target) of every real token of a micro-batch."""
    for i, length in enumerate(batch.lengths):
        yield from zip(batch.ids_BT[i, :length].tolist(), batch.targets_BT[i, :length].tolist(), strict=True)


def step_pairs(step):
    return [pair for batch in step.microbatches for pair in real_pairs(batch)]


def document_pairs(store, doc, stop=None):
    start = int(store.starts[doc])
    stop = int(store.sizes[doc]) - 1 if stop is None else stop
    return [(token, token + 1) for token in range(start, start + stop)]


def assert_same_steps(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.epoch, a.step_in_epoch, a.num_tokens) == (b.epoch, b.step_in_epoch, b.num_tokens)
        assert a.position == b.position
        assert len(a.microbatches) == len(b.microbatches)
        for x, y in zip(a.microbatches, b.microbatches, strict=True):
            assert (x.lengths, x.lane_ids) == (y.lengths, y.lane_ids)
            for tensor, other in zip((*x[:4], x.group_BT), (*y[:4], y.group_BT), strict=True):
                assert tensor.dtype == other.dtype
                assert torch.equal(tensor, other)


def check_layout(step, masked):
    """What every batch promises, whatever the order."""
    assert step.num_tokens == sum(sum(batch.lengths) for batch in step.microbatches)
    for batch in step.microbatches:
        assert [tensor.dtype for tensor in batch[:4]] == [torch.int64, torch.int64, torch.float32, torch.bool]
        assert list(batch.lengths) == sorted(batch.lengths, reverse=True)
        assert min(batch.lengths) >= 1
        assert all(tensor.shape == (len(batch.lengths), batch.lengths[0]) for tensor in batch[:4])
        for i, length in enumerate(batch.lengths):
            assert not any(tensor[i, length:].any() for tensor in batch[:4])
            expected = target_weight(batch.targets_BT[i, :length]) if masked else torch.ones(length)
            assert torch.equal(batch.weight_BT[i, :length], expected.float())


sizes_strategy = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(lambda sizes: max(sizes) > 1)


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes_strategy,
    world_size=st.integers(1, 3),
    rows=st.integers(1, 7),
    micro=st.integers(1, 3),
    shuffle=st.booleans(),
    masked=st.booleans(),
)
def test_documents_train_every_token_once_an_epoch(sizes, world_size, rows, micro, shuffle, masked):
    store = MemoryStore(sizes, masked)
    ranks = [
        make_lanes(
            store,
            world_size=world_size,
            rank=rank,
            rows=rows,
            micro=micro,
            dataloader_shuffle_training=shuffle,
        )
        for rank in range(world_size)
    ]
    whole = make_lanes(store, rows=rows, micro=micro, dataloader_shuffle_training=shuffle)
    num_documents = sum(size > 1 for size in sizes)
    for epoch in range(2):
        steps = [list(lanes) for lanes in ranks]
        assert {len(rank_steps) for rank_steps in steps} == {len(whole)} == {-(-num_documents // rows)}
        seen = Counter()
        for index, (alone, together) in enumerate(zip(whole, zip(*steps, strict=True), strict=True)):
            assert {(step.epoch, step.step_in_epoch) for step in together} == {(epoch, index)}
            pairs = Counter(pair for step in together for pair in step_pairs(step))
            assert pairs == Counter(step_pairs(alone))
            seen += pairs
            for step in together:
                check_layout(step, masked)
                for batch in step.microbatches:
                    assert len(batch.lengths) <= micro
                    assert batch.lane_ids is None
                    assert batch.reset_BT[:, 0].all()
                    assert not batch.reset_BT[:, 1:].any()
        assert seen == Counter(
            pair for doc, size in enumerate(sizes) if size > 1 for pair in document_pairs(store, doc)
        )
        assert sum(seen.values()) == whole.total_trained_tokens


def test_documents_of_like_length_share_micro_batches_over_ranks():
    store = MemoryStore(np.random.default_rng(0).integers(2, 500, 64))
    ranks = [make_lanes(store, world_size=2, rank=rank, rows=16, micro=4) for rank in range(2)]
    for together in zip(*ranks, strict=True):
        for k in range(2):
            shortest = min(min(step.microbatches[k].lengths) for step in together)
            longest_after = max(max(step.microbatches[k + 1].lengths) for step in together) if k == 0 else 0
            assert shortest >= longest_after
        assert together[0].microbatches[0].lengths[0] >= together[1].microbatches[0].lengths[0]


def test_shuffled_steps_hold_documents_of_like_length():
    store = MemoryStore(np.random.default_rng(0).integers(2, 500, 8 * 8 + 3))
    steps = list(make_lanes(store, rows=8, micro=8))
    spreads = [max(step.microbatches[0].lengths) - min(step.microbatches[0].lengths) for step in steps]
    assert max(spreads[:-1]) < 150
    longest = [step.microbatches[0].lengths[0] for step in steps[:-1]]
    assert longest != sorted(longest, reverse=True)
    assert len(steps[-1].microbatches[0].lengths) == 3


def test_documents_keep_their_order_without_shuffle():
    store = MemoryStore([5, 9, 1, 3, 4, 8])
    steps = list(make_lanes(store, rows=2, micro=1, dataloader_shuffle_training=False))
    assert [[batch.lengths for batch in step.microbatches] for step in steps] == [
        [(8,), (4,)],
        [(3,), (2,)],
        [(7,)],
    ]


def test_a_rank_without_rows_has_no_micro_batch():
    store = MemoryStore([6, 5, 4])
    steps = list(make_lanes(store, world_size=2, rank=1, rows=2, micro=1))
    assert [len(step.microbatches) for step in steps] == [1, 0]
    assert steps[1].num_tokens == 0


def test_documents_without_a_target_are_skipped_and_counted():
    store = MemoryStore([0, 1, 2, 1, 3])
    for batching in ("documents", "stream"):
        assert make_lanes(store, batching=batching).num_skipped_documents == 3
    for batching in ("documents", "stream"):
        with pytest.raises(
            DataError, match=r"data\.data_path: holds no document that can be trained on; found '2 documents"
        ):
            make_lanes(MemoryStore([1, 0]), batching=batching)


def expected_stream(store, lanes, seed):
    """Pairs that the queue's documents give up to the lanes' state: each document once per handing out."""
    state = lanes.state_dict()
    trainable = [doc for doc, size in enumerate(store.sizes) if size > 1]
    current = {number: offset for number, offset in state["lanes"] if number >= 0}
    expected = Counter()
    for number in range(state["next_in_queue"]):
        epoch, place = divmod(number, len(trainable))
        doc = trainable[epoch_permutation(len(trainable), seed, epoch)[place]]
        expected.update(document_pairs(store, doc, current.get(number)))
    return expected


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes_strategy,
    world_size=st.integers(1, 3),
    micro=st.integers(1, 2),
    micro_per_rank=st.integers(1, 2),
    chunks=st.integers(1, 3),
    masked=st.booleans(),
)
def test_stream_trains_every_token_once_per_handing_out(sizes, world_size, micro, micro_per_rank, chunks, masked):
    store = MemoryStore(sizes, masked)
    rows, length = world_size * micro * micro_per_rank, chunks * CTX_LEN
    options = {"rows": rows, "micro": micro, "batching": "stream", "chunks_per_step": chunks}
    ranks = [make_lanes(store, world_size=world_size, rank=rank, **options) for rank in range(world_size)]
    whole = make_lanes(store, **options)
    seen, lanes_tokens = Counter(), [[] for _ in range(rows)]
    for _ in range(2):
        num_steps = 0
        for alone, *together in zip(whole, *ranks, strict=True):
            assert_same_steps([rejoin(together)], [rejoin([alone])])
            num_steps += 1
            for batch in alone.microbatches:
                assert batch.lengths == (length,) * micro
                for lane, ids, reset in zip(batch.lane_ids, batch.ids_BT, batch.reset_BT, strict=True):
                    lanes_tokens[lane] += zip(ids.tolist(), reset.tolist(), strict=True)
            seen.update(step_pairs(alone))
            check_layout(alone, masked)
        assert num_steps == len(whole)
        assert num_steps * rows * length == whole.total_trained_tokens
        assert whole.state_dict() == ranks[-1].state_dict()
        assert seen == expected_stream(store, whole, seed=7)
    starts = set(store.starts[store.sizes > 1].tolist())
    for tokens in lanes_tokens:
        assert tokens[0][1]
        assert all(reset == (token in starts) for token, reset in tokens)
        assert all(
            reset or token == before + 1 for (before, _), (token, reset) in zip(tokens, tokens[1:], strict=False)
        )


def rejoin(steps):
    """Steps of all ranks as one step with one micro-batch, rows in lane order."""
    batches = [batch for step in steps for batch in step.microbatches]
    tensors = [torch.cat([batch[i] for batch in batches]) for i in range(4)]
    lane_ids = sum((batch.lane_ids for batch in batches), ())
    assert lane_ids == tuple(range(len(lane_ids)))
    joined = batches[0]._replace(
        **dict(zip(batches[0]._fields, tensors, strict=False)),
        lengths=sum((batch.lengths for batch in batches), ()),
        lane_ids=lane_ids,
    )
    return StepBatch((joined,), steps[0].epoch, steps[0].step_in_epoch, steps[0].position)


@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_read_the_flat_stream_in_the_official_order(world_size):
    data_set = OFFICIAL["small_data_set"]
    store = MemoryStore([data_set["num_tokens"]], masked=True, tokens=data_set["tokens"])
    ranks = [
        make_lanes(store, world_size=world_size, rank=rank, rows=2, micro=1, ctx_len=8, batching="windows")
        for rank in range(world_size)
    ]
    rows = []
    for together in islice(zip(*ranks, strict=True), 5):
        for step in together:
            assert step.num_tokens == 8 * 2 // world_size
            for batch in step.microbatches:
                assert batch.lengths == (8,)
                assert batch.weight_BT.eq(1).all()
                assert batch.reset_BT.tolist() == [[True] + [False] * 7]
                rows.append(batch.ids_BT[0].tolist() + batch.targets_BT[0, -1:].tolist())
                assert batch.targets_BT[0, :-1].tolist() == batch.ids_BT[0, 1:].tolist()
    assert rows == [sample["tokens"] for sample in data_set["samples"]]
    assert len(ranks[0]) == 20160


MODES = [
    {"batching": "documents"},
    {"batching": "documents", "dataloader_shuffle_training": False},
    {"batching": "stream", "chunks_per_step": 2},
    {"batching": "windows"},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_resume_equals_the_uninterrupted_run(mode, data):
    sizes = data.draw(st.lists(st.integers(4, 60), min_size=15, max_size=30))
    depths = data.draw(st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 2])))
    # Another number of ranks must not change the order: rank 0 of 1 resumes what rank 1 of 2 saved.
    saved_on = data.draw(st.sampled_from([{}, {"world_size": 2, "rank": 1}]))
    store = MemoryStore(sizes, masked=True)

    def lanes(depth, **place):
        return make_lanes(store, **mode, **place, dataloader_prefetch_factor=depth)

    def run(source, num_steps):
        steps = []
        while len(steps) < num_steps:
            steps += islice(source, num_steps - len(steps))
        return steps

    total = min(3 * len(lanes(0)), 30)
    stop = data.draw(st.integers(0, total))
    uninterrupted = run(lanes(0), total)
    interrupted = lanes(depths[0], **saved_on)
    assert len(run(interrupted, stop)) == stop
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = lanes(depths[1])
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert_same_steps(run(resumed, total - stop), uninterrupted[stop:])


@pytest.mark.parametrize("mode", MODES[::2], ids=lambda mode: mode["batching"])
def test_one_iteration_ends_with_its_epoch_after_resume(mode):
    store = MemoryStore([30, 40, 50, 20, 10, 33, 41])
    whole, resumed = make_lanes(store, rows=2, **mode), make_lanes(store, rows=2, **mode)
    first_epoch = list(whole)
    second_epoch = list(whole)
    list(islice(resumed, 2))
    assert_same_steps(list(resumed), first_epoch[2:])
    assert_same_steps(list(resumed), second_epoch)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_position_is_that_of_the_last_step_handed_out(depth):
    store = MemoryStore([20] * 30)
    plain, ahead = make_lanes(store), make_lanes(store, dataloader_prefetch_factor=depth)
    assert plain.state_dict() == ahead.state_dict()
    for _, step in zip(plain, ahead, strict=True):
        assert step.position == ahead.state_dict()
        assert plain.state_dict() == ahead.state_dict()
    assert ahead.state_dict()["epoch"] == 1
    assert ahead.state_dict()["step_in_epoch"] == 0


def test_state_of_many_lanes_stays_small():
    lanes = make_lanes(MemoryStore([3000] * 40), rows=64, micro=64, batching="stream")
    next(iter(lanes))
    assert len(json.dumps(lanes.state_dict())) < 64 * 20


@pytest.mark.parametrize(
    ("saved", "loaded", "setting"),
    [
        ({"batching": "stream"}, {"batching": "documents"}, "data.batching"),
        ({"rows": 8}, {"rows": 4}, "trainer.target_batch_size"),
        ({"seed": 1}, {"seed": 2}, "trainer.deterministic_order_seed"),
        ({}, {"dataloader_shuffle_training": False}, "data.dataloader_shuffle_training"),
        ({"batching": "windows"}, {"batching": "windows", "ctx_len": 32}, "model.ctx_len"),
    ],
)
def test_resume_refuses_a_changed_order(saved, loaded, setting):
    store = MemoryStore([50] * 20)
    state = make_lanes(store, **saved).state_dict()
    with pytest.raises(ConfigError, match=rf"^{setting}: differs from the checkpoint's"):
        make_lanes(store, **loaded).load_state_dict(state)


def test_resume_refuses_other_data():
    store, other = MemoryStore([50] * 20), MemoryStore([50] * 20)
    other.digest = "other"
    with pytest.raises(ConfigError, match=r"^data\.data_path: .*found 'other'; must be 'memory' to resume"):
        make_lanes(other).load_state_dict(make_lanes(store).state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        {"order": None},
        {"epoch": -1},
        {"step_in_epoch": 10**6},
        {"step_in_epoch": None},
        {"lanes": [[0, 0]]},
        {"lanes": "x"},
        {"next_in_queue": "x"},
        {"lanes": [[0, 0], [1, 0], [2, 0], [10**6, 0]]},
        {"lanes": [[0, 0], [1, 0], [2, 0], [0, 10**6]]},
        {"lanes": [[0, 0], [1, 0], [2, 0], [-1, 5]]},
    ],
    ids=str,
)
def test_resume_refuses_a_damaged_state(damage):
    lanes = make_lanes(MemoryStore([50] * 20), batching="stream")
    next(iter(lanes))
    state = lanes.state_dict()
    with pytest.raises(CheckpointError, match="data position"):
        lanes.load_state_dict(state | damage)
    assert lanes.state_dict() == state


@pytest.mark.parametrize("depth", [0, 3])
def test_an_error_surfaces_at_its_step(depth):
    class Broken(MemoryStore):
        def read(self, doc, start, stop):
            if doc == 5:
                raise DataError("train.bin", "cannot be read")
            return super().read(doc, start, stop)

    lanes = make_lanes(
        Broken([10] * 9), rows=1, micro=1, dataloader_shuffle_training=False, dataloader_prefetch_factor=depth
    )
    steps = iter(lanes)
    assert [next(steps).step_in_epoch for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"train\.bin"):
        next(steps)
    assert lanes.state_dict()["step_in_epoch"] == 5


def test_dropping_the_iterator_ends_its_thread():
    lanes = make_lanes(MemoryStore([10] * 50), dataloader_prefetch_factor=4)
    before = set(threading.enumerate())
    steps = iter(lanes)
    next(steps)
    assert set(threading.enumerate()) - before
    del steps
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_a_live_iterator_does_not_hang_the_exit():
    script = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from test_lanes import MemoryStore, make_lanes
    steps = iter(make_lanes(MemoryStore([10] * 50), dataloader_prefetch_factor=4))
    next(steps)
    """
    root, here = Path(__file__).parents[2], Path(__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(script), str(here)]
    assert subprocess.run(command, cwd=root, timeout=60, check=False).returncode == 0


def test_validation_visits_every_document_once_from_the_start_each_time():
    store = MemoryStore([7, 1, 30, 12, 4, 9, 0, 2], masked=True)
    ranks = [
        ValidationLanes(
            store,
            DataConfig(dataloader_prefetch_factor=2),
            LanePlan(world_size=2, rank=rank, rows_per_step=64, microbatch_size=2, ctx_len=16, seed=0),
        )
        for rank in range(2)
    ]
    next(iter(ranks[0]))
    steps = [list(lanes) for lanes in ranks]
    assert len(ranks[0]) == 2
    assert [[len(step.microbatches) for step in rank_steps] for rank_steps in steps] == [[1, 1], [1, 0]]
    seen = Counter(pair for rank_steps in steps for step in rank_steps for pair in step_pairs(step))
    assert seen == Counter(pair for doc in range(8) if store.sizes[doc] > 1 for pair in document_pairs(store, doc))
    for rank_steps in steps:
        for step in rank_steps:
            check_layout(step, masked=True)
    assert not hasattr(ranks[0], "state_dict")


def plain_bucket(context):
    bucket, end = 0, 16
    while context >= end:
        bucket, end = bucket + 1, 2 * end
    return bucket


@pytest.mark.parametrize("data", [{"batching": "stream"}, {"packing_enable": True}, {}])
@pytest.mark.parametrize("num_sources", [1, 3])
def test_targets_know_their_source_and_position(data, num_sources):
    sizes = [5, 40, 17, 2, 30, 9, 64, 300, 3]
    store = MemoryStore(sizes)
    if num_sources > 1:
        store.source_ids = np.arange(len(sizes), dtype=np.int32) % num_sources
    contexts = np.concatenate([np.arange(size) for size in sizes])
    sources = np.repeat(np.arange(len(sizes)) % num_sources, sizes)
    wanted = [source * NUM_BUCKETS + plain_bucket(context) for source, context in zip(sources, contexts, strict=True)]
    num = 0
    for step in make_lanes(store, **data):
        for batch in step.microbatches:
            is_token = batch.weight_BT > 0
            found = batch.group_BT[is_token]
            assert found.tolist() == [wanted[target] for target in batch.targets_BT[is_token]]
            num += len(found)
    assert num >= sum(sizes) - len(sizes)


def test_bucket_starts_are_where_buckets_change():
    buckets = position_buckets(0, 70_000)
    changes = np.flatnonzero(np.diff(buckets)) + 2
    assert changes.tolist() == [bucket_start(bucket) for bucket in range(1, buckets[-1] + 1)]
    assert buckets.tolist() == [plain_bucket(context) for context in range(1, 70_001)]
    assert position_buckets(69_990, 10).tolist() == buckets[-10:].tolist()


def curriculum_plan(curriculum, **changes):
    plan = {"world_size": 1, "rank": 0, "rows_per_step": 4, "microbatch_size": 2, "ctx_len": CTX_LEN, "seed": 5}
    return LanePlan(**(plan | changes), curriculum=curriculum)


def rows_of(steps):
    """Of each row: optimizer step, document, targets that are trained, tokens of the row."""
    found = []
    for number, step in enumerate(steps):
        for batch in step.microbatches:
            for row, length in enumerate(batch.lengths):
                trained = batch.targets_BT[row][batch.weight_BT[row] > 0].tolist()
                found.append((number, int(batch.ids_BT[row, 0]), trained, length))
    return found


SIZES = [300, 20, 150, 33, 77, 64, 200, 5, 90, 41]


def test_documents_grow_with_the_steps():
    store = MemoryStore(SIZES)
    starts = dict(zip(store.starts.tolist(), SIZES, strict=True))
    lanes = Lanes(store, DataConfig(data_path="x"), curriculum_plan(Curriculum(((2, 30), (4, 100)), seed=5)))
    steps = [step for _ in range(2) for step in lanes]
    assert len(steps) == 6
    places = []
    for number, start, trained, length in rows_of(steps):
        limit = 30 if number < 2 else 100 if number < 4 else 10_000
        num_targets = starts[start] - 1
        assert len(trained) == min(limit, num_targets)
        assert trained == list(range(trained[0], trained[0] + len(trained)))  # one piece of the document
        assert length == trained[-1] - start  # what follows is left out, what comes before is read
        if num_targets > limit:
            places.append((trained[0] - start - 1) / (num_targets - limit))
    assert len(set(places)) > 3
    assert all(0 <= place <= 1 for place in places)
    for step in steps:
        assert all(list(batch.lengths) == sorted(batch.lengths, reverse=True) for batch in step.microbatches)


def test_documents_are_cut_alike_on_any_number_of_ranks_and_after_a_resume():
    store, curriculum = MemoryStore(SIZES), Curriculum(((9, 30),), dropout=0.3, seed=5)
    data = DataConfig(data_path="x")
    one = Lanes(store, data, curriculum_plan(curriculum))
    whole = [step for _ in range(2) for step in one]
    ranks = [Lanes(store, data, curriculum_plan(curriculum, world_size=2, rank=rank)) for rank in range(2)]
    for rank in ranks:
        rank.steps = [step for _ in range(2) for step in rank]
    parts = [rows_of(rank.steps) for rank in ranks]
    assert sorted(parts[0] + parts[1]) == sorted(rows_of(whole))
    resumed = Lanes(store, data, curriculum_plan(curriculum))
    resumed.load_state_dict(whole[3].position)
    assert_same_steps(list(resumed), whole[4:])


@pytest.mark.parametrize("data", [{"batching": "stream"}, {"packing_enable": True}, {}])
def test_a_share_of_the_targets_is_dropped_anew_each_epoch(data):
    store = MemoryStore([400] * 20)
    lanes = Lanes(store, DataConfig(data_path="x", **data), curriculum_plan(Curriculum(dropout=0.25, seed=5)))
    epochs = [[target for *_, trained, _ in rows_of(lanes) for target in trained] for _ in range(2)]
    dropped = [set(range(8000)) - set(targets) for targets in epochs]
    for found in dropped:
        assert 0.22 < len(found) / 8000 < 0.29
    assert 0.03 < len(dropped[0] & dropped[1]) / 8000 < 0.12


def test_dropped_targets_do_not_depend_on_where_spans_begin():
    curriculum = Curriculum(dropout=0.5, seed=1)
    whole = curriculum.keep(3, 7, 0, 100)
    for start in (1, 4, 17, 63):
        assert curriculum.keep(3, 7, start, 30).tolist() == whole[start : start + 30].tolist()
    assert curriculum.keep(4, 7, 0, 100).tolist() != whole.tolist() != curriculum.keep(3, 8, 0, 100).tolist()


def test_validation_leaves_nothing_out():
    store = MemoryStore(SIZES)
    plan = curriculum_plan(Curriculum(((9, 30),), dropout=0.5, seed=5))
    steps = list(ValidationLanes(store, DataConfig(data_path="x"), plan))
    assert sum(len(trained) for *_, trained, _ in rows_of(steps)) == sum(SIZES) - len(SIZES)
