"""The command line: what a user sees, what reaches the training, and what never gets that far."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from trainer.cli import main, parse_run_config, run_script
from trainer.config.yaml_files import saved_config
from trainer.errors import ConfigError, StorageError

ROOT = Path(__file__).parents[1]
BASE = """\
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  precision: 32-true
  max_steps: 8
  target_batch_size: 2
  microbatch_size: 1
model:
  load_model: weights.pth
  ctx_len: 64
  lr_init: 0.001
  lr_final: 0.0001
data:
  data_path: prepared
  source: json
  source_data_dir: source
  source_dataset_params: {data_files: docs.jsonl}
  tokenizer: byte
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with base.yaml and the weight file that it names; no environment of the older trainer."""
    monkeypatch.chdir(tmp_path)
    for name in ("RWKV_NO_CUDA", "RWKV_TORCH_COMPILE", "RWKV_FAILPOINT", "RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "weights.pth").touch()
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """What the training was asked to do, in place of doing it."""
    seen = []
    stand_in = ModuleType("trainer.train.run")
    stand_in.execute = lambda command, run, trainer_arguments: seen.append((command, run, trainer_arguments))
    stand_in.dry_run = lambda run: seen.append(("dry", run, None))
    package = ModuleType("trainer.train")
    package.run = stand_in
    monkeypatch.setitem(sys.modules, "trainer.train", package)
    monkeypatch.setitem(sys.modules, "trainer.train.run", stand_in)
    return seen


def error_of(capsys, *argv, code=2):
    """The one line on stderr of a command that must fail."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("  ctx_len: 64", "  ctxlen: 64"), ["base.yaml:11", "unknown setting model.ctxlen", "mean model.ctx_len?"]),
        (("  ctx_len: 64", "  ctx_len: 0"), ["base.yaml:11", "model.ctx_len", "0", "16"]),
        (("  ctx_len: 64", "  ctx_len: -512"), ["ctx_len", "-512"]),
        (("  ctx_len: 64", "  ctx_len: 65"), ["ctx_len", "65", "16", "64"]),
        (("  ctx_len: 64", '  ctx_len: "512k"'), ["base.yaml:11", 'model.ctx_len: "512k" is not an int']),
        (("  ctx_len: 64", "  ctx_len:"), ["model.ctx_len: null is not an int"]),
        (("  ctx_len: 64", "  ctx_len: [64]"), ["model.ctx_len: a list is not an int"]),
        (("  ctx_len: 64", "  bptt_window: half"), ['model.bptt_window: "half" is not an int or one of full']),
        (("lr_init: 0.001", "lr_init: -0.001"), ["base.yaml:12", "lr_init", "-0.001"]),
        (("lr_init: 0.001", "lr_init: .nan"), ["base.yaml:12", "lr_init", "finite"]),
        (("  ctx_len: 64", "\tctx_len: 64"), ["base.yaml", "line 11", "column 1", "tab"]),
        (("  ctx_len: 64", "  ctx_len: 64\n  ctx_len: 4096"), ["base.yaml:12", "ctx_len", "duplicate"]),
        (("weights.pth", "/nonexistent/rwkv.pth"), ["/nonexistent/rwkv.pth", "load_model"]),
        (("weights.pth", "."), ["load_model", "folder"]),
        (("32-true", "fp16"), ["trainer.precision", "fp16", "bf16-mixed"]),
        (("32-true", "16-mixed"), ["trainer.precision", "16-mixed", "bf16-mixed"]),
        (("devices: 1", "devices: 1\n  num_nodes: 0"), ["trainer.num_nodes", "0", "1 or more"]),
        (("devices: 1", "devices: 64"), ["base.yaml:4", "trainer.devices", "64", f"{os.cpu_count()} CPU core"]),
        (("max_steps: 8", "max_steps: many"), ["base.yaml:6", 'trainer.max_steps: "many" is not an int']),
        (("devices: 1", "devices: 1\n  logger: {class_path: no.such.Logger}"), ["trainer.logger", "no.such.Logger"]),
        (("devices: 1", "devices: 1\n  strategy: {class_path: DDPStrategy}"), ["trainer.strategy", "DDPStrategy"]),
        (("  tokenizer: byte", "  tokenizer: byte\n  s3_secret_key: CANARY"), ["unknown setting data.s3_secret_key"]),
        (("seed_everything: 7", "sed_everything: 7"), ["base.yaml:1", "sed_everything", "mean seed_everything?"]),
        (("seed_everything: 7", "seed_everything: true"), ["seed_everything: true is not an int"]),
        (("seed_everything: 7", "mmodel: {}"), ["unknown setting mmodel", "mean model?"]),
        (("seed_everything: 7", "checkpoint: 3"), ["base.yaml:1: checkpoint", "section"]),
        (("  ctx_len: 64", "  data_path: x"), ["unknown setting model.data_path", "mean data.data_path?"]),
        (("  ctx_len: 64", "  dropout: 0.1"), ["base.yaml:11", "model.dropout", "fix: "]),
        (("  ctx_len: 64", "  dim_ffn: 1.5"), ["model.dim_ffn", '"1.5"', "int"]),
    ],
    ids=lambda value: value[1].strip().replace("\n", " ") if isinstance(value, tuple) else "",
)
@pytest.mark.promise(19)
def test_bad_config_is_one_line_with_its_place(folder, calls, capsys, change, parts):
    assert change[0] in BASE
    (folder / "base.yaml").write_text(BASE.replace(*change, 1))
    before = sorted(folder.rglob("*"))
    message = error_of(capsys, "fit", "-c", "base.yaml")
    assert [part for part in parts if part not in message] == []
    assert "CANARY" not in message
    assert sorted(folder.rglob("*")) == before
    assert calls == []


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["fit", "validate", "-c config.yaml"]),
        (["test"], ["unknown command", "test", "fit or validate"]),
        (["predict", "-c", "base.yaml"], ["unknown command", "predict"]),
        (["fit"], ["config", "-c"]),
        (["fit", "--model.ctx_len=64"], ["config", "-c"]),
        (["fit", "-c"], ["-c", "needs a value"]),
        (["fit", "-c", "/nonexistent.yaml"], ["/nonexistent.yaml", "does not exist"]),
        (["fit", "base.yaml"], ["base.yaml", "-c base.yaml"]),
        (["fit", "-c", "base.yaml", "--model.ctx_lne", "64"], ["model.ctx_lne", "mean model.ctx_len?"]),
        (["fit", "-c", "base.yaml", "--model.ctx_len", "abc"], ['--model.ctx_len: "abc" is not an int']),
        (["fit", "-c", "base.yaml", "--model.ctx_len"], ["--model.ctx_len", "needs a value"]),
        (["fit", "-c", "base.yaml", "--model.ctx_len=0100"], ["--model.ctx_len", "0100", "starts with 0"]),
        (["fit", "-c", "base.yaml", "--model.lr_init=.nan"], ["--model.lr_init", ".nan", "finite"]),
        (["fit", "-c", "base.yaml", "--trainer.devices", "64"], ["--trainer.devices", "64", "present"]),
        (["fit", "-c", "base.yaml", "--trainer.devices", "some"], ["--trainer.devices", "some", "auto"]),
        (["fit", "-c", "base.yaml", "--trainer.devices=,"], ["--trainer.devices", "auto"]),
        (["fit", "-c", "base.yaml", "--trainer.max_stepz=3"], ["trainer.max_stepz", "mean trainer.max_steps?"]),
        (["fit", "-c", "base.yaml", "--resume=/nonexistent/last.ckpt"], ["--resume", "/nonexistent/last.ckpt"]),
        (["fit", "-c", "base.yaml", "--ckpt_path=/nonexistent/a.ckpt"], ["resume", "/nonexistent/a.ckpt"]),
        (["fit", "-c", "base.yaml", "--trainer=other.yaml"], ["--trainer", "-c"]),
        (["fit", "-c", "base.yaml", "--nonsense=1"], ["unknown setting nonsense"]),
        (["fit", "-c", "base.yaml", "--trainer.callbacks=ModelCheckpoint"], ["trainer.callbacks", "--checkpoint.dir"]),
        (["fit", "-c", "base.yaml", "--trainer.callbacks=Nope"], ["trainer.callbacks", "Nope", "class"]),
        (["fit", "-c", "base.yaml", "--trainer.gradient_clip_algorithm=value"], ["gradient_clip_algorithm", "value"]),
        (["fit", "-c", "base.yaml", "--auto-resume-ckpt-mode=3rd"], ["auto-resume-ckpt-mode", "3rd", "2nd-last"]),
        (
            ["fit", "-c", "base.yaml", "--trainer.accumulate_grad_batches=3"],
            ["trainer.accumulate_grad_batches", "target_batch_size: 3", "that is 2"],
        ),
        (["fit", "-c", "base.yaml", "--trainer.accelerator=gpu"], ["trainer.accelerator", "no GPU", "cpu"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.promise(19)
def test_bad_command_line_is_one_line(folder, calls, capsys, monkeypatch, argv, parts):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = error_of(capsys, *argv)
    assert [part for part in parts if part not in message] == []
    assert calls == []


@pytest.mark.fault(66)
def test_secrets_in_class_arguments_are_masked(folder, capsys):
    (folder / "more.yaml").write_text(
        "trainer: {logger: {class_path: WandbLogger, init_args: {api_key: CANARY, proj: x}}}"
    )
    assert "CANARY" not in error_of(capsys, "fit", "-c", "base.yaml", "-c", "more.yaml")
    assert "CANARY" not in error_of(capsys, "fit", "-c", "base.yaml", "--model.load_model=http://me:CANARY@host/a.pth")


def test_fit_hands_one_frozen_config_to_the_training(folder, calls):
    assert main(["fit", "-c", "base.yaml"]) == 0
    command, run, arguments = calls[0]
    assert command == "fit"
    assert (run.model.ctx_len, run.model.lr_init, run.max_steps, run.seed) == (64, 0.001, 8, 7)
    assert (run.precision, run.strategy, run.devices, run.accelerator) == ("32-true", "auto", 1, "cpu")
    assert run.trainer.target_batch_size == 2
    assert run.data.source_dataset_params == {"data_files": "docs.jsonl"}
    assert run.checkpoint.dir == "runs/base"
    assert arguments["max_steps"] == 8
    assert arguments["devices"] == 1
    ours = {"target_batch_size", "microbatch_size", "max_tokens", "accumulate_grad_batches", "gradient_clip_val"}
    assert not ours & set(arguments)


def test_later_configs_and_options_go_first(folder, calls):
    (folder / "long.yaml").write_text("model: {ctx_len: 128, bptt_window: full}\n")
    assert (
        main(["fit", "-c", "base.yaml", "--config=long.yaml", "--model.lr_init", "2e-3", "--trainer.max_steps=3"]) == 0
    )
    run = calls[0][1]
    assert (run.model.ctx_len, run.model.bptt_window, run.model.lr_init, run.max_steps) == (128, "full", 0.002, 3)
    assert run.data.tokenizer == "byte"
    assert run.checkpoint.dir == "runs/base+long"
    assert main(["fit", "--model.ctx_len=32", "-c", "base.yaml", "--checkpoint.dir", "ck"]) == 0
    assert calls[1][1].model.ctx_len == 64
    assert calls[1][1].checkpoint.dir == "ck"


@pytest.mark.parametrize(
    ("option", "number", "kept"),
    [("1", 1, 1), ("auto", 1, "auto"), ("-1", 1, -1), ("2", 2, 2), ("[0,1]", 2, [0, 1]), ("0,1", 2, [0, 1])],
)
def test_devices_of_the_command_line_are_numbers(folder, calls, monkeypatch, option, number, kept):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert main(["fit", "-c", "base.yaml", f"--trainer.devices={option}"]) == 0
    assert calls[0][1].devices == number
    assert calls[0][2]["devices"] == kept


def test_auto_counts_gpus(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    argv = ["base.yaml", "--trainer.accelerator=auto", "--trainer.devices=auto"]
    assert parse_run_config(argv).devices == 2
    assert main(["fit", "-c", *argv, "--trainer.devices=4", "--trainer.target_batch_size=4"]) == 2


def test_loggers_and_callbacks_are_built(folder, calls):
    (folder / "more.yaml").write_text(
        "trainer:\n  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}\n"
        "  callbacks:\n  - {class_path: LearningRateMonitor, init_args: {logging_interval: step}}\n"
        "  - {class_path: lightning.pytorch.callbacks.ModelCheckpoint,"
        " init_args: {dirpath: ck, every_n_train_steps: 5, save_top_k: 2}}\n"
    )
    assert main(["fit", "-c", "base.yaml", "-c", "more.yaml", "--trainer.logger.init_args.name=abc"]) == 0
    run, arguments = calls[0][1:]
    assert (run.checkpoint.dir, run.checkpoint.every_steps, run.checkpoint.keep) == ("ck", 5, 2)
    assert [type(callback).__name__ for callback in arguments["callbacks"]] == ["LearningRateMonitor"]
    assert (type(arguments["logger"]).__name__, arguments["logger"].name) == ("CSVLogger", "abc")
    assert main(["fit", "-c", "base.yaml", "--trainer.logger=false"]) == 0
    assert calls[1][2]["logger"] is False


def test_older_keys_work_in_files_and_options_and_are_said_once(folder, calls, capsys):
    (folder / "older.yaml").write_text(
        "trainer: {gradient_clip_val: 0.5, accumulate_grad_batches: 2, precision: bf16, fast_dev_run: null}\n"
        "model: {bptt_learning: true, bptt_truncated_learning: false, weight_decay: 0.1, substep_logging: true}\n"
        "data: {packing_enable: false, multi_column_keys: []}\n"
    )
    argv = ["fit", "-c", "base.yaml", "-c", "older.yaml", "--auto-resume-ckpt-dir", "ck"]
    assert main([*argv, "--auto-resume-ckpt-mode", "2nd-last"]) == 0
    run = calls[0][1]
    assert (run.model.bptt_window, run.model.grad_clip, run.precision) == ("full", 0.5, "bf16-mixed")
    assert (run.trainer.target_batch_size, run.checkpoint.dir, run.resume) == (2, "ck", "auto")
    text = capsys.readouterr().err
    for word in ("model.bptt_window: full", "grad_clip", "weight_decay", "substep_logging", "auto-resume-ckpt-dir"):
        assert word in text, word
    both = ["--model.bptt_learning=false", "--model.bptt_truncated_learning=true"]
    assert parse_run_config(["base.yaml", *both]).model.bptt_window == "full"
    assert parse_run_config(["base.yaml", "--ckpt_path=weights.pth"]).resume == "weights.pth"
    assert parse_run_config(["base.yaml", "--auto-resume-ckpt-dir=auto"]).checkpoint.dir == "runs/base"


def test_a_whole_config_of_the_older_trainer_is_read(folder):
    run = parse_run_config([str(ROOT / "tests/fixtures/config/older_trainer.yaml")])
    assert (run.model.bptt_window, run.model.grad_clip, run.model.warmup_steps) == ("full", 1.0, 0)
    assert (run.checkpoint.dir, run.checkpoint.every_steps, run.checkpoint.keep) == ("checkpoints", 100, 3)
    assert (run.strategy, run.precision, run.max_epochs) == ("deepspeed_stage_1", "bf16-mixed", 1)
    assert (run.trainer.target_batch_size, run.trainer.microbatch_size, run.resume) == (32, 8, "never")


def test_environment_of_the_older_trainer(folder, monkeypatch):
    monkeypatch.setenv("RWKV_NO_CUDA", "1")
    monkeypatch.setenv("RWKV_TORCH_COMPILE", "1")
    run = parse_run_config(["base.yaml"])
    assert (run.model.kernel, run.model.compile) == ("chunked", "on")
    assert parse_run_config(["base.yaml", "--model.kernel=reference"]).model.kernel == "reference"


@pytest.mark.fault(71)
def test_texts_survive_whatever_characters_they_hold(folder):
    params = {"a": "x 😀 \u2028 \x7f \t", "b": "1e-3", "c": "on", "d": ["yes", None, 1.5]}
    text = '{a: "x 😀 \\u2028 \\x7f \\t", b: "1e-3", c: on, d: [yes, null, 1.5]}'
    (folder / "odd.yaml").write_text(f"data: {{source_dataset_params: {text}}}", encoding="utf-8")
    assert parse_run_config(["base.yaml", "-c", "odd.yaml"]).data.source_dataset_params == params


def test_options_reach_into_mappings(folder):
    run = parse_run_config(
        ["base.yaml", "--data.source_dataset_params.split=on", "--data.source_dataset_params.deep.x=false",
         "--data.source_data_dir=2024", "--model.lora_ranks.w=8"]
    )  # fmt: skip
    assert run.data.source_dataset_params == {"data_files": "docs.jsonl", "split": "on", "deep": {"x": False}}
    assert run.data.source_data_dir == "2024"
    assert run.model.lora_ranks == {"w": 8}


def test_saved_config_reads_back_as_the_same_run(folder):
    run = parse_run_config(["base.yaml", "--model.lora_ranks={w: 8, a: 8}"])
    (folder / "saved.yaml").write_text(yaml.safe_dump(saved_config(run)))
    assert parse_run_config(["saved.yaml"]) == run


def test_dry_run_plans_only(folder, calls):
    assert main(["fit", "-c", "base.yaml", "--dry-run"]) == 0
    assert [call[0] for call in calls] == ["dry"]


def test_validate(folder, calls):
    assert main(["validate", "-c", "base.yaml", "--trainer.max_steps=0"]) == 0
    assert calls[0][0] == "validate"


def test_no_steps_is_said_and_nothing_is_built(folder, calls, capsys):
    assert main(["fit", "-c", "base.yaml", "--trainer.max_steps=0"]) == 0
    assert "max_steps is 0" in capsys.readouterr().err
    assert calls == []
    assert sorted(path.name for path in folder.iterdir()) == ["base.yaml", "weights.pth"]


def test_printed_config_is_complete_and_masked(folder, capsys):
    (folder / "more.yaml").write_text("data: {source_dataset_params: {storage_options: {secret: CANARY}}}")
    assert main(["fit", "-c", "base.yaml", "-c", "more.yaml", "--print_config"]) == 0
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)
    assert printed["model"]["ctx_len"] == 64
    assert printed["model"]["beta2"] == 0.99
    assert "CANARY" not in text
    assert main(["fit", "--print_config"]) == 0


def test_help_comes_from_the_schema(capsys):
    assert main(["fit", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Tokens per chunk, a multiple of 16. GPU memory grows with it" in text
    assert "from 1 % of its value to all of it" in text
    for option in ("--trainer.max_epochs", "--trainer.target_batch_size", "--checkpoint.keep", "--resume", "--dry-run"):
        assert option in text
    assert "3941088705" in text
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "fit" in text
    assert "predict" not in text


def test_parse_run_config_needs_a_config(folder):
    with pytest.raises(ConfigError, match="a config is needed"):
        parse_run_config([])
    assert parse_run_config(["base.yaml", "--model.ctx_len=32"]).model.ctx_len == 32
    assert parse_run_config(["-c", "base.yaml"], command="validate").model.ctx_len == 64


def test_other_commands_do_not_need_the_weights_or_the_devices(folder):
    (folder / "weights.pth").unlink()
    argv = ["base.yaml", "--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.target_batch_size=8"]
    assert parse_run_config(argv, command="preload").devices == 8
    with pytest.raises(ConfigError, match=r"weights\.pth"):
        parse_run_config(["base.yaml"])


def test_run_script_turns_outcomes_into_exit_codes(capsys, monkeypatch):
    def raises(error):
        raise error

    assert run_script(lambda: None) == 0
    assert run_script(lambda: 3) == 3
    assert run_script(lambda: raises(StorageError("out", "disk full"))) == 4
    assert run_script(lambda: raises(KeyboardInterrupt())) == 130
    assert run_script(lambda: raises(SystemExit(0))) == 0
    assert run_script(lambda: raises(SystemExit("text"))) == 1
    assert "error: out: disk full" in capsys.readouterr().err
    monkeypatch.setenv("RWKV_FAILPOINT", "nonsense")
    assert run_script(lambda: None) == 2


STARTED = """
import json, sys
{body}
print(json.dumps(sorted(set(sys.modules) & {{"deepspeed", "datasets", "transformers", "wandb", "torch._dynamo"}})))
"""
EMPTY = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel
try:
    LightningCLI(DemoModel, BoringDataModule, args=["fit", "--help"])
except SystemExit:
    pass
"""
OURS = """
from trainer.cli import main
main(["fit", "--help"])
"""


def modules_and_seconds(body):
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STARTED.format(body=body)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return set(json.loads(done.stdout.splitlines()[-1])), time.perf_counter() - began


@pytest.mark.slow
def test_help_starts_as_fast_as_an_empty_lightning_cli():
    runs = [(modules_and_seconds(EMPTY), modules_and_seconds(OURS)) for _ in range(3)]
    empty, ours = runs[0][0][0], runs[0][1][0]
    assert ours <= empty
    assert min(our[1] for _, our in runs) <= 1.3 * min(other[1] for other, _ in runs)


def test_reading_the_config_layer_needs_neither_torch_nor_lightning():
    code = "import sys, trainer.cli, trainer.config; print({'torch', 'lightning', 'jsonargparse'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("option", ["--model.ctx_lne=64", "--model.ctx_len=abc", "--sed=1", "--config=missing.yaml"])
@pytest.mark.promise(19)
def test_most_mistakes_are_found_before_anything_heavy_is_imported(folder, option):
    code = (
        "import sys; from trainer.cli import main; main(sys.argv[1:]); print({'torch', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", "-c", "base.yaml", option],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.startswith("error: ")
    assert done.stdout.strip() == "set()"


def test_environment_is_read_only_where_it_may_be():
    allowed = {"trainer/cli.py", "trainer/ops/wkv7/build.py"}
    readers = set()
    for path in ROOT.glob("trainer/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            imports = isinstance(node, ast.ImportFrom) and any(n.name in ("environ", "getenv") for n in node.names)
            if reads or imports:
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers <= allowed
