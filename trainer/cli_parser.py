"""The command line's parser: LightningCLI's `trainer` group beside the groups of our schema.

Importing this module imports Lightning; `trainer.cli` does so only when there is something to parse.
"""

from __future__ import annotations

import argparse
import inspect
import re
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from trainer.config.checks import PRECISIONS
from trainer.config.fields import SECTIONS, Setting, settings
from trainer.errors import ConfigError
from trainer.logs import mask_secrets

__all__ = ["COMMANDS", "RunParser", "parse_command_line", "trainer_defaults"]

COMMANDS = {
    "fit": "Train, and validate while training.",
    "validate": "Compute the validation loss of the weights or of a checkpoint.",
}

_EXTRA_OPTIONS = {
    "--dry-run": "Parse, check and plan: print what the run would do and need, then stop.",
    "--auto-resume-ckpt-dir DIR": "Older spelling of --checkpoint.dir=DIR --resume=auto; `auto` keeps checkpoint.dir.",
    "--auto-resume-ckpt-mode MODE": "Older option without effect: the newest whole checkpoint is always the one used.",
}
_DESCRIPTION = "Trains RWKV-7 on documents of any length. Settings come from YAML files (-c, several are merged in order) and from options, which go first."


class _OptionOfCli(argparse.Action):
    """Shown in the help only: `trainer.cli` takes these options out before parsing."""

    def __call__(self, *_: Any) -> None:
        """Nothing is left to do when parsing comes here."""


class RunParser(LightningArgumentParser):
    """Parser whose errors are our one-line errors instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the most specific part of a jsonargparse message as a ConfigError."""
        if not self.exit_on_error:  # one of several types of a value is tried: the outer parser decides
            super().error(message, ex)
        raise _readable_error(message) from ex

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """The configuration as YAML with secrets masked; this is what --print_config shows."""
        text = super().dump(*args, **kwargs)
        values = yaml.safe_load(text)
        masked = mask_secrets(values)
        return text if masked == values else yaml.safe_dump(masked, sort_keys=False)


class _RunCLI(LightningCLI):
    """LightningCLI that only parses. Its result is `parsed`; it never builds a trainer or a model."""

    parsed: Namespace

    def __init__(self, arguments: list[str]) -> None:
        descriptions = {command: {"description": text} for command, text in COMMANDS.items()}
        super().__init__(
            run=False,
            args=arguments,
            parser_class=RunParser,
            parser_kwargs={"description": _DESCRIPTION, **descriptions},
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only fit and validate; the methods' arguments come from our schema (`resume`, `data`)."""
        hidden = {"model", "datamodule", "ckpt_path", "weights_only"}
        return {
            "fit": hidden | {"train_dataloaders", "val_dataloaders"},
            "validate": hidden | {"dataloaders", "verbose"},
        }

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Build the subcommands although nothing is run by LightningCLI itself."""
        super().setup_parser(True, main_kwargs, subparser_kwargs)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that belong to no section."""
        for option, text in _EXTRA_OPTIONS.items():
            flag, _, metavar = option.partition(" ")
            shown = {"nargs": 1, "metavar": metavar} if metavar else {"nargs": 0}
            parser.add_argument(
                flag, action=_OptionOfCli, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, help=text, **shown
            )
        for setting in settings().values():
            if not setting.section:
                _add_setting(parser, setting)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add Lightning's Trainer arguments and the fields of our schema."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        in_trainer = set(parser.get_defaults().trainer.keys())
        groups = {
            section: parser.add_argument_group((cls.__doc__ or "").strip().rstrip("."), name=f"{section} section")
            for section, cls in SECTIONS.items()
        }
        defaults = {}
        for setting in settings().values():
            if setting.section == "trainer" and setting.name in in_trainer:
                defaults[setting.key] = setting.default
            elif setting.section:
                _add_setting(groups[setting.section], setting)
        defaults["trainer.devices"] = "auto"
        parser.set_defaults(defaults)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and leave nothing for LightningCLI to seed or build."""
        self.parsed = parser.parse_args(args)
        self.config = Namespace(seed_everything=False)  # type: ignore[no-untyped-call]

    def instantiate_classes(self) -> None:
        """Nothing: the trainer is built by `trainer.train`."""


def _add_setting(container: Any, setting: Setting) -> None:
    # With dict[str, Any] jsonargparse would turn texts such as "on" inside the mapping into other values.
    kind = dict | None if setting.annotation == dict[str, Any] | None else setting.annotation
    container.add_argument(f"--{setting.key}", type=kind, default=setting.default, help=setting.doc)


def parse_command_line(arguments: list[str]) -> tuple[LightningArgumentParser, Namespace]:
    """Parser and parsed values of `fit ...` or `validate ...`.

    Raises:
        ConfigError: a value has the wrong type.
        SystemExit: the help or the configuration was asked for and printed.
    """
    cli = _RunCLI(arguments)
    return cli.parser, cli.parsed


def trainer_defaults() -> dict[str, Any]:
    """Default of each argument of Lightning's Trainer, by name."""
    parameters = inspect.signature(Trainer.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "self"}


_KEY = re.compile(r'[Pp]arser key "(?:fit\.|validate\.)?([^"]+)"')
_VALUE = re.compile(r"(?:Got|Given) value: (.*)")
_EXPECTED = re.compile(r"Expected an? (?:<class '(\w+)'>|typing\.(Literal\[.*?\])|(dot import path) string)")
_CLASS_PROBLEM = re.compile(r"Problem with given class_path '([^']+)':\s*(.*?)\s*(?:\n|$)")
_SECRET_IN_TEXT = re.compile(
    r"(\w*(?:key|secret|token|password|passwd|credential)s?['\"]?\s*[:=]\s*['\"]?)[^'\",}\]\s]+", re.IGNORECASE
)
_TYPE_WORDS = {"int": "an int", "float": "a number", "str": "a text", "bool": "true or false", "list": "a list"}


def _readable_error(message: str) -> ConfigError:
    keys, value, of_class = _KEY.findall(message), _VALUE.search(message), _CLASS_PROBLEM.search(message)
    key = keys[-1] if keys else "command line"
    if of_class:
        return ConfigError(key, f"{of_class[1]}: {_masked(of_class[2])}")
    wanted = [_type_words(match) for match in _EXPECTED.finditer(message)]
    wanted = list(dict.fromkeys(word for word in wanted if word))
    if key == "trainer.precision" and value:
        rule = "one of " + ", ".join(PRECISIONS)
        return ConfigError(key, "unknown precision", found=value[1].strip(), rule=rule)
    if value and wanted:
        return ConfigError(key, f'"{mask_secrets(_masked(value[1].strip()), key)}" is not {" or ".join(wanted)}')
    reason = " ".join(_masked(_KEY.sub("", message)).strip(" :\n").split())
    return ConfigError(key, reason if len(reason) < 300 else reason[:150] + " ... " + reason[-150:])


def _type_words(match: re.Match[str]) -> str:
    name, literal, _ = match.groups()
    if literal:
        return "one of " + literal[len("Literal[") : -1].replace("'", "")
    return _TYPE_WORDS.get(name, "") if name else "a known class"


def _masked(text: str) -> str:
    return str(mask_secrets(_SECRET_IN_TEXT.sub(r"\1***", text)))
