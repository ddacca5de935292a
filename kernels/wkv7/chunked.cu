// Launchers of the tensor-core WKV-7 kernels, for ctypes: plain pointers, no PyTorch. Every launcher returns a
// cudaError_t as int, uses the given device and stream, allocates nothing and never waits for the GPU.
#include <cuda_runtime.h>

#include "chunked.cuh"

namespace {

using namespace wkv7;

constexpr int kBFloat16 = 1;  // as in sequential.cu

int check(int device, int head_size, int dtype) {
  if (head_size != kSize || dtype != kBFloat16) return cudaErrorInvalidValue;
  return cudaSetDevice(device);
}

int launch(void (*kernel)(Wkv7ChunkedArgs), int64_t blocks, int threads, int shared_bytes, const Wkv7ChunkedArgs& args,
           cudaStream_t stream) {
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <bool REVERSE, int WARPS>
int scan(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  using C = Scan<REVERSE, WARPS>;
  return launch(scan_kernel<REVERSE, WARPS>, args.batch * args.heads * C::kSplits, C::kThreads, C::kSharedBytes, args,
                stream);
}

template <bool REVERSE>
int prepare_and_scan(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  const int64_t blocks = args.batch * args.heads * (args.window_end - args.window_begin);
  const int status = launch(prepare_kernel<REVERSE>, blocks, kChunkThreads, 0, args, stream);
  if (status != cudaSuccess) return status;
  switch (args.warps) {
    case 1: return scan<REVERSE, 1>(args, stream);
    case 2: return scan<REVERSE, 2>(args, stream);
    case 4: return scan<REVERSE, 4>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

extern "C" {

int64_t wkv7_chunked_args_bytes() { return sizeof(Wkv7ChunkedArgs); }

// The most shared memory that a block of any kernel asks for at launch.
int64_t wkv7_chunked_shared_bytes() {
  const int64_t scan = Scan<false, 4>::kSharedBytes, gradients = sizeof(GradientsShared);
  return scan > gradients ? scan : gradients;
}

// Bytes of `operands` per chunk of a head.
int64_t wkv7_chunked_operands_bytes(int backward) { return backward ? Operands<true>::kBytes : Operands<false>::kBytes; }

int wkv7_chunked_forward(int device, int head_size, int dtype, const Wkv7ChunkedArgs* args, void* stream) {
  const int status = check(device, head_size, dtype);
  if (status != cudaSuccess) return status;
  return prepare_and_scan<false>(*args, static_cast<cudaStream_t>(stream));
}

int wkv7_chunked_backward(int device, int head_size, int dtype, const Wkv7ChunkedArgs* args, void* stream) {
  int status = check(device, head_size, dtype);
  if (status != cudaSuccess) return status;
  status = prepare_and_scan<true>(*args, static_cast<cudaStream_t>(stream));
  if (status != cudaSuccess) return status;
  const int64_t blocks = args->batch * args->heads * (args->window_end - args->window_begin);
  return launch(gradients_kernel, blocks, kChunkThreads, sizeof(GradientsShared), *args,
                static_cast<cudaStream_t>(stream));
}
}
