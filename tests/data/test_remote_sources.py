"""Source files on S3, against a real S3 server on loopback."""

import dataclasses
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from trainer.config.schema import DataConfig
from trainer.data.prepare import open_prepared, prepare
from trainer.data.tokenizers import ByteTokenizer
from trainer.errors import ConfigError, DataError, StorageError
from trainer.logs import mask_secrets

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SECRET = "CANARYSECRET0123456789"


@pytest.fixture(scope="module")
def options():
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "someone", "secret": SECRET, "endpoint_url": f"http://{host}:{port}"}
    server.stop()


@pytest.fixture
def bucket(options, tmp_path):
    import s3fs

    name = f"bucket-{abs(hash(tmp_path)) % 10**9}"
    files = s3fs.S3FileSystem(**options)
    files.mkdir(name)
    lines = [json.dumps({"text": f"text {i}"}) + "\n" for i in range(6)]
    files.pipe(f"{name}/lines/a.jsonl", "".join(lines[:2]).encode())
    files.pipe(f"{name}/lines/b.jsonl.gz", gzip.compress("".join(lines[2:]).encode()))
    files.pipe(f"{name}/table/a.csv", b"text\ntext 0\ntext 1\n")
    files.pipe(f"{name}/plain/a.txt", b"text 0")
    files.pipe(f"{name}/plain/b.txt", b"text 1")
    table = pa.table({"text": ["text 0", "text 1"]})
    pq.write_table(table, tmp_path / "x.parquet")
    files.put(str(tmp_path / "x.parquet"), f"{name}/columns/x.parquet")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    files.put(str(tmp_path / "x.arrow"), f"{name}/arrow/x.arrow")
    return files, name


def settings(options, tmp_path, **changes):
    params = {"storage_options": options, **changes.pop("params", {})}
    return DataConfig(
        data_path=str(tmp_path / "data"), tokenizer="byte", test_split=0, source_dataset_params=params, **changes
    )


def texts(data):
    prepare(data)
    store = open_prepared(data)[0]
    return [ByteTokenizer().decode(store.read(i, 0, int(size))) for i, size in enumerate(store.sizes)]


@pytest.mark.parametrize(
    ("changes", "num"),
    [
        ({"source": "s3://BUCKET/lines/a.jsonl"}, 2),
        ({"source": "s3://BUCKET/lines/*.jsonl*", "num_proc": 2}, 6),
        ({"source": "s3://BUCKET/lines"}, 6),
        ({"source": "json", "source_data_dir": "s3://BUCKET/lines"}, 6),
        ({"source": "json", "source_data_dir": "s3://BUCKET/lines", "params": {"data_files": "a*"}}, 2),
        (
            {"source": "json", "params": {"data_files": ["s3://BUCKET/lines/b.jsonl.gz", "s3://BUCKET/lines/a.jsonl"]}},
            6,
        ),
        ({"source": "s3://BUCKET/table/a.csv"}, 2),
        ({"source": "s3://BUCKET/plain", "num_proc": 2}, 2),
        ({"source": "s3://BUCKET/columns/x.parquet"}, 2),
        ({"source": "s3://BUCKET/arrow/x.arrow"}, 2),
    ],
)
def test_files_are_read_where_they_are(changes, num, options, bucket, tmp_path, caplog):
    changes = json.loads(json.dumps(changes).replace("BUCKET", bucket[1]))
    data = settings(options, tmp_path, **changes)
    with caplog.at_level("DEBUG", "trainer"):
        assert sorted(texts(data)) == [f"text {i}" for i in range(num)]
        assert prepare(data).reason is None
    stored = "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert SECRET not in stored + caplog.text + json.dumps(mask_secrets(dataclasses.asdict(data)))


def test_changed_file_leads_to_a_rebuild(options, bucket, tmp_path):
    files, name = bucket
    data = settings(options, tmp_path, source=f"s3://{name}/lines/a.jsonl")
    assert texts(data) == ["text 0", "text 1"]
    files.pipe(f"{name}/lines/a.jsonl", b'{"text": "text 8"}\n{"text": "text 9"}\n')
    assert "a.jsonl changed" in prepare(data).reason
    assert texts(data) == ["text 8", "text 9"]


def test_options_of_data_path_serve_the_source_too(options, bucket, tmp_path):
    data = settings(options, tmp_path, source=f"s3://{bucket[1]}/plain")
    data = dataclasses.replace(data, source_dataset_params=None, data_path_storage_options=options)
    assert texts(data) == ["text 0", "text 1"]


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("s3://BUCKET/lines/c.jsonl", DataError, "c.jsonl: no such file"),
        ("s3://BUCKET/lines/c*.jsonl", DataError, "c\\*.jsonl: no such file or folder, and no file matches it"),
        ("s3://no-such-bucket-here/a.jsonl", DataError, "s3://no-such-bucket-here/a.jsonl: "),
        ("s3://BUCKET/none", DataError, "no such file"),
        ("s3://BUCKET", ConfigError, "does not hold files of one known kind; found '2 text files, 2 json files, 1 csv"),
        ("s3://BUCKET/pair.bin", ConfigError, "copy it"),
        ("nosuchprotocol://x/y.jsonl", StorageError, "pip install nosuchprotocolfs"),
    ],
)
def test_what_is_not_there_is_named_without_secrets(source, error, words, options, bucket, tmp_path):
    data = settings(options, tmp_path, source=source.replace("BUCKET", bucket[1]))
    with pytest.raises(error, match=words) as caught:
        prepare(data)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_is_named_with_its_line(options, bucket, tmp_path):
    files, name = bucket
    files.pipe(f"{name}/bad.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n')
    with pytest.raises(DataError, match=rf"s3://{name}/bad.jsonl: line 2 is not valid JSON"):
        prepare(settings(options, tmp_path, source=f"s3://{name}/bad.jsonl"))


def test_refusal_while_reading_has_no_traceback(options, bucket, tmp_path, monkeypatch):
    import s3fs

    def refuse(*_):
        raise RuntimeError(f"token {SECRET} expired")

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read.*token \*\*\* expired"):
        prepare(settings(options, tmp_path, source=f"s3://{bucket[1]}/lines/a.jsonl"))


def test_signed_links_lose_their_signature():
    link = "https://host/a.jsonl?X-Amz-Date=1&X-Amz-Signature=abc123&v=2"
    assert mask_secrets({"source": link}) == {"source": "https://host/a.jsonl?X-Amz-Date=1&X-Amz-Signature=***&v=2"}
