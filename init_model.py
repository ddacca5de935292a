"""Write a file of fresh RWKV-7 weights: python init_model.py --n_layer 12 --n_embd 768 --vocab_size world OUT.pth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.checkpoint.export import save_weights
from trainer.cli import run_script
from trainer.config import RunConfig
from trainer.errors import ConfigError
from trainer.model.init import init_weights
from trainer.model.naming import ModelShape

VOCAB_SIZES = {"world": 65536, "neox": 50277, "byte": 272}


def vocab_size(text: str) -> int:
    """Number of embedding rows for a tokenizer's name or a number."""
    if text in VOCAB_SIZES:
        return VOCAB_SIZES[text]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("--vocab_size", "not understood", found=text, rule="a number, world, neox or byte")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Write a .pth (or .safetensors) file of official initial weights.")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("out", metavar="OUT.pth", type=Path, help="file to write; missing folders are made")
    parser.add_argument("--n_layer", type=int, required=True, help="number of blocks")
    parser.add_argument("--n_embd", type=int, required=True, help="width, a multiple of the head size")
    parser.add_argument("--vocab_size", default="world", help="world (65536), neox (50277), byte (272) or a number")
    parser.add_argument("--head_size", type=int, default=64, help="channels per head (default: 64)")
    parser.add_argument("--dim_ffn", type=int, help="hidden width of channel mixing (default: 4 x n_embd)")
    parser.add_argument("--emb-scale", type=float, default=1e-4, help="range of the embedding (default: 0.0001)")
    parser.add_argument("--seed", type=int, default=RunConfig().seed, help="the same seed gives the same file")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="stored type (default: bf16)")
    parser.add_argument("--skip-if-exists", action=flag, default=False, help="leave an existing file as it is")
    parser.add_argument(
        "--safe-init", action=flag, default=True, help="for older scripts: a file is always written whole or not at all"
    )
    return parser


def main() -> int:
    """Make the weights and print what was written."""
    args = build_parser().parse_args()
    shape = ModelShape.official(
        args.n_layer, args.n_embd, vocab_size(args.vocab_size), head_size=args.head_size, dim_ffn=args.dim_ffn
    )
    if args.skip_if_exists and args.out.exists():
        print(f"{args.out}: exists, left as it is")
        return 0
    if not args.emb_scale > 0:
        raise ConfigError("--emb-scale", "out of range", found=args.emb_scale, rule="above 0")
    if not args.safe_init:
        print("--no-safe-init: the file is written whole or not at all in any case")
    print(f"L{shape.n_layer}-D{shape.n_embd}, vocabulary {shape.vocab_size}: {shape.num_parameters():,} parameters")
    print(save_weights(init_weights(shape, args.seed, args.emb_scale), args.out, args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
