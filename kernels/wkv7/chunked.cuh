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

// What `scan` needs of a chunk: byte offsets. Its step is, with rows v (reverse: dy),
//   u = first s^T + matrix rows        s = s diag(decay) + rows^T (second + second_low) + u^T third
// Handed over, as it lies in the registers of a right operand, unless said otherwise.
template <bool REVERSE>
struct Operands {
  static constexpr int kFirst = 0;                     // W;  reverse: B-, its transpose in blocks
  static constexpr int kSecond = kFirst + kTileBytes;  // K-^T; reverse: R~^T
  static constexpr int kSecondLow = kSecond + kTileBytes;  // what rounding it lost: most of the error of the state
  static constexpr int kThird = kSecondLow + kTileBytes;  // B-^T; reverse: W^T
  static constexpr int kMatrix = kThird + kTileBytes;  // X;  reverse: M_rb^T
  static constexpr int kDecay = kMatrix + kMatrixBytes;  // P in float32: columns 8j + 2q, 8j + 2q + 1 at 16q + 2j
  static constexpr int kRead = kDecay + kSize * 4;     // R~, its transpose in blocks    forward only, as the next two
  static constexpr int kReadU = kRead + kTileBytes;    // M_rb, left operand
  static constexpr int kReadV = kReadU + kMatrixBytes;  // M_rk, left operand
  static constexpr int kBytes = REVERSE ? kRead : kReadV + kMatrixBytes;
};

// What `gradients` needs of the products of a chunk's tokens, all as right operands are handed over.
struct Pairs {
  static constexpr int kRb = 0;  // M_rb^T
  static constexpr int kT = kRb + kMatrixBytes;
  static constexpr int kTTransposed = kT + kMatrixBytes;
  static constexpr int kX = kTTransposed + kMatrixBytes;
  static constexpr int kAk = kX + kMatrixBytes;   // M_ak^T
  static constexpr int kRk = kAk + kMatrixBytes;  // M_rk^T
  static constexpr int kBytes = kRk + kMatrixBytes;
};

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

// left right^T of two tiles that lie transposed.
__device__ __forceinline__ Numbers tile_product(const uint8_t* left_tile, const uint8_t* right_tile, int lane) {
  Numbers sum, odd;
  sum.zero(), odd.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Left left;
    Right right;
    left.load_transposed(left_tile + part * kMatrixBytes, lane);
    right.load_transposed(right_tile + part * kMatrixBytes, lane);
    (part % 2 ? odd : sum).add_product(left, right);
  }
  sum.add(odd);
  return sum;
}

// M_rk with twice the digits: a token's own r and k may be nearly orthogonal, and then its error would be all that is
// left of their product.
__device__ __forceinline__ Numbers precise_product(const uint8_t* left_tile, const uint8_t* left_low_tile,
                                                   const uint8_t* right_tile, const uint8_t* right_low_tile, int lane) {
  Numbers sum, small, small_odd;
  sum.zero(), small.zero(), small_odd.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Left left, left_low;
    Right right, right_low;
    left.load_transposed(left_tile + part * kMatrixBytes, lane);
    right_low.load_transposed(right_low_tile + part * kMatrixBytes, lane);
    small.add_product(left, right_low);
    right.load_transposed(right_tile + part * kMatrixBytes, lane);
    sum.add_product(left, right);
    left_low.load_transposed(left_low_tile + part * kMatrixBytes, lane);
    small_odd.add_product(left_low, right);
  }
  small.add(small_odd);
  sum.add(small);
  return sum;
}

__device__ __forceinline__ void store_rows(float* to, const Numbers& x, int stride, int lane) {
#pragma unroll
  for (int n = 0; n < 8; n += 2)
    *reinterpret_cast<float2*>(to + Numbers::row(n, lane) * stride + Numbers::column(n, lane)) =
        make_float2(x[n], x[n + 1]);
}

