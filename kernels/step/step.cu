// Kernels of the training step besides the recurrence, for ctypes: plain pointers, no PyTorch. Every launcher returns
// a cudaError_t as int, uses the given device and stream, allocates nothing and never waits for the GPU.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kRowThreads = 512;
constexpr int kVector = 8;  // bfloat16 values in 16 bytes

struct Peak {
  float value;
  int index;
  float sum;  // of exp(x - value)
};

// The larger value wins, the lower index on ties, so that the order of reduction does not matter for the position.
__device__ __forceinline__ Peak merge(const Peak& a, const Peak& b) {
  const bool first = a.value > b.value || (a.value == b.value && a.index < b.index);
  const Peak& top = first ? a : b;
  const Peak& low = first ? b : a;
  const float scale = low.sum > 0.f ? __expf(low.value - top.value) : 0.f;
  return {top.value, top.index, top.sum + low.sum * scale};
}

__device__ __forceinline__ Peak shuffle_down(const Peak& p, int offset) {
  return {__shfl_down_sync(~0u, p.value, offset), __shfl_down_sync(~0u, p.index, offset),
          __shfl_down_sync(~0u, p.sum, offset)};
}

__device__ __forceinline__ void load8(const __nv_bfloat16* from, float (&to)[kVector]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void store8(__nv_bfloat16* to, const float (&from)[kVector]) {
  uint4 raw;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = raw;
}

__device__ Peak row_peak(const __nv_bfloat16* row, int64_t vocab) {
  Peak peak = {-INFINITY, INT32_MAX, 0.f};
  for (int64_t at = threadIdx.x * kVector; at < vocab; at += kRowThreads * kVector) {
    float x[kVector];
    load8(row + at, x);
    Peak block = {x[0], static_cast<int>(at), 0.f};
#pragma unroll
    for (int i = 1; i < kVector; ++i) {
      if (x[i] > block.value) block = {x[i], static_cast<int>(at) + i, 0.f};
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) block.sum += __expf(x[i] - block.value);
    peak = merge(peak, block);
  }
  __shared__ Peak shared[kRowThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) peak = merge(peak, shuffle_down(peak, offset));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = peak;
  __syncthreads();
  peak = shared[0];
#pragma unroll
  for (int i = 1; i < kRowThreads / 32; ++i) peak = merge(peak, shared[i]);
  return peak;
}

// One block per row: loss[row] = weight * (logsumexp - logit of the target), and the logits become their gradient
// weight * (softmax - onehot(target) + l2wrap * max * onehot(argmax)). vocab is a multiple of 8.
__global__ void __launch_bounds__(kRowThreads)
    cross_entropy_kernel(__nv_bfloat16* logits, const int64_t* targets, const float* weights, float* losses, int64_t vocab,
                         float l2wrap, bool with_gradient) {
  __nv_bfloat16* row = logits + static_cast<int64_t>(blockIdx.x) * vocab;
  const int64_t target = targets[blockIdx.x];
  const float weight = weights[blockIdx.x];
  const float target_logit = __bfloat162float(row[target]);
  const Peak peak = row_peak(row, vocab);
  const float log_sum = peak.value + logf(peak.sum);
  if (threadIdx.x == 0) losses[blockIdx.x] = weight * (log_sum - target_logit);
  if (!with_gradient) return;
  for (int64_t at = threadIdx.x * kVector; at < vocab; at += kRowThreads * kVector) {
    float x[kVector];
    load8(row + at, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float grad = __expf(x[i] - log_sum);
      if (at + i == target) grad -= 1.f;
      if (at + i == peak.index) grad += l2wrap * peak.value;
      x[i] = weight == 0.f ? 0.f : weight * grad;
    }
    store8(row + at, x);
  }
}

// total += gradient, in float32.
__global__ void accumulate_kernel(float* total, const __nv_bfloat16* gradient, int64_t count) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  if (at + kVector <= count) {
    float g[kVector];
    load8(gradient + at, g);
    float4* out = reinterpret_cast<float4*>(total + at);
    float4 low = out[0], high = out[1];
    low.x += g[0], low.y += g[1], low.z += g[2], low.w += g[3];
    high.x += g[4], high.y += g[5], high.z += g[6], high.w += g[7];
    out[0] = low;
    out[1] = high;
  } else {
    for (int64_t i = at; i < count; ++i) total[i] += __bfloat162float(gradient[i]);
  }
}

}  // namespace

extern "C" {

int step_cross_entropy(int device, void* logits, const void* targets, const void* weights, void* losses, int64_t rows,
                       int64_t vocab, float l2wrap, int with_gradient, cudaStream_t stream) {
  const cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  if (rows < 1 || rows > INT32_MAX || vocab % kVector) return cudaErrorInvalidValue;
  cross_entropy_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, stream>>>(
      static_cast<__nv_bfloat16*>(logits), static_cast<const int64_t*>(targets), static_cast<const float*>(weights),
      static_cast<float*>(losses), vocab, l2wrap, with_gradient != 0);
  return cudaGetLastError();
}

int step_accumulate(int device, void* total, const void* gradient, int64_t count, cudaStream_t stream) {
  const cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  constexpr int kThreads = 256;
  const int64_t blocks = (count + kThreads * kVector - 1) / (kThreads * kVector);
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  accumulate_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<float*>(total), static_cast<const __nv_bfloat16*>(gradient), count);
  return cudaGetLastError();
}
}
