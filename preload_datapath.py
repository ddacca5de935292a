"""Build the data set of a config: python preload_datapath.py CONFIG.yaml [-c MORE.yaml] [--data.key=value] [--force]."""

from __future__ import annotations

import dataclasses
import sys

from trainer.cli import parse_run_config, run_script
from trainer.data.prepare import PreparedSummary, prepare


def report(summary: PreparedSummary) -> str:
    """The summary as a small table."""
    counts = summary.counts
    state = f"built in {summary.seconds:.1f} s ({summary.reason})" if summary.reason else "up to date"
    rows = [
        ("data set", summary.where),
        ("state", state),
        ("documents", f"{counts['documents']:,}"),
        ("tokens", f"{counts['tokens']:,} ({summary.dtype})"),
        ("training", f"{counts['train_documents']:,} documents, {counts['train_tokens']:,} tokens"),
        ("validation", f"{counts['validation_documents']:,} documents, {counts['validation_tokens']:,} tokens"),
        *((f"dropped: {reason}", f"{count:,} documents") for reason, count in summary.dropped.items()),
    ]
    if summary.reason:
        rows.append(("speed", f"{summary.tokens_per_s:,.0f} tokens/s"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main() -> int:
    """Parse, prepare, and print what there is now."""
    words = sys.argv[1:]
    run = parse_run_config([word for word in words if word != "--force"], command="preload")
    # Whoever calls this wants the data set built, whatever `fit` is told.
    data = dataclasses.replace(run.data, skip_datapath_setup=False)
    summary = prepare(
        data,
        seed=run.trainer.deterministic_order_seed,
        vocab_size=run.model.vocab_size,
        force="--force" in words,
    )
    print(report(summary))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
