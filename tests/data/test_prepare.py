import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest
import tokenizers

from trainer.config.schema import DataConfig
from trainer.data import encode, prepare
from trainer.data.prepare import open_prepared
from trainer.data.selection import split_documents
from trainer.data.tokenizers import get_tokenizer
from trainer.errors import ConfigError, DataError, StorageError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "data"
REPOSITORY = Path(__file__).parents[2]


def texts_in(path):
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def data(tmp_path):
    """Settings for a copy of 24 short documents."""
    shutil.copy(FIXTURES / "docs.jsonl", tmp_path / "docs.jsonl")
    return DataConfig(
        data_path=str(tmp_path / "prepared"), source=str(tmp_path / "docs.jsonl"), tokenizer="byte", test_split=0.1
    )


def with_(data, **changes):
    return dataclasses.replace(data, **changes)


def leftovers(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if re.search(r"\.(build|old)-", path.name))


def documents_of(store):
    return [store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.sizes)]


def test_documents_come_back_exactly(data, tmp_path):
    summary = prepare.prepare(data)
    assert summary.reason == "it does not exist yet"
    assert summary.tokens_per_s > 0
    train, validation, manifest = open_prepared(data)
    expected = [get_tokenizer("byte").encode(text) + [0] for text in texts_in(tmp_path / "docs.jsonl")]
    assert documents_of(train) + documents_of(validation) == expected
    assert (train.num_documents, validation.num_documents) == (22, 2)
    assert train.sizes.tolist() == [len(ids) for ids in expected[:22]]
    assert train.dtype == np.uint16
    assert manifest.max_token_id == max(max(ids) for ids in expected)
    assert manifest.counts == summary.counts
    assert summary.counts["tokens"] == sum(map(len, expected))
    assert leftovers(tmp_path) == []


def test_saved_folder_is_an_ordinary_data_set(data):
    prepare.prepare(data)
    loaded = datasets.load_from_disk(data.data_path)
    assert {name: len(part) for name, part in loaded.items()} == {"train": 22, "test": 2}
    assert loaded["train"].column_names == ["input_ids", "doc_id"]
    assert loaded["train"]["doc_id"][:] == list(range(22))
    assert loaded["train"][0]["input_ids"][-1] == 0


@pytest.mark.parametrize("tokenizer", ["world", "byte"])
@pytest.mark.promise(14)
def test_unicode_garbage_survives(tokenizer, tmp_path):  # D12
    source = FIXTURES / "bad" / "unicode_garbage.jsonl"
    data = DataConfig(data_path=str(tmp_path / "p"), source=str(source), tokenizer=tokenizer, test_split=0)
    prepare.prepare(data)
    train, validation, _ = open_prepared(data)
    decoded = [get_tokenizer(tokenizer).decode(ids) for ids in documents_of(train)]
    assert decoded == texts_in(source)
    assert validation is None


@pytest.mark.fault(47)
def test_empty_documents_are_counted(tmp_path, caplog):  # D14
    source = FIXTURES / "bad" / "empty_docs.jsonl"
    with caplog.at_level("INFO"):
        summary = prepare.prepare(DataConfig(data_path=str(tmp_path / "p"), source=str(source), tokenizer="byte"))
    assert "dropped 2 empty" in caplog.text
    assert summary.dropped == {"empty": 2}
    assert summary.counts["documents"] == 1


@pytest.mark.fault(47)
def test_one_token_documents_stay(tmp_path):  # D15
    source = FIXTURES / "bad" / "one_token_docs.jsonl"
    summary = prepare.prepare(DataConfig(data_path=str(tmp_path / "p"), source=str(source), tokenizer="byte"))
    assert summary.counts["tokens"] == 16
    assert summary.dropped == {}


