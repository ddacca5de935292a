// WKV-7 in float32, one token after the other. Per head, with the state S [value i, key j]:
//
//   u_t = S_{t-1} a_t        S_t = S_{t-1} diag(w_t) + u_t b_t^T + v_t k_t^T        y_t = S_t r_t
//   w_t = exp(-exp(-1/2) * sigmoid(w_raw_t));  reset_t zeroes S before token t
//
// Forward: row i of S needs only row i of v, so four threads own one row and no row talks to another.
//
// Backward, with D_t the gradient of S_t, in two kernels and without undoing the decay by a division:
//   chain:   rows of D, last token first. It needs no state: du_t = D_t b_t, dv_t = D_t k_t. Writes du and the D
//            that enters each window of 16 tokens from its future.
//   windows: every window at once. Rows of S from the window's saved start give u; columns of S give
//            da_t = S_{t-1}^T du_t and dr_t = S_t^T dy_t; columns of D give dk_t = D_t^T v_t and db_t = D_t^T u_t.
//            The log-decay's gradient dl needs S and D of the same token together, except through
//              m_t = sum_i S_t[i] Dfuture_t[i],   dl_t = m_{t-1} - a da,   m_t = dl_t - r dr + b db + k dk
//            (multiply the recurrence by D and sum over i). m is summed anew at the start of each window, so that a
//            large value of v leaves no rounding errors in the tokens before it.
// So no sum crosses threads of different rows or columns other than by shuffles within four lanes: results are the
// same bits whatever the batch, the split of rows over blocks, or the run.
//
// The decay is applied as S + S * (w - 1): with w close to 1, rounding w itself would be a systematic error that
// grows with the number of tokens.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

// Pointers are to contiguous device arrays, 16-byte aligned. [B,T,H,N] in the dtype of the call unless said otherwise.
struct Wkv7Args {
  const void *r, *w_raw, *k, *v, *a, *b;
  const uint8_t* reset;       // [B,T], or null: no resets
  const float* state;         // [B,H,N,N]                                    forward
  void* y;                    //                                              forward
  float* state_out;           // [B,H,N,N]                                    forward
  float* starts;              // [B,H,ceil(T/16),N,N], forward: or null; state before each window and its resets
  const void* dy;             // or null: zero                                backward
  const float* dstate_in;     // [B,H,N,N] gradient of the state after window_end, or null: zero; may be dstate
  void *dr, *dw_raw, *dk, *dv, *da, *db;
  float* dstate;              // [B,H,N,N] gradient of the state before window_begin
  float* workspace_du;        // [B,H,window_end-window_begin,16,N]
  float* workspace_d;         // [B,H,window_end-window_begin,N,N]
  int64_t batch, tokens, heads;
  int64_t window_begin, window_end;  // backward: the windows this call goes through
};

namespace wkv7 {

constexpr int kWindow = 16;       // tokens between two saved states
constexpr int kLanes = 4;         // threads that share one row or column of a state
constexpr int kPad = 8;           // floats between rows of a shared tile whose columns are accessed by token
constexpr float kDecayScale = 0.60653065971263342f;  // exp(-1/2)

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float decay_minus_one(float w_raw) { return expm1f(-kDecayScale * sigmoid(w_raw)); }
// d log(w) / d w_raw. sigmoid(-x) and not 1 - sigmoid(x), which has no digits left for large x.
__device__ inline float log_decay_slope(float w_raw) { return -kDecayScale * sigmoid(w_raw) * sigmoid(-w_raw); }

__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

__device__ inline void unpack(const uint4& raw, float (&x)[4]) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
  x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}
