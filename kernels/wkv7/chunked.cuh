// WKV-7 on tensor cores: chunks of 16 tokens as matrix products, for head size 64 and bfloat16 inputs.
//
// Per head, with the state S [value i, key j]:
//
//   u_t = S_{t-1} a_t        S_t = S_{t-1} diag(w_t) + u_t b_t^T + v_t k_t^T        y_t = S_t r_t
//   w_t = exp(l_t),  l_t = -exp(-1/2) * sigmoid(w_raw_t);  reset_t zeroes S before token t
//
// In a chunk, with rows of matrices over its tokens, L the inclusive sum of l, and S_0, S_1 the states at its ends:
//
//   R~ = R exp(L)    A~ = A exp(L - l)    B^ = B exp(-L)    K^ = K exp(-L)    B- = B^ P    K- = K^ P    P = exp(L_last)
//   M_ab = tril(A~ B^^T, -1)    M_ak = tril(A~ K^^T, -1)    M_rb = tril(R~ B^^T)    M_rk = tril(R~ K^^T)
//   T = (1 - M_ab)^-1           W = T A~                    X = T M_ak              U = W S_0^T + X V
//   Y = R~ S_0^T + M_rb U + M_rk V                          S_1 = S_0 diag(P) + U^T B- + V^T K-
//
// and with D_1 the gradient of S_1, D_0 that of S_0 (capital letters with d: gradients of the matrices above):
//
//   dU = M_rb^T dY + B- D_1^T         dZ = T^T dU         D_0 = D_1 diag(P) + dY^T R~ + dU^T W
//   dV = M_rk^T dY + K- D_1^T + M_ak^T dZ
//   dM_ab = tril(dZ U^T, -1)    dM_ak = tril(dZ V^T, -1)    dM_rb = tril(dY U^T)    dM_rk = tril(dY V^T)
//   dR = exp(L) (dY S_0 + dM_rb B^ + dM_rk K^)              dA = exp(L - l) (dZ S_0 + dM_ab B^ + dM_ak K^)
//   dB = exp(-L) (dM_ab^T A~ + dM_rb^T R~) + exp(-L) P (U D_1),    dK likewise with M_ak, M_rk and V
//
// l never falls below -0.61, so exp(-L) stays below 1.7e4 in a chunk. The gradient of l needs no product of its own:
// multiply the state equation by D and sum over the values. What S_0 and D_1 contribute is kept apart from what tokens
// contribute to each other, and everything is formed from the rounded factors that the tensor cores saw; then equal
// terms of opposite sign cancel exactly:
//
//   dl_t = P colsum(S_0 * D_1) + sum_{s>=t} R~ (dY S_0) + sum_{s>t} A~ (dZ S_0)
//          - sum_{s<=t} A~ dA' - sum_{s<t} [R~ dR' - B^ dB' - B- (U D_1) - K^ dK' - K- (V D_1)]      (': without states)
//
// T by substitution in float32: when the keys of a chunk are nearly equal, the powers of M_ab are large and cancel.
//
// A reset cuts a chunk into segments. M_xy keep pairs of tokens of one segment; S_0 reaches the first segment only
// (A~ and R~ are zero elsewhere, where they multiply S_0); only the last segment reaches S_1 (B-, K-, and P, which is
// zero if there is a reset). Tokens after the end of a row are zero vectors with l = 0.
//
// Kernels: `prepare`, all chunks at once, makes the operands of `scan`, which walks along a head with S (or, in reverse,
// D) in registers, 16 values per warp; no sum crosses warps. Its state is float32 and never rounded; what is saved at
// the start of a chunk is its copy in bfloat16, which is also what enters the products. If there are enough heads for
// all processors, a block of `scan` has a whole head and prepares its chunks itself: the operands then stay on the
// processor. `gradients`, all chunks at once, finishes the backward pass. Long rows are walked in pieces, so that the
// kernels work side by side, each on another piece. No result depends on the number of rows, heads, chunks per piece,
// or warps per block.
//
// Matrices lie in memory as 8 x 8 blocks of 128 bytes, each row-major; a matrix of 16 rows as its blocks (0,0) (1,0)
// (0,1) (1,1) (0,2) ...; the state as four such matrices of 16 values. What is scaled by decays is made and kept
// transposed, rows being keys: a sum over tokens then crosses four lanes, not thirty-two.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "ptx.cuh"

