"""Keys of the older infinite-context trainer: mapped to today's, accepted without effect, or refused by name.

Works on the plain values of one source (a YAML file or one option of the command line) before they are
parsed. A key whose meaning changed is said once, with its old and its new meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import SECTIONS
from trainer.config.schema import RunConfig
from trainer.config.yaml_files import Source
from trainer.errors import ConfigError

__all__ = ["OLDER_KEYS", "apply_environment", "map_older_keys"]

_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class OlderKey:
    """What happens to one key that is no setting any more."""

    harmless: tuple[Any, ...]
    """Values under which leaving the key out changes nothing."""
    fix: str
    """What to use instead; shown when another value is given. Empty: any value is accepted and ignored."""
    say: bool = False
    """Whether an accepted value is worth a line, because users believe that it acts."""


def _ignored() -> OlderKey:
    return OlderKey(harmless=(), fix="", say=True)


def _off(fix: str, *harmless: Any) -> OlderKey:
    return OlderKey(harmless=(*_EMPTY, *harmless), fix=fix)


OLDER_KEYS: dict[str, OlderKey] = {
    "model.position_loss_bias": _ignored(),
    "model.position_loss_bias_in_validation": _ignored(),
    "model.substep_logging": _ignored(),
    "model.substep_cuda_cache_clear": _ignored(),
    "model.torch_set_float32_matmul_precision": _ignored(),
    "model.layerwise_lr": OlderKey((True, None), "remove it: att.w0 always learns at twice the rate", say=True),
    "model.dropout": OlderKey((0, None), "remove it: this model has no dropout", say=True),
    "model.dim_att": _off("remove it: in RWKV-7 it always equals n_embd", -1, 0),
    "data.processing_max_batch_size": _ignored(),
}
"""Keys without a successor. Those handled by a function of this module are not in the table."""

_MINUS_ONE_IS_UNSET = ("model.n_layer", "model.n_embd", "model.vocab_size", "model.dim_ffn")
_RENAMED = {"trainer.gradient_clip_val": "model.grad_clip", "ckpt_path": "resume"}


class _Mapping:
    """The values of one source while its older keys are taken out and put back under today's names."""

    def __init__(self, source: Source, notes: list[str]) -> None:
        self.source = source
        self.notes = notes
        self.values = {
            section: dict(value or {}) if section in SECTIONS and isinstance(value, dict | None) else value
            for section, value in source.values.items()
        }
        self.lines = dict(source.lines)
        self.ignored: list[str] = []
        self.is_older = False

    def has(self, key: str) -> bool:
        section, _, name = key.rpartition(".")
        owner = self.values.get(section) if section else self.values
        return isinstance(owner, dict) and name in owner

    def get(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        return (self.values[section] if section else self.values)[name]

    def take(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        return (self.values[section] if section else self.values).pop(name)

    def put(self, key: str, value: Any, older: str) -> None:
        """Set `key` in place of the key `older`; both in one source are a contradiction."""
        if self.has(key) and self.get(key) != value:
            problem = f"means {key}: {value}, but the same source says {key}: {self.get(key)}"
            raise ConfigError(self.where(older), problem, fix=f"remove {older}")
        section, _, name = key.rpartition(".")
        owner = self.values.setdefault(section, {}) if section else self.values
        if isinstance(owner, dict):  # else the section itself is malformed, which is found later
            owner[name] = value
        if older in self.lines:
            self.lines.setdefault(key, self.lines[older])

    def where(self, key: str) -> str:
        return self.source.where(key)


def map_older_keys(source: Source, notes: list[str]) -> Source:
    """The same settings under today's keys.

    Args:
        source: settings as the user wrote them.
        notes: gets a line for each older setting whose meaning the user should know.

    Raises:
        ConfigError: an older key asks for something that is not done here; the text says what to use.
    """
    mapping = _Mapping(source, notes)
    _map_gradient_reach(mapping)
    _map_schedule(mapping)
    _map_renamed(mapping)
    _map_tokenizer(mapping)
    _map_checkpoint_callback(mapping)
    for section in ("model", "data"):
        for name in list(mapping.values.get(section) or ()):
            _drop_older_key(mapping, f"{section}.{name}")
    if mapping.ignored:
        notes.append(f"settings of the older trainer without effect here: {', '.join(mapping.ignored)}")
    if mapping.is_older:
        _say_changed_meanings(mapping)
    return Source(source.name, mapping.values, mapping.lines)


def apply_environment(
    run: RunConfig, environ: Mapping[str, str], is_given: Callable[[str], bool], notes: list[str]
) -> RunConfig:
    """Honour the older trainer's RWKV_NO_CUDA=1 and RWKV_TORCH_COMPILE=1 where the config is silent.

    Args:
        run: the configuration so far.
        environ: environment variables.
        is_given: whether the user set the setting of this key.
        notes: gets a line for each variable that acts.
    """
    model = run.model
    if environ.get("RWKV_NO_CUDA") == "1" and not is_given("model.kernel"):
        notes.append("environment RWKV_NO_CUDA=1 is now model.kernel: chunked")
        model = dataclasses.replace(model, kernel="chunked")
    if environ.get("RWKV_TORCH_COMPILE") == "1" and not is_given("model.compile"):
        notes.append("environment RWKV_TORCH_COMPILE=1 is now model.compile: on")
        model = dataclasses.replace(model, compile="on")
    return dataclasses.replace(run, model=model)


def _map_gradient_reach(mapping: _Mapping) -> None:
    given = [key for key in ("model.bptt_learning", "model.bptt_truncated_learning") if mapping.has(key)]
    if given:
        mapping.is_older = True
        values = {key: mapping.take(key) for key in given}
        for key, value in values.items():
            if not isinstance(value, bool):
                raise ConfigError(mapping.where(key), f'"{value}" is not true or false', fix="use model.bptt_window")
        window: Any = 1 if all(values.values()) else "full"
        mapping.put("model.bptt_window", window, given[-1])
        said = ", ".join(f"{key}: {str(value).lower()}" for key, value in values.items())
        meaning = "each chunk's gradient stops at its start" if window == 1 else "exact gradients through all chunks"
        mapping.notes.append(f"{said} is now model.bptt_window: {window} ({meaning})")
    if mapping.has("model.bptt_learning_range"):
        value = mapping.get("model.bptt_learning_range")
        if isinstance(value, int) and value > 0:
            mapping.notes.append(
                f"model.bptt_learning_range: {value} trains only the last {value} chunk(s) of each document; it is no "
                "gradient window, which is model.bptt_window"
            )


def _map_schedule(mapping: _Mapping) -> None:
    if mapping.has("model.lr_type"):
        mapping.is_older = True
        mapping.put("model.lr_schedule", mapping.take("model.lr_type"), "model.lr_type")
    period_type = mapping.take("model.lr_period_type") if mapping.has("model.lr_period_type") else "epoch"
    if mapping.has("model.lr_period"):
        mapping.is_older = True
        period = mapping.take("model.lr_period")
        length = {"epoch": "trainer.max_epochs", "step": "trainer.max_steps"}.get(period_type)
        same = length is not None and mapping.has(length) and mapping.get(length) == period
        if period not in (-1, None) and not same:
            raise ConfigError(
                mapping.where("model.lr_period"),
                "the learning rate falls over the whole run",
                found=f"{period} {period_type}s",
                fix=f"remove it, or set {length or 'trainer.max_steps'} to it",
            )
    if mapping.has("model.lr_final") and mapping.get("model.lr_final") == -1:
        mapping.is_older = True
        mapping.take("model.lr_final")
        mapping.values["model"]["lr_schedule"] = "constant"
        mapping.notes.append("model.lr_final: -1 is now model.lr_schedule: constant")
    if mapping.has("model.warmup_steps") and mapping.get("model.warmup_steps") == -1:
        mapping.is_older = True
        mapping.values["model"]["warmup_steps"] = 0


def _map_renamed(mapping: _Mapping) -> None:
    for older, key in _RENAMED.items():
        if mapping.has(older):
            value = mapping.take(older)
            if older == "ckpt_path" and value == "last":
                value = "auto"
            if value is not None:
                mapping.put(key, value, older)
                mapping.notes.append(f"{older} is now {key}: {value}")
    for key in _MINUS_ONE_IS_UNSET:
        if mapping.has(key) and mapping.get(key) == -1:
            mapping.take(key)
    if mapping.has("model.load_model") and mapping.get("model.load_model") == "":
        mapping.take("model.load_model")


def _map_tokenizer(mapping: _Mapping) -> None:
    if not mapping.has("data.tokenizer"):
        return
    name = mapping.get("data.tokenizer")
    if name == "binidx":
        mapping.is_older = True
        mapping.take("data.tokenizer")
        if mapping.has("data.source") and mapping.get("data.source") != "binidx":
            mapping.put("data.source_data_dir", mapping.take("data.source"), "data.source")
        mapping.put("data.source", "binidx", "data.tokenizer")
        mapping.notes.append("data.tokenizer: binidx is now data.source: binidx with the path in data.source_data_dir")


def _map_checkpoint_callback(mapping: _Mapping) -> None:
    """Read a ModelCheckpoint block into `checkpoint:`; a key given there in the same source goes first."""
    if not mapping.has("trainer.callbacks"):
        return
    callbacks = mapping.get("trainer.callbacks")
    blocks = callbacks if isinstance(callbacks, list) else [callbacks]
    ours = [block for block in blocks if _class_name(block) == "ModelCheckpoint"]
    for block in ours:
        arguments = block.get("init_args") if isinstance(block, dict) else None
        _read_checkpoint_block(mapping, arguments if isinstance(arguments, dict) else {})
    if ours:
        mapping.values["trainer"]["callbacks"] = [block for block in blocks if block not in ours] or None


def _class_name(block: object) -> str:
    path = block.get("class_path") if isinstance(block, dict) else block
    return path.rpartition(".")[2] if isinstance(path, str) else ""


def _read_checkpoint_block(mapping: _Mapping, arguments: dict[str, Any]) -> None:
    top_k, monitor = arguments.get("save_top_k"), arguments.get("monitor")
    read = {
        "dir": arguments.get("dirpath"),
        "every_steps": arguments.get("every_n_train_steps"),
        # -1 keeps all, which is 0 here; 0 keeps none, which there is no reason for.
        "keep": {-1: 0, 0: 1}.get(top_k, top_k) if isinstance(top_k, int) else None,
        "best": True if isinstance(monitor, str) and "val" in monitor else None,
    }
    taken = {name: value for name, value in read.items() if value is not None}
    for name, value in taken.items():
        if not mapping.has(f"checkpoint.{name}"):
            mapping.put(f"checkpoint.{name}", value, "trainer.callbacks")
    said = ", ".join(f"{name}: {value}" for name, value in taken.items()) or "nothing set"
    mapping.notes.append(
        f"the ModelCheckpoint callback is read as checkpoint: {{{said}}}; its other settings have no effect"
    )


def _drop_older_key(mapping: _Mapping, key: str) -> None:
    older = OLDER_KEYS.get(key)
    if older is None:
        return
    mapping.is_older = True
    value = mapping.take(key)
    if older.fix and value not in older.harmless:
        raise ConfigError(mapping.where(key), "this setting of the older trainer is not supported", fix=older.fix)
    if older.say:
        mapping.ignored.append(key)


def _say_changed_meanings(mapping: _Mapping) -> None:
    if mapping.has("model.weight_decay"):
        mapping.notes.append(
            f"model.weight_decay: {mapping.get('model.weight_decay')} acts here (decoupled, on the large matrices); in "
            "the older trainer it had no effect"
        )
    if mapping.has("model.adam_eps"):
        mapping.notes.append(
            f"model.adam_eps: {mapping.get('model.adam_eps')} is used as given; the official RWKV-7 value is 1e-18"
        )