def test_size_limits_count_the_end_of_document(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (0, 1, 2, 3, 4, 5)))
    data = DataConfig(data_path=str(tmp_path / "p"), source=str(tmp_path / "x.jsonl"), tokenizer="byte", test_split=0)
    summary = prepare.prepare(with_(data, min_token_size=3, max_token_size=5))
    assert summary.dropped == {"empty": 1, "shorter than min_token_size": 1, "longer than max_token_size": 1}
    assert open_prepared(with_(data, min_token_size=3, max_token_size=5))[0].sizes.tolist() == [3, 4, 5]
    summary = prepare.prepare(with_(data, append_end_of_document=False))
    assert summary.dropped == {"empty": 1, "shorter than min_token_size": 1}
    with pytest.raises(DataError, match=r"x\.jsonl: no documents are left; found '1 empty, 5 shorter"):
        prepare.prepare(with_(data, min_token_size=100))
    assert leftovers(tmp_path) == []


def test_second_call_does_nothing(data, tmp_path):
    prepare.prepare(data)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "prepared").rglob("*")}
    os.utime(data.source, (1, 1))
    summary = prepare.prepare(data)
    assert summary.reason is None
    assert summary.counts["documents"] == 24
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "prepared").rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": "world"}, "tokenizer changed from byte to world"),
        ({"min_token_size": 3}, "min_token_size changed from 2 to 3"),
        ({"test_split": 3}, "test_split changed from 0.1 to 3"),
        ({"append_end_of_document": False}, "append_end_of_document changed from true to false"),
        ({"test_split_shuffle": True}, "test_split_shuffle changed from false to true"),
    ],
)
def test_changed_settings_rebuild_with_the_reason(changes, reason, data, caplog):
    prepare.prepare(data)
    with caplog.at_level("INFO"):
        assert prepare.prepare(with_(data, **changes)).reason == reason
    assert f"rebuilding {data.data_path}: {reason}" in caplog.text
    assert prepare.prepare(with_(data, **changes)).reason is None


def test_changed_source_rebuilds(data, tmp_path):
    prepare.prepare(data)
    with (tmp_path / "docs.jsonl").open("a") as stream:
        stream.write('{"text": "one more"}\n')
    summary = prepare.prepare(data)
    assert summary.reason == "source file docs.jsonl changed"
    assert summary.counts["documents"] == 25
    shutil.copy(tmp_path / "docs.jsonl", tmp_path / "more.jsonl")
    both = with_(data, source="json", source_data_dir=str(tmp_path))
    assert prepare.prepare(both).reason == "source file more.jsonl is new"
    (tmp_path / "more.jsonl").unlink()
    assert prepare.prepare(both).reason == "source file more.jsonl is gone"


def test_new_program_version_rebuilds(data, monkeypatch):
    prepare.prepare(data)
    monkeypatch.setattr(encode, "VERSION", encode.VERSION + 1)
    assert prepare.prepare(data).reason.startswith("versions changed")


def test_changed_results_need_a_new_version(tmp_path):
    shutil.copy(FIXTURES / "docs.jsonl", tmp_path / "1.jsonl")
    shutil.copy(FIXTURES / "bad" / "unicode_garbage.jsonl", tmp_path / "2.jsonl")
    shutil.copy(FIXTURES / "bad" / "bom.jsonl", tmp_path / "3.jsonl")
    data = DataConfig(data_path=str(tmp_path / "p"), source="json", source_data_dir=str(tmp_path), min_token_size=3)
    made = [with_(data, test_split_shuffle=True), with_(data, max_token_size=12, test_split=2)]
    digests = []
    for settings in made:
        prepare.prepare(settings)
        train, validation, manifest = open_prepared(settings)
        digests += [train.digest[:16], validation.digest[:16]]
    assert (manifest.recipe["versions"], digests) == (
        {"sources": 2, "formats": 1, "tokenizers": 1, "encode": 2, "prepare": 2},
        ["1079b12829912179", "19df91b692cc4ac6", "ab0aa7f8255aeef0", "a1b4f1fd0e189a34"],
    ), "prepared data sets of users would stay as they were: raise VERSION of the stage that changed, then this record"


def test_force_rebuilds(data):
    prepare.prepare(data)
    assert prepare.prepare(data, force=True).reason == "asked for"


