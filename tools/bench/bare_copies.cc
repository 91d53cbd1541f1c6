#include "tools/bench/bare_copies.h"

#include <vector>

#include "common/base/time.h"
#include "tools/bench/host_copies.h"
#include "tools/bench/peer_copies.h"

namespace hoccl::bench {

BareCopies::BareCopies(RankDevice* device, StartPage* start, const OperationPlan& plan, int rank,
                       bool betweenGpus, std::uint64_t timeoutMs)
    : start_(start), plan_(plan), rank_(rank), timeoutMs_(timeoutMs) {
  const std::uint64_t drainMs = timeoutMs - timeoutMs / 10;  // this rank's word comes first
  if (betweenGpus) {
    copies_ = std::make_unique<PeerCopies>(device, rank, drainMs);
  } else {
    copies_ = std::make_unique<HostCopies>(device, drainMs);
  }
}

Status BareCopies::allocate(std::uint64_t maxBytes) {
  // In place nothing is copied that is not copied out of place, too.
  return copies_->allocate(layoutOf(plan_, rank_, {maxBytes, false}));
}

Status BareCopies::run(const Shape& shape, int count, bool steady, nlohmann::json* answer) {
  const RankLayout layout = layoutOf(plan_, rank_, shape);
  const auto ranks = static_cast<unsigned>(plan_.ranks);
  if (!steady) {
    std::vector<std::uint64_t> samples;
    for (int i = 0; i < count; ++i) {
      HOCCL_RETURN_IF_ERROR(start_->meet(ranks, timeoutMs_));
      const std::uint64_t begin = monotonicNs();
      HOCCL_RETURN_IF_ERROR(copies_->enqueue(layout));
      HOCCL_RETURN_IF_ERROR(copies_->drain());
      samples.push_back(monotonicNs() - begin);
    }
    (*answer)["singleNs"] = samples;
    return {};
  }
  const std::uint64_t goal = ++steadyRuns_ * ranks;
  HOCCL_RETURN_IF_ERROR(start_->meet(ranks, timeoutMs_));
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < count; ++i) HOCCL_RETURN_IF_ERROR(copies_->enqueue(layout));
  HOCCL_RETURN_IF_ERROR(copies_->drain());
  (*answer)["ns"] = monotonicNs() - begin;
  start_->finished.fetch_add(1);
  if (!copies_->any(layout)) return StartPage::waitFor(start_->finished, goal, timeoutMs_);
  const Deadline deadline = Deadline::afterMs(timeoutMs_);
  while (start_->finished.load() < goal) {
    if (deadline.passed())
      return Status::error(Code::Timeout, "another rank did not finish its copies");
    HOCCL_RETURN_IF_ERROR(copies_->enqueue(layout));
    HOCCL_RETURN_IF_ERROR(copies_->drain());
  }
  return {};
}

}  // namespace hoccl::bench
