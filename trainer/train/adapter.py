"""What a run trains of its model: everything, or adapters, groups of parameters, or the state before a document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.adapter import (
    Adapter,
    adapter_shapes,
    base_fingerprint,
    check_adapter,
    info_of_run,
    parse_info,
    read_adapter,
)
from trainer.config import ModelConfig, RunConfig
from trainer.config.adapters import lora_settings, trains_adapter
from trainer.errors import CheckpointError
from trainer.model.lora import initial_adapter, part_of
from trainer.model.naming import ModelShape
from trainer.model.rwkv7 import RWKV7
from trainer.train.strategy import weight_dtype

__all__ = ["AdapterRun", "freeze", "num_trained"]

_PREFIX = "model."


def num_trained(model: ModelConfig, shape: ModelShape) -> int:
    """Parameters that a run trains."""
    if not trains_adapter(model):
        return shape.num_parameters()
    shapes = adapter_shapes(info_of_run(model, ""), shape)
    return sum(torch.Size(size).numel() for name, size in shapes.items() if ".init_lora_" not in name)


def freeze(model: RWKV7, settings: ModelConfig) -> None:
    """Leave only what the settings want trained with a gradient."""
    if not trains_adapter(settings):
        return
    parts = set(settings.train_parts or [])
    for name, parameter in model.named_parameters():
        # Adapters and states are in no group.
        parameter.requires_grad_(part_of(name) is None or part_of(name) in parts)


class AdapterRun:
    """The adapter of a run that trains one: its first values, and its form in checkpoints.

    Args:
        run: all settings.
        shape: of the base.
        base: official name -> weight; read here, not kept.

    Raises:
        CheckpointError: `model.load_adapter` does not fit the settings or the base.
    """

    def __init__(self, run: RunConfig, shape: ModelShape, base: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.info = info_of_run(run.model, base_fingerprint(base))
        path = run.model.load_adapter
        if path is not None:
            loaded = read_adapter(Path(path))
            self._check(loaded)
            tensors: Mapping[str, Tensor] = loaded.tensors
        elif (lora := lora_settings(run.model)) is not None:
            tensors = initial_adapter(base, lora, run.seed, weight_dtype(run.precision))
        elif run.model.state_tuning is not None:
            tensors = {name: torch.zeros(size) for name, size in adapter_shapes(self.info, shape).items()}
        else:
            tensors = {}
        self._initial = self._module_tensors(tensors)

    def take_initial(self) -> dict[str, Tensor]:
        """First values by the module's names; they are not kept here."""
        initial, self._initial = self._initial, {}
        return initial

    def _check(self, adapter: Adapter) -> None:
        """That an adapter was made with these settings on this base, and is whole."""
        for name in ("method", "r", "alpha", "targets", "train_parts", "shifts"):
            found, wanted = getattr(adapter.info, name), getattr(self.info, name)
            if found != wanted:
                fix = "set the run's model section as the adapter was made, or choose another adapter"
                raise CheckpointError(
                    adapter.source, f"its {name} differs", found=str(found), rule=str(wanted), fix=fix
                )
        check_adapter(adapter, self.shape, self.info.base_fingerprint)

    def tensors(self, model: RWKV7) -> dict[str, Tensor]:
        """The adapter in a model, by the names in files; under ZeRO-3 all ranks must call this."""
        trained: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        with _gathered([parameter for _, parameter in trained]):
            named = {name: tensor.detach().clone() for name, tensor in [*trained, *model.named_buffers()]}
        return self._file_tensors(named)

    def before_save(self, checkpoint: dict[str, Any], model: RWKV7) -> None:
        """Leave the base out of Lightning's checkpoint, and say which it is; all ranks call this."""
        checkpoint["adapter"] = self.info.document()
        checkpoint["state_dict"] = {_PREFIX + name: tensor for name, tensor in self.tensors(model).items()}

    def before_load(self, checkpoint: dict[str, Any], model: RWKV7, source: Path) -> None:
        """Check a checkpoint against this run, and bring it into the module's names.

        Raises:
            CheckpointError: it belongs to another base or another kind of adapter.
        """
        if "adapter" not in checkpoint:
            fix = "resume with the settings that it was made with"
            raise CheckpointError(source, "holds no adapter, but this run trains one", fix=fix)
        info = parse_info(checkpoint["adapter"], source)
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
        self._check(Adapter(info, tensors, source))
        # Strategies that shard restore parameters alone.
        for name, buffer in model.named_buffers():
            buffer.copy_(tensors[name])
        checkpoint["state_dict"] = {_PREFIX + name: x for name, x in self._module_tensors(tensors).items()}

    def _file_tensors(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States block by block, as state files have them; the rest as it is."""
        tensors = dict(named)
        for layer, wkv in enumerate(tensors.pop("time_state", ())):
            tensors[f"blocks.{layer}.att.time_state"] = wkv
        for layer, shifts in enumerate(tensors.pop("shift_state", ())):
            tensors |= {f"blocks.{layer}.{part}.shift_state": x for part, x in zip(("att", "ffn"), shifts, strict=True)}
        return tensors

    def _module_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of `_file_tensors`."""
        if self.info.method != "state":
            return dict(tensors)
        layers = range(self.shape.n_layer)
        named = {"time_state": torch.stack([tensors[f"blocks.{i}.att.time_state"] for i in layers])}
        if self.info.shifts:
            pairs = [[tensors[f"blocks.{i}.{part}.shift_state"] for part in ("att", "ffn")] for i in layers]
            named["shift_state"] = torch.stack([torch.stack(pair) for pair in pairs])
        return named


@contextlib.contextmanager
def _gathered(parameters: Iterable[Any]) -> Any:
    """Whole parameters where ZeRO-3 has sharded them."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded):
        yield
