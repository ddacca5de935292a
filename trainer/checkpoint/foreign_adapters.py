"""Adapters of other trainers: RWKV-PEFT's flat file, and Hugging Face PEFT's folder.

RWKV-PEFT keeps lora_A and lora_B of each matrix under official names, with parameters trained whole beside them, and
no strength: alpha must be told. PEFT's names are those of the Hugging Face layout. A PiSSA adapter is one of twice
the rank there: B A - B0 A0 = [B, -B0] [A; A0].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.adapter import Adapter, AdapterInfo, adapter_shapes, base_fingerprint, check_adapter
from trainer.checkpoint.atomic import atomic_file
from trainer.checkpoint.read import read_pth
from trainer.checkpoint.tensorfile import load_safetensors, save_safetensors
from trainer.config.adapters import LORA_TARGETS, TRAIN_PARTS
from trainer.errors import CheckpointError, ConfigError
from trainer.model.lora import part_of
from trainer.model.naming import shape_from_weights, without_prefixes

__all__ = ["read_foreign_adapter", "write_peft_folder", "write_rwkv_peft_file"]

_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model.model.layers."
_TO_HF = {
    "att.receptance": "attn.r_proj",
    "att.key": "attn.k_proj",
    "att.value": "attn.v_proj",
    "att.output": "attn.o_proj",
    "ffn.key": "ffn.key",
    "ffn.value": "ffn.value",
}
_FROM_HF = {hf: name for name, hf in _TO_HF.items()}
_PEFT_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(\w+\.\w+)\.(lora_[AB])(?:\.default)?\.weight")
_OURS = re.compile(r"blocks\.(\d+)\.(\w+\.\w+)\.(init_)?(lora_[AB])")


def read_foreign_adapter(path: Path, base: Mapping[str, Tensor], alpha: float | None = None) -> Adapter:
    """An adapter of RWKV-PEFT (a .pth) or of PEFT (a folder), for a base.

    Args:
        path: file or folder.
        base: official weights that it was trained on; nothing in such files says so.
        alpha: of an RWKV-PEFT file, which does not hold it.

    Raises:
        CheckpointError: if it is neither, or does not fit the base.
        ConfigError: if alpha is missing, or given though the folder says it.
    """
    if (path / _PEFT_CONFIG).is_file():
        if alpha is not None:
            raise ConfigError("--alpha", f"is in the folder's {_PEFT_CONFIG} already", fix="leave it out")
        tensors, alpha = _read_peft(path)
    elif path.is_file():
        tensors = _read_flat(path)
        if alpha is None and any("lora_A" in name for name in tensors):
            problem = f"is needed: {path} does not hold it, and another value gives another model"
            raise ConfigError("--alpha", problem, fix="give the lora_alpha of the training run")
    else:
        rule = "an adapter folder, an RWKV-PEFT .pth, or a PEFT folder"
        raise CheckpointError(path, "no adapter", rule=rule)
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A")}
    if len(ranks) > 1:
        raise CheckpointError(path, "its matrices have different ranks", found=str(sorted(ranks)), rule="one rank")
    found = {match[2] for match in map(_OURS.fullmatch, tensors) if match}
    parts = {part_of(name) for name in tensors}
    info = AdapterInfo(
        method="state" if any(name.endswith("time_state") for name in tensors) else "lora" if ranks else "parts",
        r=min(ranks, default=0), alpha=float(alpha or 0) if ranks else 0.0,
        targets=tuple(name for name in LORA_TARGETS if name in found),
        train_parts=tuple(part for part in TRAIN_PARTS if part in parts),
        base_fingerprint=base_fingerprint(base),
    )  # fmt: skip
    shape = shape_from_weights(base)
    expected = adapter_shapes(info, shape)
    shaped = {n: x.reshape(expected[n]) if x.numel() == _size(expected.get(n)) else x for n, x in tensors.items()}
    adapter = Adapter(info, shaped, path)
    check_adapter(adapter, shape)
    return adapter


def _size(shape: tuple[int, ...] | None) -> int:
    return -1 if shape is None else torch.Size(shape).numel()


def _read_flat(path: Path) -> dict[str, Tensor]:
    stored = load_safetensors(path) if path.suffix in (".safetensors", ".st") else read_pth(path)
    tensors = {without_prefixes(name): tensor for name, tensor in stored.items()}
    if not any("lora_" in name or name.endswith("time_state") for name in tensors):
        problem = "holds no lora_A, lora_B or time_state"
        raise CheckpointError(path, problem, rule="an adapter file of RWKV-PEFT")
    return tensors


def _read_peft(folder: Path) -> tuple[dict[str, Tensor], float]:
    try:
        config: dict[str, Any] = json.loads((folder / _PEFT_CONFIG).read_text(encoding="utf-8"))
        kind, alpha = config.get("peft_type"), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(folder / _PEFT_CONFIG, f"cannot be read: {err}") from err
    refused = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if config.get(key)]
    if kind != "LORA" or refused:
        found = f"{refused[0]}" if refused else str(kind)
        raise CheckpointError(folder, "is not plain LoRA", found=found, rule="peft_type LORA without variants")
    tensors = {}
    for name, tensor in load_safetensors(folder / _PEFT_WEIGHTS).items():
        match = _PEFT_NAME.fullmatch(name)
        if match is None or match[2] not in _FROM_HF:
            rule = f"lora_A or lora_B of {', '.join(_FROM_HF)}"
            raise CheckpointError(folder, f"unknown tensor {name}", rule=rule)
        tensors[f"blocks.{match[1]}.{_FROM_HF[match[2]]}.{match[3]}"] = tensor
    return tensors, alpha


def _joined(adapter: Adapter) -> tuple[dict[str, Tensor], int, float]:
    """Plain LoRA tensors, rank and alpha of an adapter, whatever its method."""
    info, tensors = adapter.info, adapter.tensors
    plain = {name: x for name, x in tensors.items() if ".init_lora_" not in name}
    if info.method != "pissa":
        return plain, info.r, info.alpha
    for name in [name for name in plain if name.endswith(("lora_A", "lora_B"))]:
        start = tensors[name.replace("lora_", "init_lora_")]
        plain[name] = torch.cat((plain[name], start)) if name.endswith("A") else torch.cat((plain[name], -start), 1)
    return plain, 2 * info.r, 2 * info.alpha


def write_rwkv_peft_file(adapter: Adapter, out: Path) -> float:
    """Write an adapter as RWKV-PEFT's flat .pth; returns the alpha to merge it with, which the file cannot hold."""
    tensors, _, alpha = _joined(adapter)
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with atomic_file(out, sum(tensor.nbytes for tensor in copies.values())) as temp, open(temp, "wb") as file:
        torch.save(copies, file)
    return alpha


def write_peft_folder(adapter: Adapter, out: Path) -> None:
    """Write an adapter as a folder of Hugging Face PEFT.

    Raises:
        CheckpointError: if it holds more than LoRA, for which such folders have no place.
    """
    tensors, rank, alpha = _joined(adapter)
    more = [name for name in tensors if not _OURS.fullmatch(name)]
    if more or not tensors:
        problem = f"holds {more[0] if more else 'nothing'}, for which a PEFT folder has no place"
        raise CheckpointError(adapter.source, problem, fix="merge it into its base instead")
    named = {}
    for name, tensor in tensors.items():
        match = _OURS.fullmatch(name)
        assert match is not None
        named[f"{_PEFT_PREFIX}{match[1]}.{_TO_HF[match[2]]}.{match[4]}.weight"] = tensor.detach().contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": [_TO_HF[target] for target in adapter.info.targets], "fan_in_fan_out": False,
        "inference_mode": True, "base_model_name_or_path": adapter.info.base,
    }  # fmt: skip
    with atomic_file(out / _PEFT_WEIGHTS) as temp:
        save_safetensors(temp, named, metadata={"format": "pt"})
    with atomic_file(out / _PEFT_CONFIG) as temp:
        temp.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
