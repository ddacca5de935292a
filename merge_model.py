"""Average models of one shape: python merge_model.py OUT a.pth b.pth --weights 0.7 0.3."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from export_checkpoint import add_output_options, hf_options
from trainer.checkpoint.export import dtype_name, write_weights
from trainer.checkpoint.read import read_weights
from trainer.cli import run_script
from trainer.model.surgery import merged


def main() -> int:
    """Write the weighted mean."""
    parser = argparse.ArgumentParser(description="Write the weighted mean of several models of one shape.")
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="+", help="weights that the trainer reads")
    parser.add_argument("--weights", type=float, nargs="+", help="one per model, divided by their sum (default: equal)")
    add_output_options(parser)
    args = parser.parse_args()
    parts = args.weights or [1.0] * len(args.models)
    models = [read_weights(path) for path in args.models]
    result = merged(models, parts, args.models)
    for path, part in zip(args.models, parts, strict=True):
        print(f"{part / sum(parts):.4f} x {path}")
    dtype = args.dtype or dtype_name(models[0])
    print(write_weights(result, args.out, dtype, args.format, hf_options(args, args.models[0])))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
