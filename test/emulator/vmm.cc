// Virtual memory management: reserved addresses, allocation handles, mappings of the one to the
// other. Each mapping is a region: one BUFFER_ID and one address range, as with the driver (FACTS
// 6).

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "test/emulator/allocation.h"
#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/faults.h"
#include "test/emulator/memory.h"

namespace hoccl::emu {
namespace {

constexpr std::size_t kGranularity = 2 << 20;
using Handle = CUmemGenericAllocationHandle;

std::mutex gMutex;
// Never destroyed: other threads may still call while the process ends.
auto& handles() {
  static auto* map = new std::map<Handle, std::shared_ptr<Backing>>;
  return *map;
}
auto& reservations() {
  static auto* map = new std::map<std::uintptr_t, std::size_t>;
  return *map;
}
Handle gNextHandle = 1;

/// A new reference to the backing. Retained handles are equal to the one they were made with.
Handle addHandle(const std::shared_ptr<Backing>& backing) {
  std::lock_guard lock(gMutex);
  for (auto& [handle, known] : handles()) {
    if (known != backing) continue;
    ++backing->handles;
    return handle;
  }
  backing->handles = 1;
  handles().emplace(gNextHandle, backing);
  return gNextHandle++;
}

std::shared_ptr<Backing> backingOf(Handle handle) {
  std::lock_guard lock(gMutex);
  const auto found = handles().find(handle);
  return found == handles().end() ? nullptr : found->second;
}

bool isReserved(std::uintptr_t address, std::size_t bytes) {
  const Range range = reservationOf(address);
  return range.bytes > 0 && bytes <= range.bytes - (address - range.base);
}

/// The mappings that make up exactly the range; empty if they do not.
std::vector<std::shared_ptr<Region>> mappingsOf(std::uintptr_t address, std::size_t bytes) {
  std::vector<std::shared_ptr<Region>> regions = regions::within(address, bytes);
  std::uintptr_t next = address;
  for (const auto& region : regions) {
    if (region->kind != RegionKind::Mapped || region->base != next) return {};
    next += region->size;
  }
  if (next != address + bytes) return {};
  return regions;
}

/// What a fabric handle holds here: where its maker keeps the memory, and which file that is.
struct FabricHandle {
  std::int32_t pid, fd;
  std::uint64_t inode;
};
static_assert(sizeof(FabricHandle) <= sizeof(CUmemFabricHandle));

CUresult fabricHandleOf(const Backing& backing, CUmemFabricHandle* out) {
  struct stat file {};
  if (fstat(backing.fd, &file) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const FabricHandle handle{getpid(), backing.fd, file.st_ino};
  *out = {};
  std::memcpy(out, &handle, sizeof handle);
  return CUDA_SUCCESS;
}

std::shared_ptr<Backing> backingOfFabric(const CUmemFabricHandle* bytes) {
  FabricHandle handle{};
  std::memcpy(&handle, bytes, sizeof handle);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  struct stat file {};
  if (stat(path, &file) != 0 || file.st_ino != handle.inode) return nullptr;
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  auto backing = importBacking(fd);
  close(fd);
  return backing;
}

/// The device of a location, or null.
Context* contextAt(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? contextOf(location.id) : nullptr;
}

}  // namespace

Range reservationOf(std::uintptr_t address) {
  std::lock_guard lock(gMutex);
  const auto after = reservations().upper_bound(address);
  if (after == reservations().begin()) return {};
  const auto& [base, size] = *std::prev(after);
  return address - base < size ? Range{base, size} : Range{};
}

}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr || properties == nullptr || contextAt(properties->location) == nullptr)
      return CUDA_ERROR_INVALID_VALUE;
    *out = kGranularity;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  return driverCall([&]() -> CUresult {
    const std::size_t grain = alignment > kGranularity ? alignment : kGranularity;
    if (out == nullptr || flags != 0 || bytes == 0 || bytes % kGranularity != 0 ||
        (grain & (grain - 1)) != 0)
      return CUDA_ERROR_INVALID_VALUE;
    // Reserved with room to align, and the room given back.
    void* memory =
        mmap(nullptr, bytes + grain, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const auto raw = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t base = (raw + grain - 1) / grain * grain;
    if (base > raw) munmap(memory, base - raw);
    if (raw + grain > base) munmap(reinterpret_cast<void*>(base + bytes), raw + grain - base);
    std::lock_guard lock(gMutex);
    reservations().emplace(base, bytes);
    *out = base;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  return driverCall([&]() -> CUresult {
    if (!regions::within(pointer, bytes).empty()) return CUDA_ERROR_INVALID_VALUE;
    {
      std::lock_guard lock(gMutex);
      const auto found = reservations().find(pointer);
      if (found == reservations().end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
      reservations().erase(found);
    }
    munmap(reinterpret_cast<void*>(pointer), bytes);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr || properties == nullptr || flags != 0 || bytes == 0 ||
        bytes % kGranularity != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
      return CUDA_ERROR_INVALID_VALUE;
    Context* context = contextAt(properties->location);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
    const unsigned kKnown = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR |
                            (settings().fabric ? unsigned{CU_MEM_HANDLE_TYPE_FABRIC} : 0u);
    const auto types = static_cast<unsigned>(properties->requestedHandleTypes);
    if ((types & ~kKnown) != 0)
      return types & CU_MEM_HANDLE_TYPE_FABRIC ? CUDA_ERROR_NOT_PERMITTED
                                               : CUDA_ERROR_NOT_SUPPORTED;
    const auto backing = makeBacking(context->physical, bytes);
    if (backing == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    backing->handleTypes = types;
    backing->rdmaCapable = properties->allocFlags.gpuDirectRDMACapable != 0;
    *out = addHandle(backing);
    return CUDA_SUCCESS;
  });
}

/// The memory stays while something maps it.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return driverCall([&]() -> CUresult {
    delayCall();
    std::shared_ptr<Backing> dropped;  // unmapped after the lock is released
    std::lock_guard lock(gMutex);
    const auto found = handles().find(handle);
    if (found == handles().end()) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second->handles > 0) return CUDA_SUCCESS;
    dropped = std::move(found->second);
    handles().erase(found);
    return CUDA_SUCCESS;
  });
}