// Pointers are to contiguous device arrays, 16-byte aligned. [B,T,H,64] in bfloat16 unless said otherwise.
struct Wkv7ChunkedArgs {
  const __nv_bfloat16 *r, *w_raw, *k, *v, *a, *b;
  const uint8_t* reset;    // [B,T], or null: no resets
  const float* state;      // [B,H,64,64] state before window_begin; may be state_out       forward
  __nv_bfloat16* y;        //                                                              forward
  float* state_out;        // [B,H,64,64] state after the last token of this call          forward
  uint8_t* starts;         // [B,H,all chunks,64,64] bfloat16 in blocks; forward: or null
  const __nv_bfloat16* dy;  // or null: zero                                               backward
  const float* dstate_in;  // [B,H,64,64] gradient of the state after window_end, or null: zero; may be dstate
  __nv_bfloat16 *dr, *dw_raw, *dk, *dv, *da, *db;
  float* dstate;           // [B,H,64,64] gradient of the state before window_begin
  uint8_t* operands;       // per buffer [B,H,piece,Operands<REVERSE>::kBytes]; unused with 4 warps
  uint8_t* pairs;          // per buffer [B,H,piece,Pairs::kBytes]                         backward
  uint8_t* ends;           // per buffer [B,H,piece,64,64] bfloat16 in blocks: D_1              backward
  int64_t batch, tokens, heads;
  int64_t window_begin, window_end;  // the chunks this call (of a kernel: this piece) goes through
  int64_t warps;           // that carry the state in a scan block: 1, 2 or 4. Fewer spread a head over more blocks
  int64_t piece;           // chunks that are prepared, scanned and finished at once; unknown to the kernels
};

namespace wkv7 {

constexpr int kChunk = 16, kSize = 64;
constexpr int kMatrixBytes = kChunk * kChunk * 2, kTileBytes = kChunk * kSize * 2, kStateBytes = kSize * kSize * 2;
constexpr int kChunkThreads = 128;  // of the kernels that run on all chunks at once
// Blocks of `gradients` per processor that registers leave room for; shared memory has room for 2 to 5.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 10 == 100 || __CUDA_ARCH__ / 10 == 103)
constexpr int kGradientsBlocks = 5;
#else
constexpr int kGradientsBlocks = 3;
#endif
constexpr int kPrepareBlocks = 8;  // of `prepare` per processor
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLogDecayScale = 0.60653065971263342f;  // exp(-1/2)
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// A 16 x 16 matrix of bfloat16 in a warp, as the left operand of a product or as the right one. They differ in the
// order of the words, and the assembler moves registers where a word is not in its place.
template <bool RIGHT>
struct Operand {
  uint32_t block[4];  // left: (0,0) (1,0) (0,1) (1,1); right: (0,0) (0,1) (1,0) (1,1)

  // Of a block, counted as in memory.
  __device__ static constexpr int position(int i) { return RIGHT && (i == 1 || i == 2) ? 3 - i : i; }
  __device__ void load(const uint8_t* from, int lane) {
    load_blocks(block, from + (RIGHT ? other_order(lane) : lane) * 16);
  }
  __device__ void load_transposed(const uint8_t* from, int lane) {
    load_blocks_transposed(block, from + (RIGHT ? lane : other_order(lane)) * 16);
  }
  __device__ void store(uint8_t* to, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + i * 128 + lane * 4) = block[position(i)];
  }
  // As it lies in the warp, 16 bytes per lane: for another warp.
  __device__ void hand_over(uint8_t* to, int lane) const {
    *reinterpret_cast<uint4*>(to + lane * 16) = make_uint4(block[0], block[1], block[2], block[3]);
  }
  __device__ void take_over(const uint8_t* from, int lane) {
    const uint4 words = *reinterpret_cast<const uint4*>(from + lane * 16);
    block[0] = words.x, block[1] = words.y, block[2] = words.z, block[3] = words.w;
  }
  __device__ float element(int n) const {
    return n % 2 ? bf16_high(block[position(n / 2)]) : bf16_low(block[position(n / 2)]);
  }
  __device__ Operand<!RIGHT> other() const { return {{block[0], block[2], block[1], block[3]}}; }
};
using Left = Operand<false>;
using Right = Operand<true>;

// 16 x 16 numbers in a warp, in float32. A lane's number n lies in row 8 (n / 2 % 2) + lane / 4 and in column
// 8 (n / 4) + 2 (lane % 4) + n % 2.
struct Numbers {
  float x[2][4];

