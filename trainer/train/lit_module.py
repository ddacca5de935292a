"""The LightningModule: one `training_step` is one optimizer step, whatever the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.bptt.step import ChunkInput, Engine, StepOptions, StepResult, evaluate_step, run_step
from trainer.checkpoint.read import read_weights
from trainer.config import RunConfig
from trainer.config.adapters import lora_settings, state_tuning, trains_adapter
from trainer.data.lanes import StepBatch
from trainer.errors import NonFiniteError
from trainer.evaluate.losses import LossSums
from trainer.logs import get_logger
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape, canonical_weights
from trainer.model.rwkv7 import RWKV7
from trainer.model.state import ModelState, state_tensors
from trainer.train.adapter import AdapterRun, freeze
from trainer.train.bad_steps import SkippedSteps, run_twice
from trainer.train.lane_states import LaneStates
from trainer.train.local_engine import LocalEngine, chunk_loss
from trainer.train.optim import MasterAdamW, clip_by_global_norm, parameter_groups
from trainer.train.schedule import Position, Schedule, chunk_length
from trainer.train.strategy import (
    DeepSpeedChunks,
    average_over_ranks,
    check_gradients,
    is_deepspeed,
    is_offload,
    load_weights,
    watch_gradients,
    weight_dtype,
)

__all__ = ["LitRWKV7"]

_logger = get_logger(__name__)
# Above this a GPU is busy longer than Python needs to launch its work.
_GRAPH_TOKENS = 16384


class LitRWKV7(pl.LightningModule):
    """RWKV-7 in training.

    Args:
        run: all settings.
        shape: sizes of the model, as `trainer.train.run.resolve_shape` finds them.
        max_tokens: tokens of the whole run, for the schedule and the time left; -1 = not known.
        max_steps: optimizer steps of the whole run, for the same; -1 = not known.
    """

    def __init__(self, run: RunConfig, shape: ModelShape, *, max_tokens: int = -1, max_steps: int = -1) -> None:
        super().__init__()
        self.run, self.shape = run, shape
        self.automatic_optimization = False
        self.schedule = Schedule.from_config(run.model, max_tokens=max_tokens, max_steps=max_steps)
        self.progress: dict[str, int] = {
            "tokens": 0,
            "samples": 0,
            "tokens_at_warmup_end": 0,
            "skipped_steps": 0,
        }
        self.chunk_tokens = chunk_length(run.model, 0)
        """Tokens per chunk of the current step."""
        self.data_position: dict[str, Any] | None = None
        self.lanes = LaneStates()
        self.bad_gradient = torch.zeros(())
        self.skipped = SkippedSteps(run.trainer.skip_non_finite, run.data.skip_batches or [])
        self.last_metrics: dict[str, float] = {}
        self.stop_signal = 0
        """Number of the signal that asked this rank to stop; 0 = none."""
        self.agreed_signal = 0
        """The same, known to all ranks at the end of a step."""
        self.train_sources: dict[str, float] = {}
        """Mean loss of each source of a mixture, as of the last log interval."""
        self.adapter: AdapterRun | None = None
        """What a run trains that does not train everything."""
        self.strict_loading = not trains_adapter(run.model)
        self._sums: dict[str, LossSums] = {}
        self._initial: Mapping[str, Tensor] | None = None
        self._engine: Engine | None = None

    # ---- building

    def configure_model(self) -> None:
        """Build the model (under ZeRO-3 inside DeepSpeed's sharding context) and load its first weights."""
        if hasattr(self, "model"):
            return
        model = self.run.model
        with _default_dtype(weight_dtype(self.run.precision)):
            self.model = RWKV7(
                self.shape, model.kernel, model.grad_cp, self._compiled_tokens(),
                lora=lora_settings(model), tuning=state_tuning(model),
            )  # fmt: skip
        freeze(self.model, model)
        if not is_deepspeed(self.trainer.strategy):
            self.load_initial_weights()

    def load_initial_weights(self) -> None:
        """Load the weights that the run starts from.

        `ZeroStrategy` calls this outside of its sharding context, in which every new tensor has the dtype and
        device of the model. Under ZeRO-3 the first rank alone reads or makes them, and hands out one at a time:
        a copy of all weights on every rank may not fit on the host.
        """
        is_sharded = any(hasattr(parameter, "ds_id") for parameter in self.model.parameters())
        trains_part = trains_adapter(self.run.model)
        # Every rank of a run with an adapter needs the base's fingerprint.
        reads = self.trainer.is_global_zero or not is_sharded or trains_part
        weights = self.initial_weights() if reads else {}
        if trains_part:
            self.adapter = AdapterRun(self.run, self.shape, weights)
            weights = {**weights, **self.adapter.take_initial()}
        load_weights(self.model, weights)
        self._initial = None if is_deepspeed(self.trainer.strategy) else weights

    def _compiled_tokens(self) -> int:
        wanted = self.run.model.compile
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        suits = on_gpu and self.run.precision.startswith("bf16") and not self.run.strategy.startswith("deepspeed")
        is_on = wanted == "on" or (wanted == "auto" and suits and not trains_adapter(self.run.model))
        return self.chunk_tokens if is_on else 0

    @property
    def _has_dropout(self) -> bool:
        lora = lora_settings(self.run.model)
        return lora is not None and lora.dropout > 0

    def initial_weights(self) -> dict[str, Tensor]:
        """Weights the run starts from, by official name, before rounding to the training dtype."""
        path = self.run.model.load_model
        if path is None:
            return init_weights(self.shape, self.run.seed)
        return canonical_weights(read_weights(Path(path)), Path(path))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with the official groups; under DeepSpeed its engine owns the master weights."""
        groups = parameter_groups(self.model.named_parameters(), self.run.model)
        model = self.run.model
        if is_deepspeed(self.trainer.strategy):
            betas = (model.beta1, model.beta2)
            # On the host the fused one takes a fraction of the time of the plain one, and needs no compiler.
            is_fused = True if is_offload(self.run.strategy) else None
            optimizer = torch.optim.AdamW(groups, lr=model.lr_init, betas=betas, eps=model.adam_eps, fused=is_fused)
        else:
            optimizer = MasterAdamW(groups, model, self._initial)
        self._initial = None
        return optimizer

    # ---- forward

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weight_BT: Tensor,
        reset_BT: Tensor | None,
        state: ModelState,
        with_loss: bool,
        group_BT: Tensor | None = None,
        group_sums_2G: Tensor | None = None,
        is_start: bool = False,
        seed: int | None = None,
    ) -> tuple[Tensor | None, ModelState]:
        """Weighted loss of one chunk (None without `with_loss`) and the state after it.

        This is the call that DeepSpeed wraps: see `DeepSpeedChunks`.
        """
        chunk = ChunkInput(ids_BT, targets_BT, weight_BT, reset_BT, state, group_BT, group_sums_2G, is_start, seed)
        return chunk_loss(self.model, chunk, self.run.model, with_loss=with_loss)

    # ---- training

    def on_fit_start(self) -> None:
        """Watch gradients where the strategy updates without showing them."""
        if is_deepspeed(self.trainer.strategy):
            watch_gradients(self)

    def engine(self) -> Engine:
        """What runs chunks: DeepSpeed's engine, or the module itself."""
        if self._engine is None:
            if is_deepspeed(self.trainer.strategy):
                self._engine = DeepSpeedChunks(self)
            else:
                self._engine = LocalEngine(self.model, self.run.model, graphs=self._uses_graphs())
        return self._engine

    def _uses_graphs(self) -> bool:
        wanted, tokens = self.run.model.cuda_graphs, self.run.trainer.microbatch_size * self.run.model.ctx_len
        suits = tokens <= _GRAPH_TOKENS and not self.run.model.grad_cp and not trains_adapter(self.run.model)
        return wanted == "on" or (wanted == "auto" and suits)

    @property
    def position(self) -> Position:
        """How far the run has come."""
        return Position(self.global_step, self.progress["tokens"], self.progress["tokens_at_warmup_end"])

    def step_options(self) -> StepOptions:
        """What `trainer.bptt.step` needs of the settings."""
        model, trainer = self.run.model, self.run.trainer
        rows = trainer.target_batch_size
        per_rank = trainer.microbatch_size if rows < 0 else -(-rows // self.trainer.world_size)
        return StepOptions(
            ctx_len=self.chunk_tokens,
            window=model.bptt_window,
            learning_range=model.bptt_learning_range,
            host_memory_bytes=int(model.bptt_host_memory_gib * 2**30),
            num_micro=max(1, -(-per_rank // trainer.microbatch_size)),
            micro_rows=trainer.microbatch_size,
            seed=self._step_seed() if self._has_dropout else None,
        )

    def _step_seed(self) -> str:
        """The same for a step whether or not the run was interrupted before it."""
        return f"{self.run.seed}:{self.global_step}:{self.progress['skipped_steps']}:{self.global_rank}"

    def training_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Gradients of all chunks, checks, clipping, update, metrics."""
        if self.skipped.passes_over(batch):
            self._go_on_after(batch, [None] * len(batch.microbatches))
            return
        self._use_chunk_length(chunk_length(self.run.model, self.global_step))
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        lr = self.schedule.lr(self.position)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        every = self.run.trainer.rerun_every_steps
        if every and (self.global_step + 1) % every == 0:
            result = run_twice(self, optimizer.optimizer, lambda: self._run_chunks(batch))  # type: ignore[arg-type]
        else:
            result = self._run_chunks(batch)
        try:
            clipped = self._clip(optimizer)  # before anything is read, so that the GPU is waited for once
            loss, tokens, samples = self._reduce_losses(result, batch)
            if not torch.isfinite(torch.tensor(loss)):
                self._stop_non_finite(result, batch)
            norm = self._update(optimizer, clipped)
        except NonFiniteError as error:
            self._leave_out(error, batch, result)
            return
        self.skipped.trained()
        for micro, state in zip(batch.microbatches, result.states, strict=False):
            self.lanes.keep(micro.lane_ids, state)
        self.loss_sums("train").end_step(result.total_weight / self.trainer.world_size)
        self._count(tokens, samples, batch.position)
        self._log_step(loss, norm, lr, result)

    def _use_chunk_length(self, num_tokens: int) -> None:
        """Cut documents into chunks of this length from this step on."""
        if num_tokens == self.chunk_tokens:
            return
        self.chunk_tokens = num_tokens
        is_compiled = self.model.compiled_tokens > 0
        anew = ": full chunks of a new length are compiled anew" if is_compiled else ""
        _logger.info("step=%d ctx_len=%d%s", self.global_step + 1, num_tokens, anew)
        if is_compiled:
            self.model.compiled_tokens = num_tokens
        if isinstance(self._engine, LocalEngine):
            self._engine.use_chunks_of(num_tokens)

    def _run_chunks(self, batch: StepBatch) -> StepResult:
        """Gradients of all chunks, and what else they leave."""
        return run_step(
            self.engine(),
            batch.microbatches,
            [self.lanes.get(micro.lane_ids) for micro in batch.microbatches],
            self.step_options(),
            device=self.device,
            world_size=self.trainer.world_size,
            gather=self.gather_numbers,
            group_sums_2G=self.loss_sums("train").step_2G,
        )

    def _leave_out(self, error: NonFiniteError, batch: StepBatch, result: StepResult) -> None:
        """Go on after a step that is not finite as if it had not been, but with the data that follow.

        Raises:
            NonFiniteError: if that is not allowed (again).
        """
        self.skipped.leave_out(error, batch)
        optimizer: Any = self.optimizers()
        optimizer.optimizer.zero_grad()
        self.loss_sums("train").step_2G.zero_()
        self._go_on_after(batch, result.states)

    def _go_on_after(self, batch: StepBatch, states: Sequence[ModelState | None]) -> None:
        """Count a step that was left out; lanes whose state is unknown or not finite start anew."""
        for micro, state in zip(batch.microbatches, states, strict=False):
            is_finite = state is not None and all(bool(torch.isfinite(x).all()) for x in state_tensors(state))
            self.lanes.keep(micro.lane_ids, state if is_finite else self.engine().zero_state(len(micro.lengths)))
        self.progress["skipped_steps"] += 1
        self.data_position = batch.position

    def _clip(self, optimizer: Any) -> Tensor | None:
        """Clip the step's gradient: its global norm, for which nobody waits yet; None = DeepSpeed does it."""
        if is_deepspeed(self.trainer.strategy):
            return None
        flat = optimizer.optimizer.flat_gradients()
        average_over_ranks(flat, self.trainer.world_size)
        return clip_by_global_norm(flat, self.run.model.grad_clip)

    def _update(self, optimizer: Any, clipped: Tensor | None) -> float:
        """Check and apply the step's gradient; returns its global norm."""
        if clipped is None:
            check_gradients(self)
            optimizer.step()
            deepspeed_engine: Any = self.trainer.strategy.model
            return float(deepspeed_engine.get_global_grad_norm() or 0.0)
        inner: MasterAdamW = optimizer.optimizer
        norm = float(clipped)
        if not norm < float("inf"):
            sums = inner.gradients()
            trained = [name for name, _ in self.model.named_parameters() if name in sums]
            bad = [name for name in trained if not bool(torch.isfinite(sums[name]).all())]
            raise NonFiniteError(
                f"step {self.global_step + 1}",
                "the gradient is not finite",
                found=f"{len(bad)} tensors; nearest to the loss is {bad[-1]}" if bad else "their norm overflows",
            )
        optimizer.step()
        inner.zero_grad()
        return norm

    def _reduce_losses(self, result: StepResult, batch: StepBatch) -> tuple[float, int, int]:
        """Mean loss, tokens and rows of the step over all ranks."""
        local = float(torch.stack(result.losses).sum()) / self.trainer.world_size if result.losses else 0.0
        rows = sum(len(micro.lengths) for micro in batch.microbatches)
        ranks = self.gather_numbers([local, float(batch.num_tokens), float(rows), float(self.stop_signal)])
        loss, tokens, samples, _ = (sum(column) for column in zip(*ranks, strict=True))
        self.agreed_signal = int(max(rank[3] for rank in ranks))
        return loss, int(tokens), int(samples)

    def _count(self, tokens: int, samples: int, position: dict[str, Any] | None) -> None:
        self.progress["tokens"] += tokens
        self.progress["samples"] += samples
        if self.global_step <= self.schedule.warmup_steps:
            self.progress["tokens_at_warmup_end"] = self.progress["tokens"]
        self.data_position = position

    def _log_step(self, loss: float, norm: float, lr: float, result: StepResult) -> None:
        self.last_metrics = {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/tokens": self.progress["tokens"],
        }
        self.last_metrics["train/samples"] = self.progress["samples"]
        if self.trainer.world_size > 1:
            self.last_metrics["perf/waiting_share"] = result.waiting_share
        for name, value in self.last_metrics.items():
            self.log(name, float(value), rank_zero_only=True)
        every = getattr(self.trainer, "log_every_n_steps", 0)
        if every and self.global_step % every == 0:
            table = self.loss_sums("train").take(self.gather_numbers)
            self.train_sources = table.by_source()
            self.log_dict(table.metrics("train"), rank_zero_only=True)
            self.last_metrics |= table.metrics("train")
        states = [state for state in result.states if state is not None]
        if every and self.global_step % every == 0 and states:
            for layer, entry in enumerate(states[-1]):
                self.log(f"state/layer_{layer:02d}_wkv_norm", entry.wkv.norm(), rank_zero_only=True)

    def loss_sums(self, stage: str) -> LossSums:
        """Losses by source and position of `train` or `validation`."""
        if stage not in self._sums:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self._sums[stage] = LossSums(data.source_names, self.device)
        return self._sums[stage]

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's list of numbers, in rank order; one collective."""
        if self.trainer.world_size == 1:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        all_ranks = [torch.empty_like(own) for _ in range(self.trainer.world_size)]
        dist.all_gather(all_ranks, own)
        return [rank.tolist() for rank in all_ranks]

    # ---- faults

    def _stop_non_finite(self, result: StepResult, batch: StepBatch) -> None:
        """Say which chunk and layer went wrong first. Nothing has been updated."""
        values = torch.stack(result.losses).tolist() if result.losses else []
        bad = [label for label, value in zip(result.labels, values, strict=True) if not abs(value) < float("inf")]
        if not bad:
            raise NonFiniteError(
                f"step {self.global_step + 1}", "the loss is not finite on another rank; see its message"
            )
        micro, chunk = min(bad)
        # Under ZeRO-3 running a layer needs the other ranks, which have no reason to.
        is_sharded = hasattr(self.model.emb.weight, "ds_id")
        layer = "a layer of this rank" if is_sharded else self._first_bad_layer(batch, micro, chunk)
        raise NonFiniteError(
            f"step {self.global_step + 1}, micro-batch {micro}, chunk {chunk}",
            "the loss is not finite",
            found=f"first non-finite output in {layer}",
        )

    @torch.no_grad()
    def _first_bad_layer(self, batch: StepBatch, micro: int, chunk: int) -> str:
        """Replay the rows up to the bad chunk and watch every block."""
        rows, ctx_len = batch.microbatches[micro], self.chunk_tokens
        state = self.lanes.get(rows.lane_ids) or self.engine().zero_state(len(rows.lengths))
        found: list[str] = []
        watched = [
            ("emb", self.model.emb),
            *((f"blocks.{i}", b) for i, b in enumerate(self.model.blocks)),
            ("ln_out", self.model.ln_out),
        ]
        hooks = [module.register_forward_hook(_watch(name, found)) for name, module in watched]
        try:
            for index in range(chunk + 1):
                part = slice(index * ctx_len, (index + 1) * ctx_len)
                ids, reset = rows.ids_BT[:, part].to(self.device), rows.reset_BT[:, part].to(self.device)
                _, state = self.model(ids, state, reset)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else "the head"

    # ---- validation

    def on_validation_epoch_start(self) -> None:
        """Start a new mean."""
        self.loss_sums("validation").reset()

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Add one batch of whole documents to the mean loss per token; none after a signal to stop."""
        if self.agreed_signal:
            return
        evaluate_step(
            self.engine(),
            batch.microbatches,
            self.step_options(),
            device=self.device,
            gather=self.gather_numbers,
            group_sums_2G=self.loss_sums("validation").step_2G,
        )
        self.loss_sums("validation").end_step()

    def on_validation_epoch_end(self) -> None:
        """Log the mean over all ranks."""
        table = self.loss_sums("validation").take(self.gather_numbers)
        self.log("validation/loss", table.loss, rank_zero_only=True, prog_bar=True)
        self.log_dict(table.metrics("validation"), rank_zero_only=True)
        self.log("validation/perplexity", float(torch.tensor(table.loss).exp()), rank_zero_only=True)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters and the data position, equal on all ranks; per-rank state is saved beside it."""
        checkpoint["progress"] = dict(self.progress)
        checkpoint["data_position"] = self.data_position
        if self.adapter is not None:
            self.adapter.before_save(checkpoint, self.model)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters come back here, the data position through the data module."""
        if self.adapter is not None:
            self.adapter.before_load(checkpoint, self.model, Path(str(self.trainer.ckpt_path)))
        self.progress |= checkpoint["progress"]
        self.data_position = checkpoint["data_position"]
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        data.seek(self.data_position)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build parameters in `dtype`; a later cast would miss those that ZeRO-3 has sharded already."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _watch(name: str, found: list[str]) -> Any:
    def hook(_module: object, _inputs: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not bool(torch.isfinite(first).all()):
            found.append(name)

    return hook
