"""Strict reading of YAML: what other readers silently repair or misread is refused with its file and line.

PyYAML keeps the last of two equal keys, reads `010` as 8 and `1:30` as 90, turns `on` into true and builds
Python objects for tags. None of that is wanted in the settings of a run that takes days.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer.config.fields import SECTIONS, settings
from trainer.config.schema import RunConfig
from trainer.errors import ConfigError
from trainer.logs import mask_secrets

__all__ = ["COMMAND_LINE", "Source", "parse_scalar", "read_yaml", "saved_config"]

COMMAND_LINE = "command line"
"""Name of the source that holds options."""

_MAX_BYTES = 2**20
_MAX_VALUES = 100_000
_CORE_TAG = "tag:yaml.org,2002:"
_SCALARS = {_CORE_TAG + name for name in ("str", "int", "float", "bool", "null")}
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")
_NON_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Settings from one place: a YAML file, or options of the command line that follow each other."""

    name: str
    """File as the user wrote it, or `COMMAND_LINE`."""
    values: dict[str, Any]
    """Nested plain values: dict, list, str, int, float, bool, None."""
    lines: dict[str, int] = field(default_factory=dict)
    """Line (from 1) of each key, by its dotted name; empty for options."""

    def where(self, key: str) -> str:
        """Place of a key for an error message: `run.yaml:12: model.ctx_len`, or `--model.ctx_len`."""
        if self.name == COMMAND_LINE:
            return f"--{key}"
        parent = key
        while parent and parent not in self.lines:
            parent = parent.rpartition(".")[0]
        return f"{self.name}:{self.lines[parent]}: {key}" if parent else key


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader whose plain scalars mean what they say: no yes/no booleans, dates, octals or base 60."""


_StrictLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     "-+.0123456789"),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _StrictLoader.add_implicit_resolver(_CORE_TAG + _tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_yaml(path: str) -> Source:
    """Settings of a YAML file.

    Raises:
        ConfigError: the file is missing, is no UTF-8 text or no YAML mapping, has a key twice, a tab as
            indentation, a tag, a number such as 010 or .nan, or is far too large.
    """
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise _syntax_error(path, text, error) from None
    except RecursionError:
        raise ConfigError(path, "is nested too deeply to be settings") from None
    reader = _NodeReader(path)
    values = {} if node is None else reader.convert(node, "")
    if not isinstance(values, dict):
        raise ConfigError(path, f"holds {_kind(values)}, not settings", rule="a mapping such as `model: {...}`")
    if not values:
        raise ConfigError(path, "holds no settings", rule="a mapping such as `model: {...}`")
    return Source(path, values, reader.lines)


def parse_scalar(text: str, where: str) -> Any:
    """Value of an option of the command line, by the same rules as in a file; plain text stays text."""
    try:
        node = yaml.compose(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    return None if node is None else _NodeReader(where, has_lines=False).convert(node, where)


def saved_config(run: RunConfig) -> dict[str, Any]:
    """All settings of a run in the layout of a YAML file, with secrets replaced by `***`.

    This is what may be written beside checkpoints or handed to a tracker.
    """
    nested: dict[str, Any] = {"seed_everything": run.seed, "resume": run.resume}
    nested |= {section: {} for section in SECTIONS}
    for key, setting in settings().items():
        if setting.section:
            owner = getattr(run, setting.section)
            holder = owner if hasattr(owner, setting.name) else run
            nested[setting.section][setting.name] = getattr(holder, setting.name)
        else:
            assert key in nested, key
    masked = mask_secrets(nested)
    assert isinstance(masked, dict)
    return masked


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(path, "config file does not exist") from None
    except IsADirectoryError:
        raise ConfigError(path, "is a folder, not a config file") from None
    except OSError as error:
        raise ConfigError(path, f"config file cannot be read ({error.strerror})") from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(path, "is larger than 1 MiB", fix="give the YAML file of the run, not its data")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            path, f"is not utf-8 text (byte 0x{raw[error.start]:02x} at offset {error.start})", fix="save it as utf-8"
        ) from None
    control = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    if control:
        found = f"(character 0x{ord(control[0]):02x} at offset {control.start()})"
        raise ConfigError(path, f"is not utf-8 text {found}", fix="give the YAML file of the run")
    return text


def _syntax_error(path: str, text: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return ConfigError(path, "is not readable as YAML")
    where = f"{path}: line {mark.line + 1}, column {mark.column + 1}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        return ConfigError(where, "a tab is not allowed here", fix="indent with spaces")
    problem = str(getattr(error, "problem", None) or "unreadable")
    return ConfigError(where, f"not valid YAML: {problem}")


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "one plain value"


class _NodeReader:
    """Turns YAML nodes into plain values and notes the line of each key."""

    def __init__(self, name: str, *, has_lines: bool = True) -> None:
        self._name = name
        self._has_lines = has_lines
        self._num_values = 0
        self._open: list[yaml.Node] = []
        self.lines: dict[str, int] = {}

    def convert(self, node: yaml.Node, key: str) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise ConfigError(self._name, f"has more than {_MAX_VALUES} values after expanding aliases")
        if any(node is outer for outer in self._open):
            raise ConfigError(self._place(node, key), "an alias contains itself")
        self._open.append(node)
        try:
            return self._convert(node, key)
        finally:
            self._open.pop()

    def _convert(self, node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE_TAG + "map":
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE_TAG + "seq":
            return [self.convert(item, key) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, key)
        tag = node.tag.replace(_CORE_TAG, "!!")
        raise ConfigError(self._place(node, key), f"tag {tag} is not allowed", fix="write a plain value")

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if name_node.tag == _CORE_TAG + "merge":
                parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for part in parts:
                    merged = self._merged(part, key) | merged
                continue
            name = self._name_of(name_node, key)
            full = f"{key}.{name}" if key else name
            if name in values:
                first = f" (first in line {self.lines[full]})" if self._has_lines else ""
                raise ConfigError(self._place(name_node, full), f"duplicate key{first}", fix="keep one of the two")
            self.lines[full] = name_node.start_mark.line + 1
            values[name] = self.convert(value_node, full)
        return merged | values

    def _merged(self, node: yaml.Node, key: str) -> dict[str, Any]:
        value = self.convert(node, key)
        if not isinstance(value, dict):
            raise ConfigError(self._place(node, key), "`<<` needs a mapping")
        return value

    def _name_of(self, node: yaml.Node, key: str) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == _CORE_TAG + "str":
            return str(node.value)
        what = f"key {node.value}" if isinstance(node, yaml.ScalarNode) else "a key"
        raise ConfigError(self._place(node, key), f"{what} is not a name", fix="put it in quotes if it is meant")

    def _scalar(self, node: yaml.ScalarNode, key: str) -> Any:
        kind, text = node.tag.removeprefix(_CORE_TAG), node.value
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if _NON_FINITE.match(text):
            raise ConfigError(self._place(node, key), f"{text} is not a finite number")
        if _LEADING_ZERO.match(text):
            raise ConfigError(
                self._place(node, key), f"{text} starts with 0", fix="remove the 0, or quote it if it is a text"
            )
        try:
            return int(text, 0) if kind == "int" else float(text)
        except ValueError:
            raise ConfigError(self._place(node, key), f"{text} is not a number") from None

    def _place(self, node: yaml.Node, key: str) -> str:
        if not self._has_lines:
            return self._name
        return f"{self._name}:{node.start_mark.line + 1}" + (f": {key}" if key else "")
