// Device-accessible memory of every kind a program may hand to NCCL, that PyTorch's allocator does
// not make. Loaded through ctypes; the CUDA run time is the shared one PyTorch has loaded, so the
// frees here are those a preloaded library sees. Functions return 0 or an error code of CUDA.

#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr int kUnknownKind = 30000;
constexpr size_t kPage = 4096;

/// An allocation and what freeing it takes.
struct Memory {
  void* address;
  size_t bytes;  // as allocated
  CUmemGenericAllocationHandle handle;
};

size_t roundedUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

int mapped(Memory* out, size_t bytes, bool exportable) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = 0;
  if (exportable) prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t granularity = 0;
  CUresult e =
      cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (e != CUDA_SUCCESS) return e;
  out->bytes = roundedUp(bytes, granularity);
  CUdeviceptr address = 0;
  e = cuMemCreate(&out->handle, out->bytes, &prop, 0);
  if (e == CUDA_SUCCESS) e = cuMemAddressReserve(&address, out->bytes, 0, 0, 0);
  if (e == CUDA_SUCCESS) e = cuMemMap(address, out->bytes, 0, out->handle, 0);
  CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (e == CUDA_SUCCESS) e = cuMemSetAccess(address, out->bytes, &access, 1);
  out->address = reinterpret_cast<void*>(address);
  return e;
}

bool is(const char* kind, const char* name) { return std::strcmp(kind, name) == 0; }

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int kindAllocate(const char* kind, size_t bytes, Memory* out) {
  *out = {nullptr, bytes, 0};
  if (is(kind, "device")) return cudaMalloc(&out->address, bytes);
  if (is(kind, "managed")) return cudaMallocManaged(&out->address, bytes);
  if (is(kind, "pinned")) return cudaHostAlloc(&out->address, bytes, cudaHostAllocDefault);
  if (is(kind, "pool")) {
    const cudaError_t e = cudaMallocAsync(&out->address, bytes, nullptr);
    return e == cudaSuccess ? cudaStreamSynchronize(nullptr) : e;
  }
  if (is(kind, "registered")) {
    out->bytes = roundedUp(bytes, kPage);
    out->address = std::aligned_alloc(kPage, out->bytes);
    if (out->address == nullptr) return cudaErrorMemoryAllocation;
    return cudaHostRegister(out->address, out->bytes, cudaHostRegisterDefault);
  }
  if (is(kind, "mapped")) return mapped(out, bytes, false);
  if (is(kind, "mapped_exportable")) return mapped(out, bytes, true);
  return kUnknownKind;
}

API int kindFree(const char* kind, Memory* memory) {
  if (is(kind, "device") || is(kind, "managed")) return cudaFree(memory->address);
  if (is(kind, "pinned")) return cudaFreeHost(memory->address);
  if (is(kind, "pool")) {
    const cudaError_t e = cudaFreeAsync(memory->address, nullptr);
    return e == cudaSuccess ? cudaStreamSynchronize(nullptr) : e;
  }
  if (is(kind, "registered")) {
    const cudaError_t e = cudaHostUnregister(memory->address);
    std::free(memory->address);
    return e;
  }
  if (is(kind, "mapped") || is(kind, "mapped_exportable")) {
    const auto address = reinterpret_cast<CUdeviceptr>(memory->address);
    CUresult e = cuMemUnmap(address, memory->bytes);
    if (e == CUDA_SUCCESS) e = cuMemRelease(memory->handle);
    if (e == CUDA_SUCCESS) e = cuMemAddressFree(address, memory->bytes);
    return e;
  }
  return kUnknownKind;
}

/// Asks for more memory than there is; 1 when that was refused as it has to be. The error is
/// cleared.
API int refusedAllocation(size_t bytes) {
  void* address = nullptr;
  const cudaError_t e = cudaMalloc(&address, bytes);
  if (e == cudaSuccess) cudaFree(address);
  return cudaGetLastError() == cudaErrorMemoryAllocation && e == cudaErrorMemoryAllocation ? 1 : 0;
}
