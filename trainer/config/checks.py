"""Rules that a parsed configuration must keep, checked before anything is downloaded, built or written."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config.adapters import check_adapters
from trainer.config.deepspeed import check_deepspeed
from trainer.config.fields import settings
from trainer.config.schema import DataConfig, ModelConfig, RunConfig
from trainer.errors import ConfigError
from trainer.logs import get_logger

__all__ = ["PRECISIONS", "STRATEGIES", "check_run", "check_values"]

_logger = get_logger(__name__)

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true", "64-true")
STRATEGIES = (
    "auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
    "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
)  # fmt: skip

_FILE_KINDS = ("text", "json", "jsonl", "csv", "parquet", "arrow", "pandas")

_NOT_STREAMED = (
    "data_path", "skip_datapath_setup", "datapack_config_path", "dataset_offset", "dataset_length", "text_rechunk_auto",
    "text_rechunk_force", "sort_by_length", "reverse_train_dataset_before_save", "test_split_shuffle",
    "dataloader_swap_train_test_split",
)  # fmt: skip
"""Settings that shape a prepared data set."""

_Rule = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Rule = ("above 0", lambda value: value > 0)
_NOT_NEGATIVE: _Rule = ("0 or more", lambda value: value >= 0)
_AT_LEAST_ONE: _Rule = ("1 or more", lambda value: value >= 1)
_SHARE: _Rule = ("at least 0 and below 1", lambda value: 0 <= value < 1)
_ONE_OR_UNLIMITED: _Rule = ("1 or more, or -1 for no limit", lambda value: value >= 1 or value == -1)
_STEPS: _Rule = ("0 or more, or -1 for no limit", lambda value: value >= -1)
_SEED: _Rule = ("from 0 to 4294967295", lambda value: 0 <= value < 2**32)

_RANGES: dict[str, _Rule] = {
    "seed_everything": _SEED,
    "trainer.max_steps": _STEPS,
    "trainer.max_epochs": _STEPS,
    "trainer.devices": _AT_LEAST_ONE,
    "trainer.num_nodes": _AT_LEAST_ONE,
    "trainer.target_batch_size": ("1 or more, or -1 for one micro-batch per process", _ONE_OR_UNLIMITED[1]),
    "trainer.microbatch_size": _AT_LEAST_ONE,
    "trainer.max_tokens": _ONE_OR_UNLIMITED,
    "trainer.deterministic_order_seed": _NOT_NEGATIVE,
    "trainer.skip_non_finite": _NOT_NEGATIVE,
    "trainer.rerun_every_steps": _NOT_NEGATIVE,
    "trainer.start_timeout_s": _NOT_NEGATIVE,
    "trainer.step_timeout_s": _NOT_NEGATIVE,
    "model.n_layer": _AT_LEAST_ONE,
    "model.n_embd": _AT_LEAST_ONE,
    "model.vocab_size": _AT_LEAST_ONE,
    "model.dim_ffn": _AT_LEAST_ONE,
    "model.bptt_learning_range": ("1 or more, or -1 for all chunks", _ONE_OR_UNLIMITED[1]),
    "model.bptt_host_memory_gib": _POSITIVE,
    "model.loss_chunk_rows": _AT_LEAST_ONE,
    "model.lr_init": _POSITIVE,
    "model.lr_final": _NOT_NEGATIVE,
    "model.warmup_steps": _NOT_NEGATIVE,
    "model.beta1": _SHARE,
    "model.beta2": _SHARE,
    "model.adam_eps": _POSITIVE,
    "model.weight_decay": _NOT_NEGATIVE,
    "model.grad_clip": _NOT_NEGATIVE,
    "model.l2wrap": _NOT_NEGATIVE,
    "model.token_loss_threshold": _NOT_NEGATIVE,
    "model.token_dropout_rate": _SHARE,
    "data.min_token_size": _AT_LEAST_ONE,
    "data.max_token_size": _ONE_OR_UNLIMITED,
    "data.test_split": _NOT_NEGATIVE,
    "data.data_prefix_skip_mask": _NOT_NEGATIVE,
    "data.text_rechunk_size": ("2 or more", lambda value: value >= 2),
    "data.packing_batchsize": _AT_LEAST_ONE,
    "data.packing_chunksize": _AT_LEAST_ONE,
    "data.packing_min_ctx_len": _ONE_OR_UNLIMITED,
    "data.num_proc": _AT_LEAST_ONE,
    "data.chunks_per_step": _AT_LEAST_ONE,
    "data.streaming_shuffle_buffer": _NOT_NEGATIVE,
    "data.dataloader_prefetch_factor": _NOT_NEGATIVE,
    "checkpoint.every_steps": _NOT_NEGATIVE,
    "checkpoint.every_minutes": _NOT_NEGATIVE,
    "checkpoint.keep": _NOT_NEGATIVE,
}


def check_run(run: RunConfig) -> None:
    """Check everything that can be checked without data, model or GPU, including that named files exist.

    Raises:
        ConfigError: the first rule that is broken, by the name of its setting.
    """
    check_values(run)
    _check_weights(run.model)
    _check_resume(run)


def check_values(run: RunConfig) -> None:
    """Check the values alone; weights and checkpoints need not exist yet (to prepare data, for instance).

    Raises:
        ConfigError: the first rule that is broken, by the name of its setting.
    """
    _check_ranges(run)
    _check_choices(run)
    _check_deepspeed(run)
    _check_model(run.model)
    _check_data(run.data)
    _check_batching(run)
    _check_streaming(run)
    _check_state_tuning(run)
    _check_batch_size(run)
    check_deepspeed(run)


def value_of(run: RunConfig, key: str) -> Any:
    """Value of a setting by its key, such as `model.ctx_len`."""
    section, _, name = key.rpartition(".")
    owner = getattr(run, section) if section else run
    if name == "seed_everything":
        return run.seed
    return getattr(owner, name) if hasattr(owner, name) else getattr(run, name)


def _check_ranges(run: RunConfig) -> None:
    for key in settings():
        value = value_of(run, key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            raise ConfigError(key, "is not a finite number", found=value)
        if key in _RANGES:
            rule, holds = _RANGES[key]
            if not holds(value):
                raise ConfigError(key, "out of range", found=value, rule=rule)


def _check_choices(run: RunConfig) -> None:
    if run.precision.startswith("16") or run.precision.startswith("transformer"):
        raise ConfigError(
            "trainer.precision",
            f"{run.precision} is not supported: float16 cannot hold Adam's 1e-18 nor the state's range",
            fix="use bf16-mixed, or 32-true on cards without bf16",
        )
    if run.precision not in PRECISIONS:
        rule = "one of " + ", ".join(PRECISIONS)
        raise ConfigError("trainer.precision", "unknown precision", found=run.precision, rule=rule)
    if run.strategy not in STRATEGIES:
        rule = "one of " + ", ".join(STRATEGIES)
        raise ConfigError("trainer.strategy", "not proven yet", found=run.strategy, rule=rule)


def _check_deepspeed(run: RunConfig) -> None:
    """Refuse what a DeepSpeed engine does not let us do."""
    if not run.strategy.startswith("deepspeed"):
        return
    for name in ("skip_non_finite", "rerun_every_steps"):
        if getattr(run.trainer, name):
            problem = f"does not act with {run.strategy}, whose engine owns the gradients"
            raise ConfigError(f"trainer.{name}", problem, found=getattr(run.trainer, name), fix="use ddp, or remove it")
    for name in ("lora", "train_parts", "state_tuning"):
        if getattr(run.model, name) is not None:
            problem = f"is not proven with {run.strategy} yet"
            raise ConfigError(f"model.{name}", problem, fix="use strategy auto or ddp: frozen weights need no sharding")
    if run.checkpoint.on_failure == "warn":
        problem = f"does not act with {run.strategy}, whose processes write for themselves"
        raise ConfigError("checkpoint.on_failure", problem, found="warn", fix="use ddp, or remove it")


def _check_model(model: ModelConfig) -> None:
    if model.ctx_len < 16 or model.ctx_len % 16:
        near = max(16, round(model.ctx_len / 16) * 16)
        raise ConfigError(
            "model.ctx_len", "illegal chunk length", found=model.ctx_len, rule="a multiple of 16, at least 16",
            fix=f"nearest is {near}",
        )  # fmt: skip
    _check_schedules(model)
    check_adapters(model)
    if model.head_size < 16 or model.head_size % 16:
        rule = "a multiple of 16, at least 16"
        raise ConfigError("model.head_size", "illegal head size", found=model.head_size, rule=rule)
    if model.n_embd is not None and model.n_embd % model.head_size:
        near = max(1, round(model.n_embd / model.head_size)) * model.head_size
        rule = f"a multiple of model.head_size {model.head_size}"
        raise ConfigError("model.n_embd", "illegal width", found=model.n_embd, rule=rule, fix=f"nearest is {near}")
    if model.bptt_window != "full" and model.bptt_window < 1:
        raise ConfigError("model.bptt_window", "out of range", found=model.bptt_window, rule="1 or more, or full")
    if model.lr_final is not None and model.lr_final > model.lr_init:
        rule = f"at most model.lr_init {model.lr_init}"
        raise ConfigError("model.lr_final", "above the peak learning rate", found=model.lr_final, rule=rule)
    unknown = set(model.lora_ranks or {}) - {"w", "a", "v", "g"}
    if unknown:
        raise ConfigError("model.lora_ranks", f"unknown gate {min(unknown)}", rule="given for w, a, v and g")
    for gate, rank in (model.lora_ranks or {}).items():
        if rank < 1:
            raise ConfigError(f"model.lora_ranks.{gate}", "out of range", found=rank, rule="1 or more")


def _check_schedules(model: ModelConfig) -> None:
    pairs = model.ctx_len_schedule or []
    steps = [pair[0] for pair in pairs if pair]
    lengths = [pair[-1] for pair in pairs if pair]
    if any(len(pair) != 2 for pair in pairs) or (pairs and (steps[0] != 0 or not _rises(steps))):
        rule = "pairs [step, tokens] whose steps rise from 0, such as [[0, 512], [1000, 2048]]"
        raise ConfigError("model.ctx_len_schedule", "is malformed", found=str(pairs), rule=rule)
    bad = [length for length in lengths if length % 16 or not 16 <= length <= model.ctx_len]
    if bad:
        rule = f"a multiple of 16, at most model.ctx_len {model.ctx_len}"
        raise ConfigError("model.ctx_len_schedule", "illegal chunk length", found=bad[0], rule=rule)
    cutoffs, ends = model.ctx_len_cutoffs or [], model.ctx_len_warmup_steps or []
    if len(cutoffs) != len(ends):
        problem = f"has {len(cutoffs)} lengths, but model.ctx_len_warmup_steps has {len(ends)} steps"
        raise ConfigError("model.ctx_len_cutoffs", problem, fix="give one step for each length")
    for name, values in (("ctx_len_cutoffs", cutoffs), ("ctx_len_warmup_steps", ends)):
        if values and (values[0] < 1 or not _rises(values)):
            raise ConfigError(f"model.{name}", "does not rise", found=str(values), rule="rising numbers from 1 on")


def _rises(values: list[int]) -> bool:
    return all(low < high for low, high in pairwise(values))


def _check_data(data: DataConfig) -> None:
    is_mixture = data.sources is not None or data.datapack_config_path is not None
    if data.source is None and data.data_path is None and not is_mixture:
        problem = "neither data.source nor data.data_path is given"
        raise ConfigError("data.source", problem, fix="name the source, or a folder of prepared data in data.data_path")
    if data.source in _FILE_KINDS and data.data_path is None and not data.streaming:
        raise ConfigError("data.data_path", "missing", fix="give a folder where the prepared data may be kept")
    for entry in data.skip_batches or []:
        if len(entry) != 3 or min(entry) < 0 or entry[1] > entry[2]:
            rule = "[epoch, first, last], counted from 0, first at most last"
            raise ConfigError("data.skip_batches", "is malformed", found=str(entry), rule=rule)
    for name in ("dataset_offset", "dataset_length"):
        value = getattr(data, name)
        if (value >= 1 and value != int(value)) or (value < 0 and value != -1):
            rule = "a share below 1, a whole number of records, or -1"
            raise ConfigError(f"data.{name}", "neither share nor count", found=value, rule=rule)
    if data.test_split > 1 and data.test_split != int(data.test_split):
        rule = "a share below 1, or a whole number of documents"
        raise ConfigError("data.test_split", "neither share nor count", found=data.test_split, rule=rule)
    if data.max_token_size != -1 and data.max_token_size < data.min_token_size:
        rule = f"at least data.min_token_size {data.min_token_size}"
        raise ConfigError("data.max_token_size", "no document can pass", found=data.max_token_size, rule=rule)


def _check_batching(run: RunConfig) -> None:
    batching, window, chunks = run.data.batching, run.model.bptt_window, run.data.chunks_per_step
    if batching == "windows" and not _reads_binidx(run.data):
        raise ConfigError(
            "data.batching", "windows reads the flat token stream of a binidx file",
            found=f"data.source {run.data.source}", fix="set data.source: binidx, or data.batching: stream",
        )  # fmt: skip
    if batching == "stream" and window != "full" and window > chunks:
        raise ConfigError(
            "model.bptt_window", f"{window} chunks are more than data.chunks_per_step {chunks}",
            rule="at most data.chunks_per_step in stream batching: gradients end at the optimizer step",
            fix=f"set data.chunks_per_step: {window}, or model.bptt_window: full",
        )  # fmt: skip
    if batching != "documents" and run.data.packing_enable:
        raise ConfigError(
            "data.packing_enable", f"acts only with data.batching: documents, not {batching}", found=True,
            fix="remove it: stream and windows have no padding",
        )  # fmt: skip
    if run.data.packing_enable and run.model.bptt_learning_range != -1:
        raise ConfigError(
            "data.packing_enable", "cannot be used with model.bptt_learning_range, which counts the chunks of a document",
            found=True, fix="remove one of them",
        )  # fmt: skip
    if batching != "stream" and chunks != 1:
        raise ConfigError(
            "data.chunks_per_step",
            f"acts only with data.batching: stream, not {batching}",
            found=chunks,
            fix="remove it",
        )
    if run.model.ctx_len_cutoffs and (batching != "documents" or run.data.packing_enable):
        raise ConfigError(
            "model.ctx_len_cutoffs", "acts only with data.batching: documents and without packing",
            found=str(run.model.ctx_len_cutoffs), fix="remove it",
        )  # fmt: skip
    if batching != "documents" and run.model.bptt_learning_range != -1:
        raise ConfigError(
            "model.bptt_learning_range", f"acts only with data.batching: documents, not {batching}",
            found=run.model.bptt_learning_range, fix="remove it",
        )  # fmt: skip


def _check_streaming(run: RunConfig) -> None:
    data, default = run.data, DataConfig()
    if not data.streaming:
        if data.streaming_shuffle_buffer != default.streaming_shuffle_buffer:
            raise ConfigError(
                "data.streaming_shuffle_buffer", "acts only with data.streaming", found=data.streaming_shuffle_buffer,
                fix="remove it",
            )  # fmt: skip
        return
    if data.batching != "stream":
        raise ConfigError("data.batching", "does not suit data.streaming", found=data.batching, rule="stream")
    for name in _NOT_STREAMED:
        if getattr(data, name) != getattr(default, name):
            raise ConfigError(f"data.{name}", "has no meaning with data.streaming", fix="remove it")
    if run.model.token_dropout_rate:
        raise ConfigError("model.token_dropout_rate", "is not done with data.streaming", fix="remove it")
    if data.source is None and data.sources is None:
        raise ConfigError("data.source", "is not set, and data.streaming reads it", fix="name the source")
    if run.max_epochs not in (None, -1):
        raise ConfigError(
            "trainer.max_epochs", "has no meaning with data.streaming: how long a pass is, is not known",
            found=run.max_epochs, fix="set trainer.max_steps or trainer.max_tokens",
        )  # fmt: skip
    if run.max_steps < 0 and run.trainer.max_tokens < 0:
        raise ConfigError(
            "trainer.max_steps", "is not set, and with data.streaming the data have no end",
            fix="set it, or trainer.max_tokens",
        )  # fmt: skip


def _check_state_tuning(run: RunConfig) -> None:
    """A trained state is put before documents: each must start with a chunk of its own."""
    if run.model.state_tuning is None:
        return
    if run.data.batching != "documents":
        problem = f"is put before each document, which data.batching: {run.data.batching} does not keep apart"
        raise ConfigError("model.state_tuning", problem, fix="set data.batching: documents")
    if run.data.packing_enable:
        problem = "is put before each document, which data.packing_enable joins to one row"
        raise ConfigError("model.state_tuning", problem, fix="set data.packing_enable: false")


def _reads_binidx(data: DataConfig) -> bool:
    if data.source == "binidx":
        return True
    name = data.source or data.data_path or ""
    prefix = Path(name).with_suffix("") if name.endswith((".bin", ".idx")) else Path(name)
    return data.source not in _FILE_KINDS and prefix.with_name(f"{prefix.name}.idx").exists()


def _check_batch_size(run: RunConfig) -> None:
    processes = run.devices * run.num_nodes
    target, unit = run.trainer.target_batch_size, processes * run.trainer.microbatch_size
    if target == -1 or target % unit == 0:
        return
    below, above = target // unit * unit, (target // unit + 1) * unit
    near = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        "trainer.target_batch_size",
        f"cannot be shared equally by {processes} process(es) (trainer.devices{' x trainer.num_nodes' if run.num_nodes > 1 else ''}) "
        f"x {run.trainer.microbatch_size} row(s) "
        "(trainer.microbatch_size)",
        found=target,
        rule=f"a multiple of {unit}",
        fix=f"nearest is {near}",
    )


def _check_weights(model: ModelConfig) -> None:
    if model.load_model is None:
        missing = [name for name in ("n_layer", "n_embd") if getattr(model, name) is None]
        if missing:
            problem = f"no weights are named, and model.{missing[0]} is missing"
            raise ConfigError(
                "model.load_model", problem, fix="name a weight file, or give model.n_layer and model.n_embd"
            )
        adapters = [
            name
            for name in ("lora", "train_parts", "state_tuning", "load_adapter")
            if getattr(model, name) not in (None, [])
        ]
        if adapters:
            raise ConfigError(f"model.{adapters[0]}", "needs weights to start from", fix="give model.load_model")
        return
    path = Path(model.load_model)
    if not path.exists():
        raise ConfigError("model.load_model", "file does not exist", found=model.load_model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            "model.load_model", "is a folder, not weights", found=model.load_model,
            rule="a .pth or .safetensors file, or a Hugging Face folder with its config.json", fix="name the file inside it",
        )  # fmt: skip


def _check_resume(run: RunConfig) -> None:
    if run.resume not in ("auto", "never") and not Path(run.resume).exists():
        raise ConfigError("resume", "checkpoint does not exist", found=run.resume, rule="auto, never, or a checkpoint")
