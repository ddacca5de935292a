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

// The same for long rows of up to kHeldThreads * kHeldVectors * kVector logits, which are read once: a thread holds its
// part of a row in registers, while its part of the block's next row is on its way to shared memory. From sm_80 on.
constexpr int kHeldThreads = 512, kHeldVectors = 16, kWarps = kHeldThreads / 32;
constexpr int64_t kShortestHeld = 16384;
constexpr uint32_t kTwoMinusInfinities = 0xff80ff80u;
constexpr float kLog2E = 1.4426950408889634f;

struct HeldRow {
  uint4 next[kHeldVectors][kHeldThreads];
  float largest[kWarps], sums[kWarps];
  int first[2];  // position of the largest logit, of every other row: a reader may be one row behind
};

// `own`: the thread's first vector of a row; j is the thread's if j * kHeldThreads < left.
__device__ __forceinline__ void fetch_row(HeldRow& shared, const __nv_bfloat16* own, int left) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.next[0][threadIdx.x]));
#pragma unroll
  for (int j = 0; j < kHeldVectors; ++j)
    if (j * kHeldThreads < left)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + j * kHeldThreads * 16),
                   "l"(own + j * kHeldThreads * kVector)
                   : "memory");
#endif
}

__device__ __forceinline__ void wait_for_row() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void unpack8(const uint4& raw, float (&to)[kVector]) {
  to[0] = bf16_low(raw.x), to[1] = bf16_high(raw.x), to[2] = bf16_low(raw.y), to[3] = bf16_high(raw.y);
  to[4] = bf16_low(raw.z), to[5] = bf16_high(raw.z), to[6] = bf16_low(raw.w), to[7] = bf16_high(raw.w);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The same words, but the compiler does not know: it unpacks them anew in each phase instead of keeping the numbers.
__device__ __forceinline__ void hide(uint4 (&held)[kHeldVectors]) {
#pragma unroll
  for (int j = 0; j < kHeldVectors; ++j)
    asm volatile("" : "+r"(held[j].x), "+r"(held[j].y), "+r"(held[j].z), "+r"(held[j].w));
}

// Position in the row of the thread's first number that equals `top`; there is one.
__device__ __forceinline__ int first_equal(const uint4 (&held)[kHeldVectors], float top) {
  int found = 0;
#pragma unroll
  for (int j = kHeldVectors - 1; j >= 0; --j) {
    float x[kVector];
    unpack8(held[j], x);
#pragma unroll
    for (int i = kVector - 1; i >= 0; --i)
      if (x[i] == top) found = j * kHeldThreads * kVector + i;
  }
  return found + static_cast<int>(threadIdx.x) * kVector;
}

// The gradient of one row, from what its threads hold.
// `target`, `first`: positions from the thread's first number on.
__device__ __forceinline__ void write_gradient(__nv_bfloat16* own, const uint4 (&held)[kHeldVectors], int left,
                                               int target, int first, float log_sum, float top_term, float weight) {
  const float shift = -log_sum * kLog2E;
#pragma unroll
  for (int j = 0; j < kHeldVectors; ++j) {
    constexpr int kStep = kHeldThreads * kVector;
    if (j * kHeldThreads >= left) break;
    float x[kVector];
    unpack8(held[j], x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = exp2_fast(fmaf(x[i], kLog2E, shift));
    const unsigned to_target = target - j * kStep, to_first = first - j * kStep;
    if (to_target < kVector || to_first < kVector) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (to_target == i) x[i] -= 1.f;
        if (to_first == i) x[i] += top_term;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = weight == 0.f ? 0.f : weight * x[i];
    store8(own + j * kStep, x);
  }
}

__global__ void __launch_bounds__(kHeldThreads, 1)
    held_cross_entropy_kernel(__nv_bfloat16* logits, const int64_t* targets, const float* weights, float* losses,
                              int64_t rows, int vectors, float l2wrap, bool with_gradient) {
  extern __shared__ uint4 shared_memory[];
  HeldRow& shared = *reinterpret_cast<HeldRow*>(shared_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t vocab = static_cast<int64_t>(vectors) * kVector;
  const int begin = threadIdx.x * kVector, left = vectors - static_cast<int>(threadIdx.x);
  fetch_row(shared, logits + blockIdx.x * vocab + begin, left);
  int turn = 0;
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x, turn ^= 1) {
    __nv_bfloat16* row = logits + index * vocab;
    uint4 held[kHeldVectors];
    wait_for_row();
    float own = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeldVectors; ++j) {
      held[j] = j * kHeldThreads < left
                    ? shared.next[j][threadIdx.x]
                    : make_uint4(kTwoMinusInfinities, kTwoMinusInfinities, kTwoMinusInfinities, kTwoMinusInfinities);
      float x[kVector];
      unpack8(held[j], x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) own = fmaxf(own, x[i]);
    }
    // What the thread has read it may overwrite; nobody else reads it.
    if (index + gridDim.x < rows) fetch_row(shared, row + gridDim.x * vocab + begin, left);
    hide(held);
    const float of_warp = warp_max(own);
    if (lane == 0) shared.largest[warp] = of_warp;
    if (threadIdx.x == 0) shared.first[turn] = INT32_MAX;
    __syncthreads();
    const float top = warp_max(shared.largest[lane % kWarps]), shift = -top * kLog2E;
    float sum = 0.f, sum_odd = 0.f;
#pragma unroll
    for (int j = 0; j < kHeldVectors; ++j) {
      float x[kVector];
      unpack8(held[j], x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) (i % 2 ? sum_odd : sum) += exp2_fast(fmaf(x[i], kLog2E, shift));
    }
    if (own == top) atomicMin(&shared.first[turn], first_equal(held, top));
    sum = warp_sum(sum + sum_odd);
    if (lane == 0) shared.sums[warp] = sum;
    hide(held);
    const int target = static_cast<int>(targets[index]);
    const float weight = weights[index];
    const float target_logit = threadIdx.x == 0 ? __bfloat162float(row[target]) : 0.f;  // before it is overwritten
    __syncthreads();
    const float log_sum = top + logf(warp_sum(lane < kWarps ? shared.sums[lane] : 0.f));
    if (threadIdx.x == 0) losses[index] = weight * (log_sum - target_logit);
    if (with_gradient)
      write_gradient(row + begin, held, left, target - begin, shared.first[turn] - begin, log_sum, l2wrap * top, weight);
  }
}

// totals[i] += gradients[i], in float32, for many tensors in one launch.
constexpr int kMostTensors = 96, kAddThreads = 256, kAddVectors = 4;
constexpr int64_t kAddBlock = kAddThreads * kAddVectors * kVector;

struct Additions {
  float* totals[kMostTensors];
  const __nv_bfloat16* gradients[kMostTensors];
  int64_t counts[kMostTensors];
  int first_block[kMostTensors + 1];  // of each tensor
  int tensors;
};

__device__ __forceinline__ void add_vector(float* total, const __nv_bfloat16* gradient, int64_t at, int64_t count) {
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

__global__ void __launch_bounds__(kAddThreads) accumulate_kernel(const Additions additions) {
  const int block = blockIdx.x;
  int low = 0, high = additions.tensors;  // the tensor that holds this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (additions.first_block[middle] <= block) low = middle;
    else high = middle;
  }
  const int64_t begin = (block - additions.first_block[low]) * kAddBlock;
#pragma unroll
  for (int j = 0; j < kAddVectors; ++j)
    add_vector(additions.totals[low], additions.gradients[low], begin + (j * kAddThreads + threadIdx.x) * kVector,
               additions.counts[low]);
}

}  // namespace