/// Nothing may use the memory before cuMemSetAccess.
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return driverCall([&]() -> CUresult {
    const auto backing = backingOf(handle);
    if (backing == nullptr || flags != 0 || offset != 0 || bytes != backing->size ||
        pointer % kGranularity != 0 || !isReserved(pointer, bytes))
      return CUDA_ERROR_INVALID_VALUE;
    const int ordinal = ordinalOf(backing->physical, 0);
    auto region = newRegion(RegionKind::Mapped, *contextOf(ordinal), 0);
    region->physical = backing->physical;
    region->backing = backing;
    region->access = 0;
    if (!mapAt(region.get(), backing->fd, pointer, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    return regions::insert(region) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

/// Operations still queued on the mapping keep it until they are done. With the real driver they
/// would fault.
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  return driverCall([&]() -> CUresult {
    delayCall();
    const auto mappings = mappingsOf(pointer, bytes);
    if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& mapping : mappings) regions::remove(mapping->base, RegionKind::Mapped);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* descriptions,
                        size_t count) {
  return driverCall([&]() -> CUresult {
    const auto mappings = mappingsOf(pointer, bytes);
    if (mappings.empty() || descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < count; ++i) {
      const Context* context = contextAt(descriptions[i].location);
      if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
      const std::uint64_t bit = std::uint64_t{1} << context->physical;
      for (const auto& mapping : mappings) {
        const int home = mapping->backing->physical;
        if (home != context->physical && !reachEachOther(home, context->physical))
          return CUDA_ERROR_INVALID_DEVICE;
        if (descriptions[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
          mapping->access &= ~bit;
        else
          mapping->access |= bit;
      }
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr pointer) {
  return driverCall([&]() -> CUresult {
    const auto region = regions::find(pointer);
    if (flags == nullptr || location == nullptr || region == nullptr ||
        region->kind != RegionKind::Mapped)
      return CUDA_ERROR_INVALID_VALUE;
    const Context* context = contextAt(*location);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    *flags = (region->access >> context->physical) & 1 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                       : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  return driverCall([&]() -> CUresult {
    const auto backing = backingOf(handle);
    if (out == nullptr || backing == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (fabric && !settings().fabric) return CUDA_ERROR_NOT_PERMITTED;
    if (!fabric && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      return CUDA_ERROR_NOT_SUPPORTED;
    if ((backing->handleTypes & type) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (fabric) return fabricHandleOf(*backing, static_cast<CUmemFabricHandle*>(out));
    const int fd = exportBacking(*backing);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int*>(out) = fd;
    return CUDA_SUCCESS;
  });
}

/// The descriptor stays the caller's. Unlike with cudaIpc handles, a process may import its own.
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* osHandle,
                                        CUmemAllocationHandleType type) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
    if (fabric && !settings().fabric) return CUDA_ERROR_NOT_PERMITTED;
    if (!fabric && type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      return CUDA_ERROR_NOT_SUPPORTED;
    if (refuseImport()) return CUDA_ERROR_MAP_FAILED;
    delayCall();
    const auto backing =
        fabric ? backingOfFabric(static_cast<const CUmemFabricHandle*>(osHandle))
               : importBacking(static_cast<int>(reinterpret_cast<std::intptr_t>(osHandle)));
    if (backing == nullptr) return CUDA_ERROR_INVALID_VALUE;
    backing->handleTypes = 0;  // as measured: what was imported cannot be exported again
    *out = addHandle(backing);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* address) {
  return driverCall([&]() -> CUresult {
    const auto region = regions::find(reinterpret_cast<std::uintptr_t>(address));
    if (out == nullptr || region == nullptr || region->kind != RegionKind::Mapped)
      return CUDA_ERROR_INVALID_VALUE;
    *out = addHandle(region->backing);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* out,
                                                CUmemGenericAllocationHandle handle) {
  return driverCall([&]() -> CUresult {
    const auto backing = backingOf(handle);
    if (out == nullptr || backing == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = {};
    out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    out->requestedHandleTypes = static_cast<CUmemAllocationHandleType>(backing->handleTypes);
    out->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    out->location.id = ordinalOf(backing->physical, -1);
    out->allocFlags.gpuDirectRDMACapable = backing->rdmaCapable ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
