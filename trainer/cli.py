"""The programme `lightning_trainer.py`, and the one way for other scripts to read a configuration.

Command line and YAML become one frozen RunConfig here. Nothing below this layer reads environment variables
or sees a parser. Lightning is imported only once there is something to parse.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli_arguments import Arguments, files_first, read_arguments, run_name, split_words
from trainer.config import CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig
from trainer.config.checks import check_run, check_values
from trainer.config.fields import settings
from trainer.config.legacy import apply_environment
from trainer.config.yaml_files import COMMAND_LINE
from trainer.errors import ConfigError, TrainerError
from trainer.logs import get_logger, log_once, mask_secrets, set_up_logging

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

__all__ = ["main", "parse_run_config", "run_script"]

_logger = get_logger(__name__)
_COMMANDS = ("fit", "validate")
_PRECISION_SPELLINGS = {"bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "bf16-mixed"}


@dataclass(frozen=True)
class _Parsed:
    run: RunConfig
    arguments: Arguments
    parser: ArgumentParser
    namespace: Namespace
    command: str
    devices: Any


def main(argv: list[str] | None = None) -> int:
    """Run `fit` or `validate`.

    Args:
        argv: words after the programme's name; default: those of this process.

    Returns:
        The exit code: 0 done, 2 bad input or config, 3 nothing valid to resume, 4 storage, 5 non-finite
        numbers, 6 lost or hung processes, 16 a rerun that differs, 130 and 143 interrupted.
    """
    return run_script(lambda: _run_command(sys.argv[1:] if argv is None else argv))


def run_script(script: Callable[[], int | None]) -> int:
    """Run the body of a root script and return its exit code.

    A TrainerError becomes one line on stderr and its exit code, Ctrl-C becomes 130.
    """
    set_up_logging(_process_rank(os.environ))
    try:
        _arm_failpoints(os.environ.get("RWKV_FAILPOINT", ""))
        return script() or 0
    except TrainerError as error:
        sys.stderr.write(f"error: {mask_secrets(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _arm_failpoints(spec: str) -> None:
    """Make named points fail, for tests of recovery (`trainer.checkpoint.failpoints`)."""
    if spec:
        from trainer.checkpoint.failpoints import arm

        arm(spec)


def parse_run_config(argv: list[str], command: str = "fit") -> RunConfig:
    """Configuration from `-c a.yaml -c b.yaml --section.key=value ...`; a YAML file without -c is taken too.

    Builds no trainer and no model, and does not ask whether the devices exist on this machine.

    Args:
        argv: words of the command line, without a command.
        command: `fit` or `validate` also check that weights and checkpoints exist; any other name, such as
            `preload`, checks values only.

    Raises:
        ConfigError: the configuration is missing, malformed or breaks a rule.
    """
    arguments = read_arguments(files_first(split_words(argv)))
    check = check_run if command in _COMMANDS else check_values
    return _parse(arguments, command, lambda run, _: check(run)).run


def _run_command(argv: list[str]) -> int:
    if not argv:
        raise ConfigError(COMMAND_LINE, "a command is needed", rule="fit or validate", fix=_usage("fit"))
    if argv[0] in ("-h", "--help"):
        from trainer.cli_parser import parse_command_line

        parse_command_line(["--help"])
    command = argv[0]
    if command not in _COMMANDS:
        raise ConfigError(COMMAND_LINE, "unknown command", found=command, rule="fit or validate", fix=_usage("fit"))
    arguments = read_arguments(split_words(argv[1:]))
    if arguments.lone_words:
        word = arguments.lone_words[0]
        fix = f"-c {word}" if word.endswith((".yaml", ".yml")) else "options have the form --section.key=value"
        raise ConfigError(COMMAND_LINE, "unexpected word", found=word, fix=fix)
    return _execute(_parse(arguments, command, _check_here))


def _check_here(run: RunConfig, devices: Any) -> None:
    """Check that this machine can run it, then all rules."""
    _check_devices(run.accelerator, devices)
    check_run(run)


def _execute(parsed: _Parsed) -> int:
    run = parsed.run
    if parsed.command == "fit" and run.max_steps == 0:
        _logger.info("trainer.max_steps is 0: nothing to train, no checkpoint is written")
        return 0
    from trainer.train import run as train

    if parsed.arguments.is_dry_run:
        train.dry_run(run)
    else:
        train.execute(parsed.command, run, _trainer_arguments(parsed))
    return 0


def _parse(arguments: Arguments, command: str, check: Callable[[RunConfig, Any], None]) -> _Parsed:
    shown = arguments.wants_help or arguments.wants_printed_config
    if not arguments.config_files and not shown:
        raise ConfigError(COMMAND_LINE, "a config is needed", fix=_usage(command))
    arguments.check(lightning=None)
    from trainer.cli_parser import parse_command_line, trainer_defaults

    subcommand = command if command in _COMMANDS else "fit"
    if arguments.wants_help:
        parse_command_line([subcommand, *(word for word in arguments.pieces if isinstance(word, str))])
    defaults = trainer_defaults()
    arguments.check(defaults)
    try:
        parser, namespace = parse_command_line([subcommand, *arguments.words(defaults)])
        run, devices = _build_run(namespace[subcommand], arguments)
        run = apply_environment(run, os.environ, arguments.gives, arguments.notes)
        check(run, devices)
    except ConfigError as error:
        raise _located(error, arguments) from error
    for note in arguments.notes:
        log_once(_logger, "%s", note)
    return _Parsed(run, arguments, parser, namespace, subcommand, devices)


def _located(error: ConfigError, arguments: Arguments) -> ConfigError:
    """The same error with the file and line of its setting."""
    where = arguments.where(str(error.where))
    return ConfigError(where, error.problem, found=error.found, rule=error.rule, fix=error.fix)


def _build_run(values: Namespace, arguments: Arguments) -> tuple[RunConfig, Any]:
    trainer = dict(vars(values.trainer))
    for setting in settings().values():  # `null` on the command line: the default
        if setting.section == "trainer" and trainer[setting.name] is None:
            trainer[setting.name] = setting.default
    _refuse_unsupported(trainer)
    devices = _normal_devices(trainer["devices"])
    model, data, checkpoint = (dict(vars(values[name])) for name in ("model", "data", "checkpoint"))
    if checkpoint["dir"] is None:
        checkpoint["dir"] = f"runs/{run_name(arguments.config_files)}"
    ours = {field.name: trainer[field.name] for field in dataclasses.fields(TrainerConfig)}
    run = RunConfig(
        model=ModelConfig(**model),
        data=DataConfig(**data),
        trainer=TrainerConfig(**ours),
        checkpoint=CheckpointConfig(**checkpoint),
        resume=values.resume,
        precision=_PRECISION_SPELLINGS.get(str(trainer["precision"]), str(trainer["precision"])),
        strategy=str(trainer["strategy"]),
        max_steps=trainer["max_steps"],
        max_epochs=trainer["max_epochs"],
        accelerator=str(trainer["accelerator"]),
        devices=_count_devices(str(trainer["accelerator"]), devices),
        num_nodes=trainer["num_nodes"],
        seed=values.seed_everything,
    )
    return _with_accumulation(run, trainer["accumulate_grad_batches"], arguments), devices


def _refuse_unsupported(trainer: dict[str, Any]) -> None:
    for name in ("accelerator", "strategy", "precision"):
        if hasattr(trainer[name], "class_path"):
            problem = "an object cannot be given here"
            raise ConfigError(f"trainer.{name}", problem, found=trainer[name].class_path, fix="give its name")
    if trainer["gradient_clip_algorithm"] not in (None, "norm"):
        found = trainer["gradient_clip_algorithm"]
        raise ConfigError("trainer.gradient_clip_algorithm", "only norm is supported", found=found, fix="remove it")
    callbacks = trainer["callbacks"] or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if callback.class_path.endswith(".ModelCheckpoint"):
            problem = "ModelCheckpoint is read from YAML files only"
            raise ConfigError("trainer.callbacks", problem, fix="use --checkpoint.dir, --checkpoint.every_steps, ...")


def _with_accumulation(run: RunConfig, num_microbatches: int, arguments: Arguments) -> RunConfig:
    if num_microbatches == 1:
        return run
    target = num_microbatches * run.devices * run.num_nodes * run.trainer.microbatch_size
    if run.trainer.target_batch_size not in (-1, target):
        raise ConfigError(
            "trainer.accumulate_grad_batches",
            f"{num_microbatches} means trainer.target_batch_size: {target}, but that is {run.trainer.target_batch_size}",
            fix="remove it",
        )
    arguments.notes.append(f"trainer.accumulate_grad_batches is now trainer.target_batch_size: {target}")
    return dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, target_batch_size=target))


def _normal_devices(devices: Any) -> Any:
    """`auto`, a number, or a list of numbers; the command line gives numbers and lists as text."""
    if not isinstance(devices, str) or devices == "auto":
        return devices
    try:
        parts = [int(part) for part in devices.split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts:
        rule = "auto, a number, -1, or a list such as 0,1"
        raise ConfigError("trainer.devices", "not a choice of devices", found=devices, rule=rule)
    return parts if "," in devices else parts[0]


def _is_on_cpu(accelerator: str) -> bool:
    import torch

    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def _num_present(accelerator: str) -> int | None:
    """Devices of this machine (cores for a CPU); None for accelerators that are not counted here."""
    import torch

    if _is_on_cpu(accelerator):
        return os.cpu_count() or 1
    return torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else None


def _count_devices(accelerator: str, devices: Any) -> int:
    if isinstance(devices, list):
        return len(devices)
    if devices not in ("auto", -1):
        return int(devices)
    return 1 if _is_on_cpu(accelerator) else max(1, _num_present(accelerator) or 1)


def _check_devices(accelerator: str, devices: Any) -> None:
    present = _num_present(accelerator)
    if present is None:
        return
    if present == 0:
        raise ConfigError(
            "trainer.accelerator", "no GPU is present", found=accelerator, fix="--trainer.accelerator=cpu"
        )
    # Processes on a CPU may share cores: a few more than cores is how runs of several processes are tried out.
    on_cpu = _is_on_cpu(accelerator)
    most = max(4, present) if on_cpu else present
    wanted = max(devices) + 1 if isinstance(devices, list) else devices
    if wanted != "auto" and wanted > most:
        kind = "CPU core(s)" if on_cpu else "device(s)"
        raise ConfigError(
            "trainer.devices", f"{wanted} are asked for, {present} {kind} present", rule=f"at most {most}"
        )


def _trainer_arguments(parsed: _Parsed) -> dict[str, Any]:
    """Arguments for Lightning's Trainer: loggers and callbacks built, our own additions left out."""
    try:
        built = parsed.parser.instantiate(parsed.namespace)
    except (ImportError, TypeError, ValueError) as error:
        problem = f"a logger or callback cannot be built: {error}"
        raise ConfigError("trainer", problem, fix="look at trainer.logger and trainer.callbacks") from error
    arguments = dict(vars(built[parsed.command].trainer))
    taken = {field.name for field in dataclasses.fields(TrainerConfig)}
    taken |= {"accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"}
    kept = {name: value for name, value in arguments.items() if name not in taken}
    return kept | {"devices": parsed.devices, "precision": parsed.run.precision, "strategy": parsed.run.strategy}


def _process_rank(environ: Mapping[str, str]) -> int:
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def _usage(command: str) -> str:
    programme = Path(sys.argv[0]).name if sys.argv[0] else "lightning_trainer.py"
    word = f"{command} " if command in _COMMANDS else ""
    return f"{programme} {word}-c config.yaml"