// One warp: T = (1 - M_ab)^-1 by columns, one per lane; lanes 16..31 have the same again. Stores T^T and what rounding
// it lost. m_ab: M_ab^T, row-major.
__device__ __forceinline__ void solve(const float* m_ab, int lane, uint8_t* t, uint8_t* t_low) {
  const int column = lane % kChunk;
  float solution[kChunk];
#pragma unroll
  for (int row = 0; row < kChunk; ++row) solution[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
  for (int s = 0; s < kChunk - 1; ++s) {
#pragma unroll
    for (int row = (s + 1) / 4 * 4; row < kChunk; row += 4) {
      const float4 m = *reinterpret_cast<const float4*>(m_ab + s * kChunk + row);
      const float factors[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row + i > s) solution[row + i] = fmaf(factors[i], solution[s], solution[row + i]);
    }
  }
  uint8_t* const to = (lane < kChunk ? t : t_low) + column / 8 * 128 + column % 8 * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = solution[half * 8 + 2 * i], high = solution[half * 8 + 2 * i + 1];
      const uint32_t rounded = pack_bf16(low, high);
      words[i] = lane < kChunk ? rounded : pack_bf16(low - bf16_low(rounded), high - bf16_high(rounded));
    }
    *reinterpret_cast<uint4*>(to + half * 256) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Makes the operands of a chunk, by four warps. They have to meet between one stage and the next.
template <bool REVERSE>
struct Preparation {
  using To = Operands<REVERSE>;

  struct Shared {
    // As they come; but for the first, then R~^T, A~^T, B^^T, K^^T.
    alignas(16) uint8_t w[kTileBytes], r[kTileBytes], a[kTileBytes], b[kTileBytes], k[kTileBytes];
    uint8_t k_low[kTileBytes], t[kMatrixBytes], t_low[kMatrixBytes];  // what rounding K^ lost; T^T
    float m_ab[kChunk * kChunk];
  };

  Shared& shared;
  const int lane, warp, at;
  Resets resets;

  __device__ Preparation(Shared& shared_, int lane_, int warp_)
      : shared(shared_), lane(lane_), warp(warp_), at(warp_ * kMatrixBytes) {}

  // For the warp's key columns, which it alone has brought in.
  __device__ void factors(int valid, uint8_t* to) const {
    uint8_t* const r_low = shared.w;
    Left raw, rounded;
    raw.load_transposed(shared.w + at, lane);
    const Decays decays(raw, valid, lane);
    raw.load_transposed(shared.r + at, lane);
    const Numbers r = factor(raw, decays.upto);
    rounded = r.left();
    __syncwarp();
    store_blocks(shared.r + at, rounded.block, lane);
    store_blocks(r_low + at, r.remainder(rounded).block, lane);
    if (REVERSE) {
      const Numbers reached = first_tokens(r, resets, lane);
      const Right second = reached.right();
      second.hand_over(to + To::kSecond + at, lane);
      reached.remainder(second).hand_over(to + To::kSecondLow + at, lane);
    } else {
      first_columns(rounded, resets, lane).store(to + To::kRead + at, lane);
    }
    raw.load_transposed(shared.a + at, lane);
    rounded = factor(raw, decays.before(lane)).left();
    __syncwarp();
    store_blocks(shared.a + at, rounded.block, lane);
    const Numbers inverse = decays.inverse(), to_end = decays.to_end(inverse, resets, lane);
    raw.load_transposed(shared.b + at, lane);
    rounded = factor(raw, inverse).left();
    __syncwarp();
    store_blocks(shared.b + at, rounded.block, lane);
    if (REVERSE) factor(raw, to_end).left().store(to + To::kFirst + at, lane);
    else factor(raw, to_end).right().hand_over(to + To::kThird + at, lane);
    raw.load_transposed(shared.k + at, lane);
    const Numbers k = factor(raw, inverse);
    rounded = k.left();
    __syncwarp();
    store_blocks(shared.k + at, rounded.block, lane);
    store_blocks(shared.k_low + at, k.remainder(rounded).block, lane);
    if (!REVERSE) {
      const Numbers k_bar = factor(raw, to_end);
      const Right second = k_bar.right();
      second.hand_over(to + To::kSecond + at, lane);
      k_bar.remainder(second).hand_over(to + To::kSecondLow + at, lane);
    }
    if (lane % 4 == 0) {
      float* const decay = reinterpret_cast<float*>(to + To::kDecay) + lane / 8 * 16 + warp * 4 + lane / 4 % 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) decay[2 * i] = resets.bits == 0 ? decays.all[i] : 0.0f;
    }
  }

  // The four products of tokens, one per warp. M_ak^T stays in registers, with what rounding it lost.
  __device__ void products(uint8_t* to, uint8_t* pairs, Right& ak, Right& ak_low) const {
    const uint8_t* const r_low = shared.w;
    if (warp == 0) {
      Numbers sum = tile_product(shared.b, shared.a, lane);
      mask_pairs<true, true>(sum, resets, lane);
      store_rows(shared.m_ab, sum, kChunk, lane);
      __syncwarp();
      solve(shared.m_ab, lane, shared.t, shared.t_low);
    } else if (warp == 1) {
      Numbers sum = REVERSE ? tile_product(shared.b, shared.r, lane) : tile_product(shared.r, shared.b, lane);
      mask_pairs<false, REVERSE>(sum, resets, lane);
      const Operand<REVERSE> rb = sum.rounded<REVERSE>();
      rb.hand_over(to + (REVERSE ? To::kMatrix : To::kReadU), lane);
      if (REVERSE) rb.hand_over(pairs + Pairs::kRb, lane);
    } else if (warp == 2) {
      Numbers sum = REVERSE ? precise_product(shared.k, shared.k_low, shared.r, r_low, lane)
                            : precise_product(shared.r, r_low, shared.k, shared.k_low, lane);
      mask_pairs<false, REVERSE>(sum, resets, lane);
      sum.rounded<REVERSE>().hand_over(REVERSE ? pairs + Pairs::kRk : to + To::kReadV, lane);
    } else {
      Numbers sum = tile_product(shared.k, shared.a, lane);
      mask_pairs<true, true>(sum, resets, lane);
      ak = sum.right(), ak_low = sum.remainder(ak);
      if (REVERSE) ak.hand_over(pairs + Pairs::kAk, lane);
    }
  }

  // What follows from T: W and X.
  __device__ void solved(uint8_t* to, uint8_t* pairs, const Right& ak, const Right& ak_low) const {
    Numbers w;
    w.zero();
    Left left;
    Right right;
    if (REVERSE) {
      left.load(shared.a + at, lane);
      right.load_transposed(shared.t, lane);
      if (warp == 1) right.hand_over(pairs + Pairs::kT, lane);
      w.add_product(left, first_columns(right, resets, lane));
    } else {
      left.load_transposed(shared.t, lane);
      right.load(shared.a + at, lane);
      w.add_product(first_columns(left, resets, lane), right);
    }
    w.right().hand_over(to + (REVERSE ? To::kThird : To::kFirst) + at, lane);
    if (REVERSE && warp == 2) {
      right.load(shared.t, lane);
      right.hand_over(pairs + Pairs::kTTransposed, lane);
    }
    if (warp == 3) {
      Numbers x, small;
      x.zero(), small.zero();
      left.load_transposed(shared.t, lane);
      x.add_product(left, ak);
      small.add_product(left, ak_low);
      left.load_transposed(shared.t_low, lane);
      small.add_product(left, ak);
      x.add(small);
      x.right().hand_over(REVERSE ? pairs + Pairs::kX : to + To::kMatrix, lane);
    }
  }
};

