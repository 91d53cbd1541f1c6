// Holds a stream until the host says go, without a kernel, and tells when a stream has come to its
// end: for latencies measured from one process's start to another's finish. Loaded through ctypes.
// Times are CLOCK_MONOTONIC in ns, comparable between processes of one machine.

#include <cuda.h>
#include <cuda_runtime.h>
#include <time.h>

#include <cstdint>

namespace {

volatile uint32_t* flag = nullptr;
CUdeviceptr flagOnDevice = 0;
uint32_t round_ = 0;

int64_t nowNs() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000ll + t.tv_nsec;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int gatePrepare() {
  void* host = nullptr;
  void* device = nullptr;
  cudaError_t e = cudaHostAlloc(&host, 4096, cudaHostAllocMapped);
  if (e == cudaSuccess) e = cudaHostGetDevicePointer(&device, host, 0);
  if (e != cudaSuccess) return static_cast<int>(e);
  flag = static_cast<volatile uint32_t*>(host);
  *flag = 0;
  flagOnDevice = reinterpret_cast<CUdeviceptr>(device);
  return 0;
}

/// What is enqueued on `stream` after this call waits for the next gateOpen.
API int gateClose(void* stream) {
  round_++;
  return static_cast<int>(cuStreamWaitValue32(static_cast<CUstream>(stream), flagOnDevice, round_,
                                              CU_STREAM_WAIT_VALUE_GEQ));
}

/// Opens the gate; returns the time right before.
API int64_t gateOpen() {
  const int64_t t = nowNs();
  *flag = round_;
  return t;
}

/// Spins until everything on `stream` has run; the time then, 0 past the limit, -error on an error.
API int64_t spinUntilDone(void* stream, int64_t limitNs) {
  const int64_t begin = nowNs();
  for (;;) {
    const cudaError_t e = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    const int64_t t = nowNs();
    if (e == cudaSuccess) return t;
    if (e != cudaErrorNotReady) return -static_cast<int64_t>(e);
    if (t - begin > limitNs) return 0;
  }
}
