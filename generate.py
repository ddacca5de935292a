"""Write text with a model: python generate.py model.pth --prompt "Once upon a time" --tokens 200."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.cli import run_script
from trainer.errors import ConfigError
from trainer.generate.engine import CHAT_STOP, Generator, StreamOptions, chat_turn, load_generator, read_prompt
from trainer.generate.sampling import SAMPLING_HELP, Sampling
from trainer.generate.state_file import load_state, save_state


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Options that dragon_test.py has too."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, of any length")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="UTF-8 file to continue, to its last byte")
    for name, text in SAMPLING_HELP.items():
        default = getattr(Sampling(), name)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default: {default})")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text; default: another one each time")
    parser.add_argument("--state-in", metavar="FILE", type=Path, help="continue from this state, saved or tuned")
    parser.add_argument(
        "--state-out", metavar="FILE", type=Path, help="save the state at the end (.safetensors or .pth)"
    )


def sampling(args: argparse.Namespace) -> Sampling:
    """The sampling options that were given."""
    return Sampling(**{name: getattr(args, name) for name in SAMPLING_HELP})


def write_out(generator: Generator, pieces: Iterator[str], state_out: Path | None) -> str:
    """Print the text as it comes, save the state, and return a line about the speed."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if state_out is not None:
        save_state(state_out, generator.snapshot)
    return generator.speed()


def main() -> int:
    """Read the prompt, write on."""
    parser = argparse.ArgumentParser(
        description="Write text with a model. The text goes to stdout, its speed to stderr."
    )
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help=".pth, .safetensors, a Hugging Face folder, or a checkpoint step-N"
    )
    add_common_options(parser)
    parser.add_argument("--adapter", metavar="FOLDER", type=Path, help="adapter of MODEL, or a run's folder with one")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to write (default: 200)")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; repeatable")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn; write the assistant's")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto (bf16 on a GPU, else fp32), fp32 or bf16")
    parser.add_argument("--tokenizer", default="auto", help="auto (by vocabulary size), world, byte, or a path")
    args = parser.parse_args()
    stop = (*args.stop, CHAT_STOP) if args.chat else (*args.stop,)
    options = StreamOptions(max_tokens=args.tokens, sampling=sampling(args), seed=args.seed, stop=stop)
    prompt = read_prompt(args.prompt, args.prompt_file)
    if args.chat and not prompt.strip():
        raise ConfigError("--chat", "needs the user's turn", fix="give --prompt or --prompt-file")
    generator = load_generator(
        args.model, device=args.device, dtype=args.dtype, tokenizer=args.tokenizer, adapter=args.adapter
    )
    if args.state_in is not None:
        generator.snapshot = load_state(args.state_in, generator.model)
    generator.read(chat_turn(prompt, is_first=generator.snapshot.logits_V is None) if args.chat else prompt)
    print(write_out(generator, generator.stream(options), args.state_out), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
