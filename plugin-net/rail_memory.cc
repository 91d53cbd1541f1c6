#include "plugin-net/rail_memory.h"

namespace hoccl::net_plugin {

Status RailMemory::create(const VerbsGround& ground, void* data, std::uint64_t bytes,
                          const Kind& kind, std::shared_ptr<RailMemory>* out) {
  const unsigned also = kind.onDevice ? IBV_ACCESS_REMOTE_READ : 0;  // flushed by a read

  auto memory = std::make_shared<RailMemory>();
  memory->base_ = reinterpret_cast<std::uint64_t>(data);
  memory->bytes_ = bytes;
  memory->onDevice_ = kind.onDevice;
  memory->nics_ = ground.nics;
  for (const auto& nic : ground.nics) {
    MemoryRegion region;
    Status status = kind.fd >= 0
                        ? MemoryRegion::createDmaBuf(*nic, ground.settings, data, bytes, kind.fd,
                                                     kind.offset, &region, also)
                        : MemoryRegion::create(*nic, ground.settings, data, bytes, &region, also);
    if (!status) return status;
    const std::size_t rail = memory->regions_.size();
    memory->local_[rail] = region.localKey();
    memory->remote_[rail] = region.remoteKey();
    memory->regions_.push_back(std::move(region));
  }
  *out = std::move(memory);
  return {};
}

bool RailMemory::covers(const std::vector<std::unique_ptr<Rail>>& rails) const {
  if (rails.size() > nics_.size()) return false;
  for (std::size_t i = 0; i < rails.size(); ++i) {
    if (rails[i]->nic != nics_[i]) return false;
  }
  return true;
}

}  // namespace hoccl::net_plugin