template <bool REVERSE>
__global__ void __launch_bounds__(kChunkThreads, kPrepareBlocks) prepare_kernel(const Wkv7ChunkedArgs args) {
  using Shared = typename Preparation<REVERSE>::Shared;
  __shared__ alignas(16) uint8_t memory[sizeof(Shared)];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Preparation<REVERSE> preparation(shared, threadIdx.x % 32, threadIdx.x / 32);
  const Place place = place_of_block(args);
  fetch_tile(shared.w, args.w_raw, place);
  fetch_tile(shared.r, args.r, place);
  fetch_tile(shared.a, args.a, place);
  fetch_tile(shared.b, args.b, place);
  fetch_tile(shared.k, args.k, place);
  copy_async_commit();
  preparation.resets = place.resets(args, preparation.lane);
  const int64_t chunks = args.window_end - args.window_begin, batch_head = place.batch * args.heads + place.head;
  const int64_t local = batch_head * chunks + place.chunk - args.window_begin;
  uint8_t* const to = args.operands + local * Operands<REVERSE>::kBytes;
  uint8_t* const pairs = args.pairs + local * Pairs::kBytes;
  copy_async_wait<0>();
  __syncwarp();
  preparation.factors(place.valid, to);
  __syncthreads();
  Right ak, ak_low;
  preparation.products(to, pairs, ak, ak_low);
  __syncthreads();
  preparation.solved(to, pairs, ak, ak_low);
}

