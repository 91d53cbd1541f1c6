#pragma once

#include "tools/bench/copy_set.h"
#include "tools/bench/rank_device.h"

namespace hoccl::bench {

/// The copies of a staged operation: what the rank sends goes from its GPU to pinned host memory,
/// what it receives from pinned host memory to its GPU, both directions at once.
class HostCopies final : public CopySet {
 public:
  HostCopies(RankDevice* device, std::uint64_t timeoutMs)
      : device_(device), timeoutMs_(timeoutMs) {}
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;
  ~HostCopies() override;

  Status allocate(const RankLayout& largest) override;
  [[nodiscard]] bool any(const RankLayout& layout) const override;
  Status enqueue(const RankLayout& layout) override;
  Status drain() override;

 private:
  /// One direction: its stream and its buffers, which are used round and round.
  struct Lane {
    CUstream stream = nullptr;
    std::uint64_t ringBytes = 0, at = 0;
    void* host = nullptr;
    DeviceBuffer memory;
  };

  Status allocate(Lane* lane, std::uint64_t maxBytes);
  Status enqueue(Lane* lane, bool out, std::uint64_t bytes);

  RankDevice* device_;
  std::uint64_t timeoutMs_;
  Lane out_, in_;
};

}  // namespace hoccl::bench
