"""The commands of `evaluate.py`: their options, and their results as lines of text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.evaluate.documents import EvaluationOptions, evaluate_documents, open_documents
from trainer.evaluate.progress import TokenProgress
from trainer.evaluate.recall import RecallOptions, measure_recall
from trainer.evaluate.report import check_outputs, loss_rows, write_loss, write_recall
from trainer.generate.engine import load_model, pick_tokenizer, read_prompt
from trainer.generate.state_file import load_state

__all__ = ["add_loss_command", "add_recall_command", "add_tasks_command"]

Commands = Any  # argparse does not name the type of what add_subparsers returns.


def _parser(
    commands: Commands, name: str, help_text: str, run: Callable[..., Iterator[str]]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=f"{help_text}.")
    parser.add_argument("model", metavar="MODEL", type=Path, help=".pth, .safetensors, or a checkpoint step-N")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto (bf16 on a GPU, else fp32), fp32 or bf16")
    parser.add_argument("--tokenizer", default="auto", help="auto (by vocabulary size), world, byte, or a path")
    parser.add_argument("--ctx-len", type=int, default=2048, metavar="T", help="tokens per chunk (default: 2048)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="texts side by side (default: 8)")
    parser.set_defaults(run=run)
    return parser


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", type=Path, action="append", default=[],
        help="write the result to FILE too: .json, .csv or .png; repeatable",
    )  # fmt: skip


def add_loss_command(commands: Commands) -> None:
    """`evaluate.py loss`: loss and perplexity of documents, overall and by position."""
    parser = _parser(commands, "loss", "Loss and perplexity, overall and by position in the document", _loss)
    parser.add_argument(
        "data", metavar="DATA", type=Path, nargs="+",
        help="text files, each one document; or one prepared data set; or one .bin/.idx pair",
    )  # fmt: skip
    parser.add_argument("--split", choices=("validation", "train"), default="validation", help="of a prepared data set")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[], metavar="K",
        help="measure too with at most K tokens of context: how much the text further back is worth",
    )  # fmt: skip
    parser.add_argument("--state-in", metavar="FILE", type=Path, help="state before each document, saved or tuned")
    _add_out(parser)


def _loss(args: argparse.Namespace) -> Iterator[str]:
    check_outputs(args.out)
    if args.context and args.state_in is not None:
        raise ConfigError("--context", "forgets the state of --state-in too", fix="leave one of them out")
    runs = [EvaluationOptions(ctx_len=args.ctx_len, rows=args.batch_size, context=k) for k in (None, *args.context)]
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    tokenizer = pick_tokenizer(args.tokenizer, model.shape.vocab_size, args.model)
    store, names = open_documents(args.data, args.split, tokenizer)
    initial = None if args.state_in is None else load_state(args.state_in, model).state
    progress = TokenProgress(int((store.sizes - 1).clip(min=0).sum()) * len(runs))
    tables = {
        run.context: evaluate_documents(model, store, run, names=names, initial=initial, progress=progress)
        for run in runs
    }
    progress.finish()
    for context, table in tables.items():
        if context is not None:
            yield f"with at most {context:,} tokens of context:"
        for row in loss_rows(table):
            what = f"{row['first']:,} to {row['last']:,} before" if row["first"] else row["what"]
            yield f"{what:>28}: loss={row['loss']:.4f} perplexity={row['perplexity']:.2f} tokens={row['tokens']:,.0f}"
    for out in args.out:
        write_loss(tables, out, f"{args.model.name} on {args.data[0].name}")


def add_recall_command(commands: Commands) -> None:
    """`evaluate.py recall`: whether a model answers with a key that stood somewhere in a long text."""
    parser = _parser(commands, "recall", "Recall of a key, by length of the text and place of the key in it", _recall)
    standard = RecallOptions()
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(standard.lengths), help="tokens before the answer"
    )
    parser.add_argument("--depths", type=float, nargs="+", default=list(standard.depths), help="places, from 0 to 1")
    parser.add_argument("--samples", type=int, default=standard.samples, help="keys for each length and depth")
    parser.add_argument("--key-digits", type=int, default=standard.key_digits, help="digits of a key")
    parser.add_argument("--needle", default=standard.needle, help="sentence that holds {key}")
    parser.add_argument("--question", default=standard.question, help="text after the filling")
    parser.add_argument("--answer", default=standard.answer, help="text that must follow, with {key}")
    parser.add_argument("--filling", type=Path, metavar="FILE", help="text that is repeated around the key")
    parser.add_argument("--seed", type=int, default=0, help="of the keys")
    _add_out(parser)


def _recall(args: argparse.Namespace) -> Iterator[str]:
    check_outputs(args.out)
    standard = RecallOptions()
    options = RecallOptions(
        lengths=args.lengths, depths=args.depths, samples=args.samples, key_digits=args.key_digits, needle=args.needle,
        question=args.question, answer=args.answer, seed=args.seed, rows=args.batch_size, chunk_tokens=args.ctx_len,
        filling=standard.filling if args.filling is None else read_prompt(None, args.filling),
    )  # fmt: skip
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    progress = TokenProgress(sum(set(args.lengths)) * len(set(args.depths)) * args.samples)
    table = measure_recall(model, pick_tokenizer(args.tokenizer, model.shape.vocab_size, args.model), options, progress)
    progress.finish()
    yield "depth   " + "".join(f"{length:>12,}" for length in table.lengths)
    for depth, values in zip(table.depths, table.right, strict=True):
        yield f"{depth:<8.2f}" + "".join(f"{value:>12.0%}" for value in values)
    for out in args.out:
        write_recall(table, out, f"{args.model.name}: recall of a key")


def add_tasks_command(commands: Commands) -> None:
    """`evaluate.py tasks`: tasks of lm-evaluation-harness."""
    parser = _parser(commands, "tasks", "Tasks of lm-evaluation-harness (pip install lm_eval)", _tasks)
    parser.add_argument("--tasks", required=True, help="their names, separated by commas: lambada_openai,piqa")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question; default: that of the task")
    parser.add_argument("--task-folder", metavar="DIR", type=Path, help="folder with YAML files of your own tasks")
    parser.add_argument("--limit", type=int, help="use only so many questions of each task")
    parser.add_argument(
        "--out", metavar="FILE.json", type=Path, action="append", default=[], help="write results to FILE"
    )


def _tasks(args: argparse.Namespace) -> Iterator[str]:
    from trainer.evaluate.harness import run_tasks, write_results

    check_outputs(args.out, (".json",))
    options = EvaluationOptions(ctx_len=args.ctx_len, rows=args.batch_size)
    model = load_model(args.model, device=args.device, dtype=args.dtype)
    tokenizer = pick_tokenizer(args.tokenizer, model.shape.vocab_size, args.model)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    results = run_tasks(
        model, tokenizer, names, options, num_fewshot=args.num_fewshot, limit=args.limit, task_folder=args.task_folder
    )
    for task, metrics in results.items():
        shown = " ".join(f"{name}={value:.4f}" for name, value in metrics.items() if isinstance(value, float))
        yield f"{task}: {shown}"
    for out in args.out:
        write_results(results, out)
