"""Add tokens to a model and its tokenizer: python add_tokens.py model.pth OUT --tokens "<|im_start|>" "<|im_end|>"."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from export_checkpoint import add_output_options, hf_options
from trainer.checkpoint.export import dtype_name, write_weights
from trainer.checkpoint.hf_folder import tokenizer_folder
from trainer.checkpoint.hf_tokenizer import extended_tokenizer, pick_tokenizer_name, tokenizer_files
from trainer.checkpoint.read import read_weights
from trainer.cli import run_script
from trainer.errors import ConfigError, DataError
from trainer.model.naming import shape_from_weights
from trainer.model.surgery import with_token_rows


def read_tokens(tokens: list[str], file: Path | None) -> list[str]:
    """The tokens given, then those of a file with one on each line."""
    if file is None:
        return tokens
    try:
        return tokens + [line for line in file.read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(file, f"cannot be read ({err})", rule="UTF-8 text, one token on each line") from err


def main() -> int:
    """Extend both, and print the new ids."""
    parser = argparse.ArgumentParser(
        description="Add tokens. Their rows of the embedding and the head are the mean of the others."
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="weights of any kind that the trainer reads")
    parser.add_argument("out", metavar="OUT", type=Path, help="file or folder to write")
    parser.add_argument("--tokens", metavar="TEXT", nargs="+", default=[], help="each becomes one token")
    parser.add_argument("--tokens-file", metavar="FILE", type=Path, help="UTF-8, one token on each line")
    parser.add_argument("--special", action="store_true", help="left out of decoded text where special tokens are")
    add_output_options(parser)
    args = parser.parse_args()
    weights = read_weights(args.model)
    files = tokenizer_files(pick_tokenizer_name(args.tokenizer, args.model), shape_from_weights(weights).vocab_size)
    if not files:
        raise ConfigError("--tokenizer", "none to extend", fix="give world, byte, or a tokenizer's path")
    tokens = read_tokens(args.tokens, args.tokens_file)
    files, first = extended_tokenizer(files, tokens, special=args.special)
    result = with_token_rows(weights, first, len(tokens))
    for number, text in enumerate(tokens, first):
        print(f"{number} {text}")
    dtype = args.dtype or dtype_name(weights)
    if args.format in {"hf", "hf-fla"}:
        print(write_weights(result, args.out, dtype, args.format, hf_options(args, args.model, files)))
        return 0
    folder = args.out.with_name(f"{args.out.stem}-tokenizer")
    with tokenizer_folder(files, folder):
        print(write_weights(result, args.out, dtype, args.format))
    print(f"{folder}: the tokenizer, for data.tokenizer and --tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
