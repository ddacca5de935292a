import json
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from trainer.data.binidx import BinIdx, BinIdxWriter, check_token_ids
from trainer.data.store import SubsetStore
from trainer.errors import DataError, StorageError, TrainerError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
VECTORS = FIXTURES / "vectors"
BAD = FIXTURES / "binidx"


@pytest.fixture
def golden():
    return json.loads((VECTORS / "sample.json").read_text("utf-8"))


def copy_pair(name, folder):
    for suffix in (".bin", ".idx"):
        shutil.copy(VECTORS / (name + suffix), folder / (name + suffix))
    return folder / name


def patch_index(prefix, offset, content):
    path = prefix.with_name(prefix.name + ".idx")
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(content)] = content
    path.write_bytes(bytes(raw))


def test_documents_equal_the_official_writers(golden):
    store = BinIdx(VECTORS / "sample")
    assert store.num_documents == 10
    assert store.sizes.tolist() == golden["sizes"]
    assert store.sizes.dtype == np.int64
    assert [store.read(i, 0, size).tolist() for i, size in enumerate(golden["sizes"])] == golden["docs"]


def test_flat_view_equals_the_official_stream(golden):
    store = BinIdx(VECTORS / "sample")
    assert store.num_tokens == golden["n_tokens"]
    assert store.read_flat(0, store.num_tokens).tolist() == golden["flat"]
    for draw in golden["samples_ctx8"]:
        assert store.read_flat(draw["offset"], draw["offset"] + 9).tolist() == draw["tokens"]


@pytest.mark.parametrize(("name", "dtype"), [("mini_i32", np.int32), ("mini_i64", np.int64)])
def test_wide_integers(name, dtype):
    store = BinIdx(VECTORS / f"{name}.bin")
    assert store.dtype == dtype
    assert [store.read(i, 0, 9).tolist() for i in range(2)] == [[70000, 1, 0], [5, 0]]


def test_ranges_inside_a_document_are_clipped_like_slices():
    store = BinIdx(VECTORS / "sample")
    assert store.read(3, 2, 5).tolist() == [41, 121, 501]
    assert store.read(3, 10, 99).tolist() == [11, 0]
    assert store.read(3, 12, 99).tolist() == []
    assert store.loss_mask(3, 0, 5) is None
    with pytest.raises(IndexError, match="document 10 of 10"):
        store.read(10, 0, 1)


@pytest.mark.parametrize(("name", "dtype"), [("sample", np.uint16), ("mini_i32", np.int32), ("mini_i64", np.int64)])
def test_writer_gives_the_same_bytes(name, dtype, tmp_path):
    store = BinIdx(VECTORS / name)
    with BinIdxWriter(tmp_path / name, dtype) as writer:
        for document in range(store.num_documents):
            writer.add_document(store.read(document, 0, 1 << 40))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / (name + suffix)).read_bytes() == (VECTORS / (name + suffix)).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


def test_documents_of_several_items(tmp_path):
    with BinIdxWriter(tmp_path / "megatron") as writer:
        writer.add_item([1, 2])
        writer.add_item([3])
        writer.end_document()
        writer.end_document()
        writer.add_document([4, 0])
    store = BinIdx(tmp_path / "megatron")
    assert store.sizes.tolist() == [3, 0, 2]
    assert store.read(0, 0, 9).tolist() == [1, 2, 3]
    assert store.read(2, 0, 9).tolist() == [4, 0]


def write_then_raise(prefix, error):
    with BinIdxWriter(prefix) as writer:
        writer.add_document([1, 0])
        raise error


