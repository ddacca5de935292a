// The instructions that CUDA C++ has no function for. All of them exist from sm_80 on; for older architectures this file
// compiles to traps, so that one build can serve several cards.
//
// Fragments: a 16 x 16 matrix of bfloat16 lies in a warp as four words per lane, one per 8 x 8 block; a block's word in
// lane 4g + q holds the elements (g, 2q) and (g, 2q + 1). Results of `mma` lie the same way, as pairs of floats.
#pragma once

#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define WKV7_ASM(...) __trap()
#define WKV7_ASM_MEMORY(...) __trap()
#else
#define WKV7_ASM(...) asm(__VA_ARGS__)
#define WKV7_ASM_MEMORY(...) asm volatile(__VA_ARGS__)
#endif

namespace wkv7 {

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed = 0;
  WKV7_ASM("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y = 0.0f;
  WKV7_ASM("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y = 0.0f;
  WKV7_ASM("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows of four 8 x 8 blocks, one per lane: the same row when the two middle blocks change places.
__device__ __forceinline__ int other_order(int lane) { return (lane & 7) | (lane & 8) << 1 | (lane & 16) >> 1; }

// d [16,8] += a [16,16] b [16,8]. `b` is given by its transpose [8,16]: two blocks of a row.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WKV7_ASM("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 blocks; lane i gives the address of row i % 8 of block i / 8.
__device__ __forceinline__ void load_blocks(uint32_t (&to)[4], const void* row) {
  [[maybe_unused]] const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  WKV7_ASM_MEMORY("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, every block transposed.
__device__ __forceinline__ void load_blocks_transposed(uint32_t (&to)[4], const void* row) {
  [[maybe_unused]] const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  WKV7_ASM_MEMORY("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Stores the four 8 x 8 blocks of a 16 x 16 matrix, each row-major, one after the other.
__device__ __forceinline__ void store_blocks(uint8_t* to, const uint32_t (&from)[4], int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to + lane * 16));
  WKV7_ASM_MEMORY("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(from[0]),
                  "r"(from[1]), "r"(from[2]), "r"(from[3])
                  : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + i * 128 + lane * 4) = from[i];
#endif
}

__device__ __forceinline__ uint32_t transposed_block(uint32_t block) {
  uint32_t to = 0;
  WKV7_ASM_MEMORY("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(block));
  return to;
}

// The same for the transpose of the matrix, whose blocks are (0,0) (1,0) (0,1) (1,1).
__device__ __forceinline__ void store_blocks_transposed(uint8_t* to, const uint32_t (&from)[4], int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to + other_order(lane) * 16));
  WKV7_ASM_MEMORY("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(from[0]),
                  "r"(from[1]), "r"(from[2]), "r"(from[3])
                  : "memory");
#else
  const uint32_t to_blocks[4] = {transposed_block(from[0]), transposed_block(from[2]), transposed_block(from[1]),
                                 transposed_block(from[3])};
  store_blocks(to, to_blocks, lane);
#endif
}

// 16 bytes from global to shared memory, in the background; zeros if not `valid`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  [[maybe_unused]] const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  [[maybe_unused]] const int bytes = valid ? 16 : 0;
  WKV7_ASM_MEMORY("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { WKV7_ASM_MEMORY("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  WKV7_ASM_MEMORY("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Some of the block's threads meet. `id`: 1 to 15, one for each set of threads.
__device__ __forceinline__ void barrier(int id, int threads) {
  WKV7_ASM_MEMORY("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same number, but the compiler does not know: it makes what follows from it anew instead of keeping it in registers.
__device__ __forceinline__ unsigned hidden(unsigned x) {
  WKV7_ASM_MEMORY("mov.u32 %0, %0;" : "+r"(x));
  return x;
}
__device__ __forceinline__ int thread_again() { return static_cast<int>(hidden(threadIdx.x)); }

}  // namespace wkv7
