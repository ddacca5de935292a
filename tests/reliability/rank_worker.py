"""One rank of a run, with faults of its own; started by test_ranks.py through torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER)]

import faults  # noqa: E402
import torch  # noqa: E402

from trainer.cli import main  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    message = json.loads(sys.argv[1])
    for fault in message["faults"].get(os.environ["RANK"], []):
        name, *values = fault.split(":")
        getattr(faults, name)(*values)
    code = main(message["words"])
    sys.stderr.write(f"rank {os.environ['RANK']} ends with {code}\n")
    sys.exit(code)
