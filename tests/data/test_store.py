import pickle
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest

from trainer.data.binidx import BinIdx, BinIdxWriter
from trainer.data.store import ArrowStore, check_token_ids, open_store
from trainer.errors import DataError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
DOCUMENTS = [[5, 6, 7, 0], [8, 0], [], [9, 1, 2, 3, 4, 0]]


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def save(folder, columns, **features):
    if features:
        columns = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    else:
        columns = datasets.Dataset.from_dict(columns)
    columns.save_to_disk(folder)
    return folder


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("kind", [datasets.List, datasets.LargeList])
def test_documents_of_any_list_type(kind, dtype, tmp_path):
    store = ArrowStore(save(tmp_path / "x", {"input_ids": DOCUMENTS}, input_ids=kind(datasets.Value(dtype))))
    assert store.dtype == dtype
    assert store.sizes.tolist() == [4, 2, 0, 6]
    assert [store.read(i, 0, 99).tolist() for i in range(4)] == DOCUMENTS
    assert store.read(3, 2, 4).tolist() == [2, 3]
    flat = sum(DOCUMENTS, [])
    assert [store.read_flat(i, i + 5).tolist() for i in range(12)] == [flat[i : i + 5] for i in range(12)]
    assert store.loss_mask(0, 0, 4) is None


def test_documents_over_many_batches_and_files(tmp_path):
    rows = [[i % 300, i % 7, 0][: 1 + i % 3] for i in range(2500)]
    saved = datasets.Dataset.from_dict({"input_ids": rows})
    saved.save_to_disk(tmp_path / "x", num_shards=3)
    store = ArrowStore(tmp_path / "x")
    assert [store.read(i, 0, 9).tolist() for i in range(2500)] == rows
    assert store.read_flat(0, 1 << 40).tolist() == sum(rows, [])
    assert pickle.loads(pickle.dumps(store)).digest == store.digest


def test_digest_does_not_depend_on_the_format(tmp_path):
    with BinIdxWriter(tmp_path / "pair", np.int64) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    arrow = ArrowStore(save(tmp_path / "x", {"input_ids": DOCUMENTS}))
    assert arrow.digest == BinIdx(tmp_path / "pair").digest
    other = ArrowStore(save(tmp_path / "y", {"input_ids": [*DOCUMENTS[:3], [9, 1, 2, 3, 4, 1]]}))
    moved = ArrowStore(save(tmp_path / "z", {"input_ids": [[5, 6, 7], [0, 8, 0], *DOCUMENTS[2:]]}))
    assert len({arrow.digest, other.digest, moved.digest}) == 3


def test_loss_mask_is_about_targets(tmp_path):
    masks = [[0, 0, 1, 1], [1, 0], [], [1] * 6]
    store = ArrowStore(save(tmp_path / "x", {"input_ids": DOCUMENTS, "loss_mask": masks, "doc_id": [0, 1, 2, 3]}))
    mask = store.loss_mask(0, 1, 4)
    assert mask.dtype == np.float32
    assert mask.tolist() == [0, 1, 1]


def test_mask_of_another_length_is_refused(tmp_path):
    folder = save(tmp_path / "x", {"input_ids": [[1, 2], [3, 4]], "loss_mask": [[1, 1], [1]]})
    with pytest.raises(DataError, match="row 1: loss_mask and input_ids differ in length; found '1 and 2'"):
        ArrowStore(folder)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, "has no column input_ids; found 'text'"),
        ({"input_ids": [[1.5]]}, "wrong type"),
        ({"input_ids": [1, 2]}, "wrong type; found 'int32'"),
        ({"input_ids": [[1], None]}, "holds null"),
    ],
)
def test_columns_of_the_wrong_kind(columns, words, tmp_path):
    with pytest.raises(DataError, match=words) as caught:
        ArrowStore(save(tmp_path / "x", columns))
    assert "data-00000-of-00001.arrow" in str(caught.value)


@pytest.mark.fault(52)
def test_damaged_stream_is_never_read_in_part(tmp_path):
    folder = save(tmp_path / "x", {"input_ids": [[i, 0] for i in range(5000)]})
    path = next(folder.glob("*.arrow"))
    content = path.read_bytes()
    for cut in (1, len(content) // 2, len(content) - 8, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match="data-00000-of-00001.arrow: is damaged"):
            ArrowStore(folder)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        ArrowStore(folder)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        ArrowStore(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match="state.json: cannot be read"):
        ArrowStore(folder)


def test_open_store_finds_out_what_is_there(tmp_path):
    columns = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    datasets.DatasetDict({"train": columns, "test": columns.select([0])}).save_to_disk(tmp_path / "splits")
    assert open_store(tmp_path / "splits").num_documents == 4
    assert open_store(tmp_path / "splits", "test").num_documents == 1
    assert open_store(tmp_path / "splits" / "test").num_documents == 1
    assert open_store(FIXTURES / "vectors" / "sample").num_documents == 10
    with pytest.raises(DataError, match=r"nowhere\.bin: does not exist"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no state.json"):
        open_store(tmp_path)


@pytest.mark.fault(50)
def test_token_ids_are_checked_in_every_file(tmp_path):
    rows = [[1, 2, 0]] * 700 + [[1, 77, 0]] + [[1, 2, 0]] * 700
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "x", num_shards=2)
    store = ArrowStore(tmp_path / "x")
    check_token_ids(store, 78)
    with pytest.raises(DataError, match="token id 77 in document 700 at offset 1 .*vocab_size 77"):
        check_token_ids(store, 77)


def test_threads_may_read_at_once():
    store = BinIdx(FIXTURES / "vectors" / "sample")
    expected = store.read_flat(0, 86).tolist()
    failures = []

    def read():
        for start in range(60):
            if store.read_flat(start, start + 26).tolist() != expected[start : start + 26]:
                failures.append(start)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
