"""The programmes generate.py and dragon_test.py, as they are called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dragon_test
import generate
from trainer.checkpoint.export import save_weights
from trainer.cli import run_script
from trainer.data.tokenizers import ByteTokenizer
from trainer.errors import ConfigError
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape

ROOT = Path(generate.__file__).parent
SHAPE = ModelShape.official(2, 32, 272, head_size=16)
SPEED = r"read \d+ tokens at [\d.]+ tokens/s, wrote \d+ tokens at [\d.]+ tokens/s\n"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    """A model that writes ASCII: the head's rows of other bytes are far from what comes out."""
    generator = torch.Generator().manual_seed(0)
    fresh = init_weights(SHAPE, 0, emb_scale=1.0)
    weights = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in fresh.items()}
    weights["ln_out.bias"] = torch.ones_like(weights["ln_out.bias"])
    readable = torch.zeros(SHAPE.vocab_size, dtype=torch.bool)
    readable[[ord(letter) + 1 for letter in "abcdefghijklmnopqrstuvwxyz ."]] = True
    weights["head.weight"][~readable] -= 1.0
    path = tmp_path_factory.mktemp("model") / "model.pth"
    save_weights(weights, path)
    return path


@pytest.fixture
def broken_model_file(tmp_path) -> Path:
    """Weights are finite, logits are not."""
    weights = init_weights(SHAPE, 0)
    weights["head.weight"] = torch.full_like(weights["head.weight"], 3e38)
    weights["ln_out.bias"] = torch.ones_like(weights["ln_out.bias"])
    save_weights(weights, tmp_path / "broken.pth", "fp32")
    return tmp_path / "broken.pth"


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a script's main in this process; gives exit code, stdout and stderr."""

    def call(script, *words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words)])
        code = run_script(script.main)
        return code, *capsys.readouterr()

    return call


def test_generate_writes_text_to_stdout_and_speed_to_stderr(call, model_file):
    code, text, speed = call(generate, model_file, "--prompt", "hello", "--tokens", 20, "--seed", 1, "--device", "cpu")
    assert code == 0
    assert re.fullmatch(r"[a-z .]{20}\n", text)
    assert re.fullmatch(SPEED, speed)
    assert call(generate, model_file, "--prompt", "hello", "--tokens", 20, "--seed", 1)[1] == text
    assert call(generate, model_file, "--prompt", "hello", "--tokens", 20, "--seed", 2)[1] != text


def test_sampling_options_act(call, model_file):
    def text(*options):
        return call(generate, model_file, "--prompt", "hello", "--tokens", 30, "--seed", 1, *options)[1]

    greedy = text("--temperature", 0)
    assert greedy == text("--top-k", 1) == text("--top-p", 0)
    plain = text()
    for option in (("--temperature", 2, "--top-p", 1), ("--top-p", 0.2), ("--top-k", 2)):
        assert text(*option) != plain
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert text("--temperature", 0, penalty, 9) != greedy


def test_prompt_file_equals_prompt(call, model_file, tmp_path):
    prompt = "a long prompt, " * 300
    (tmp_path / "p.txt").write_text(prompt)
    options = ("--tokens", 10, "--temperature", 0)
    _, text, speed = call(generate, model_file, "--prompt-file", tmp_path / "p.txt", *options)
    assert text == call(generate, model_file, "--prompt", prompt, *options)[1]
    assert speed.startswith("read 4500 tokens")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_state_out_and_in_continue_exactly(call, model_file, tmp_path, suffix, dtype):
    state, options = tmp_path / f"s.{suffix}", ("--temperature", 0, "--device", "cpu", "--dtype", dtype)
    _, whole, _ = call(
        generate, model_file, "--prompt", "hello", "--tokens", 24, *options, "--state-out", tmp_path / "w.pth"
    )
    _, first, _ = call(generate, model_file, "--prompt", "hello", "--tokens", 10, *options, "--state-out", state)
    _, second, _ = call(generate, model_file, "--state-in", state, "--tokens", 14, *options, "--state-out", state)
    assert first[:-1] + second == whole
    _, whole, _ = call(
        generate, model_file, "--state-in", tmp_path / "w.pth", "--prompt", " more", "--tokens", 9, *options
    )
    _, parts, _ = call(generate, model_file, "--state-in", state, "--prompt", " more", "--tokens", 9, *options)
    assert parts == whole


def test_chat(call, model_file, tmp_path):
    def written(*words):
        return call(generate, model_file, *words, "--tokens", 12, "--temperature", 0)[1]

    state = tmp_path / "s.pth"
    answer = written("--chat", "--prompt", " Hi\n\n\nyou ", "--state-out", state)
    assert answer == written("--prompt", "User: Hi\nyou\n\nAssistant:")
    assert written("--chat", "--prompt", "And?", "--state-in", state) == written(
        "--prompt", "\n\nUser: And?\n\nAssistant:", "--state-in", state
    )


