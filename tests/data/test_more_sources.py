"""Tables, numpy files, patterns, data sets of the Hub (from a cache, without network), pickled frames."""

import json
import pickle

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from trainer.config.schema import DataConfig
from trainer.data.npy import open_npy
from trainer.data.prepare import open_prepared, prepare
from trainer.data.sources import find_source
from trainer.data.tokenizers import get_tokenizer
from trainer.errors import ConfigError, DataError, TrainerError


def documents(tmp_path, **settings):
    data = DataConfig(**{"tokenizer": "byte", "test_split": 0, "data_path": str(tmp_path / "prepared"), **settings})
    prepare(data)
    store = open_prepared(data)[0]
    return [get_tokenizer("byte").decode(store.read(i, 0, int(size))) for i, size in enumerate(store.sizes)]


CSV = 'prompt,completion,n\n"a, ""b""","line 1\nline 2",1\n\nc,d,2\n'


def test_csv(tmp_path):
    (tmp_path / "x.csv").write_text(CSV, "utf-8-sig")
    assert documents(tmp_path, source=str(tmp_path / "x.csv")) == ['a, "b"line 1\nline 2', "cd"]
    (tmp_path / "x.tsv").write_text("text\tn\nabc, d\t1\n")
    assert documents(tmp_path, source="csv", source_data_dir=str(tmp_path / "x.tsv")) == ["abc, d"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text,n\nabc,1\nabc\n", "line 3 has 1 fields; must be 2, one for each of text, n"),
        (b"text,n\nabc,1,2\n", "line 2 has 3 fields"),
        (b'text,n\n"abc,1\n', "line 2 is no valid csv"),
        (b"text,n\nabc\xff,1\n", "is not valid utf-8 in line 2, byte 10 of the file .*0xff"),
        (b"", "holds no documents"),
        (b"text,n\n", "holds no documents"),
        (b"title,n\nabc,1\n", "line 2: has no column text.*found 'title, n'"),
    ],
)
def test_bad_csv_is_named(content, words, tmp_path):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"x.csv.*{words}"):
        documents(tmp_path, source=str(tmp_path / "x.csv"))


def test_damage_far_inside_a_large_csv(tmp_path):
    rows = ["text,n"] + [f'"row {i}",1' for i in range(20_000)]
    rows[15_000] = '"cut'
    (tmp_path / "x.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"x\.csv: line 15001"):
        documents(tmp_path, source=str(tmp_path / "x.csv"))


def test_patterns(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"text {name}"}) + "\n")
    assert documents(tmp_path, source=f"{tmp_path}/*.jsonl") == ["text a", "text b"]
    assert documents(tmp_path, source="jsonl", source_data_dir=str(tmp_path)) == ["text a", "text b"]
    with pytest.raises(DataError, match="no file matches"):
        documents(tmp_path, source=f"{tmp_path}/*.csv")


def test_pickled_frames(tmp_path):
    frame = pd.DataFrame({"prompt": ["a", "b"], "completion": ["1", "2"], "n": [1.5, float("nan")]})
    frame.to_pickle(tmp_path / "x.pkl")
    assert documents(tmp_path, source="pandas", source_data_dir=str(tmp_path / "x.pkl")) == ["a1", "b2"]
    frame.astype(object).to_pickle(tmp_path / "x.pkl")
    assert documents(tmp_path, source=str(tmp_path / "x.pkl")) == ["a1", "b2"]
    (tmp_path / "x.pkl").write_bytes((tmp_path / "x.pkl").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"x\.pkl: cannot be read as a pickled DataFrame"):
        documents(tmp_path, source=str(tmp_path / "x.pkl"))


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (self.path,)


def test_hostile_pickle_is_refused_and_not_run(tmp_path):
    canary = tmp_path / "PWNED"
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Hostile(str(canary))))
    with pytest.raises(DataError, match="it asks for posix.mkdir"):
        documents(tmp_path, source=str(tmp_path / "x.pkl"))
    assert not canary.exists()