__device__ inline void unpack(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ inline uint32_t pack(float x) { return __float_as_uint(x); }
__device__ inline uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
         (static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16);
}
__device__ inline uint4 pack(const float (&x)[4]) { return make_uint4(pack(x[0]), pack(x[1]), pack(x[2]), pack(x[3])); }
__device__ inline uint4 pack(const float (&x)[8]) {
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// The sum over the four lanes, the same bits in each of them.
__device__ inline float sum_lanes(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Four sums over the four lanes at once: lane q gets the sum of x[q].
__device__ inline float sum_lanes_transposed(const float (&x)[4], int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const float even_half = (high ? x[2] : x[0]) + __shfl_xor_sync(0xffffffffu, high ? x[0] : x[2], 2);
  const float odd_half = (high ? x[3] : x[1]) + __shfl_xor_sync(0xffffffffu, high ? x[1] : x[3], 2);
  return (odd ? odd_half : even_half) + __shfl_xor_sync(0xffffffffu, odd ? even_half : odd_half, 1);
}

// A lane's quarter of a vector of N: elements 16c + 4*lane + (0..3), so that four lanes read 64 bytes in a row.
template <int N>
struct Slice {
  static constexpr int kSize = N / kLanes;
  float x[kSize];

  __device__ static int index(int i, int lane) { return (i / 4) * 16 + lane * 4 + i % 4; }
  __device__ void zero() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = 0.0f;
  }
  __device__ void load(const float* vector, int lane) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(vector + index(i, lane));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
  __device__ void load_strided(const float* vector, int stride, int lane) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = vector[index(i, lane) * stride];
  }
  __device__ void save(float* vector, int lane) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 4)
      *reinterpret_cast<float4*>(vector + index(i, lane)) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
  // This lane's part of the dot product.
  __device__ float dot(const Slice& other) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i % 4] = fmaf(x[i], other.x[i], sum[i % 4]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  __device__ void add(float scale, const Slice& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = fmaf(scale, other.x[i], x[i]);
  }
  __device__ void decay(const Slice& minus_one) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = fmaf(x[i], minus_one.x[i], x[i]);
  }
  __device__ void decay(float minus_one) { add(minus_one, *this); }
};

// A window of kWindow x WIDTH input values on its way from global memory through registers to shared memory.
template <int WIDTH, int THREADS, typename IO>
struct Tile {
  static constexpr int kVector = 16 / sizeof(IO);
  static constexpr int kPerToken = WIDTH / kVector;
  static constexpr int kCount = kWindow * kPerToken;
  static constexpr int kPerThread = (kCount + THREADS - 1) / THREADS;
  uint4 raw[kPerThread];

