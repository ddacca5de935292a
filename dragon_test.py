"""Try a model with a fixed prompt: python dragon_test.py model.pth ["cuda bf16" | "cpu fp32" | ref] [LENGTH]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from generate import add_common_options, sampling, write_out
from trainer.cli import run_script
from trainer.errors import ConfigError
from trainer.generate.engine import StreamOptions, load_generator, read_prompt
from trainer.generate.state_file import load_state

PROMPT = (
    "Surveyors who were mapping a remote valley in Tibet last spring met something that no map had shown: a family of "
    "dragons, asleep in the snow. Stranger still, the oldest of them opened one eye and greeted the party in fluent "
    "Chinese."
)


def parse_strategy(text: str) -> tuple[str, str, bool]:
    """Device, dtype, and whether to use the reference kernel without chance, from the older one-word form."""
    if text == "ref":
        return "cpu", "fp32", True
    device, *rest = text.split() or ["auto"]
    if len(rest) > 1:
        rule = 'a device and a dtype, such as "cuda bf16", or ref'
        raise ConfigError("dragon_test.py DEVICE", "not understood", found=text, rule=rule)
    return device, rest[0] if rest else "auto", False


def main() -> int:
    """Print the prompt and what the model makes of it; exit code 1 if its output is not finite."""
    parser = argparse.ArgumentParser(description="Print a prompt, a model's continuation as it comes, and its speed.")
    parser.add_argument(
        "model", metavar="MODEL", type=Path, help=".pth, .safetensors, a Hugging Face folder, or a checkpoint step-N"
    )
    help_text = 'such as "cuda bf16" or "cpu fp32"; ref = CPU, fp32, reference kernel, no chance (default: auto)'
    parser.add_argument("strategy", metavar="DEVICE", nargs="?", default="auto", help=help_text)
    parser.add_argument(
        "length", metavar="LENGTH", nargs="?", type=int, default=200, help="tokens to write (default: 200)"
    )
    add_common_options(parser)
    parser.add_argument("--tokenizer", default="auto", help="auto (by vocabulary size), world, byte, or a path")
    parser.set_defaults(temperature=None)
    args = parser.parse_args()
    device, dtype, is_reference = parse_strategy(args.strategy)
    if args.temperature is None:
        args.temperature = 0.0 if is_reference else 1.0
    options = StreamOptions(max_tokens=args.length, sampling=sampling(args), seed=args.seed)
    has_prompt = args.prompt is not None or args.prompt_file is not None or args.state_in is not None
    prompt = read_prompt(args.prompt, args.prompt_file) if has_prompt else PROMPT
    kernel = "reference" if is_reference else "auto"
    generator = load_generator(args.model, device=device, dtype=dtype, tokenizer=args.tokenizer, kernel=kernel)
    if args.state_in is not None:
        generator.snapshot = load_state(args.state_in, generator.model)
    generator.read(prompt)
    print(prompt, end="", flush=True)
    print(write_out(generator, generator.stream(options), args.state_out))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
