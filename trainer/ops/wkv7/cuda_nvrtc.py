"""The tensor-core kernels without nvcc: compiled in memory by NVRTC, which PyTorch's CUDA builds bring along.

It takes about a second per process and card, so nothing is cached. Kernels are launched through the CUDA driver one after
the other in the caller's stream, where the library that nvcc makes runs several side by side; results are the same bits.
The sequential kernels and those of `kernels/step/` need nvcc.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import KernelError
from trainer.logs import get_logger, log_once

__all__ = ["compile_kernels", "find_nvrtc", "launch"]

_SOURCES = Path(__file__).resolve().parents[3] / "kernels" / "wkv7"
# Integer types of 64-bit Linux; NVRTC has no C library.
_STDINT = b"""
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef int int32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
"""
_SIZES = "wkv7_sizes"
_MAX_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FIX = "install the CUDA toolkit or set CUDA_HOME to it, or set model.kernel: chunked"
_logger = get_logger(__name__)


def _scan(reverse: bool, warps: int) -> str:
    return f"<{str(reverse).lower()},{warps}>"


# Kernel: threads per block and shared memory at launch, as the sources name them.
_KERNELS = {
    "prepare_kernel<false>": ("kChunkThreads", "0"),
    "prepare_kernel<true>": ("kChunkThreads", "0"),
    "gradients_kernel": ("kChunkThreads", "sizeof(GradientsShared)"),
} | {
    f"scan_kernel{scan}": (f"Scan{scan}::kThreads", f"Scan{scan}::kSharedBytes")
    for scan in (_scan(reverse, warps) for reverse in (False, True) for warps in (1, 2, 4))
}


def _source() -> str:
    """The kernels, and numbers of theirs to read back."""
    numbers = [number for pair in _KERNELS.values() for number in pair] + ["sizeof(Wkv7ChunkedArgs)"]
    values = ", ".join(f"static_cast<int64_t>({number})" for number in numbers)
    return f"""#include "gradients.cuh"
#include "scan.cuh"
using namespace wkv7;
extern "C" __device__ const int64_t {_SIZES}[] = {{{values}}};
"""


def _package_folders() -> Iterator[Path]:
    """Where PyTorch's wheels keep CUDA's libraries and headers."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(x) for x in spec.submodule_search_locations or ()] if spec else []
    for root in roots:
        yield from sorted(path for path in root.iterdir() if path.is_dir())
    yield Path("/usr/local/cuda")


@functools.cache
def find_nvrtc() -> tuple[Path, Path] | None:
    """NVRTC's library and the folder of CUDA's headers, of PyTorch's CUDA version, or None."""
    major = (torch.version.cuda or "").split(".")[0]
    folders = list(_package_folders())
    names = (f"lib/libnvrtc.so.{major}", f"lib64/libnvrtc.so.{major}")
    libraries = [path for folder in folders for name in names if (path := folder / name).exists()]
    headers = [folder / "include" for folder in folders if (folder / "include" / "cuda_bf16.h").exists()]
    return (libraries[0], headers[0]) if major and libraries and headers else None


def compile_kernels(arch: int, nvrtc: Path, headers: Path) -> tuple[bytes, dict[str, bytes]]:
    """Machine code for one architecture, and the mangled name of each kernel.

    Args:
        arch: compute capability without the dot, for example 90.
        nvrtc: the library.
        headers: folder with cuda_bf16.h.

    Raises:
        KernelError: it does not compile.
    """
    library = ctypes.CDLL(str(nvrtc))
    program = ctypes.c_void_p()
    one_name, one_text = (ctypes.c_char_p * 1)(b"stdint.h"), (ctypes.c_char_p * 1)(_STDINT)
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), _source().encode(), b"wkv7.cu", 1, one_text, one_name
    )  # fmt: skip
    options = [f"--gpu-architecture=sm_{arch}", "-std=c++17", f"-I{_SOURCES}", f"-I{headers}"]
    expressions = {name: f"wkv7::{name}".encode() for name in _KERNELS}
    for expression in expressions.values():
        status = status or library.nvrtcAddNameExpression(program, expression)
    encoded = [option.encode() for option in options]
    status = status or library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    if status != 0:
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
        reason = next((line for line in log.splitlines() if "error" in line), f"status {status}")
        raise KernelError(nvrtc, "compiling the CUDA kernels failed", found=reason, fix=_FIX)
    code = _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    mangled = {}
    for name, expression in expressions.items():
        found = ctypes.c_char_p()
        library.nvrtcGetLoweredName(program, expression, ctypes.byref(found))
        assert found.value, name
        mangled[name] = found.value
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, mangled


