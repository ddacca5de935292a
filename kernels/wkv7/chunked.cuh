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
// once, finishes the backward pass. Long rows are walked in pieces, so that the kernels work side by side, each on
// another piece. No result depends on the number of rows, heads, chunks per piece, or warps per block.
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
  uint8_t* operands;       // per buffer [B,H,piece,Operands<REVERSE>::kBytes]
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
  // As it lies in the warp, 16 bytes per lane: for another warp.
  __device__ void hand_over(uint8_t* to, int lane) const {
    *reinterpret_cast<uint4*>(to + lane * 16) = make_uint4(block[0], block[1], block[2], block[3]);
  }
  __device__ void take_over(const uint8_t* from, int lane) {
    const uint4 words = *reinterpret_cast<const uint4*>(from + lane * 16);
    block[0] = words.x, block[1] = words.y, block[2] = words.z, block[3] = words.w;
  }
  __device__ float element(int n) const { return n % 2 ? bf16_high(block[n / 2]) : bf16_low(block[n / 2]); }
};

// A lane's share of 16 x 16 numbers, as in Matrix and Sum: number n lies in row 8 (n / 2 % 2) + lane / 4 and in column
// 8 (n / 4) + 2 (lane % 4) + n % 2. Where rows are tokens, these go through them.
struct Share {
  float x[8];

  __device__ float& operator[](int n) { return x[n]; }
  __device__ float operator[](int n) const { return x[n]; }

  // Sums of a column over the rows up to the own one, from the start of its segment.
  __device__ void sum_from(const int (&start)[2], int lane) {
    const int row = lane / 4;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float other = __shfl_up_sync(kAllLanes, x[n], step * 4);
        const int upper = n / 2 % 2 * 8;
        if (row >= step && row + upper - step >= start[n / 2 % 2]) x[n] += other;
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n += n % 2 ? 3 : 1) {
      const float other = __shfl_sync(kAllLanes, x[n], 28 + lane % 4);
      if (start[1] < 8) x[n + 2] += other;
    }
  }
  // Sums of a column over the own row and the later ones.
  __device__ void sum_to_end(int lane) {
    const int row = lane / 4;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float other = __shfl_down_sync(kAllLanes, x[n], step * 4);
        if (row + step < 8) x[n] += other;
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n += n % 2 ? 3 : 1) x[n] += __shfl_sync(kAllLanes, x[n + 2], lane % 4);
  }
  __device__ Matrix rounded() const {
    Matrix to;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.block[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    return to;
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
  static constexpr int kScanBytes = REVERSE ? kRead : kReadVLow + kMatrixBytes;  // what follows is for `gradients`
  static constexpr int kT = kRead;  // reverse only, as the rest
  static constexpr int kX = kT + kMatrixBytes;
  static constexpr int kAk = kX + kMatrixBytes;       // M_ak
  static constexpr int kRbLow = kAk + kMatrixBytes;   // what rounding M_rb lost
  static constexpr int kRk = kRbLow + kMatrixBytes;   // M_rk
  static constexpr int kRkLow = kRk + kMatrixBytes;
  static constexpr int kBytes = REVERSE ? kRkLow + kMatrixBytes : kScanBytes;
};

// Of a block that works on one chunk, thread i brings in columns 8 (i / 16) to 8 (i / 16) + 7 of token i % 16: 16
// bytes at 16 i of a tile in blocks. So a warp brings in the 16 key columns that it works on.
__device__ __forceinline__ void fetch_tile(uint8_t* tile, const __nv_bfloat16* from, const Place& place) {
  const int token = threadIdx.x % kChunk;
  const bool valid = from != nullptr && token < place.valid;
  const __nv_bfloat16* row = from + place.offset + token * place.stride + threadIdx.x / kChunk * 8;
  copy_async(tile + threadIdx.x * 16, valid ? row : place.any, valid);
}

// Of the lane's two tokens: where their segments start, and which segments those are.
struct Tokens {
  int start[2];
  bool first[2], last[2];

  __device__ Tokens(const Resets& resets, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = lane / 4 + i * 8;
      start[i] = resets.segment_start(t), first[i] = resets.first_segment(t), last[i] = resets.last_segment(t);
    }
  }
};

// exp(L) and the like, for a warp's 16 key columns.
struct Decays {
  Share upto;    // exp(L)
  float all[4];  // P without resets, of columns 2q, 2q + 1, 8 + 2q, 9 + 2q

