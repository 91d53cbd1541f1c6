#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "common/base/status.h"
#include "common/base/time.h"

namespace hoccl::bench {

/// One page shared by the ranks of a set. A message from the bench reaches the ranks tens of
/// microseconds apart, as much as a small transfer takes; meeting here brings their clocks' start
/// within about a microsecond.
struct StartPage {
  std::atomic<std::uint64_t> arrived;
  std::atomic<std::uint64_t> finished;  ///< bare copies: ranks done with their timed part

  /// Waits until all `ranks` have called it as often as the caller.
  Status meet(unsigned ranks, std::uint64_t timeoutMs) {
    const std::uint64_t goal = (arrived.fetch_add(1) / ranks + 1) * ranks;
    return waitFor(arrived, goal, timeoutMs);
  }

  static Status waitFor(const std::atomic<std::uint64_t>& counter, std::uint64_t goal,
                        std::uint64_t timeoutMs) {
    const Deadline deadline = Deadline::afterMs(timeoutMs);
    for (int i = 0; counter.load(std::memory_order_acquire) < goal; ++i) {
      if (i % 64 != 0) continue;
      if (deadline.passed())
        return Status::error(Code::Timeout, "another rank did not come to the common start");
      ::sched_yield();
    }
    return {};
  }
};

inline constexpr std::size_t kStartPageBytes = 4096;
static_assert(sizeof(StartPage) <= kStartPageBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace hoccl::bench
