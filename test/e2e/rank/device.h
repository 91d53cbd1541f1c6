#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "test/e2e/patience.h"
#include "test/emulator/hoccl_emu.h"

namespace e2e {

/// The driver, found with dlopen as an application's CUDA run time finds it. X(member, name).
#define E2E_DRIVER_FUNCTIONS(X)                         \
  X(init, cuInit)                                       \
  X(deviceGet, cuDeviceGet)                             \
  X(primaryRetain, cuDevicePrimaryCtxRetain)            \
  X(ctxSetCurrent, cuCtxSetCurrent)                     \
  X(ctxGetCurrent, cuCtxGetCurrent)                     \
  X(memAlloc, cuMemAlloc)                               \
  X(memFree, cuMemFree)                                 \
  X(memAllocManaged, cuMemAllocManaged)                 \
  X(memAllocAsync, cuMemAllocAsync)                     \
  X(memFreeAsync, cuMemFreeAsync)                       \
  X(memCreate, cuMemCreate)                             \
  X(memRelease, cuMemRelease)                           \
  X(memAddressReserve, cuMemAddressReserve)             \
  X(memAddressFree, cuMemAddressFree)                   \
  X(memMap, cuMemMap)                                   \
  X(memUnmap, cuMemUnmap)                               \
  X(memSetAccess, cuMemSetAccess)                       \
  X(memHostRegister, cuMemHostRegister)                 \
  X(memHostUnregister, cuMemHostUnregister)             \
  X(memHostAlloc, cuMemHostAlloc)                       \
  X(memFreeHost, cuMemFreeHost)                         \
  X(memHostGetDevicePointer, cuMemHostGetDevicePointer) \
  X(copyToDevice, cuMemcpyHtoDAsync)                    \
  X(copyToHost, cuMemcpyDtoHAsync)                      \
  X(streamCreate, cuStreamCreate)                       \
  X(streamDestroy, cuStreamDestroy_v2)                  \
  X(streamQuery, cuStreamQuery)                         \
  X(streamWaitValue, cuStreamWaitValue64)               \
  X(streamBeginCapture, cuStreamBeginCapture)           \
  X(streamEndCapture, cuStreamEndCapture)               \
  X(graphDestroy, cuGraphDestroy)

struct DriverApi {
#define X(member, name) decltype(&::name) member = nullptr;
  E2E_DRIVER_FUNCTIONS(X)
#undef X
  decltype(&::hocclEmuGetSessionCounters) sessionCounters = nullptr;
  CUcontext context = nullptr;
};

/// Loads libcuda.so.1 on first use and makes device 0's primary context current in that thread.
const DriverApi& cuda();
/// Device 0's primary context becomes current in this thread, too.
void useDevice();

/// What the emulated driver has counted on device 0, in all processes of the job.
HocclEmuCounters counters();
/// SM operations of all ranks since the first call of markSmOps: after a communicator is made,
/// since each process runs HOCCL's wait kernel once before that.
std::uint64_t smOps();
void markSmOps();

CUstream newStream();
/// Everything on the stream has run.
bool streamIdle(CUstream stream);
/// Waits for that, with a bound; fails the rank with `what` when it is over.
void awaitStream(CUstream stream, const std::string& what, int timeoutMs = patienceMs());
/// The stream is still busy after `ms`.
void requireBusy(CUstream stream, int ms, const std::string& what);

/// A host flag on which streams wait: nothing behind `hold` runs before `open`.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void hold(CUstream stream);
  void open();

 private:
  volatile std::uint64_t* flag_ = nullptr;
  CUdeviceptr device_ = 0;
};

/// How the n-th piece of memory of cuMemCreate can be shared: by descriptor, or by fabric handle
/// where E2E_FABRIC says "all" or (of the odd ones) "odd".
CUmemAllocationHandleType shareableAs(std::size_t n);

/// Device memory of the kind that the environment's E2E_MEMORY names: "device" (cuMemAlloc; also if
/// it is not set), "managed", "pool", "mapped" (one address range of many physical pieces) or
/// "unexportable" (the same of pieces that no other process can map).
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  [[nodiscard]] CUdeviceptr address() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
  std::size_t mapped_ = 0;  ///< bytes of the range
  std::vector<CUmemGenericAllocationHandle> pieces_;
};

/// Device memory for one transfer, with guard zones around it, and its image on the host. What
/// is enqueued here runs in the order of the stream, so it also shows what an operation's place in
/// that order is: `poison` after a send destroys the bytes as soon as the stream is released.
class Buffer {
 public:
  /// `bytes` of payload, `offset` bytes off the alignment of an allocation.
  explicit Buffer(std::size_t bytes, std::size_t offset = 0);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(device_ + kGuard + offset_); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Everything, guard zones too, becomes kPoison.
  void poison(CUstream stream);
  /// The payload becomes the pattern of `seed`.
  void fill(std::uint64_t seed, CUstream stream);
  /// Fetches everything for `requirePattern`.
  void fetch(CUstream stream);
  /// After fetch() has run: every byte of the payload is the pattern's, every other one poison.
  void requirePattern(std::uint64_t seed, const std::string& what) const;
  /// After fetch() has run: nothing has touched it since poison().
  void requirePoison(const std::string& what) const;
  [[nodiscard]] const unsigned char* fetched() const { return seen_ + kGuard + offset_; }
  /// The payload becomes these bytes.
  void put(const void* bytes, CUstream stream);

 private:
  static constexpr std::size_t kGuard = 4096;
  static constexpr unsigned char kPoison = 0xa5;
  [[nodiscard]] std::size_t total() const { return bytes_ + offset_ + 2 * kGuard; }
  [[nodiscard]] std::size_t firstOther(std::size_t from, std::size_t to) const;

  std::size_t bytes_, offset_;
  DeviceMemory memory_;
  CUdeviceptr device_ = 0;
  // Pinned, one area for each use, so that copies still queued keep what they read.
  unsigned char* poison_ = nullptr;
  unsigned char* pattern_ = nullptr;
  unsigned char* seen_ = nullptr;
};

/// The bytes of a seed: a 64-bit linear congruential sequence, so that any shift shows.
void makePattern(std::uint64_t seed, unsigned char* out, std::size_t bytes);

}  // namespace e2e
