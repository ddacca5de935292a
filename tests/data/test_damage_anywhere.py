"""Damage anywhere in a file: one line that names the file and the place, at once; nothing is prepared from the rest."""

import gzip
import json
import re
import struct
import time

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.schema import DataConfig
from trainer.data.binidx import BinIdxWriter
from trainer.data.prepare import prepare
from trainer.errors import DataError

ROWS, BAD = 20_000, 15_000
GOOD = [json.dumps({"text": f"row {number} of a long file"}).encode() for number in range(1, ROWS + 1)]


def lines(bad=None, at=BAD):
    rows = list(GOOD)
    if bad is not None:
        rows[at - 1] = bad
    return b"\n".join(rows) + b"\n"


def refusal(file, tmp_path, **settings):
    """The one line that preparing `file` ends with."""
    data = DataConfig(**{"source": str(file), "data_path": str(tmp_path / "data"), "tokenizer": "byte"} | settings)
    started = time.process_time()
    with pytest.raises(DataError) as caught:
        prepare(data, vocab_size=257)
    assert time.process_time() - started < 5
    assert not (tmp_path / "data").exists()
    text = str(caught.value)
    assert "\n" not in text
    assert file.name in text
    return text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (GOOD[0][:-9], ["line 15000", "not valid JSON", "column"]),
        (b'{"text": 7}', ["line 15000", "text", "number"]),
        (b'{"text": null}', ["line 15000", "text", "null"]),
        (b'{"txt": "a"}', ["line 15000", "text"]),
        (b'["a"]', ["line 15000", "an array"]),
        (b'"a"', ["line 15000", "a text"]),
        (b'{"text": "a"} {"text": "b"}', ["line 15000", "Extra data"]),
        (b'{"text": "abc\xe2\x28 d"}', ["line 15000", "byte 13", "utf-8", "0xe2"]),
        (b"\0" * 4096, ["line 15000", "not valid JSON"]),
        (b'{"text": "\\ud800"}', ["line 15000", "lone surrogate", "U+D800"]),
        (b"[" * 100_000, ["line 15000", "nested too deeply"]),
    ],
)
def test_a_line_far_inside(bad, words, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(bad))
    found = refusal(file, tmp_path)
    assert all(word in found for word in words), found


@pytest.mark.parametrize("num_proc", [pytest.param(2, marks=pytest.mark.slow)])
def test_a_line_far_inside_with_several_processes(num_proc, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(lines(b"{"))
    assert "line 15000" in refusal(tmp_path / "x.jsonl", tmp_path, num_proc=num_proc)


def test_a_file_that_ends_inside_a_line(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(lines()[:-20])
    assert "line 20000 is cut off: the file ends inside it" in refusal(tmp_path / "x.jsonl", tmp_path)


@pytest.mark.parametrize(
    "content", [GOOD[0].decode().encode("utf-16"), b"PK\x03\x04" + bytes(range(256)) * 50, b"\x80"]
)
def test_a_file_of_another_kind(content, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(content)
    assert "line 1" in refusal(tmp_path / "x.jsonl", tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_packed_file(damage, tmp_path):
    packed = bytearray(gzip.compress(lines()))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    else:
        packed[len(packed) // 2] ^= 0x55
    (tmp_path / "x.jsonl.gz").write_bytes(packed)
    refusal(tmp_path / "x.jsonl.gz", tmp_path)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"a,1,2", ["line 15001", "3 fields", "text, n"]),
        (b"a", ["line 15001", "1 fields"]),
        (b'"a', ["line 15001"]),
        (b"abc\xff,1", ["line 15001", "utf-8", "0xff", "byte "]),
    ],
)
def test_a_row_of_a_csv(bad, words, tmp_path):
    rows = [f"row {number},1".encode() for number in range(1, ROWS + 1)]
    rows[BAD - 1] = bad
    (tmp_path / "x.csv").write_bytes(b"text,n\n" + b"\n".join(rows) + b"\n")
    found = refusal(tmp_path / "x.csv", tmp_path)
    assert all(word in found for word in words), found
    if bad.startswith(b"abc"):
        assert f"byte {(tmp_path / 'x.csv').read_bytes().index(bytes([255]))}" in found


@pytest.mark.parametrize("damage", ["page", "cut", "footer", "type", "null"])
def test_parquet(damage, tmp_path):
    texts = [f"row {number} of a long file" for number in range(ROWS)]
    column = pa.array([*texts[:BAD], None, *texts[BAD:]]) if damage == "null" else pa.array(texts)
    if damage == "type":
        column = pa.array(range(ROWS))
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": column}), file, row_group_size=4000)
    content = bytearray(file.read_bytes())
    if damage == "page":
        middle = len(content) // 2
        content[middle : middle + 4096] = bytes(4096)
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "footer":
        content[-8:-4] = b"\xff\xff\xff\x7f"
    file.write_bytes(content)
    found = refusal(file, tmp_path)
    assert damage not in ("type", "null") or "row " in found
    assert damage != "null" or f"row {BAD + 1}" in found
    assert damage != "page" or "after row" in found


@pytest.mark.parametrize("damage", ["cut", "tail"])
def test_saved_data_set(damage, tmp_path):
    datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(ROWS)]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "cut" else content + b"more")
    data = DataConfig(source=str(tmp_path / "saved"), data_path=str(tmp_path / "data"), tokenizer="byte")
    with pytest.raises(DataError, match=rf"{file.name}: is damaged"):
        prepare(data)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([1, 2, 999], r"line 500: input_ids\[2\].*999"), ([1, "x"], "line 500"), ([1, -1], "line 500"), (7, "line 500")],
)
def test_tokens_in_json(ids, words, tmp_path):
    rows = [json.dumps({"input_ids": [1, 2, 3]}) for _ in range(1000)]
    rows[499] = json.dumps({"input_ids": ids})
    (tmp_path / "x.jsonl").write_text("\n".join(rows) + "\n")
    assert re.search(words, refusal(tmp_path / "x.jsonl", tmp_path))


