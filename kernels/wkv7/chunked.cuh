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
// the start of a chunk is its copy in bfloat16, which is also what enters the products. `gradients`, all chunks at
// once, makes the chunk's operands again and finishes the backward pass. No result depends on the number of rows,
// heads, chunks per call, or warps per block.
//
// Matrices lie in memory as 8 x 8 blocks of 128 bytes, each row-major; a matrix of 16 rows as its blocks (0,0) (1,0)
// (0,1) (1,1) (0,2) ...; the state as four such matrices of 16 values.
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
  uint8_t* operands;       // [B,H,window_end-window_begin,Operands<REVERSE>::kBytes]
  uint8_t* ends;           // [B,H,window_end-window_begin,64,64] bfloat16 in blocks: D_1      backward
  int64_t batch, tokens, heads;
  int64_t window_begin, window_end;  // the chunks this call goes through
  int64_t warps;           // of a scan block: 1, 2 or 4. Fewer spread a head over more blocks
};

namespace wkv7 {

constexpr int kChunk = 16, kSize = 64;
constexpr int kMatrixBytes = kChunk * kChunk * 2, kTileBytes = kChunk * kSize * 2, kStateBytes = kSize * kSize * 2;
constexpr int kChunkThreads = 128;  // of the kernels that run on all chunks at once
// Blocks of `gradients` per processor that registers leave room for; shared memory has room for 2 to 4.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 10 == 100 || __CUDA_ARCH__ / 10 == 103)
constexpr int kGradientsBlocks = 4;
#else
constexpr int kGradientsBlocks = 3;
#endif
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLogDecayScale = 0.60653065971263342f;  // exp(-1/2)
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// A 16 x 16 matrix of bfloat16 in a warp.
struct Matrix {
  uint32_t block[4];  // (0,0) (1,0) (0,1) (1,1)

  __device__ void load(const uint8_t* from, int lane) { load_blocks(block, from + lane * 16); }
  __device__ void load_transposed(const uint8_t* from, int lane) {
    uint32_t word[4];
    load_blocks_transposed(word, from + lane * 16);
    block[0] = word[0], block[1] = word[2], block[2] = word[1], block[3] = word[3];
  }
  __device__ void store(uint8_t* to, int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + i * 128 + lane * 4) = block[i];
  }
};

// A 16 x 16 sum of products in a warp, in float32.
struct Sum {
  float x[2][4];  // columns 0..7 and 8..15; lane 4g + q: (g, 2q) (g, 2q+1) (g+8, 2q) (g+8, 2q+1)

  __device__ void zero() {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = 0.0f;
  }
  // += left right^T
  __device__ void add_product(const Matrix& left, const Matrix& right) {
    mma(x[0], left.block, right.block[0], right.block[2]);
    mma(x[1], left.block, right.block[1], right.block[3]);
  }
  __device__ Matrix rounded() const {
    Matrix to;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.block[i] = pack_bf16(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
    return to;
  }
  // What rounding to `to` lost, itself rounded.
  __device__ Matrix remainder(const Matrix& to) const {
    Matrix low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *pair = x[i / 2] + i % 2 * 2;
      low.block[i] = pack_bf16(pair[0] - bf16_low(to.block[i]), pair[1] - bf16_high(to.block[i]));
    }
    return low;
  }
  __device__ static int row(int i, int lane) { return lane / 4 + i / 2 * 8; }
  __device__ static int column(int half, int i, int lane) { return half * 8 + lane % 4 * 2 + i % 2; }
};

__device__ __forceinline__ void unpack8(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bf16_low(words[i]);
    x[2 * i + 1] = bf16_high(words[i]);
  }
}
__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ float sigmoid_fast(float x) { return reciprocal_fast(1.0f + exp2_fast(-kLog2E * x)); }

// The resets of a chunk, as bits.
struct Resets {
  unsigned bits;

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