  __device__ Decays(const uint8_t* w_raw, int valid, int lane) {
    Matrix raw;
    raw.load(w_raw, lane);
    Share sum;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const bool exists = lane / 4 + n / 2 % 2 * 8 < valid;
      sum[n] = exists ? -kLogDecayScale * kLog2E * sigmoid_fast(raw.element(n)) : 0.0f;
    }
    constexpr int start[2] = {0, 0};
    sum.sum_from(start, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) upto[n] = exp2_fast(sum[n]);
#pragma unroll
    for (int i = 0; i < 4; ++i) all[i] = __shfl_sync(kAllLanes, upto[i / 2 * 4 + 2 + i % 2], 28 + lane % 4);
  }
  // exp(L - l), which is exp(L) of the token before.
  __device__ Share before(int lane) const {
    Share x;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float earlier = __shfl_up_sync(kAllLanes, upto[n], 4);
      const int lower = n % 2 + n / 4 * 4;
      const float first = n == lower ? 1.0f : __shfl_sync(kAllLanes, upto[lower], 28 + lane % 4);
      x[n] = lane < 4 ? first : earlier;
    }
    return x;
  }
  __device__ Share inverse() const {
    Share x;
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = reciprocal_fast(upto[n]);
    return x;
  }
  // exp(-L) P in the last segment, else zero.
  __device__ Share to_end(const Share& inverse, const Tokens& tokens) const {
    Share x;
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = tokens.last[n / 2 % 2] ? inverse[n] * all[n / 4 * 2 + n % 2] : 0.0f;
    return x;
  }
};

// A product of vectors with their decays, as the tensor cores see it, and what rounding to that lost.
struct Factor {
  Share exact;
  Matrix high;

  __device__ Factor(const Matrix& raw, const Share& scale) {
#pragma unroll
    for (int n = 0; n < 8; ++n) exact[n] = raw.element(n) * scale[n];
    high = exact.rounded();
  }
  __device__ Matrix low() const {
    Share lost;
#pragma unroll
    for (int n = 0; n < 8; ++n) lost[n] = exact[n] - high.element(n);
    return lost.rounded();
  }
};

// Without the tokens that S_0 does not reach. Rows are tokens.
__device__ __forceinline__ Matrix first_rows(Matrix x, const Tokens& tokens) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.block[i] = tokens.first[i % 2] ? x.block[i] : 0;
  return x;
}
// The same for columns.
__device__ __forceinline__ Matrix first_columns(Matrix x, const Resets& resets, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = i / 2 * 8 + lane % 4 * 2;
    x.block[i] &= (resets.first_segment(column) ? 0xffffu : 0u) | (resets.first_segment(column + 1) ? 0xffff0000u : 0u);
  }
  return x;
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
__device__ __forceinline__ Sum tile_product(const uint8_t* left_tile, const uint8_t* right_tile, int lane) {
  Sum sum;
  sum.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix left, right;
    left.load(left_tile + part * kMatrixBytes, lane);
    right.load(right_tile + part * kMatrixBytes, lane);
    sum.add_product(left, right);
  }
  return sum;
}

// M_rk with twice the digits: a token's own r and k may be nearly orthogonal, and then its error would be all that is
// left of their product.
__device__ __forceinline__ Sum precise_product(const uint8_t* r, const uint8_t* r_low, const uint8_t* k,
                                               const uint8_t* k_low, int lane) {
  Sum sum, small;
  sum.zero(), small.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix left, right, left_low, right_low;
    left.load(r + part * kMatrixBytes, lane);
    right_low.load(k_low + part * kMatrixBytes, lane);
    small.add_product(left, right_low);
    right.load(k + part * kMatrixBytes, lane);
    sum.add_product(left, right);
    left_low.load(r_low + part * kMatrixBytes, lane);
    small.add_product(left_low, right);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) sum.x[n / 4][n % 4] += small.x[n / 4][n % 4];
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

