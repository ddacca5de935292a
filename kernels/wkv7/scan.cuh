// WKV-7 on tensor cores: the walk along a head, forwards with the state, backwards with its gradient (see chunked.cuh).
#pragma once

#include "prepare.cuh"

namespace wkv7 {

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
      uint8_t* const hand = shared + C::kHandAt + ((step - 1) % 2 * WARPS + warp) * C::kHandBytes;
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
        const Place chunk(args, place.batch, place.head, args.window_begin + local);
        const int token = lane % kChunk;
        __syncwarp();
        store_blocks(hand, y.left().block, lane);  // for 16 bytes per lane
        __syncwarp();
        if (token < chunk.valid)
          *reinterpret_cast<uint4*>(args.y + chunk.offset + token * chunk.stride + place.value_block * 16 +
                                    lane / kChunk * 8) = *reinterpret_cast<const uint4*>(hand + lane * 16);
      }
    }
    if (step == place.chunks) break;
    if (!REVERSE) {
      const uint8_t* const at = shared + stage * C::kStageBytes;
#pragma unroll
      for (int part = 0; part < C::kParts; ++part)
        read[part].load_transposed(at + From::kRead + part * kMatrixBytes, lane);
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

}  // namespace wkv7
