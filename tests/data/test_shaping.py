"""Properties of filters, blocks, packs and mixtures: no token is lost or doubled without being counted."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.config.schema import DataConfig
from trainer.data.encode import encoded_schema
from trainer.data.lanes import LanePlan, Lanes
from trainer.data.mixing import SourceSettings, document_passes, source_epochs
from trainer.data.packing import PackPlan, pack_documents
from trainer.data.prepare import open_prepared, prepare
from trainer.data.saving import rechunk
from trainer.data.selection import document_window, keep_documents
from trainer.data.store import FlatStore
from trainer.errors import ConfigError

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.lists(st.integers(1, 70), min_size=1, max_size=40)


@FAST
@given(SIZES, st.integers(1, 40), st.integers(0, 100), st.integers(1, 20), st.booleans())
def test_packing_places_every_document_once(sizes, multiple, least, pool, in_sequence):
    lengths = np.array(sizes)
    plan = PackPlan(multiple=multiple, least=least, pool_size=pool, in_sequence=in_sequence, seed=3)
    rows = pack_documents(lengths, plan)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(sizes)))
    for row in rows:
        room = -(-max(int(lengths[row[0]]), least) // multiple) * multiple
        assert int(lengths[row].sum()) <= room
    if in_sequence:
        assert np.concatenate(rows).tolist() == list(range(len(sizes)))


def test_best_fit_fills_rows():
    lengths = np.array([60, 30, 30, 20, 20, 20, 10, 10])
    rows = pack_documents(lengths, PackPlan(multiple=100, seed=1))
    assert [int(lengths[row].sum()) for row in rows] == [100, 100]
    rows = pack_documents(lengths, PackPlan(multiple=100, in_sequence=True))
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3, 4, 5, 6], [7]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_packed_rows_train_each_pair_once_with_a_reset_at_each_start(world_size):
    sizes = np.random.default_rng(5).integers(2, 60, 50)
    ids = np.arange(sizes.sum()).astype(np.int32)
    store = FlatStore("x", [ids], sizes)
    data = DataConfig(batching="documents", packing_enable=True, dataloader_prefetch_factor=0)
    seen, resets = [], 0
    for rank in range(world_size):
        plan = LanePlan(world_size=world_size, rank=rank, rows_per_step=4, microbatch_size=2, ctx_len=32, seed=1)
        lanes = Lanes(store, data, plan)
        for step in lanes:
            for batch in step.microbatches:
                is_real = batch.weight_BT > 0
                seen += list(zip(batch.ids_BT[is_real].tolist(), batch.targets_BT[is_real].tolist(), strict=True))
                resets += int(batch.reset_BT.sum())
                starts = set((np.cumsum(sizes) - sizes).tolist())
                assert {int(i) for i in batch.ids_BT[batch.reset_BT]} <= starts
    ends = set((np.cumsum(sizes) - 1).tolist())
    assert sorted(seen) == [(i, i + 1) for i in range(len(ids)) if i not in ends]
    assert resets == len(sizes)


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("stop", [1, 5])
def test_packed_rows_resume_exactly(stop, ahead):
    sizes = np.random.default_rng(6).integers(2, 60, 80)
    store = FlatStore("x", [np.arange(sizes.sum()).astype(np.int32)], sizes)
    data = DataConfig(batching="documents", packing_enable=True, dataloader_prefetch_factor=ahead)

    def lanes(world_size, rank):
        plan = LanePlan(world_size=world_size, rank=rank, rows_per_step=4, microbatch_size=2, ctx_len=32, seed=1)
        return Lanes(store, data, plan)

    def tokens(step):
        return sorted(row.tolist() for batch in step.microbatches for row in batch.ids_BT[:, :1].flatten()[:, None])

    whole = [tokens(step) for step in lanes(1, 0)]
    first = lanes(1, 0)
    for number, _ in enumerate(first, 1):
        if number == stop:
            break
    rest = []
    for rank in (0, 1):
        resumed = lanes(2, rank)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest.append([tokens(step) for step in resumed])
    assert [sorted(a + b) for a, b in zip(*rest, strict=True)] == whole[stop:]
    with pytest.raises(ConfigError, match="data.packing_enable"):
        Lanes(store, dataclasses.replace(data, packing_chunksize=64), first.plan).load_state_dict(first.state_dict())


def record_batches(sizes, per_batch):
    ids = np.arange(sum(sizes)).astype(np.int32)
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    for start in range(0, len(sizes), per_batch):
        lists = [part.tolist() for part in parts[start : start + per_batch]]
        masks = [[i % 3 for i in part] for part in lists]
        columns = [pa.array(lists), pa.array(masks), pa.array(range(start, start + len(lists)))]
        yield pa.record_batch(
            [column.cast(form.type) for column, form in zip(columns, encoded_schema(np.int32, True), strict=True)],
            schema=encoded_schema(np.int32, True),
        )


@FAST
@given(SIZES, st.integers(2, 50), st.integers(1, 7), st.integers(0, 5))
def test_blocks_hold_every_token_once_and_in_order(sizes, block, per_batch, skip):
    blocks = list(rechunk(record_batches(sizes, per_batch), block, skip))
    ids = [row for batch in blocks for row in batch.column("input_ids").to_pylist()]
    assert [token for row in ids for token in row] == list(range(sum(sizes)))
    assert all(len(row) == block for row in ids[:-1])
    masks = [row for batch in blocks for row in batch.column("loss_mask").to_pylist()]
    for row, mask in zip(ids, masks, strict=True):
        assert mask == [0 if i < skip else token % 3 for i, token in enumerate(row)]
    documents = np.repeat(np.arange(len(sizes)), sizes)
    numbers = [number for batch in blocks for number in batch.column("doc_id").to_pylist()]
    assert numbers == [documents[row[0]] for row in ids]


@FAST
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=60),
    st.integers(1, 6),
    st.sampled_from([-1, 6, 9]),
    st.sampled_from([-1, 0.25, 3]),
    st.sampled_from([-1, 0.5, 4]),
)
def test_every_document_is_kept_or_counted(documents, least, most, offset, length):
    sizes = np.array([size for size, _ in documents])
    trained = np.array([min(num, max(size - 1, 0)) for size, num in documents])
    data = DataConfig(min_token_size=least, max_token_size=most)
    try:
        window = document_window(len(sizes), offset, length)
    except ConfigError:
        return
    kept, dropped = keep_documents(data, sizes, trained, window)
    assert len(kept) + sum(dropped.values()) == len(sizes)
    assert all(least <= sizes[i] and (most == -1 or sizes[i] <= most) for i in kept)


@pytest.mark.parametrize(
    ("offset", "length", "chosen"),
    [(-1, -1, range(20)), (0.5, -1, range(10, 20)), (3, 4, range(3, 7)), (0.25, 0.5, range(5, 15)), (-1, 1, range(1))],
)
def test_offset_and_length_act_once(offset, length, chosen, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i:02d}"}) + "\n" for i in range(20)))
    data = DataConfig(
        source=str(path), data_path=str(tmp_path / "p"), tokenizer="byte", test_split=0,
        dataset_offset=offset, dataset_length=length,
    )  # fmt: skip
    summary = prepare(data)
    train = open_prepared(data)[0]
    assert [bytes((train.read(i, 9, 11) - 1).astype("u1")) for i in range(train.num_documents)] == [
        f"{i:02d}".encode() for i in chosen
    ]
    # What lies behind a count is not even read.
    assert sum(summary.dropped.values()) + len(chosen) in (20, offset + length)


@pytest.fixture
def ten(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "abcdefghij"[: i + 1] * 3}) + "\n" for i in (4, 0, 9, 2, 7, 1)))
    return DataConfig(source=str(path), data_path=str(tmp_path / "p"), tokenizer="byte", test_split=1)


def sizes_of(data, **changes):
    data = dataclasses.replace(data, **changes)
    prepare(data)
    train, test, _ = open_prepared(data)
    return train.sizes.tolist(), test.sizes.tolist()


def test_orders_and_blocks_leave_the_validation_documents_alone(ten):
    assert sizes_of(ten) == ([16, 4, 31, 10, 25], [7])
    assert sizes_of(ten, sort_by_length=True) == ([4, 10, 16, 25, 31], [7])
    assert sizes_of(ten, sort_by_length=True, sort_asc=False) == ([31, 25, 16, 10, 4], [7])
    assert sizes_of(ten, reverse_train_dataset_before_save=True) == ([25, 10, 31, 4, 16], [7])
    assert sizes_of(ten, text_rechunk_force=True, text_rechunk_size=20) == ([20, 20, 20, 20, 6], [7])
    assert sizes_of(ten, text_rechunk_auto=True, text_rechunk_size=20) == ([16, 4, 31, 10, 25], [7])
    assert sizes_of(ten, dataloader_swap_train_test_split=True) == ([7], [16, 4, 31, 10, 25])


def test_sorted_documents_are_not_shuffled(ten):
    data = dataclasses.replace(ten, sort_by_length=True, dataloader_prefetch_factor=0)
    prepare(data)
    plan = LanePlan(world_size=1, rank=0, rows_per_step=1, microbatch_size=1, ctx_len=16, seed=0)
    lanes = Lanes(open_prepared(data)[0], data, plan)
    assert [step.num_tokens for step in lanes] == [3, 9, 15, 24, 30]


def entries(**amounts):
    return [SourceSettings(name, DataConfig(), **{kind: value}) for name, (kind, value) in amounts.items()]


def test_amounts_of_sources():
    assert source_epochs(entries(a=("epochs", 2), b=("tokens", 50)), [10, 100]) == [2, 0.5]
    assert source_epochs(entries(a=("weight", 1), b=("weight", 1)), [10, 100]) == [10, 1]
    assert source_epochs(entries(a=("weight", 1), b=("weight", 3)), [100, 100]) == [1, 3]
    assert source_epochs([SourceSettings("a", DataConfig())], [10]) == [1]


@FAST
@given(SIZES, st.floats(0.05, 3.5))
def test_passes_take_the_asked_share(sizes, epochs):
    sizes = np.array(sizes)
    documents = np.arange(len(sizes))
    passes = document_passes(documents, sizes, epochs, seed=1)
    taken = sum(int(sizes[part].sum()) for part in passes)
    assert abs(taken - epochs * sizes.sum()) <= sizes.max() / 2 + 1
    assert all((np.diff(part) > 0).all() for part in passes)


def mixture(tmp_path, **changes):
    for name, num in (("a", 8), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * 9}) + "\n" for _ in range(num)))
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "completion": "ccc"}\n' * 4)
    sources = [
        {"name": "a", "source": str(tmp_path / "a.jsonl"), "epochs": 2.5},
        {"name": "b", "source": str(tmp_path / "b.jsonl")},
        {"name": "c", "source": str(tmp_path / "c.jsonl"), "tokens": 10, "test_split": 2},
    ]
    return DataConfig(data_path=str(tmp_path / "mix"), tokenizer="byte", test_split=0, sources=sources, **changes)


def test_mixture_keeps_the_source_of_each_document(tmp_path):
    data = mixture(tmp_path)
    summary = prepare(data)
    train, test, manifest = open_prepared(data)
    assert np.bincount(train.source_ids).tolist() == [20, 20, 2]
    assert test.source_ids.tolist() == [2, 2]
    assert [source["name"] for source in manifest.sources] == ["a", "b", "c"]
    assert train.loss_mask(0, 0, 10).tolist() == [1] * 10
    assert train.loss_mask(40, 0, 5).tolist() == [0, 1, 1, 1, 1]
    assert summary.counts["train_tokens"] == 20 * 10 + 20 * 10 + 2 * 5
    assert prepare(data).reason is None
    (tmp_path / "b.jsonl").write_text('{"text": "new"}\n')
    assert prepare(data).reason.startswith("source file b: b.jsonl changed")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"source": "x", "origin": 1}, r"data.sources\[0\].origin: is no setting"),
        ({"source": "x", "tokenizer": "byte"}, r"data.sources\[0\].tokenizer: is shared"),
        ({"source": "x", "epochs": 1, "weight": 1}, "epochs and weight"),
        ({"source": "x", "tokens": -1}, r"data.sources\[0\].tokens: out of range"),
        ({"name": "x"}, r"data.sources\[0\].source: is not set"),
        ({"source": 7}, r"data.sources\[0\].source: 7 is not"),
    ],
)
def test_entries_of_sources_are_checked(entry, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        prepare(DataConfig(data_path=str(tmp_path / "p"), sources=[entry]))


def test_datapack_file_of_the_older_trainer(tmp_path):
    mixture(tmp_path)
    (tmp_path / "pack.yaml").write_text(
        f"datapack: {{data_path: {tmp_path / 'packed'}, mixing_mode: shuffle, batchsize: 64}}\n"
        "default: {tokenizer: byte, test_split: 1, packing_enable: false}\n"
        "dataset:\n"
        f"  - {{name: first, source: {tmp_path / 'a.jsonl'}}}\n"
        f"  - {{source: json, source_dataset_params: {{data_files: {tmp_path / 'b.jsonl'}}}}}\n"
    )
    data = DataConfig(datapack_config_path=str(tmp_path / "pack.yaml"))
    assert prepare(data).counts["train_documents"] == 26
    train, _, manifest = open_prepared(data)
    assert [source["name"] for source in manifest.sources] == ["first", "dataset 1"]
    assert np.bincount(train.source_ids).tolist() == [7, 19]
