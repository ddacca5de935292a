"""A source's own test split validates, as in the older trainer."""

import dataclasses
import json

import datasets
import pytest

from trainer import logs
from trainer.config.schema import DataConfig
from trainer.data.prepare import open_prepared, prepare
from trainer.data.streaming import Mark, open_streamed
from trainer.data.tokenizers import ByteTokenizer
from trainer.errors import ConfigError


def texts(store):
    return [ByteTokenizer().decode(store.read(i, 0, int(size))) for i, size in enumerate(store.sizes)]


@pytest.fixture(params=["files", "saved"])
def data(request, tmp_path):
    train, test = [f"train {i}" for i in range(5)], ["test 0", "test 1", ""]
    data = DataConfig(source="json", data_path=str(tmp_path / "data"), tokenizer="byte", test_split=2)
    if request.param == "saved":
        splits = {"train": train, "test": test, "dev": ["dev"]}
        made = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
        datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
        return dataclasses.replace(data, source=str(tmp_path / "saved"))
    for name, rows in (("train", train), ("test", test), ("dev", ["dev"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test", "dev")}
    return dataclasses.replace(data, source_dataset_params={"data_files": files})


def test_it_validates_and_nothing_is_taken_from_training(data, caplog, monkeypatch):
    monkeypatch.setattr(logs, "_seen", set())
    with caplog.at_level("INFO"):
        summary = prepare(data)
    assert "the source's split test validates; data.test_split has no effect" in caplog.text
    train, validation, _ = open_prepared(data)
    assert (texts(train), texts(validation)) == ([f"train {i}" for i in range(5)], ["test 0", "test 1"])
    assert summary.dropped == {"empty": 1}
    assert prepare(data).reason is None


def test_another_split_or_none(data):
    prepare(data)
    other = dataclasses.replace(data, source_test_split="dev")
    assert prepare(other).reason == "source_test_split changed from test to dev"
    assert texts(open_prepared(other)[1]) == ["dev"]
    none = dataclasses.replace(data, source_test_split=None)
    prepare(none)
    assert texts(open_prepared(none)[1]) == ["train 3", "train 4"]
    with pytest.raises(ConfigError, match="source_test_split: is no split of the source; found 'tset'"):
        prepare(dataclasses.replace(data, source_test_split="tset"))
    with pytest.raises(ConfigError, match="source_test_split: is the split that trains"):
        prepare(dataclasses.replace(data, source_test_split="train"))


def test_the_test_split_can_train(data):
    prepare(dataclasses.replace(data, source_dataset_split="test", test_split=0))
    assert texts(open_prepared(dataclasses.replace(data, source_dataset_split="test", test_split=0))[0]) == [
        "test 0",
        "test 1",
    ]


def test_streaming(data):
    data = dataclasses.replace(data, data_path=None, streaming=True, batching="stream")
    streamed = open_streamed(data, seed=1, vocab_size=257)
    assert texts(streamed.validation) == ["test 0", "test 1"]
    block = next(streamed.streams[0].blocks(Mark(0, 0, 0)))
    assert block.num_documents == 5
