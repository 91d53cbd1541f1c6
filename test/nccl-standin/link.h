#pragma once

#include <netinet/in.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "outcome.h"

namespace standin {

using Clock = std::chrono::steady_clock;
using hoccl::UniqueFd;

/// NCCLSTANDIN_TIMEOUT_MS, else 30 s.
std::chrono::milliseconds timeout();

/// How long a wait may last: a deadline, and up to two flags that an abort sets.
class Bound {
 public:
  explicit Bound(const std::atomic<bool>* aborted = nullptr,
                 std::chrono::milliseconds length = timeout(),
                 const std::atomic<bool>* alsoAborted = nullptr)
      : aborted_(aborted), alsoAborted_(alsoAborted), length_(length) {
    progress();
  }
  /// Something moved: the time starts anew.
  void progress() { deadline_ = Clock::now() + length_; }
  /// An error once the wait for `what` is over.
  Outcome check(const std::string& what) const;

 private:
  const std::atomic<bool>* aborted_;
  const std::atomic<bool>* alsoAborted_;
  std::chrono::milliseconds length_;
  Clock::time_point deadline_;
};

/// Where a rank listens: the port in the lower half, in the upper one the lower half of its IPv4
/// address, of which all ranks share the upper (127.0, or that of NCCLSTANDIN_ADDRESS).
using Place = std::uint32_t;
sockaddr_in addressAt(Place place);
/// A listening socket, for port 0 on one the system chooses; all sockets here are non-blocking.
Outcome listenAt(const sockaddr_in& address, UniqueFd* out);
Outcome listenHere(UniqueFd* out, Place* place);
Outcome connectTo(const sockaddr_in& address, const Bound& bound, UniqueFd* out);
Outcome sendAll(int fd, const void* data, std::size_t bytes, const Bound& bound,
                const std::string& whom);
Outcome receiveAll(int fd, void* data, std::size_t bytes, const Bound& bound,
                   const std::string& whom);

/// Takes connections at a listener, each of which begins with a greeting of a fixed size. All are
/// read beside each other: one that says nothing holds up nobody.
class Door {
 public:
  Door(int listener, std::size_t greetingBytes)
      : listener_(listener), greetingBytes_(greetingBytes) {}
  /// The next connection whose greeting is complete.
  Outcome next(const Bound& bound, const std::string& whom, UniqueFd* out, void* greeting);

 private:
  struct Guest {
    UniqueFd fd;
    std::string said;
  };
  Outcome acceptAll(const std::string& whom);
  /// True when the greeting is complete; a guest that is of no use any more has lost its
  /// descriptor.
  bool listenTo(Guest& guest) const;

  int listener_;
  std::size_t greetingBytes_;
  std::deque<Guest> guests_;
};

/// One message of an exchange. `kind` and size must be what the other side says, too.
struct Transfer {
  int peer;
  bool sends;
  void* data;
  std::size_t bytes;
  std::uint32_t kind;
};

/// Does all transfers of rank `self` over its peers' sockets at once; to and from one peer they go
/// in order. Cannot deadlock for any mix of sends and receives the peers match.
Outcome exchange(int self, const std::vector<UniqueFd>& peers, std::vector<Transfer> transfers,
                 Bound bound);

}  // namespace standin
