#pragma once

// A driver table whose imports and registrations are done without a GPU, and buffers described so
// that it can import them.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "common/gpu/driver.h"
#include "common/runtime/segment.h"
#include "test/unit/fake_memory.h"

namespace hoccl::test {

/// What the fake driver's imports and registrations do (all movers share it); a buffer's handle
/// names the buffer itself and the result.
struct FakeImports {
  std::atomic<bool> held{false};  ///< cuIpcOpenMemHandle does not return
  std::atomic<std::uint32_t> opened{0}, closed{0};
  std::atomic<std::uint32_t> registered{0};  ///< host regions registered now
};
inline FakeImports& fakeImports() {
  static FakeImports imports;
  return imports;
}

struct FakeHandle {
  CUdeviceptr address;
  CUresult result;
};

/// The calls that the control thread and HostRegistration make, done without a GPU.
inline const Driver* fakeDriver() {
  static const Driver table = [] {
    Driver d;
    d.cuGetErrorName = [](CUresult, const char** text) {
      *text = "CUDA_ERROR_FAKE";
      return CUDA_SUCCESS;
    };
    d.cuGetErrorString = [](CUresult, const char** text) {
      *text = "the fake driver was told to fail";
      return CUDA_SUCCESS;
    };
    d.cuCtxSetCurrent = [](CUcontext) { return CUDA_SUCCESS; };
    d.cuMemHostRegister = [](void*, size_t, unsigned) {
      fakeImports().registered.fetch_add(1);
      return CUDA_SUCCESS;
    };
    d.cuMemHostUnregister = [](void*) {
      fakeImports().registered.fetch_sub(1);
      return CUDA_SUCCESS;
    };
    d.cuMemHostGetDevicePointer = [](CUdeviceptr* out, void* host, unsigned) {
      *out = reinterpret_cast<CUdeviceptr>(host);
      return CUDA_SUCCESS;
    };
    d.cuIpcOpenMemHandle = [](CUdeviceptr* out, CUipcMemHandle handle, unsigned) {
      while (fakeImports().held.load()) ::usleep(200);
      FakeHandle fake;
      std::memcpy(&fake, &handle, sizeof fake);
      fakeImports().opened.fetch_add(1);
      *out = fake.address;
      return fake.result;
    };
    // Spans: addresses of the process, with memory behind all of them.
    d.cuCtxGetDevice = [](CUdevice* out) {
      *out = 0;
      return CUDA_SUCCESS;
    };
    d.cuMemAddressReserve = [](CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                               unsigned long long) {
      void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      *out = reinterpret_cast<CUdeviceptr>(memory);
      return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    };
    d.cuMemAddressFree = [](CUdeviceptr address, size_t bytes) {
      ::munmap(reinterpret_cast<void*>(address), bytes);
      return CUDA_SUCCESS;
    };
    d.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* out, void*,
                                          CUmemAllocationHandleType) {
      *out = 1;
      return CUDA_SUCCESS;
    };
    d.cuMemRelease = [](CUmemGenericAllocationHandle) { return CUDA_SUCCESS; };
    d.cuMemMap = [](CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
      return CUDA_SUCCESS;
    };
    d.cuMemUnmap = [](CUdeviceptr, size_t) { return CUDA_SUCCESS; };
    d.cuMemSetAccess = [](CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
      return CUDA_SUCCESS;
    };
    d.cuIpcCloseMemHandle = [](CUdeviceptr) {
      fakeImports().closed.fetch_add(1);
      return CUDA_SUCCESS;
    };
    return d;
  }();
  return &table;
}

/// A buffer as the application describes it, in an allocation of its own.
inline BufferRef refTo(DeviceBuffer& buffer, std::uint64_t allocationId,
                       CUresult result = CUDA_SUCCESS) {
  BufferRef ref{};
  ref.allocationId = allocationId;
  ref.allocationBase = buffer.address() - 1;  // so that the offset counts
  ref.allocationBytes = buffer.bytes() + 1;
  ref.offset = 1;
  const FakeHandle handle{buffer.address() - 1, result};
  std::memcpy(ref.ipcHandle, &handle, sizeof handle);
  return ref;
}

}  // namespace hoccl::test
