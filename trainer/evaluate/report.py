"""Results of an evaluation as files: JSON, CSV and a picture."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.atomic import atomic_file
from trainer.errors import ConfigError
from trainer.evaluate.losses import LossTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainer.evaluate.recall import RecallTable

__all__ = ["check_outputs", "loss_rows", "write_loss", "write_recall"]

_SUFFIXES = (".json", ".csv", ".png")


def check_outputs(paths: Sequence[Path], suffixes: Sequence[str] = _SUFFIXES) -> None:
    """Refuse output files that cannot be written, before anything is computed.

    Args:
        paths: the files.
        suffixes: formats that there are.

    Raises:
        ConfigError: if a suffix is unknown or a folder is missing.
    """
    for path in paths:
        if path.suffix not in suffixes:
            rule = " or ".join(suffixes)
            raise ConfigError("--out", "the suffix says no format", found=str(path), rule=rule)
        if not path.parent.is_dir():
            raise ConfigError("--out", "its folder does not exist", found=str(path), fix=f"mkdir -p {path.parent}")


def loss_rows(table: LossTable, context: int | None = None) -> list[dict[str, Any]]:
    """One row for all tokens, then one for each source and each range of positions.

    Args:
        table: what was measured.
        context: tokens after which the model had to forget; None = never.
    """
    rows = [_row("all", table.tokens, table.loss)]
    weights = table.sums_2SP[1].sum(axis=1).tolist()
    rows += [_row(f"source {n}", weights[table.names.index(n)], loss) for n, loss in table.by_source().items()]
    rows += [_row("position", at.tokens, at.loss, at.first, at.last) for at in table.by_position()]
    return [row | {"context": context} for row in rows]


def _row(what: str, tokens: float, loss: float, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"what": what, "first": first, "last": last, "tokens": tokens, "loss": loss, "perplexity": perplexity}


def write_loss(tables: Mapping[int | None, LossTable], out: Path, title: str) -> None:
    """Write losses to `out`, whose suffix decides the format.

    Args:
        tables: what was measured, by `context` as of `loss_rows`.
        out: the file.
        title: of the picture.

    Raises:
        StorageError: if it cannot be written.
    """
    if out.suffix == ".png":
        _save(_loss_figure(tables, title), out)
    else:
        _write_rows([row for context, table in tables.items() for row in loss_rows(table, context)], out)


def write_recall(table: RecallTable, out: Path, title: str) -> None:
    """The same for recall: the picture is a heat map of depth against length."""
    if out.suffix == ".png":
        _save(_recall_figure(table, title), out)
    else:
        _write_rows(table.rows(), out)


def _write_rows(rows: list[dict[str, Any]], out: Path) -> None:
    with atomic_file(out) as temp:
        if out.suffix == ".json":
            temp.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            return
        with temp.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def _save(figure: Figure, out: Path) -> None:
    with atomic_file(out) as temp:
        figure.savefig(temp, format="png", dpi=130)


def _loss_figure(tables: Mapping[int | None, LossTable], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.subplots()
    for context, table in tables.items():
        places = table.by_position()
        means = [math.sqrt(at.first * at.last) for at in places]
        told = "whole document" if context is None else f"at most {context:,} tokens of context"
        axes.plot(means, [at.loss for at in places], "o-", label=f"{told}, mean {table.loss:.4f}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of the document before the predicted one", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _recall_figure(table: RecallTable, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 1.1 * len(table.lengths), 1.6 + 0.5 * len(table.depths)), layout="tight")
    axes = figure.subplots()
    image = axes.imshow(table.right, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(table.lengths)), [f"{length:,}" for length in table.lengths])
    axes.set_yticks(range(len(table.depths)), [f"{depth:.0%}" for depth in table.depths])
    for row, values in enumerate(table.right):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.0%}", ha="center", va="center")
    axes.set(xlabel="tokens", ylabel="place of the key", title=title)
    figure.colorbar(image, label="share of right answers")
    return figure
