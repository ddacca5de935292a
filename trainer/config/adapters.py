"""Settings of parameter-efficient fine-tuning, from the mappings `model.lora` and `model.state_tuning`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.schema import ModelConfig
from trainer.errors import ConfigError

__all__ = [
    "LORA_TARGETS",
    "TRAIN_PARTS",
    "LoraSettings",
    "StateTuning",
    "check_adapters",
    "lora_settings",
    "state_tuning",
    "trains_adapter",
]

LORA_TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
"""Matrices of a block that can have an adapter."""
TRAIN_PARTS = ("emb", "head", "norms", "gates", "mixes", "att", "ffn")
"""Groups of parameters that can be trained whole; `trainer.model.lora.part_of` says what is in them."""

_INITS = ("zero", "pissa")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """`model.lora`: y = W x + alpha / r * B A dropout(x) with trained A [r, in] and B [out, r]."""

    r: int = 16
    """Rank."""
    alpha: float = 32.0
    """Strength; the product of the adapter counts alpha / r times."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is zeroed in training."""
    targets: tuple[str, ...] = LORA_TARGETS
    """Matrices with an adapter."""
    init: Literal["zero", "pissa"] = "zero"
    """zero: A random, B zero. pissa: A and B from the largest singular values of W, whose product is taken off W."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.r


@dataclass(frozen=True, kw_only=True)
class StateTuning:
    """`model.state_tuning`: the state before a document is trained."""

    shifts: bool = False
    """Also the two token-shift states of each block, besides the recurrent state."""


def lora_settings(model: ModelConfig) -> LoraSettings | None:
    """`model.lora` with its defaults; None = no LoRA.

    Raises:
        ConfigError: an unknown entry or target, or a value out of range.
    """
    if model.lora is None:
        return None
    values = _known(model.lora, LoraSettings, "model.lora")
    init = values.get("init", "zero")
    if init not in _INITS:
        raise ConfigError("model.lora.init", "unknown", found=str(init), rule=f"one of {', '.join(_INITS)}")
    rank = _number(values.get("r", 16), "model.lora.r", "a whole number, 1 or more", lambda x: x >= 1 and x == int(x))
    default = float(rank) if init == "pissa" else 32.0
    alpha = _number(values.get("alpha", default), "model.lora.alpha", "above 0", lambda x: x > 0)
    if init == "pissa" and alpha != rank:
        fix = "leave alpha out: with init pissa the adapter starts as a part of the weights themselves"
        raise ConfigError("model.lora.alpha", "does not fit init pissa", found=alpha, rule=f"r = {rank:.0f}", fix=fix)
    dropout = _number(values.get("dropout", 0.0), "model.lora.dropout", "at least 0 and below 1", lambda x: 0 <= x < 1)
    targets = _targets(values.get("targets", list(LORA_TARGETS)))
    return LoraSettings(r=int(rank), alpha=alpha, dropout=dropout, targets=targets, init=init)


def state_tuning(model: ModelConfig) -> StateTuning | None:
    """`model.state_tuning` with its defaults; None = the state before a document is zero.

    Raises:
        ConfigError: an unknown entry, or a value that is not true or false.
    """
    if model.state_tuning is None:
        return None
    values = _known(model.state_tuning, StateTuning, "model.state_tuning")
    shifts = values.get("shifts", False)
    if not isinstance(shifts, bool):
        raise ConfigError("model.state_tuning.shifts", "not understood", found=str(shifts), rule="true or false")
    return StateTuning(shifts=shifts)


def trains_adapter(model: ModelConfig) -> bool:
    """Whether a run trains only a part of the parameters, which is what its checkpoints then hold."""
    return model.lora is not None or model.state_tuning is not None or bool(model.train_parts)


def check_adapters(model: ModelConfig) -> None:
    """Check all settings of adapters, and that they fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    lora, tuning = lora_settings(model), state_tuning(model)
    unknown = [part for part in model.train_parts or [] if part not in TRAIN_PARTS]
    if unknown:
        rule = f"some of {', '.join(TRAIN_PARTS)}"
        raise ConfigError("model.train_parts", "unknown part", found=unknown[0], rule=rule)
    if tuning is not None and (lora is not None or model.train_parts):
        other = "model.lora" if lora is not None else "model.train_parts"
        raise ConfigError("model.state_tuning", f"trains the state alone, not together with {other}", fix="remove one")
    if lora is not None and lora.dropout and model.compile == "on":
        problem = "cannot be compiled: the same inputs must be dropped whenever a chunk is computed again"
        raise ConfigError(
            "model.lora.dropout", problem, found=lora.dropout, fix="set model.compile: off, or dropout: 0"
        )
    if lora is not None and lora.dropout and model.cuda_graphs == "on":
        problem = "changes with every chunk, which a CUDA graph does not"
        fix = "set model.cuda_graphs: off, or dropout: 0"
        raise ConfigError("model.lora.dropout", problem, found=lora.dropout, fix=fix)
    if model.load_adapter is not None and lora is None and tuning is None and not model.train_parts:
        problem = "names an adapter, but nothing says how it is trained"
        raise ConfigError(
            "model.load_adapter", problem, fix="give model.lora, train_parts or state_tuning as it was made"
        )


def _known(given: Mapping[str, Any], kind: type, key: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]}", "unknown setting", rule=f"one of {', '.join(names)}")
    return {name: value for name, value in given.items() if value is not None}


def _number(value: object, key: str, rule: str, holds: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not holds(value):
        raise ConfigError(key, "out of range", found=str(value), rule=rule)
    return float(value)  # type: ignore[arg-type]


def _targets(given: object) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else given
    rule = f"some of {', '.join(LORA_TARGETS)}"
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError("model.lora.targets", "names no matrix", found=str(given), rule=rule)
    unknown = [name for name in names if name not in LORA_TARGETS]
    if unknown:
        raise ConfigError("model.lora.targets", "unknown matrix", found=str(unknown[0]), rule=rule)
    return tuple(name for name in LORA_TARGETS if name in names)
