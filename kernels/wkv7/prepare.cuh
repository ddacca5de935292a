// WKV-7 on tensor cores: the operands of a chunk, from its tokens alone (see chunked.cuh).
#pragma once

#include "chunked.cuh"

namespace wkv7 {

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

}  // namespace wkv7