  // Tokens from `valid` on become zero, all of them if `from` is null.
  __device__ void fetch(const IO* from, int64_t token_stride, int valid) {
#pragma unroll
    for (int m = 0; m < kPerThread; ++m) {
      const int index = threadIdx.x + m * THREADS, token = index / kPerToken;
      raw[m] = make_uint4(0, 0, 0, 0);
      if (from != nullptr && index < kCount && token < valid)
        raw[m] = *reinterpret_cast<const uint4*>(from + token * token_stride + index % kPerToken * kVector);
    }
  }
  template <typename Map>
  __device__ void put(float* tile, int row_stride, Map map) const {
#pragma unroll
    for (int m = 0; m < kPerThread; ++m) {
      const int index = threadIdx.x + m * THREADS, token = index / kPerToken;
      if (index >= kCount) continue;
      float x[kVector];
      unpack(raw[m], x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] = map(x[i], token);
      float* to = tile + token * row_stride + index % kPerToken * kVector;
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
  __device__ void put(float* tile, int row_stride) const {
    put(tile, row_stride, [](float x, int) { return x; });
  }
};

// One window in shared memory: five vectors over keys, one over the ROWS values of this block. `w` holds decay - 1.
template <int N, int ROWS, int PAD>
struct SharedWindow {
  static constexpr int kKeyStride = N + PAD, kRowStride = ROWS + PAD;
  static constexpr int kFloats = kWindow * (5 * kKeyStride + kRowStride);
  float *r, *w, *k, *a, *b, *rows;

  __device__ explicit SharedWindow(float* memory)
      : r(memory), w(r + kWindow * kKeyStride), k(w + kWindow * kKeyStride), a(k + kWindow * kKeyStride),
        b(a + kWindow * kKeyStride), rows(b + kWindow * kKeyStride) {}
};

// The same window while it is being fetched, and its resets as a bit mask.
template <int N, int ROWS, int THREADS, typename IO>
struct Prefetch {
  Tile<N, THREADS, IO> r, w, k, a, b;
  Tile<ROWS, THREADS, IO> rows;
  int valid;
  bool reset;

  // `of_rows`: v or dy, already at the first of this block's ROWS values.
  __device__ void fetch(const Wkv7Args& args, const void* of_rows, int64_t batch, int64_t head, int first_row,
                        int64_t window) {
    const int64_t begin = window * kWindow, stride = args.heads * N;
    const int64_t offset = (batch * args.tokens + begin) * stride + head * N;
    const int64_t left = args.tokens - begin;
    valid = left < kWindow ? static_cast<int>(left) : kWindow;
    r.fetch(static_cast<const IO*>(args.r) + offset, stride, valid);
    w.fetch(static_cast<const IO*>(args.w_raw) + offset, stride, valid);
    k.fetch(static_cast<const IO*>(args.k) + offset, stride, valid);
    a.fetch(static_cast<const IO*>(args.a) + offset, stride, valid);
    b.fetch(static_cast<const IO*>(args.b) + offset, stride, valid);
    rows.fetch(of_rows == nullptr ? nullptr : static_cast<const IO*>(of_rows) + offset + first_row, stride, valid);
    const int token = threadIdx.x;
    reset = args.reset != nullptr && token < valid && args.reset[batch * args.tokens + begin + token] != 0;
  }
  // Tokens past the end of the row leave the state as it is: no decay, zero vectors.
  template <int PAD>
  __device__ void put(const SharedWindow<N, ROWS, PAD>& to, unsigned* resets) const {
    using Shared = SharedWindow<N, ROWS, PAD>;
    const int tokens = valid;
    r.put(to.r, Shared::kKeyStride);
    w.put(to.w, Shared::kKeyStride, [tokens](float x, int token) { return token < tokens ? decay_minus_one(x) : 0.0f; });
    k.put(to.k, Shared::kKeyStride);
    a.put(to.a, Shared::kKeyStride);
    b.put(to.b, Shared::kKeyStride);
    rows.put(to.rows, Shared::kRowStride);
    if (threadIdx.x < 32) {
      const unsigned mask = __ballot_sync(0xffffffffu, reset);
      if (threadIdx.x == 0) *resets = mask;
    }
  }
};

template <int N>
struct Chain {  // what the two kernels that walk along a row of tokens have in common
  static constexpr int kRows = N < 32 ? N : 32;  // rows of the state per block
  static constexpr int kSplits = N / kRows;
  static constexpr int kThreads = kRows * kLanes;
  using Shared = SharedWindow<N, kRows, 0>;
  static constexpr int kSharedBytes = 2 * Shared::kFloats * 4 + 16;
};

template <int N, typename IO>
__global__ void __launch_bounds__(Chain<N>::kThreads) forward_kernel(const Wkv7Args args) {
  using C = Chain<N>;
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  unsigned* resets = reinterpret_cast<unsigned*>(shared + 2 * C::Shared::kFloats);

  const int lane = threadIdx.x % kLanes, local_row = threadIdx.x / kLanes;
  const int first_row = blockIdx.x % C::kSplits * C::kRows, row = first_row + local_row;
  const int64_t batch_head = blockIdx.x / C::kSplits, batch = batch_head / args.heads, head = batch_head % args.heads;
  const int64_t windows = (args.tokens + kWindow - 1) / kWindow, token_stride = args.heads * N;

  Slice<N> state;
  state.load(args.state + (batch_head * N + row) * N, lane);
  IO* y = static_cast<IO*>(args.y) + batch * args.tokens * token_stride + head * N + row;

  Prefetch<N, C::kRows, C::kThreads, IO> next;
  next.fetch(args, args.v, batch, head, first_row, 0);
  next.put(typename C::Shared(shared), resets);
  __syncthreads();

  for (int64_t window = 0; window < windows; ++window) {
    const int buffer = window % 2;
    const typename C::Shared now(shared + buffer * C::Shared::kFloats);
    const unsigned reset_mask = resets[buffer];
    if (window + 1 < windows) next.fetch(args, args.v, batch, head, first_row, window + 1);
    if (args.starts != nullptr) state.save(args.starts + ((batch_head * windows + window) * N + row) * N, lane);

    for (int token = 0; token < kWindow; token += kLanes) {
      float y_part[kLanes];
#pragma unroll
      for (int step = 0; step < kLanes; ++step) {
        const int t = token + step;
        Slice<N> vector;
        if (reset_mask >> t & 1) state.zero();
        vector.load(now.a + t * N, lane);
        const float u = sum_lanes(state.dot(vector));
        vector.load(now.w + t * N, lane);
        state.decay(vector);
        vector.load(now.k + t * N, lane);
        state.add(now.rows[t * C::kRows + local_row], vector);
        vector.load(now.b + t * N, lane);
        state.add(u, vector);
        vector.load(now.r + t * N, lane);
        y_part[step] = state.dot(vector);
      }
      const float y_value = sum_lanes_transposed(y_part, lane);
      const int64_t t = window * kWindow + token + lane;
      if (t < args.tokens) store(y + t * token_stride, y_value);
    }

    if (window + 1 < windows)
      next.put(typename C::Shared(shared + (1 - buffer) * C::Shared::kFloats), resets + (1 - buffer));
    __syncthreads();
  }
  state.save(args.state_out + (batch_head * N + row) * N, lane);
}

template <int N, typename IO>
__global__ void __launch_bounds__(Chain<N>::kThreads) backward_chain_kernel(const Wkv7Args args) {
  using C = Chain<N>;
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  unsigned* resets = reinterpret_cast<unsigned*>(shared + 2 * C::Shared::kFloats);

  const int lane = threadIdx.x % kLanes, local_row = threadIdx.x / kLanes;
  const int first_row = blockIdx.x % C::kSplits * C::kRows, row = first_row + local_row;
  const int64_t batch_head = blockIdx.x / C::kSplits, batch = batch_head / args.heads, head = batch_head % args.heads;
  const int64_t windows = args.window_end - args.window_begin, token_stride = args.heads * N;

  Slice<N> d;
  d.zero();
  if (args.dstate_in != nullptr) d.load(args.dstate_in + (batch_head * N + row) * N, lane);
  IO* dv = static_cast<IO*>(args.dv) + batch * args.tokens * token_stride + head * N + row;

  Prefetch<N, C::kRows, C::kThreads, IO> next;
  next.fetch(args, args.dy, batch, head, first_row, args.window_end - 1);
  next.put(typename C::Shared(shared), resets);
  __syncthreads();

  for (int64_t done = 0; done < windows; ++done) {
    const int buffer = done % 2;
    const int64_t local_window = windows - 1 - done, window = args.window_begin + local_window;
    const typename C::Shared now(shared + buffer * C::Shared::kFloats);
    const unsigned reset_mask = resets[buffer];
    if (local_window > 0) next.fetch(args, args.dy, batch, head, first_row, window - 1);
    d.save(args.workspace_d + ((batch_head * windows + local_window) * N + row) * N, lane);

    for (int token = kWindow - kLanes; token >= 0; token -= kLanes) {
      float dv_part[kLanes], own_du = 0.0f;
#pragma unroll
      for (int step = kLanes - 1; step >= 0; --step) {
        const int t = token + step;
        Slice<N> vector;
        vector.load(now.r + t * N, lane);
        d.add(now.rows[t * C::kRows + local_row], vector);
        vector.load(now.b + t * N, lane);
        const float du = sum_lanes(d.dot(vector));
        own_du = lane == step ? du : own_du;
        vector.load(now.k + t * N, lane);
        dv_part[step] = d.dot(vector);
        vector.load(now.w + t * N, lane);
        d.decay(vector);
        vector.load(now.a + t * N, lane);
        d.add(du, vector);
        if (reset_mask >> t & 1) d.zero();
      }
      const float dv_value = sum_lanes_transposed(dv_part, lane);
      const int64_t t = window * kWindow + token + lane;
      if (t < args.tokens) store(dv + t * token_stride, dv_value);
      args.workspace_du[((batch_head * windows + local_window) * kWindow + token + lane) * N + row] = own_du;
    }

    if (local_window > 0)
      next.put(typename C::Shared(shared + (1 - buffer) * C::Shared::kFloats), resets + (1 - buffer));
    __syncthreads();
  }
  d.save(args.dstate + (batch_head * N + row) * N, lane);
}

template <int N>
struct Windows {
  static constexpr int kThreads = N * kLanes;
  static constexpr int kStride = N + kPad;
  using Shared = SharedWindow<N, N, kPad>;
  static constexpr int kSharedBytes = (Shared::kFloats + 5 * kWindow * kStride) * 4 + 16;  // + dy, du, u, dr, da
};

// Write a tile of results, tokens below `valid` only; map(x, token, column) gives what is written.
template <int N, typename IO, typename Map>
__device__ inline void write_tile(void* to, int64_t offset, int64_t token_stride, int valid, const float* tile, Map map) {
  constexpr int kVector = 16 / sizeof(IO), kPerToken = N / kVector;
  for (int index = threadIdx.x; index < valid * kPerToken; index += Windows<N>::kThreads) {
    const int token = index / kPerToken, column = index % kPerToken * kVector;
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = tile[token * Windows<N>::kStride + column + i];
    const int64_t at = offset + token * token_stride + column;
    map(x, at);
    *reinterpret_cast<uint4*>(static_cast<IO*>(to) + at) = pack(x);
  }
}

template <int N, typename IO>
__global__ void __launch_bounds__(Windows<N>::kThreads) backward_windows_kernel(const Wkv7Args args) {
  using C = Windows<N>;
  constexpr int kStride = C::kStride, kTile = kWindow * kStride, kVector = 16 / sizeof(IO);
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  const typename C::Shared in(shared);
  float *dy = shared + C::Shared::kFloats, *du = dy + kTile, *u = du + kTile, *dr = u + kTile, *da = dr + kTile;
  unsigned* resets = reinterpret_cast<unsigned*>(da + kTile);

  const int lane = threadIdx.x % kLanes, line = threadIdx.x / kLanes;  // line: a row i of the state, then a column j
  const int64_t windows = args.window_end - args.window_begin, all_windows = (args.tokens + kWindow - 1) / kWindow;
  const int64_t batch_head = blockIdx.x / windows, local_window = blockIdx.x % windows;
  const int64_t batch = batch_head / args.heads, head = batch_head % args.heads;
  const int64_t window = args.window_begin + local_window, token_stride = args.heads * N;
  const int64_t offset = (batch * args.tokens + window * kWindow) * token_stride + head * N;
  const float* start = args.starts + (batch_head * all_windows + window) * N * N;
  const float* d_end = args.workspace_d + (batch_head * windows + local_window) * N * N;

  Prefetch<N, N, C::kThreads, IO> input;
  Tile<N, C::kThreads, IO> dy_tile;
  Tile<N, C::kThreads, float> du_tile;
  input.fetch(args, args.v, batch, head, 0, window);
  dy_tile.fetch(args.dy == nullptr ? nullptr : static_cast<const IO*>(args.dy) + offset, token_stride, input.valid);
  du_tile.fetch(args.workspace_du + (batch_head * windows + local_window) * kWindow * N, N, kWindow);
  Slice<N> state;
  state.load(start + line * N, lane);
  input.put(in, resets);
  dy_tile.put(dy, kStride);
  du_tile.put(du, kStride);
  __syncthreads();
  const unsigned reset_mask = *resets;

  for (int t = 0; t < kWindow; ++t) {  // rows of S: u
    Slice<N> vector;
    if (reset_mask >> t & 1) state.zero();
    vector.load(in.a + t * kStride, lane);
    const float u_value = sum_lanes(state.dot(vector));
    if (lane == 0) u[t * kStride + line] = u_value;
    vector.load(in.w + t * kStride, lane);
    state.decay(vector);
    vector.load(in.k + t * kStride, lane);
    state.add(in.rows[t * kStride + line], vector);
    vector.load(in.b + t * kStride, lane);
    state.add(u_value, vector);
  }
  __syncthreads();

  state.load_strided(start + line, N, lane);
  for (int token = 0; token < kWindow; token += kLanes) {  // columns of S: da and dr
    float da_part[kLanes], dr_part[kLanes];
#pragma unroll
    for (int step = 0; step < kLanes; ++step) {
      const int at = (token + step) * kStride;
      Slice<N> vector;
      if (reset_mask >> (token + step) & 1) state.zero();
      vector.load(du + at, lane);
      da_part[step] = state.dot(vector);
      state.decay(in.w[at + line]);
      vector.load(in.rows + at, lane);
      state.add(in.k[at + line], vector);
      vector.load(u + at, lane);
      state.add(in.b[at + line], vector);
      vector.load(dy + at, lane);
      dr_part[step] = state.dot(vector);
    }
    da[(token + lane) * kStride + line] = sum_lanes_transposed(da_part, lane);
    dr[(token + lane) * kStride + line] = sum_lanes_transposed(dr_part, lane);
  }

  Slice<N> d;
  d.load_strided(d_end + line, N, lane);
  for (int token = kWindow - kLanes; token >= 0; token -= kLanes) {  // columns of D: dk and db
    float dk_part[kLanes], db_part[kLanes];
#pragma unroll
    for (int step = kLanes - 1; step >= 0; --step) {
      const int at = (token + step) * kStride;
      Slice<N> vector;
      vector.load(dy + at, lane);
      d.add(in.r[at + line], vector);
      vector.load(in.rows + at, lane);
      dk_part[step] = d.dot(vector);
      vector.load(u + at, lane);
      db_part[step] = d.dot(vector);
      d.decay(in.w[at + line]);
      vector.load(du + at, lane);
      d.add(in.a[at + line], vector);
      if (reset_mask >> (token + step) & 1) d.zero();
    }
    const float dk_value = sum_lanes_transposed(dk_part, lane), db_value = sum_lanes_transposed(db_part, lane);
    // From here on this column's inputs of these four tokens make room for results: only these four lanes read them.
    const int own = (token + lane) * kStride + line;
    const float x = in.r[own] * dr[own] - in.b[own] * db_value - in.k[own] * dk_value, z = in.a[own] * da[own];
    __syncwarp();
    in.k[own] = dk_value, in.b[own] = db_value;
    in.r[own] = x, in.a[own] = z;
  }
  __syncwarp();

  state.load_strided(start + line, N, lane);
  float m = sum_lanes(state.dot(d));
#pragma unroll
  for (int t = 0; t < kWindow; ++t) {  // dl by the m-recursion
    const int at = t * kStride + line;
    const float dl = reset_mask >> t & 1 ? 0.0f : m - in.a[at];
    m = dl - in.r[at];
    if (lane == t % kLanes) in.w[at] = dl;
  }
  __syncthreads();

  const auto as_is = [](float (&)[kVector], int64_t) {};
  const IO* w_raw = static_cast<const IO*>(args.w_raw);
  write_tile<N, IO>(args.dr, offset, token_stride, input.valid, dr, as_is);
  write_tile<N, IO>(args.dk, offset, token_stride, input.valid, in.k, as_is);
  write_tile<N, IO>(args.da, offset, token_stride, input.valid, da, as_is);
  write_tile<N, IO>(args.db, offset, token_stride, input.valid, in.b, as_is);
  write_tile<N, IO>(args.dw_raw, offset, token_stride, input.valid, in.w, [w_raw](float (&dl)[kVector], int64_t at) {
    float raw[kVector];
    unpack(*reinterpret_cast<const uint4*>(w_raw + at), raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) dl[i] *= log_decay_slope(raw[i]);
  });
}

}  // namespace wkv7