extern "C" {

int step_cross_entropy(int device, void* logits, const void* targets, const void* weights, void* losses, int64_t rows,
                       int64_t vocab, float l2wrap, int with_gradient, cudaStream_t stream) {
  cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  if (rows < 1 || rows > INT32_MAX || vocab % kVector) return cudaErrorInvalidValue;
  auto* const x = static_cast<__nv_bfloat16*>(logits);
  auto* const target = static_cast<const int64_t*>(targets);
  auto* const weight = static_cast<const float*>(weights);
  int most_shared = 0, processors = 0;
  status = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const bool fits = vocab <= int64_t{kHeldThreads} * kHeldVectors * kVector && most_shared >= int{sizeof(HeldRow)};
  if (fits && vocab >= kShortestHeld) {
    status = cudaFuncSetAttribute(held_cross_entropy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  sizeof(HeldRow));
    if (status != cudaSuccess) return status;
    const int64_t blocks = rows < processors ? rows : processors;
    held_cross_entropy_kernel<<<static_cast<unsigned>(blocks), kHeldThreads, sizeof(HeldRow), stream>>>(
        x, target, weight, static_cast<float*>(losses), rows, static_cast<int>(vocab / kVector), l2wrap,
        with_gradient != 0);
  } else {
    cross_entropy_kernel<<<static_cast<unsigned>(rows), kRowThreads, 0, stream>>>(
        x, target, weight, static_cast<float*>(losses), vocab, l2wrap, with_gradient != 0);
  }
  return cudaGetLastError();
}

// The most tensors of one call of step_accumulate.
int64_t step_most_tensors() { return kMostTensors; }

int step_accumulate(int device, int tensors, float* const* totals, const void* const* gradients, const int64_t* counts,
                    cudaStream_t stream) {
  const cudaError_t status = cudaSetDevice(device);
  if (status != cudaSuccess) return status;
  if (tensors < 1 || tensors > kMostTensors) return cudaErrorInvalidValue;
  Additions additions;
  additions.tensors = tensors;
  int64_t blocks = 0;
  for (int i = 0; i < tensors; ++i) {
    additions.totals[i] = totals[i];
    additions.gradients[i] = static_cast<const __nv_bfloat16*>(gradients[i]);
    additions.counts[i] = counts[i];
    additions.first_block[i] = static_cast<int>(blocks);
    blocks += (counts[i] + kAddBlock - 1) / kAddBlock;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  }
  additions.first_block[tensors] = static_cast<int>(blocks);
  if (blocks < 1) return cudaErrorInvalidConfiguration;
  accumulate_kernel<<<static_cast<unsigned>(blocks), kAddThreads, 0, stream>>>(additions);
  return cudaGetLastError();
}
}