// One warp: T = (1 - m_ab)^-1 and X = T m_ak by rows; lanes 0..15 have the columns of T, the others those of X.
// m_ab and m_ak: 16 x 16, row-major.
__device__ __forceinline__ void solve(const float* m_ab, const float* m_ak, int lane, uint8_t* t, uint8_t* x) {
  const int column = lane % kChunk;
  const bool of_t = lane < kChunk;
  float solution[kChunk];
#pragma unroll
  for (int row = 0; row < kChunk; ++row) {
    float sum = of_t ? (row == column ? 1.0f : 0.0f) : m_ak[row * kChunk + column];
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
  uint8_t* to = (of_t ? t : x) + column / 8 * 256 + column % 8 * 2;
#pragma unroll
  for (int row = 0; row < kChunk; ++row)
    *reinterpret_cast<uint16_t*>(to + row / 8 * 128 + row % 8 * 16) =
        static_cast<uint16_t>(pack_bf16(solution[row], 0.0f));
}

template <bool REVERSE>
__global__ void __launch_bounds__(kChunkThreads, 7) prepare_kernel(const Wkv7ChunkedArgs args) {
  using To = Operands<REVERSE>;
  __shared__ alignas(16) uint8_t tile_w[kTileBytes], tile_r[kTileBytes], tile_a[kTileBytes];
  __shared__ alignas(16) uint8_t tile_b[kTileBytes], tile_k[kTileBytes], tile_k_low[kTileBytes];
  __shared__ alignas(16) uint8_t t[kMatrixBytes], x[kMatrixBytes];
  __shared__ alignas(16) float m_ab[kChunk * kChunk], m_ak[kChunk * kChunk];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = warp * kMatrixBytes;
  const Place place = place_of_block(args);
  fetch_tile(tile_w, args.w_raw, place);
  fetch_tile(tile_r, args.r, place);
  fetch_tile(tile_a, args.a, place);
  fetch_tile(tile_b, args.b, place);
  fetch_tile(tile_k, args.k, place);
  copy_async_commit();
  const Resets resets = place.resets(args, lane);
  const Tokens tokens(resets, lane);
  const int64_t chunks = args.window_end - args.window_begin, batch_head = place.batch * args.heads + place.head;
  uint8_t* to = args.operands + (batch_head * chunks + place.chunk - args.window_begin) * To::kBytes;
  copy_async_wait<0>();
  __syncwarp();  // a warp brings in its own columns

  uint8_t* const tile_r_low = tile_w;
  {
    const Decays decays(tile_w + at, place.valid, lane);
    Matrix raw;
    raw.load(tile_r + at, lane);
    __syncwarp();
    const Factor r(raw, decays.upto);
    const Matrix r_low = r.low();
    r.high.store(tile_r + at, lane);
    r_low.store(tile_r_low + at, lane);
    first_rows(r.high, tokens).store(to + (REVERSE ? To::kSecond : To::kRead) + at, lane);
    if (REVERSE) first_rows(r_low, tokens).store(to + To::kSecondLow + at, lane);
    raw.load(tile_a + at, lane);
    __syncwarp();
    Factor(raw, decays.before(lane)).high.store(tile_a + at, lane);
    const Share inverse = decays.inverse(), to_end = decays.to_end(inverse, tokens);
    raw.load(tile_b + at, lane);
    __syncwarp();
    Factor(raw, inverse).high.store(tile_b + at, lane);
    Factor(raw, to_end).high.store(to + (REVERSE ? To::kFirst : To::kThird) + at, lane);
    raw.load(tile_k + at, lane);
    __syncwarp();
    const Factor k(raw, inverse);
    k.high.store(tile_k + at, lane);
    k.low().store(tile_k_low + at, lane);
    if (!REVERSE) {
      const Factor k_bar(raw, to_end);
      k_bar.high.store(to + To::kSecond + at, lane);
      k_bar.low().store(to + To::kSecondLow + at, lane);
    }
    if (lane < 4) {
      const float kept = resets.bits == 0 ? 1.0f : 0.0f;
      *reinterpret_cast<float4*>(to + To::kDecay + (lane * 4 + warp) * 16) =
          make_float4(kept * decays.all[0], kept * decays.all[1], kept * decays.all[2], kept * decays.all[3]);
    }
  }
  __syncthreads();

  if (warp == 0) {
    Sum sum = tile_product(tile_a, tile_b, lane);
    mask_pairs<true>(sum, resets, lane);
    store_rows(m_ab, sum, kChunk, lane);
    sum = tile_product(tile_a, tile_k, lane);
    mask_pairs<true>(sum, resets, lane);
    store_rows(m_ak, sum, kChunk, lane);
    if (REVERSE) sum.rounded().store(to + To::kAk, lane);
    __syncwarp();
    solve(m_ab, m_ak, lane, t, x);
  }
  if (warp == 1) {
    Sum sum = tile_product(tile_r, tile_b, lane);
    mask_pairs<false>(sum, resets, lane);
    const Matrix rounded = sum.rounded();
    rounded.store(to + (REVERSE ? To::kMatrix : To::kReadU), lane);
    if (REVERSE) sum.remainder(rounded).store(to + To::kRbLow, lane);
  }
  if (warp == 2) {
    Sum sum = precise_product(tile_r, tile_r_low, tile_k, tile_k_low, lane);
    mask_pairs<false>(sum, resets, lane);
    const Matrix rounded = sum.rounded();
    rounded.store(to + (REVERSE ? To::kRk : To::kReadV), lane);
    sum.remainder(rounded).store(to + (REVERSE ? To::kRkLow : To::kReadVLow), lane);
  }
  __syncthreads();

  Matrix left, right;
  Sum w;
  left.load(t, lane);
  right.load_transposed(tile_a + at, lane);
  w.zero();
  w.add_product(first_columns(left, resets, lane), right);
  w.rounded().store(to + (REVERSE ? To::kThird : To::kFirst) + at, lane);
  if (REVERSE && warp == 1) left.store(to + To::kT, lane);
  if (warp == 0) {
    left.load(x, lane);
    left.store(to + (REVERSE ? To::kX : To::kMatrix), lane);
  }
}

// A block of `scan` has WARPS warps that carry the state and as many that do the rest for them: bring in operands,
// write the states, and make y one chunk later. All meet once per chunk.
template <bool REVERSE, int WARPS>
struct Scan {
  static constexpr int kHelpers = WARPS * 32, kThreads = 2 * kHelpers, kSplits = 4 / WARPS;
  static constexpr int kRowsAt = Operands<REVERSE>::kScanBytes;
  static constexpr int kStageBytes = kRowsAt + WARPS * kMatrixBytes;  // operands, then 16 tokens of this block's values
  static constexpr int kHandBytes = kTileBytes + kMatrixBytes;        // of a warp and chunk: rounded state, u
  static constexpr int kStages = REVERSE ? (WARPS == 1 ? 9 : WARPS == 2 ? 8 : 6)
                                         : (WARPS == 1 ? 7 : WARPS == 2 ? 6 : 5);
  static constexpr int kHandAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kHandAt + 2 * WARPS * kHandBytes;
  static constexpr int kParts = kSize / 16;
};

// Where a block of `scan` works.
template <bool REVERSE, int WARPS>
struct ScanPlace {
  int64_t batch_head, batch, head;
  int chunks, value_block;  // this warp's values are 16 value_block and the next 15

  __device__ ScanPlace(const Wkv7ChunkedArgs& args, int warp) {
    const unsigned block_head = blockIdx.x / Scan<REVERSE, WARPS>::kSplits, heads = args.heads;
    batch_head = block_head, batch = block_head / heads, head = block_head % heads;
    chunks = static_cast<int>(args.window_end - args.window_begin);
    value_block = blockIdx.x % Scan<REVERSE, WARPS>::kSplits * WARPS + warp;
  }
  __device__ int64_t local_chunk(int step) const { return REVERSE ? chunks - 1 - step : step; }
};

template <bool REVERSE, int WARPS>
__device__ __forceinline__ void carry_state(const Wkv7ChunkedArgs& args, uint8_t* shared) {
  using C = Scan<REVERSE, WARPS>;
  using From = Operands<REVERSE>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const ScanPlace<REVERSE, WARPS> place(args, warp);
  Sum state[C::kParts];
  {
    const float* from = REVERSE ? args.dstate_in : args.state;
    const int64_t at = (place.batch_head * kSize + place.value_block * 16) * kSize;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
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

  Matrix first[C::kParts], values;  // of the next chunk, loaded ahead, as is its matrix
  Sum u;
  const auto load_first = [&](const uint8_t* at) {
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) first[part].load(at + From::kFirst + part * kMatrixBytes, lane);
  };
  const auto load_values = [&](const uint8_t* at) {
    Matrix matrix;
    values.load_transposed(at + C::kRowsAt + warp * kMatrixBytes, lane);
    if (REVERSE) matrix.load_transposed(at + From::kMatrix, lane);
    else matrix.load(at + From::kMatrix, lane);
    u.zero();
    u.add_product(values, matrix);
  };
  __syncthreads();
  load_first(shared), load_values(shared);

  int stage = 0;
  for (int step = 0; step < place.chunks; ++step) {
    const uint8_t* const at = shared + stage * C::kStageBytes;
    stage = stage + 1 < C::kStages ? stage + 1 : 0;
    const uint8_t* const next = shared + stage * C::kStageBytes;
    uint8_t* const hand = shared + C::kHandAt + (step % 2 * WARPS + warp) * C::kHandBytes;

    Matrix rounded[C::kParts];
    Sum u_half;
    u_half.zero();
    rounded[0] = state[0].rounded();
    u.add_product(rounded[0], first[0]);
    rounded[1] = state[1].rounded();
    u_half.add_product(rounded[1], first[1]);
    rounded[2] = state[2].rounded();
    u.add_product(rounded[2], first[2]);
    rounded[3] = state[3].rounded();
    u_half.add_product(rounded[3], first[3]);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) rounded[part].hand_over(hand + part * kMatrixBytes, lane);

    const float4* decay = reinterpret_cast<const float4*>(at + From::kDecay) + lane % 4 * 4;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
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
    for (int n = 0; n < 8; ++n) u.x[n / 4][n % 4] += u_half.x[n / 4][n % 4];
    const Matrix u_rounded = u.rounded();
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      Matrix third;
      third.load_transposed(at + From::kThird + part * kMatrixBytes, lane);
      state[part].add_product(u_rounded, third);
    }
    if (!REVERSE) u_rounded.hand_over(hand + kTileBytes, lane);
    load_first(next), load_values(next);  // after the last chunk: of an old one, unused
    __syncthreads();
  }

  float* to = REVERSE ? args.dstate : args.state_out;
  const int64_t end = (place.batch_head * kSize + place.value_block * 16) * kSize;
