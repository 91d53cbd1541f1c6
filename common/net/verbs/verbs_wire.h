#pragma once

// What the two ends of a verbs connection say to each other over the bundle's control socket: at
// the set-up, and when a path has failed. Numbers are in the host's byte order (the frames around
// them refuse another).

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/net/tcp/frames.h"
#include "common/net/verbs/nic.h"
#include "common/net/verbs/slot_pieces.h"
#include "common/net/verbs/verbs_settings.h"

namespace hoccl::verbs_wire {

inline constexpr std::uint32_t kVersion = 3;

/// Beside the kinds of whoever uses the paths, on the same socket.
enum Kind : std::uint16_t {
  kOffer = 0x101,    ///< both ways, first: Offer
  kGo = 0x102,       ///< this side's queue pairs are connected: the peer may send over them
  kRefuse = 0x103,   ///< the end; the payload says why
  kReport = 0x104,   ///< a path has failed: Report and the slots' states
  kAgain = 0x105,    ///< connecting to accepting side: PathEnd, a new queue pair for a failed path
  kAnswer = 0x106,   ///< the answer: PathEnd
  kAgainGo = 0x107,  ///< PathEnd: the new pair stands on both sides
  kFirst = kOffer,
  kLast = kAgainGo,
  kNudge = 0x201,  ///< movers: Nudge: messages up to that number have been sent, look for them
};

struct PairOffer {
  std::uint32_t number = 0, sequence = 0;
};

struct RailOffer {
  PortAddress address;
  std::array<char, 64> device{};
  std::uint32_t port = 0;
  std::uint32_t remoteKey = 0;
  std::array<PairOffer, VerbsSettings::kMostQps> pairs{};
};

struct Offer {
  std::uint32_t version = kVersion;
  std::uint32_t rails = 0, pairs = 0;  ///< of what this side has; the smaller numbers are used
  std::uint8_t trafficClass = 0, serviceLevel = 0;  ///< the connecting side's count for both
  std::uint16_t padding = 0;
  std::uint64_t base = 0;  ///< of the registered memory, laid out alike on both sides
  std::array<RailOffer, kMostRails> rail{};
};
static_assert(std::is_trivially_copyable_v<Offer>);

struct Report {
  std::uint32_t path = 0, generation = 0;
  std::uint64_t nextMessage = 0;  ///< the first the peer lacks
  std::array<SlotReport, Immediate::kMostSlots> slot{};
  std::array<char, 256> why{};
};
static_assert(std::is_trivially_copyable_v<Report>);

struct PathEnd {
  std::uint32_t path = 0, generation = 0;
  std::uint32_t number = 0, sequence = 0;
};

struct Nudge {
  std::uint64_t upTo = 0;
};

template <std::size_t kLength>
void setText(std::array<char, kLength>& field, const std::string& text) {
  field.fill(0);
  std::memcpy(field.data(), text.data(), std::min(text.size(), kLength - 1));
}
/// Of a peer: it may have forgotten the zero.
template <std::size_t kLength>
std::string getText(const std::array<char, kLength>& field) {
  return {field.data(), ::strnlen(field.data(), kLength)};
}

}  // namespace hoccl::verbs_wire
