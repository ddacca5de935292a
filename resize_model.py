"""Make a larger model of a given one: python resize_model.py model.pth larger.pth --n_layer 24."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from export_checkpoint import add_output_options, hf_options
from trainer.checkpoint.export import dtype_name, write_weights
from trainer.checkpoint.read import read_weights
from trainer.cli import run_script
from trainer.config import RunConfig
from trainer.model.naming import shape_from_weights
from trainer.model.surgery import NEW_BLOCKS, block_sources, resized

SIZES = {
    "n_layer": "number of blocks; fewer keep the first, the last and blocks at even distances",
    "n_embd": "width, a multiple of the head size; the logits change",
    "dim_ffn": "hidden width of channel mixing (default: grows with n_embd)",
    "rank_w": "rank of w1, w2",
    "rank_a": "rank of a1, a2",
    "rank_v": "rank of v1, v2",
    "rank_g": "rank of g1, g2",
}


def main() -> int:
    """Resize, and print what was made of what."""
    parser = argparse.ArgumentParser(
        description="Make a deeper or wider model of a given one. More blocks, ranks and dim_ffn leave the logits as they are."
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="weights of any kind that the trainer reads")
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    blocks_help = (
        "extra blocks: identity = copies of the block before whose output is 0; copy = that block again; "
        "fresh = official initial values (default: identity)"
    )
    parser.add_argument("--new-blocks", choices=NEW_BLOCKS, default="identity", help=blocks_help)
    parser.add_argument("--seed", type=int, default=RunConfig().seed, help="of the values that are drawn")
    add_output_options(parser)
    args = parser.parse_args()
    weights = read_weights(args.model)
    old = shape_from_weights(weights)
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if "n_embd" in given and "dim_ffn" not in given:
        given["dim_ffn"] = old.dim_ffn * given["n_embd"] // old.n_embd
    shape = replace(old, **given)
    result = resized(weights, shape, args.new_blocks, args.seed)
    sources = block_sources(old.n_layer, shape.n_layer)
    print("blocks from:", " ".join(f"{source}{'+' if is_extra else ''}" for source, is_extra in sources))
    print(
        f"L{old.n_layer}-D{old.n_embd} -> L{shape.n_layer}-D{shape.n_embd}: "
        f"{old.num_parameters():,} -> {shape.num_parameters():,} parameters"
    )
    dtype = args.dtype or dtype_name(weights)
    print(write_weights(result, args.out, dtype, args.format, hf_options(args, args.model)))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