#pragma unroll
  for (int part = 0; part < C::kParts; ++part) store_rows(to + end + part * 16, state[part], kSize, lane);
}

// Brings chunks into the stages. Has as many threads as its block has for the state.
template <bool REVERSE, int WARPS>
struct Fetcher {
  using C = Scan<REVERSE, WARPS>;
  using From = Operands<REVERSE>;
  const uint8_t* operands;     // this thread's first 16 bytes of the next chunk
  const __nv_bfloat16* row;    // this thread's 16 bytes of v (dy) of the next chunk
  const void* any;
  int64_t operands_stride, row_stride;
  int token, left;             // the token in the row; tokens from the next chunk's first one to the end of the row
  int chunks;                  // still to come
  uint8_t* to;
  int stage;

  __device__ Fetcher(const Wkv7ChunkedArgs& args, const ScanPlace<REVERSE, WARPS>& place, uint8_t* shared) {
    const int thread = threadIdx.x % C::kHelpers, lane = threadIdx.x % 32;
    const Place chunk(args, place.batch, place.head, args.window_begin + place.local_chunk(0));
    const __nv_bfloat16* rows = REVERSE ? args.dy : args.v;
    token = lane % kChunk;
    any = args.operands;
    operands = args.operands + (place.batch_head * place.chunks + place.local_chunk(0)) * From::kBytes + thread * 16;
    operands_stride = REVERSE ? -From::kBytes : From::kBytes;
    row = rows + chunk.offset + token * chunk.stride + place.value_block * 16 + lane / kChunk * 8;
    row_stride = (REVERSE ? -kChunk : kChunk) * chunk.stride;
    left = rows == nullptr ? 0 : static_cast<int>(args.tokens - chunk.chunk * kChunk);
    if (rows == nullptr) token = kChunk;
    chunks = place.chunks, to = shared + thread * 16, stage = 0;
  }
  __device__ void next() {
    if (chunks > 0) {
      uint8_t* const at = to + stage * C::kStageBytes;
#pragma unroll
      for (int i = 0; i < From::kScanBytes; i += C::kHelpers * 16) {
        const bool all = i + C::kHelpers * 16 <= From::kScanBytes;
        if (all || i + static_cast<int>(threadIdx.x % C::kHelpers) * 16 < From::kScanBytes)
          copy_async(at + i, operands + i, true);
      }
      const bool valid = token < left;
      copy_async(at + C::kRowsAt, valid ? static_cast<const void*>(row) : any, valid);
      operands += operands_stride, row += row_stride;
      if (token < kChunk) left += REVERSE ? kChunk : -kChunk;
      --chunks, stage = stage + 1 < C::kStages ? stage + 1 : 0;
    }
    copy_async_commit();
  }
};

