// Launchers of the tensor-core WKV-7 kernels, for ctypes: plain pointers, no PyTorch. Every launcher returns a
// cudaError_t as int, allocates no GPU memory and never waits for the GPU. What it starts comes after what is in the
// given stream, and before what comes there later; parts of it run in streams beside it.
#include <cuda_runtime.h>

#include "gradients.cuh"
#include "scan.cuh"

namespace {

using namespace wkv7;

constexpr int kBFloat16 = 1;  // as in sequential.cu

int check(int device, int head_size, int dtype) {
  if (head_size != kSize || dtype != kBFloat16) return cudaErrorInvalidValue;
  return cudaSetDevice(device);
}

int launch(void (*kernel)(Wkv7ChunkedArgs), int64_t blocks, int threads, int shared_bytes, const Wkv7ChunkedArgs& args,
           cudaStream_t stream) {
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const void* function = reinterpret_cast<const void*>(kernel);
  cudaError_t status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  // One split of the processor's memory for all kernels: with different ones they would not run side by side.
  status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

int64_t chunk_blocks(const Wkv7ChunkedArgs& args) {
  return args.batch * args.heads * (args.window_end - args.window_begin);
}

template <bool REVERSE>
int prepare(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  if (args.warps == 4) return cudaSuccess;  // `scan` does it
  return launch(prepare_kernel<REVERSE>, chunk_blocks(args), kChunkThreads, 0, args, stream);
}

template <bool REVERSE, int WARPS>
int scan_by(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  using C = Scan<REVERSE, WARPS>;
  return launch(scan_kernel<REVERSE, WARPS>, args.batch * args.heads * C::kSplits, C::kThreads, C::kSharedBytes, args,
                stream);
}

template <bool REVERSE>
int scan(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  switch (args.warps) {
    case 1: return scan_by<REVERSE, 1>(args, stream);
    case 2: return scan_by<REVERSE, 2>(args, stream);
    case 4: return scan_by<REVERSE, 4>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

int gradients(const Wkv7ChunkedArgs& args, cudaStream_t stream) {
  return launch(gradients_kernel, chunk_blocks(args), kChunkThreads, sizeof(GradientsShared), args, stream);
}

// Pieces of `operands`, `pairs` and `ends` that are in use at once: one is prepared, one scanned, one (backward) finished.
template <bool REVERSE>
constexpr int kBuffers = REVERSE ? 3 : 2;

// The part of `args` that piece `index` is, in the order of the scan.
template <bool REVERSE>
Wkv7ChunkedArgs piece_of(const Wkv7ChunkedArgs& args, int64_t index) {
  Wkv7ChunkedArgs part = args;
  const int64_t done = index * args.piece, buffer = index % kBuffers<REVERSE>;
  if (REVERSE) {
    part.window_end = args.window_end - done;
    if (part.window_end - args.piece > args.window_begin) part.window_begin = part.window_end - args.piece;
    if (index > 0) part.dstate_in = args.dstate;
  } else {
    part.window_begin = args.window_begin + done;
    if (part.window_begin + args.piece < args.window_end) part.window_end = part.window_begin + args.piece;
    if (index > 0) part.state = args.state_out;
  }
  const int64_t chunks = buffer * args.batch * args.heads * args.piece;
  part.operands = args.operands + chunks * Operands<REVERSE>::kBytes;
  if (REVERSE) part.pairs = args.pairs + chunks * Pairs::kBytes, part.ends = args.ends + chunks * kStateBytes;
  return part;
}

// Streams and events of a thread and device, for kernels that run side by side with those of the caller's stream. The
// scan, which is long and narrow, goes first wherever there is room.
struct Side {
  cudaStream_t scan = nullptr, prepare = nullptr;
  cudaEvent_t begin = nullptr, prepared[3] = {}, scanned[3] = {}, finished[3] = {};
  bool ready = false;
};

int create(Side& side) {
  int least = 0, greatest = 0;
  int status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  const int middle = greatest < least - 1 ? greatest + 1 : greatest;
  if (status == cudaSuccess) status = cudaStreamCreateWithPriority(&side.scan, cudaStreamNonBlocking, greatest);
  if (status == cudaSuccess) status = cudaStreamCreateWithPriority(&side.prepare, cudaStreamNonBlocking, middle);
  cudaEvent_t* const events[] = {&side.begin, side.prepared, side.scanned, side.finished};
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < (i == 0 ? 1 : 3); ++j)
      if (status == cudaSuccess) status = cudaEventCreateWithFlags(events[i] + j, cudaEventDisableTiming);
  side.ready = status == cudaSuccess;
  return status;
}

int side_of(int device, Side** found) {
  constexpr int kMostDevices = 64;
  static thread_local Side sides[kMostDevices];
  if (device < 0 || device >= kMostDevices) return cudaErrorInvalidDevice;
  *found = &sides[device];
  if (sides[device].ready) return cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // a first call may be under capture
  int status = cudaThreadExchangeStreamCaptureMode(&mode);
  if (status != cudaSuccess) return status;
  status = create(sides[device]);
  const int restored = cudaThreadExchangeStreamCaptureMode(&mode);
  return status != cudaSuccess ? status : restored;
}

int after(cudaStream_t waiting, cudaStream_t stream, cudaEvent_t event) {
  const int status = cudaEventRecord(event, stream);
  return status != cudaSuccess ? status : cudaStreamWaitEvent(waiting, event, 0);
}

// All pieces, each as soon as what it needs is there: while one is scanned, the next is prepared, and the one before
// finished (backward).
template <bool REVERSE>
int run(int device, const Wkv7ChunkedArgs& args, cudaStream_t caller) {
  if (args.piece < 1) return cudaErrorInvalidValue;
  const int64_t pieces = (args.window_end - args.window_begin + args.piece - 1) / args.piece;
  if (pieces == 1) {
    int status = prepare<REVERSE>(args, caller);
    if (status == cudaSuccess) status = scan<REVERSE>(args, caller);
    if (status == cudaSuccess && REVERSE) status = gradients(args, caller);
    return status;
  }
  Side* side = nullptr;
  int status = side_of(device, &side);
  if (status != cudaSuccess) return status;
  const cudaStream_t preparing = REVERSE ? side->prepare : caller;
  status = after(side->scan, caller, side->begin);
  if (status == cudaSuccess && REVERSE) status = cudaStreamWaitEvent(side->prepare, side->begin, 0);
  for (int64_t index = 0; index < pieces && status == cudaSuccess; ++index) {
    const Wkv7ChunkedArgs part = piece_of<REVERSE>(args, index);
    const int buffer = static_cast<int>(index % kBuffers<REVERSE>);
    if (index >= kBuffers<REVERSE>)
      status = cudaStreamWaitEvent(preparing, REVERSE ? side->finished[buffer] : side->scanned[buffer], 0);
    if (status == cudaSuccess) status = prepare<REVERSE>(part, preparing);
    if (status == cudaSuccess) status = after(side->scan, preparing, side->prepared[buffer]);
    if (status == cudaSuccess) status = scan<REVERSE>(part, side->scan);
    if (status == cudaSuccess) status = cudaEventRecord(side->scanned[buffer], side->scan);
    if (status == cudaSuccess && (REVERSE || index == pieces - 1))
      status = cudaStreamWaitEvent(caller, side->scanned[buffer], 0);
    if (status == cudaSuccess && REVERSE) status = gradients(part, caller);
    if (status == cudaSuccess && REVERSE) status = cudaEventRecord(side->finished[buffer], caller);
  }
  return status;
}

constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <bool REVERSE>
constexpr int64_t scan_shared_bytes() {
  return larger(Scan<REVERSE, 1>::kSharedBytes, larger(Scan<REVERSE, 2>::kSharedBytes, Scan<REVERSE, 4>::kSharedBytes));
}

}  // namespace

extern "C" {

int64_t wkv7_chunked_args_bytes() { return sizeof(Wkv7ChunkedArgs); }

// The most shared memory that a block of any kernel asks for at launch.
int64_t wkv7_chunked_shared_bytes() {
  return larger(sizeof(GradientsShared), larger(scan_shared_bytes<false>(), scan_shared_bytes<true>()));
}

// Bytes of `operands` per chunk of a head.
int64_t wkv7_chunked_operands_bytes(int backward) { return backward ? Operands<true>::kBytes : Operands<false>::kBytes; }

// Bytes of `pairs` per chunk of a head.
int64_t wkv7_chunked_pairs_bytes() { return Pairs::kBytes; }

// Pieces that `operands`, `pairs` and `ends` must have room for, if there are as many.
int64_t wkv7_chunked_buffers(int backward) { return backward ? kBuffers<true> : kBuffers<false>; }

int wkv7_chunked_forward(int device, int head_size, int dtype, const Wkv7ChunkedArgs* args, void* stream) {
  const int status = check(device, head_size, dtype);
  return status != cudaSuccess ? status : run<false>(device, *args, static_cast<cudaStream_t>(stream));
}

int wkv7_chunked_backward(int device, int head_size, int dtype, const Wkv7ChunkedArgs* args, void* stream) {
  const int status = check(device, head_size, dtype);
  return status != cudaSuccess ? status : run<true>(device, *args, static_cast<cudaStream_t>(stream));
}
}