// A block of `scan` has WARPS warps that carry the state and as many that do the rest for them: bring in operands,
// write the states, and make y one chunk later. All meet once per chunk. With all four warps of a head in one block,
// two groups of four more warps make the operands in turn, which then never leave the processor: each spends two
// chunks' time on one.
template <bool REVERSE, int WARPS>
struct Scan {
  static constexpr bool kPrepares = WARPS == 4;
  static constexpr int kGroups = 2;
  static constexpr int kHelpers = WARPS * 32, kSplits = 4 / WARPS;
  static constexpr int kPreparersAt = 2 * kHelpers, kThreads = kPreparersAt + (kPrepares ? kGroups * kChunkThreads : 0);
  static constexpr int kRowsAt = Operands<REVERSE>::kBytes;
  static constexpr int kStageBytes = kRowsAt + WARPS * kMatrixBytes;  // operands, then 16 tokens of this block's values
  static constexpr int kHandBytes = kTileBytes + kMatrixBytes;        // of a warp and chunk: rounded state, u
  static constexpr int kStages = kPrepares ? 3 : REVERSE ? (WARPS == 1 ? 9 : 8) : (WARPS == 1 ? 7 : 6);
  static constexpr int kHandAt = kStages * kStageBytes;
  static constexpr int kPreparationAt = kHandAt + 2 * WARPS * kHandBytes;
  static constexpr int kPreparationBytes = sizeof(typename Preparation<REVERSE>::Shared);
  static constexpr int kSharedBytes = kPreparationAt + (kPrepares ? kGroups * kPreparationBytes : 0);
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
  Numbers state[C::kParts];
  {
    const float* from = REVERSE ? args.dstate_in : args.state;
    const int64_t at = (place.batch_head * kSize + place.value_block * 16) * kSize;
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (from != nullptr)
          pair = *reinterpret_cast<const float2*>(from + at + Numbers::row(n, lane) * kSize + part * 16 +
                                                  Numbers::column(n, lane));
        state[part][n] = pair.x, state[part][n + 1] = pair.y;
      }
    }
  }

  Right first[C::kParts];  // of the next chunk, loaded ahead, as are its values and matrix
  Left values;
  Numbers u;
  const auto load_first = [&](const uint8_t* at) {
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      if (REVERSE) first[part].load_transposed(at + From::kFirst + part * kMatrixBytes, lane);
      else first[part].take_over(at + From::kFirst + part * kMatrixBytes, lane);
    }
  };
  const auto load_values = [&](const uint8_t* at) {
    Right matrix;
    values.load_transposed(at + C::kRowsAt + warp * kMatrixBytes, lane);
    matrix.take_over(at + From::kMatrix, lane);
    u.zero();
    u.add_product(values, matrix);
  };
  __syncthreads();
  if (C::kPrepares) __syncthreads();
  else load_first(shared), load_values(shared);

  int stage = 0;
  for (int step = 0; step < place.chunks; ++step) {
    const uint8_t* const at = shared + stage * C::kStageBytes;
    stage = stage + 1 < C::kStages ? stage + 1 : 0;
    const uint8_t* const next = shared + stage * C::kStageBytes;
    uint8_t* const hand = shared + C::kHandAt + (step % 2 * WARPS + warp) * C::kHandBytes;
    if (C::kPrepares) load_first(at), load_values(at);

    Left rounded[C::kParts];
    Numbers u_half;
    u_half.zero();
    rounded[0] = state[0].left();
    u.add_product(rounded[0], first[0]);
    rounded[1] = state[1].left();
    u_half.add_product(rounded[1], first[1]);
    rounded[2] = state[2].left();
    u.add_product(rounded[2], first[2]);
    rounded[3] = state[3].left();
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
      Right second;
      second.take_over(at + From::kSecondLow + part * kMatrixBytes, lane);
      state[part].add_product(values, second);
      second.take_over(at + From::kSecond + part * kMatrixBytes, lane);
      state[part].add_product(values, second);
    }

    u.add(u_half);
    const Left u_rounded = u.left();
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      Right third;
      third.take_over(at + From::kThird + part * kMatrixBytes, lane);
      state[part].add_product(u_rounded, third);
    }
    if (!REVERSE) u_rounded.hand_over(hand + kTileBytes, lane);
    if (!C::kPrepares) load_first(next), load_values(next);  // after the last chunk: of an old one, unused
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
    any = args.r;
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
      for (int i = 0; i < (C::kPrepares ? 0 : From::kBytes); i += C::kHelpers * 16) {
        const bool all = i + C::kHelpers * 16 <= From::kBytes;
        if (all || i + static_cast<int>(threadIdx.x % C::kHelpers) * 16 < From::kBytes)
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
  Left read[C::kParts], read_u, read_v;  // of the chunk whose y is next
  Right values;
  copy_async_wait<C::kStages - 2>();
  __syncthreads();
  if (C::kPrepares) __syncthreads();

  // At `step` the state goes through chunk `step`; the one before is written, and its stage is free.
  int stage = 0;
  for (int step = 0;; ++step) {
    if (step > 0) {
      fetcher.next();
      const uint8_t* const hand = shared + C::kHandAt + ((step - 1) % 2 * WARPS + warp) * C::kHandBytes;
      const int64_t local = place.local_chunk(step - 1);
      Numbers y;
      y.zero();
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        Left rounded;
        rounded.take_over(hand + part * kMatrixBytes, lane);
        if (save) rounded.store(saved + local * kStateBytes + part * kMatrixBytes, lane);
        if (!REVERSE) y.add_product(read[part], rounded.other());
      }
      if (!REVERSE) {
        Left u;
        u.take_over(hand + kTileBytes, lane);
        y.add_product(read_v, values);
        y.add_product(read_u, u.other());
        const Left y_rounded = y.left();
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
      for (int part = 0; part < C::kParts; ++part) read[part].load_transposed(at + From::kRead + part * kMatrixBytes, lane);
      read_u.take_over(at + From::kReadU, lane);
      read_v.take_over(at + From::kReadV, lane);
      values.load_transposed(at + C::kRowsAt + warp * kMatrixBytes, lane);
    }
    stage = stage + 1 < C::kStages ? stage + 1 : 0;
    copy_async_wait<C::kStages - (C::kPrepares ? 2 : 3)>();  // the next chunk is there, or the one after it
    __syncthreads();
  }
}