def test_same_data_from_another_folder_is_up_to_date(data, tmp_path, monkeypatch):
    prepare.prepare(data)
    (tmp_path / "moved").mkdir()
    shutil.copy(data.source, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    moved = with_(data, source="json", source_dataset_params={"data_files": "moved/*.jsonl"}, data_path="prepared")
    assert prepare.prepare(moved).reason is None


def test_workers_give_the_same_ids(data):
    prepare.prepare(data)
    alone = open_prepared(data)[0].digest
    two = with_(data, num_proc=2)
    assert prepare.prepare(two, force=True).reason == "asked for"
    assert open_prepared(two)[0].digest == alone


def test_document_of_many_million_tokens(tmp_path):
    text = ("all work and no play " * 100_000 + "世界\n") * 3
    (tmp_path / "long.txt").write_text(text, "utf-8")
    (tmp_path / "short.txt").write_text("short", "utf-8")
    data = DataConfig(
        data_path=str(tmp_path / "p"), source="text", source_data_dir=str(tmp_path), tokenizer="byte", test_split=0
    )
    prepare.prepare(data)
    train = open_prepared(data)[0]
    assert train.sizes.tolist() == [len(text.encode()) + 1, 6]
    assert get_tokenizer("byte").decode(train.read(0, 0, 1 << 40)) == text


def test_large_vocabulary_is_stored_as_int32(tmp_path, data):
    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 70_000)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text('{"text": "w1 w69999"}\n')
    large = with_(data, source=str(tmp_path / "x.jsonl"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert prepare.prepare(large, vocab_size=70_000).dtype == "int32"
    assert documents_of(open_prepared(large)[0]) == [[1, 69999, 0]]
    for call in (prepare.prepare, open_prepared):
        with pytest.raises(DataError, match="token id 69999 in document 0 at offset 1"):
            call(large, vocab_size=65_536)


@pytest.mark.parametrize(
    ("count", "test_split", "validation"),
    [(20, 0.1, [18, 19]), (20, 0, []), (20, 3, [17, 18, 19]), (3, 0.01, [2]), (1, 0.5, []), (2, 0.99, [1])],
)
def test_split_takes_the_last_documents(count, test_split, validation):
    train, test = split_documents(count, test_split, shuffle=False, seed=1)
    assert test.tolist() == validation
    assert sorted([*train, *test]) == list(range(count))


def test_shuffled_split_depends_on_the_seed_alone():
    first, again, other = (split_documents(1000, 0.1, shuffle=True, seed=seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 100
    assert first == sorted(first) != list(range(900, 1000))


@pytest.mark.parametrize(
    ("test_split", "words"), [(24, "leaves none of 24"), (-1, "out of range"), (2.5, "out of range")]
)
def test_impossible_split_is_refused(test_split, words, data):
    with pytest.raises(ConfigError, match=f"data.test_split.*{words}"):
        prepare.prepare(with_(data, test_split=test_split))


def test_folder_that_cannot_be_written(data):  # A10
    with pytest.raises(StorageError, match="/proc/nope") as caught:
        prepare.prepare(with_(data, data_path="/proc/nope"))
    assert caught.value.exit_code == 4


@pytest.mark.promise(5)
def test_full_disk_is_named_and_leaves_the_old_data_set(data, tmp_path, monkeypatch):
    prepare.prepare(data)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "data-00000.arrow")

    monkeypatch.setattr(prepare, "list_files", full)
    with pytest.raises(StorageError, match=r"data-00000\.arrow cannot be written \(No space left on device\)"):
        prepare.prepare(with_(data, tokenizer="world"))
    assert leftovers(tmp_path) == []
    assert prepare.prepare(data).reason is None


def test_folder_of_someone_else_is_left_alone(data, tmp_path):
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by preload_datapath.py"):
        prepare.prepare(data, force=True)
    assert (tmp_path / "prepared" / "thesis.tex").read_text() == "years of work"


@pytest.mark.fault(53)
def test_source_that_changes_while_it_is_read(data, monkeypatch):
    encode_records = prepare.encode_records

    def encode_then_append(*args, **settings):
        encoded = encode_records(*args, **settings)
        with Path(data.source).open("a") as stream:
            stream.write('{"text": "late"}\n')
        return encoded

    monkeypatch.setattr(prepare, "encode_records", encode_then_append)
    with pytest.raises(DataError, match=r"docs\.jsonl: changed while it was read"):
        prepare.prepare(data)
    assert not Path(data.data_path).exists()


def damage_train(folder, how):
    path = next((folder / "train").glob("*.arrow"))
    raw = bytearray(path.read_bytes())
    if how == "flip":
        raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw if how == "flip" else raw[: len(raw) // 2]))


@pytest.mark.parametrize("how", ["flip", "truncate"])
@pytest.mark.fault(52)
def test_damaged_data_set_is_refused_and_rebuilt(how, data, tmp_path):
    prepare.prepare(data)
    damage_train(tmp_path / "prepared", how)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: changed since it was prepared") as caught:
        open_prepared(data)
    assert "run preload_datapath.py again" in str(caught.value)
    assert "changed since it was prepared" in prepare.prepare(data).reason
    open_prepared(data)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]"])
def test_damaged_manifest_is_refused_and_rebuilt(content, data, tmp_path):
    prepare.prepare(data)
    (tmp_path / "prepared" / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_prepared(data)
    assert "manifest.json" in prepare.prepare(data).reason
    assert prepare.prepare(data).reason is None


def test_other_settings_than_the_data_set_was_made_with(data):
    prepare.prepare(data)
    with pytest.raises(DataError, match="does not fit the settings: tokenizer changed from byte to world.*run preload"):
        open_prepared(with_(data, tokenizer="world"))
    with pytest.raises(DataError, match="tokenizer changed from byte to world"):
        open_prepared(with_(data, tokenizer="world", source=None))
    with pytest.raises(DataError, match="min_token_size changed from 2 to 9"):
        open_prepared(with_(data, min_token_size=9))
    open_prepared(with_(data, min_token_size=9, skip_datapath_setup=True))


def test_prepared_folder_alone_is_enough(data, tmp_path):
    prepare.prepare(data)
    ready = with_(data, source=None)
    assert prepare.prepare(ready).reason is None
    assert open_prepared(ready)[0].num_documents == 22
    (tmp_path / "docs.jsonl").unlink()
    assert open_prepared(data)[0].num_documents == 22
    with pytest.raises(DataError, match="docs.jsonl"):
        prepare.prepare(data)
    assert prepare.prepare(with_(data, skip_datapath_setup=True)).reason is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"source": None}, DataError, "data_path: does not exist.*prepared.*run preload"),
        ({"source": None, "data_path": None}, ConfigError, "neither data_path nor source"),
        ({"data_path": None}, ConfigError, "data.data_path: is not set"),
    ],
)
def test_missing_settings(changes, error, words, data):
    with pytest.raises(error, match=words):
        prepare.prepare(with_(data, **changes))


