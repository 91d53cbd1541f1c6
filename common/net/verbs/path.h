#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/net/verbs/queue_pair.h"
#include "common/net/verbs/verbs_wire.h"

namespace hoccl {

/// A NIC as one connection uses it, with what the peer has at the other end.
struct Rail {
  std::uint32_t index = 0;
  std::shared_ptr<const Nic> nic;
  CompletionQueue completions;
  MemoryRegion region;
  PortAddress peerAddress;
  std::uint32_t peerKey = 0;
  bool adaptive = false;  ///< adaptive routing: the bytes of a piece and its word go apart
  bool emptied = false;   ///< the completion queue has been, since this was last set to false
  bool broken = false;    ///< it cannot be polled: no queue pair of this rail carries anything more
  std::string problem;    ///< why
  std::string peerText;   ///< "mlx5_0:1 (GID 10.0.0.2)"
};

/// One queue pair to the peer, through its failures.
struct Path {
  enum class State {
    Offered,  ///< set-up: the peer's end is not known or not connected yet
    Probing,  ///< connected; whether anything gets through is being tried
    Up,
    Draining,  ///< failed: what was posted is coming back
    Resting,   ///< failed, and this side has said what it has got; another try comes later
    Mending,   ///< a new queue pair is being made and connected
    Unusable,  ///< for good
  };
  State state = State::Offered;
  std::uint8_t index = 0;
  Rail* rail = nullptr;
  QueuePair pair;
  QueuePairPeer peer;
  std::uint32_t generation = 1;           ///< counts its queue pairs
  std::uint32_t sends = 0, receives = 0;  ///< work requests posted and not completed
  std::uint32_t usedReceives = 0;         ///< completed and not posted again
  std::uint64_t bytes = 0;                ///< posted and not completed

  // Failed:
  std::string problem;        ///< why, last
  bool peerReported = false;  ///< the peer's report of this generation has come
  bool reportDue = false;     ///< this side's has not been taken by the socket
  std::uint64_t drainByNs = 0;
  bool overdue = false;    ///< that has passed
  bool unstopped = false;  ///< the device has refused to stop it
  /// The peer has been, or is about to be, told what this generation has brought: what comes of it
  /// later counts no more, since the peer sends that again.
  bool spent = false;
  std::uint64_t retryAtNs = 0;
  std::uint64_t backoffNs = 0;
  std::uint64_t upSinceNs = 0;
  bool peerTries = false;  ///< `again` is what the peer has made for the next try
  bool answered = false;   ///< the peer has connected its new queue pair to this side's
  verbs_wire::PathEnd again;
  /// Accepting side: the peer has given up its queue pair of this generation while this side's was
  /// being made; 0: none.
  std::uint32_t givenUp = 0;

  /// It may carry something, now or (at the set-up, or being tried again) as soon as it is known to
  /// work.
  [[nodiscard]] bool alive() const {
    return state == State::Offered || state == State::Probing || state == State::Up;
  }
  /// "mlx5_0:1 (GID 10.0.0.1) to mlx5_0:1 (GID 10.0.0.2), queue pair 0x11 to 0x12".
  [[nodiscard]] std::string text() const;
};

}  // namespace hoccl
