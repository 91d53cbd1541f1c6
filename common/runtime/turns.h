#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hoccl {

/// The order in which the direct copies of one launch go out: rank r to r+1, then to r+2, …, so
/// that no GPU receives from many at once while others receive nothing. A copy whose receiver is
/// not ready yet holds the later ones up, but only while the lanes are busy with earlier ones, and
/// then for about as long as one copy takes: a receiver that is later than that has all its senders
/// at once in any order.
class Turns {
 public:
  static constexpr std::uint32_t kNone = ~0u;
  /// Copies from here on have turns. The time of smaller ones is that of handing them over, during
  /// which the wire is free.
  static constexpr std::uint64_t kLeastBytes = 1 << 20;
  /// For so many copies' time at most the lanes are left to others' copies, which may never end.
  static constexpr std::uint64_t kBusyPatience = 64;

  /// Turns 0 to `count` - 1 are to come.
  void begin(std::uint32_t count) {
    left_.assign(count, false);  // keeps its capacity
    next_ = 0;
    heldSinceNs_ = idleSinceNs_ = 0;
  }
  /// That one has been submitted, or will not be.
  void leave(std::uint32_t turn) {
    if (turn >= left_.size()) return;
    left_[turn] = true;
    while (next_ < left_.size() && left_[next_]) ++next_;
    heldSinceNs_ = idleSinceNs_ = 0;
  }
  /// Whether that one, which is ready, may go now. `lanesBusy`: one that goes now could not begin
  /// at once.
  [[nodiscard]] bool mayGo(std::uint32_t turn, bool lanesBusy, std::uint64_t nowNs,
                           std::uint64_t patienceNs) {
    if (turn == kNone || turn <= next_) return true;
    if (heldSinceNs_ == 0) heldSinceNs_ = nowNs;
    if (lanesBusy) return nowNs - heldSinceNs_ >= kBusyPatience * patienceNs;
    if (idleSinceNs_ == 0) idleSinceNs_ = nowNs;
    return nowNs - idleSinceNs_ >= patienceNs;
  }

 private:
  std::vector<bool> left_;
  std::uint32_t next_ = 0;                           ///< the first that is still to come
  std::uint64_t heldSinceNs_ = 0, idleSinceNs_ = 0;  ///< 0: not since the last one left
};

/// How long one direct copy of this mover takes, as its copies so far say. Only for Turns: bounded,
/// because a machine that stands still makes a copy look slow, and nothing puts the pace right
/// while the one that is held up is the only one.
class CopyPace {
 public:
  void took(std::uint64_t bytes, std::uint64_t ns) {
    const double pace =
        std::min(static_cast<double>(ns) / static_cast<double>(bytes), kSlowestNsPerByte);
    // Most have waited for another or shared the wire with it: those that have not count.
    nsPerByte_ = std::min(pace, nsPerByte_ + (pace - nsPerByte_) / 16);
  }
  [[nodiscard]] std::uint64_t of(std::uint64_t bytes) const {
    return std::min(static_cast<std::uint64_t>(static_cast<double>(bytes) * nsPerByte_), kMostNs);
  }

 private:
  static constexpr double kSlowestNsPerByte = 1;
  static constexpr std::uint64_t kMostNs = 20'000'000;
  double nsPerByte_ = 1 / 400.0;
};

}  // namespace hoccl