def test_data_set_of_the_older_trainer(tmp_path, caplog):
    columns = {
        "input_ids": [[5, 6, 7, 0], [8, 0]],
        "token_type_ids": [[0] * 4, [0] * 2],
        "attention_mask": [[0, 0, 1, 1], [1, 1]],
    }
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)})
    saved.save_to_disk(tmp_path / "old")
    with caplog.at_level("INFO"):
        train, validation, _ = open_prepared(DataConfig(data_path=str(tmp_path / "old")))
    assert documents_of(train) == [[5, 6, 7, 0], [8, 0]]
    assert train.loss_mask(0, 1, 4).tolist() == [0, 1, 1]
    assert validation is None
    assert "attention_mask marks the tokens that are trained as targets" in caplog.text
    with pytest.raises(DataError, match="token id 8 in document 1 at offset 0"):
        open_prepared(DataConfig(data_path=str(tmp_path / "old")), vocab_size=8)
    with pytest.raises(ConfigError, match="was not made by preload_datapath.py"):
        prepare.prepare(DataConfig(data_path=str(tmp_path / "old"), source=str(FIXTURES / "docs.jsonl")))


def test_binidx_needs_no_build():
    data = DataConfig(source="binidx", source_data_dir=str(FIXTURES / "vectors" / "sample"), test_split=2)
    summary = prepare.prepare(data, vocab_size=65536)
    assert summary.reason is None
    assert summary.counts["documents"] == 10
    train, validation, _ = open_prepared(data)
    golden = json.loads((FIXTURES / "vectors" / "sample.json").read_text("utf-8"))
    assert documents_of(train) == golden["docs"][:8]
    assert documents_of(validation) == golden["docs"][8:]
    limited = with_(data, min_token_size=10, max_token_size=10)
    assert prepare.prepare(limited).dropped == {"shorter than min_token_size": 4, "longer than max_token_size": 2}
    assert open_prepared(limited)[0].sizes.tolist() == [10, 10]


