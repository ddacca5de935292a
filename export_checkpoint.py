"""Export a checkpoint to a weight file or folder: python export_checkpoint.py runs/x/step-1000 model.pth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.export import EXPORT_DTYPES, EXPORT_FORMATS, export_checkpoint
from trainer.checkpoint.hf_folder import HfOptions
from trainer.cli import run_script
from trainer.errors import ConfigError


def build_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Export weights as .pth, safetensors or a Hugging Face folder.")
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="step-N folder, a run's folder (newest valid step), a DeepSpeed checkpoint folder, or a weight file",
    )
    out_help = "default: rwkv_model.pth, or the folder rwkv_model_hf, inside CKPT"
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help=out_help)
    parser.add_argument("dtype_as_third", metavar="DTYPE", choices=EXPORT_DTYPES, nargs="?", help="same as --dtype")
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, help="stored type (default: bf16)")
    format_help = "hf: a folder that transformers loads; hf-fla: for flash-linear-attention (default: by OUT, else pth)"
    parser.add_argument("--format", choices=EXPORT_FORMATS, help=format_help)
    tokenizer_help = "for a folder: auto (by vocabulary size), world, byte, none, or a tokenizer's path (default: auto)"
    parser.add_argument("--tokenizer", default="auto", help=tokenizer_help)
    shard_help = "for a folder: largest weight file in GB (default: 5)"
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help=shard_help)
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
    if not args.max_shard_gb > 0:
        raise ConfigError("--max-shard-gb", "out of range", found=args.max_shard_gb, rule="above 0")
    report = export_checkpoint(
        args.checkpoint,
        args.out,
        dtype=args.dtype or args.dtype_as_third or "bf16",
        file_format=args.format,
        trust_pickle=args.trust,
        hf=HfOptions(tokenizer=args.tokenizer, max_shard_bytes=int(args.max_shard_gb * 10**9)),
    )
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
