"""From the words of a command line to sources of settings, before anything heavy is imported.

YAML files are read strictly, older keys are mapped, and every setting becomes a piece that the parser merges
in the order given. Only options that Lightning's own arguments need stay as they are.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.fields import SECTIONS, settings
from trainer.config.keys import check_keys, check_option, check_types, has_key
from trainer.config.legacy import map_older_keys
from trainer.config.yaml_files import COMMAND_LINE, Source, parse_scalar, read_yaml
from trainer.errors import ConfigError

__all__ = ["Arguments", "Option", "files_first", "read_arguments", "run_name", "split_words"]

_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_NO_VALUE = ("help", "h", "dry-run", "dry_run", "print_config")
_RESUME_DIR, _RESUME_MODE = "auto-resume-ckpt-dir", "auto-resume-ckpt-mode"


@dataclass
class Arguments:
    """A command line after its first word, taken apart."""

    pieces: list[Source | str] = field(default_factory=list)
    """In the order given: sources of settings, and words that go to the parser unchanged."""
    config_files: list[str] = field(default_factory=list)
    lone_words: list[str] = field(default_factory=list)
    """Words that belong to no option."""
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

    def last_value(self, section: str, name: str) -> Any:
        """Value of a setting in the last source that holds it, else None."""
        for source in reversed(self.sources):
            if has_key(source.values, f"{section}.{name}"):
                return source.values[section][name]
        return None

    def gives(self, key: str) -> bool:
        """Whether any source holds the key."""
        return any(has_key(source.values, key) for source in self.sources)

    def check(self, lightning: Collection[str] | None) -> None:
        """Refuse settings that do not exist, naming the nearest that does, and values of the wrong type.

        Args:
            lightning: names of the arguments of Lightning's Trainer; None while Lightning is not loaded: then the
                names in `trainer:` are not checked.
        """
        for source in self.sources:
            check_keys(source, lightning)
            check_types(source)
        for option in self.options:
            check_option(option, lightning)

    def words(self, trainer_defaults: Mapping[str, Any]) -> list[str]:
        """The words for the parser: each source becomes one `--config` with its values as JSON."""
        return [
            piece if isinstance(piece, str) else f"--config={_as_json(_filled(piece, trainer_defaults))}"
            for piece in self.pieces
        ]


@dataclass(frozen=True)
class Option:
    """One option of a command line, or a word that belongs to none."""

    name: str
    """Without dashes, such as `trainer.devices`; empty for a lone word."""
    value: str | None
    words: tuple[str, ...]
    """As the user wrote it."""


def split_words(words: list[str]) -> list[Option]:
    """Options and lone words of a command line; a value may follow its option after `=` or a space."""
    options = []
    position = 0
    while position < len(words):
        option = _option_at(words, position)
        options.append(option)
        position += len(option.words)
    return options


def files_first(options: list[Option]) -> list[Option]:
    """The same with each lone word read as `-c WORD`, before all options."""
    files = [Option("config", option.value, option.words) for option in options if not option.name]
    return files + [option for option in options if option.name]


def read_arguments(options: list[Option]) -> Arguments:
    """Read the YAML files of a command line (without its command) and sort its options.

    Raises:
        ConfigError: a YAML file cannot be used, an older key asks for something that is not done here.
    """
    arguments = Arguments()
    for option in options:
        _take(arguments, option)
    arguments.pieces = [
        piece if isinstance(piece, str) else map_older_keys(piece, arguments.notes) for piece in arguments.pieces
    ]
    return arguments


def _option_at(words: list[str], position: int) -> Option:
    word = words[position]
    if not _is_option(word) and not word.startswith("-c="):
        return Option("", word, (word,))
    name, equals, text = word.lstrip("-").partition("=")
    if equals:
        return Option(name, text, (word,))
    if name in _NO_VALUE or position + 1 == len(words) or _is_option(words[position + 1]):
        return Option(name, None, (word,))
    return Option(name, words[position + 1], (word, words[position + 1]))


def _is_option(word: str) -> bool:
    return word.startswith("--") or word in ("-c", "-h")


def _take(arguments: Arguments, option: Option) -> None:
    name, value = option.name, option.value
    if not name:
        arguments.lone_words += option.words
    elif name in ("help", "h") or name.endswith(".help"):
        arguments.wants_help = True
        arguments.pieces += option.words
    elif name in ("dry-run", "dry_run"):
        arguments.is_dry_run = True
    elif name == "print_config":
        arguments.wants_printed_config = True
        arguments.pieces += option.words
    elif value is None:
        raise ConfigError(f"--{name}", "needs a value", fix=f"--{name}=VALUE")
    elif name in ("c", "config"):
        arguments.config_files.append(value)
        arguments.pieces.append(read_yaml(value))
    elif name in (_RESUME_DIR, _RESUME_MODE):
        _take_older_resume(arguments, name, value)
    elif _is_setting_of_ours(name):
        _add_option(arguments, name, _value_of(name, value))
    else:
        arguments.options.append(name)
        arguments.pieces += option.words


def _take_older_resume(arguments: Arguments, name: str, value: str) -> None:
    if name == _RESUME_DIR:
        if value not in ("auto", "true"):
            _add_option(arguments, "checkpoint.dir", value)
        _add_option(arguments, "resume", "auto")
        arguments.notes.append(f"--{name} is now --checkpoint.dir and --resume=auto")
    elif value not in ("last", "2nd-last"):
        raise ConfigError(f"--{name}", "unknown mode", found=value, rule="last or 2nd-last", fix="remove it")
    else:
        arguments.notes.append(f"--{name} has no effect: --resume=auto takes the newest checkpoint that is whole")


def _add_option(arguments: Arguments, name: str, value: Any) -> None:
    """Add one setting to the source of the options that came just before, or to a new one."""
    last = arguments.pieces[-1] if arguments.pieces else None
    if not isinstance(last, Source) or last.name != COMMAND_LINE:
        last = Source(COMMAND_LINE, {})
        arguments.pieces.append(last)
    section, _, rest = name.partition(".")
    key, _, inner = rest.partition(".")
    if not rest:
        last.values[section] = value
    elif not inner:
        last.values.setdefault(section, {})[key] = value
    else:
        whole = _with_item(arguments.last_value(section, key), inner, value)
        last.values.setdefault(section, {})[key] = whole


def _with_item(mapping: Any, name: str, value: Any) -> dict[str, Any]:
    """A copy of a nested mapping in which the dotted name has the value."""
    copied = dict(mapping) if isinstance(mapping, dict) else {}
    first, _, rest = name.partition(".")
    copied[first] = _with_item(copied.get(first), rest, value) if rest else value
    return copied


def _is_setting_of_ours(name: str) -> bool:
    section, _, rest = name.partition(".")
    in_section = section in ("model", "data", "checkpoint") and bool(rest)
    return in_section or name in ("ckpt_path", "trainer.gradient_clip_val") or name in _own_trainer_keys()


def _own_trainer_keys() -> set[str]:
    names = {f.name for f in dataclasses.fields(SECTIONS["trainer"])}
    return {f"trainer.{name}" for name in names} | {"resume", "seed_everything"}


def _value_of(name: str, text: str) -> Any:
    setting = settings().get(name)
    types = (typing.get_args(setting.annotation) or (setting.annotation,)) if setting else ()
    if str in types or name == "ckpt_path":
        return None if text == "null" else text
    return parse_scalar(text, f"--{name}")


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