def test_official_windows_see_the_whole_stream():
    pair = str(FIXTURES / "vectors" / "sample")
    data = DataConfig(data_path=pair, batching="windows", test_split=0, min_token_size=10)
    train, validation, _ = open_prepared(data)
    assert (train.num_tokens, validation) == (86, None)
    with pytest.raises(DataError, match="is not in the vocabulary.*vocab_size 1000"):
        prepare.prepare(data, vocab_size=1000)


@pytest.mark.fault(55)
def test_two_at_once_build_once(data):
    summaries = []
    threads = [threading.Thread(target=lambda: summaries.append(prepare.prepare(data))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(summary.reason or "" for summary in summaries) == ["", "", "it does not exist yet"]


# The steps at which a build may die.
POINTS = ["encode_records", "keep_documents", "list_files", "write_manifest", "_replace"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.fault(54)
def test_interrupted_build_is_never_half_used(point, has_old, data, tmp_path, monkeypatch):
    if has_old:
        prepare.prepare(with_(data, tokenizer="world"))

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(prepare, point, die)
        # A killed process does not tidy up.
        patched.setattr(prepare.shutil, "rmtree", lambda *_, **__: None)
        prepare.prepare(data)
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(DataError, match="changed from world" if has_old else "does not exist"):
        open_prepared(data)
    assert prepare.prepare(data).counts["documents"] == 24
    assert leftovers(tmp_path) == []


KILLED_BUILD = """
import os, signal, sys
from trainer.config.schema import DataConfig
from trainer.data import prepare
if sys.argv[1]:
    setattr(prepare, sys.argv[1], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
prepare.prepare(DataConfig(data_path=sys.argv[2], source=sys.argv[3], tokenizer="byte", test_split=0.1))
"""


@pytest.mark.slow
@pytest.mark.fault(54)
def test_kill_9_at_five_points(data, tmp_path):
    for point in [*POINTS, ""]:
        command = [sys.executable, "-c", KILLED_BUILD, point, data.data_path, data.source]
        done = subprocess.run(command, cwd=REPOSITORY, timeout=100, check=False)
        assert done.returncode == (-signal.SIGKILL if point else 0)
        assert Path(data.data_path).exists() == (not point)
    assert leftovers(tmp_path) == []
    assert open_prepared(data)[0].num_documents == 22


@pytest.mark.slow
@pytest.mark.fault(55)
def test_two_processes_at_once(data):
    command = [sys.executable, "-c", KILLED_BUILD, "", data.data_path, data.source]
    both = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    assert open_prepared(data)[0].num_documents == 22


@pytest.mark.slow
def test_preload_script(data, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {n_layer: 2, n_embd: 64}\n"
        f"data: {{data_path: {data.data_path}, source: {data.source}, tokenizer: byte, skip_datapath_setup: true}}\n"
    )

    def run(*words):
        command = [sys.executable, "preload_datapath.py", *map(str, words)]
        return subprocess.run(command, cwd=REPOSITORY, timeout=100, check=False, capture_output=True, text=True)

    built = run(config, "--data.test_split=5")
    assert built.returncode == 0, built.stderr
    assert "training    19 documents" in built.stdout
    again = run("-c", config, "--data.test_split=5")
    assert "up to date" in again.stdout
    forced = run("-c", config, "--data.test_split=5", "--force")
    assert "asked for" in forced.stdout
    bad = run(config, f"--data.source={FIXTURES / 'bad' / 'bad_middle_line.jsonl'}")
    assert bad.returncode == 2
    assert bad.stderr.splitlines()[-1].startswith("error: ")
    assert "bad_middle_line.jsonl: line 3" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert run(config, "--data.data_path=/proc/nope").returncode == 4
    nothing = run()
    assert nothing.returncode == 2
    assert "config" in nothing.stderr