  __device__ Place(const Wkv7ChunkedArgs& args, int64_t batch_, int64_t head_, int64_t chunk_)
      : batch(batch_), head(head_), chunk(chunk_), offset(((batch_ * args.tokens + chunk_ * kChunk) * args.heads + head_) * kSize),
        stride(args.heads * kSize) {
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

// What `scan` needs of a chunk: byte offsets. Its step is, with rows v (reverse: dy),
//   u = first s^T + matrix rows        s = s diag(decay) + rows^T (second + second_low) + u^T third
template <bool REVERSE>
struct Operands {
  static constexpr int kFirst = 0;                     // W;  reverse: B-
  static constexpr int kSecond = kFirst + kTileBytes;  // K-; reverse: R~
  static constexpr int kSecondLow = kSecond + kTileBytes;  // what rounding it lost: most of the error of the state
  static constexpr int kThird = kSecondLow + kTileBytes;  // B-; reverse: W
  static constexpr int kMatrix = kThird + kTileBytes;  // X;  reverse: M_rb^T, stored as M_rb
  static constexpr int kDecay = kMatrix + kMatrixBytes;  // P in float32: columns 8j + 2q, 8j + 2q + 1 at 16q + 2j
  static constexpr int kRead = kDecay + kSize * 4;     // R~    forward only, as the next two
  static constexpr int kReadU = kRead + kTileBytes;    // M_rb
  static constexpr int kReadV = kReadU + kMatrixBytes;  // M_rk
  static constexpr int kReadVLow = kReadV + kMatrixBytes;
  static constexpr int kBytes = REVERSE ? kRead : kReadVLow + kMatrixBytes;
};

// A thread of a chunk block has one token and eight key columns in a row, which are 16 bytes of a tile in blocks, at
// 16 * threadIdx.x. A warp has 16 key columns.
struct Columns {
  float decay[8];      // exp(L)
  uint4 w_raw;

  __device__ static int token() { return threadIdx.x % kChunk; }
  __device__ static int column() { return threadIdx.x / kChunk * 8; }

  __device__ static uint4 fetch(const __nv_bfloat16* from, const Place& place) {
    if (from == nullptr || token() >= place.valid) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(from + place.offset + token() * place.stride + column());
  }
};

// The products of key vectors with their decays. Null: not wanted.
struct Tiles {
  uint8_t *r, *r_low, *a, *b_hat, *k_hat, *k_hat_low;  // R~, A~ without masks, B^, K^; low: what rounding lost
  uint8_t *r_masked, *r_masked_low, *b_bar, *k_bar, *k_bar_low;
};

__device__ __forceinline__ void put(uint8_t* tile, const uint4& x) {
  if (tile != nullptr) *reinterpret_cast<uint4*>(tile + threadIdx.x * 16) = x;
}

__device__ __forceinline__ uint4 scaled(const uint4& raw, const float (&scale)[8]) {
  float x[8];
  unpack8(raw, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scale[i];
  return pack8(x);
}
__device__ __forceinline__ uint4 masked(const uint4& x, uint32_t mask) {
  return make_uint4(x.x & mask, x.y & mask, x.z & mask, x.w & mask);
}
// What rounding of `scaled` lost.
__device__ __forceinline__ uint4 scaled_remainder(const uint4& raw, const float (&scale)[8], const uint4& rounded) {
  float x[8], high[8];
  unpack8(raw, x);
  unpack8(rounded, high);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] * scale[i] - high[i];
  return pack8(x);
}

__device__ __forceinline__ Columns decay_columns(const Wkv7ChunkedArgs& args, const Place& place, const Resets& resets,
                                        bool with_k, const Tiles& to) {
  const int t = Columns::token();
  Columns columns;
  columns.w_raw = Columns::fetch(args.w_raw, place);
  const uint4 r = Columns::fetch(args.r, place), a = Columns::fetch(args.a, place), b = Columns::fetch(args.b, place);
  const uint4 k = Columns::fetch(with_k ? args.k : nullptr, place);
  float before[8], inverse[8], to_end[8];
  unpack8(columns.w_raw, before);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float own = t < place.valid ? -kLogDecayScale * kLog2E * sigmoid_fast(before[i]) : 0.0f;
    float sum = own;
#pragma unroll
    for (int step = 1; step < kChunk; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, step, kChunk);
      if (t >= step) sum += other;
    }
    before[i] = exp2_fast(sum - own);
    inverse[i] = exp2_fast(-sum);
    columns.decay[i] = exp2_fast(sum);
    const float decay_all = __shfl_sync(kAllLanes, columns.decay[i], kChunk - 1, kChunk);
    to_end[i] = resets.last_segment(t) ? inverse[i] * decay_all : 0.0f;
  }
  const uint4 r_tilde = scaled(r, columns.decay);
  const uint4 r_low = scaled_remainder(r, columns.decay, r_tilde);
  const uint32_t first = resets.first_segment(t) ? 0xffffffffu : 0;
  put(to.r, r_tilde);
  put(to.r_low, r_low);
  put(to.r_masked, masked(r_tilde, first));
  put(to.r_masked_low, masked(r_low, first));
  put(to.a, scaled(a, before));
  put(to.b_hat, scaled(b, inverse));
  put(to.b_bar, scaled(b, to_end));
  if (with_k) {
    const uint4 k_hat = scaled(k, inverse);
    put(to.k_hat, k_hat);
    put(to.k_hat_low, scaled_remainder(k, inverse, k_hat));
    const uint4 k_bar = scaled(k, to_end);
    put(to.k_bar, k_bar);
    if (to.k_bar_low != nullptr) put(to.k_bar_low, scaled_remainder(k, to_end, k_bar));
  }
  return columns;
}

