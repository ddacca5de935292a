"""A data_path on S3, against a real S3 server on loopback."""

import dataclasses
import json
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from trainer.config.schema import DataConfig
from trainer.data.prepare import open_prepared, prepare
from trainer.errors import StorageError
from trainer.logs import mask_secrets

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SECRET = "CANARYSECRET0123456789"


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def data(endpoint, tmp_path, monkeypatch):
    import s3fs

    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    options = {"key": "someone", "secret": SECRET, "endpoint_url": endpoint}
    bucket = f"bucket-{abs(hash(tmp_path)) % 10**9}"
    s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir(bucket)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(20)))
    return DataConfig(
        source=str(tmp_path / "x.jsonl"),
        data_path=f"s3://{bucket}/sets/one",
        data_path_storage_options=options,
        tokenizer="byte",
    )


def remote_files(data):
    import s3fs

    files = s3fs.S3FileSystem(**data.data_path_storage_options, skip_instance_cache=True)
    return {path: files.cat_file(path) for path in files.find(data.data_path)}


def test_prepared_once_and_read_on_another_machine(data, tmp_path, monkeypatch, caplog):
    with caplog.at_level("INFO"):
        assert prepare(data).reason == "it does not exist yet"
    digest = open_prepared(data)[0].digest
    stored = remote_files(data)
    assert {Path(name).name for name in stored} >= {"manifest.json", "data-00000-of-00001.arrow", "state.json"}
    assert prepare(data).reason is None
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "other")
    fresh = dataclasses.replace(data, source=None)
    assert prepare(fresh).reason is None
    assert open_prepared(fresh)[0].digest == digest
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "third")
    assert prepare(data).reason is None
    assert remote_files(data) == stored
    shown = caplog.text + json.dumps(mask_secrets(dataclasses.asdict(data))) + repr(prepare(data))
    assert SECRET not in shown + str(stored)


def test_changed_settings_replace_the_remote_data_set(data, tmp_path, monkeypatch):
    prepare(data)
    changed = dataclasses.replace(data, test_split=3)
    assert prepare(changed).reason == "test_split changed from 0.01 to 3"
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "other")
    assert open_prepared(changed)[1].num_documents == 3


def test_damaged_copy_is_noticed(data, tmp_path):
    prepare(data)
    (file,) = (tmp_path / "home").rglob("train/*.arrow")
    file.write_bytes(file.read_bytes()[:-9])
    assert "changed since it was prepared" in prepare(data).reason
    assert open_prepared(data)[0].num_documents == 19


def test_storage_that_refuses_is_named_without_secrets(data):
    for changes in ({"data_path": "s3://no-such-bucket-here/x"}, {"data_path": "nosuchprotocol://x/y"}):
        with pytest.raises(StorageError, match=f"data.data_path: {changes['data_path']}") as caught:
            prepare(dataclasses.replace(data, **changes))
        assert SECRET not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 4
