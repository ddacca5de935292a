"""From settings to a running trainer: what `fit`, `validate` and `--dry-run` do."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from trainer.checkpoint.adapter import info_of_run, is_adapter
from trainer.checkpoint.atomic import prepare_directory, set_aside_newer, storage_errors, sweep
from trainer.checkpoint.find import resolve_resume
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.read import peek_shape
from trainer.checkpoint.verify import read_manifest
from trainer.config import RunConfig
from trainer.config.adapters import trains_adapter
from trainer.data.module import LanesDataModule
from trainer.data.work import tokenizer_of
from trainer.errors import ConfigError
from trainer.logs import get_logger, mask_secrets
from trainer.model.naming import ModelShape
from trainer.ops.wkv7 import choose_backend
from trainer.train.adapter import num_trained
from trainer.train.callbacks import METRICS_FILE, MetricsFile, RunProgress, TokenLimit
from trainer.train.checkpointing import Checkpointing, FolderCheckpointIO
from trainer.train.connection import TimeLimits, connection_errors
from trainer.train.lit_module import LitRWKV7
from trainer.train.loss_spikes import LossSpikes
from trainer.train.memory import memory_errors
from trainer.train.strategy import deepspeed_config, is_offload, lightning_precision, make_strategy, weight_dtype
from trainer.train.tracking import TolerantLogger

__all__ = ["build_trainer", "dry_run", "execute", "resolve_shape"]

_logger = get_logger(__name__)
# Settings of ours that Lightning's Trainer does not know, or that we give it ourselves.
_OURS = {"strategy", "precision", "callbacks", "plugins", "logger", "accumulate_grad_batches", "gradient_clip_val"}


def resolve_shape(run: RunConfig) -> ModelShape:
    """Sizes of the run's model: from its weight file, else from the settings and the official rules.

    Raises:
        ConfigError: if a size in the settings differs from the file.
        CheckpointError: if the file cannot be read.
    """
    model = run.model
    if model.load_model is None:
        assert model.n_layer is not None
        assert model.n_embd is not None
        vocab = model.vocab_size or _vocab_rows(run)
        return ModelShape.official(
            model.n_layer, model.n_embd, vocab, head_size=model.head_size, dim_ffn=model.dim_ffn, ranks=model.lora_ranks
        )
    shape = peek_shape(Path(model.load_model))
    for name in ("n_layer", "n_embd", "vocab_size", "dim_ffn"):
        wanted, found = getattr(model, name), getattr(shape, name)
        if wanted not in (None, -1) and wanted != found:
            rule = f"{found}, as in {model.load_model}"
            raise ConfigError(f"model.{name}", "differs from the weights", found=wanted, rule=rule, fix="leave it out")
    return shape


def _vocab_rows(run: RunConfig) -> int:
    """Rows of a fresh embedding: ids of the tokenizer, rounded up to a multiple of 16; 65536 for `world`."""
    if run.data.tokenizer == "world":
        return 65536
    tokenizer = tokenizer_of(run.data)
    return -(-tokenizer.vocab_size // 16) * 16


def _settings(run: RunConfig) -> dict[str, Any]:
    """All settings without secrets, as plain values."""
    masked = mask_secrets(dataclasses.asdict(run))
    assert isinstance(masked, dict)
    return masked


def _digest(run: RunConfig, shape: ModelShape) -> str:
    """Digest of what must not change when a run is resumed: the model's sizes, and what of it is trained."""
    facts = dataclasses.asdict(shape)
    if trains_adapter(run.model):
        facts["adapter"] = info_of_run(dataclasses.replace(run.model, load_model=None), "").document()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def build_trainer(
    run: RunConfig, trainer_arguments: dict[str, Any], *, directory: Path, callbacks: list[pl.Callback]
) -> pl.Trainer:
    """Lightning's Trainer with our strategy, precision, plug-ins and callbacks.

    Args:
        run: all settings.
        trainer_arguments: Lightning's own arguments from the `trainer:` section.
        directory: the run's folder.
        callbacks: ours; those of the user are added.
    """
    arguments = {key: value for key, value in trainer_arguments.items() if key not in _OURS}
    strategy = trainer_arguments.get("strategy")
    if arguments.get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, RunProgress)]
    arguments |= {
        "strategy": strategy if isinstance(strategy, pl.strategies.Strategy) else make_strategy(run),
        "precision": lightning_precision(run),
        "callbacks": [*callbacks, *(trainer_arguments.get("callbacks") or [])],
        "plugins": [*(trainer_arguments.get("plugins") or []), FolderCheckpointIO()],
        "logger": _tolerant(trainer_arguments.get("logger")),
        "enable_checkpointing": any(isinstance(callback, Checkpointing) for callback in callbacks),
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "max_steps": run.max_steps,
        "max_epochs": run.max_epochs if run.max_epochs is not None else (1 if _is_unlimited(run) else -1),
        "default_root_dir": str(directory),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        return pl.Trainer(**arguments)


def _tolerant(loggers: Any) -> Any:
    """The user's loggers, none of which can end the run."""
    if isinstance(loggers, Logger):
        return TolerantLogger(loggers)
    return [TolerantLogger(logger) for logger in loggers] if isinstance(loggers, list) else bool(loggers)


def _is_unlimited(run: RunConfig) -> bool:
    return run.max_steps <= 0 and run.trainer.max_tokens <= 0


def _say_plan(run: RunConfig, shape: ModelShape, trainer: pl.Trainer) -> None:
    """The facts that a user wants to see before a long run."""
    device = trainer.strategy.root_device
    dtype = weight_dtype(run.precision)
    probe = torch.empty(1, 16, shape.num_heads, shape.head_size, dtype=dtype, device=device)
    backend = choose_backend(run.model.kernel, probe)
    _logger.info(
        "model=L%d-D%d vocab=%d parameters=%s kernel=%s device=%s",
        shape.n_layer, shape.n_embd, shape.vocab_size, f"{shape.num_parameters():,}", backend, device,
    )  # fmt: skip
    trained = num_trained(run.model, shape)
    if trained < shape.num_parameters():
        _logger.info("trained=%s parameters of %s", f"{trained:,}", run.model.load_model)
    _logger.info("strategy=%s %s", run.strategy, _stored_dtypes(run))
    if run.precision == "bf16-mixed":
        _logger.info("precision=bf16-mixed means bf16 weights with float32 masters; no autocast region is entered")
    rows = (
        run.trainer.target_batch_size
        if run.trainer.target_batch_size > 0
        else run.trainer.microbatch_size * trainer.world_size
    )
    _logger.info(
        "batching=%s ctx_len=%d bptt_window=%s rows_per_step=%d microbatch=%d ranks=%d",
        run.data.batching, run.model.ctx_len, run.model.bptt_window, rows, run.trainer.microbatch_size, trainer.world_size,
    )  # fmt: skip


def _stored_dtypes(run: RunConfig) -> str:
    """What is kept in which dtype."""
    dtype = weight_dtype(run.precision)
    wide = "float64" if dtype == torch.float64 else "float32"
    gradients = wide
    if run.strategy.startswith("deepspeed"):
        gradients = {"fp32": "float32", "bf16": "bfloat16"}[deepspeed_config(run)["data_types"]["grad_accum_dtype"]]
    on_host = " (on the host)" if is_offload(run.strategy) else ""
    kept = f"master={wide}{on_host} moments={wide}{on_host} gradients={gradients} state={wide}"
    return f"weights={str(dtype).removeprefix('torch.')} {kept}"


def _say_changes(run: RunConfig, folder: Path) -> None:
    """List the settings that differ from those of the checkpoint."""
    before = read_manifest(folder).extra.get("settings")
    if not isinstance(before, dict):
        return
    for section, values in _settings(run).items():
        old = before.get(section)
        if isinstance(values, dict) and isinstance(old, dict):
            _say_change(folder, {f"{section}.{key}": (old[key], value) for key, value in values.items() if key in old})
        elif section in before and section != "resume":
            _say_change(folder, {section: (old, values)})


def _say_change(folder: Path, settings: dict[str, tuple[object, object]]) -> None:
    for name, (old, new) in settings.items():
        if json.loads(json.dumps(new)) != old:
            _logger.warning("changed since %s: %s %r -> %r", folder.name, name, old, new)


def _check_fits(run: RunConfig, shape: ModelShape, folder: Path) -> None:
    """Refuse a checkpoint that this run cannot continue."""
    manifest = read_manifest(folder)
    if manifest.config_digest != _digest(run, shape):
        problem = "the checkpoint is of a model of other sizes, or of a run that trains other parts of it"
        raise ConfigError("resume", problem, found=str(folder))


def _run_length(run: RunConfig, tokens_per_epoch: int, steps_per_epoch: int) -> tuple[int, int]:
    """Tokens and optimizer steps of the whole run, by its limits and the number of epochs; -1 = not limited by them.

    Where steps leave out parts of their documents, an epoch is counted in steps.
    """
    epochs = run.max_epochs if run.max_epochs is not None else (1 if _is_unlimited(run) else -1)
    tokens = [run.trainer.max_tokens] if run.trainer.max_tokens > 0 else []
    steps = [run.max_steps] if run.max_steps > 0 else []
    if epochs > 0 and run.model.ctx_len_cutoffs:
        steps.append(epochs * steps_per_epoch)
    elif epochs > 0:
        tokens.append(epochs * tokens_per_epoch)
    return min(tokens, default=-1), min(steps, default=-1)


def _quiet_lightning() -> None:
    """Leave out Lightning's hints and reports of what our own lines say, and warnings that users cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")


def execute(command: str, run: RunConfig, trainer_arguments: dict[str, Any]) -> None:
    """Run `fit` or `validate` to its end.

    Args:
        command: `fit` or `validate`.
        run: all settings, checked.
        trainer_arguments: Lightning's own Trainer arguments.

    Raises:
        TrainerError: whatever a user can act on, with its exit code.
    """
    _quiet_lightning()
    shape = resolve_shape(run)
    pl.seed_everything(run.seed, verbose=False)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if run.precision.startswith("bf16") else "highest")
    assert run.checkpoint.dir is not None
    directory = Path(run.checkpoint.dir)
    data = LanesDataModule(run, shape.vocab_size)
    if command == "validate":
        _validate(run, shape, trainer_arguments, data, resolve_resume(run.resume, directory))
        return
    with RunLock(directory) if _is_rank_zero() else contextlib.nullcontext():
        if _is_rank_zero():
            prepare_directory(directory, _checkpoint_bytes(run, shape))
            sweep(directory)
        _fit(run, shape, trainer_arguments, data, directory, resolve_resume(run.resume, directory))


def _is_rank_zero() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def _checkpoint_bytes(run: RunConfig, shape: ModelShape) -> int:
    """Room for one checkpoint: weights, both moments, and masters where they are kept apart."""
    bytes_per_parameter = {torch.bfloat16: 2 + 4 + 8, torch.float32: 4 + 8, torch.float64: 8 + 16}
    return num_trained(run.model, shape) * bytes_per_parameter[weight_dtype(run.precision)]


def _make_way(directory: Path, start: Path | None) -> None:
    """Move checkpoints that this run does not build on, and a copy of their metrics, out of its way."""
    is_here = start is not None and directory.resolve() in (start.parent.resolve(), start.resolve().parent)
    aside = set_aside_newer(directory, read_manifest(start).step if start is not None and is_here else -1)
    metrics = directory / METRICS_FILE
    if aside is not None and metrics.exists():
        with storage_errors(aside):
            shutil.copy2(metrics, aside)


def _fit(
    run: RunConfig,
    shape: ModelShape,
    trainer_arguments: dict[str, Any],
    data: LanesDataModule,
    directory: Path,
    resumed_from: Path | None,
) -> None:
    checkpointing = Checkpointing(run.checkpoint, directory, _digest(run, shape), _settings(run), resumed_from)
    limits = TimeLimits(run.trainer)
    callbacks: list[pl.Callback] = [
        limits,
        MetricsFile(directory, run.checkpoint.on_failure),
        RunProgress(),
        checkpointing,
    ]
    if run.trainer.loss_spikes != "off":
        callbacks.append(LossSpikes(run.trainer.loss_spikes, directory / METRICS_FILE))
    if run.trainer.max_tokens > 0:
        callbacks.append(TokenLimit(run.trainer.max_tokens))
    trainer = build_trainer(run, trainer_arguments, directory=directory, callbacks=callbacks)
    # All ranks may come here at once: the first builds, the others wait for its lock and find it done.
    data.prepare_data()
    data.setup("fit")
    data.trainer = trainer
    lanes = data.train_dataloader()
    max_tokens, max_steps = _run_length(run, lanes.total_trained_tokens, len(lanes))
    module = LitRWKV7(run, shape, max_tokens=max_tokens, max_steps=max_steps)
    _say_plan(run, shape, trainer)
    if resumed_from is not None:
        _check_fits(run, shape, resumed_from)
        _say_changes(run, resumed_from)
    if _is_rank_zero():
        _make_way(directory, resumed_from)
    start = None if resumed_from is None else read_manifest(resumed_from).step
    with checkpointing.signals, limits, connection_errors(), memory_errors(run):
        limits.wait_for_ranks(trainer)
        trainer.fit(module, datamodule=data, ckpt_path=None if resumed_from is None else str(resumed_from))
    if trainer.global_step == start:
        fix = "raise trainer.max_steps, max_tokens or max_epochs to go on"
        _logger.info("nothing left to train: %s is the end of this run; %s", resumed_from, fix)


def _validate(
    run: RunConfig, shape: ModelShape, trainer_arguments: dict[str, Any], data: LanesDataModule, folder: Path | None
) -> None:
    source = str(folder) if folder is not None else run.model.load_model
    if source is None:
        raise ConfigError("model.load_model", "nothing to validate", fix="give model.load_model, or resume: auto")
    given = {"load_adapter": source} if is_adapter(Path(source)) else {"load_model": source}
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, **given))  # type: ignore[arg-type]
    limits = TimeLimits(run.trainer)
    trainer = build_trainer(run, trainer_arguments, directory=Path("."), callbacks=[limits, RunProgress()])
    module = LitRWKV7(run, shape)
    _say_plan(run, shape, trainer)
    with limits, connection_errors():
        limits.wait_for_ranks(trainer)
        trainer.validate(module, datamodule=data, verbose=False)
    for name, value in trainer.callback_metrics.items():
        if name.startswith("validation/"):
            _logger.info("%s=%.6f", name, float(value))


def dry_run(run: RunConfig) -> None:
    """Say what a run would do and need, without touching data or a GPU."""
    shape = resolve_shape(run)
    width = 2 if run.precision.startswith("bf16") else 4
    num, trained = shape.num_parameters(), num_trained(run.model, shape)
    masters = 4 * trained if width == 2 else 0
    rows, ctx = run.trainer.microbatch_size, run.model.ctx_len
    kept = 2 if run.model.grad_cp else 40
    parts = {
        "weights": width * num,
        "masters": masters,
        "moments": 8 * trained,
        "gradients": 4 * trained,
        "activations of one chunk": kept * width * rows * ctx * shape.n_embd * shape.n_layer,
        "logits slice": 3 * 4 * min(run.model.loss_chunk_rows, rows * ctx) * shape.vocab_size,
    }
    _logger.info("model=L%d-D%d vocab=%d parameters=%s", shape.n_layer, shape.n_embd, shape.vocab_size, f"{num:,}")
    for name, size in parts.items():
        _logger.info("memory estimate: %-26s %8.2f GiB", name, size / 2**30)
    _logger.info(
        "memory estimate: %-26s %8.2f GiB per process, whatever the documents' length",
        "sum",
        sum(parts.values()) / 2**30,
    )
