#include "common/gpu/buffer.h"

#include <fmt/format.h>

#include <array>
#include <memory>

namespace hoccl {
namespace {

constexpr std::size_t kCacheEntries = 256;  // power of two

struct CachedExport {
  std::uint64_t allocationId = 0;
  CUdeviceptr base = 0;
  CUipcMemHandle handle{};
};

/// Direct-mapped by allocation identity, which the driver never gives twice: an entry cannot go stale.
CachedExport& cacheEntry(std::uint64_t allocationId) {
  thread_local std::unique_ptr<std::array<CachedExport, kCacheEntries>> cache;
  if (!cache) cache = std::make_unique<std::array<CachedExport, kCacheEntries>>();
  return (*cache)[allocationId % kCacheEntries];
}

Status notExportable(const Driver* driver, const void* pointer) {
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  unsigned type = 0;
  int managed = 0;
  void* pool = nullptr;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
  void* values[] = {&type, &managed, &pool};
  const char* kind = "memory CUDA does not know";
  if (driver->cuPointerGetAttributes(3, names, values, address) == CUDA_SUCCESS) {
    if (managed) {
      kind = "managed memory";
    } else if (type == CU_MEMORYTYPE_HOST) {
      kind = "host memory";
    } else if (pool) {
      kind = "memory of a stream-ordered pool (cudaMallocAsync)";
    } else if (type == CU_MEMORYTYPE_DEVICE) {
      kind = "virtual memory management (cuMemCreate; PyTorch's expandable_segments)";
    }
  }
  return Status::error(
      Code::Unsupported,
      fmt::format("the buffer at {} is {}, which the mover cannot map: only cudaMalloc memory can be "
                  "steered. Use such memory, or HOCCL_STEER=0 for this job",
                  pointer, kind));
}

}  // namespace

Status exportBuffer(const Driver* driver, const void* pointer, std::uint64_t bytes,
                    ExportedBuffer* out) {
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  std::uint64_t id = 0;
  CUdeviceptr base = 0;
  std::size_t size = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                 CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&id, &base, &size};
  if (driver->cuPointerGetAttributes(3, names, values, address) != CUDA_SUCCESS || id == 0) {
    return notExportable(driver, pointer);
  }
  if (address < base || address - base > size || bytes > size - (address - base)) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("{} bytes at {} reach beyond their allocation of {} bytes at "
                                     "{:#x}",
                                     bytes, pointer, size, base));
  }
  CachedExport& cached = cacheEntry(id);
  if (cached.allocationId != id || cached.base != base) {
    int capable = 0;
    CUpointer_attribute name = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    void* value = &capable;
    CUipcMemHandle handle{};
    if (driver->cuPointerGetAttributes(1, &name, &value, address) != CUDA_SUCCESS || !capable ||
        driver->cuIpcGetMemHandle(&handle, base) != CUDA_SUCCESS) {
      return notExportable(driver, pointer);
    }
    cached = {id, base, handle};
  }
  out->allocationId = id;
  out->base = base;
  out->allocationBytes = size;
  out->offset = address - base;
  out->handle = cached.handle;
  return {};
}

}  // namespace hoccl
