"""Rules of a configuration: each broken rule names its setting, the value found and a legal value."""

import dataclasses

import pytest

from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.config.checks import check_run, check_values
from trainer.config.fields import settings
from trainer.errors import ConfigError

GOOD = RunConfig(
    model=ModelConfig(n_layer=2, n_embd=128), data=DataConfig(source="json", source_data_dir="x", data_path="y")
)


def changed(**sections):
    """The good run with changes, such as `model={"ctx_len": 8}` or `max_steps=-2`."""
    changes = {
        name: dataclasses.replace(getattr(GOOD, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return dataclasses.replace(GOOD, **changes)


def test_good_run_passes():
    check_run(GOOD)


NOT_A_NUMBER = float("nan")
BAD = [
    (changed(model={"ctx_len": 0}), ["model.ctx_len", "0", "multiple of 16", "nearest is 16"]),
    (changed(model={"ctx_len": -512}), ["model.ctx_len", "-512", "16"]),
    (changed(model={"ctx_len": 65}), ["model.ctx_len", "65", "16", "64"]),
    (changed(model={"ctx_len_schedule": [[10, 16]]}), ["model.ctx_len_schedule", "[[10, 16]]", "rise from 0"]),
    (changed(model={"ctx_len_schedule": [[0, 16], [5, 32], [5, 16]]}), ["model.ctx_len_schedule", "rise from 0"]),
    (changed(model={"ctx_len_schedule": [[0, 16, 1]]}), ["model.ctx_len_schedule", "[[0, 16, 1]]"]),
    (changed(model={"ctx_len_schedule": [[0, 24]]}), ["model.ctx_len_schedule", "24", "multiple of 16"]),
    (
        changed(model={"ctx_len_schedule": [[0, 4096]]}),
        ["model.ctx_len_schedule", "4096", "at most model.ctx_len 2048"],
    ),
    (
        changed(model={"ctx_len_cutoffs": [64]}),
        ["model.ctx_len_cutoffs", "1 lengths", "model.ctx_len_warmup_steps has 0"],
    ),
    (
        changed(model={"ctx_len_cutoffs": [64, 32], "ctx_len_warmup_steps": [5, 9]}),
        ["model.ctx_len_cutoffs", "[64, 32]", "rising"],
    ),
    (
        changed(model={"ctx_len_cutoffs": [32, 64], "ctx_len_warmup_steps": [0, 9]}),
        ["model.ctx_len_warmup_steps", "[0, 9]", "from 1"],
    ),
    (
        changed(model={"ctx_len_cutoffs": [64], "ctx_len_warmup_steps": [5]}, data={"batching": "stream"}),
        ["model.ctx_len_cutoffs", "[64]", "documents"],
    ),
    (changed(model={"token_loss_threshold": -1.0}), ["model.token_loss_threshold", "-1.0"]),
    (changed(model={"token_dropout_rate": 1.0}), ["model.token_dropout_rate", "1.0", "below 1"]),
    (changed(model={"head_size": 60}), ["model.head_size", "60"]),
    (changed(model={"n_embd": 100}), ["model.n_embd", "100", "64", "nearest is 128"]),
    (changed(model={"lr_init": -0.001}), ["model.lr_init", "-0.001", "above 0"]),
    (changed(model={"lr_init": NOT_A_NUMBER}), ["model.lr_init", "nan", "finite"]),
    (changed(model={"l2wrap": float("inf")}), ["model.l2wrap", "inf", "finite"]),
    (changed(model={"lr_final": 1.0}), ["model.lr_final", "1.0", "model.lr_init"]),
    (changed(model={"beta2": 1.0}), ["model.beta2", "1.0", "below 1"]),
    (changed(model={"adam_eps": 0.0}), ["model.adam_eps", "0.0"]),
    (changed(model={"warmup_steps": -2}), ["model.warmup_steps", "-2"]),
    (changed(model={"bptt_window": 0}), ["model.bptt_window", "0", "full"]),
    (changed(model={"bptt_learning_range": 0}), ["model.bptt_learning_range", "0", "-1"]),
    (changed(model={"lora_ranks": {"w": 0}}), ["model.lora_ranks.w", "0"]),
    (changed(model={"lora_ranks": {"q": 8}}), ["model.lora_ranks", "gate q"]),
    (changed(model={"n_layer": None}), ["model.load_model", "n_layer"]),
    (changed(model={"load_model": "/nonexistent/rwkv.pth"}), ["model.load_model", "/nonexistent/rwkv.pth"]),
    (changed(data={"source": None, "data_path": None}), ["data.source", "data.data_path"]),
    (changed(data={"data_path": None}), ["data.data_path"]),
    (changed(data={"test_split": 1.5}), ["data.test_split", "1.5"]),
    (changed(data={"max_token_size": 1}), ["data.max_token_size", "data.min_token_size 2"]),
    (changed(data={"num_proc": 0}), ["data.num_proc", "0"]),
    (changed(data={"skip_batches": [[0, 5]]}), ["data.skip_batches", "[0, 5]", "first, last"]),
    (changed(data={"skip_batches": [[0, 5, 4]]}), ["data.skip_batches", "[0, 5, 4]"]),
    (
        changed(model={"train_parts": ["emb"]}, strategy="deepspeed_stage_3"),
        ["model.train_parts", "deepspeed_stage_3", "auto or ddp"],
    ),
    (changed(trainer={"skip_non_finite": -1}), ["trainer.skip_non_finite", "-1"]),
    (changed(trainer={"step_timeout_s": NOT_A_NUMBER}), ["trainer.step_timeout_s", "nan"]),
    (
        changed(trainer={"skip_non_finite": 2}, strategy="deepspeed_stage_1"),
        ["trainer.skip_non_finite", "deepspeed_stage_1"],
    ),
    (
        changed(trainer={"rerun_every_steps": 9}, strategy="deepspeed_stage_3"),
        ["trainer.rerun_every_steps", "deepspeed_stage_3"],
    ),
    (
        changed(checkpoint={"on_failure": "warn"}, strategy="deepspeed_stage_2"),
        ["checkpoint.on_failure", "warn", "deepspeed_stage_2"],
    ),
    (changed(data={"batching": "windows"}), ["data.batching", "binidx", "data.source json"]),
    (changed(data={"chunks_per_step": 2}), ["data.chunks_per_step", "stream", "documents"]),
    (
        changed(data={"batching": "stream", "chunks_per_step": 2}, model={"bptt_window": 4}),
        ["model.bptt_window", "4", "data.chunks_per_step 2"],
    ),
    (
        changed(data={"batching": "stream"}, model={"bptt_learning_range": 1}),
        ["model.bptt_learning_range", "documents", "stream"],
    ),
    (
        changed(trainer={"target_batch_size": 7, "microbatch_size": 2}, devices=2),
        ["trainer.target_batch_size", "7", "multiple of 4", "4 or 8", "trainer.devices"],
    ),
    (changed(trainer={"target_batch_size": 1}, devices=2), ["trainer.target_batch_size", "nearest is 2"]),
    (changed(trainer={"microbatch_size": 0}), ["trainer.microbatch_size", "0"]),
    (changed(trainer={"max_tokens": 0}), ["trainer.max_tokens", "0"]),
    (changed(checkpoint={"keep": -1}), ["checkpoint.keep", "-1"]),
    (changed(checkpoint={"every_minutes": -0.5}), ["checkpoint.every_minutes", "-0.5"]),
    (changed(devices=0), ["trainer.devices", "0"]),
    (changed(max_steps=-2), ["trainer.max_steps", "-2"]),
    (changed(max_epochs=-2), ["trainer.max_epochs", "-2"]),
    (changed(seed=2**32), ["seed_everything", "4294967296"]),
    (changed(resume="/nonexistent/last.ckpt"), ["resume", "/nonexistent/last.ckpt", "auto"]),
    (changed(precision="16-mixed"), ["trainer.precision", "16-mixed", "bf16-mixed"]),
    (changed(precision="bf17"), ["trainer.precision", "bf17", "32-true"]),
    (changed(strategy="fsdp"), ["trainer.strategy", "fsdp", "not proven yet", "deepspeed_stage_3"]),
    (changed(strategy="deepspeed_stage_1_offload"), ["trainer.strategy", "deepspeed_stage_2_offload"]),
]


@pytest.mark.parametrize(("run", "parts"), BAD, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_broken_rule_is_one_line_with_setting_and_value(run, parts):
    with pytest.raises(ConfigError) as caught:
        check_run(run)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", "64-true"])
def test_legal_precisions(precision):
    check_run(changed(precision=precision))


@pytest.mark.parametrize(
    "run",
    [
        changed(max_steps=0),
        changed(data={"batching": "stream", "chunks_per_step": 4}, model={"bptt_window": 4}),
        changed(data={"batching": "stream"}, model={"bptt_window": "full"}),
        changed(data={"batching": "windows", "source": "binidx", "data_path": None}),
        changed(trainer={"target_batch_size": 12, "microbatch_size": 2}, devices=3),
        changed(model={"bptt_window": 7}),
        changed(strategy="deepspeed_stage_3"),
        changed(model={"ctx_len_schedule": [[0, 64], [100, 2048]]}),
        changed(model={"ctx_len_cutoffs": [], "ctx_len_warmup_steps": [], "token_loss_threshold": 0}),
        changed(model={"ctx_len_cutoffs": [100, 5000], "ctx_len_warmup_steps": [10, 20], "token_dropout_rate": 0.5}),
    ],
)
def test_legal_runs(run):
    check_run(run)


def test_weights_must_be_a_file_or_a_hugging_face_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.load_model: is a folder"):
        check_run(changed(model={"load_model": str(tmp_path)}))
    (tmp_path / "config.json").write_text("{}")
    check_run(changed(model={"load_model": str(tmp_path)}))


def test_windows_accepts_a_prefix_of_a_pair(tmp_path):
    (tmp_path / "pile.idx").touch()
    for name in ("pile", "pile.bin", "pile.idx"):
        check_run(changed(data={"batching": "windows", "source": str(tmp_path / name)}))


def test_values_alone_may_name_files_that_do_not_exist_yet():
    check_values(changed(model={"load_model": "/nonexistent/rwkv.pth"}, resume="/nonexistent/last.ckpt"))


def test_every_number_is_checked_to_be_finite():
    for key, setting in settings().items():
        if not (setting.annotation is float and setting.section):
            continue
        with pytest.raises(ConfigError, match=f"{key}: is not a finite number"):
            check_run(changed(**{setting.section: {setting.name: NOT_A_NUMBER}}))


def test_sections_are_the_schema():
    assert {type(getattr(GOOD, name)) for name in ("model", "data", "trainer", "checkpoint")} == {
        ModelConfig,
        DataConfig,
        TrainerConfig,
        CheckpointConfig,
    }
