"""Build and look at the data set of a config.

python preload_datapath.py CONFIG.yaml [-c MORE.yaml] [--data.key=value]
    [--show N]              print N documents, trained tokens coloured (in a pipe: between « and »)
    [--histogram FILE.png]  draw the lengths of documents
    [--to-binidx PREFIX]    write the documents as PREFIX.bin and PREFIX.idx
    [--from-binidx PREFIX]  build data.data_path from such a pair instead of data.source
    [--force]               build even if it is up to date
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from trainer.cli import parse_run_config, run_script
from trainer.config.schema import RunConfig
from trainer.data.binidx import binidx_prefix, write_binidx
from trainer.data.prepare import PreparedSummary, open_prepared, prepare
from trainer.data.show import length_table, plain_sample, sample_text, save_histogram
from trainer.data.work import tokenizer_of
from trainer.errors import ConfigError

OPTIONS = ("--show", "--histogram", "--to-binidx", "--from-binidx")


def report(summary: PreparedSummary) -> str:
    """The summary as a small table."""
    counts = summary.counts
    state = f"built in {summary.seconds:.1f} s ({summary.reason})" if summary.reason else "already up to date"
    rows = [
        ("data set", summary.where),
        ("state", state),
        *(("format", name) for name in summary.record_formats),
        ("documents", f"{counts['documents']:,}"),
        ("tokens", f"{counts['tokens']:,} ({summary.dtype})"),
    ]
    for title, name in (("training", "train"), ("validation", "validation")):
        documents, tokens, trained = (counts[f"{name}_{key}"] for key in ("documents", "tokens", "trained_tokens"))
        rows.append((title, f"{documents:,} documents, {tokens:,} tokens, {trained:,} trained"))
    if len(summary.sources) > 1:
        rows += [
            (f"source: {source['name']}", f"{source['tokens']:,} tokens x {source['epochs']:.3g}")
            for source in summary.sources
        ]
    rows += [(f"dropped: {reason}", f"{count:,} documents") for reason, count in summary.dropped.items()]
    if summary.reason:
        rows.append(("speed", f"{summary.tokens_per_s:,.0f} tokens/s"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def take_options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words that belong to the config, and our own options."""
    rest: list[str] = []
    taken: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, has_value, value = word.partition("=")
        if name == "--force":
            taken[name] = "true"
        elif name not in OPTIONS:
            rest.append(word)
        elif has_value:
            taken[name] = value
        elif not queue:
            raise ConfigError(name, "needs a value", rule="a number of documents" if name == "--show" else "a path")
        else:
            taken[name] = queue.pop(0)
    if not taken.get("--show", "1").isdigit():
        raise ConfigError("--show", "is no number", found=taken["--show"], rule="a number of documents")
    return rest, taken


def look(run: RunConfig, options: dict[str, str]) -> None:
    """Print, draw and convert what was asked for."""
    from rich.console import Console

    train, validation, _ = open_prepared(run.data, seed=run.trainer.deterministic_order_seed)
    print(f"lengths     {length_table(train.sizes)}")
    tokenizer = tokenizer_of(run.data)
    console = Console(highlight=False)
    for document in range(min(int(options.get("--show", "0")), train.num_documents)):
        if console.is_terminal:
            console.print(sample_text(train, tokenizer, document), soft_wrap=True)
        else:
            print(plain_sample(train, tokenizer, document))
    if "--histogram" in options:
        save_histogram(train.sizes, Path(options["--histogram"]))
        print(f"wrote {options['--histogram']}")
    if "--to-binidx" in options:
        prefix = binidx_prefix(options["--to-binidx"])
        prefix.parent.mkdir(parents=True, exist_ok=True)
        for store, path in ((train, prefix), (validation, prefix.with_name(prefix.name + "_validation"))):
            if store is not None:
                write_binidx(store, path)
                print(f"wrote {path}.bin and {path}.idx: {store.num_documents:,} documents")
                if store.num_documents and store.loss_mask(0, 0, 1) is not None:
                    print("note: this format cannot hold which tokens are trained: all of them will be")


def main() -> int:
    """Parse, prepare, and print what there is now."""
    words, options = take_options(sys.argv[1:])
    run = parse_run_config(words, command="preload")
    if run.data.streaming:
        raise ConfigError(
            "data.streaming",
            "reads the source while training: there is nothing to prepare",
            fix="to look at documents add --data.streaming=false --data.data_path=FOLDER --data.dataset_length=100",
        )
    # Whoever calls this wants the data set built, whatever `fit` is told.
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, skip_datapath_setup=False))
    pair = options.get("--from-binidx")
    summary = prepare(
        run.data,
        seed=run.trainer.deterministic_order_seed,
        vocab_size=run.model.vocab_size,
        force="--force" in options,
        from_binidx=Path(pair) if pair else None,
    )
    print(report(summary))
    if pair:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, source=None))
    look(run, options)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
