// Occupies every SM of the GPU, and does on purpose what HOCCL must never do. Loaded by the zero-SM
// group through ctypes, into the application process. Every function returns a cudaError_t as int,
// or a count where its comment says so.
//
// The hog: two blocks an SM, each with half of the SM's threads and nearly half of its shared
// memory, so that no other block fits. A block says in host memory that it runs and that it has
// ended: all begun and none ended means that all hold their place at once. It ends when told to or
// at its time limit, whichever is first.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 1024;
constexpr int kBlocksPerSm = 2;
constexpr int kSharedBytes = 110 << 10;
constexpr int kMaxBlocks = 1024;
constexpr size_t kPlantedBytes = 64ull << 20;

struct Board {  // in pinned host memory
  volatile uint32_t stop;
  volatile uint32_t begun[kMaxBlocks];
  volatile uint32_t ended[kMaxBlocks];
};

Board* board = nullptr;
cudaStream_t hogStream = nullptr;
cudaStream_t plantedStream = nullptr;
char* plantedFrom = nullptr;
char* plantedTo = nullptr;
int blocks = 0;
uint32_t round_ = 0;

__device__ unsigned long long globalNs() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    hogKernel(Board* host, uint32_t round, unsigned long long limitNs) {
  extern __shared__ volatile uint32_t room[];
  const unsigned long long begin = globalNs();
  if (threadIdx.x == 0) {
    room[0] = 0;
    host->begun[blockIdx.x] = round;
    __threadfence_system();
  }
  __syncthreads();
  // Thread 0 alone looks at host memory, seldom: 264 blocks polling hard would load the PCIe link
  // that the transfer under test uses.
  while (room[0] == 0) {
    if (threadIdx.x == 0 && (host->stop == round || globalNs() - begin > limitNs)) room[0] = 1;
    __nanosleep(100000);
  }
  __syncthreads();
  if (threadIdx.x == 0) host->ended[blockIdx.x] = round;
}

__global__ void plantedKernel(char* p) { *p = static_cast<char>(*p + 1); }

int launch(unsigned long long limitNs) {
  round_++;
  hogKernel<<<blocks, kThreads, kSharedBytes, hogStream>>>(board, round_, limitNs);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

/// Allocates, loads every kernel and runs each once. Returns the number of hog blocks, or minus the
/// error. Call it while nothing is pending.
API int hogPrepare() {
  int device = 0, sms = 0, fit = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) {
    e = cudaFuncSetAttribute(hogKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (e == cudaSuccess) {
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, hogKernel, kThreads, kSharedBytes);
  }
  if (e == cudaSuccess && (fit != kBlocksPerSm || sms * fit > kMaxBlocks)) {
    e = cudaErrorInvalidConfiguration;
  }
  void* host = nullptr;
  if (e == cudaSuccess) e = cudaHostAlloc(&host, sizeof(Board), cudaHostAllocMapped);
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&hogStream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&plantedStream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaMalloc(reinterpret_cast<void**>(&plantedFrom), kPlantedBytes);
  if (e == cudaSuccess) e = cudaMalloc(reinterpret_cast<void**>(&plantedTo), kPlantedBytes);
  if (e != cudaSuccess) return -static_cast<int>(e);
  board = static_cast<Board*>(host);
  for (int i = 0; i < kMaxBlocks; i++) board->begun[i] = board->ended[i] = 0;
  board->stop = 0;
  blocks = sms * kBlocksPerSm;
  launch(0);
  plantedKernel<<<1, 1, 0, plantedStream>>>(plantedTo);
  e = cudaDeviceSynchronize();
  return e == cudaSuccess ? blocks : -static_cast<int>(e);
}

/// Starts the hog; it ends by itself after `seconds`.
API int hogStart(double seconds) { return launch(static_cast<unsigned long long>(seconds * 1e9)); }

/// How many blocks of the hog hold their place now.
API int hogHolding() {
  int n = 0;
  for (int i = 0; i < blocks; i++) n += board->begun[i] == round_ && board->ended[i] != round_;
  return n;
}

/// Ends the hog and waits for it.
API int hogStop() {
  board->stop = round_;
  return static_cast<int>(cudaStreamSynchronize(hogStream));
}

API int plantKernel() {
  plantedKernel<<<1, 1, 0, plantedStream>>>(plantedTo);
  return static_cast<int>(cudaGetLastError());
}

API int plantCopy(size_t bytes) {
  return static_cast<int>(
      cudaMemcpyAsync(plantedTo, plantedFrom, bytes, cudaMemcpyDeviceToDevice, plantedStream));
}

API int plantMemset(size_t bytes) {
  return static_cast<int>(cudaMemsetAsync(plantedTo, 0, bytes, plantedStream));
}

/// 1 when everything planted has run, 0 when not, minus the error otherwise. Never waits.
API int plantedDone() {
  const cudaError_t e = cudaStreamQuery(plantedStream);
  return e == cudaSuccess ? 1 : e == cudaErrorNotReady ? 0 : -static_cast<int>(e);
}
