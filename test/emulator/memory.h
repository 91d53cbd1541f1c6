#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "test/emulator/context.h"

namespace hoccl::emu {

enum class RegionKind {
  Device,
  Imported,
  Mapped,   ///< cuMemMap: device memory of an allocation handle
  Pool,     ///< cuMemAllocAsync
  Managed,  ///< the CPU reaches it at its address
  HostAllocated,
  HostRegistered
};

/// The bytes of some device memory: a memfd, counted against the device until the last mapping, the
/// last handle and the last exported descriptor are gone, in all processes. Those that import it
/// hold a lock on the file as long as they do, and so does a descriptor.
struct Backing {
  int fd = -1;
  std::size_t size = 0;
  int physical = 0;
  bool imported = false;     ///< another process counts it
  unsigned handleTypes = 0;  ///< CUmemAllocationHandleType it may be exported as
  bool rdmaCapable = false;
  std::uint64_t handles = 0;  ///< guarded by the registry's lock

  Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  ~Backing();
};

/// A new one; null when the device's memory is used up.
std::shared_ptr<Backing> makeBacking(int physical, std::size_t bytes);
/// One from another process's descriptor, which stays the caller's; null if it is none.
std::shared_ptr<Backing> importBacking(int fd);
/// A descriptor for another process; -1 if there is none.
int exportBacking(const Backing& backing);
/// Bytes of a device that this process has allocated.
std::uint64_t bytesUsed(int physical);
/// Another process has the file mapped.
bool mappedElsewhere(int fd);
/// Keeps `mappedElsewhere` true for others until `fd`, a description of the file's own, is closed.
void markMapped(int fd);

/// One allocation or registration. Device memory has two mappings: the addresses the application
/// gets, which the CPU cannot touch, and `view`, through which the emulator moves the bytes.
/// Queued operations hold a reference, so what they touch stays mapped.
struct Region {
  RegionKind kind = RegionKind::Device;
  std::uintptr_t base = 0;
  std::size_t size = 0;              ///< as asked for
  std::size_t mapped = 0;            ///< size in whole pages
  std::byte* view = nullptr;         ///< CPU-reachable address of `base`
  int fd = -1;                       ///< imports: the exporter's memfd
  std::shared_ptr<Backing> backing;  ///< device memory of this process
  std::uint64_t pool = 0;            ///< Pool: the CUmemoryPool
  std::atomic<std::uint64_t> access{
      ~std::uint64_t{0}};  ///< Mapped: devices (physical) that may use it
  std::uint64_t id = 0;    ///< CU_POINTER_ATTRIBUTE_BUFFER_ID, never used twice
  Context* context = nullptr;
  int ordinal = 0;   ///< device the memory is on, or whose context registered it
  int physical = 0;  ///< the same, machine-wide
  unsigned flags = 0;
  std::atomic<bool> syncMemops{false};
  unsigned opened = 0;           ///< imports: how often; guarded by the registry's lock
  std::uint64_t exportedId = 0;  ///< imports: the exporter's inode

  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  [[nodiscard]] bool isDevice() const {
    return kind != RegionKind::HostAllocated && kind != RegionKind::HostRegistered;
  }
  [[nodiscard]] bool contains(std::uintptr_t address, std::size_t bytes) const {
    return address >= base && bytes <= size && address - base <= size - bytes;
  }
  [[nodiscard]] std::byte* at(std::uintptr_t address) const { return view + (address - base); }
};

/// All regions of the process by address.
namespace regions {
std::shared_ptr<Region> find(std::uintptr_t address);
/// False if the range overlaps a known one.
bool insert(std::shared_ptr<Region> region);
/// Takes the region that begins at `base` out of the table if it is of the kind; null otherwise.
std::shared_ptr<Region> remove(std::uintptr_t base, RegionKind kind);
/// All regions that touch the range.
std::vector<std::shared_ptr<Region>> within(std::uintptr_t base, std::size_t bytes);
/// Takes out everything of a context.
void removeAllOf(Context* context);
std::uint64_t newId();
/// The import of the exporter's inode `exportedId` if it is already open, its count raised.
std::shared_ptr<Region> reopen(std::uint64_t exportedId, Context* context);
/// Lowers an import's count and takes it out at zero; false if `base` is no import.
bool closeImport(std::uintptr_t base);
}  // namespace regions

/// Maps `fd` as device memory (both mappings) into `region`; false when out of memory.
bool mapDeviceMemory(Region* region, int fd, std::size_t size);
/// Maps `fd` at the addresses `base` that the caller has reserved.
bool mapAt(Region* region, int fd, std::uintptr_t base, std::size_t size);
struct Range {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
};
/// The range of cuMemAddressReserve that the address lies in; nothing without one.
Range reservationOf(std::uintptr_t address);
/// The ordinal of a physical device in this process, or `otherwise` if it is not visible.
int ordinalOf(int physical, int otherwise);

}  // namespace hoccl::emu
