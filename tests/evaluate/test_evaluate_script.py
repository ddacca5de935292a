"""`evaluate.py` as users call it."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

import evaluate
from tests.evaluate.small_models import BYTE_SHAPE, lively_weights
from trainer.checkpoint.export import save_weights
from trainer.cli import run_script
from trainer.config.schema import DataConfig
from trainer.data.binidx import write_binidx
from trainer.data.prepare import prepare
from trainer.data.store import open_store
from trainer.generate.engine import load_generator
from trainer.generate.state_file import save_state

TEXT = "A line of text that is long enough to have positions.\n" * 12


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.pth"
    save_weights(lively_weights(BYTE_SHAPE), path, "fp32")
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the script in this process; gives exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        code = run_script(evaluate.main)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def numbers(output):
    """(name, loss, tokens) of each line."""
    return re.findall(r"^ *(.+?): loss=([\d.]+) perplexity=[\d.]+ tokens=([\d,]+)$", output, re.M)


def test_loss_of_a_text(call, model_file, text_file, tmp_path):
    outs = [tmp_path / f"loss.{suffix}" for suffix in ("json", "csv", "png")]
    code, output, log = call("loss", model_file, text_file, *(word for out in outs for word in ("--out", out)))
    assert code == 0
    found = numbers(output)
    assert [name for name, _, _ in found] == [
        "all", "1 to 15 before", "16 to 31 before", "32 to 63 before", "64 to 127 before", "128 to 255 before",
        "256 to 511 before", "512 to 1,023 before",
    ]  # fmt: skip
    # Every byte but the first is predicted, and the end-of-document token.
    assert found[0][2] == str(len(TEXT))
    assert "read 648 tokens" in log
    rows = json.loads(outs[0].read_text())
    assert [f"{row['loss']:.4f}" for row in rows] == [loss for _, loss, _ in found]
    assert [row["loss"] for row in csv.DictReader(outs[1].read_text().splitlines())] == [
        str(row["loss"]) for row in rows
    ]
    assert outs[2].read_bytes().startswith(b"\x89PNG")


def test_the_same_text_in_every_form(call, model_file, text_file, tmp_path):
    whole = numbers(call("loss", model_file, text_file)[1])
    data = DataConfig(source=str(text_file), data_path=str(tmp_path / "data"), tokenizer="byte", test_split=0)
    prepare(data)
    write_binidx(open_store(tmp_path / "data"), tmp_path / "pair")
    for words in ((tmp_path / "data", "--split", "train"), (tmp_path / "pair",), (tmp_path / "pair.bin",)):
        assert numbers(call("loss", model_file, *words, "--ctx-len", 64)[1]) == whole
    two = numbers(call("loss", model_file, text_file, text_file)[1])
    assert (two[0][1], two[0][2]) == (whole[0][1], "1,296")


def test_contexts_are_compared(call, model_file, text_file, tmp_path):
    outs = [tmp_path / "loss.json", tmp_path / "loss.png"]
    code, output, _ = call("loss", model_file, text_file, "--context", 32, 64, "--out", outs[0], "--out", outs[1])
    assert code == 0
    whole, *limited = re.split(r"with at most (\d+) tokens of context:\n", output)
    assert limited[::2] == ["32", "64"]
    assert len(numbers(whole)) == len(numbers(limited[1])) == len(numbers(limited[3])) == 8
    rows = json.loads(outs[0].read_text())
    assert [row["context"] for row in rows[::8]] == [None, 32, 64]
    assert rows[1]["loss"] == pytest.approx(rows[9]["loss"])
    assert rows[7]["loss"] != rows[15]["loss"]


def test_a_saved_state_goes_before_each_document(call, model_file, text_file, tmp_path):
    generator = load_generator(model_file, device="cpu")
    generator.read("Something else. ")
    save_state(tmp_path / "state.safetensors", generator.snapshot)
    plain = numbers(call("loss", model_file, text_file)[1])
    found = numbers(call("loss", model_file, text_file, "--state-in", tmp_path / "state.safetensors")[1])
    assert found[1][1] != plain[1][1]
    assert [name for name, *_ in found] == [name for name, *_ in plain]


def test_bf16_is_near(call, model_file, text_file):
    (_, exact, _), *_ = numbers(call("loss", model_file, text_file)[1])
    (_, rounded, _), *_ = numbers(call("loss", model_file, text_file, "--dtype", "bf16", "--device", "cpu")[1])
    assert rounded != exact
    assert float(rounded) == pytest.approx(float(exact), rel=0.05)


def test_recall_prints_a_table(call, model_file, tmp_path):
    out = tmp_path / "recall.png"
    code, output, _ = call(
        "recall", model_file, "--lengths", 200, 400, "--depths", 0, 1, "--samples", 1, "--out", out, "--out",
        tmp_path / "recall.json",
    )  # fmt: skip
    assert code == 0
    assert output.splitlines()[0].split() == ["depth", "200", "400"]
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["0.00", "1.00"]
    assert out.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "recall.json").read_text())) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss", "MODEL", "missing.txt"], "missing.txt: cannot be read: No such file or directory"),
        (["loss", "missing.pth", "TEXT"], "missing.pth: no such file"),
        (["loss", "MODEL", "TEXT", "--ctx-len", "100"], "--ctx-len: out of range; found 100; must be a multiple of 16"),
        (["loss", "MODEL", "TEXT", "--out", "x.jpg"], "--out: the suffix says no format"),
        (["loss", "MODEL", "TEXT", "--out", "no/x.png"], "--out: its folder does not exist"),
        (["loss", "MODEL", "FOLDER", "TEXT"], "DATA: several of them can be given only as text files"),
        (["loss", "MODEL", "FOLDER"], "has no validation documents"),
        (["loss", "MODEL", "LATIN"], "is not UTF-8 at byte 1"),
        (["loss", "MODEL", "chat.jsonl"], "chat.jsonl: holds records, not one text; fix: build a data set"),
        (["loss", "MODEL", "TEXT", "--device", "cuda:99"], "--device: cuda:99 is not there"),
        (["loss", "MODEL", "TEXT", "--tokenizer", "world"], "is not in the vocabulary"),
        (["loss", "MODEL", "TEXT", "--context", "0"], "--context: out of range"),
        (["loss", "MODEL", "TEXT", "--context", "9", "--state-in", "x.pth"], "--context: forgets the state"),
        (["loss", "MODEL", "TEXT", "--state-in", "x.pth"], "x.pth"),
        (["recall", "MODEL", "--lengths", "20"], "--lengths: too short"),
        (["tasks", "MODEL", "--tasks", "x", "--out", "x.png"], "--out: the suffix says no format"),
    ],
)
def test_errors_are_one_line(call, model_file, text_file, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"a\xe9 is Latin")
    prepare(DataConfig(source=str(text_file), data_path=str(tmp_path / "data"), tokenizer="byte", test_split=0))
    places = {"MODEL": model_file, "TEXT": text_file, "FOLDER": tmp_path / "data", "LATIN": tmp_path / "latin.txt"}
    code, output, errors = call(*(places.get(word, word) for word in words))
    assert (code, output) == (2, "")
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not list(Path(tmp_path).glob("x.*"))
