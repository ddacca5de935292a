"""Export a checkpoint to one weight file: python export_checkpoint.py runs/x/step-1000 model.pth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.export import export_checkpoint
from trainer.cli import run_script

DTYPES = ["bf16", "fp32"]


def build_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Export weights to the official .pth layout or plain safetensors.")
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="step-N folder, a run's folder (newest valid step), a DeepSpeed checkpoint folder, or a weight file",
    )
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="default: rwkv_model.pth inside CKPT")
    parser.add_argument("dtype_as_third", metavar="DTYPE", choices=DTYPES, nargs="?", help="same as --dtype")
    parser.add_argument("--dtype", choices=DTYPES, help="stored type (default: bf16)")
    parser.add_argument("--format", choices=["pth", "safetensors"], help="default: by the suffix of OUT, else pth")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="open DeepSpeed shards that this trainer did not seal; they are pickles and can run any code",
    )
    return parser


def main() -> int:
    """Export, and print what was written."""
    parser = build_parser()
    args = parser.parse_args()
    if args.dtype and args.dtype_as_third and args.dtype != args.dtype_as_third:
        parser.error(f"two dtypes: {args.dtype_as_third} and --dtype {args.dtype}")
    report = export_checkpoint(
        args.checkpoint,
        args.out,
        dtype=args.dtype or args.dtype_as_third or "bf16",
        file_format=args.format,
        trust_pickle=args.trust,
    )
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
