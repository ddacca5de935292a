"""Compiles the CUDA kernels on first use, once per machine, into a shared library loaded with ctypes.

The library lies in a user cache folder under a name that is the hash of everything it depends on. It is written
beside its final name and moved there whole, together with its own checksum, so a build that was killed leaves
nothing that is used. The lock is an advisory file lock: the system frees it when its owner dies.

`python -m trainer.ops.wkv7.build --arch 80 90` compiles ahead of time, also on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import KernelError
from trainer.logs import get_logger, set_up_logging

__all__ = [
    "KernelResources",
    "cache_dir",
    "compile_sources",
    "find_nvcc",
    "load_library",
    "parse_resources",
    "resource_usage",
]

_SOURCES = Path(__file__).resolve().parents[3] / "kernels"
_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v", "--threads", "0")
_DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
_COMPILE_TIMEOUT_S = 1800
_QUIET_WAIT_S = 3.0
_FALLBACK = "install the CUDA toolkit or set CUDA_HOME to it, or set model.kernel: chunked"

_logger = get_logger("trainer.ops.wkv7.build")  # not __name__, which is __main__ when compiling ahead of time


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one architecture, as the assembler reports it.

    Attributes:
        arch: compute capability without the dot, for example 90.
        kernel: the function's mangled name.
        registers: registers per thread.
        spill_bytes: local memory written plus read because registers ran out.
        shared_bytes: shared memory fixed at compile time; the kernels' own is chosen at launch.
    """

    arch: int
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def find_nvcc() -> Path | None:
    """The CUDA compiler: `$CUDA_HOME/bin`, then `$PATH`, then `/usr/local/cuda/bin`. None if there is none."""
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(_DEFAULT_NVCC)
    return next((path for path in candidates if os.access(path, os.X_OK) and path.is_file()), None)


def cache_dir() -> Path:
    """Where compiled kernels are kept: `$RWKV_KERNEL_CACHE`, or `rwkv-trainer/kernels` in the user's cache folder."""
    chosen = os.environ.get("RWKV_KERNEL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rwkv-trainer" / "kernels"


def compile_sources(archs: Iterable[int]) -> Path:
    """Compile the kernels for the given architectures unless that was done before.

    Processes that ask for the same build at the same time make it once: the others wait.

    Args:
        archs: compute capabilities without the dot, for example 80, 90.

    Returns:
        The shared library.

    Raises:
        KernelError: there is no compiler, it failed, or the cache folder cannot be written.
    """
    target = _target(archs)
    if _is_whole(target.path):
        return target.path
    try:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.path.with_suffix(".lock")):
            if not _is_whole(target.path):
                _build(target)
    except OSError as error:
        raise KernelError(
            target.path.parent,
            "the compiled kernels cannot be written to this folder",
            found=str(error),
            fix="set RWKV_KERNEL_CACHE to a writable folder",
        ) from error
    return target.path


@functools.cache
def load_library(archs: tuple[int, ...]) -> ctypes.CDLL:
    """Compile if need be, and load. One library per process and set of architectures.

    Raises:
        KernelError: as for `compile_sources`, or the library does not load.
    """
    path = compile_sources(archs)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(path, "the compiled kernels do not load", found=str(error), fix="delete this file") from error


def resource_usage(archs: Iterable[int]) -> list[KernelResources]:
    """Registers, spills and shared memory of every kernel; compiles if need be."""
    return parse_resources(_read_manifest(compile_sources(archs))["log"])


def parse_resources(log: str) -> list[KernelResources]:
    """Read the assembler's report (`nvcc -Xptxas -v`)."""
    blocks = re.split(r"Compiling entry function '", log)[1:]
    return [_parse_block(block) for block in blocks]