// A chunk's r, w_raw, k, a, b and resets on their way to shared memory: a thread's 16 bytes of each.
struct RawChunk {
  uint4 w, r, a, b, k;
  bool reset;

  __device__ void load(const Wkv7ChunkedArgs& args, const Place& place, int thread) {
    const int token = thread % kChunk, lane = thread % 32;
    const int64_t from = place.offset + token * place.stride + thread / kChunk * 8;
    const bool valid = token < place.valid;
    const auto vector = [&](const __nv_bfloat16* of) {
      return valid ? *reinterpret_cast<const uint4*>(of + from) : make_uint4(0, 0, 0, 0);
    };
    w = vector(args.w_raw), r = vector(args.r), a = vector(args.a), b = vector(args.b), k = vector(args.k);
    reset = args.reset != nullptr && lane < place.valid &&
            args.reset[place.batch * args.tokens + place.chunk * kChunk + lane] != 0;
  }
  template <typename SHARED>
  __device__ void store(SHARED& to, int thread) const {
    const int at = thread * 16;
    *reinterpret_cast<uint4*>(to.w + at) = w, *reinterpret_cast<uint4*>(to.r + at) = r;
    *reinterpret_cast<uint4*>(to.a + at) = a, *reinterpret_cast<uint4*>(to.b + at) = b;
    *reinterpret_cast<uint4*>(to.k + at) = k;
  }
};

// A group of four warps makes the operands of every second chunk: the factors two steps before the state goes through
// it, the rest one step before.
template <bool REVERSE>
__device__ __forceinline__ void prepare_ahead(const Wkv7ChunkedArgs& args, uint8_t* shared) {
  using C = Scan<REVERSE, 4>;
  using Shared = typename Preparation<REVERSE>::Shared;
  const int thread = threadIdx.x % kChunkThreads, group = (threadIdx.x - C::kPreparersAt) / kChunkThreads;
  const ScanPlace<REVERSE, 4> head(args, 0);
  Shared& own = *reinterpret_cast<Shared*>(shared + C::kPreparationAt + group * C::kPreparationBytes);
  Preparation<REVERSE> preparation(own, thread % 32, thread / 32);
  const auto place_of = [&](int chunk) {
    return Place(args, head.batch, head.head, args.window_begin + head.local_chunk(chunk));
  };
  RawChunk raw;
  if (group < head.chunks) raw.load(args, place_of(group), thread);
  int stage = group;  // of the chunk in work
  if (group == 1) __syncthreads();
  for (int chunk = group; chunk < head.chunks + 2; chunk += C::kGroups) {
    uint8_t* const to = shared + stage * C::kStageBytes;
    const bool exists = chunk < head.chunks;
    if (exists) {
      raw.store(own, thread);
      preparation.resets.bits = __ballot_sync(kAllLanes, raw.reset);
      const int valid = place_of(chunk).valid;
      if (chunk + C::kGroups < head.chunks) raw.load(args, place_of(chunk + C::kGroups), thread);
      __syncwarp();
      preparation.factors(valid, to);
    }
    __syncthreads();
    if (chunk == head.chunks + 1) break;
    if (exists) {
      uint8_t* const pairs = args.pairs + (head.batch_head * head.chunks + head.local_chunk(chunk)) * Pairs::kBytes;
      Right ak, ak_low;
      preparation.products(to, pairs, ak, ak_low);
      barrier(1 + group, kChunkThreads);
      preparation.solved(to, pairs, ak, ak_low);
    }
    __syncthreads();
    stage = (stage + C::kGroups) % C::kStages;
  }
}

