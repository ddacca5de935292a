"""Measure a model: python evaluate.py loss model.pth book.txt --out loss.png."""

from __future__ import annotations

import argparse
import sys

from trainer.cli import run_script
from trainer.evaluate.commands import add_loss_command, add_recall_command, add_tasks_command


def main() -> int:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description="Measure a model: loss by position, recall, tasks of lm_eval.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_loss_command, add_recall_command, add_tasks_command):
        add(commands)
    args = parser.parse_args()
    for line in args.run(args):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
