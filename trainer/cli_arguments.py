"""From the words of a command line to sources of settings, before anything heavy is imported.

YAML files are read strictly, older keys are mapped, and every setting becomes a piece that the parser merges
in the order given. Only options that Lightning's own arguments need stay as they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.fields import SECTIONS, accepts, describe_type, settings
from trainer.config.legacy import map_older_keys
from trainer.config.yaml_files import Source, parse_scalar, read_yaml
from trainer.errors import ConfigError
from trainer.logs import mask_secrets

__all__ = ["Arguments", "has_key", "read_arguments", "run_name"]

_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_NO_VALUE = ("help", "h", "dry-run", "dry_run")
_RESUME_DIR, _RESUME_MODE = "auto-resume-ckpt-dir", "auto-resume-ckpt-mode"


@dataclass
class Arguments:
    """A command line after its first word, taken apart."""

    pieces: list[Source | str] = field(default_factory=list)
    """In the order given: sources of settings, and words that go to the parser unchanged."""
    config_files: list[str] = field(default_factory=list)
    positional: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    """Names of the words in `pieces`, such as `trainer.devices`."""
    notes: list[str] = field(default_factory=list)
    """Lines to print once the configuration has passed its checks: older settings and what they mean now."""
    wants_help: bool = False
    wants_printed_config: bool = False
    is_dry_run: bool = False

    @property
    def sources(self) -> list[Source]:
        """The sources among the pieces."""
        return [piece for piece in self.pieces if isinstance(piece, Source)]

    def where(self, key: str) -> str:
        """Place of the last word on `key` or on the block that holds it: file and line, or the key alone."""
        block = ".".join(key.split(".")[:2])
        for piece in reversed(self.pieces):
            if isinstance(piece, str) and piece.startswith(f"--{block}"):
                return f"--{key}"
            if isinstance(piece, Source) and has_key(piece.values, block):
                return piece.where(key)
        return key

    def gives(self, key: str) -> bool:
        """Whether any source holds the key."""
        return any(has_key(source.values, key) for source in self.sources)

    def check_keys(self, trainer_defaults: Mapping[str, Any]) -> None:
        """Refuse settings that do not exist, with the nearest that does.

        Args:
            trainer_defaults: name and default of each argument of Lightning's Trainer.
        """
        known = [*settings(), *(f"trainer.{name}" for name in trainer_defaults)]
        for source in self.sources:
            _check_sections(source, known)
            _check_types(source, in_lightning={f"trainer.{name}" for name in trainer_defaults})
        for option in self.options:
            key = ".".join(option.rstrip("+").split(".")[:2])
            if key in SECTIONS:
                raise ConfigError(f"--{option}", "is a section", fix="put it into a YAML file and name that with -c")
            if key not in known:
                raise _unknown(f"--{option}", key, known)

    def words(self, trainer_defaults: Mapping[str, Any]) -> list[str]:
        """The words for the parser: each source becomes one `--config` with its values as JSON."""
        return [
            piece if isinstance(piece, str) else f"--config={_as_json(_filled(piece, trainer_defaults))}"
            for piece in self.pieces
        ]


def read_arguments(words: list[str]) -> Arguments:
    """Take a command line (without the command) apart and read its YAML files.

    Raises:
        ConfigError: a YAML file cannot be used, an older key asks for something that is not done here.
    """
    arguments = Arguments()
    position = 0
    while position < len(words):
        position += _read_option(arguments, words, position)
    return arguments


def _read_option(arguments: Arguments, words: list[str], position: int) -> int:
    """Read the option at `position` and return the number of words that it takes."""
    word = words[position]
    if not (word.startswith("--") or word in ("-c", "-h") or word.startswith("-c=")):
        arguments.positional.append(word)
        return 1
    name, equals, text = word.lstrip("-").partition("=")
    value: str | None = text if equals else None
    num_words = 1
    if value is None and name not in _NO_VALUE and position + 1 < len(words) and not _is_option(words[position + 1]):
        value, num_words = words[position + 1], 2
    _take_option(arguments, name, value, words[position : position + num_words])
    return num_words


def _is_option(word: str) -> bool:
    return word.startswith("--") or word in ("-c", "-h")


def _take_option(arguments: Arguments, name: str, value: str | None, words: list[str]) -> None:
    if name in ("help", "h") or name.endswith(".help"):
        arguments.wants_help = True
        arguments.pieces += words
    elif name in ("dry-run", "dry_run"):
        arguments.is_dry_run = True
    elif name == "print_config":
        arguments.wants_printed_config = True
        arguments.pieces.append(words[0])
        arguments.positional += words[1:]
    elif value is None:
        raise ConfigError(f"--{name}", "needs a value", fix=f"--{name}=VALUE")
    elif name in ("c", "config"):
        arguments.config_files.append(value)
        arguments.pieces.append(map_older_keys(read_yaml(value), arguments.notes))
    elif name in (_RESUME_DIR, _RESUME_MODE):
        _take_older_resume(arguments, name, value)
    elif _is_setting_of_ours(name):
        arguments.pieces.append(map_older_keys(_source_of(name, value), arguments.notes))
    else:
        arguments.options.append(name)
        arguments.pieces += words


def _take_older_resume(arguments: Arguments, name: str, value: str) -> None:
    if name == _RESUME_DIR:
        given = {} if value in ("auto", "true") else {"checkpoint": {"dir": value}}
        arguments.notes.append(f"--{name} is now --checkpoint.dir and --resume=auto")
        arguments.pieces.append(Source(f"--{name}", {**given, "resume": "auto"}))
    elif value not in ("last", "2nd-last"):
        raise ConfigError(f"--{name}", "unknown mode", found=value, rule="last or 2nd-last", fix="remove it")
    else:
        arguments.notes.append(f"--{name} has no effect: --resume=auto takes the newest checkpoint that is whole")


def _is_setting_of_ours(name: str) -> bool:
    section, _, rest = name.partition(".")
    in_section = section in ("model", "data", "checkpoint") and bool(rest) and "." not in rest
    return in_section or name in ("ckpt_path", "trainer.gradient_clip_val") or name in _own_trainer_keys()


def _own_trainer_keys() -> set[str]:
    names = {f.name for f in dataclasses.fields(SECTIONS["trainer"])}
    return {f"trainer.{name}" for name in names} | {"resume", "seed_everything"}


def _source_of(name: str, text: str) -> Source:
    setting = settings().get(name)
    types = (typing.get_args(setting.annotation) or (setting.annotation,)) if setting else ()
    keeps_text = str in types or name == "ckpt_path"
    value = (None if text == "null" else text) if keeps_text else parse_scalar(text, f"--{name}")
    section, _, rest = name.partition(".")
    return Source(f"--{name}", {section: {rest: value}} if rest else {section: value})


def has_key(values: Any, key: str) -> bool:
    """Whether nested values hold the dotted key."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _check_sections(source: Source, known: Collection[str]) -> None:
    for section, values in source.values.items():
        if section in SECTIONS:
            if not isinstance(values, dict | None):
                raise ConfigError(source.where(section), "is a section", rule=f"a mapping such as `{section}: {{...}}`")
            for name in values or ():
                if f"{section}.{name}" not in known:
                    raise _unknown(source.where(f"{section}.{name}"), f"{section}.{name}", known)
        elif section not in known:
            raise _unknown(source.where(section), section, known)


