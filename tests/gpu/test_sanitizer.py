"""The CUDA kernels under NVIDIA's compute-sanitizer, on small shapes. Also a script: `python tests/gpu/test_sanitizer.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND_SOMETHING = 9
PROGRAM = """
import torch
from trainer.ops.step_kernels import add_gradients, cross_entropy_rows
from trainer.ops.wkv7 import cuda
from trainer.ops.wkv7.cuda_launch import architectures

torch.manual_seed(0)
for kernel, tokens, heads in (("tensor_core", 40, 2), ("tensor_core", 600, 1), ("sequential", 40, 2)):
    inputs = [(0.1 * torch.randn(2, tokens, heads, 64)).bfloat16().cuda() for _ in range(7)]
    state = torch.randn(2, heads, 64, 64).cuda()
    reset = torch.zeros(2, tokens, dtype=torch.bool)
    reset[0, [3, 21]] = True
    reset = reset.cuda()
    y, after, starts = cuda.forward(*inputs[:6], state, reset, save=True, kernel=kernel)
    cuda.backward(*inputs[:6], reset, starts, inputs[6], state)
    print(kernel, tokens, float(y.float().norm()))
for vocab in (264, 20000):
    logits = torch.randn(300, vocab).bfloat16().cuda()
    cross_entropy_rows(logits, (torch.arange(300) % vocab).cuda(), torch.ones(300).cuda(), 1e-4, with_gradient=True)
sizes = (1000, 5, 70000)
add_gradients([torch.zeros(n).cuda() for n in sizes], [torch.ones(n, dtype=torch.bfloat16).cuda() for n in sizes])
torch.cuda.synchronize()
"""
# PyTorch's own kernels are not looked at, so what they write counts as never written: inputs are made on the CPU.
KERNELS = ("kns=wkv7", "kns=cross_entropy", "kns=accumulate")

try:
    import pytest
except ModuleNotFoundError:  # the file is also a program, for machines with PyTorch alone
    pytest = None


def find_sanitizer() -> str | None:
    """Path of the program."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def run(tool: str) -> subprocess.CompletedProcess[str]:
    """The program under one of the tools."""
    sanitizer = find_sanitizer()
    assert sanitizer is not None
    chosen = [part for kernel in KERNELS for part in ("--kernel-name", kernel)]
    # Without its cache every tensor is an allocation of its own, so that writing past one is seen.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": _path()}
    return subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_SOMETHING), *chosen, sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, check=False, env=environment, timeout=600,
    )  # fmt: skip


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


if pytest is not None:

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer of the CUDA toolkit")
    @pytest.mark.parametrize("tool", TOOLS)
    def test_kernels_are_clean(tool: str) -> None:
        done = run(tool)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def main() -> int:
    """Run every tool and print its summary. The exit code is 1 if one found something."""
    failed = 0
    for tool in TOOLS:
        done = run(tool)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        failed += done.returncode != 0
        sys.stdout.write(f"{tool}: exit code {done.returncode}\n")
        sys.stdout.write("\n".join(lines[-4:] if done.returncode == 0 else lines[:25] + lines[-3:]) + "\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