// Kept where the column's token is of the row's segment and not after the row's token, or before it.
template <bool STRICT>
__device__ __forceinline__ void mask_pairs(Sum& sum, const Resets& resets, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = Sum::row(i, lane), s = Sum::column(half, i, lane);
      const bool kept = s >= resets.segment_start(t) && (STRICT ? s < t : s <= t);
      sum.x[half][i] = kept ? sum.x[half][i] : 0.0f;
    }
  }
}

// left right^T of two tiles.
__device__ __forceinline__ void add_tile_product(Sum& sum, const uint8_t* left_tile, const uint8_t* right_tile, int lane) {
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix left, right;
    left.load(left_tile + part * kMatrixBytes, lane);
    right.load(right_tile + part * kMatrixBytes, lane);
    sum.add_product(left, right);
  }
}

// The same, masked, without further terms.
template <bool STRICT>
__device__ __forceinline__ Sum tile_pairs(const Resets& resets, int lane, const uint8_t* left, const uint8_t* right) {
  Sum sum;
  sum.zero();
  add_tile_product(sum, left, right, lane);
  mask_pairs<STRICT>(sum, resets, lane);
  return sum;
}

// M_rk with twice the digits: a token's own r and k may be nearly orthogonal, and then its error would be all that is
// left of their product.
__device__ __forceinline__ Sum precise_pairs(const Resets& resets, int lane, const Tiles& tiles) {
  Sum sum;
  sum.zero();
  add_tile_product(sum, tiles.r_low, tiles.k_hat, lane);
  add_tile_product(sum, tiles.r, tiles.k_hat_low, lane);
  add_tile_product(sum, tiles.r, tiles.k_hat, lane);
  mask_pairs<false>(sum, resets, lane);
  return sum;
}

__device__ __forceinline__ void store_rows(float* to, const Sum& sum, int stride, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      *reinterpret_cast<float2*>(to + Sum::row(i, lane) * stride + Sum::column(half, i, lane)) =
          make_float2(sum.x[half][i], sum.x[half][i + 1]);
  }
}