  __device__ float& operator[](int n) { return x[n / 4][n % 4]; }
  __device__ float operator[](int n) const { return x[n / 4][n % 4]; }
  __device__ void zero() {
#pragma unroll
    for (int n = 0; n < 8; ++n) (*this)[n] = 0.0f;
  }
  __device__ void add(const Numbers& other) {
#pragma unroll
    for (int n = 0; n < 8; ++n) (*this)[n] += other[n];
  }
  // += left right^T
  __device__ void add_product(const Left& left, const Right& right) {
    mma(x[0], left.block, right.block[0], right.block[1]);
    mma(x[1], left.block, right.block[2], right.block[3]);
  }
  template <bool RIGHT>
  __device__ Operand<RIGHT> rounded() const {
    Operand<RIGHT> to;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.block[Operand<RIGHT>::position(i)] = pack_bf16((*this)[2 * i], (*this)[2 * i + 1]);
    return to;
  }
  __device__ Left left() const { return rounded<false>(); }
  __device__ Right right() const { return rounded<true>(); }
  // What rounding to `to` lost, itself rounded.
  template <bool RIGHT>
  __device__ Operand<RIGHT> remainder(const Operand<RIGHT>& to) const {
    Numbers lost;
#pragma unroll
    for (int n = 0; n < 8; ++n) lost[n] = (*this)[n] - to.element(n);
    return lost.rounded<RIGHT>();
  }
  __device__ static int row(int n, int lane) { return n / 2 % 2 * 8 + lane / 4; }
  __device__ static int column(int n, int lane) { return n / 4 * 8 + lane % 4 * 2 + n % 2; }

  // Where columns are tokens: sums of a row over the columns up to the own one, from the start of its segment. `start`
  // is of the lane's columns.
  __device__ void sum_tokens(const int (&start)[4], int lane) {
    const int q = lane % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *const pair = x[half] + 2 * row;
        const int token = 8 * half + 2 * q;  // of pair[0]
        float sum = start[2 * half + 1] <= token ? pair[0] + pair[1] : pair[1];
        const float one = __shfl_up_sync(kAllLanes, sum, 1);
        if (q >= 1 && start[2 * half + 1] < token) sum += one;
        const float two = __shfl_up_sync(kAllLanes, sum, 2);
        if (q >= 2 && start[2 * half + 1] < token - 2) sum += two;
        const float before = __shfl_up_sync(kAllLanes, sum, 1);
        if (q >= 1 && start[2 * half] < token) pair[0] += before;
        pair[1] = sum;
      }
      const float lower = __shfl_sync(kAllLanes, x[0][2 * row + 1], lane | 3);
      if (start[2] < 8) x[1][2 * row] += lower;
      if (start[3] < 8) x[1][2 * row + 1] += lower;
    }
  }
};

__device__ __forceinline__ float sigmoid_fast(float x) { return reciprocal_fast(1.0f + exp2_fast(-kLog2E * x)); }

// The resets of a chunk, as bits.
struct Resets {
  unsigned bits;

  __device__ Resets again() const { return {hidden(bits)}; }
  __device__ bool first_segment(int t) const { return (bits & ((2u << t) - 1)) == 0; }
  __device__ bool last_segment(int t) const { return (bits >> (t + 1)) == 0; }
  __device__ int segment_start(int t) const { return 31 - __clz((bits & ((2u << t) - 1)) | 1u); }
};

// One chunk of one head.
struct Place {
  int64_t batch, head, chunk;
  int64_t offset;  // of its first token in [B,T,H,64]
  int64_t stride;  // from token to token
  int valid;       // tokens that exist
  const __nv_bfloat16* any;  // an address that may be given for what does not exist

  __device__ Place(const Wkv7ChunkedArgs& args, int64_t batch_, int64_t head_, int64_t chunk_)
      : batch(batch_), head(head_), chunk(chunk_),
        offset(((batch_ * args.tokens + chunk_ * kChunk) * args.heads + head_) * kSize),
        stride(args.heads * kSize), any(args.r) {
    const int64_t left = args.tokens - chunk * kChunk;
    valid = left < kChunk ? static_cast<int>(left) : kChunk;
  }
  __device__ Resets resets(const Wkv7ChunkedArgs& args, int lane) const {
    if (args.reset == nullptr) return {0};
    const bool reset = lane < valid && args.reset[batch * args.tokens + chunk * kChunk + lane] != 0;
    return {__ballot_sync(kAllLanes, reset)};
  }
};

// The chunk of a block when all chunks run at once: heads that lie side by side in memory run side by side.
__device__ __forceinline__ Place place_of_block(const Wkv7ChunkedArgs& args) {
  const unsigned chunks = args.window_end - args.window_begin, heads = args.heads;  // 64-bit divisions are calls
  const unsigned rest = blockIdx.x / heads;
  return Place(args, rest / chunks, blockIdx.x % heads, args.window_begin + rest % chunks);
}