template <bool REVERSE, int WARPS>
__device__ __forceinline__ void help_state(const Wkv7ChunkedArgs& args, uint8_t* shared) {
  using C = Scan<REVERSE, WARPS>;
  using From = Operands<REVERSE>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - WARPS;
  const ScanPlace<REVERSE, WARPS> place(args, warp);
  Fetcher<REVERSE, WARPS> fetcher(args, place, shared);
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) fetcher.next();

  const int64_t all_chunks = (args.tokens + kChunk - 1) / kChunk;
  uint8_t* const saved = (REVERSE ? args.ends + place.batch_head * place.chunks * kStateBytes
                                  : args.starts + (place.batch_head * all_chunks + args.window_begin) * kStateBytes) +
                         place.value_block * kTileBytes;
  const bool save = REVERSE || args.starts != nullptr;
  Matrix read[C::kParts], read_u, read_v, read_v_low, values;  // of the chunk whose y is next
  copy_async_wait<C::kStages - 2>();
  __syncthreads();

  // At `step` the state goes through chunk `step`; the one before is written, and its stage is free.
  int stage = 0;
  for (int step = 0;; ++step) {
    if (step > 0) {
      fetcher.next();
      const uint8_t* const hand = shared + C::kHandAt + ((step - 1) % 2 * WARPS + warp) * C::kHandBytes;
      const int64_t local = place.local_chunk(step - 1);
      Sum y;
      y.zero();
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        Matrix rounded;
        rounded.take_over(hand + part * kMatrixBytes, lane);
        if (save) rounded.store(saved + local * kStateBytes + part * kMatrixBytes, lane);
        if (!REVERSE) y.add_product(read[part], rounded);
      }
      if (!REVERSE) {
        Matrix u;
        u.take_over(hand + kTileBytes, lane);
        y.add_product(read_v_low, values);
        y.add_product(read_v, values);
        y.add_product(read_u, u);
        const Matrix y_rounded = y.rounded();
        const Place chunk(args, place.batch, place.head, args.window_begin + local);
        __nv_bfloat16* const to = args.y + chunk.offset + place.value_block * 16 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = lane / 4 + i % 2 * 8;
          if (token < chunk.valid)
            *reinterpret_cast<uint32_t*>(to + token * chunk.stride + i / 2 * 8) = y_rounded.block[i];
        }
      }
    }
    if (step == place.chunks) break;
    if (!REVERSE) {
      const uint8_t* const at = shared + stage * C::kStageBytes;
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) read[part].load(at + From::kRead + part * kMatrixBytes, lane);
      read_u.load(at + From::kReadU, lane);
      read_v.load(at + From::kReadV, lane);
      read_v_low.load(at + From::kReadVLow, lane);
      values.load_transposed(at + C::kRowsAt + warp * kMatrixBytes, lane);
    }
    stage = stage + 1 < C::kStages ? stage + 1 : 0;
    copy_async_wait<C::kStages - 3>();  // the chunk after the next one is there
    __syncthreads();
  }
}

