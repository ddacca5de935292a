"""Compiling the CUDA kernels: the cache, the lock, killed builds, and what the kernels need. No GPU is used."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.errors import KernelError
from trainer.ops.wkv7 import build, cuda_chunked

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")

FAKE_NVCC = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi
echo run >> "$FAKE_LOG"
while [ "$#" -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done
printf half > "$out"
sleep "${FAKE_SECONDS:-0}"
if [ -n "$FAKE_FAILURE" ]; then echo "$FAKE_FAILURE" >&2; exit 1; fi
printf whole >> "$out"
"""


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes a file in two steps and logs every run; returns its log."""
    compiler = tmp_path / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(FAKE_NVCC)
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "runs"))
    return tmp_path / "runs"


def runs(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_second_call_takes_the_cached_library(fake_nvcc: Path, tmp_path: Path) -> None:
    library = build.compile_sources([90, 80])
    assert library.parent == tmp_path / "cache"
    assert library.read_text() == "halfwhole"
    assert build.compile_sources([80, 90, 90]) == library
    assert runs(fake_nvcc) == 1
    assert build.compile_sources([90]) != library
    assert runs(fake_nvcc) == 2


@pytest.mark.parametrize("damage", ["truncated", "no checksum", "checksum of nothing"])
def test_damaged_library_is_compiled_again(fake_nvcc: Path, damage: str) -> None:
    library = build.compile_sources([90])
    if damage == "truncated":
        library.write_text("half")
    elif damage == "no checksum":
        library.with_suffix(".json").unlink()
    else:
        library.with_suffix(".json").write_text("")
    assert build.compile_sources([90]).read_text() == "halfwhole"
    assert runs(fake_nvcc) == 2


@pytest.mark.usefixtures("fake_nvcc")
@pytest.mark.fault(59)
def test_leftover_lock_file_does_not_block() -> None:
    library = build.compile_sources([90])
    lock = library.with_suffix(".lock")
    assert lock.exists()
    library.unlink()
    lock.write_text("process 1 on a machine that is gone")
    began = time.monotonic()
    assert build.compile_sources([90]).read_text() == "halfwhole"
    assert time.monotonic() - began < 5


@pytest.mark.fault(59)
def test_killed_build_leaves_nothing_that_is_used(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "60")
    code = "from trainer.ops.wkv7 import build; build.compile_sources([90])"
    builder = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while runs(fake_nvcc) == 0:
        assert builder.poll() is None
        time.sleep(0.05)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    monkeypatch.setenv("FAKE_SECONDS", "0")

    library = build.compile_sources([90])
    assert library.read_text() == "halfwhole"
    assert not list(library.parent.glob("*.tmp-*"))


def _compile(results: multiprocessing.Queue) -> None:
    results.put(str(build.compile_sources([90])))


@pytest.mark.fault(59)
def test_processes_that_start_together_compile_once(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "1")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_compile, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=30) for _ in processes}) == 1
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert runs(fake_nvcc) == 1


@pytest.mark.fault(59)
def test_waiting_process_says_who_compiles(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "2")
    monkeypatch.setattr(build, "_QUIET_WAIT_S", 0.2)
    context = multiprocessing.get_context("fork")
    builder = context.Process(target=_compile, args=(context.Queue(),))
    builder.start()
    while runs(fake_nvcc) == 0:
        time.sleep(0.05)
    build.compile_sources([90])
    builder.join()
    waits = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert len(waits) == 1
    assert f"process {builder.pid} on " in waits[0]


@pytest.mark.usefixtures("fake_nvcc")
def test_failed_compilation_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "nvcc fatal   : Unsupported gpu architecture 'compute_999'")
    with pytest.raises(KernelError, match="Unsupported gpu architecture.*model.kernel: chunked") as caught:
        build.compile_sources([999])
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.usefixtures("fake_nvcc")
def test_library_that_does_not_load_is_a_user_error() -> None:
    with pytest.raises(KernelError, match="do not load"):
        build.load_library((90,))


def test_cache_folder_that_cannot_be_made_is_a_user_error(
    fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelError, match="RWKV_KERNEL_CACHE"):
        build.compile_sources([90])
    assert runs(fake_nvcc) == 0


@pytest.mark.fault(60)
def test_missing_compiler_is_named_with_the_fallback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "_DEFAULT_NVCC", tmp_path / "nvcc")
    assert build.find_nvcc() is None
    with pytest.raises(KernelError, match="nvcc was not found.*model.kernel: chunked"):
        build.compile_sources([90])


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path))
    assert build.cache_dir() == tmp_path
    monkeypatch.delenv("RWKV_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / "rwkv-trainer" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "rwkv-trainer" / "kernels"


def test_assembler_report_is_read() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function '_Zfirst' for 'sm_90'\n"
        "ptxas info    : Function properties for _Zfirst\n"
        "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 101 registers, used 1 barriers, 2048 bytes smem, 528 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function '_Zsecond' for 'sm_120'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers, 400 bytes cmem[0]\n"
    )
    assert build.parse_resources(log) == [
        build.KernelResources(arch=90, kernel="_Zfirst", registers=101, spill_bytes=28, shared_bytes=2048),
        build.KernelResources(arch=120, kernel="_Zsecond", registers=40, spill_bytes=0, shared_bytes=0),
    ]


@pytest.mark.slow
@needs_nvcc
def test_kernels_compile_within_the_limits_of_every_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path))
    archs = (80, 90, 120)
    usage = build.resource_usage(archs)
    tensor_core = [kernel for kernel in usage if "Wkv7ChunkedArgs" in kernel.kernel]
    sequential = [kernel for kernel in usage if "Wkv7Args" in kernel.kernel]
    # Three kernels, two dtypes, four head sizes; and prepare, scan with 1, 2 and 4 warps, both ways, and gradients.
    assert len(sequential) == len(archs) * 3 * 2 * 4
    assert len(tensor_core) == len(archs) * (2 * (1 + 3) + 1)
    for kernel in usage:
        wide_float32 = "ILi128Ef" in kernel.kernel
        holds_a_row = "held_cross_entropy" in kernel.kernel  # the few bytes of a row that it spills stay in the cache
        assert kernel.spill_bytes <= (512 if holds_a_row else 256 if wide_float32 else 0), kernel
    assert all(kernel.shared_bytes == 0 for kernel in sequential)
    assert max(kernel.shared_bytes for kernel in tensor_core) <= 16 * 1024

    library = build.load_library(archs)
    for name in (
        "wkv7_shared_bytes",
        "wkv7_chunked_shared_bytes",
        "wkv7_chunked_operands_bytes",
        "wkv7_chunked_pairs_bytes",
        "wkv7_chunked_buffers",
    ):
        getattr(library, name).restype = ctypes.c_int64
    for head_size in (16, 32, 64, 128):
        assert 0 < library.wkv7_shared_bytes(head_size) <= 99 * 1024
    assert library.wkv7_shared_bytes(48) == 0
    assert 0 < library.wkv7_chunked_shared_bytes() <= 99 * 1024
    operands = tuple(library.wkv7_chunked_operands_bytes(backward) for backward in (0, 1))
    assert operands == cuda_chunked.OPERANDS_BYTES
    assert library.wkv7_chunked_pairs_bytes() == cuda_chunked.PAIRS_BYTES
    assert tuple(library.wkv7_chunked_buffers(backward) for backward in (0, 1)) == cuda_chunked.BUFFERS


@pytest.mark.slow
@needs_nvcc
def test_tensor_core_source_compiles_for_an_architecture_without_its_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path))
    assert build.compile_sources([75]).exists()


@pytest.mark.slow
@needs_nvcc
def test_source_that_does_not_compile_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(build._SOURCES, sources)
    (sources / "sequential.cu").write_text("this is not CUDA;\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setenv("RWKV_KERNEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelError, match="error"):
        build.compile_sources([90])