// Of a block that works on one chunk, thread i brings in columns 8 (i / 16) to 8 (i / 16) + 7 of token i % 16: 16
// bytes at 16 i of a tile in blocks. So a warp brings in the 16 key columns that it works on.
__device__ __forceinline__ void fetch_tile(uint8_t* tile, const __nv_bfloat16* from, const Place& place) {
  const int token = threadIdx.x % kChunk;
  const bool valid = from != nullptr && token < place.valid;
  const __nv_bfloat16* row = from + place.offset + token * place.stride + threadIdx.x / kChunk * 8;
  copy_async(tile + threadIdx.x * 16, valid ? row : place.any, valid);
}

// Token n / 4 * 2 + n % 2 of a lane's four, where columns of numbers are tokens.
__device__ constexpr int token_index(int n) { return n / 4 * 2 + n % 2; }

// Zero but for the tokens that S_0 reaches. Columns are tokens.
__device__ __forceinline__ Numbers first_tokens(Numbers x, const Resets& resets, int lane) {
  if (resets.bits != 0) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = resets.first_segment(Numbers::column(n, lane)) ? x[n] : 0.0f;
  }
  return x;
}
// The same for a matrix.
template <bool RIGHT>
__device__ __forceinline__ Operand<RIGHT> first_columns(Operand<RIGHT> x, const Resets& resets, int lane) {
  if (resets.bits != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = i / 2 * 8 + lane % 4 * 2;
      x.block[Operand<RIGHT>::position(i)] &=
          (resets.first_segment(column) ? 0xffffu : 0u) | (resets.first_segment(column + 1) ? 0xffff0000u : 0u);
    }
  }
  return x;
}
// Zero but for the tokens that reach S_1.
__device__ __forceinline__ Numbers last_tokens(Numbers x, const Resets& resets, int lane) {
  if (resets.bits != 0) {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = resets.last_segment(Numbers::column(n, lane)) ? x[n] : 0.0f;
  }
  return x;
}

// exp(L) and the like, for a warp's 16 key columns. Here, as in all that follows from it, rows are keys and columns
// tokens: then sums over tokens cross only four lanes.
struct Decays {
  Numbers upto;  // exp(L)
  float all[2];  // P without resets, of the lane's two keys

  __device__ Decays(const Left& raw, int valid, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const bool exists = Numbers::column(n, lane) < valid;
      upto[n] = exists ? -kLogDecayScale * kLog2E * sigmoid_fast(raw.element(n)) : 0.0f;
    }
    constexpr int start[4] = {0, 0, 0, 0};
    upto.sum_tokens(start, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) upto[n] = exp2_fast(upto[n]);
#pragma unroll
    for (int i = 0; i < 2; ++i) all[i] = __shfl_sync(kAllLanes, upto[5 + 2 * i], lane | 3);
  }
  // exp(L - l), which is exp(L) of the token before.
  __device__ Numbers before(int lane) const {
    Numbers x;
    const int left = (lane & ~3) | (lane + 3) % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float lower = __shfl_sync(kAllLanes, upto.x[0][2 * row + 1], left);
      const float upper = __shfl_sync(kAllLanes, upto.x[1][2 * row + 1], left);
      x.x[0][2 * row] = lane % 4 == 0 ? 1.0f : lower, x.x[0][2 * row + 1] = upto.x[0][2 * row];
      x.x[1][2 * row] = lane % 4 == 0 ? lower : upper, x.x[1][2 * row + 1] = upto.x[1][2 * row];
    }
    return x;
  }
  __device__ Numbers inverse() const {
    Numbers x;
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = reciprocal_fast(upto[n]);
    return x;
  }
  // exp(-L) P in the last segment, else zero.
  __device__ Numbers to_end(const Numbers& inverse, const Resets& resets, int lane) const {
    Numbers x;
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = inverse[n] * all[n / 2 % 2];
    return last_tokens(x, resets, lane);
  }
};

// A product of vectors with their decays.
__device__ __forceinline__ Numbers factor(const Left& raw, const Numbers& scale) {
  Numbers x;
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = raw.element(n) * scale[n];
  return x;
}

// Products of tokens t (rows; TRANSPOSED: columns) with tokens s: kept where s is of t's segment and not after t, or
// before it.
template <bool STRICT, bool TRANSPOSED>
__device__ __forceinline__ void mask_pairs(Numbers& sum, const Resets& resets, int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int row = Numbers::row(n, lane), column = Numbers::column(n, lane);
    const int t = TRANSPOSED ? column : row, s = TRANSPOSED ? row : column;
    sum[n] = (STRICT ? s < t : s <= t) ? sum[n] : 0.0f;
  }
  if (resets.bits == 0) return;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int row = Numbers::row(n, lane), column = Numbers::column(n, lane);
    const int t = TRANSPOSED ? column : row, s = TRANSPOSED ? row : column;
    sum[n] = s >= resets.segment_start(t) ? sum[n] : 0.0f;
  }
}

}  // namespace wkv7
