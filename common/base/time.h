#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>

namespace hoccl {

/// Nanoseconds of CLOCK_MONOTONIC: never set back, the same for all processes of a host.
inline std::uint64_t monotonicNs() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u +
         static_cast<std::uint64_t>(now.tv_nsec);
}

/// The end of a bounded wait.
class Deadline {
 public:
  static Deadline afterMs(std::uint64_t milliseconds) {
    return Deadline(monotonicNs() + milliseconds * 1000000u);
  }
  [[nodiscard]] bool passed() const { return monotonicNs() >= endNs_; }
  /// For poll(): rounded up, so that a wait for it ends after the deadline; 0 when passed.
  [[nodiscard]] int remainingMs() const {
    const std::uint64_t now = monotonicNs();
    if (now >= endNs_) return 0;
    return static_cast<int>(std::min<std::uint64_t>((endNs_ - now + 999999) / 1000000, 1 << 30));
  }

 private:
  explicit Deadline(std::uint64_t endNs) : endNs_(endNs) {}
  std::uint64_t endNs_;
};

}  // namespace hoccl
