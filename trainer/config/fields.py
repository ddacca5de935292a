"""The schema as a flat table: one entry per setting, with its key as users write it, type, default and text.

Everything that lists settings (the command line's help, the checks of keys, the commented example and the
docs page) reads this table, so that a setting is declared once, in `schema.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union

from trainer.config import schema

__all__ = ["SECTIONS", "Setting", "accepts", "describe_type", "settings"]

SECTIONS: dict[str, type] = {
    "trainer": schema.TrainerConfig,
    "model": schema.ModelConfig,
    "data": schema.DataConfig,
    "checkpoint": schema.CheckpointConfig,
}
"""Sections of a YAML file and the dataclass that declares each."""

_RUN_KEYS = {"seed": "seed_everything", "resume": "resume"}


@dataclass(frozen=True)
class Setting:
    """One setting of a run."""

    key: str
    """As users write it: `model.ctx_len`."""
    annotation: Any
    default: Any
    doc: str
    """Meaning, unit, and when to change it."""

    @property
    def section(self) -> str:
        """The part of the key before the dot; empty for the two top-level settings."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The part of the key after the dot."""
        return self.key.rpartition(".")[2]


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def _settings_of(cls: type, key_of: dict[str, str]) -> list[Setting]:
    docs, hints = _field_docs(cls), typing.get_type_hints(cls)
    return [
        Setting(key_of[f.name], hints[f.name], f.default, docs[f.name].removeprefix(f"{key_of[f.name]}: "))
        for f in dataclasses.fields(cls)
        if f.name in key_of
    ]


@cache
def settings() -> dict[str, Setting]:
    """Every setting of the schema by key, in the order of the documentation."""
    run_fields = [f.name for f in dataclasses.fields(schema.RunConfig) if f.name not in SECTIONS]
    entries = _settings_of(schema.RunConfig, {name: _RUN_KEYS.get(name, f"trainer.{name}") for name in run_fields})
    for section, cls in SECTIONS.items():
        entries += _settings_of(cls, {f.name: f"{section}.{f.name}" for f in dataclasses.fields(cls)})
    return {entry.key: entry for entry in entries}


def describe_type(annotation: Any) -> str:
    """A type in the words of an error message: `an int`, `one of auto, on, off`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(part) for part in arguments)
    if origin is list:
        return f"a list of which each entry is {describe_type(arguments[0])}"
    if origin is dict:
        return (
            "a mapping"
            if not arguments or arguments[1] is Any
            else f"a mapping whose values are {describe_type(arguments[1])}"
        )
    words = {int: "an int", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(annotation, str(annotation))


def accepts(annotation: Any, value: object) -> bool:
    """Whether a plain value of a YAML file has the type of a setting; whole numbers are numbers too."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(accepts(part, value) for part in arguments)
    if origin is list:
        return isinstance(value, list) and all(accepts(arguments[0], item) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(accepts(arguments[1], item) for item in value.values())
    if isinstance(value, bool):
        return annotation is bool
    if annotation is float:
        return isinstance(value, int | float)
    return isinstance(value, annotation)
