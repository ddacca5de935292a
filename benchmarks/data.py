"""Speed and memory of preparing and loading data: python benchmarks/data.py [--mb 100] [--processes 2].

Text is the running Python's own standard library, cut into documents of 4,000 characters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.schema import DataConfig
from trainer.data.encode import Encoder
from trainer.data.prepare import open_prepared, prepare
from trainer.data.source_files import JsonOptions, json_batches
from trainer.data.tokenizers import WorldTokenizer

_PIECE = 4000
_PURE_PYTHON_MB = 2


def write_documents(path: Path, num_bytes: int) -> None:
    """JSON lines of real text, `num_bytes` of them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text("utf-8", errors="ignore") for file in sorted(library.glob("**/*.py"))[:1500]]
    written = number = 0
    with path.open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            text = texts[number % len(texts)]
            number += 1
            for start in range(0, len(text), _PIECE):
                written += stream.write(json.dumps({"text": f"{text[start : start + _PIECE]}{number}"}) + "\n")
                if written >= num_bytes:
                    return


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def bench_stages(path: Path, num_bytes: int) -> None:
    """Each stage by itself, in one process."""
    batches = list(json_batches(path, JsonOptions()))[: max(1, min(num_bytes, 32_000_000) >> 22)]
    size = sum(batch.num_bytes for batch in batches) / 1e6
    texts: list[str] = []

    def parse() -> None:
        texts.extend(record["text"] for batch in batches for _, record in batch.records())

    row("cut into lines", num_bytes / 1e6, timed(lambda: sum(1 for _ in json_batches(path, JsonOptions()))))
    row("parse JSON", size, timed(parse))
    fast, slow = WorldTokenizer(), WorldTokenizer(use_rust=False)
    fast.encode_array("warm up"), slow.encode_array("warm up")
    part = "".join(texts)[: _PURE_PYTHON_MB * 1_000_000]
    mb = len(part.encode()) / 1e6
    slow_time = timed(lambda: slow.encode_array(part))
    fast_time = timed(lambda: fast.encode_array(part))
    row("tokenize, plain Python", mb, slow_time)
    row("tokenize, Rust core, the same text", mb, fast_time)
    core = timed(lambda: [fast.encode_array(text) for text in texts])
    row("tokenize, Rust core", size, core)
    plain = mb / slow_time[1]
    print(f"{'Rust core over plain Python, one core':<38} {size / core[1] / plain:10.1f} x")
    encoder = Encoder("world")
    row("parse, render and tokenize", size, timed(lambda: [encoder(batch) for batch in batches]))


def row(name: str, megabytes: float, seconds: tuple[float, float]) -> None:
    """One line of the table."""
    wall, cpu = seconds
    print(f"{name:<38} {megabytes / wall:10.1f} MB/s {megabytes / cpu:10.1f} MB per CPU second")


def bench_loader(data: DataConfig, batching: str) -> None:
    """Lanes to batches, once through the data or for 5 million tokens."""
    # Not at the top: worker processes import this file again, and torch takes seconds.
    from trainer.data.lanes import LanePlan, Lanes

    store = open_prepared(data)[0]
    for ahead in (0, 4):
        settings = DataConfig(batching=batching, chunks_per_step=4, dataloader_prefetch_factor=ahead)
        if batching == "documents":
            settings = DataConfig(batching=batching, packing_enable=True, dataloader_prefetch_factor=ahead)
        plan = LanePlan(world_size=1, rank=0, rows_per_step=16, microbatch_size=16, ctx_len=1024, seed=0)
        lanes = Lanes(store, settings, plan)
        started, tokens = time.perf_counter(), 0
        for step in lanes:
            tokens += step.num_tokens
            if tokens > 5_000_000:
                break
        name = f"loader, {batching}{' packed' if batching == 'documents' else ''}, {ahead} steps ahead"
        print(f"{name:<38} {tokens / (time.perf_counter() - started) / 1e6:10.2f} M tokens/s")


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only-prepare", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_prepare:
        data = DataConfig(source=arguments.only_prepare, data_path=arguments.into, num_proc=arguments.processes)
        summary = prepare(data)
        own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu = own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime
        size = Path(arguments.only_prepare).stat().st_size / 1e6
        row(f"preload, {arguments.processes} processes, end to end", size, (summary.seconds, cpu))
        print(f"{'  tokens':<38} {summary.tokens_per_s / 1e6:10.2f} M tokens/s")
        print(
            f"{'  peak memory, main and worker':<38} {own.ru_maxrss / 1e3:10.0f} and {workers.ru_maxrss / 1e3:.0f} MB"
        )
        return 0
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        path, prepared = Path(folder, "docs.jsonl"), str(Path(folder, "prepared"))
        write_documents(path, arguments.mb * 1_000_000)
        # In a process of its own and before anything large, because a process inherits the peak of its parent.
        command = [sys.executable, __file__, "--only-prepare", str(path), "--into", prepared]
        subprocess.run([*command, f"--processes={arguments.processes}"], check=True)
        bench_stages(path, path.stat().st_size)
        for batching in ("stream", "documents"):
            bench_loader(DataConfig(data_path=prepared), batching)
    return 0


if __name__ == "__main__":
    sys.exit(main())
