#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/status.h"
#include "common/net/verbs/path_set.h"
#include "common/net/verbs/queue_pair.h"
#include "common/net/verbs/verbs_settings.h"
#include "plugin-net/gpu_direct.h"

namespace hoccl::net_plugin {

/// The NICs of a device, as NCCL sees one, and how they are used.
struct VerbsGround {
  VerbsSettings settings;
  Nics nics;
  GpuDirect gpu;  ///< how they reach device memory
};

/// Memory that is registered with every NIC of a device, for all connections of that device.
/// Requests keep it, but not its registration: behind `release` their writes fail.
class RailMemory {
 public:
  /// What it is: of the host; of a GPU, by peer memory or (`fd` not -1) as a DMA-BUF.
  struct Kind {
    bool onDevice = false;
    int fd = -1;
    std::uint64_t offset = 0;
  };
  /// Pins the memory. A failure for want of locked memory names RLIMIT_MEMLOCK.
  static Status create(const VerbsGround& ground, void* data, std::uint64_t bytes, const Kind& kind,
                       std::shared_ptr<RailMemory>* out);
  /// The CPU cannot reach it.
  [[nodiscard]] bool onDevice() const { return onDevice_; }
  [[nodiscard]] bool holds(const void* data, std::uint64_t bytes) const {
    const auto at = reinterpret_cast<std::uint64_t>(data);
    return at >= base_ && bytes <= bytes_ && at - base_ <= bytes_ - bytes;
  }
  /// Registered with the NIC of each of those rails.
  [[nodiscard]] bool covers(const std::vector<std::unique_ptr<Rail>>& rails) const;
  [[nodiscard]] std::uint32_t localKey(std::uint32_t rail) const { return local_[rail]; }
  [[nodiscard]] std::uint32_t remoteKey(std::uint32_t rail) const { return remote_[rail]; }
  /// The NICs read and write it no more.
  void release() { regions_.clear(); }

 private:
  std::uint64_t base_ = 0, bytes_ = 0;
  bool onDevice_ = false;
  Nics nics_;
  std::vector<MemoryRegion> regions_;
  std::array<std::uint32_t, kMostRails> local_{}, remote_{};
};

}  // namespace hoccl::net_plugin