def test_stop_texts_end_the_output(call, model_file):
    _, text, _ = call(generate, model_file, "--prompt", "hello", "--tokens", 20, "--temperature", 0)
    stop = text[7:9]
    _, short, _ = call(generate, model_file, "--prompt", "hello", "--temperature", 0, "--stop", "!", "--stop", stop)
    assert short == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--chat"], "error: --chat: needs the user's turn; fix: give --prompt or --prompt-file\n"),
        (["--top-p", "1.5"], "error: --top-p: out of range; found 1.5; must be between 0 and 1\n"),
        (["--tokens", "-1"], "error: --tokens: out of range; found -1; must be at least 0\n"),
        (
            ["--tokenizer", "nowhere"],
            "error: data.tokenizer: is no built-in tokenizer and no local path; found 'nowhere'; ",
        ),
        (["--dtype", "fp16"], "error: --dtype: not understood; found 'fp16'; must be auto, fp32 or bf16\n"),
        (["--prompt-file", "missing.txt"], "error: missing.txt: cannot be read: No such file or directory\n"),
        (["--state-in", "missing.pth"], "error: missing.pth: no such file\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(call, model_file, words, line):
    code, text, errors = call(generate, model_file, *words)
    assert (code, text) == (2, "")
    assert errors.startswith(line)
    assert errors.count("\n") == 1


def test_state_of_another_model_is_one_line(call, model_file, tmp_path):
    torch.save({f"blocks.{i}.att.time_state": torch.zeros(2, 32, 32) for i in range(2)}, tmp_path / "s.pth")
    code, _, errors = call(generate, model_file, "--state-in", tmp_path / "s.pth")
    assert code == 2
    wanted = r"error: .*s.pth: blocks.0.att.time_state has shape \[2, 32, 32\] instead of \[2, 16, 16\]; fix: .*\n"
    assert re.fullmatch(wanted, errors)


@pytest.mark.parametrize("script", [generate, dragon_test], ids=lambda script: script.__name__)
def test_output_that_is_not_finite_is_exit_code_1(call, broken_model_file, script):
    code, text, errors = call(script, broken_model_file, "--prompt", "hello")
    assert (code, text) == (1, "")
    assert errors.startswith("error: logits: the model's output is NaN or infinite; fix: try --dtype fp32")


def test_dragon_prints_prompt_text_and_speed(call, model_file):
    code, text, errors = call(dragon_test, model_file, "cpu fp32", 25, "--seed", 1)
    assert (code, errors) == (0, "")
    assert re.fullmatch(re.escape(dragon_test.PROMPT) + r"[a-z .]{25}\n" + SPEED, text)


def test_dragon_prompt_and_options(call, model_file, tmp_path):
    state = tmp_path / "s.pth"
    _, text, _ = call(dragon_test, model_file, "cpu", 10, "--prompt", "hello", "--temperature", 0, "--state-out", state)
    assert re.match(r"hello[a-z .]{10}\n", text)
    _, rest, _ = call(dragon_test, model_file, "cpu", 10, "--temperature", 0, "--state-in", state)
    _, whole, _ = call(dragon_test, model_file, "cpu", 20, "--prompt", "hello", "--temperature", 0)
    assert text.split("\n")[0] + rest.split("\n")[0] == whole.split("\n")[0]


def test_dragon_reference_has_no_chance(call, model_file):
    texts = {call(dragon_test, model_file, "ref", 15)[1].split("\n")[0] for _ in range(2)}
    assert len(texts) == 1
    assert texts == {call(dragon_test, model_file, "cpu fp32", 15, "--temperature", 0)[1].split("\n")[0]}


@pytest.mark.parametrize(("strategy", "is_low"), [("cpu fp32", False), ("cpu bf16", True), ("ref", False)])
def test_dragon_honours_the_dtype(call, model_file, tmp_path, strategy, is_low):
    call(dragon_test, model_file, strategy, 3, "--state-out", tmp_path / "s.pth")
    shift = torch.load(tmp_path / "s.pth")["blocks.0.att.shift_state"]
    assert torch.equal(shift, shift.bfloat16().float()) == is_low


def test_dragon_strategies():
    assert dragon_test.parse_strategy("cuda bf16") == ("cuda", "bf16", False)
    assert dragon_test.parse_strategy("cpu") == ("cpu", "auto", False)
    assert dragon_test.parse_strategy("ref") == ("cpu", "fp32", True)
    with pytest.raises(
        ConfigError, match="found 'cuda fp16 i8'; must be a device and a dtype, such as \"cuda bf16\", or ref"
    ):
        dragon_test.parse_strategy("cuda fp16 i8")


def test_dragon_prompt_has_no_trailing_space():
    assert dragon_test.PROMPT.strip() == dragon_test.PROMPT
    assert ByteTokenizer().decode(ByteTokenizer().encode(dragon_test.PROMPT)) == dragon_test.PROMPT


@pytest.mark.slow
def test_as_processes(model_file, broken_model_file, tmp_path):
    def run(*words, **options):
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False, **options)

    done = run("dragon_test.py", model_file, "cpu fp32", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(dragon_test.PROMPT)
    done = run("dragon_test.py", broken_model_file)
    assert done.returncode == 1
    assert done.stderr.startswith("error: logits: ")
    assert done.stderr.count("\n") == 1
    done = run("generate.py", tmp_path / "missing.pth")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/missing.pth: no such file\n")


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(model_file, tmp_path):
    words = [sys.executable, "generate.py", model_file, "--tokens", "3000", "--state-out", tmp_path / "s.pth"]
    process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 0
    assert re.fullmatch(SPEED, errors)
    assert (tmp_path / "s.pth").is_file()
