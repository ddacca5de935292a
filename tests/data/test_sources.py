import bz2
import gzip
import json
import lzma
import pickle
import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.schema import DataConfig
from trainer.data.encode import Encoder
from trainer.data.format_choice import find_format
from trainer.data.formats import TextFormat
from trainer.data.sources import find_flat, find_source, first_record, read_batches
from trainer.errors import ConfigError, DataError, TrainerError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
BAD = FIXTURES / "bad"


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def texts_of(_, **settings):
    """The text of each record, as preparation sees it."""
    data = DataConfig(**settings)
    source = find_source(data)
    form = TextFormat()
    if source.kind != "text":
        place, record = first_record(source)
        form = find_format(data, record, place)
    encoder = Encoder("byte", append_end_of_document=False, record_format=form)
    texts = []
    for batch in read_batches(source, form.columns):
        ids, _, sizes = encoder(pickle.loads(pickle.dumps(batch)))
        texts += [bytes((part - 1).astype("u1")).decode() for part in np.split(ids, np.cumsum(sizes)[:-1])]
    return texts


def write_lines(path, records, end="\n"):
    path.write_text("".join(json.dumps(record) + end for record in records), "utf-8")
    return path


def bad_json(name):
    return {"source": "json", "source_data_dir": str(BAD), "source_dataset_params": {"data_files": name}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("truncated_last_line.jsonl", ["line 6 is cut off"]),  # D01
        ("bad_middle_line.jsonl", ["line 3 is not valid JSON", "column 10"]),  # D02
        ("empty.jsonl", ["no documents"]),  # D03
        ("wrong_key.jsonl", ["text", "content", "line 1"]),  # D05
        ("text_is_null.jsonl", ["line 2", "null"]),  # D07
        ("array_row.jsonl", ["line 2 is an array"]),  # D08
        ("invalid_utf8.jsonl", ["line 2", "utf-8", "0xff"]),  # D09
        ("deep_json.jsonl", ["line 1", "nested too deeply"]),  # D21
        ("html_instead_of_data.jsonl", ["line 1 is not valid JSON"]),  # D22
    ],
)
@pytest.mark.fault(51)
def test_bad_json_lines_are_named(name, words, tmp_path):
    for settings in (bad_json(name), {"source": str(BAD / name)}):
        with pytest.raises(DataError) as caught:
            texts_of(tmp_path / "w", **settings)
        text = str(caught.value)
        assert [word for word in [name, *words] if word not in text] == []
        assert "\n" not in text
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("truncated.parquet", ["damaged"]),  # D17
        ("zero_byte.parquet", ["empty"]),  # D18
        ("flipped_bytes.arrow", ["damaged", "100 rows"]),  # D20
    ],
)
@pytest.mark.fault(52)
def test_bad_binary_files_are_named(name, words, tmp_path):
    with pytest.raises(DataError) as caught:
        texts_of(tmp_path / "w", source=str(BAD / name))
    text = str(caught.value)
    assert [word for word in [name, *words] if word not in text] == []
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("blank_lines.jsonl", 2),  # D04
        ("bom.jsonl", 2),  # D10
        ("crlf.jsonl", 5),  # D11
        ("unicode_garbage.jsonl", 10),  # D12
        ("empty_docs.jsonl", 3),  # D14, skipped later and counted there
        ("one_token_docs.jsonl", 8),  # D15
    ],
)
@pytest.mark.fault(51)
def test_odd_but_good_json_lines_are_read(name, count, tmp_path):
    texts = texts_of(tmp_path / "w", **bad_json(name))
    lines = [line for line in (BAD / name).read_text("utf-8-sig").splitlines() if line.strip()]
    assert len(texts) == count
    assert texts == [json.loads(line)["text"] for line in lines]


def test_missing_source_file_is_named():  # C17
    data = DataConfig(source="json", source_dataset_params={"data_files": "/nonexistent/x.jsonl"})
    with pytest.raises(DataError, match="/nonexistent/x.jsonl: does not exist"):
        find_source(data)


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    records = [{"text": "2020-01-01"}, {"text": "2020-01-02T03:04:05"}]
    assert texts_of(tmp_path / "w", source=str(write_lines(tmp_path / "d.jsonl", records))) == [
        "2020-01-01",
        "2020-01-02T03:04:05",
    ]


def test_other_columns_may_be_of_any_kind(tmp_path):
    records = [{"text": "a", "m": 1}, {"m": {"x": [1]}, "text": "b"}, {"text": "c", "type": "user", "message": {}}]
    assert texts_of(tmp_path / "w", source=str(write_lines(tmp_path / "x.jsonl", records))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": 17}, "text is a number; found '17'"),
        ({"text": True}, "text is a boolean"),
        ({"text": ["a"]}, "text is an array"),
        ({"text": "x\ud83d"}, "lone surrogate"),
        ({}, "has no text; found 'nothing'"),
        ("text", "line 2 is a text"),
    ],
)
@pytest.mark.fault(51)
def test_rows_without_a_text_are_named(record, words, tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "fine"}, record, {"text": "fine"}])
    with pytest.raises(DataError, match=words) as caught:
        texts_of(tmp_path / "w", source=str(path))
    assert "x.jsonl: line 2" in str(caught.value)


