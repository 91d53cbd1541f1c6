#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hoccl {

struct Op;

/// The operations of one pair (communicator, peer, direction) that are not over, by their sequence
/// number. Either side may come first, and a later one may overtake (rule 7), so an entry exists as
/// soon as one side is known.
class PairWindow {
 public:
  struct Entry {
    Op* op = nullptr;             ///< this side's operation
    std::uint64_t peerBytes = 0;  ///< what the receiver expects, once `peerReady`
    /// The receiver's allocation that may be copied into, and where in it; 0: none.
    std::uint64_t offer = 0, offerOffset = 0;
    bool pulls = false;  ///< the receiver could pull
    bool peerReady = false;
    bool over = false;
  };
  /// How far apart the two sides of a pair may be; a peer further ahead is broken.
  static constexpr std::uint64_t kMaxSpan = 1u << 20;

  /// The entry of that number, made if new; null if it is over already or absurdly far ahead.
  Entry* find(std::uint64_t sequence) {
    if (sequence < first_ || sequence - first_ >= kMaxSpan) return nullptr;
    const std::uint64_t span = sequence - first_ + 1;
    if (span > entries_.size()) grow(span);
    if (span > used_) used_ = span;
    Entry& entry = at(sequence);
    return entry.over ? nullptr : &entry;
  }
  void finish(std::uint64_t sequence) {
    if (sequence < first_ || sequence - first_ >= used_) return;
    at(sequence) = Entry{};
    at(sequence).over = true;
    while (used_ > 0 && at(first_).over) {
      at(first_) = Entry{};
      ++first_;
      --used_;
    }
  }
  template <typename Visit>
  void forEach(Visit visit) {
    // finish() may be called from visit and moves first_, so go by number.
    const std::uint64_t end = first_ + used_;
    for (std::uint64_t s = first_; s < end; ++s) {
      if (s >= first_ && s - first_ < used_ && !at(s).over) visit(at(s));
    }
  }

 private:
  Entry& at(std::uint64_t sequence) { return entries_[sequence & (entries_.size() - 1)]; }
  void grow(std::uint64_t span) {
    std::size_t capacity = entries_.empty() ? 16 : entries_.size();
    while (capacity < span) capacity *= 2;
    std::vector<Entry> bigger(capacity);
    for (std::uint64_t s = first_; s < first_ + used_; ++s) bigger[s & (capacity - 1)] = at(s);
    entries_ = std::move(bigger);
  }
  std::vector<Entry> entries_;
  std::uint64_t first_ = 0;
  std::uint64_t used_ = 0;
};

/// Set in the sequence numbers that a pair's share in collectives takes. NCCL matches a pair's
/// sends and receives among themselves and collectives among themselves: two ranks may call a
/// collective and a send in different orders within a group, so the two kinds are counted apart.
inline constexpr std::uint64_t kCollectiveSequence = 1ull << 63;

/// Both kinds of one pair and direction.
class PairWindows {
 public:
  using Entry = PairWindow::Entry;

  Entry* find(std::uint64_t sequence) { return of(sequence).find(sequence & ~kCollectiveSequence); }
  void finish(std::uint64_t sequence) { of(sequence).finish(sequence & ~kCollectiveSequence); }
  template <typename Visit>
  void forEach(Visit visit) {
    for (PairWindow& window : windows_) window.forEach(visit);
  }

 private:
  PairWindow& of(std::uint64_t sequence) {
    return windows_[(sequence & kCollectiveSequence) != 0 ? 1 : 0];
  }
  PairWindow windows_[2];
};

/// "collective 7 of this pair", for messages.
inline std::string describeSequence(std::uint64_t sequence) {
  return (sequence & kCollectiveSequence ? "share in steered collective "
                                         : "steered send/receive ") +
         std::to_string(sequence & ~kCollectiveSequence) + " of this pair";
}

}  // namespace hoccl
