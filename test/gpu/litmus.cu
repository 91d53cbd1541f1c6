// The litmus test of the order of payload and flag: on the receiving stream a kernel right behind
// the wait looks at the last bytes of what was received. Loaded through ctypes; sends and receives
// are NCCL's functions as this process sees them, so those of a preloaded library. They are called
// from here, not from Python, so that the stream is ahead of the transfers and each wait really
// waits.
//
// A ring of buffers is used round and round: a stale read shows the pattern of an earlier round.
// Every function returns 0, a cudaError_t, or kNcclError + an ncclResult_t.

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>

namespace {

constexpr int kNcclError = 10000;
constexpr int kNotFound = 20000;
constexpr int kNcclInt8 = 0;  // ncclDataType_t
constexpr uint32_t kRing = 64;
constexpr uint32_t kWords = 128;  // that are looked at: the last 512 bytes

using Transfer = int (*)(void* buffer, size_t count, int type, int peer, void* comm,
                         cudaStream_t stream);

struct Found {
  unsigned long long checked, stale, firstRound;
  uint32_t firstWord, firstValue;
};

Transfer transfer = nullptr;
void* comm = nullptr;
int peer = 0;
bool sender = false;
size_t bytes = 0;
char* ring = nullptr;
Found* found = nullptr;
cudaStream_t stream = nullptr;

__device__ uint32_t wordOf(unsigned long long round, uint32_t word) {
  return static_cast<uint32_t>(round * 2654435761ull) ^ (word * 40503u + 12345u);
}

uint32_t* lastWords(uint32_t slot) {
  return reinterpret_cast<uint32_t*>(ring + (slot + 1) * bytes) - kWords;
}

/// One block a buffer: the rounds from `first` on.
__global__ void stamp(char* from, size_t size, unsigned long long first) {
  auto* last = reinterpret_cast<uint32_t*>(from + (blockIdx.x + 1) * size) - kWords;
  last[threadIdx.x] = wordOf(first + blockIdx.x, threadIdx.x);
}

__global__ void consume(const uint32_t* last, unsigned long long round, Found* out) {
  const uint32_t value = last[threadIdx.x];
  const bool stale = value != wordOf(round, threadIdx.x);
  if (stale && atomicCAS(&out->firstRound, ~0ull, round) == ~0ull) {
    out->firstWord = threadIdx.x;
    out->firstValue = value;
  }
  const int any = __syncthreads_or(stale);
  if (threadIdx.x == 0) {
    atomicAdd(&out->checked, 1ull);
    if (any) atomicAdd(&out->stale, 1ull);
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

/// Allocates a ring of buffers of `size` bytes, a multiple of 4, and loads the kernels. Call it
/// while nothing is pending, and litmusEnd before the next one.
API int litmusBegin(void* communicator, int otherRank, int sends, size_t size) {
  transfer = reinterpret_cast<Transfer>(dlsym(RTLD_DEFAULT, sends ? "ncclSend" : "ncclRecv"));
  if (transfer == nullptr) return kNotFound;
  comm = communicator;
  peer = otherRank;
  sender = sends != 0;
  bytes = size;
  cudaError_t e = cudaMalloc(reinterpret_cast<void**>(&ring), kRing * bytes);
  if (e == cudaSuccess) e = cudaMalloc(reinterpret_cast<void**>(&found), sizeof(Found));
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaMemset(ring, 0xA5, kRing * bytes);
  if (e == cudaSuccess) {
    stamp<<<kRing, kWords, 0, stream>>>(ring, bytes, 1ull << 40);
    consume<<<1, kWords, 0, stream>>>(lastWords(0), 0, found);
    e = cudaGetLastError();
  }
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  if (e == cudaSuccess) e = cudaMemset(ring, 0xA5, kRing * bytes);
  Found none{0, 0, ~0ull, 0, 0};
  if (e == cudaSuccess) e = cudaMemcpy(found, &none, sizeof none, cudaMemcpyHostToDevice);
  return static_cast<int>(e);
}

/// Rounds first .. first + count, a multiple of the ring, and waits for them. `early`: the consumer
/// looks before the wait instead of behind it, and must find every read stale.
API int litmusRun(uint64_t first, uint32_t count, int early) {
  for (uint32_t i = 0; i < count; i++) {
    const uint64_t round = first + i;
    const auto slot = static_cast<uint32_t>(round % kRing);
    if (sender && slot == 0) stamp<<<kRing, kWords, 0, stream>>>(ring, bytes, round);
    if (!sender && early) consume<<<1, kWords, 0, stream>>>(lastWords(slot), round, found);
    const int result = transfer(ring + slot * bytes, bytes, kNcclInt8, peer, comm, stream);
    if (result != 0) return kNcclError + result;
    if (!sender && !early) consume<<<1, kWords, 0, stream>>>(lastWords(slot), round, found);
  }
  cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  return static_cast<int>(e);
}

/// out: rounds looked at, rounds with a stale read, the first such round, its word, its value.
API int litmusFound(uint64_t out[5]) {
  Found f{};
  const cudaError_t e = cudaMemcpy(&f, found, sizeof f, cudaMemcpyDeviceToHost);
  out[0] = f.checked;
  out[1] = f.stale;
  out[2] = f.firstRound;
  out[3] = f.firstWord;
  out[4] = f.firstValue;
  return static_cast<int>(e);
}

API int litmusEnd() {
  cudaError_t e = cudaStreamDestroy(stream);
  if (e == cudaSuccess) e = cudaFree(ring);
  if (e == cudaSuccess) e = cudaFree(found);
  return static_cast<int>(e);
}
