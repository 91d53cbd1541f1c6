#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>

namespace e2e {

/// How long a rank waits for what has no limit of its own: E2E_PATIENCE_MS, for hosts that are
/// slow, or 20 s.
inline int patienceMs() {
  const char* const set = std::getenv("E2E_PATIENCE_MS");
  return set == nullptr ? 20000 : std::atoi(set);
}

/// How long a test waits for something it looks at again and again. Virtual machines stand still
/// for half a minute at times: a gap between two looks counts as one second at most, since whatever
/// is longer is no time in which the tested processes have run.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds patience)
      : left_(patience), last_(std::chrono::steady_clock::now()) {}

  /// To be asked between two looks.
  bool over() {
    const auto now = std::chrono::steady_clock::now();
    left_ -= std::min<std::chrono::steady_clock::duration>(now - last_, std::chrono::seconds(1));
    last_ = now;
    return left_ <= std::chrono::steady_clock::duration::zero();
  }

 private:
  std::chrono::steady_clock::duration left_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace e2e
