#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/base/status.h"
#include "tools/bench/layout.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {

/// The copies a staged operation is made of, alone and with nothing passed between the ranks: what
/// a rank sends it copies from its GPU to pinned host memory, what it receives from pinned host
/// memory to its GPU, both directions at once.
class BareCopies {
 public:
  BareCopies(RankDevice* device, StartPage* start, const OperationPlan& plan, int rank,
             std::uint64_t timeoutMs)
      : device_(device), start_(start), plan_(plan), rank_(rank), timeoutMs_(timeoutMs) {}
  BareCopies(const BareCopies&) = delete;
  BareCopies& operator=(const BareCopies&) = delete;
  ~BareCopies();

  Status allocate(std::uint64_t maxBytes);
  /// All ranks start together. Steady: `count` operations' copies back to back; a rank that is done
  /// goes on copying until the others are too, so that each is timed beside the others. Answers
  /// "ns". Otherwise the copies of `count` single operations, each onto idle streams. Answers
  /// "singleNs".
  Status run(const Shape& shape, int count, bool steady, nlohmann::json* answer);

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
  /// Both directions of one operation.
  Status enqueue(std::uint64_t out, std::uint64_t in);
  Status drain();

  RankDevice* device_;
  StartPage* start_;
  OperationPlan plan_;
  int rank_;
  std::uint64_t timeoutMs_, steadyRuns_ = 0;
  Lane out_, in_;
};

}  // namespace hoccl::bench
