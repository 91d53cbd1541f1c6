#include "test/emulator/allocation.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/faults.h"
#include "test/emulator/hoccl_emu.h"
#include "test/emulator/memory.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {

std::shared_ptr<Region> newRegion(RegionKind kind, Context& context, unsigned flags) {
  auto region = std::make_shared<Region>();
  region->kind = kind;
  region->context = &context;
  region->ordinal = context.ordinal;
  region->physical = context.physical;
  region->flags = flags;
  return region;
}

std::shared_ptr<Region> allocateDevice(RegionKind kind, Context& context, std::size_t bytes) {
  auto region = newRegion(kind, context, 0);
  region->backing = makeBacking(context.physical, bytes);
  const bool done = region->backing != nullptr &&
                    mapDeviceMemory(region.get(), region->backing->fd, bytes) &&
                    regions::insert(region);
  return done ? region : nullptr;
}

namespace {

/// True if every page of the range is mapped in this process.
bool isMapped(std::uintptr_t address, std::size_t bytes) {
  const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = address / page * page;
  const std::size_t pages = (address + bytes - first + page - 1) / page;
  std::vector<unsigned char> resident(pages);
  return mincore(reinterpret_cast<void*>(first), pages * page, resident.data()) == 0;
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
  return allocationCall([&](Context& context) -> CUresult {
    if (out == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const auto region = allocateDevice(RegionKind::Device, context, bytes);
    if (region == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = region->base;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  return allocationCall([&](Context&) -> CUresult {
    if (pointer == 0) return CUDA_SUCCESS;
    const std::shared_ptr<Region> region = regions::find(pointer);
    if (region == nullptr || region->base != pointer) return CUDA_ERROR_INVALID_VALUE;
    const RegionKind kind = region->kind;
    if (kind != RegionKind::Device && kind != RegionKind::Pool && kind != RegionKind::Managed)
      return CUDA_ERROR_INVALID_VALUE;
    delayCall();
    Scheduler::get().whileQuiet(region->context, [&] { regions::remove(pointer, kind); });
    return CUDA_SUCCESS;
  });
}

/// Its bytes are reached by the CPU at the same address, and count as the device's.
CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned int flags) {
  return allocationCall([&](Context& context) -> CUresult {
    if (out == nullptr || bytes == 0 ||
        (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
      return CUDA_ERROR_INVALID_VALUE;
    auto region = newRegion(RegionKind::Managed, context, 0);
    region->backing = makeBacking(context.physical, bytes);
    if (region->backing == nullptr || !mapAt(region.get(), region->backing->fd, 0, bytes))
      return CUDA_ERROR_OUT_OF_MEMORY;
    region->base = reinterpret_cast<std::uintptr_t>(region->view);
    if (!regions::insert(region)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = region->base;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return contextCall([&](Context& context) -> CUresult {
    if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *total = settings().memoryBytes;
    *free = *total - bytesUsed(context.physical);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned int flags) {
  return allocationCall([&](Context& context) -> CUresult {
    constexpr unsigned kKnown =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if (out == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto region = newRegion(RegionKind::HostAllocated, context, flags);
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    region->size = bytes;
    region->mapped = (bytes + page - 1) / page * page;
    void* memory =
        mmap(nullptr, region->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    region->view = static_cast<std::byte*>(memory);
    region->base = reinterpret_cast<std::uintptr_t>(memory);
    if (!regions::insert(region)) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = memory;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocHost_v2(void** out, size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

CUresult cuMemFreeHost(void* pointer) {
  return allocationCall([&](Context&) -> CUresult {
    const auto base = reinterpret_cast<std::uintptr_t>(pointer);
    const std::shared_ptr<Region> region = regions::find(base);
    if (region == nullptr || region->base != base || region->kind != RegionKind::HostAllocated)
      return CUDA_ERROR_INVALID_VALUE;
    delayCall();
    Scheduler::get().whileQuiet(region->context,
                                [&] { regions::remove(base, RegionKind::HostAllocated); });
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  return allocationCall([&](Context& context) -> CUresult {
    constexpr unsigned kKnown =
        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
    if ((flags & CU_MEMHOSTREGISTER_IOMEMORY) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (pointer == nullptr || bytes == 0 || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (!isMapped(reinterpret_cast<std::uintptr_t>(pointer), bytes))
      return CUDA_ERROR_INVALID_VALUE;
    auto region = newRegion(RegionKind::HostRegistered, context, flags);
    region->base = reinterpret_cast<std::uintptr_t>(pointer);
    region->size = bytes;
    region->view = static_cast<std::byte*>(pointer);
    return regions::insert(region) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  });
}

/// Waits for operations that use the memory: the application may unmap it right after.
CUresult cuMemHostUnregister(void* pointer) {
  return allocationCall([&](Context&) -> CUresult {
    const auto base = reinterpret_cast<std::uintptr_t>(pointer);
    const std::shared_ptr<Region> region = regions::remove(base, RegionKind::HostRegistered);
    if (region == nullptr) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    Scheduler::get().waitUnused(region);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* pointer, unsigned int flags) {
  return contextCall([&](Context&) -> CUresult {
    if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto region = regions::find(reinterpret_cast<std::uintptr_t>(pointer));
    if (region == nullptr || region->isDevice()) return CUDA_ERROR_INVALID_VALUE;
    *out = reinterpret_cast<CUdeviceptr>(pointer);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostGetFlags(unsigned int* flags, void* pointer) {
  return contextCall([&](Context&) -> CUresult {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto region = regions::find(reinterpret_cast<std::uintptr_t>(pointer));
    if (region == nullptr || region->isDevice()) return CUDA_ERROR_INVALID_VALUE;
    *flags = region->flags | CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  return contextCall([&](Context&) -> CUresult {
    const auto region = regions::find(pointer);
    if (region == nullptr) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = region->base;
    if (bytes != nullptr) *bytes = region->size;
    return CUDA_SUCCESS;
  });
}

void* hocclEmuHostView(CUdeviceptr pointer) {
  if (!initialised()) return nullptr;
  const auto region = regions::find(pointer);
  return region == nullptr ? nullptr : region->at(pointer);
}

}  // extern "C"
