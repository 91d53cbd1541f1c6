// Ordinary CUDA calls that deadlock a job whose data is moved by a thread of the same process (they
// wait for a pending stream, and the pending stream waits for the copy). Loaded through ctypes into
// the receiver's application thread, which makes them while a receive is pending. Each returns a
// cudaError_t as int; each hazard can be used once.

#include <cuda_runtime.h>

namespace {

constexpr size_t kDeviceBytes = 64ull << 20;
constexpr size_t kHostBytes = 16ull << 20;
constexpr int kLocalInts = 4096;  // 16 KiB a thread: the driver has to grow the local-memory stack
constexpr int kSharedBytes = 200 << 10;

void* deviceBuffer = nullptr;
void* hostBuffer = nullptr;
int* word = nullptr;
cudaStream_t stream = nullptr;

// Loaded by the driver at its first launch, which is inside hazardFirstLaunch.
__global__ void neverLaunchedBefore(int* p) { *p = 41; }

__global__ void moreSharedMemory(int* p) {
  extern __shared__ int room[];
  room[threadIdx.x] = *p;
  __syncthreads();
  if (threadIdx.x == 0) *p = room[(*p) & 31];
}

__global__ void growsStack(int* p) {
  int local[kLocalInts];
  for (int i = 0; i < kLocalInts; i++) local[i] = *p + i * static_cast<int>(threadIdx.x);
  int sum = 0;
  for (int i = 0; i < kLocalInts; i++) sum ^= local[(i * 7 + *p) & (kLocalInts - 1)];
  if (sum == 0x7fffffff) *p = sum;  // keeps the array alive
}

int ended(cudaError_t e) {
  if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
  return static_cast<int>(e);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

/// Allocates what the hazards free. Launches nothing: the kernels must stay unloaded.
API int hazardPrepare() {
  cudaError_t e = cudaMalloc(&deviceBuffer, kDeviceBytes);
  if (e == cudaSuccess) e = cudaMallocHost(&hostBuffer, kHostBytes);
  if (e == cudaSuccess) e = cudaMalloc(reinterpret_cast<void**>(&word), sizeof(int));
  if (e == cudaSuccess) e = cudaMemset(word, 0, sizeof(int));
  if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  return static_cast<int>(e);
}

API int hazardFree() { return static_cast<int>(cudaFree(deviceBuffer)); }

API int hazardFreeHost() { return static_cast<int>(cudaFreeHost(hostBuffer)); }

API int hazardFirstLaunch() {
  neverLaunchedBefore<<<1, 1, 0, stream>>>(word);
  return ended(cudaGetLastError());
}

API int hazardSharedMemory() {
  cudaError_t e = cudaFuncSetAttribute(moreSharedMemory,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (e == cudaSuccess) {
    moreSharedMemory<<<1, 32, kSharedBytes, stream>>>(word);
    e = cudaGetLastError();
  }
  return ended(e);
}

API int hazardStack() {
  growsStack<<<264, 1024, 0, stream>>>(word);
  return ended(cudaGetLastError());
}
