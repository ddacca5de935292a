// Launchers of the sequential WKV-7 kernels, for ctypes: plain pointers, no PyTorch. Every launcher returns a
// cudaError_t as int, uses the given device and stream, allocates nothing and never waits for the GPU.
#include <cuda_runtime.h>

#include "sequential.cuh"

namespace {

using namespace wkv7;

enum DType { kFloat32 = 0, kBFloat16 = 1 };

int launch(void (*kernel)(Wkv7Args), int64_t blocks, int threads, int shared_bytes, const Wkv7Args& args,
           cudaStream_t stream) {
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <int N, typename IO>
int forward(const Wkv7Args& args, cudaStream_t stream) {
  using C = Chain<N>;
  return launch(forward_kernel<N, IO>, args.batch * args.heads * C::kSplits, C::kThreads, C::kSharedBytes, args, stream);
}

template <int N, typename IO>
int backward(const Wkv7Args& args, cudaStream_t stream) {
  using C = Chain<N>;
  using W = Windows<N>;
  const int64_t batch_heads = args.batch * args.heads;
  const int status = launch(backward_chain_kernel<N, IO>, batch_heads * C::kSplits, C::kThreads, C::kSharedBytes, args,
                            stream);
  if (status != cudaSuccess) return status;
  return launch(backward_windows_kernel<N, IO>, batch_heads * (args.window_end - args.window_begin), W::kThreads,
                W::kSharedBytes, args, stream);
}

template <template <int, typename> class Launcher, int N>
int with_dtype(int dtype, const Wkv7Args& args, cudaStream_t stream) {
  if (dtype == kFloat32) return Launcher<N, float>::run(args, stream);
  if (dtype == kBFloat16) return Launcher<N, __nv_bfloat16>::run(args, stream);
  return cudaErrorInvalidValue;
}

template <template <int, typename> class Launcher>
int dispatch(int device, int head_size, int dtype, const Wkv7Args& args, cudaStream_t stream) {
  const cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  switch (head_size) {
    case 16: return with_dtype<Launcher, 16>(dtype, args, stream);
    case 32: return with_dtype<Launcher, 32>(dtype, args, stream);
    case 64: return with_dtype<Launcher, 64>(dtype, args, stream);
    case 128: return with_dtype<Launcher, 128>(dtype, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <int N, typename IO>
struct Forward {
  static int run(const Wkv7Args& args, cudaStream_t stream) { return forward<N, IO>(args, stream); }
};
template <int N, typename IO>
struct Backward {
  static int run(const Wkv7Args& args, cudaStream_t stream) { return backward<N, IO>(args, stream); }
};

template <int N>
int64_t shared_bytes() {
  return Chain<N>::kSharedBytes > Windows<N>::kSharedBytes ? Chain<N>::kSharedBytes : Windows<N>::kSharedBytes;
}

}  // namespace

extern "C" {

int64_t wkv7_args_bytes() { return sizeof(Wkv7Args); }

// The most shared memory that a block of any kernel of this head size asks for; 0: this head size is not compiled.
int64_t wkv7_shared_bytes(int head_size) {
  switch (head_size) {
    case 16: return shared_bytes<16>();
    case 32: return shared_bytes<32>();
    case 64: return shared_bytes<64>();
    case 128: return shared_bytes<128>();
    default: return 0;
  }
}

const char* wkv7_error_string(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int wkv7_forward(int device, int head_size, int dtype, const Wkv7Args* args, void* stream) {
  return dispatch<Forward>(device, head_size, dtype, *args, static_cast<cudaStream_t>(stream));
}

int wkv7_backward(int device, int head_size, int dtype, const Wkv7Args* args, void* stream) {
  return dispatch<Backward>(device, head_size, dtype, *args, static_cast<cudaStream_t>(stream));
}
}
