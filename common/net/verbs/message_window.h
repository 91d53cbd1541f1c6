#pragma once

#include <array>
#include <cstdint>

#include "common/net/verbs/immediate.h"

namespace hoccl {

/// Messages in flight at most: places of the ring each side has for what the other says.
inline constexpr std::uint32_t kMessageWindow = 256;

/// Sequence numbers of the messages this side sends. A message stays in its place of the ring until
/// the peer has taken it, so that it can go again over another path.
struct SendWindow {
  std::uint64_t queued = 0;    ///< the next message's number
  std::uint64_t posted = 0;    ///< those before it are on a queue pair
  std::uint64_t consumed = 0;  ///< those before it the peer has taken

  [[nodiscard]] bool full() const { return queued - consumed >= kMessageWindow; }
  [[nodiscard]] bool toPost() const { return posted < queued; }
  /// False: a number that makes no sense.
  [[nodiscard]] bool peerConsumed(std::uint32_t cut) {
    const std::int64_t ahead = Immediate::distance(cut, consumed, Immediate::kValueBits);
    if (ahead < 0) return true;  // an old one, come again
    if (consumed + static_cast<std::uint64_t>(ahead) > posted) return false;
    consumed += static_cast<std::uint64_t>(ahead);
    return true;
  }
  /// The path they went over has failed: the peer has all before `next`.
  void failedOver(std::uint64_t next) {
    if (next >= consumed && next < posted) posted = next;
  }
};

/// Messages that come; they are taken in the order of their numbers.
struct ReceiveWindow {
  std::uint64_t next = 0;  ///< the next to be taken
  std::uint64_t told = 0;  ///< the peer knows that those before it have been
  std::array<bool, kMessageWindow> there{};

  /// False: a number that makes no sense.
  [[nodiscard]] bool arrived(std::uint32_t cut) {
    const std::int64_t ahead = Immediate::distance(cut, next, Immediate::kSequenceBits);
    if (ahead >= std::int64_t{kMessageWindow}) return false;
    if (ahead >= 0) there[(next + static_cast<std::uint64_t>(ahead)) % kMessageWindow] = true;
    return true;
  }
  [[nodiscard]] bool any() const { return there[next % kMessageWindow]; }
  void take() {
    there[next % kMessageWindow] = false;
    ++next;
  }
  /// The peer should be told how far this side is.
  [[nodiscard]] bool tellDue() const { return next - told >= kMessageWindow / 4; }
  /// The first number that is missing.
  [[nodiscard]] std::uint64_t missing() const {
    std::uint64_t at = next;
    while (at - next < kMessageWindow && there[at % kMessageWindow]) ++at;
    return at;
  }
};

}  // namespace hoccl