def test_arrow_file_format(tmp_path):
    table = pa.table({"text": ["a", "b"]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert documents(tmp_path, source=str(tmp_path / "x.arrow"), min_token_size=1) == ["a", "b"]
    raw = (tmp_path / "x.arrow").read_bytes()
    (tmp_path / "x.arrow").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"x\.arrow: is damaged"):
        documents(tmp_path, source=str(tmp_path / "x.arrow"))


def test_npy_stream(tmp_path):
    np.save(tmp_path / "x.npy", np.array([5, 6, 0, 7, 0, 8, 9], np.uint16))
    store = open_npy(tmp_path / "x.npy")
    assert [store.read(i, 0, 9).tolist() for i in range(3)] == [[5, 6, 0], [7, 0], [8, 9]]
    assert store.read_flat(2, 5).tolist() == [0, 7, 0]
    data = DataConfig(source=str(tmp_path / "x.npy"), test_split=1)
    assert prepare(data, vocab_size=10).counts["train_tokens"] == 5
    assert prepare(DataConfig(source="npy", source_data_dir=str(tmp_path / "x.npy"))).counts["tokens"] == 7
    with pytest.raises(DataError, match="token id 9 in document 2 at offset 1"):
        prepare(data, vocab_size=9)
    assert pickle.loads(pickle.dumps(store)).num_tokens == 7


def test_npy_rows_lose_their_padding_only(tmp_path):
    rows = np.array([[5, 6, 7, 8], [5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 0], [1, 2, 3, 4]], np.int32)
    np.save(tmp_path / "x.npy", rows)
    store = open_npy(tmp_path / "x.npy")
    found = [store.read(i, 0, 9).tolist() for i in range(store.num_documents)]
    assert found == [[5, 6, 7, 8], [5, 0], [], [5, 6, 7, 0], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.ones(3), "holds no token ids; found 'float64"),
        (np.ones((2, 2, 2), int), "holds no token ids"),
        (np.ones(0, int), "holds no documents"),
        (np.array([{}]), "cannot be read as a .npy file"),
    ],
)
def test_bad_npy_is_named(array, words, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=f"x.npy: {words}"):
        open_npy(tmp_path / "x.npy")