def _parse_block(block: str) -> KernelResources:
    def number(pattern: str) -> int:
        found = re.search(pattern, block)
        return int(found.group(1)) if found else 0

    name = re.match(r"(\w+)' for 'sm_(\d+)", block)
    assert name, f"unknown format of the assembler's report: {block[:200]!r}"
    return KernelResources(
        arch=int(name.group(2)),
        kernel=name.group(1),
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


@dataclass(frozen=True)
class _Target:
    """One build: its compiler and command line without the output, and the library it makes."""

    command: tuple[str, ...]
    path: Path


def _target(archs: Iterable[int]) -> _Target:
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelError("CUDA kernels", "the compiler nvcc was not found", fix=_FALLBACK)
    chosen = sorted(set(archs))
    assert chosen, "no architecture to compile for"
    flags = [*_FLAGS, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in chosen)]
    sources = sorted(_SOURCES.rglob("*.cu"))
    key = hashlib.sha256(json.dumps([flags, _nvcc_version(nvcc)]).encode())
    for path in sorted(_SOURCES.rglob("*.cu*")):
        key.update(f"\0{path.name}\0".encode() + path.read_bytes())
    name = f"wkv7-{'-'.join(map(str, chosen))}-{key.hexdigest()[:24]}.so"
    return _Target((str(nvcc), *flags, *map(str, sources)), cache_dir() / name)


@functools.cache
def _nvcc_version(nvcc: Path) -> str:
    try:
        return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(nvcc, "the compiler does not run", found=str(error), fix=_FALLBACK) from error


def _manifest_path(library: Path) -> Path:
    return library.with_suffix(".json")


def _read_manifest(library: Path) -> dict[str, str]:
    return json.loads(_manifest_path(library).read_text())


def _is_whole(library: Path) -> bool:
    """Whether the library is there and has the bytes that its build wrote."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == _read_manifest(library)["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def _build(target: _Target) -> None:
    """Compile into a folder beside the library, then move the result into place. The caller holds the lock."""
    prefix = f"{target.path.stem}.tmp-"
    for leftover in target.path.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.path.parent))
    _logger.info("compiling the WKV-7 CUDA kernels into %s (once; takes up to a minute)", target.path.parent)
    began = time.monotonic()
    try:
        library = folder / target.path.name
        log = _run_compiler([*target.command, "-o", str(library)])
        manifest = {"sha256": hashlib.sha256(library.read_bytes()).hexdigest(), "log": log}
        _manifest_path(library).write_text(json.dumps(manifest))
        for path in (library, _manifest_path(library)):
            _sync(path)
            os.replace(path, target.path.parent / path.name)
        _sync(target.path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _logger.info("compiled the WKV-7 CUDA kernels in %.0f s", time.monotonic() - began)


def _run_compiler(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(command[0], "the compiler did not finish", found=str(error), fix=_FALLBACK) from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        lines = [line for line in log.splitlines() if line.strip()]
        reason = next(
            (line for line in lines if "error" in line or "fatal" in line), lines[-1] if lines else "no output"
        )
        raise KernelError(
            command[0],
            f"compiling the CUDA kernels failed with exit code {done.returncode}",
            found=reason,
            fix="use a CUDA toolkit that knows this GPU and its host compiler, or set model.kernel: chunked",
        )
    return log


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file. Says once who holds it if that takes more than a few seconds."""
    with path.open("a+") as file:
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - began > _QUIET_WAIT_S:
                    told = True
                    _logger.warning("waiting for the CUDA kernels: %s compiles them", path.read_text() or "a process")
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.ops.wkv7.build", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", nargs="+", type=int, required=True, help="compute capabilities without the dot: 80 90 120"
    )
    archs = parser.parse_args(arguments).arch
    set_up_logging()
    try:
        usage = resource_usage(archs)
    except KernelError as error:
        _logger.error("%s", error)
        return error.exit_code
    _logger.info("compiled: %s", compile_sources(archs))
    for kernel in usage:
        _logger.info(
            "sm_%d: %d registers, %d bytes spilled: %s",
            kernel.arch,
            kernel.registers,
            kernel.spill_bytes,
            kernel.kernel,
        )
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