template <bool REVERSE, int WARPS>
__global__ void __launch_bounds__(Scan<REVERSE, WARPS>::kThreads, WARPS == 4 ? 2 : 1)
    scan_kernel(const Wkv7ChunkedArgs args) {
  extern __shared__ float4 shared_memory[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(shared_memory);
  if (threadIdx.x < WARPS * 32) carry_state<REVERSE, WARPS>(args, shared);
  else help_state<REVERSE, WARPS>(args, shared);
}

// Shared memory of a block of `gradients_kernel`.
struct GradientsShared {
  alignas(16) uint8_t state[kStateBytes], d[kStateBytes];                        // S_0, D_1
  uint8_t r[kTileBytes], a[kTileBytes], b_hat[kTileBytes], k_hat[kTileBytes];    // R~, A~ without masks, B^, K^
  uint8_t b_bar[kTileBytes], k_bar[kTileBytes], v[kTileBytes], dy[kTileBytes];
  uint8_t w_raw[kTileBytes];
  uint8_t u[kTileBytes], dz[kTileBytes];  // transposed: four matrices of 16 values x 16 tokens
  union {
    struct {
      uint8_t m_rb[kMatrixBytes];
      uint8_t of_tokens[Operands<true>::kBytes - Operands<true>::kT];  // as there
    };
    struct {  // and what rounding lost
      uint8_t dm_ab[2][kMatrixBytes], dm_ak[2][kMatrixBytes], dm_rb[2][kMatrixBytes], dm_rk[2][kMatrixBytes];
    };
  };
  uint8_t out[4][kMatrixBytes];  // per warp: results on their way to 16 bytes per thread

  __device__ const uint8_t* matrix(int offset) const { return of_tokens + offset - Operands<true>::kT; }
};

// Writes the results for 16 tokens and this warp's 16 columns. All lanes of the warp call it.
__device__ __forceinline__ void write_rows(__nv_bfloat16* to, const Place& place, const Matrix& x, uint8_t* scratch) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % kChunk;
  x.store(scratch, lane);
  __syncwarp();
  if (token < place.valid)
    *reinterpret_cast<uint4*>(to + place.offset + token * place.stride + threadIdx.x / kChunk * 8) =
        *reinterpret_cast<const uint4*>(scratch + lane * 16);
  __syncwarp();
}

// Values of this warp: dU, dZ, U, which stay in shared memory, and dV, which is written.
__device__ __forceinline__ void value_gradients(const Wkv7ChunkedArgs& args, GradientsShared& shared,
                                                const Place& place, const Resets& resets) {
  using From = Operands<true>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = warp * kMatrixBytes;
  Matrix dy, left, right;
  Sum du, du_state, z, dv;
  du.zero(), du_state.zero(), z.zero(), dv.zero();
  dy.load_transposed(shared.dy + at, lane);
  right.load_transposed(shared.matrix(From::kRbLow), lane);
  du.add_product(dy, right);
  right.load_transposed(shared.m_rb, lane);
  du.add_product(dy, right);
  left.load_transposed(shared.matrix(From::kRkLow), lane);
  dv.add_product(left, dy);
  left.load_transposed(shared.matrix(From::kRk), lane);
  dv.add_product(left, dy);
#pragma unroll 2
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix d;
    d.load(shared.d + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load(shared.b_bar + part * kMatrixBytes, lane);
    du_state.add_product(d, right);
    left.load(shared.k_bar + part * kMatrixBytes, lane);
    dv.add_product(left, d);
    left.load(shared.state + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load(shared.a + part * kMatrixBytes, lane);
    z.add_product(left, right);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) du.x[n / 4][n % 4] += du_state.x[n / 4][n % 4];

  Sum dz, u;
  dz.zero(), u.zero();
  right.load_transposed(shared.matrix(From::kT), lane);
  dz.add_product(du.rounded(), right);
  const Matrix dz_rounded = dz.rounded();
  dz_rounded.store(shared.dz + at, lane);
  left.load_transposed(shared.matrix(From::kAk), lane);
  dv.add_product(left, dz_rounded);

  left.load_transposed(shared.v + at, lane);
  right.load(shared.matrix(From::kX), lane);
  u.add_product(left, right);
  right.load(shared.matrix(From::kT), lane);
  u.add_product(first_columns(z.rounded(), resets, lane), right);
  u.rounded().store(shared.u + at, lane);
  write_rows(args.dv, place, dv.rounded(), shared.out[warp]);
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
  Sum sum, sum_odd;
  sum.zero(), sum_odd.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Matrix left, right;
    if (of_dz) left.load_transposed(shared.dz + part * kMatrixBytes, lane);
    else left.load(shared.dy + part * kMatrixBytes, lane);
    if (of_u) right.load_transposed(shared.u + part * kMatrixBytes, lane);
    else right.load(shared.v + part * kMatrixBytes, lane);
    (part % 2 ? sum_odd : sum).add_product(left, right);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) sum.x[n / 4][n % 4] += sum_odd.x[n / 4][n % 4];
  if (of_dz) mask_pairs<true>(sum, resets, lane);
  else mask_pairs<false>(sum, resets, lane);
  store_both(of_dz ? (of_u ? shared.dm_ab : shared.dm_ak) : (of_u ? shared.dm_rb : shared.dm_rk), sum, lane);
}

// The gradients of r, w_raw, k, a, b for a warp's 16 key columns.
struct KeyGradients {
  const Wkv7ChunkedArgs& args;
  GradientsShared& shared;
  const Place& place;
  const Resets resets;
  const int thread, lane, warp, at;
  Share earlier, later, own;  // of dl: terms summed over earlier and over later tokens, and the rest

