"""Names and types of settings in one source, checked before a parser sees them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from trainer.config.fields import SECTIONS, accepts, describe_type, settings
from trainer.config.yaml_files import COMMAND_LINE, Source
from trainer.errors import ConfigError
from trainer.logs import mask_secrets

__all__ = ["check_keys", "check_option", "check_types", "has_key"]


def has_key(values: Any, key: str) -> bool:
    """Whether nested values hold the dotted key."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def check_keys(source: Source, lightning: Collection[str] | None) -> None:
    """Refuse settings that do not exist, naming the nearest that does.

    Args:
        source: settings as the user wrote them, after older keys are mapped.
        lightning: names of the arguments of Lightning's Trainer; None: names in `trainer:` are not checked.

    Raises:
        ConfigError: with the file and line of the key.
    """
    known = _known(lightning)
    for section, values in source.values.items():
        if section not in SECTIONS:
            if section not in known:
                raise _unknown(source.where(section), section, known)
            continue
        if not isinstance(values, dict | None):
            raise ConfigError(source.where(section), "is a section", rule=f"a mapping such as `{section}: {{...}}`")
        for name in values or ():
            key = f"{section}.{name}"
            if key not in known and (section != "trainer" or lightning is not None):
                raise _unknown(source.where(key), key, known)


def check_option(option: str, lightning: Collection[str] | None) -> None:
    """Refuse an option such as `trainer.logger.init_args.name` whose first two parts are no setting.

    Raises:
        ConfigError: by the name of the option.
    """
    known = _known(lightning)
    key = ".".join(option.rstrip("+").split(".")[:2])
    if key in SECTIONS:
        raise ConfigError(f"--{option}", "is a section", fix="put it into a YAML file and name that with -c")
    if key not in known and (not key.startswith("trainer.") or lightning is not None):
        raise _unknown(f"--{option}", key, known)


def check_types(source: Source) -> None:
    """Check values of our settings; those that Lightning has too take more than one type and are its to check.

    Raises:
        ConfigError: with the file and line of the value.
    """
    ours = {f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    for key, setting in settings().items():
        if setting.section and key not in ours or not has_key(source.values, key):
            continue
        value = source.values[setting.section][setting.name] if setting.section else source.values[key]
        if not accepts(setting.annotation, value):
            problem = f"{_shown(value, setting.name)} is not {describe_type(setting.annotation)}"
            raise ConfigError(source.where(key), problem)


def _known(lightning: Collection[str] | None) -> list[str]:
    return [*settings(), *(f"trainer.{name}" for name in lightning or ())]


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
    place = COMMAND_LINE if where.startswith("--") else where.removesuffix(f": {key}")
    fix = None if near else "configs/example-full.yaml lists all settings"
    return ConfigError(place, f"unknown setting {key}{hint}", fix=fix)