// One warp: T = (1 - m_ab)^-1 and X = T m_ak by rows; lanes 0..15 have the columns of T, the others those of X. T is also
// stored with zero columns for the tokens that S_0 does not reach. m_ab, m_ak: 16 x 16, row-major. Null: not wanted.
__device__ __forceinline__ void solve(const float* m_ab, const float* m_ak, const Resets& resets, int lane, uint8_t* t_full,
                             uint8_t* t_masked, uint8_t* x) {
  const int column = lane % kChunk;
  const bool of_t = lane < kChunk;
  float solution[kChunk];
#pragma unroll
  for (int row = 0; row < kChunk; ++row) {
    float sum = of_t ? (row == column ? 1.0f : 0.0f) : (m_ak == nullptr ? 0.0f : m_ak[row * kChunk + column]);
#pragma unroll
    for (int s = 0; s < row; s += 4) {
      const float4 m = *reinterpret_cast<const float4*>(m_ab + row * kChunk + s);
      const float factors[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (s + i < row) sum = fmaf(factors[i], solution[s + i], sum);
    }
    solution[row] = sum;
  }
  const bool reached = resets.first_segment(column);
  uint8_t* full = of_t ? t_full : x;
#pragma unroll
  for (int row = 0; row < kChunk; ++row) {
    const int at = (column / 8 * 2 + row / 8) * 128 + row % 8 * 16 + column % 8 * 2;
    const uint16_t value = static_cast<uint16_t>(pack_bf16(solution[row], 0.0f));
    if (full != nullptr) *reinterpret_cast<uint16_t*>(full + at) = value;
    if (of_t && t_masked != nullptr) *reinterpret_cast<uint16_t*>(t_masked + at) = reached ? value : 0;
  }
}

template <bool REVERSE>
__global__ void __launch_bounds__(kChunkThreads, 7) prepare_kernel(const Wkv7ChunkedArgs args) {
  using To = Operands<REVERSE>;
  __shared__ alignas(16) uint8_t tile_r[kTileBytes], tile_r_low[kTileBytes], tile_a[kTileBytes];
  __shared__ alignas(16) uint8_t tile_b[kTileBytes], tile_k[kTileBytes], tile_k_low[kTileBytes];
  __shared__ alignas(16) uint8_t t_masked[kMatrixBytes], x[kMatrixBytes];
  __shared__ alignas(16) float m_ab[kChunk * kChunk], m_ak[kChunk * kChunk];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Place place = place_of_block(args);
  const Resets resets = place.resets(args, lane);
  const int64_t chunks = args.window_end - args.window_begin, batch_head = place.batch * args.heads + place.head;
  uint8_t* to = args.operands + (batch_head * chunks + place.chunk - args.window_begin) * To::kBytes;

  Tiles tiles;
  tiles.r = tile_r, tiles.r_low = REVERSE ? nullptr : tile_r_low;
  tiles.a = tile_a, tiles.b_hat = tile_b, tiles.k_hat = tile_k, tiles.k_hat_low = tile_k_low;
  tiles.r_masked = to + (REVERSE ? To::kSecond : To::kRead);
  tiles.r_masked_low = REVERSE ? to + To::kSecondLow : nullptr;
  tiles.b_bar = to + (REVERSE ? To::kFirst : To::kThird);
  tiles.k_bar = to + To::kSecond, tiles.k_bar_low = to + To::kSecondLow;
  const Columns columns = decay_columns(args, place, resets, !REVERSE, tiles);
  if (Columns::token() == kChunk - 1) {
    const bool kept = resets.bits == 0;
    float2* decay = reinterpret_cast<float2*>(to + To::kDecay) + Columns::column() / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      decay[i * 8] = make_float2(kept ? columns.decay[2 * i] : 0.0f, kept ? columns.decay[2 * i + 1] : 0.0f);
  }
  __syncthreads();

  if (warp == 0) store_rows(m_ab, tile_pairs<true>(resets, lane, tile_a, tile_b), kChunk, lane);
  if (warp == 1 && !REVERSE) store_rows(m_ak, tile_pairs<true>(resets, lane, tile_a, tile_k), kChunk, lane);
  if (warp == 2) {
    const Sum m_rb = tile_pairs<false>(resets, lane, tile_r, tile_b);
    m_rb.rounded().store(to + (REVERSE ? To::kMatrix : To::kReadU), lane);
  }
  if (warp == 3 && !REVERSE) {
    const Sum m_rk = precise_pairs(resets, lane, tiles);
    const Matrix rounded = m_rk.rounded();
    rounded.store(to + To::kReadV, lane);
    m_rk.remainder(rounded).store(to + To::kReadVLow, lane);
  }
  __syncthreads();

  if (warp == 0) solve(m_ab, REVERSE ? nullptr : m_ak, resets, lane, nullptr, t_masked, REVERSE ? nullptr : x);
  __syncthreads();

  Matrix t, a;
  Sum w;
  t.load(t_masked, lane);
  a.load_transposed(tile_a + warp * kMatrixBytes, lane);
  w.zero();
  w.add_product(t, a);
  w.rounded().store(to + (REVERSE ? To::kThird : To::kFirst) + warp * kMatrixBytes, lane);
  if (warp == 0 && !REVERSE)
    *reinterpret_cast<uint4*>(to + To::kMatrix + lane * 16) = *reinterpret_cast<const uint4*>(x + lane * 16);
}

template <bool REVERSE, int WARPS>
struct Scan {
  static constexpr int kThreads = WARPS * 32, kSplits = 4 / WARPS;
  static constexpr int kStages = 6;
  static constexpr int kRowsAt = Operands<REVERSE>::kBytes;
  static constexpr int kStageBytes = kRowsAt + WARPS * kMatrixBytes;  // operands, then 16 tokens of this block's values
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

template <bool REVERSE, int WARPS>
__global__ void __launch_bounds__(Scan<REVERSE, WARPS>::kThreads) scan_kernel(const Wkv7ChunkedArgs args) {
  using C = Scan<REVERSE, WARPS>;
  using From = Operands<REVERSE>;
  constexpr int kParts = kSize / 16;
  extern __shared__ float4 shared_memory[];
  uint8_t* shared = reinterpret_cast<uint8_t*>(shared_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int value_block = blockIdx.x % C::kSplits * WARPS + warp;
  const unsigned block_head = blockIdx.x / C::kSplits, heads = args.heads;
  const int64_t batch_head = block_head, batch = block_head / heads, head = block_head % heads;
  const int64_t all_chunks = (args.tokens + kChunk - 1) / kChunk;
  const int chunks = static_cast<int>(args.window_end - args.window_begin);
  const uint8_t* operands = args.operands + batch_head * chunks * From::kBytes;
  const __nv_bfloat16* rows = REVERSE ? args.dy : args.v;

  const auto local_chunk = [&](int step) -> int64_t { return REVERSE ? chunks - 1 - step : step; };
  const auto fetch = [&](int step, uint8_t* to) {
    if (step < chunks) {
      const int64_t local = local_chunk(step);
      const uint8_t* from = operands + local * From::kBytes;
#pragma unroll
      for (int i = 0; i < From::kBytes; i += C::kThreads * 16) {
        const int at = i + threadIdx.x * 16;
        if (at < From::kBytes) copy_async(to + at, from + at, true);
      }
      const Place place(args, batch, head, args.window_begin + local);
      const int token = lane % kChunk;
      const bool valid = rows != nullptr && token < place.valid;
      const __nv_bfloat16* row = rows + place.offset + token * place.stride + value_block * 16 + lane / kChunk * 8;
      copy_async(to + C::kRowsAt + threadIdx.x * 16, valid ? static_cast<const void*>(row) : operands, valid);
    }
    copy_async_commit();
  };

#pragma unroll
  for (int stage = 0; stage < C::kStages; ++stage) fetch(stage, shared + stage * C::kStageBytes);

  Sum state[kParts];
  {
    const float* from = REVERSE ? args.dstate_in : args.state;
    const int64_t at = (batch_head * kSize + value_block * 16) * kSize;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (from != nullptr)
          pair = *reinterpret_cast<const float2*>(from + at + Sum::row(i % 4, lane) * kSize + part * 16 +
                                                  Sum::column(i / 4, 0, lane));
        state[part].x[i / 4][i % 4] = pair.x, state[part].x[i / 4][i % 4 + 1] = pair.y;
      }
    }
  }

  Matrix first[kParts], matrix, values;  // operands of the next step, loaded ahead
  const auto load_ahead = [&](const uint8_t* at) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) first[part].load(at + From::kFirst + part * kMatrixBytes, lane);
    values.load_transposed(at + C::kRowsAt + warp * kMatrixBytes, lane);
    if (REVERSE) matrix.load_transposed(at + From::kMatrix, lane);
    else matrix.load(at + From::kMatrix, lane);
  };
  copy_async_wait<C::kStages - 1>();
  __syncthreads();
  load_ahead(shared);

  int stage = 0;
  for (int step = 0; step < chunks; ++step) {
    uint8_t* const at = shared + stage * C::kStageBytes;
    const int64_t local = local_chunk(step);

    Matrix rounded[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) rounded[part] = state[part].rounded();
    Sum u, u_half;
    u.zero(), u_half.zero();
    u.add_product(values, matrix);
    u_half.add_product(rounded[0], first[0]);
    u.add_product(rounded[1], first[1]);
    u_half.add_product(rounded[2], first[2]);
    u.add_product(rounded[3], first[3]);

    uint8_t* saved = REVERSE ? args.ends + (batch_head * chunks + local) * kStateBytes
                             : args.starts + (batch_head * all_chunks + args.window_begin + local) * kStateBytes;
    if (REVERSE || args.starts != nullptr) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        rounded[part].store(saved + value_block * kTileBytes + part * kMatrixBytes, lane);
    }

    const float4* decay = reinterpret_cast<const float4*>(at + From::kDecay) + lane % 4 * 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float4 p = decay[part];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        state[part].x[0][i] *= p.x, state[part].x[0][i + 1] *= p.y;
        state[part].x[1][i] *= p.z, state[part].x[1][i + 1] *= p.w;
      }
      Matrix second;
      second.load_transposed(at + From::kSecondLow + part * kMatrixBytes, lane);
      state[part].add_product(values, second);
      second.load_transposed(at + From::kSecond + part * kMatrixBytes, lane);
      state[part].add_product(values, second);
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) u.x[i / 4][i % 4] += u_half.x[i / 4][i % 4];
    const Matrix u_rounded = u.rounded();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Matrix third;
      third.load_transposed(at + From::kThird + part * kMatrixBytes, lane);
      state[part].add_product(u_rounded, third);
    }

    if (!REVERSE) {
      Sum y;
      y.zero();
      Matrix read;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        read.load(at + From::kRead + part * kMatrixBytes, lane);
        y.add_product(read, rounded[part]);
      }
      read.load(at + From::kReadVLow, lane);
      y.add_product(read, values);
      read.load(at + From::kReadV, lane);
      y.add_product(read, values);
      read.load(at + From::kReadU, lane);
      y.add_product(read, u_rounded);
      const Matrix y_rounded = y.rounded();
      const Place place(args, batch, head, args.window_begin + local);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane / 4 + i % 2 * 8;
        if (token < place.valid)
          *reinterpret_cast<uint32_t*>(args.y + place.offset + token * place.stride + value_block * 16 + i / 2 * 8 +
                                       lane % 4 * 2) = y_rounded.block[i];
      }
    }

    if (step + 1 < chunks) {
      copy_async_wait<C::kStages - 2>();
      __syncthreads();
      stage = stage + 1 < C::kStages ? stage + 1 : 0;
      load_ahead(shared + stage * C::kStageBytes);
      fetch(step + C::kStages, at);
    }
  }

  float* to = REVERSE ? args.dstate : args.state_out;
  const int64_t end = (batch_head * kSize + value_block * 16) * kSize;