def test_numbers_of_thousands_of_digits_are_an_error_not_a_traceback(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "n": ' + "9" * 5000 + "}\n")
    with pytest.raises(DataError, match="line 1 is not valid JSON"):
        texts_of(tmp_path / "w", source=str(tmp_path / "x.jsonl"))


def test_arrays_of_objects(tmp_path):
    records = [{"text": "a"}, {"text": "b\nc"}]
    (tmp_path / "one.json").write_text(json.dumps(records))
    (tmp_path / "many.json").write_text(json.dumps(records, indent=2))
    (tmp_path / "under.json").write_text(json.dumps({"data": records}))
    assert texts_of(tmp_path / "a", source=str(tmp_path / "one.json")) == ["a", "b\nc"]
    assert texts_of(tmp_path / "b", source=str(tmp_path / "many.json")) == ["a", "b\nc"]
    settings = {"source": str(tmp_path / "under.json"), "source_dataset_params": {"field": "data"}}
    assert texts_of(tmp_path / "c", **settings) == ["a", "b\nc"]
    settings["source_dataset_params"] = {"field": "rows"}
    with pytest.raises(DataError, match="has no field rows; found 'data'"):
        texts_of(tmp_path / "d", **settings)
    (tmp_path / "many.json").write_text(json.dumps([*records, {"text": None}], indent=2))
    with pytest.raises(DataError, match="many.json: entry 3: text is null"):
        texts_of(tmp_path / "e", source=str(tmp_path / "many.json"))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_packed_json_lines(suffix, pack, tmp_path):
    path = tmp_path / f"x.jsonl{suffix}"
    content = pack(b'{"text": "a"}\n{"text": "b"}\n' * 100)
    path.write_bytes(content)
    assert texts_of(tmp_path / "w", source=str(path)) == ["a", "b"] * 100
    path.write_bytes(content[:-12])
    with pytest.raises(DataError, match=f"x.jsonl{suffix}: cannot be read or unpacked"):
        texts_of(tmp_path / "w", source=str(path))


def test_a_document_larger_than_any_block(tmp_path):
    long = "".join(random.Random(3).choices("ab \n世", k=6_000_000))
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}, {"text": long}, {"text": "b"}])
    texts = texts_of(tmp_path / "w", source=str(path))
    assert [len(text) for text in texts] == [1, 6_000_000, 1]
    assert texts[1] == long


def test_each_text_file_is_one_document(tmp_path, caplog):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("line 1\nline 2\n\nline 4\n", "utf-8")
    (folder / "a[1] ü.md").write_bytes(b"\xef\xbb\xbfwith bom\r\nnext")
    (folder / "sub" / "c.txt").write_text("", "utf-8")
    (folder / ".hidden.txt").write_text("no", "utf-8")
    (folder / "d.py").write_text("no", "utf-8")
    expected = ["with bom\nnext", "line 1\nline 2\n\nline 4\n", ""]
    with caplog.at_level("INFO"):
        assert texts_of(tmp_path / "w", source="text", source_data_dir=str(folder)) == expected
    assert "carriage returns are read as newlines" in caplog.text
    assert texts_of(tmp_path / "v", source=str(folder / "b.txt")) == expected[1:2]
    params = {"data_files": ["sub/*.txt", "b.txt"]}
    settings = {"source": "text", "source_data_dir": str(folder), "source_dataset_params": params}
    assert texts_of(tmp_path / "u", **settings) == ["", expected[1]]
    params["sample_by"] = "line"
    assert texts_of(tmp_path / "t", **settings) == ["line 1", "line 2", "", "line 4"]


def test_text_file_that_is_no_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"fine\nfine\nbad \xff\n")
    with pytest.raises(DataError, match=r"x\.txt: line 3, byte 14, is not valid utf-8; found 'byte 0xff'"):
        texts_of(tmp_path / "w", source=str(tmp_path / "x.txt"))
    (tmp_path / "y.txt").write_bytes("cut 世".encode()[:-1])
    with pytest.raises(DataError, match=r"y\.txt: line 1, byte 4, is not valid utf-8"):
        texts_of(tmp_path / "w", source=str(tmp_path / "y.txt"))
    settings = {"source": "text", "source_data_dir": str(tmp_path)}
    settings["source_dataset_params"] = {"data_files": "x.txt", "encoding": "latin-1"}
    assert texts_of(tmp_path / "v", **settings) == ["fine\nfine\nbad ÿ\n"]
    settings["source_dataset_params"]["encoding"] = "klingon"
    with pytest.raises(DataError, match="encoding: is unknown; found 'klingon'"):
        texts_of(tmp_path / "v", **settings)


