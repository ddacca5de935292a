"""Streaming: every document once per pass, an order that depends on nothing but seed and position, exact resumes."""

import dataclasses
import gzip
import json
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config import RunConfig, TrainerConfig
from trainer.config.checks import check_values
from trainer.config.schema import DataConfig, ModelConfig
from trainer.data import source_files, streaming_lanes
from trainer.data.lanes import LanePlan
from trainer.data.module import LanesDataModule
from trainer.data.positions import NUM_BUCKETS
from trainer.data.sources import files_of_hub, find_source
from trainer.data.streaming import open_streamed
from trainer.data.streaming_lanes import StreamingLanes
from trainer.data.tokenizers import ByteTokenizer
from trainer.errors import CheckpointError, ConfigError, DataError

FILES, PER_FILE = 5, 24


def text_of(file, number):
    return f"<{file}.{number}>" + "x" * (number * 7 % 40)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of several batches each."""
    monkeypatch.setattr(source_files, "_READ_BYTES", 300)
    folder = tmp_path / "source"
    folder.mkdir()
    for file in range(FILES):
        lines = [json.dumps({"text": text_of(file, number)}) + "\n" for number in range(PER_FILE)]
        content = "".join(lines).encode()
        if file % 2:
            (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(content))
        else:
            (folder / f"{file}.jsonl").write_bytes(content)
    return folder


def settings(folder, **changes):
    values = {
        "source": str(folder), "tokenizer": "byte", "batching": "stream", "streaming": True, "test_split": 3,
        "streaming_shuffle_buffer": 20, "dataloader_prefetch_factor": 0, "chunks_per_step": 2,
    }  # fmt: skip
    return DataConfig(**values | changes)


def make_lanes(data, *, world_size=1, rank=0, rows=4, seed=5):
    plan = LanePlan(
        world_size=world_size, rank=rank, rows_per_step=rows, microbatch_size=rows // world_size, ctx_len=16, seed=seed
    )
    return StreamingLanes(open_streamed(data, seed=seed, vocab_size=257), data, plan)


def columns(step):
    return [[tensor.tolist() for tensor in batch[:4]] + [batch.lane_ids] for batch in step.microbatches]


def take(lanes, num):
    return [columns(step) for step in islice(lanes, num)]


def texts(steps):
    """Documents in the lanes, the unfinished last ones left out."""
    lanes = {}
    for step in steps:
        for batch in step:
            ids, targets, _, reset, lane_ids = batch
            for lane, *row in zip(lane_ids, ids, targets, reset, strict=True):
                lanes.setdefault(lane, []).extend(zip(*row, strict=True))
    found = []
    for pairs in lanes.values():
        for token, target, starts in pairs:
            if starts:
                document = [token]
            document.append(target)
            if target == 0:
                found.append(ByteTokenizer().decode(document))
    return found


def all_texts():
    return [text_of(file, number) for file in range(FILES) for number in range(PER_FILE)]


def steps_of_passes(num):
    return -(-num * sum(len(text) for text in all_texts()) // (4 * 32)) + 6


def test_every_document_once_per_pass_but_those_of_validation(folder):
    data = settings(folder)
    found = texts(take(make_lanes(data), steps_of_passes(1)))
    expected = all_texts()[3:]
    assert sorted(set(found)) == sorted(expected)
    assert [text for text in expected if found.count(text) > 2] == []
    streamed = open_streamed(data, seed=5, vocab_size=257)
    store = streamed.validation
    assert [ByteTokenizer().decode(store.read(i, 0, 99)) for i in range(3)] == all_texts()[:3]
    # Shuffled within a file and over files, differently in each pass.
    assert found[:20] != expected[:20]
    assert len({text[1] for text in found[:20]}) > 1 or len({text[1] for text in found[:40]}) > 1


def test_order_of_the_source_without_shuffling(folder):
    lanes = make_lanes(settings(folder, dataloader_shuffle_training=False, test_split=0), rows=1)
    found = texts(take(lanes, steps_of_passes(2) * 4))
    assert found[: 2 * FILES * PER_FILE] == all_texts() * 2


@pytest.mark.parametrize(("prefetch", "num_proc"), [(0, 1), (1, 1), (4, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_resume_is_exact(folder, prefetch, num_proc, monkeypatch):
    monkeypatch.setattr(streaming_lanes, "STEPS_PER_EPOCH", 10)
    num = steps_of_passes(2)
    plain = make_lanes(settings(folder))
    truth = [step for _ in range(-(-num // 10)) for step in take(plain, 10)]
    data = settings(folder, dataloader_prefetch_factor=prefetch, num_proc=num_proc)
    seen, state = [], None
    while len(seen) < len(truth):
        lanes = make_lanes(data)
        if state is not None:
            lanes.load_state_dict(state)
        part = min(7, 10 - len(seen) % 10, len(truth) - len(seen))
        seen += take(lanes, part)
        state = json.loads(json.dumps(lanes.state_dict()))
    assert seen == truth


def test_ranks_share_the_lanes(folder):
    data = settings(folder)
    whole = take(make_lanes(data), 20)
    ranks = [make_lanes(data, world_size=2, rank=rank) for rank in range(2)]
    parts = [take(lanes, 9) for lanes in ranks]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    for step, halves in zip(whole[:9], zip(*parts, strict=True), strict=True):
        (one,) = step
        joined = [list(first) + list(second) for first, second in zip(halves[0][0], halves[1][0], strict=True)]
        assert joined[:4] == one[:4]
        assert tuple(joined[4]) == one[4]
    # Another number of ranks goes on at the same place.
    alone = make_lanes(data)
    alone.load_state_dict(ranks[0].state_dict())
    assert take(alone, 11) == whole[9:]


def test_mixture_keeps_the_weights_and_knows_the_sources(folder, tmp_path):
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"[{i}]" + "y" * 30}) + "\n" for i in range(9)))
    sources = [
        {"name": "many", "source": str(folder), "weight": 3},
        {"name": "few", "source": str(tmp_path / "other.jsonl"), "weight": 1, "test_split": 1},
    ]
    data = dataclasses.replace(settings(folder), source=None, sources=sources)
    lanes = make_lanes(data)
    count = np.zeros(2)
    for step in islice(lanes, 60):
        for batch in step.microbatches:
            count += np.bincount(batch.group_BT.flatten() // NUM_BUCKETS, minlength=2)
    assert count[0] / count.sum() == pytest.approx(0.75, abs=0.02)
    state = json.loads(json.dumps(lanes.state_dict()))
    again = make_lanes(data)
    again.load_state_dict(state)
    assert take(again, 5) == take(lanes, 5)
    streamed = open_streamed(data, seed=5, vocab_size=257)
    assert streamed.validation.source_ids.tolist() == [0, 0, 0, 1]
    without = [{key: value for key, value in source.items() if key != "weight"} for source in sources]
    with pytest.raises(ConfigError, match="many has no weight"):
        make_lanes(dataclasses.replace(data, sources=without))


def test_other_kinds_of_files(tmp_path):
    rows = [text_of(0, number) for number in range(30)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "x.parquet", row_group_size=10)
    (tmp_path / "x.csv").write_text("text\n" + "".join(f"{row}\n" for row in rows))
    (tmp_path / "texts").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(row)
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
    for name in ("x.parquet", "x.csv", "texts", "saved"):
        lanes = make_lanes(settings(tmp_path / name, test_split=0))
        assert set(texts(take(lanes, 60))) == set(rows), name


@pytest.mark.filterwarnings("ignore")
def test_files_of_a_hub_data_set(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "train-0.parquet")

    class Config:
        data_files = {"train": ["hf://datasets/someone/small@0123/data/train-0.parquet"]}

    asked = {}

    class Builder:
        config = Config

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, /, **params: asked.update(params) or Builder)
    source = find_source(DataConfig(source="someone/small", source_dataset_params={"token": "hf_CANARY", "name": "x"}))
    found = files_of_hub(source)
    assert asked == {"token": "hf_CANARY", "name": "x"}
    assert (found.kind, [str(file) for file in found.files]) == ("parquet", Config.data_files["train"])
    assert "CANARY" not in repr(found)
    assert found.files[0].options == {"token": "hf_CANARY"}
    with pytest.raises(DataError, match="someone/small is no local path.*KeyError: 'dev'"):
        files_of_hub(dataclasses.replace(source, split="dev"))


def test_documents_that_are_left_out_are_counted(tmp_path, caplog):
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n{"text": "abc"}\n{"text": "abcdefgh"}\n')
    data = settings(tmp_path / "x.jsonl", test_split=0, max_token_size=6)
    with caplog.at_level("INFO", "trainer"):
        assert set(texts(take(make_lanes(data), 3))) == {"abc"}
    assert "end of pass 1 over" in caplog.text
    assert "1 documents, 4 tokens; dropped 1 empty, 1 longer than max_token_size" in caplog.text
    with pytest.raises(DataError, match="x.jsonl: has no documents to train on; dropped 1 empty, 2 longer"):
        take(make_lanes(dataclasses.replace(data, max_token_size=2)), 3)


def test_bad_line_far_inside_is_named_when_it_comes(folder):
    (folder / "2.jsonl").write_text('{"text": "good"}\n' * 200 + '{"text": 7}\n' + '{"text": "good"}\n' * 10)
    with pytest.raises(DataError, match=r"2\.jsonl: line 201"):
        take(make_lanes(settings(folder)), 400)


def test_token_ids_outside_the_vocabulary(folder):
    data = settings(folder, test_split=0)
    plan = LanePlan(world_size=1, rank=0, rows_per_step=1, microbatch_size=1, ctx_len=16, seed=5)
    lanes = StreamingLanes(open_streamed(data, seed=5, vocab_size=100), data, plan)
    with pytest.raises(DataError, match=r"jsonl(\.gz)?: token id 121 is not in the vocabulary"):
        take(lanes, 100)


def test_validation_that_takes_everything_is_refused(folder):
    with pytest.raises(DataError, match="holds 120 documents, and validation takes the first 121"):
        make_lanes(settings(folder, test_split=121))


def test_positions_of_other_settings_or_data_are_refused(folder):
    lanes = make_lanes(settings(folder))
    take(lanes, 2)
    state = lanes.state_dict()
    for changes, name in (
        ({"streaming_shuffle_buffer": 10}, "data.streaming_shuffle_buffer"),
        ({"dataloader_shuffle_training": False}, "data.dataloader_shuffle_training"),
        ({"test_split": 4}, "data.source"),
    ):
        with pytest.raises(ConfigError, match=name):
            make_lanes(settings(folder, **changes)).load_state_dict(state)
    (folder / "9.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(ConfigError, match=r"data\.source: differs from the checkpoint's"):
        make_lanes(settings(folder)).load_state_dict(state)
    (folder / "9.jsonl").unlink()
    for damage in ({"lanes": [None]}, {"sources": []}, {"sources": [[0, 0, 0, 999, 0]]}, {"lanes": [[0]] * 4}):
        broken = make_lanes(settings(folder))
        broken.load_state_dict(state | damage)
        with pytest.raises(CheckpointError, match="data position: cannot be read"):
            take(broken, 1)


def make_run(folder, **changes):
    run = RunConfig(
        data=settings(folder), trainer=TrainerConfig(target_batch_size=4, microbatch_size=2),
        model=ModelConfig(n_layer=1, n_embd=64, ctx_len=16), max_steps=3,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def test_data_module(folder):
    data = LanesDataModule(make_run(folder), 272)
    data.prepare_data()
    data.setup("fit")
    lanes = data.train_dataloader()
    assert len(lanes) == streaming_lanes.STEPS_PER_EPOCH
    assert data.source_names == []
    assert next(iter(lanes)).position["step_in_epoch"] == 1
    assert sum(step.num_tokens for step in data.val_dataloader()) == sum(len(text) for text in all_texts()[:3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_epochs": 2}, r"trainer\.max_epochs: has no meaning with data\.streaming"),
        ({"max_steps": -1}, r"trainer\.max_steps: is not set"),
        ({"data": {"batching": "documents", "chunks_per_step": 1}}, r"data\.batching: does not suit"),
        ({"data": {"data_path": "x"}}, r"data\.data_path: has no meaning with data\.streaming"),
        ({"data": {"dataset_length": 5}}, r"data\.dataset_length: has no meaning"),
        ({"data": {"streaming": False, "data_path": "x"}}, r"data\.streaming_shuffle_buffer: acts only with"),
        ({"data": {"source": None}}, r"data\.source"),
    ],
)
def test_settings_that_do_not_fit(folder, changes, words):
    if "data" in changes:
        changes = {"data": settings(folder, **changes["data"])}
    check_values(make_run(folder))
    with pytest.raises(ConfigError, match=words):
        check_values(make_run(folder, **changes))
