"""See what a prepared data set trains: samples with the trained tokens coloured, and lengths as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.store import TokenStore
from trainer.data.tokenizers import Tokenizer
from trainer.errors import StorageError

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["length_table", "plain_sample", "sample_text", "save_histogram"]

_TRAINED, _CONTEXT, _MARK = "black on green", "dim", "bold magenta"
_END = "⏹"
_MOST_TOKENS = 2000
_SHARES = (0.01, 0.1, 0.5, 0.9, 0.99)


def _runs(store: TokenStore, document: int, stop: int) -> list[tuple[np.ndarray, bool]]:
    """The document's tokens as maximal runs that are trained or not."""
    ids = store.read(document, 0, stop)
    mask = store.loss_mask(document, 0, stop)
    is_trained = np.ones(len(ids), bool) if mask is None else mask > 0
    # The first token follows nothing, so it is no target.
    is_trained = is_trained.copy()
    is_trained[:1] = False
    borders = np.flatnonzero(np.diff(is_trained)) + 1
    return [
        (part, bool(trained[0]))
        for part, trained in zip(np.split(ids, borders), np.split(is_trained, borders), strict=True)
        if len(part)
    ]


def _decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Text in which token 0 is shown."""
    parts = np.split(ids, np.flatnonzero(ids == 0) + 1)
    return "".join(tokenizer.decode(part) + (_END if len(part) and part[-1] == 0 else "") for part in parts)


def sample_text(store: TokenStore, tokenizer: Tokenizer, document: int, most_tokens: int = _MOST_TOKENS) -> Text:
    """One document: a line that marks its start, then its text; trained tokens are coloured, token 0 is `⏹`.

    Args:
        store: the prepared documents.
        tokenizer: that made them.
        document: its number.
        most_tokens: a longer document is cut there.
    """
    from rich.text import Text

    size = int(store.sizes[document])
    runs = _runs(store, document, min(size, most_tokens))
    num_trained = sum(len(part) for part, trained in runs if trained)
    shown = "" if size <= most_tokens else f" of the first {most_tokens:,}"
    text = Text()
    text.append(f"▶ document {document}: {size:,} tokens, {num_trained:,} trained{shown}\n", _MARK)
    for part, trained in runs:
        text.append(_decode(tokenizer, part), _TRAINED if trained else _CONTEXT)
    if size > most_tokens:
        text.append(" ...", _MARK)
    return text


def plain_sample(store: TokenStore, tokenizer: Tokenizer, document: int) -> str:
    """The same without colours, for documents and files: trained text stands between `«` and `»`."""
    size = int(store.sizes[document])
    runs = _runs(store, document, size)
    num_trained = sum(len(part) for part, trained in runs if trained)
    pieces = (f"«{_decode(tokenizer, part)}»" if trained else _decode(tokenizer, part) for part, trained in runs)
    return f"▶ document {document}: {size:,} tokens, {num_trained:,} trained\n{''.join(pieces)}"


def length_table(sizes: np.ndarray) -> str:
    """Shortest, usual and longest document in words."""
    places = np.quantile(sizes, _SHARES, method="nearest").tolist()
    quantiles = ", ".join(f"{share:.0%} {int(size):,}" for share, size in zip(_SHARES, places, strict=True))
    return f"{int(sizes.min()):,} to {int(sizes.max()):,} tokens ({quantiles})"


def save_histogram(sizes: np.ndarray, path: Path) -> None:
    """Write a picture of the lengths of documents, and of how many tokens the documents of each length hold.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    low, high = np.log2(max(1, int(sizes.min()))), np.log2(int(sizes.max()) + 1)
    edges = np.logspace(np.floor(low), np.ceil(high), 40, base=2.0).tolist()
    axes.hist(sizes, edges, label="documents", color="#4477aa")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    other = axes.twinx()
    other.hist(sizes, edges, weights=sizes, histtype="step", label="tokens", color="#cc3311")
    other.set_ylabel("tokens of all documents of that length")
    figure.legend(loc="outside upper right", ncols=2)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError(path, f"cannot be written ({error.strerror})") from error