def _text(size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


class _Module:
    """The loaded kernels of one card."""

    def __init__(self, device: int) -> None:
        found = find_nvrtc()
        assert found is not None
        major, minor = torch.cuda.get_device_capability(device)
        code, mangled = compile_kernels(major * 10 + minor, *found)
        log_once(
            _logger, "nvcc was not found: compiled the WKV-7 kernels with NVRTC; with nvcc they run a little faster"
        )
        self.driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._check(self.driver.cuModuleLoadData(ctypes.byref(module), code), "loading")
        sizes = self._numbers(module)
        self.args_bytes = sizes[-1]
        self.threads, self.shared, self.functions = {}, {}, {}
        for index, (name, symbol) in enumerate(mangled.items()):
            function = ctypes.c_void_p()
            self._check(self.driver.cuModuleGetFunction(ctypes.byref(function), module, symbol), name)
            self.threads[name], self.shared[name] = sizes[2 * index], sizes[2 * index + 1]
            status = self.driver.cuFuncSetAttribute(function, _MAX_SHARED_MEMORY, self.shared[name])
            self._check(status, name)
            self.functions[name] = function

    def _numbers(self, module: ctypes.c_void_p) -> list[int]:
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self.driver.cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(size), module, _SIZES.encode()
        )  # fmt: skip
        self._check(status, _SIZES)
        numbers = (ctypes.c_int64 * (size.value // 8))()
        self._check(self.driver.cuMemcpyDtoH_v2(numbers, address, size), _SIZES)
        return list(numbers)

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise KernelError(f"CUDA kernel {what}", "the driver refused it", found=f"CUresult {status}", fix=_FIX)

    def run(self, name: str, blocks: int, args: ctypes.Structure, stream: int) -> None:
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        status = self.driver.cuLaunchKernel(
            self.functions[name], blocks, 1, 1, self.threads[name], 1, 1, self.shared[name], ctypes.c_void_p(stream),
            parameters, None,
        )  # fmt: skip
        self._check(status, name)


@functools.cache
def _module(device: int) -> _Module:
    return _Module(device)


def launch(r: Tensor, args: ctypes.Structure, reverse: bool) -> None:
    """Run the forward or the backward pass in the current stream.

    Args:
        r: receptance [B,T,H,64] of the call: its device.
        args: `ChunkedArgs` with every field that the pass needs, and `piece`.
        reverse: backward.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    with torch.cuda.device(r.device):
        module = _module(r.device.index)
        assert module.args_bytes == ctypes.sizeof(args), "differs from struct Wkv7ChunkedArgs"
        stream = torch.cuda.current_stream(r.device).cuda_stream
        rows = args.batch * args.heads
        for part in _pieces(args, reverse):
            chunk_blocks = rows * (part.window_end - part.window_begin)
            if part.warps != 4:  # else the scan does it
                module.run(f"prepare_kernel<{str(reverse).lower()}>", chunk_blocks, part, stream)
            module.run(f"scan_kernel{_scan(reverse, part.warps)}", rows * (4 // part.warps), part, stream)
            if reverse:
                module.run("gradients_kernel", chunk_blocks, part, stream)


def _pieces(args: ctypes.Structure, reverse: bool) -> Iterator[ctypes.Structure]:
    """The parts of a pass in the order of the scan, as `piece_of` in kernels/wkv7/chunked.cu with one buffer."""
    begin, end = args.window_begin, args.window_end
    starts = range(begin, end, args.piece)
    for index in range(len(starts)):
        part = type(args).from_buffer_copy(args)
        if reverse:
            part.window_end = end - index * args.piece
            part.window_begin = max(begin, part.window_end - args.piece)
            if index > 0:
                part.dstate_in = args.dstate
        else:
            part.window_begin = starts[index]
            part.window_end = min(end, part.window_begin + args.piece)
            if index > 0:
                part.state = args.state_out
        yield part