#pragma unroll
  for (int part = 0; part < kParts; ++part) store_rows(to + end + part * 16, state[part], kSize, lane);
}

// Shared memory of a block of `gradients_kernel`.
struct GradientsShared {
  alignas(16) uint8_t state[kStateBytes], d[kStateBytes];                        // S_0, D_1
  uint8_t r[kTileBytes], a[kTileBytes], b_hat[kTileBytes], k_hat[kTileBytes];    // R~, A~ without masks, B^, K^
  uint8_t b_bar[kTileBytes], k_bar[kTileBytes], v[kTileBytes], dy[kTileBytes];
  union {
    uint8_t u[kTileBytes];  // transposed, as dz: four matrices of 16 values x 16 tokens
    uint8_t r_low[kTileBytes];
  };
  union {
    uint8_t dz[kTileBytes];
    uint8_t k_hat_low[kTileBytes];
  };
  float decay_all[kSize];                 // P without resets
  uint8_t dm_ab[2][kMatrixBytes], dm_ak[2][kMatrixBytes], dm_rb[2][kMatrixBytes], dm_rk[2][kMatrixBytes];  // and the lost
  union {
    struct {
      uint8_t t[kMatrixBytes], t_masked[kMatrixBytes], x[kMatrixBytes];
      uint8_t m_ak[kMatrixBytes], m_rb[2][kMatrixBytes], m_rk[2][kMatrixBytes];
      float m_ab_float[kChunk * kChunk], m_ak_float[kChunk * kChunk];
    };
    float by_row[4][kChunk * 20];  // per warp, 16 x 16 results on their way from Sum to a thread per row; padded
  };
};