template <bool REVERSE, int WARPS>
__global__ void __launch_bounds__(Scan<REVERSE, WARPS>::kThreads, 1) scan_kernel(const Wkv7ChunkedArgs args) {
  extern __shared__ float4 shared_memory[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(shared_memory);
  const int thread = threadIdx.x;
  if (thread < WARPS * 32) carry_state<REVERSE, WARPS>(args, shared);
  else if (!Scan<REVERSE, WARPS>::kPrepares || thread < 2 * WARPS * 32) help_state<REVERSE, WARPS>(args, shared);
  else prepare_ahead<REVERSE>(args, shared);
}

// Shared memory of a block of `gradients_kernel`.
struct GradientsShared {
  alignas(16) uint8_t state[kStateBytes], d[kStateBytes];                        // S_0, D_1
  uint8_t r[kTileBytes], a[kTileBytes], b_hat[kTileBytes], k_hat[kTileBytes];    // (R~, A~ without masks, B^, K^)^T
  uint8_t b_bar[kTileBytes], k_bar[kTileBytes], v[kTileBytes], dy[kTileBytes];   // B-^T, K-^T
  uint8_t w_raw[kTileBytes];
  uint8_t u[kTileBytes], dz[kTileBytes];  // transposed: four matrices of 16 values x 16 tokens
  uint8_t out[4][kMatrixBytes];           // per warp: results on their way to 16 bytes per thread
  union {
    uint8_t pairs[Pairs::kBytes];
    struct {  // and what rounding lost
      uint8_t dm_ab[2][kMatrixBytes], dm_ak[2][kMatrixBytes], dm_rb[2][kMatrixBytes], dm_rk[2][kMatrixBytes];
    };
  };
};

// Writes the results for 16 tokens (columns) and this warp's 16 keys or values. All lanes of the warp call it.
__device__ __forceinline__ void write_rows(__nv_bfloat16* to, const Place& place, const Numbers& x, uint8_t* scratch) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % kChunk;
  store_blocks_transposed(scratch, x.left().block, lane);
  __syncwarp();
  if (token < place.valid)
    *reinterpret_cast<uint4*>(to + place.offset + token * place.stride + threadIdx.x / kChunk * 8) =
        *reinterpret_cast<const uint4*>(scratch + lane * 16);
  __syncwarp();
}

// Values of this warp: dU, dZ, U, which stay in shared memory, and dV, which is written. Rows are values.
__device__ __forceinline__ void value_gradients(const Wkv7ChunkedArgs& args, GradientsShared& shared,
                                                const Place& place, const Resets& resets) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = warp * kMatrixBytes;
  Left left;
  Right right;
  Numbers du, du_state, z, dv;
  du.zero(), du_state.zero(), z.zero(), dv.zero();
  left.load_transposed(shared.dy + at, lane);
  right.take_over(shared.pairs + Pairs::kRb, lane);
  du.add_product(left, right);
  right.take_over(shared.pairs + Pairs::kRk, lane);
  dv.add_product(left, right);
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Left d;
    d.load(shared.d + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load_transposed(shared.b_bar + part * kMatrixBytes, lane);
    du_state.add_product(d, right);
    right.load_transposed(shared.k_bar + part * kMatrixBytes, lane);
    dv.add_product(d, right);
    left.load(shared.state + warp * kTileBytes + part * kMatrixBytes, lane);
    right.load_transposed(shared.a + part * kMatrixBytes, lane);
    z.add_product(left, right);
  }
  du.add(du_state);

  Numbers dz, u;
  dz.zero(), u.zero();
  right.take_over(shared.pairs + Pairs::kTTransposed, lane);
  dz.add_product(du.left(), right);
  const Left dz_rounded = dz.left();
  store_blocks(shared.dz + at, dz_rounded.block, lane);
  right.take_over(shared.pairs + Pairs::kAk, lane);
  dv.add_product(dz_rounded, right);

  left.load_transposed(shared.v + at, lane);
  right.take_over(shared.pairs + Pairs::kX, lane);
  u.add_product(left, right);
  right.take_over(shared.pairs + Pairs::kT, lane);
  u.add_product(first_columns(z.left(), resets, lane), right);
  store_blocks(shared.u + at, u.left().block, lane);
  write_rows(args.dv, place, dv, shared.out[warp]);
}

// Gradients of the products of tokens; each warp makes one of the four.
__device__ __forceinline__ void pair_gradients(GradientsShared& shared, const Resets& resets) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool of_dz = warp < 2, of_u = warp % 2 == 0;
  Numbers sum, odd;
  sum.zero(), odd.zero();
#pragma unroll
  for (int part = 0; part < kSize / 16; ++part) {
    Left left;
    Right right;
    if (of_dz) left.load_transposed(shared.dz + part * kMatrixBytes, lane);
    else left.load(shared.dy + part * kMatrixBytes, lane);
    if (of_u) right.load_transposed(shared.u + part * kMatrixBytes, lane);
    else right.load(shared.v + part * kMatrixBytes, lane);
    (part % 2 ? odd : sum).add_product(left, right);
  }
  sum.add(odd);
  if (of_dz) mask_pairs<true, false>(sum, resets, lane);
  else mask_pairs<false, false>(sum, resets, lane);
  uint8_t(&to)[2][kMatrixBytes] = of_dz ? (of_u ? shared.dm_ab : shared.dm_ak) : (of_u ? shared.dm_rb : shared.dm_rk);
  const Left rounded = sum.left();
  store_blocks(to[0], rounded.block, lane);
  store_blocks(to[1], sum.remainder(rounded).block, lane);
}