  __device__ KeyGradients(const Wkv7ChunkedArgs& args_, GradientsShared& shared_, const Place& place_,
                          const Resets& resets_)
      : args(args_), shared(shared_), place(place_), resets(resets_), thread(thread_again()), lane(thread % 32),
        warp(thread / 32), at(thread / 32 * kMatrixBytes) {}

  // sum += left right^T. left: a 16 x 16 matrix that lies as it is or transposed.
  template <bool TRANSPOSED>
  __device__ void add_left(Sum& sum, const uint8_t* left_matrix, const Matrix& right) {
    Matrix left;
    if (TRANSPOSED) left.load_transposed(left_matrix, lane);
    else left.load(left_matrix, lane);
    sum.add_product(left, right);
  }
  // sum += pairs times the warp's columns of a tile.
  template <bool TRANSPOSED>
  __device__ void add_pairs(Sum& sum, const uint8_t (&pairs)[2][kMatrixBytes], const uint8_t* tile) {
    Matrix right;
    right.load_transposed(tile + at, lane);
    add_left<TRANSPOSED>(sum, pairs[1], right);
    add_left<TRANSPOSED>(sum, pairs[0], right);
  }

  // One of b and k: what D_1 contributes, and what the tokens do; takes both from `earlier` and writes the gradient.
  __device__ void finish_b_or_k(const Decays& decays, const Sum& of_state, const Sum& of_pairs, const uint8_t* hat,
                                const uint8_t* bar, __nv_bfloat16* to) {
    const Tokens tokens(resets, lane);
    Matrix factor, factor_bar;
    factor.load(hat + at, lane);
    factor_bar.load(bar + at, lane);
    const Share inverse = decays.inverse(), to_end = decays.to_end(inverse, tokens);
    Share result;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float state_term = of_state.x[n / 4][n % 4], pair_term = of_pairs.x[n / 4][n % 4];
      earlier[n] -= factor.element(n) * pair_term + factor_bar.element(n) * state_term;
      result[n] = inverse[n] * pair_term + to_end[n] * state_term;
    }
    write_rows(to, place, result.rounded(), shared.out[warp]);
  }

  __device__ void of_b_and_k(const Decays& decays) {
    Sum b_state, k_state, b_pairs, k_pairs;
    b_state.zero(), k_state.zero(), b_pairs.zero(), k_pairs.zero();
#pragma unroll 2
    for (int part = 0; part < kSize / 16; ++part) {
      Matrix d;
      d.load_transposed(shared.d + part * kTileBytes + at, lane);
      add_left<true>(b_state, shared.u + part * kMatrixBytes, d);
      add_left<false>(k_state, shared.v + part * kMatrixBytes, d);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) earlier[n] = 0.0f;
    add_pairs<true>(b_pairs, shared.dm_ab, shared.a);
    add_pairs<true>(b_pairs, shared.dm_rb, shared.r);
    finish_b_or_k(decays, b_state, b_pairs, shared.b_hat, shared.b_bar, args.db);
    add_pairs<true>(k_pairs, shared.dm_ak, shared.a);
    add_pairs<true>(k_pairs, shared.dm_rk, shared.r);
    finish_b_or_k(decays, k_state, k_pairs, shared.k_hat, shared.k_bar, args.dk);
  }

  __device__ void of_r_and_a(const Decays& decays) {
    const Tokens tokens(resets, lane);
    Sum r_state, a_state, r_pairs, a_pairs;
    r_state.zero(), a_state.zero(), r_pairs.zero(), a_pairs.zero();
#pragma unroll 2
    for (int part = 0; part < kSize / 16; ++part) {
      Matrix state;
      state.load_transposed(shared.state + part * kTileBytes + at, lane);
      add_left<false>(r_state, shared.dy + part * kMatrixBytes, state);
      add_left<true>(a_state, shared.dz + part * kMatrixBytes, state);
    }
    Matrix factor;
    Share result;
    add_pairs<false>(r_pairs, shared.dm_rb, shared.b_hat);
    add_pairs<false>(r_pairs, shared.dm_rk, shared.k_hat);
    factor.load(shared.r + at, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float state_term = tokens.first[n / 2 % 2] ? r_state.x[n / 4][n % 4] : 0.0f;
      const float pair_term = r_pairs.x[n / 4][n % 4];
      result[n] = decays.upto[n] * (state_term + pair_term);
      later[n] = factor.element(n) * state_term;
      earlier[n] += factor.element(n) * pair_term;
    }
    write_rows(args.dr, place, result.rounded(), shared.out[warp]);
    add_pairs<false>(a_pairs, shared.dm_ab, shared.b_hat);
    add_pairs<false>(a_pairs, shared.dm_ak, shared.k_hat);
    factor.load(shared.a + at, lane);
    const Share before = decays.before(lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float state_term = tokens.first[n / 2 % 2] ? a_state.x[n / 4][n % 4] : 0.0f;
      const float pair_term = a_pairs.x[n / 4][n % 4];
      result[n] = before[n] * (state_term + pair_term);
      later[n] += factor.element(n) * state_term;
      own[n] = earlier[n] - factor.element(n) * state_term;
      earlier[n] += factor.element(n) * pair_term;
    }
    write_rows(args.da, place, result.rounded(), shared.out[warp]);
  }

  __device__ void of_w_raw(const Decays& decays) {
    const Tokens tokens(resets, lane);
    Sum both;  // S_0^T D_1, whose diagonal is colsum(S_0 * D_1)
    both.zero();
#pragma unroll 2
    for (int part = 0; part < kSize / 16; ++part) {
      Matrix state, d;
      state.load_transposed(shared.state + part * kTileBytes + at, lane);
      d.load_transposed(shared.d + part * kTileBytes + at, lane);
      both.add_product(state, d);
    }
    float decay[4];  // of this lane's columns; element (c, c) lies in lane 4 (c % 8) + c % 8 / 2
#pragma unroll
    for (int i = 0; i < 4; ++i)
      decay[i] = decays.all[i] * __shfl_sync(kAllLanes, both.x[i / 2][i / 2 * 2 + i % 2], lane % 4 * 9 + i % 2 * 4);
    earlier.sum_from(tokens.start, lane);
    later.sum_to_end(lane);
    Matrix raw;
    raw.load(shared.w_raw + at, lane);
    Share result;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float through = resets.bits == 0 ? decay[n / 4 * 2 + n % 2] : 0.0f;
      const float dl = own[n] - earlier[n] + (tokens.first[n / 2 % 2] ? through + later[n] : 0.0f);
      const float power = exp2_fast(fminf(-kLog2E * raw.element(n), 60.0f)), sigmoid = reciprocal_fast(1.0f + power);
      result[n] = -kLogDecayScale * (sigmoid * (sigmoid * power)) * dl;
    }
    write_rows(args.dw_raw, place, result.rounded(), shared.out[warp]);
  }
};