def test_truncated_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(1000, np.uint16))
    raw = (tmp_path / "x.npy").read_bytes()
    for size in (0, 50, 1000):
        (tmp_path / "x.npy").write_bytes(raw[:size])
        with pytest.raises(DataError, match="x.npy: cannot be read"):
            open_npy(tmp_path / "x.npy")
    with pytest.raises(DataError, match="does not exist"):
        open_npy(tmp_path / "y.npy")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A data set of the Hub as `datasets` leaves it in its cache."""
    folder = tmp_path / "cache" / "someone___small" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    made = datasets.Dataset.from_dict(
        {"prompt": [f"q{i} " for i in range(5)], "completion": [f"a{i}" for i in range(5)]}
    )
    with datasets.arrow_writer.ArrowWriter(features=made.features, path=str(folder / "small-train.arrow")) as writer:
        for record in made:
            writer.write(record)
        num, num_bytes = writer.finalize()
    splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_bytes, num, dataset_name="small")})
    info = datasets.DatasetInfo(
        features=made.features, splits=splits, builder_name="parquet", dataset_name="small", config_name="default",
        version="0.0.0",
    )  # fmt: skip
    info.write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return "someone/small"


@pytest.mark.filterwarnings("ignore")
def test_data_set_of_the_hub_from_its_cache(hub_cache, tmp_path):
    params = {"cache_dir": str(tmp_path / "cache"), "token": "hf_CANARYSECRET"}
    settings = {"source": hub_cache, "source_dataset_params": params}
    assert documents(tmp_path, **settings) == [f"q{i} a{i}" for i in range(5)]
    data = DataConfig(**settings, data_path=str(tmp_path / "prepared"), tokenizer="byte", test_split=0)
    assert prepare(data).reason is None
    assert "CANARYSECRET" not in (tmp_path / "prepared" / "manifest.json").read_text()
    assert documents(tmp_path, **settings, source_dataset_split="train[1:3]") == ["q1 a1", "q2 a2"]
    with pytest.raises(DataError, match=r"someone/small is no local path.*Unknown split"):
        documents(tmp_path, **settings, source_dataset_split="dev")


def test_local_folder_by_load_dataset_rules(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text("text,n\nabc,1\n")
    assert documents(tmp_path, source=str(folder)) == ["abc"]


@pytest.mark.filterwarnings("ignore")
def test_unknown_name_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    params = {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises(DataError, match=r"nobody/nothing is no local path.*save_to_disk"):
        documents(tmp_path, source="nobody/nothing", source_dataset_params=params)


def test_part_of_a_split(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(10)))
    path = str(tmp_path / "x.jsonl")
    assert documents(tmp_path, source=path, source_dataset_split="train[2:4]") == ["t2", "t3"]
    assert documents(tmp_path, source=path, source_dataset_split="train[:20%]") == ["t0", "t1"]
    with pytest.raises(ConfigError, match="source_dataset_split: is no valid slice"):
        documents(tmp_path, source=path, source_dataset_split="train[x:4]")


def test_tokenized_data_set_as_source(tmp_path):
    columns = {"input_ids": [[1, 2, 0], [3, 0]], "labels": [[-100, 2, 0], [-100, -100]]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "ids")
    data = DataConfig(source=str(tmp_path / "ids"), data_path=str(tmp_path / "p"), tokenizer="byte", test_split=0)
    assert prepare(data).dropped == {"without a token to train": 1}
    train = open_prepared(data)[0]
    assert (train.read(0, 0, 3).tolist(), train.loss_mask(0, 0, 3).tolist()) == ([1, 2, 0], [0, 1, 1])
    (tmp_path / "x.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [1, 999]}\n')
    with pytest.raises(DataError, match=r"line 2: input_ids\[1\] is not in the vocabulary; found '999'"):
        documents(tmp_path, source=str(tmp_path / "x.jsonl"))


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "messages is no list of messages; found 'an empty list'"),
        ({"messages": [MESSAGE, "x"]}, r"messages\[1\] is a text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\].role is no known role; found 'wizard'"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content is a number"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is null"),
        ({"messages": [{**MESSAGE, "train": "yes"}]}, r"messages\[0\].train is a text"),
        ({"other": 1}, "messages is no list of messages; found 'nothing'"),
    ],
)
@pytest.mark.parametrize("num_proc", [1, 2])
def test_bad_records_are_named_with_their_line(record, words, num_proc, tmp_path):
    if num_proc == 2 and "wizard" not in words:
        return
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [MESSAGE]}) + "\n\n" + json.dumps(record) + "\n")
    with pytest.raises(DataError, match=rf"x\.jsonl: line 3: {words}") as caught:
        documents(tmp_path, source=str(tmp_path / "x.jsonl"), num_proc=num_proc)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"multi_column_keys": ["a"], "multi_column_prefix": ["x\\n"]},
            r"data.multi_column_prefix: holds the two characters",
        ),
        ({"multi_column_separator": "\\n\\n"}, "double quotes"),
        ({"conversation_sender_suffix": {"a": "\\n"}}, "data.conversation_sender_suffix"),
        ({"multi_column_keys": ["a", "b"], "multi_column_train_mask": [True]}, "has 1 entries for 2 columns"),
        ({"conversation_format": "iopairs"}, "data.conversation_input_key_prefix_map: is not set"),
        ({"conversation_format": "sender"}, "data.conversation_sender_key: is not set"),
        ({"conversation_format": "messages", "roles_to_train": ["bot"]}, "unknown role; found 'bot'"),
        ({"conversation_format": "messages", "chat_template": "llama"}, "data.chat_template: unknown"),
        ({"conversation_format": "messages", "chat_template": "tokenizer"}, "brings no chat template"),
        ({"conversation_format": "messages", "chat_template": "jinja:{file}"}, "literal|two characters"),
        ({"conversation_format": "messages", "chat_template": "jinja:/no"}, "/no cannot be read"),
    ],
)
def test_settings_of_formats_are_checked(settings, words, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}\\n{% endfor %}")
    (tmp_path / "x.jsonl").write_text('{"a": "1", "b": "2"}\n')
    filled = json.loads(json.dumps(settings).replace("{file}", str(tmp_path / "t.jinja")))
    with pytest.raises(ConfigError, match=words):
        documents(tmp_path, source=str(tmp_path / "x.jsonl"), **filled)


def test_template_of_the_tokenizer(tmp_path):
    folder = tmp_path / "tok"
    folder.mkdir()
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(1, 256)}, []))
    core.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}({{ m.content }}){{ eos_token }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<", "eos_token": {"content": ">"}})
    )
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [MESSAGE, {"role": "assistant", "content": "y"}]}) + "\n")
    data = DataConfig(
        source=str(tmp_path / "x.jsonl"), data_path=str(tmp_path / "p"), tokenizer=str(folder), test_split=0,
        chat_template="tokenizer",
    )  # fmt: skip
    prepare(data)
    train = open_prepared(data)[0]
    assert "".join(map(chr, train.read(0, 0, 99))) == "<(x)>(y)>\0"
    assert train.loss_mask(0, 0, 99).tolist() == [0] * 5 + [1] * 5


def test_template_that_rewrites_history_is_refused(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    turns = [MESSAGE, {"role": "assistant", "content": "y"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match=r"line 1: jinja:.* changes earlier text when message 1 is added.*generation"):
        documents(tmp_path, source=str(tmp_path / "x.jsonl"), chat_template=f"jinja:{tmp_path / 't.jinja'}")


def test_edited_template_rebuilds(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [MESSAGE, {"role": "assistant", "content": "y"}]}) + "\n")
    settings = {"source": str(tmp_path / "x.jsonl"), "chat_template": f"jinja:{template}"}
    assert documents(tmp_path, **settings) == ["x;y;"]
    template.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    assert documents(tmp_path, **settings) == ["x|y|"]


def test_names_that_are_paths_are_not_taken_for_the_hub():
    for name in ("data/x.jsonl", "/no/where", "a/b/c", "./x"):
        with pytest.raises(TrainerError, match="is no such file"):
            find_source(DataConfig(source=name))
    assert find_source(DataConfig(source="someone/a.set-2")).hub_name == "someone/a.set-2"
