#pragma once

// What the application counts of its sends and receives with one peer, and what its mover answers:
// the means to find a send and its receive of which one is steered and the other is NCCL's.

#include <atomic>
#include <cstdint>

#include "common/base/flag.h"

namespace hoccl {

/// The sends, or the receives, with one peer. NCCL matches them in the order of the calls, and both
/// sides steer the same ones: up to any operation both have steered as many and passed on as many.
struct alignas(kCacheLine) PairDirection {
  // Written by the application.
  std::atomic<std::uint64_t> steered;  ///< calls so far
  /// Calls passed on to NCCL, of those that no capture records: a captured one counts when its
  /// graph is launched, which nobody tells. In a group they are added at its end, since one that
  /// fails makes none of its calls.
  std::atomic<std::uint64_t> passed;
  /// 1: a capture has recorded one, which the peer may have called outside of any: from then on the
  /// two sides' counts cannot be compared.
  std::atomic<std::uint64_t> captured;
  // Written by the mover: a steered operation that the peer waits in.
  std::atomic<std::uint64_t> awaited;        ///< its number among the steered ones, plus 1; 0: none
  std::atomic<std::uint64_t> awaitedPassed;  ///< what the peer had passed on before it
};

/// One peer's lines in the table that application and mover share (AddCommunicator).
struct PairCounts {
  PairDirection sends, receives;
};
static_assert(sizeof(PairCounts) == 2 * kCacheLine);

/// Whether the peer waits in a steered operation for which this side can have no other: it has
/// passed on one more than the peer had before that operation, and so is beyond it, without having
/// steered it. Of `passed` and `steered`, `passed` has to be read first.
constexpr bool disagree(std::uint64_t steered, std::uint64_t passed, std::uint64_t peerSteered,
                        std::uint64_t peerPassed) {
  return steered <= peerSteered && passed > peerPassed;
}

/// Mover: the peer waits in its steered operation number `sequence`, before which it had passed on
/// `passed`. Returns whether that can never end. Whatever the application counts after it has been
/// looked at here, it compares itself.
[[nodiscard]] inline bool noteAwaited(PairDirection& pair, std::uint64_t sequence,
                                      std::uint64_t passed) {
  pair.awaited.store(0, std::memory_order_seq_cst);  // a reader in between sees none
  pair.awaitedPassed.store(passed, std::memory_order_seq_cst);
  pair.awaited.store(sequence + 1, std::memory_order_seq_cst);
  const std::uint64_t own = pair.passed.load(std::memory_order_seq_cst);
  return pair.captured.load(std::memory_order_relaxed) == 0 &&
         disagree(pair.steered.load(std::memory_order_acquire), own, sequence, passed);
}

/// Application: whether a call that makes it `passed` is beyond what the peer waits in. One thread
/// at a time; for calls that the mover is to see as well after `passed` has been stored (seq_cst).
[[nodiscard]] inline bool passesAwaited(const PairDirection& pair, std::uint64_t passed) {
  const std::uint64_t awaited = pair.awaited.load(std::memory_order_seq_cst);
  if (awaited == 0 || pair.captured.load(std::memory_order_relaxed) != 0) return false;
  const std::uint64_t peerPassed = pair.awaitedPassed.load(std::memory_order_seq_cst);
  // Noted anew meanwhile: then the mover has yet to look.
  if (pair.awaited.load(std::memory_order_seq_cst) != awaited) return false;
  return disagree(pair.steered.load(std::memory_order_relaxed), passed, awaited - 1, peerPassed);
}

}  // namespace hoccl