// Hands a Sum over the warp's 16 key columns to the threads that own the rows. All lanes of the warp call it.
__device__ __forceinline__ void to_rows(const Sum& sum, float* scratch, float (&x)[8]) {
  const int lane = threadIdx.x % 32;
  store_rows(scratch, sum, 20, lane);
  __syncwarp();
  const float4* from = reinterpret_cast<const float4*>(scratch + Columns::token() * 20 + lane / kChunk * 8);
  const float4 low = from[0], high = from[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  __syncwarp();
}

__device__ __forceinline__ void own_row(const uint8_t* tile, float (&x)[8]) {
  unpack8(*reinterpret_cast<const uint4*>(tile + threadIdx.x * 16), x);
}

__device__ __forceinline__ void write_row(__nv_bfloat16* to, const Place& place, const float (&x)[8]) {
  if (Columns::token() < place.valid)
    *reinterpret_cast<uint4*>(to + place.offset + Columns::token() * place.stride + Columns::column()) = pack8(x);
}

// Values of this warp: dU, dZ, U, which stay in shared memory, and dV, which is written.
__device__ __forceinline__ void value_gradients(const Wkv7ChunkedArgs& args, GradientsShared& shared, const Place& place,
                                       const Resets& resets) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Matrix dy, v, left, right;
  Sum du, z, dv;
  du.zero(), z.zero(), dv.zero();
  dy.load_transposed(shared.dy + warp * kMatrixBytes, lane);
  v.load_transposed(shared.v + warp * kMatrixBytes, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    right.load_transposed(shared.m_rb[i], lane);
    du.add_product(dy, right);
    left.load_transposed(shared.m_rk[i], lane);
    dv.add_product(left, dy);
  }
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix d;
    d.load(shared.d + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load(shared.b_bar + part * kMatrixBytes, lane);
    du.add_product(d, right);
    left.load(shared.k_bar + part * kMatrixBytes, lane);
    dv.add_product(left, d);
    left.load(shared.state + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load(shared.a + part * kMatrixBytes, lane);
    z.add_product(left, right);
  }
  if (warp == 0) solve(shared.m_ab_float, shared.m_ak_float, resets, lane, shared.t, shared.t_masked, shared.x);
  __syncthreads();

  Sum dz, u;
  dz.zero(), u.zero();
  right.load_transposed(shared.t, lane);
  dz.add_product(du.rounded(), right);
  const Matrix dz_rounded = dz.rounded();
  dz_rounded.store(shared.dz + warp * kMatrixBytes, lane);
  left.load_transposed(shared.m_ak, lane);
  dv.add_product(left, dz_rounded);

  right.load(shared.x, lane);
  u.add_product(v, right);
  right.load(shared.t_masked, lane);
  u.add_product(z.rounded(), right);
  u.rounded().store(shared.u + warp * kMatrixBytes, lane);

  const Matrix dv_rounded = dv.rounded();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = lane / 4 + i % 2 * 8;
    if (token < place.valid)
      *reinterpret_cast<uint32_t*>(args.dv + place.offset + token * place.stride + warp * 16 + i / 2 * 8 + lane % 4 * 2) =
          dv_rounded.block[i];
  }
}

// Stores a sum and what rounding it lost.
__device__ __forceinline__ void store_both(uint8_t (&to)[2][kMatrixBytes], const Sum& sum, int lane) {
  const Matrix rounded = sum.rounded();
  rounded.store(to[0], lane);
  sum.remainder(rounded).store(to[1], lane);
}