def _check_types(source: Source, in_lightning: Collection[str]) -> None:
    """Check values of our settings; those that Lightning has too take more than one type and are its to check."""
    for key, setting in settings().items():
        if key in in_lightning or not has_key(source.values, key):
            continue
        value = source.values[setting.section][setting.name] if setting.section else source.values[key]
        if not accepts(setting.annotation, value):
            raise ConfigError(
                source.where(key), f"{_shown(value, setting.name)} is not {describe_type(setting.annotation)}"
            )


def _shown(value: object, name: str) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f'"{mask_secrets(str(value), name)}"'


def _unknown(where: str, key: str, known: Collection[str]) -> ConfigError:
    section, _, name = key.rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    anywhere = {k.rpartition(".")[2]: k for k in known}
    near = (
        [anywhere[name]]
        if name in anywhere
        else [beside[n] for n in difflib.get_close_matches(name, beside, n=1, cutoff=0.6)]
        or [anywhere[n] for n in difflib.get_close_matches(name, anywhere, n=1, cutoff=0.75)]
        or difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.6)
    )
    hint = f"; did you mean {near[0]}?" if near else ""
    place = where.removesuffix(f": {key}") if where != key else "command line"
    fix = None if near else "configs/example-full.yaml lists all settings"
    return ConfigError(place, f"unknown setting {key}{hint}", fix=fix)


def _filled(source: Source, trainer_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The source's values without empty sections and without `null` where Lightning does not take it.

    Older example files write `null` for Lightning's default everywhere.
    """
    values = {section: value for section, value in source.values.items() if value is not None}
    if "trainer" in values:
        values["trainer"] = {
            name: value
            for name, value in values["trainer"].items()
            if value is not None or trainer_defaults.get(name) is None
        }
    return values


def _as_json(values: dict[str, Any]) -> str:
    """JSON that a YAML reader takes for the same values: no surrogate pairs, unprintable characters escaped."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(values, ensure_ascii=False))


def run_name(config_files: list[str]) -> str:
    """Name of a run by its config files: `base+long` for base.yaml and long.yaml."""
    return "+".join(Path(name).stem for name in config_files) or "run"
