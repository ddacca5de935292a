"""Export a checkpoint to a weight file or folder: python export_checkpoint.py runs/x/step-1000 model.pth."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.export import EXPORT_DTYPES, EXPORT_FORMATS, export_checkpoint
from trainer.checkpoint.hf_folder import HfOptions
from trainer.checkpoint.hf_tokenizer import pick_tokenizer_name
from trainer.cli import run_script
from trainer.errors import ConfigError


def add_output_options(parser: argparse.ArgumentParser, dtype: str = "that of MODEL") -> None:
    """Options about what is written; scripts that make models have them too."""
    parser.add_argument("--dtype", choices=EXPORT_DTYPES, help=f"stored type (default: {dtype})")
    format_help = "hf: a folder that transformers loads; hf-fla: for flash-linear-attention (default: by OUT, else pth)"
    parser.add_argument("--format", choices=EXPORT_FORMATS, help=format_help)
    tokenizer_help = "auto (that of the source folder, or by vocabulary size), world, byte, none, or a path"
    parser.add_argument("--tokenizer", default="auto", help=f"of an hf folder: {tokenizer_help} (default: auto)")
    shard_help = "of an hf folder: largest weight file in GB (default: 5)"
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help=shard_help)


def hf_options(args: argparse.Namespace, source: Path, files: Mapping[str, bytes] | None = None) -> HfOptions:
    """What was chosen for a folder; `files` are those of a tokenizer that was made here."""
    if not args.max_shard_gb > 0:
        raise ConfigError("--max-shard-gb", "out of range", found=args.max_shard_gb, rule="above 0")
    tokenizer = files or pick_tokenizer_name(args.tokenizer, source)
    return HfOptions(tokenizer=tokenizer, max_shard_bytes=int(args.max_shard_gb * 10**9))


def build_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Export weights as .pth, safetensors or a Hugging Face folder.")
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="step-N folder, a run's folder (newest valid step), a DeepSpeed or Hugging Face folder, or a weight file",
    )
    out_help = "default: rwkv_model.pth, or the folder rwkv_model_hf, inside CKPT"
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help=out_help)
    parser.add_argument("dtype_as_third", metavar="DTYPE", choices=EXPORT_DTYPES, nargs="?", help="same as --dtype")
    add_output_options(parser, "bf16")
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
        hf=hf_options(args, args.checkpoint),
    )
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