// Gradients of the products of tokens; each warp makes one of the four.
__device__ __forceinline__ void pair_gradients(GradientsShared& shared, const Resets& resets) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool of_dz = warp < 2, of_u = warp % 2 == 0;
  Sum sum;
  sum.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix left, right;
    if (of_dz) left.load_transposed(shared.dz + part * kMatrixBytes, lane);
    else left.load(shared.dy + part * kMatrixBytes, lane);
    if (of_u) right.load_transposed(shared.u + part * kMatrixBytes, lane);
    else right.load(shared.v + part * kMatrixBytes, lane);
    sum.add_product(left, right);
  }
  if (of_dz) mask_pairs<true>(sum, resets, lane);
  else mask_pairs<false>(sum, resets, lane);
  store_both(of_dz ? (of_u ? shared.dm_ab : shared.dm_ak) : (of_u ? shared.dm_rb : shared.dm_rk), sum, lane);
}

// What the states contribute to the gradients of this warp's keys: dY S_0, dZ S_0, U D_1, V D_1, and S_0^T D_1.
struct StateTerms {
  Sum r, a, b, k, decay;

  __device__ explicit StateTerms(const GradientsShared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    r.zero(), a.zero(), b.zero(), k.zero(), decay.zero();
#pragma unroll
    for (int part = 0; part < kSize / 16; ++part) {
      Matrix state, d, left;
      state.load_transposed(shared.state + part * kTileBytes + warp * kMatrixBytes, lane);
      d.load_transposed(shared.d + part * kTileBytes + warp * kMatrixBytes, lane);
      left.load(shared.dy + part * kMatrixBytes, lane);
      r.add_product(left, state);
      left.load_transposed(shared.dz + part * kMatrixBytes, lane);
      a.add_product(left, state);
      left.load_transposed(shared.u + part * kMatrixBytes, lane);
      b.add_product(left, d);
      left.load(shared.v + part * kMatrixBytes, lane);
      k.add_product(left, d);
      decay.add_product(state, d);
    }
  }
};

// What the tokens of the chunk contribute.
struct TokenTerms {
  Sum r, a, b, k;

  __device__ explicit TokenTerms(const GradientsShared& shared) {
    const int lane = threadIdx.x % 32, at = threadIdx.x / 32 * kMatrixBytes;
    r.zero(), a.zero(), b.zero(), k.zero();
    Matrix b_hat, k_hat, a_tilde, r_tilde, left;
    b_hat.load_transposed(shared.b_hat + at, lane);
    k_hat.load_transposed(shared.k_hat + at, lane);
    a_tilde.load_transposed(shared.a + at, lane);
    r_tilde.load_transposed(shared.r + at, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      left.load(shared.dm_rb[i], lane);
      r.add_product(left, b_hat);
      left.load(shared.dm_rk[i], lane);
      r.add_product(left, k_hat);
      left.load(shared.dm_ab[i], lane);
      a.add_product(left, b_hat);
      left.load(shared.dm_ak[i], lane);
      a.add_product(left, k_hat);
      left.load_transposed(shared.dm_ab[i], lane);
      b.add_product(left, a_tilde);
      left.load_transposed(shared.dm_rb[i], lane);
      b.add_product(left, r_tilde);
      left.load_transposed(shared.dm_ak[i], lane);
      k.add_product(left, a_tilde);
      left.load_transposed(shared.dm_rk[i], lane);
      k.add_product(left, r_tilde);
    }
  }
};

