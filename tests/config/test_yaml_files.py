"""Strict YAML: what is refused, with its place; what is read, with its type."""

import pytest
import yaml

from trainer.config import DataConfig, RunConfig
from trainer.config.yaml_files import parse_scalar, read_yaml, saved_config
from trainer.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:\n  ctx_len: 64\n  ctx_len: 128\n", ["run.yaml:3", "model.ctx_len", "duplicate", "line 2"]),
        ("model:\n  a: 1\ndata:\n  a: 1\nmodel:\n  b: 1\n", ["run.yaml:5", "model", "duplicate"]),
        ("model:\n\tctx_len: 64\n", ["run.yaml", "line 2", "column 1", "tab"]),
        ("model:\n  ctx_len: 64\n \t lr: 1\n", ["line 3", "tab"]),
        ("model:\n  lr_init: .nan\n", ["run.yaml:2", "model.lr_init", ".nan", "finite"]),
        ("model:\n  lr_init: -.inf\n", ["run.yaml:2", "-.inf", "finite"]),
        ("model:\n  ctx_len: 010\n", ["run.yaml:2", "010", "starts with 0"]),
        ("trainer: !!python/object/apply:os.mkdir [PWNED_CANARY]\n", ["run.yaml:1", "!!python/object/apply:os.mkdir"]),
        ("data:\n  source: !!binary aGk=\n", ["run.yaml:2", "data.source", "!!binary"]),
        ("data:\n  source: !local x\n", ["run.yaml:2", "!local"]),
        ("model: {ctx_len: 64\n", ["run.yaml: line 2", "not valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["not valid YAML", "document"]),
        (b"model: {name: \xff}\n", ["utf-8", "0xff", "offset 14"]),
        (b"\x00\x01\x02:[", ["utf-8", "0x00"]),
        (b"\x1f\x8b\x08\x00 zipped", ["utf-8"]),
        ("- 1\n- 2\n", ["run.yaml", "a list", "mapping"]),
        ("17\n", ["run.yaml", "one plain value"]),
        ("", ["run.yaml", "no settings"]),
        ("# nothing\n", ["run.yaml", "no settings"]),
        ("data: &x\n  y: *x\n", ["run.yaml", "alias", "itself"]),
        ("data: {1: x}\n", ["run.yaml:1", "key 1", "quotes"]),
        ("data: {? [a] : x}\n", ["run.yaml:1", "not a name"]),
        ("[" * 5000 + "]" * 5000, ["run.yaml", "deeply"]),
    ],
)
def test_refuses_with_file_and_line(tmp_path, text, parts):
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_python_tag_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "trainer: !!python/object/apply:os.mkdir [PWNED_CANARY]\n")
    with pytest.raises(ConfigError):
        read_yaml(path)
    assert not (tmp_path / "PWNED_CANARY").exists()


def test_expanding_aliases_is_bounded(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join(['*a' + str(i - 1)] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="aliases"):
        read_yaml(write(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_missing_file_or_folder_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_yaml(str(tmp_path / name))


def test_error_text_never_quotes_a_line_of_the_file(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_yaml(write(tmp_path, 'data:\n  secret_key: "CANARY\n'))
    assert "CANARY" not in str(caught.value)


def test_values_keep_their_meaning_and_place(tmp_path):
    source = read_yaml(
        write(
            tmp_path,
            "\ufeffmodel:\n  lr_init: 1e-3\n  beta1: .9\n  ctx_len: 1_024\n  compile: on\n  grad_cp: true\n"
            "  dim_ffn: null\n  n_layer:\ndata:\n  source: 2024-01-01\n  x: 1:30\n  y: 'a\\n'\n  z: \"a\\n\"\n  h: 0x10\n",
        )
    )
    assert source.values["model"] == {
        "lr_init": 1e-3,
        "beta1": 0.9,
        "ctx_len": 1024,
        "compile": "on",
        "grad_cp": True,
        "dim_ffn": None,
        "n_layer": None,
    }
    assert source.values["data"] == {"source": "2024-01-01", "x": "1:30", "y": "a\\n", "z": "a\n", "h": 16}
    assert source.where("model.ctx_len").endswith("run.yaml:4: model.ctx_len")
    assert source.where("data.nothing").endswith("run.yaml:9: data.nothing")


def test_merge_keys_and_anchors_work(tmp_path):
    source = read_yaml(write(tmp_path, "model: &m {ctx_len: 64, lr_init: 1}\ndata:\n  <<: *m\n  lr_init: 2\n"))
    assert source.values["data"] == {"ctx_len": 64, "lr_init": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("64", 64), ("-1", -1), ("6e-4", 6e-4), ("true", True), ("null", None), ("full", "full"), ("a: b: c", "a: b: c"),
     ("{w: 8}", {"w": 8}), ("[1, 2]", [1, 2]), ("", None)],
)  # fmt: skip
def test_options_are_read_by_the_same_rules(text, value):
    assert parse_scalar(text, "--x") == value


def test_option_that_is_not_finite_is_refused_by_its_name():
    with pytest.raises(ConfigError, match=r"--model.lr_init: \.nan is not a finite number"):
        parse_scalar(".nan", "--model.lr_init")


def test_saved_config_holds_everything_but_secrets():
    params = {"data_files": "x", "storage_options": {"secret": "CANARY", "url": "s3://me:CANARY@host/x"}}
    saved = saved_config(RunConfig(data=DataConfig(source="json", source_dataset_params=params), max_steps=7))
    assert "CANARY" not in str(saved)
    assert saved["trainer"]["max_steps"] == 7
    assert saved["trainer"]["microbatch_size"] == 1
    assert saved["seed_everything"] == 3941088705
    assert saved["data"]["source_dataset_params"]["data_files"] == "x"
    assert yaml.safe_load(yaml.safe_dump(saved)) == saved
