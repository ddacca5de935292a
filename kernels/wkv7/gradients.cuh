// WKV-7 on tensor cores: what is left of the backward pass when the states and their gradients are known (see
// chunked.cuh).
#pragma once

#include "prepare.cuh"

namespace wkv7 {

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

  // This warp's rows of a tile.
  __device__ Left rows(const uint8_t* tile) const {
    Left left;
    left.load(tile + at, lane);
    return left;
  }

  // x += left pairs, or times their transpose.
  template <bool TRANSPOSED>
  __device__ void add_pairs(Numbers& x, const uint8_t (&pairs)[2][kMatrixBytes], const Left& left) const {
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
    const Left factor = rows(hat), factor_bar = rows(bar);
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
    const Left a_rows = rows(shared.a), r_rows = rows(shared.r);
    sum.zero(), pairs.zero();
    add_pairs<true>(pairs, shared.dm_ab, a_rows);
    add_pairs<true>(pairs, shared.dm_rb, r_rows);
    finish_b_or_k(decays, b, pairs, shared.b_hat, shared.b_bar, args.db);
    pairs.zero();
    add_pairs<true>(pairs, shared.dm_ak, a_rows);
    add_pairs<true>(pairs, shared.dm_rk, r_rows);
    finish_b_or_k(decays, k, pairs, shared.k_hat, shared.k_bar, args.dk);
  }

  // One of r and a: `x` is what S_0 contributes, and then the sum with what tokens do. Returns its product with `tile`.
  template <bool OF_R>
  __device__ Numbers finish_r_or_a(Numbers& x, const Numbers& scale, const uint8_t* tile, const Left& b_rows,
                                   const Left& k_rows, __nv_bfloat16* to) {
    const Left factor = rows(tile);
#pragma unroll
    for (int n = 0; n < 8; ++n) through[n / 2 % 2] += factor.element(n) * x[n];
    add_pairs<false>(x, OF_R ? shared.dm_rb : shared.dm_ab, b_rows);
    add_pairs<false>(x, OF_R ? shared.dm_rk : shared.dm_ak, k_rows);
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
    const Left b_rows = rows(shared.b_hat), k_rows = rows(shared.k_hat);
    sum.add(finish_r_or_a<true>(r, decays.upto, shared.r, b_rows, k_rows, args.dr));
    const Numbers own = sum;
    sum.add(finish_r_or_a<false>(a, decays.before(lane), shared.a, b_rows, k_rows, args.da));
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
