"""What preload_datapath.py shows, draws and converts; the page made of it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from trainer.config.schema import DataConfig
from trainer.data.binidx import write_binidx
from trainer.data.prepare import open_prepared, prepare
from trainer.data.recipes import ORDER, data_page
from trainer.data.show import length_table, plain_sample, sample_text, save_histogram
from trainer.data.store import FlatStore
from trainer.data.tokenizers import get_tokenizer
from trainer.errors import StorageError

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "tests" / "fixtures" / "data" / "vectors" / "sample"


@pytest.fixture
def chat(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    (tmp_path / "x.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 3)
    return DataConfig(source=str(tmp_path / "x.jsonl"), data_path=str(tmp_path / "p"), tokenizer="byte", test_split=1)


def test_trained_tokens_are_coloured(chat):
    prepare(chat)
    store, tokenizer = open_prepared(chat)[0], get_tokenizer("byte")
    text = sample_text(store, tokenizer, 1)
    assert text.plain == "▶ document 1: 24 tokens, 4 trained\nUser: Hi\n\nAssistant: Yo⏹"
    assert [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)] == [" Yo⏹"]
    assert plain_sample(store, tokenizer, 1).endswith("Assistant:« Yo⏹»")
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as captured:
        console.print(text)
    assert "\x1b[30;42m Yo⏹" in captured.get()
    cut = sample_text(store, tokenizer, 0, most_tokens=6)
    assert cut.plain == "▶ document 0: 24 tokens, 0 trained of the first 6\nUser:  ..."


def test_lengths_in_words_and_as_a_picture(tmp_path):
    sizes = np.array([1, 2, 3, 1000, 70_000])
    assert length_table(sizes) == "1 to 70,000 tokens (1% 1, 10% 1, 50% 3, 90% 70,000, 99% 70,000)"
    save_histogram(sizes, tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    save_histogram(np.array([5]), tmp_path / "h.png")
    with pytest.raises(StorageError, match=r"no/h\.png cannot be written|no/h\.png: cannot be written"):
        save_histogram(sizes, tmp_path / "no" / "h.png")


def test_binidx_round_trip_is_byte_equal(tmp_path):
    data = DataConfig(data_path=str(tmp_path / "p"), test_split=0, min_token_size=1)
    summary = prepare(data, from_binidx=SAMPLE)
    assert summary.record_formats == ("tokenized (columns input_ids)",)
    store = open_prepared(data)[0]
    write_binidx(store, tmp_path / "copy")
    for suffix in (".bin", ".idx"):
        official = SAMPLE.with_name(f"sample{suffix}").read_bytes()
        assert (tmp_path / f"copy{suffix}").read_bytes() == official
    assert prepare(data, from_binidx=SAMPLE).reason is None


def test_texts_become_the_official_bytes(tmp_path):
    golden = json.loads(SAMPLE.with_name("sample.json").read_text("utf-8"))
    tokenizer = get_tokenizer("world", world_add_endoftext_token=False)
    texts = [tokenizer.decode(ids[:-1]) for ids in golden["docs"]]
    keeps = [tokenizer.encode(text) == ids[:-1] for text, ids in zip(texts, golden["docs"], strict=True)]
    if not all(keeps):
        texts = [text for text, keep in zip(texts, keeps, strict=True) if keep]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    data = DataConfig(source=str(tmp_path / "x.jsonl"), data_path=str(tmp_path / "p"), test_split=0, min_token_size=1)
    prepare(data)
    write_binidx(open_prepared(data)[0], tmp_path / "out")
    expected = [ids for ids, keep in zip(golden["docs"], keeps, strict=True) if keep]
    flat = np.array([token for ids in expected for token in ids], np.uint16)
    write_binidx(FlatStore("x", [flat], np.array([len(ids) for ids in expected])), tmp_path / "wanted")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"wanted{suffix}").read_bytes()


@pytest.mark.slow
def test_options_of_the_script(tmp_path):
    def run(*words):
        command = [sys.executable, "preload_datapath.py", *map(str, words)]
        return subprocess.run(command, cwd=REPOSITORY, timeout=100, check=False, capture_output=True, text=True)

    config = REPOSITORY / "configs" / "data" / "messages.yaml"
    into = f"--data.data_path={tmp_path / 'p'}"
    done = run(config, into, "--show", "2", f"--histogram={tmp_path / 'h.png'}", "--to-binidx", tmp_path / "out" / "b")
    assert done.returncode == 0, done.stderr
    for words in ("format      messages", "178 trained", "▶ document 1", "Assistant:« Paris.", "note: this format"):
        assert words in done.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["b.bin", "b.idx", "b_validation.bin", "b_validation.idx"]
    assert (tmp_path / "h.png").is_file()
    assert "already up to date" in run(config, into).stdout
    for words in (("--show",), ("--show", "x"), ("--histogram",)):
        bad = run(config, into, *words)
        assert bad.returncode == 2
        assert bad.stderr.splitlines()[-1].startswith(f"error: {words[0]}")
    data = tmp_path / "from.yaml"
    data.write_text(f"data: {{data_path: {tmp_path / 'q'}}}\n")
    done = run(data, "--from-binidx", tmp_path / "out" / "b", "--show=1")
    assert done.returncode == 0, done.stderr
    assert "tokenized" in done.stdout


KILLED = """
import sys
from trainer.config.schema import DataConfig
from trainer.data.prepare import prepare
if __name__ == "__main__":
    prepare(DataConfig(data_path=sys.argv[1], source=sys.argv[2], tokenizer="byte", num_proc=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.2, 0.6, 1.0, 1.5, 2.5])
def test_killed_with_its_workers_then_rebuilt_byte_for_byte(delay, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 200}) + "\n" for i in range(20_000)))
    (tmp_path / "build.py").write_text(KILLED)
    data = DataConfig(data_path=str(tmp_path / "whole"), source=str(tmp_path / "x.jsonl"), tokenizer="byte")
    prepare(data)
    command = [sys.executable, str(tmp_path / "build.py"), str(tmp_path / "p"), data.source]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = dataclasses.replace(data, data_path=str(tmp_path / "p"))
    prepare(again)
    parts = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.arrow")}
        for folder in (tmp_path / "whole", tmp_path / "p")
    ]
    assert parts[0] == parts[1]
    assert not list(tmp_path.glob(".p.build-*"))
    # Workers of a killed build end by themselves.
    deadline = time.monotonic() + 15
    while processes_of_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of_group(process.pid) == []


def processes_of_group(group):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # state, parent, group; a zombie has ended.
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(path.parent.name)
    return found


def test_page_is_up_to_date():
    assert (REPOSITORY / "docs" / "data.md").read_text("utf-8") == data_page()


def test_page_has_every_config():
    assert set(ORDER) == {path.stem for path in (REPOSITORY / "configs" / "data").glob("*.yaml")}
