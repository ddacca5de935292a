"""Compare logits of an exported folder in other programs with ours: python3 benchmarks/ecosystem.py model.pth --with transformers.

For float32 the largest difference to our float32 logits is printed, for bf16 the largest and root-mean-square
error of theirs and of ours against float32. Exit code 1 if float32 differs by more than 2e-5, or a bf16 error
is more than twice ours.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from trainer.checkpoint.export import ExportDtype, write_weights  # noqa: E402
from trainer.checkpoint.hf_folder import HfOptions  # noqa: E402
from trainer.checkpoint.read import read_weights  # noqa: E402
from trainer.model.naming import shape_from_weights  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402

DTYPES: dict[ExportDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = 2e-5


def with_transformers(folder: Path, **options: Any) -> Any:
    """The code in the folder itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def with_rwkv7_hf(folder: Path, **options: Any) -> Any:
    """The package rwkv7-hf."""
    from rwkv7_hf import RWKV7ForCausalLM

    return RWKV7ForCausalLM.from_pretrained(folder, **options)


def with_fla(folder: Path, **options: Any) -> Any:
    """flash-linear-attention; needs a GPU."""
    from fla.models import RWKV7ForCausalLM

    return RWKV7ForCausalLM.from_pretrained(folder, **options)


def with_fla_fused(folder: Path, **options: Any) -> Any:
    """The same with its fused norms, as its own converter sets it."""
    return with_fla(folder, fuse_norm=True, **options)


PROGRAMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "transformers": ("hf", with_transformers),
    "rwkv7-hf": ("hf", with_rwkv7_hf),
    "fla": ("hf-fla", with_fla),
    "fla-fused": ("hf-fla", with_fla_fused),
}


def our_logits(weights: dict[str, Tensor], ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 logits [B, T, V] of our model with weights of `dtype`."""
    model = RWKV7(shape_from_weights(weights)).to(ids_BT.device, dtype)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.head(model(ids_BT)[0]).float()


def errors(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest and root-mean-square difference."""
    difference = found - wanted
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def main() -> int:
    """Print one line per program and dtype."""
    parser = argparse.ArgumentParser(description="Compare logits of an exported folder in other programs with ours.")
    parser.add_argument("model", type=Path, help="weights of any kind that the trainer reads")
    parser.add_argument("--with", dest="programs", nargs="+", choices=PROGRAMS, default=["transformers"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rows", type=int, default=2)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    weights = read_weights(args.model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(weights["emb.weight"]), (args.rows, args.tokens), generator=generator).to(args.device)
    reference = our_logits(weights, ids, torch.float32)
    print(f"logits: std {reference.std():.3f}, {args.rows} x {args.tokens} tokens on {args.device}")
    failed = False
    for dtype in args.dtypes:
        ours = errors(our_logits(weights, ids, DTYPES[dtype]), reference)
        for program in args.programs:
            file_format, load = PROGRAMS[program]
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "model"
                write_weights(weights, folder, dtype, file_format, HfOptions(tokenizer="none"))
                model = load(folder, dtype=DTYPES[dtype]).to(args.device).eval()
            with torch.no_grad():
                theirs = errors(model(ids).logits.float(), reference)
            bars = (TOLERANCE, TOLERANCE) if dtype == "fp32" else (2 * ours[0], 2 * ours[1])
            good = all(error <= bar for error, bar in zip(theirs, bars, strict=True))
            failed = failed or not good
            print(
                f"{program:12} {dtype} largest {theirs[0]:.3e} rms {theirs[1]:.3e} | ours {ours[0]:.3e} {ours[1]:.3e} "
                f"{'ok' if good else 'FAILED'}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