// The gradients of r, w_raw, k, a, b for a warp's 16 key columns. Rows are keys.
struct KeyGradients {
  const Wkv7ChunkedArgs& args;
  GradientsShared& shared;
  const Place& place;
  const Resets resets;
  const int thread, lane, warp, at;
  Numbers sum;       // of dl: terms of a token, to be summed over the earlier ones
  float through[2];  // of the lane's keys: what S_0 contributes to all dl that it reaches

  __device__ KeyGradients(const Wkv7ChunkedArgs& args_, GradientsShared& shared_, const Place& place_,
                          const Resets& resets_)
      : args(args_), shared(shared_), place(place_), resets(resets_), thread(thread_again()), lane(thread % 32),
        warp(thread / 32), at(thread / 32 * kMatrixBytes) {}

  // x += (tile's rows of this warp) pairs, or times their transpose.
  template <bool TRANSPOSED>
  __device__ void add_pairs(Numbers& x, const uint8_t (&pairs)[2][kMatrixBytes], const uint8_t* tile) {
    Left left;
    left.load(tile + at, lane);
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      Right right;
      if (TRANSPOSED) right.load_transposed(pairs[i], lane);
      else right.load(pairs[i], lane);
      x.add_product(left, right);
    }
  }

  // One of b and k: `x` is what D_1 contributes.
  __device__ void finish_b_or_k(const Decays& decays, Numbers x, const Numbers& pairs, const uint8_t* hat,
                                const uint8_t* bar, __nv_bfloat16* to) {
    Left factor, factor_bar;
    factor.load(hat + at, lane);
    factor_bar.load(bar + at, lane);
    x = last_tokens(x, resets, lane);
    Numbers result;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      sum[n] -= factor.element(n) * pairs[n] + factor_bar.element(n) * x[n];
      result[n] = reciprocal_fast(decays.upto[n]) * (pairs[n] + decays.all[n / 2 % 2] * x[n]);
    }
    write_rows(to, place, result, shared.out[warp]);
  }

  __device__ void of_b_and_k(const Decays& decays) {
    Numbers b, k, both, pairs;  // from D_1: gradients of B- and K-; S_0^T D_1, whose diagonal is colsum(S_0 * D_1)
    b.zero(), k.zero(), both.zero();
#pragma unroll
    for (int part = 0; part < kSize / 16; ++part) {
      Left d, state;
      Right right;
      d.load_transposed(shared.d + part * kTileBytes + at, lane);
      right.load_transposed(shared.u + part * kMatrixBytes, lane);
      b.add_product(d, right);
      right.load(shared.v + part * kMatrixBytes, lane);
      k.add_product(d, right);
      state.load_transposed(shared.state + part * kTileBytes + at, lane);
      both.add_product(state, d.other());
    }
    const int own = (lane & ~3) | lane / 8;  // the lane that has the diagonal's element of this lane's keys
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float element = lane / 4 % 2 ? both.x[i][2 * i + 1] : both.x[i][2 * i];
      through[i] = resets.bits == 0 ? decays.all[i] * __shfl_sync(kAllLanes, element, own) : 0.0f;
    }
    sum.zero(), pairs.zero();
    add_pairs<true>(pairs, shared.dm_ab, shared.a);
    add_pairs<true>(pairs, shared.dm_rb, shared.r);
    finish_b_or_k(decays, b, pairs, shared.b_hat, shared.b_bar, args.db);
    pairs.zero();
    add_pairs<true>(pairs, shared.dm_ak, shared.a);
    add_pairs<true>(pairs, shared.dm_rk, shared.r);
    finish_b_or_k(decays, k, pairs, shared.k_hat, shared.k_bar, args.dk);
  }

  // One of r and a: `x` is what S_0 contributes, and then the sum with what tokens do. Returns its product with `tile`.
  template <bool OF_R>
  __device__ Numbers finish_r_or_a(Numbers& x, const Numbers& scale, const uint8_t* tile, __nv_bfloat16* to) {
    Left factor;
    factor.load(tile + at, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) through[n / 2 % 2] += factor.element(n) * x[n];
    add_pairs<false>(x, OF_R ? shared.dm_rb : shared.dm_ab, shared.b_hat);
    add_pairs<false>(x, OF_R ? shared.dm_rk : shared.dm_ak, shared.k_hat);
    Numbers result, product;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      result[n] = scale[n] * x[n];
      product[n] = factor.element(n) * x[n];
    }
    write_rows(to, place, result, shared.out[warp]);
    return product;
  }

  __device__ void of_r_and_a_and_w(const Decays& decays) {
    Numbers r, a;  // from S_0: gradients of R~ and A~
    r.zero(), a.zero();
#pragma unroll 2
    for (int part = 0; part < kSize / 16; ++part) {
      Left state;
      Right right;
      state.load_transposed(shared.state + part * kTileBytes + at, lane);
      right.load(shared.dy + part * kMatrixBytes, lane);
      r.add_product(state, right);
      right.load_transposed(shared.dz + part * kMatrixBytes, lane);
      a.add_product(state, right);
    }
    r = first_tokens(r, resets, lane), a = first_tokens(a, resets, lane);
    if (lane % 4 != 0) through[0] = through[1] = 0.0f;  // once in the sum over lanes
    sum.add(finish_r_or_a<true>(r, decays.upto, shared.r, args.dr));
    const Numbers own = sum;
    sum.add(finish_r_or_a<false>(a, decays.before(lane), shared.a, args.da));
    int start[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) start[i] = resets.segment_start(i / 2 * 8 + lane % 4 * 2 + i % 2);
    sum.sum_tokens(start, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      through[i] += __shfl_xor_sync(kAllLanes, through[i], 1);
      through[i] += __shfl_xor_sync(kAllLanes, through[i], 2);
    }
    Numbers reached;
#pragma unroll
    for (int n = 0; n < 8; ++n) reached[n] = through[n / 2 % 2];
    reached = first_tokens(reached, resets, lane);
    Left w_raw;
    w_raw.load_transposed(shared.w_raw + at, lane);
    Numbers result;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float dl = reached[n] + (own[n] - sum[n]);
      const float power = exp2_fast(fminf(-kLog2E * w_raw.element(n), 60.0f)), sigmoid = reciprocal_fast(1.0f + power);
      result[n] = -kLogDecayScale * (sigmoid * (sigmoid * power)) * dl;
    }
    write_rows(args.dw_raw, place, result, shared.out[warp]);
  }
};

