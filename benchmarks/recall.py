"""Recall over a gap that only exact gradients can learn to bridge.

    python benchmarks/recall.py [--seeds 0 1 2] [--steps 200] [--windows 1 full] [--out docs/recall.png]

A row of 96 tokens shows one of 16 symbols somewhere in its first chunk of 16 and asks for it with its last token.
In between is noise: 16 other tokens, drawn at random. Nothing else in the row says which symbol it was, and only
the answer has a weight in the loss. The runs of a seed have the same weights, rows and settings, all but
`bptt_window`. Prints one row per run; exit code 1 if an exact run does not end at 99 % of right answers, or a
truncated one ever exceeds chance by 0.1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.bptt.step import ChunkInput, EagerEngine, StepOptions, run_step  # noqa: E402
from trainer.config.schema import BpttWindow, ModelConfig  # noqa: E402
from trainer.model.init import init_weights  # noqa: E402
from trainer.model.naming import ModelShape  # noqa: E402
from trainer.model.rwkv7 import RWKV7  # noqa: E402
from trainer.model.state import ModelState  # noqa: E402
from trainer.ops.loss import linear_cross_entropy  # noqa: E402
from trainer.train.optim import MasterAdamW, clip_by_global_norm, parameter_groups  # noqa: E402
from trainer.types import Batch  # noqa: E402

NUM_SYMBOLS = 16
"""Tokens 0 to 15."""
NUM_NOISE = 16
"""Tokens 16 to 31, between the symbol and the question."""
QUESTION = NUM_SYMBOLS + NUM_NOISE
"""The last token of each row; its target is the symbol."""
CHUNK = 16
NUM_CHUNKS = 6
CHANCE = 1 / NUM_SYMBOLS
WANTED = 0.99
"""Recall that exact gradients must reach."""
ALLOWED = CHANCE + 0.1
"""Recall that truncated gradients must not exceed."""
TEST_ROWS = 512

MODEL = ModelConfig(
    n_layer=1, n_embd=32, head_size=32, vocab_size=QUESTION + 1, ctx_len=CHUNK,
    lr_init=2e-3, warmup_steps=10, weight_decay=0.0,
)  # fmt: skip


class ModuleEngine(EagerEngine):
    """Runs chunks through a model in this process, without a strategy."""

    def __init__(self, model: RWKV7, l2wrap: float = 1e-4, slice_rows: int = 4096) -> None:
        self.model, self.l2wrap, self.slice_rows = model, l2wrap, slice_rows

    def zero_state(self, rows: int) -> ModelState:
        """State before a document."""
        return self.model.zero_state(rows)

    def forward(self, chunk: ChunkInput, *, with_loss: bool, is_last: bool) -> tuple[Tensor | None, ModelState]:
        """Loss and state after the chunk."""
        hidden, state = self.model(chunk.ids_BT, chunk.state, chunk.reset_BT)
        if not with_loss:
            return None, state
        loss = linear_cross_entropy(
            hidden.flatten(0, 1), self.model.head.weight, chunk.targets_BT.flatten(), chunk.weight_BT.flatten(),
            self.l2wrap, self.slice_rows,
        )  # fmt: skip
        return loss, state

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of the loss to that of the step."""
        loss.backward()


@dataclass
class Run:
    """How recall rose in one training run."""

    window: BpttWindow
    seed: int
    steps: list[int] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    """Share of right answers on rows that are never trained on, before each step of `steps`."""
    seconds: float = 0.0

    def passes(self) -> bool:
        """Whether the run ended as its window predicts: a gradient reaches the symbol only across all chunks."""
        if self.window == "full" or self.window >= NUM_CHUNKS:
            return self.recall[-1] >= WANTED
        return max(self.recall) <= ALLOWED


def make_rows(num_rows: int, generator: torch.Generator) -> Batch:
    """Rows of noise with a symbol in the first chunk and the question at the end."""
    tokens = CHUNK * NUM_CHUNKS
    rows = torch.arange(num_rows)
    symbol = torch.randint(NUM_SYMBOLS, (num_rows,), generator=generator)
    ids = torch.randint(NUM_SYMBOLS, QUESTION, (num_rows, tokens), generator=generator)
    ids[rows, torch.randint(CHUNK, (num_rows,), generator=generator)] = symbol
    ids[:, -1] = QUESTION
    targets, weight = torch.zeros_like(ids), torch.zeros(num_rows, tokens)
    targets[:, -1], weight[:, -1] = symbol, 1.0
    reset = torch.zeros(num_rows, tokens, dtype=torch.bool)
    reset[:, 0] = True
    return Batch(ids, targets, weight, reset, (tokens,) * num_rows)


