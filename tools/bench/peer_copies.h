#pragma once

#include <map>
#include <vector>

#include "common/gpu/peer_memory.h"
#include "tools/bench/copy_set.h"
#include "tools/bench/rank_device.h"

namespace hoccl::bench {

/// The copies of a direct operation: each block that the rank sends to another one goes from its
/// GPU to memory on that rank's, in the order of the layout, in one copy. What it has for itself is
/// not copied: that would be a kernel.
class PeerCopies final : public CopySet {
 public:
  PeerCopies(RankDevice* device, int rank, std::uint64_t timeoutMs)
      : device_(device), rank_(rank), timeoutMs_(timeoutMs) {}
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;
  ~PeerCopies() override;

  Status allocate(const RankLayout& largest) override;
  [[nodiscard]] bool any(const RankLayout& layout) const override;
  Status enqueue(const RankLayout& layout) override;
  Status drain() override;

 private:
  [[nodiscard]] std::vector<Message> outgoing(const RankLayout& layout) const;

  RankDevice* device_;
  int rank_;
  std::uint64_t timeoutMs_;
  CUstream stream_ = nullptr;
  DeviceBuffer source_;
  std::map<int, PeerMemory> targets_;  ///< by rank
};

}  // namespace hoccl::bench
