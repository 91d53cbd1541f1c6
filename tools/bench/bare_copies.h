#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/base/status.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {

/// One of the two halves of a staged transfer alone, with nothing between them: rank 0 copies from
/// its GPU to pinned host memory, rank 1 from pinned host memory to its GPU.
class BareCopies {
 public:
  BareCopies(RankDevice* device, StartPage* start, int rank, std::uint64_t timeoutMs)
      : device_(device), start_(start), rank_(rank), timeoutMs_(timeoutMs) {}
  BareCopies(const BareCopies&) = delete;
  BareCopies& operator=(const BareCopies&) = delete;
  ~BareCopies();

  Status allocate(std::uint64_t maxBytes);
  /// Both halves start together. Steady: `count` times `bytes` back to back; a half that is done
  /// goes on copying until the other one is too, so that each is timed beside the other. Answers
  /// "ns". Otherwise `count` single copies of `bytes`, each onto an idle stream. Answers
  /// "singleNs".
  Status run(std::uint64_t bytes, int count, bool steady, nlohmann::json* answer);

 private:
  Status enqueue(std::uint64_t bytes);
  Status drain() { return device_->drain(timeoutMs_ - timeoutMs_ / 10, nullptr); }

  RankDevice* device_;
  StartPage* start_;
  int rank_;
  std::uint64_t timeoutMs_;
  std::uint64_t ringBytes_ = 0, at_ = 0, steadyRuns_ = 0;
  void* host_ = nullptr;
  DeviceBuffer memory_;
};

}  // namespace hoccl::bench