def make_model(seed: int) -> RWKV7:
    """A model with official initial weights."""
    shape = ModelShape.official(MODEL.n_layer or 1, MODEL.n_embd or 32, QUESTION + 1, head_size=MODEL.head_size)
    model = RWKV7(shape, "chunked")
    model.load_state_dict(init_weights(shape, seed))
    return model


@torch.no_grad()
def measure_recall(model: RWKV7, rows: Batch) -> float:
    """Share of rows whose most probable answer, among all tokens, is the symbol."""
    hidden, _ = model(rows.ids_BT)
    return float((model.head(hidden[:, -1]).argmax(-1) == rows.targets_BT[:, -1]).float().mean())


def add_gradients(engine: ModuleEngine, batch: Batch, window: BpttWindow, ctx_len: int = CHUNK) -> None:
    """Gradients of one optimizer step on one micro-batch."""
    options = StepOptions(
        ctx_len=ctx_len, window=window, learning_range=-1, host_memory_bytes=1 << 30, num_micro=1,
        micro_rows=len(batch.lengths),
    )  # fmt: skip
    run_step(
        engine, [batch], [None], options, device=torch.device("cpu"), world_size=1, gather=lambda numbers: [numbers]
    )


def train_recall(window: BpttWindow, seed: int, num_steps: int = 200, num_rows: int = 64, every: int = 10) -> Run:
    """Train on fresh rows at each step; measure recall every so many steps and at the end."""
    model, run, start = make_model(seed), Run(window, seed), time.perf_counter()
    optimizer = MasterAdamW(parameter_groups(model.named_parameters(), MODEL), MODEL)
    test_rows = make_rows(TEST_ROWS, torch.Generator().manual_seed(1_000_000 + seed))
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps + 1):
        if step % every == 0 or step == num_steps:
            run.steps.append(step)
            run.recall.append(measure_recall(model, test_rows))
        if step == num_steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = MODEL.lr_init * group["lr_scale"] * min(1.0, (step + 1) / MODEL.warmup_steps)
        add_gradients(ModuleEngine(model), make_rows(num_rows, generator), window)
        clip_by_global_norm(list(optimizer.gradients().values()), MODEL.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.seconds = time.perf_counter() - start
    return run


def plot_recall(runs: Sequence[Run], out: Path) -> None:
    """Draw recall against training steps, one line per run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    colours: dict[BpttWindow, str] = {}
    for run in runs:
        label = None if run.window in colours else f"bptt_window: {run.window}"
        colour = colours.setdefault(run.window, f"C{len(colours)}")
        axes.plot(run.steps, run.recall, color=colour, alpha=0.8, label=label)
    axes.axhline(CHANCE, color="0.5", linestyle="--", linewidth=1, label="chance, 1 in 16")
    axes.set(
        xlabel="optimizer steps", ylabel="share of right answers", ylim=(-0.02, 1.04),
        title="A symbol shown 5 chunks before the question, one line per seed",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Train all runs, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--windows", nargs="+", default=["1", "full"], help="numbers of chunks, or full")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "recall.png")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'bptt_window':>11s} {'seed':>5s} {'highest':>8s} {'final':>8s} {'seconds':>8s}")
    runs = []
    for name in args.windows:
        window: BpttWindow = "full" if name == "full" else int(name)
        for seed in args.seeds:
            run = train_recall(window, seed, args.steps)
            runs.append(run)
            print(f"{name:>11s} {seed:5d} {max(run.recall):8.4f} {run.recall[-1]:8.4f} {run.seconds:8.1f}", flush=True)
    print(f"chance {CHANCE:.4f}; full (or {NUM_CHUNKS}) must end at {WANTED}, smaller ones never exceed {ALLOWED}")
    plot_recall(runs, args.out)
    return 0 if all(run.passes() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
