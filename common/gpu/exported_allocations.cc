#include "common/gpu/exported_allocations.h"

#include <algorithm>
#include <iterator>

namespace hoccl {

ExportedAllocations& ExportedAllocations::ofThisProcess() {
  static auto* all = new ExportedAllocations;
  return *all;
}

void ExportedAllocations::add(CUdeviceptr base, std::size_t bytes, std::uint64_t id) {
  std::lock_guard lock(mutex_);
  // Whatever overlaps has been freed without being seen; the movers notice by the same sign.
  auto position = byBase_.lower_bound(base);
  if (position != byBase_.begin()) {
    auto before = std::prev(position);
    if (base - before->first < before->second.bytes) position = before;
  }
  while (position != byBase_.end() && position->first < base + bytes) {
    position = byBase_.erase(position);
  }
  byBase_.insert_or_assign(base, Allocation{bytes, id});
}

std::vector<std::uint64_t> ExportedAllocations::take(CUdeviceptr address, std::size_t bytes) {
  const std::size_t reach = std::max<std::size_t>(bytes, 1);
  std::vector<std::uint64_t> taken;
  std::lock_guard lock(mutex_);
  for (auto i = byBase_.lower_bound(address); i != byBase_.end() && i->first - address < reach;) {
    taken.push_back(i->second.id);
    i = byBase_.erase(i);
  }
  return taken;
}

std::size_t ExportedAllocations::size() const {
  std::lock_guard lock(mutex_);
  return byBase_.size();
}

}  // namespace hoccl
