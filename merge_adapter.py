"""Merge an adapter into its base, or convert it: python merge_adapter.py runs/lora model.pth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.adapter import MergedWeights, check_adapter, is_adapter, read_adapter, write_adapter
from trainer.checkpoint.export import EXPORT_DTYPES, save_weights
from trainer.checkpoint.foreign_adapters import read_foreign_adapter, write_peft_folder, write_rwkv_peft_file
from trainer.checkpoint.read import read_weights
from trainer.cli import run_script
from trainer.errors import ConfigError
from trainer.model.naming import shape_from_weights


def main() -> int:
    """Read the adapter and its base, write what was asked for."""
    parser = argparse.ArgumentParser(description="Merge an adapter into its base, or convert it. Runs on the CPU.")
    adapter_help = "adapter folder, checkpoint step-N or a run's folder; an RWKV-PEFT .pth; a PEFT folder"
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help=adapter_help)
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    parser.add_argument(
        "--base", metavar="MODEL", type=Path, help="its base (default: the one that adapter.json names)"
    )
    parser.add_argument("--alpha", type=float, help="of an RWKV-PEFT file, which does not hold it")
    to_help = (
        "model: base with the adapter in it; folder: of this trainer; rwkv-peft: flat .pth; peft: Hugging Face folder"
    )
    parser.add_argument("--to", choices=("model", "folder", "rwkv-peft", "peft"), default="model", help=to_help)
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, default="bf16", help="stored type of a model (default: bf16)")
    args = parser.parse_args()
    adapter = read_adapter(args.adapter) if is_adapter(args.adapter) else None
    path = args.base or (Path(adapter.info.base) if adapter is not None and adapter.info.base else None)
    if path is None:
        raise ConfigError("--base", "is needed: the adapter does not say which model it was trained on")
    base = read_weights(path)
    if adapter is None:
        adapter = read_foreign_adapter(args.adapter, base, args.alpha)
    elif args.alpha is not None:
        raise ConfigError("--alpha", "is in adapter.json already", fix="leave it out")
    if args.to == "model":
        print(save_weights(MergedWeights(base, adapter), args.out, args.dtype))
        return 0
    check_adapter(adapter, shape_from_weights(base))
    if args.to == "folder":
        write_adapter(args.out, adapter.tensors, adapter.info)
    elif args.to == "peft":
        write_peft_folder(adapter, args.out)
    else:
        print(f"alpha={write_rwkv_peft_file(adapter, args.out):g}", end=" ")
    print(f"{args.out}: method={adapter.info.method} r={adapter.info.r} tensors={len(adapter.tensors)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