def test_parquet_files(tmp_path):
    pq.write_table(pa.table({"body": ["a", "b" * 9], "n": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"n": ["x"], "body": ["2020-01-01"]}), tmp_path / "2.parquet", row_group_size=1)
    settings = {"source": "parquet", "source_data_dir": str(tmp_path), "custom_text_key": "body"}
    assert texts_of(tmp_path / "w", **settings) == ["a", "bbbbbbbbb", "2020-01-01"]
    with pytest.raises(DataError, match=r"1\.parquet: row 1: has no column text.*; found 'body, n'"):
        texts_of(tmp_path / "w", source=str(tmp_path / "1.parquet"))
    with pytest.raises(DataError, match=r"1\.parquet: row 1: n is a number; found '1'; must be a text"):
        texts_of(tmp_path / "w", source=str(tmp_path / "1.parquet"), custom_text_key="n")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"3\.parquet: row 2: text is null"):
        texts_of(tmp_path / "w", source=str(tmp_path / "3.parquet"))


@pytest.mark.fault(52)
def test_parquet_with_flipped_bytes_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(500)]}), path, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[600:616] = bytes(value ^ 0xFF for value in raw[600:616])
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match=r"x\.parquet: is damaged"):
        texts_of(tmp_path / "w", source=str(path))


def test_saved_data_sets(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(3)]}) for name in ("train", "dev")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
    parts["train"].save_to_disk(tmp_path / "plain")
    train = ["train 0", "train 1", "train 2"]
    assert texts_of(tmp_path / "w", source=str(tmp_path / "dict")) == train
    assert texts_of(tmp_path / "w", source=str(tmp_path / "plain")) == train
    settings = {"source": str(tmp_path / "dict"), "source_dataset_split": "dev"}
    assert texts_of(tmp_path / "w", **settings) == ["dev 0", "dev 1", "dev 2"]
    next((tmp_path / "plain").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="data-00000-of-00001.arrow: is missing"):
        texts_of(tmp_path / "w", source=str(tmp_path / "plain"))


def test_data_files_by_split(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    files = {"data_files": {"train": "a.jsonl", "dev": "b.jsonl"}}
    settings = {"source": "json", "source_data_dir": str(tmp_path), "source_dataset_params": files}
    assert texts_of(tmp_path / "w", **settings) == ["a"]
    assert texts_of(tmp_path / "v", **settings, source_dataset_split="dev") == ["b"]
    with pytest.raises(ConfigError, match="source_dataset_split: is not in data_files; found 'x'"):
        texts_of(tmp_path / "v", **settings, source_dataset_split="x")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "/nonexistent/data"}, "data.source: is no such file.*'/nonexistent/data'"),
        ({"source": "json"}, "data.source_data_dir: is not set"),
        ({"source": "text", "source_data_dir": "{empty}"}, "holds no text files"),
        ({"source": "json", "source_data_dir": "{empty}/no"}, "/no: does not exist"),
        ({"source": "{empty}"}, "does not hold files of one known kind; found 'none'"),
        ({"source": "json", "source_dataset_params": {"data_files": "{empty}/*.json"}}, "no file matches"),
        ({"source": __file__}, r"data.source: has an unknown ending.*\.py"),
        (
            {"source": "text", "source_data_dir": "{empty}", "source_dataset_params": {"name": 1, "data_files": "x"}},
            "source_dataset_params.name: has no meaning for text",
        ),
    ],
)
def test_settings_that_name_no_source(settings, words, tmp_path):
    filled = json.loads(json.dumps(settings).replace("{empty}", str(tmp_path)))
    with pytest.raises(TrainerError, match=words):
        find_source(DataConfig(**filled))


def test_find_flat():
    pair = FIXTURES / "vectors" / "sample"
    assert find_flat(DataConfig(source="binidx", source_data_dir=str(pair))) == pair
    assert find_flat(DataConfig(source="binidx", source_data_dir=f"{pair}.bin")) == pair
    assert find_flat(DataConfig(source=str(pair))) == pair
    assert find_flat(DataConfig(data_path=str(pair))) == pair
    assert find_flat(DataConfig(data_path=str(FIXTURES), source="json")) is None
    assert find_flat(DataConfig(data_path=str(FIXTURES))) is None
    with pytest.raises(ConfigError, match="source_data_dir: is not set"):
        find_flat(DataConfig(source="binidx"))
    with pytest.raises(ConfigError, match="no meaning for binidx"):
        find_flat(DataConfig(source="binidx", source_data_dir="x", source_dataset_params={"a": 1}))
