// Memory pools: what cudaMallocAsync needs. A pool here is an identity; freed memory goes back at
// once, in stream order.

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "test/emulator/allocation.h"
#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/memory.h"

namespace hoccl::emu {
namespace {

struct Pool {
  int ordinal = 0;
  std::uint64_t releaseThreshold = 0;
};

std::mutex gMutex;
// Never destroyed: other threads may still call while the process ends.
auto& pools() {
  static auto* list = new std::vector<std::unique_ptr<Pool>>;
  return *list;
}
// The default and the current pool of each device.
auto& defaults() {
  static auto* map = new std::map<int, std::pair<Pool*, Pool*>>;
  return *map;
}

Pool* addPool(int ordinal) {
  pools().push_back(std::make_unique<Pool>());
  pools().back()->ordinal = ordinal;
  return pools().back().get();
}

/// Call with the lock held.
std::pair<Pool*, Pool*>& poolsOf(int ordinal) {
  auto [entry, isNew] = defaults().try_emplace(ordinal);
  if (isNew) entry->second.first = entry->second.second = addPool(ordinal);
  return entry->second;
}

/// Call with the lock held.
Pool* poolFrom(CUmemoryPool handle) {
  for (auto& pool : pools())
    if (reinterpret_cast<CUmemoryPool>(pool.get()) == handle) return pool.get();
  return nullptr;
}

CUresult allocate(CUdeviceptr* out, std::size_t bytes, CUstream handle, CUmemoryPool chosen) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (out == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    // A captured allocation would be a node of the graph, which the emulator does not run.
    if (const CUresult allowed = checkNotCapturing(stream); allowed != CUDA_SUCCESS) return allowed;
    Context* context = stream->context;
    {
      std::lock_guard lock(gMutex);
      const Pool* pool = chosen != nullptr ? poolFrom(chosen) : poolsOf(context->ordinal).second;
      if (pool == nullptr) return CUDA_ERROR_INVALID_VALUE;
      if (chosen == nullptr) chosen = reinterpret_cast<CUmemoryPool>(const_cast<Pool*>(pool));
      context = contextOf(pool->ordinal);
    }
    const auto region = allocateDevice(RegionKind::Pool, *context, bytes);
    if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    region->pool = reinterpret_cast<std::uintptr_t>(chosen);
    *out = region->base;
    return CUDA_SUCCESS;
  });
}

template <typename Body>
CUresult poolCall(CUmemoryPool handle, Body&& body) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(gMutex);
    Pool* pool = poolFrom(handle);
    return pool == nullptr ? CUDA_ERROR_INVALID_VALUE : body(pool);
  });
}

CUresult getPool(CUmemoryPool* out, CUdevice device, bool current) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (contextOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(gMutex);
    const auto& both = poolsOf(device);
    *out = reinterpret_cast<CUmemoryPool>(current ? both.second : both.first);
    return CUDA_SUCCESS;
  });
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream stream) {
  return allocate(out, bytes, stream, nullptr);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool pool,
                                 CUstream stream) {
  return pool == nullptr ? CUDA_ERROR_INVALID_VALUE : allocate(out, bytes, stream, pool);
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    const auto region = regions::find(pointer);
    if (region == nullptr || region->base != pointer || region->kind != RegionKind::Pool)
      return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult allowed = checkNotCapturing(stream); allowed != CUDA_SUCCESS) return allowed;
    std::vector<Op> ops(1);
    ops[0].kind = OpKind::Free;
    ops[0].region = region;
    return Scheduler::get().submit(stream, std::move(ops));
  });
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice device) {
  return getPool(out, device, false);
}
CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice device) {
  return getPool(out, device, true);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  return poolCall(handle, [&](Pool* pool) -> CUresult {
    if (contextOf(device) == nullptr || pool->ordinal != device) return CUDA_ERROR_INVALID_DEVICE;
    poolsOf(device).second = pool;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* properties) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr || properties == nullptr ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
      return CUDA_ERROR_INVALID_VALUE;
    if (contextOf(properties->location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
    std::lock_guard lock(gMutex);
    *out = reinterpret_cast<CUmemoryPool>(addPool(properties->location.id));
    return CUDA_SUCCESS;
  });
}

/// Allocations of the pool stay until they are freed.
CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  return poolCall(handle, [&](Pool* pool) -> CUresult {
    auto& both = poolsOf(pool->ordinal);
    if (both.first == pool) return CUDA_ERROR_INVALID_VALUE;
    if (both.second == pool) both.second = both.first;
    std::erase_if(pools(), [&](const auto& other) { return other.get() == pool; });
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t) {
  return poolCall(handle, [](Pool*) { return CUDA_SUCCESS; });
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  return poolCall(handle, [&](Pool* pool) -> CUresult {
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
      pool->releaseThreshold = *static_cast<cuuint64_t*>(value);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void* value) {
  return poolCall(handle, [&](Pool* pool) -> CUresult {
    if (value == nullptr || attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
      return CUDA_ERROR_INVALID_VALUE;
    *static_cast<cuuint64_t*>(value) = pool->releaseThreshold;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