@pytest.mark.parametrize("bad", [300, -3])
def test_id_in_the_middle_of_an_array(bad, tmp_path):
    tokens = np.tile(np.array([5, 6, 7, 0], np.int32), 50_000)
    tokens[120_002] = bad
    np.save(tmp_path / "x.npy", tokens)
    found = refusal(tmp_path / "x.npy", tmp_path, data_path=None)
    assert f"token id {bad} in document 30000 at offset 2" in found


def make_pair(tmp_path):
    with BinIdxWriter(tmp_path / "x") as writer:
        for number in range(500):
            writer.add_document([5] * (number % 7 + 2))
    return tmp_path / "x.bin", tmp_path / "x.idx"


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (34 + 4 * 250, struct.pack("<i", 2**31 - 1), "item 251 does not start where the one before it ends"),
        (34 + 4 * 499, struct.pack("<i", 10**6), "cut off or has bytes too many"),
        (34 + 4 * 250, struct.pack("<i", -4), "item 250 has a negative size"),
        (34 + 4 * 500 + 8 * 250, struct.pack("<q", 10**12), "item 250 does not start"),
        (34 + 12 * 500 + 8 * 250, struct.pack("<q", 10**12), "document entry"),
        (18, struct.pack("<Q", 2**60), "bytes too many"),
    ],
)
def test_field_of_an_index(offset, value, words, tmp_path):
    _, idx = make_pair(tmp_path)
    content = bytearray(idx.read_bytes())
    content[offset : offset + len(value)] = value
    idx.write_bytes(content)
    data = DataConfig(source="binidx", source_data_dir=str(tmp_path / "x"))
    with pytest.raises(DataError, match=rf"x\.(idx|bin): .*{words}") as caught:
        prepare(data)
    assert "\n" not in str(caught.value)


def test_id_in_the_middle_of_a_pair(tmp_path):
    bin_file, _ = make_pair(tmp_path)
    content = bytearray(bin_file.read_bytes())
    content[2000:2002] = struct.pack("<H", 9999)
    bin_file.write_bytes(content)
    with pytest.raises(DataError, match=r"token id 9999 in document \d+ at offset \d"):
        prepare(DataConfig(source="binidx", source_data_dir=str(tmp_path / "x")), vocab_size=257)
