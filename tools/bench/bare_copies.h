#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/base/status.h"
#include "tools/bench/copy_set.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {

/// The copies an operation is made of, alone and with nothing passed between the ranks: those to
/// and from pinned host memory of a staged one, or those from GPU to GPU of a direct one.
class BareCopies {
 public:
  BareCopies(RankDevice* device, StartPage* start, const OperationPlan& plan, int rank,
             bool betweenGpus, std::uint64_t timeoutMs);

  Status allocate(std::uint64_t maxBytes);
  /// All ranks start together. Steady: `count` operations' copies back to back; a rank that is done
  /// goes on copying until the others are too, so that each is timed beside the others. Answers
  /// "ns". Otherwise the copies of `count` single operations, each onto idle streams. Answers
  /// "singleNs".
  Status run(const Shape& shape, int count, bool steady, nlohmann::json* answer);

 private:
  StartPage* start_;
  OperationPlan plan_;
  int rank_;
  std::uint64_t timeoutMs_, steadyRuns_ = 0;
  std::unique_ptr<CopySet> copies_;
};

}  // namespace hoccl::bench
