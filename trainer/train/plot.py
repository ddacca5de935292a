"""Loss curve of a run as a picture: `python -m trainer.train.plot RUN_FOLDER OUT.png`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.train.callbacks import METRICS_FILE, read_metrics

__all__ = ["plot_loss"]


def _smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_loss(folder: Path, out: Path) -> tuple[float, float]:
    """Draw training and validation loss against trained tokens.

    Args:
        folder: a run's checkpoint folder, which holds its metrics file.
        out: picture to write; the suffix decides the format.

    Returns:
        Mean training loss of the first and of the last five steps.

    Raises:
        DataError: if the folder holds no metrics.
    """
    rows = read_metrics(folder / METRICS_FILE)
    steps = [row for row in rows if "loss" in row]
    if not steps:
        raise DataError(folder / METRICS_FILE, "no training steps are recorded")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tokens: dict[int, int] = {row["step"]: row["tokens"] for row in steps}
    losses: list[float] = [row["loss"] for row in steps]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(list(tokens.values()), losses, color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(list(tokens.values()), _smooth(losses, 20), color="C0", label="training, mean of 20 steps")
    checks: list[dict[str, Any]] = [row for row in rows if "validation_loss" in row and row["step"] in tokens]
    if checks:
        axes.plot(
            [tokens[c["step"]] for c in checks],
            [c["validation_loss"] for c in checks],
            "o",
            color="C1",
            label="validation",
        )
    axes.set(xlabel="trained tokens", ylabel="loss (nats per token)", title=folder.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return sum(losses[:5]) / len(losses[:5]), sum(losses[-5:]) / len(losses[-5:])


def main(argv: list[str] | None = None) -> int:
    """Command line: folder and picture."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2:
        sys.stderr.write("usage: python -m trainer.train.plot RUN_FOLDER OUT.png\n")
        return 2
    try:
        first, last = plot_loss(Path(words[0]), Path(words[1]))
    except DataError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{words[1]}: loss {first:.4f} -> {last:.4f} ({last / first:.2f} x)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
