#include "common/gpu/buffer.h"

#include <fmt/format.h>

#include <memory>

#include "common/base/associative_cache.h"
#include "common/gpu/exported_allocations.h"

namespace hoccl {
namespace {

/// The driver never gives an identity twice: an entry cannot go stale.
struct AllocationId {
  std::uint64_t id = 0;
  bool operator==(const AllocationId&) const = default;
  [[nodiscard]] std::uint64_t hash() const { return spreadBits(id); }
};

struct CachedExport {
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  bool segments = false;
  CUipcMemHandle handle{};
};

using ExportCache = AssociativeCache<AllocationId, CachedExport, 128, 8>;

ExportCache& exportCache() {
  thread_local std::unique_ptr<ExportCache> cache;
  if (!cache) cache = std::make_unique<ExportCache>();
  return *cache;
}

/// Looks an allocation up that this thread has not seen, or whose place another one has taken.
Status exportAllocation(const Driver* driver, CUcontext context, CUdeviceptr address,
                        std::uint64_t id, CachedExport* out) {
  const ContextGuard guard(driver, context);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  int capable = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                 CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                 CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* values[] = {&base, &size, &capable};
  CUipcMemHandle handle{};
  if (driver->cuPointerGetAttributes(3, names, values, address) != CUDA_SUCCESS || !capable ||
      driver->cuIpcGetMemHandle(&handle, base) != CUDA_SUCCESS) {
    const void* pointer = reinterpret_cast<const void*>(address);
    if (!foreignMemory(driver, pointer).segments) return cannotBeMapped(driver, pointer);
    *out = {base, size, true, {}};
    return {};
  }
  *out = {base, size, false, handle};
  ExportedAllocations::ofThisProcess().add(base, size, id);
  return {};
}

}  // namespace

ForeignMemory foreignMemory(const Driver* driver, const void* pointer) {
  unsigned type = 0;
  int managed = 0;
  void* pool = nullptr;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
  void* values[] = {&type, &managed, &pool};
  if (driver->cuPointerGetAttributes(3, names, values, reinterpret_cast<CUdeviceptr>(pointer)) !=
      CUDA_SUCCESS) {
    return {};
  }
  if (managed) return {true, false, false, "managed memory"};
  if (type == CU_MEMORYTYPE_HOST) return {true, true, false, "host memory"};
  if (pool) return {true, false, false, "memory of a stream-ordered pool (cudaMallocAsync)"};
  if (type != CU_MEMORYTYPE_DEVICE) return {};
  return {true, false, true,
          "virtual memory management (cuMemCreate; PyTorch's expandable_segments)"};
}

Status cannotBeMapped(const Driver* driver, const void* pointer) {
  return Status::error(Code::Unsupported,
                       fmt::format("the buffer at {} is {}, which the mover cannot map", pointer,
                                   foreignMemory(driver, pointer).name));
}

Status exportBuffer(const Driver* driver, CUcontext context, const void* pointer,
                    std::uint64_t bytes, ExportedBuffer* out) {
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  std::uint64_t id = 0;
  if (driver->cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address) != CUDA_SUCCESS ||
      id == 0) {
    return cannotBeMapped(driver, pointer);
  }
  const CachedExport* known = exportCache().find({id});
  if (!known) {
    CachedExport fresh;
    HOCCL_RETURN_IF_ERROR(exportAllocation(driver, context, address, id, &fresh));
    known = &exportCache().insert({id}, fresh);
  }
  const CachedExport& cached = *known;
  out->segments = cached.segments;
  out->allocationId = id;
  if (cached.segments) return {};
  if (address < cached.base || address - cached.base > cached.bytes ||
      bytes > cached.bytes - (address - cached.base)) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("{} bytes at {} reach beyond their allocation of {} bytes at "
                                     "{:#x}",
                                     bytes, pointer, cached.bytes, cached.base));
  }
  out->base = cached.base;
  out->allocationBytes = cached.bytes;
  out->offset = address - cached.base;
  out->handle = &cached.handle;
  return {};
}

}  // namespace hoccl