def test_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_then_raise(tmp_path / "half", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_ids_that_do_not_fit(tmp_path):
    writer = BinIdxWriter(tmp_path / "x")
    writer.add_document([1, 0])
    with pytest.raises(DataError, match=r"item 1 .*uint16.*70000"):
        writer.add_document([70000, 0])
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_writer_names_the_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match="nowhere/x: cannot be written"):
        BinIdxWriter(tmp_path / "nowhere" / "x")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bin_truncated", ["bin_truncated.bin", "2066", "1033"]),  # B01
        ("idx_truncated", ["idx_truncated.idx", "40 bytes", "202 bytes"]),  # B03
        ("idx_bad_magic", ["idx_bad_magic.idx", "magic"]),  # B04
        ("idx_bad_version", ["idx_bad_version.idx", "version", "9"]),  # B05
        ("idx_bad_dtype", ["idx_bad_dtype.idx", "77"]),  # B06
        ("zero_docs", ["zero_docs", "0 documents"]),  # B08
        ("bin_empty", ["bin_empty.bin", "0 bytes", "2066"]),  # B09
        ("token_out_of_range", ["token_out_of_range", "700", "512", "document 3", "offset 5"]),  # B10
        ("token_negative", ["token_negative", "-5", "document 0", "offset 2"]),  # B11
        ("only_idx", ["only_idx.bin", "does not exist"]),  # B14
    ],
)
@pytest.mark.fault(50)
def test_bad_pairs_are_named_in_one_line(name, words):
    with pytest.raises(TrainerError) as caught:
        check_token_ids(BinIdx(BAD / name), 512)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_missing_index_is_named(tmp_path):
    (tmp_path / "lonely.bin").write_bytes(b"\1\0")
    with pytest.raises(DataError, match=r"lonely\.idx: does not exist"):
        BinIdx(tmp_path / "lonely")


@pytest.mark.parametrize(
    ("offset", "content", "words"),
    [
        (17, b"\6", "floating-point"),
        (17, b"\7", "floating-point"),
        (18, struct.pack("<Q", 1 << 60), "bytes for 1152921504606846976 items"),
        (34, struct.pack("<i", -2), "item 0 has a negative size"),
        (34 + 40 + 8, struct.pack("<q", 6), "item 1 does not start where the one before it ends"),
        (34 + 120, struct.pack("<q", 1), "do not span all items"),
        (34 + 120 + 80, struct.pack("<q", 9), "do not span all items"),
        (34 + 120 + 16, struct.pack("<q", 0), "document entry 2 lies before"),
    ],
)
def test_each_field_of_the_index_is_checked(offset, content, words, tmp_path):
    prefix = copy_pair("sample", tmp_path)
    patch_index(prefix, offset, content)
    with pytest.raises(DataError, match=words) as caught:
        BinIdx(prefix)
    assert "sample.idx" in str(caught.value)


def test_odd_byte_at_the_end_is_refused(tmp_path):
    prefix = copy_pair("sample", tmp_path)
    with (tmp_path / "sample.bin").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(DataError, match=r"sample\.bin.*173 bytes.*172 bytes"):
        BinIdx(prefix)


@pytest.mark.parametrize("change", ["shrink", "grow", "remove"])
@pytest.mark.fault(53)
def test_change_of_the_file_while_in_use_is_an_error(change, tmp_path):
    store = BinIdx(copy_pair("sample", tmp_path))
    path = tmp_path / "sample.bin"
    if change == "remove":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:100] if change == "shrink" else content + b"\0\0")
    with pytest.raises(DataError, match=r"sample\.bin: changed while it was in use"):
        store.read(9, 0, 4)


@pytest.mark.fault(50)
def test_check_token_ids_accepts_all_rows_and_is_exact_at_the_edge():
    store = BinIdx(VECTORS / "mini_i32")
    check_token_ids(store, 70001)
    with pytest.raises(DataError, match="token id 70000 in document 0 at offset 0"):
        check_token_ids(store, 70000)
    check_token_ids(BinIdx(VECTORS / "sample"), 65536)


def test_pickled_store_reads_the_same():
    store = BinIdx(VECTORS / "sample")
    subset = pickle.loads(pickle.dumps(SubsetStore(store, np.array([3, 0]))))
    assert subset.read(0, 0, 3).tolist() == store.read(3, 0, 3).tolist()
    assert pickle.loads(pickle.dumps(store)).digest == store.digest


def test_subset_is_a_store_of_its_own(golden):
    store = BinIdx(VECTORS / "sample")
    subset = SubsetStore(store, np.array([7, 2, 9]))
    expected = golden["docs"][7] + golden["docs"][2] + golden["docs"][9]
    assert subset.read_flat(0, 999).tolist() == expected
    assert [subset.read_flat(i, i + 5).tolist() for i in range(31)] == [expected[i : i + 5] for i in range(31)]
    assert subset.digest != store.digest
    assert SubsetStore(store, np.arange(10)).digest == store.digest