__global__ void __launch_bounds__(kChunkThreads, kGradientsBlocks) gradients_kernel(const Wkv7ChunkedArgs args) {
  extern __shared__ float4 shared_memory[];
  GradientsShared& shared = *reinterpret_cast<GradientsShared*>(shared_memory);
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
    const uint8_t* pairs = args.pairs + local * Pairs::kBytes + threadIdx.x * 16;
    fetch_tile(shared.v, args.v, place);
    fetch_tile(shared.dy, args.dy, place);
#pragma unroll
    for (int i = 0; i < kStateBytes; i += kChunkThreads * 16) {
      copy_async(shared.d + threadIdx.x * 16 + i, d + i, true);
      copy_async(shared.state + threadIdx.x * 16 + i, state + i, true);
    }
    copy_async(shared.pairs + threadIdx.x * 16, pairs, true);
    if (warp < 2) copy_async(shared.pairs + kTileBytes + threadIdx.x * 16, pairs + kTileBytes, true);
  }
  copy_async_commit();
  const Resets resets = place.resets(args, lane);
  copy_async_wait<1>();
  __syncwarp();  // a warp brings in its own columns

  Left w_raw;
  w_raw.load_transposed(shared.w_raw + at, lane);
  const Decays decays(w_raw, place.valid, lane);
  {
    Left r, a, b, k;
    r.load_transposed(shared.r + at, lane), a.load_transposed(shared.a + at, lane);
    b.load_transposed(shared.b_hat + at, lane), k.load_transposed(shared.k_hat + at, lane);
    __syncwarp();
    store_blocks(shared.r + at, factor(r, decays.upto).left().block, lane);
    store_blocks(shared.a + at, factor(a, decays.before(lane)).left().block, lane);
    const Numbers inverse = decays.inverse(), to_end = decays.to_end(inverse, resets, lane);
    store_blocks(shared.b_hat + at, factor(b, inverse).left().block, lane);
    store_blocks(shared.b_bar + at, factor(b, to_end).left().block, lane);
    store_blocks(shared.k_hat + at, factor(k, inverse).left().block, lane);
    store_blocks(shared.k_bar + at, factor(k, to_end).left().block, lane);
  }
  copy_async_wait<0>();
  __syncthreads();
  value_gradients(args, shared, place, resets.again());
  __syncthreads();
  pair_gradients(shared, resets.again());
  __syncthreads();
  KeyGradients gradients(args, shared, place, resets.again());
  gradients.of_b_and_k(decays);
  gradients.of_r_and_a_and_w(decays);
}

}  // namespace wkv7
