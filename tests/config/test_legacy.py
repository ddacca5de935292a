"""Keys of the older trainer: mapped, accepted without effect, or refused by name."""

import pytest

from trainer.config import ModelConfig, RunConfig
from trainer.config.legacy import OLDER_KEYS, apply_environment, map_older_keys
from trainer.config.yaml_files import Source
from trainer.errors import ConfigError


def mapped(**sections):
    notes = []
    return map_older_keys(Source("run.yaml", sections), notes).values, notes


@pytest.mark.parametrize(
    ("model", "window"),
    [
        ({"bptt_learning": True}, 1),
        ({"bptt_learning": False}, "full"),
        ({"bptt_truncated_learning": True}, 1),
        ({"bptt_truncated_learning": False}, "full"),
        ({"bptt_learning": True, "bptt_truncated_learning": False}, "full"),
        ({"bptt_learning": False, "bptt_truncated_learning": True}, "full"),
        ({"bptt_learning": True, "bptt_truncated_learning": True}, 1),
        ({"bptt_learning": True, "bptt_window": 1}, 1),
    ],
)
def test_gradient_reach(model, window):
    values, notes = mapped(model=model)
    assert values["model"] == {"bptt_window": window}
    assert "model.bptt_window" in notes[0]


def test_contradiction_in_one_source_is_refused():
    with pytest.raises(ConfigError, match=r"bptt_learning.*bptt_window: 1.*bptt_window: full"):
        mapped(model={"bptt_learning": True, "bptt_window": "full"})


def test_a_switch_that_is_no_boolean_is_refused():
    with pytest.raises(ConfigError, match=r'bptt_learning: "maybe" is not true or false'):
        mapped(model={"bptt_learning": "maybe"})


def test_learning_range_is_said_not_to_be_a_window():
    values, notes = mapped(model={"bptt_learning_range": 1})
    assert values["model"] == {"bptt_learning_range": 1}
    assert "no gradient window" in notes[0]
    assert mapped(model={"bptt_learning_range": -1})[1] == []


def test_schedule():
    values, _ = mapped(model={"lr_type": "linear", "lr_period": -1, "lr_period_type": "epoch", "warmup_steps": -1})
    assert values["model"] == {"lr_schedule": "linear", "warmup_steps": 0}
    values, _ = mapped(model={"lr_type": "cosine", "lr_final": -1})
    assert values["model"] == {"lr_schedule": "constant"}
    values, _ = mapped(model={"lr_period": 3, "lr_period_type": "epoch"}, trainer={"max_epochs": 3})
    assert values["model"] == {}
    with pytest.raises(ConfigError, match=r"lr_period.*10 steps.*max_steps"):
        mapped(model={"lr_period": 10, "lr_period_type": "step"})


def test_renamed_keys():
    values, notes = mapped(trainer={"gradient_clip_val": 0.5}, ckpt_path="runs/a/step-3")
    assert values == {"trainer": {}, "model": {"grad_clip": 0.5}, "resume": "runs/a/step-3"}
    assert any("gradient_clip_val" in note for note in notes)
    assert mapped(trainer={"gradient_clip_val": None}, model=None)[0] == {"trainer": {}, "model": {}}
    assert mapped(ckpt_path="last")[0] == {"resume": "auto"}
    assert mapped(ckpt_path=None)[0] == {}


def test_minus_one_meant_unset():
    assert mapped(model={"n_layer": -1, "n_embd": -1, "vocab_size": -1, "load_model": ""})[0] == {"model": {}}


def test_binidx_tokenizer_becomes_a_source():
    values, _ = mapped(data={"source": "data/minipile", "tokenizer": "binidx"})
    assert values["data"] == {"source": "binidx", "source_data_dir": "data/minipile"}
    assert mapped(data={"tokenizer": "neox"})[0] == {"data": {"tokenizer": "neox"}}


CALLBACK = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"dirpath": "ck", "save_top_k": 3, "monitor": "step", "mode": "max", "save_last": True,
                  "every_n_train_steps": 100, "filename": None},
}  # fmt: skip


def test_checkpoint_callback_is_read():
    values, notes = mapped(trainer={"callbacks": CALLBACK})
    assert values == {"trainer": {"callbacks": None}, "checkpoint": {"dir": "ck", "every_steps": 100, "keep": 3}}
    assert "ModelCheckpoint" in notes[0]


def test_other_callbacks_and_explicit_keys_stay():
    monitor = {"class_path": "LearningRateMonitor"}
    values, _ = mapped(trainer={"callbacks": [monitor, CALLBACK]}, checkpoint={"dir": "mine"})
    assert values["trainer"]["callbacks"] == [monitor]
    assert values["checkpoint"] == {"dir": "mine", "every_steps": 100, "keep": 3}


@pytest.mark.parametrize(("top_k", "keep"), [(-1, 0), (0, 1), (5, 5)])
def test_save_top_k(top_k, keep):
    block = {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": top_k, "monitor": "val/loss"}}
    assert mapped(trainer={"callbacks": [block]})[0]["checkpoint"] == {"keep": keep, "best": True}


@pytest.mark.parametrize("key", sorted(OLDER_KEYS))
def test_harmless_values_pass_and_others_are_refused_by_name(key):
    section, _, name = key.partition(".")
    for value in OLDER_KEYS[key].harmless or ("anything",):
        assert mapped(**{section: {name: value}})[0] == {section: {}}
    if OLDER_KEYS[key].fix:
        with pytest.raises(ConfigError, match=f"{key}.*fix: "):
            mapped(**{section: {name: 0.25}})


def test_data_keys_of_the_older_trainer_are_settings_again():
    data = {"source": "text", "text_rechunk_auto": True, "packing_enable": True, "conversation_format": "iopairs"}
    assert mapped(data=data)[0] == {"data": data}


def test_curricula_of_the_older_trainer_are_settings_again():
    model = {
        "ctx_len_cutoffs": [512, 2048], "ctx_len_warmup_steps": [100, 200], "token_loss_threshold": 0.1,
        "token_dropout_rate": 0.2,
    }  # fmt: skip
    assert mapped(model=model) == ({"model": model}, [])


def test_keys_without_effect_are_said_in_one_line():
    notes = mapped(model={"substep_logging": True, "dropout": 0, "layerwise_lr": True})[1]
    assert len(notes) == 1
    assert all(name in notes[0] for name in ("substep_logging", "dropout", "layerwise_lr"))


def test_changed_meanings_are_said_only_in_older_configs():
    assert mapped(model={"weight_decay": 0.1, "adam_eps": 1e-8})[1] == []
    notes = mapped(model={"weight_decay": 0.1, "adam_eps": 1e-8, "bptt_learning": True})[1]
    assert any("weight_decay" in note and "no effect" in note for note in notes)
    assert any("adam_eps" in note for note in notes)


def test_lines_follow_a_renamed_key():
    source = Source("run.yaml", {"model": {"bptt_learning": False}}, {"model": 1, "model.bptt_learning": 2})
    assert map_older_keys(source, []).where("model.bptt_window") == "run.yaml:2: model.bptt_window"


def test_environment_acts_only_where_the_config_is_silent():
    environ = {"RWKV_NO_CUDA": "1", "RWKV_TORCH_COMPILE": "1"}
    run, notes = RunConfig(), []
    changed = apply_environment(run, environ, lambda key: False, notes)
    assert (changed.model.kernel, changed.model.compile, len(notes)) == ("chunked", "on", 2)
    assert apply_environment(run, environ, lambda key: True, []) == run
    assert apply_environment(run, {"RWKV_NO_CUDA": "0"}, lambda key: False, []) == RunConfig(model=ModelConfig())