__global__ void __launch_bounds__(kChunkThreads, kGradientsBlocks) gradients_kernel(const Wkv7ChunkedArgs args) {
  extern __shared__ float4 shared_memory[];
  GradientsShared& shared = *reinterpret_cast<GradientsShared*>(shared_memory);
  using From = Operands<true>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = warp * kMatrixBytes;
  const Place place = place_of_block(args);
  fetch_tile(shared.w_raw, args.w_raw, place);
  fetch_tile(shared.r, args.r, place);
  fetch_tile(shared.a, args.a, place);
  fetch_tile(shared.b_hat, args.b, place);
  fetch_tile(shared.k_hat, args.k, place);
  copy_async_commit();
  {
    const int64_t chunks = args.window_end - args.window_begin, all_chunks = (args.tokens + kChunk - 1) / kChunk;
    const int64_t batch_head = place.batch * args.heads + place.head;
    const int64_t local = batch_head * chunks + place.chunk - args.window_begin;
    const uint8_t* state = args.starts + (batch_head * all_chunks + place.chunk) * kStateBytes + threadIdx.x * 16;
    const uint8_t* d = args.ends + local * kStateBytes + threadIdx.x * 16;
    const uint8_t* matrices = args.operands + local * From::kBytes;
    fetch_tile(shared.v, args.v, place);
    fetch_tile(shared.dy, args.dy, place);
#pragma unroll
    for (int i = 0; i < kStateBytes; i += kChunkThreads * 16) {
      copy_async(shared.d + threadIdx.x * 16 + i, d + i, true);
      copy_async(shared.state + threadIdx.x * 16 + i, state + i, true);
    }
    const int part = threadIdx.x * 16;
    copy_async(shared.of_tokens + part, matrices + From::kT + part, true);
    if (warp < 2) copy_async(shared.of_tokens + kTileBytes + part, matrices + From::kT + kTileBytes + part, true);
    if (warp == 2) copy_async(shared.m_rb + lane * 16, matrices + From::kMatrix + lane * 16, true);
  }
  copy_async_commit();
  const Resets resets = place.resets(args, lane);
  const Tokens tokens(resets, lane);
  copy_async_wait<1>();
  __syncwarp();  // a warp brings in its own columns

  const Decays decays(shared.w_raw + at, place.valid, lane);
  {
    Matrix r, a, b, k;
    r.load(shared.r + at, lane), a.load(shared.a + at, lane);
    b.load(shared.b_hat + at, lane), k.load(shared.k_hat + at, lane);
    __syncwarp();
    Factor(r, decays.upto).high.store(shared.r + at, lane);
    Factor(a, decays.before(lane)).high.store(shared.a + at, lane);
    const Share inverse = decays.inverse(), to_end = decays.to_end(inverse, tokens);
    Factor(b, inverse).high.store(shared.b_hat + at, lane);
    Factor(b, to_end).high.store(shared.b_bar + at, lane);
    Factor(k, inverse).high.store(shared.k_hat + at, lane);
    Factor(k, to_end).high.store(shared.k_bar + at, lane);
  }
  copy_async_wait<0>();
  __syncthreads();
  value_gradients(args, shared, place, resets.again());
  __syncthreads();
  pair_gradients(shared, resets.again());
  __syncthreads();
  KeyGradients gradients(args, shared, place, resets.again());
  gradients.of_b_and_k(decays);
  gradients.of_r_and_a(decays);
  gradients.of_w_raw(decays);
}

}  // namespace wkv7