// The gradients of r, w_raw, k, a, b, from the sums over this warp's key columns.
__device__ __forceinline__ void key_gradients(const Wkv7ChunkedArgs& args, const GradientsShared& shared, float* scratch,
                                     const Place& place, const Resets& resets, const Columns& columns,
                                     const StateTerms& of_state, const TokenTerms& of_tokens) {
  const int t = Columns::token();
  const bool first = resets.first_segment(t);
  const float to_end_mask = resets.last_segment(t) ? 1.0f : 0.0f;
  const float* decay_all = shared.decay_all + Columns::column();
  float later[8], earlier[8], own[8];  // of dl: terms summed over later and over earlier tokens, and the rest

  float state_term[8], token_term[8], factor[8], result[8];
  to_rows(of_state.r, scratch, state_term);
  to_rows(of_tokens.r, scratch, token_term);
  own_row(shared.r, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    state_term[i] = first ? state_term[i] : 0.0f;
    result[i] = columns.decay[i] * (state_term[i] + token_term[i]);
    later[i] = factor[i] * state_term[i];
    earlier[i] = factor[i] * token_term[i];
  }
  write_row(args.dr, place, result);

  float inverse[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) inverse[i] = reciprocal_fast(columns.decay[i]);
  to_rows(of_state.b, scratch, state_term);
  to_rows(of_tokens.b, scratch, token_term);
  own_row(shared.b_hat, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    earlier[i] -= factor[i] * token_term[i];
    result[i] = inverse[i] * (token_term[i] + to_end_mask * decay_all[i] * state_term[i]);
  }
  own_row(shared.b_bar, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) earlier[i] -= factor[i] * state_term[i];
  write_row(args.db, place, result);

  to_rows(of_state.k, scratch, state_term);
  to_rows(of_tokens.k, scratch, token_term);
  own_row(shared.k_hat, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    earlier[i] -= factor[i] * token_term[i];
    result[i] = inverse[i] * (token_term[i] + to_end_mask * decay_all[i] * state_term[i]);
  }
  own_row(shared.k_bar, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) earlier[i] -= factor[i] * state_term[i];
  write_row(args.dk, place, result);

  to_rows(of_state.a, scratch, state_term);
  to_rows(of_tokens.a, scratch, token_term);
  own_row(shared.a, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float before = __shfl_up_sync(kAllLanes, columns.decay[i], 1, kChunk);
    state_term[i] = first ? state_term[i] : 0.0f;
    result[i] = (t == 0 ? 1.0f : before) * (state_term[i] + token_term[i]);
    later[i] += factor[i] * state_term[i];
    own[i] = earlier[i] - (first ? factor[i] * state_term[i] : 0.0f);
    earlier[i] += factor[i] * token_term[i];
  }
  write_row(args.da, place, result);

  store_rows(scratch, of_state.decay, 20, threadIdx.x % 32);
  __syncwarp();
  const float* diagonal = scratch + Columns::column() % 16 * 21;
  const int start = resets.segment_start(t);
  float w_raw[8];
  unpack8(columns.w_raw, w_raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int step = 1; step < kChunk; step *= 2) {
      const float from_earlier = __shfl_up_sync(kAllLanes, earlier[i], step, kChunk);
      const float from_later = __shfl_down_sync(kAllLanes, later[i], step, kChunk);
      if (t - step >= start) earlier[i] += from_earlier;
      if (t + step < kChunk) later[i] += from_later;
    }
    const float through = resets.bits == 0 ? decay_all[i] * diagonal[i * 21] : 0.0f;
    const float dl = own[i] - earlier[i] + (first ? through + later[i] : 0.0f);
    result[i] = -kLogDecayScale * sigmoid_fast(w_raw[i]) * sigmoid_fast(-w_raw[i]) * dl;
  }
  write_row(args.dw_raw, place, result);
}

__global__ void __launch_bounds__(kChunkThreads, kGradientsBlocks) gradients_kernel(const Wkv7ChunkedArgs args) {
  extern __shared__ float4 shared_memory[];
  GradientsShared& shared = *reinterpret_cast<GradientsShared*>(shared_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Place place = place_of_block(args);
  const Resets resets = place.resets(args, lane);
  const int64_t chunks = args.window_end - args.window_begin, all_chunks = (args.tokens + kChunk - 1) / kChunk;
  const int64_t batch_head = place.batch * args.heads + place.head;
  const uint8_t* state = args.starts + (batch_head * all_chunks + place.chunk) * kStateBytes;
  const uint8_t* d = args.ends + (batch_head * chunks + place.chunk - args.window_begin) * kStateBytes;
#pragma unroll
  for (int at = threadIdx.x * 16; at < kStateBytes; at += kChunkThreads * 16) {
    copy_async(shared.d + at, d + at, true);
    copy_async(shared.state + at, state + at, true);
  }
  copy_async_commit();
  put(shared.v, Columns::fetch(args.v, place));
  put(shared.dy, Columns::fetch(args.dy, place));
  Tiles tiles;
  tiles.r = shared.r, tiles.r_low = shared.r_low;
  tiles.a = shared.a, tiles.b_hat = shared.b_hat, tiles.k_hat = shared.k_hat, tiles.k_hat_low = shared.k_hat_low;
  tiles.r_masked = tiles.r_masked_low = tiles.k_bar_low = nullptr;
  tiles.b_bar = shared.b_bar, tiles.k_bar = shared.k_bar;
  const Columns columns = decay_columns(args, place, resets, true, tiles);
  if (Columns::token() == kChunk - 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) shared.decay_all[Columns::column() + i] = columns.decay[i];
  }
  __syncthreads();

  if (warp == 0)
    store_rows(shared.m_ab_float, tile_pairs<true>(resets, lane, shared.a, shared.b_hat), kChunk, lane);
  if (warp == 1) {
    const Sum m_ak = tile_pairs<true>(resets, lane, shared.a, shared.k_hat);
    store_rows(shared.m_ak_float, m_ak, kChunk, lane);
    m_ak.rounded().store(shared.m_ak, lane);
  }
  if (warp == 2) store_both(shared.m_rb, tile_pairs<false>(resets, lane, shared.r, shared.b_hat), lane);
  if (warp == 3) store_both(shared.m_rk, precise_pairs(resets, lane, tiles), lane);
  copy_async_wait<0>();
  __syncthreads();

  value_gradients(args, shared, place, resets);
  __syncthreads();
  pair_gradients(shared, resets);
  __syncthreads();
  const StateTerms of_state(shared);
  const TokenTerms of_tokens(shared);
  key_gradients(args, shared, shared.by_row[warp], place, resets, columns, of_state, of_tokens);
}

}  // namespace wkv7
