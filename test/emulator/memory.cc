#include "test/emulator/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

namespace hoccl::emu {
namespace {

std::shared_mutex gMutex;
// Never destroyed: other threads may still look up while the process ends.
auto& table() {
  static auto* map = new std::map<std::uintptr_t, std::shared_ptr<Region>>;
  return *map;
}
std::atomic<std::uint64_t> gNextId{1};

}  // namespace

Region::~Region() {
  switch (kind) {
    case RegionKind::Device:
    case RegionKind::Imported:
    case RegionKind::Pool:
      if (view != nullptr) munmap(view, mapped);
      if (base != 0) munmap(reinterpret_cast<void*>(base), mapped);
      break;
    case RegionKind::Mapped:  // the addresses stay reserved
    case RegionKind::Managed:
    case RegionKind::HostAllocated:
      if (view != nullptr) munmap(view, mapped);
      break;
    case RegionKind::HostRegistered:
      break;
  }
  if (fd >= 0) close(fd);
}

bool mapAt(Region* region, int fd, std::uintptr_t base, std::size_t size) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  region->size = size;
  region->mapped = (size + page - 1) / page * page;
  region->base = base;
  void* view =
      mmap(nullptr, region->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (view == MAP_FAILED) return false;
  region->view = static_cast<std::byte*>(view);
  return true;
}

bool mapDeviceMemory(Region* region, int fd, std::size_t size) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  region->mapped = (size + page - 1) / page * page;
  // The application's addresses: reserved, so that nothing else gets them, and out of the CPU's
  // reach.
  void* addresses =
      mmap(nullptr, region->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) return false;
  return mapAt(region, fd, reinterpret_cast<std::uintptr_t>(addresses), size);
}

int ordinalOf(int physical, int otherwise) {
  for (int i = 0; i < deviceCount(); ++i)
    if (contextOf(i)->physical == physical) return i;
  return otherwise;
}

namespace regions {

std::shared_ptr<Region> find(std::uintptr_t address) {
  std::shared_lock lock(gMutex);
  auto after = table().upper_bound(address);
  if (after == table().begin()) return nullptr;
  const std::shared_ptr<Region>& region = std::prev(after)->second;
  return address - region->base < region->size ? region : nullptr;
}

bool insert(std::shared_ptr<Region> region) {
  std::unique_lock lock(gMutex);
  auto after = table().lower_bound(region->base);
  if (after != table().end() && after->first - region->base < region->size) return false;
  if (after != table().begin()) {
    const Region& before = *std::prev(after)->second;
    if (region->base - before.base < before.size) return false;
  }
  region->id = newId();
  table().emplace(region->base, std::move(region));
  return true;
}

std::shared_ptr<Region> remove(std::uintptr_t base, RegionKind kind) {
  std::unique_lock lock(gMutex);
  auto found = table().find(base);
  if (found == table().end() || found->second->kind != kind) return nullptr;
  std::shared_ptr<Region> region = std::move(found->second);
  table().erase(found);
  return region;
}

std::vector<std::shared_ptr<Region>> within(std::uintptr_t base, std::size_t bytes) {
  std::vector<std::shared_ptr<Region>> found;
  std::shared_lock lock(gMutex);
  auto it = table().lower_bound(base);
  if (it != table().begin()) {
    const auto& before = std::prev(it)->second;
    if (base - before->base < before->size) found.push_back(before);
  }
  for (; it != table().end() && it->first - base < bytes; ++it) found.push_back(it->second);
  return found;
}

void removeAllOf(Context* context) {
  std::vector<std::shared_ptr<Region>> dropped;  // unmapped after the lock is released
  std::unique_lock lock(gMutex);
  for (auto it = table().begin(); it != table().end();) {
    if (it->second->context == context) {
      dropped.push_back(std::move(it->second));
      it = table().erase(it);
    } else {
      ++it;
    }
  }
}

std::uint64_t newId() { return gNextId.fetch_add(1, std::memory_order_relaxed); }

std::shared_ptr<Region> reopen(std::uint64_t exportedId, Context* context) {
  std::unique_lock lock(gMutex);
  for (auto& [base, region] : table()) {
    if (region->kind == RegionKind::Imported && region->exportedId == exportedId &&
        region->context == context) {
      ++region->opened;
      return region;
    }
  }
  return nullptr;
}

bool closeImport(std::uintptr_t base) {
  std::shared_ptr<Region> dropped;
  std::unique_lock lock(gMutex);
  auto found = table().find(base);
  if (found == table().end() || found->second->kind != RegionKind::Imported) return false;
  if (--found->second->opened > 0) return true;
  dropped = std::move(found->second);
  table().erase(found);
  return true;
}

}  // namespace regions
}  // namespace hoccl::emu
