#include "link.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>

namespace standin {
namespace {

constexpr std::uint32_t kMagic = 0x4e53544e;
constexpr int kBacklog = 1024;
/// An abort is noticed after at most so long.
constexpr int kPollMs = 20;
/// Connections without a greeting yet; of more, the oldest is closed.
constexpr std::size_t kMaxGuests = 1024;
constexpr std::uint64_t kDefaultTimeoutMs = 30000;

struct Frame {
  std::uint32_t magic;
  std::uint32_t kind;
  std::uint64_t bytes;
};

Outcome systemError(const std::string& what) {
  return Outcome::error(ncclSystemError, fmt::format("{}: {}", what, std::strerror(errno)));
}

std::string nameOf(const sockaddr_in& address) {
  char text[INET_ADDRSTRLEN] = "?";
  inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  return fmt::format("{}:{}", text, ntohs(address.sin_port));
}

bool wouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

Outcome waitFor(int fd, short events, const Bound& bound, const std::string& what) {
  while (true) {
    pollfd ready{fd, events, 0};
    if (poll(&ready, 1, kPollMs) > 0) return {};
    if (Outcome over = bound.check(what); !over) return over;
  }
}

/// A peer of an exchange: what is still to go to it and to come from it, in order.
struct Lane {
  int peer;
  int fd;
  std::vector<Transfer> sends, receives;
  std::size_t sending = 0, receiving = 0;  ///< the one under way
  std::size_t sent = 0, received = 0;      ///< bytes of it, frame included
  Frame frameOut{}, frameIn{};

  [[nodiscard]] short wants() const {
    return static_cast<short>((sending < sends.size() ? POLLOUT : 0) |
                              (receiving < receives.size() ? POLLIN : 0));
  }
  Outcome lost(const char* what) const {
    return Outcome::error(
        ncclRemoteError,
        fmt::format("{} rank {}: {}", what, peer, errno ? std::strerror(errno) : "it has gone"));
  }
  Outcome sendSome(Bound& bound);
  Outcome receiveSome(Bound& bound);
};

Outcome Lane::sendSome(Bound& bound) {
  while (sending < sends.size()) {
    const Transfer& transfer = sends[sending];
    frameOut = {kMagic, transfer.kind, transfer.bytes};
    while (sent < sizeof(Frame) + transfer.bytes) {
      const bool inFrame = sent < sizeof(Frame);
      const char* from = inFrame ? reinterpret_cast<const char*>(&frameOut) + sent
                                 : static_cast<const char*>(transfer.data) + (sent - sizeof(Frame));
      const std::size_t left = (inFrame ? sizeof(Frame) : sizeof(Frame) + transfer.bytes) - sent;
      const ssize_t n = send(fd, from, left, MSG_NOSIGNAL);
      if (n < 0) return wouldBlock() ? Outcome{} : lost("sending to");
      sent += static_cast<std::size_t>(n);
      bound.progress();
    }
    ++sending;
    sent = 0;
  }
  return {};
}

Outcome Lane::receiveSome(Bound& bound) {
  while (receiving < receives.size()) {
    const Transfer& transfer = receives[receiving];
    while (received < sizeof(Frame) + transfer.bytes) {
      const bool inFrame = received < sizeof(Frame);
      char* to = inFrame ? reinterpret_cast<char*>(&frameIn) + received
                         : static_cast<char*>(transfer.data) + (received - sizeof(Frame));
      const std::size_t left =
          (inFrame ? sizeof(Frame) : sizeof(Frame) + transfer.bytes) - received;
      errno = 0;
      const ssize_t n = recv(fd, to, left, 0);
      if (n < 0 && wouldBlock()) return {};
      if (n <= 0) return lost("receiving from");
      received += static_cast<std::size_t>(n);
      bound.progress();
      if (received == sizeof(Frame) && (frameIn.magic != kMagic || frameIn.kind != transfer.kind ||
                                        frameIn.bytes != transfer.bytes)) {
        return Outcome::error(
            ncclInvalidUsage,
            fmt::format("rank {} sends {} bytes of operation {} where this rank takes {} bytes of "
                        "operation {}",
                        peer, frameIn.bytes, frameIn.kind, transfer.bytes, transfer.kind));
      }
    }
    ++receiving;
    received = 0;
  }
  return {};
}

/// The n-th send to oneself meets the n-th receive from oneself.
Outcome copyToSelf(const Lane& lane) {
  if (lane.sends.size() != lane.receives.size()) {
    return Outcome::error(ncclInvalidUsage,
                          fmt::format("{} sends to oneself meet {} receives in one group",
                                      lane.sends.size(), lane.receives.size()));
  }
  for (std::size_t i = 0; i < lane.sends.size(); ++i) {
    if (lane.sends[i].bytes != lane.receives[i].bytes) {
      return Outcome::error(ncclInvalidUsage,
                            fmt::format("a send of {} bytes to oneself meets a receive of {}",
                                        lane.sends[i].bytes, lane.receives[i].bytes));
    }
    if (lane.sends[i].bytes) {
      std::memmove(lane.receives[i].data, lane.sends[i].data, lane.sends[i].bytes);
    }
  }
  return {};
}

}  // namespace

std::chrono::milliseconds timeout() {
  static const std::chrono::milliseconds value = [] {
    const char* text = std::getenv("NCCLSTANDIN_TIMEOUT_MS");
    const std::uint64_t given = text ? std::strtoull(text, nullptr, 10) : 0;
    return std::chrono::milliseconds(given ? given : kDefaultTimeoutMs);
  }();
  return value;
}

Outcome Bound::check(const std::string& what) const {
  if ((aborted_ && *aborted_) || (alsoAborted_ && *alsoAborted_)) {
    return Outcome::error(ncclInternalError, fmt::format("aborted while waiting for {}", what));
  }
  if (Clock::now() < deadline_) return {};
  return Outcome::error(ncclRemoteError, fmt::format("waited {} ms for {} (NCCLSTANDIN_TIMEOUT_MS)",
                                                     length_.count(), what));
}

namespace {

/// This rank's address, in host byte order: NCCLSTANDIN_ADDRESS, for ranks in network namespaces of
/// their own, else 127.0.0.1.
std::uint32_t ownAddress() {
  static const std::uint32_t own = [] {
    const char* text = std::getenv("NCCLSTANDIN_ADDRESS");
    in_addr parsed{};
    if (text && inet_pton(AF_INET, text, &parsed) == 1) return ntohl(parsed.s_addr);
    return static_cast<std::uint32_t>(INADDR_LOOPBACK);
  }();
  return own;
}

}  // namespace

sockaddr_in addressAt(Place place) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(place));
  address.sin_addr.s_addr = htonl((ownAddress() & 0xffff0000u) | place >> 16);
  return address;
}

Outcome listenAt(const sockaddr_in& address, UniqueFd* out) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  // A given port is used by one communicator after the other.
  if (fd && address.sin_port) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!fd || bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return systemError(fmt::format("listening on {}", nameOf(address)));
  }
  *out = std::move(fd);
  return {};
}

Outcome listenHere(UniqueFd* out, Place* place) {
  sockaddr_in address = addressAt(ownAddress() << 16);
  socklen_t length = sizeof address;
  UniqueFd fd;
  if (Outcome made = listenAt(address, &fd); !made) return made;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return systemError("listening on " + nameOf(address));
  }
  *place = ownAddress() << 16 | ntohs(address.sin_port);
  *out = std::move(fd);
  return {};
}

Outcome connectTo(const sockaddr_in& address, const Bound& bound, UniqueFd* out) {
  const std::string what = "a connection to " + nameOf(address);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return systemError(what);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    return systemError(what);
  }
  if (Outcome ready = waitFor(fd.get(), POLLOUT, bound, what); !ready) return ready;
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error) {
    errno = error;
    return systemError(what);
  }
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  *out = std::move(fd);
  return {};
}

Outcome Door::next(const Bound& bound, const std::string& whom, UniqueFd* out, void* greeting) {
  while (true) {
    if (Outcome accepted = acceptAll(whom); !accepted) return accepted;
    std::vector<pollfd> fds{{listener_, POLLIN, 0}};
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      if (listenTo(*guest)) {
        std::memcpy(greeting, guest->said.data(), greetingBytes_);
        *out = std::move(guest->fd);
        guests_.erase(guest);
        return {};
      }
      if (!guest->fd) {
        guest = guests_.erase(guest);
        continue;
      }
      fds.push_back({guest->fd.get(), POLLIN, 0});
      ++guest;
    }
    if (Outcome over = bound.check(whom); !over) return over;
    poll(fds.data(), fds.size(), kPollMs);
  }
}

Outcome Door::acceptAll(const std::string& whom) {
  while (true) {
    UniqueFd fd(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd && wouldBlock()) return {};
    if (!fd && errno == ECONNABORTED) continue;
    if (!fd) return systemError("accepting " + whom);
    const int on = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    guests_.push_back({std::move(fd), {}});
    if (guests_.size() > kMaxGuests) guests_.pop_front();
  }
}

bool Door::listenTo(Guest& guest) const {
  // Never beyond the greeting: what follows is not for the door.
  while (guest.said.size() < greetingBytes_) {
    char buffer[256];
    const std::size_t left = std::min(sizeof buffer, greetingBytes_ - guest.said.size());
    const ssize_t n = recv(guest.fd.get(), buffer, left, 0);
    if (n < 0 && wouldBlock()) return false;
    if (n <= 0) {
      guest.fd.reset();
      return false;
    }
    guest.said.append(buffer, static_cast<std::size_t>(n));
  }
  return true;
}

Outcome sendAll(int fd, const void* data, std::size_t bytes, const Bound& bound,
                const std::string& whom) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n >= 0) {
      at += n;
      bytes -= static_cast<std::size_t>(n);
    } else if (!wouldBlock()) {
      return systemError("sending to " + whom);
    } else if (Outcome ready = waitFor(fd, POLLOUT, bound, whom); !ready) {
      return ready;
    }
  }
  return {};
}

Outcome receiveAll(int fd, void* data, std::size_t bytes, const Bound& bound,
                   const std::string& whom) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = recv(fd, at, bytes, 0);
    if (n > 0) {
      at += n;
      bytes -= static_cast<std::size_t>(n);
    } else if (n == 0) {
      return Outcome::error(ncclRemoteError, whom + " has closed the connection");
    } else if (!wouldBlock()) {
      return systemError("receiving from " + whom);
    } else if (Outcome ready = waitFor(fd, POLLIN, bound, whom); !ready) {
      return ready;
    }
  }
  return {};
}

Outcome exchange(int self, const std::vector<UniqueFd>& peers, std::vector<Transfer> transfers,
                 Bound bound) {
  std::map<int, Lane> lanes;
  for (const Transfer& transfer : transfers) {
    Lane& lane = lanes[transfer.peer];
    lane.peer = transfer.peer;
    lane.fd = peers[transfer.peer].get();
    (transfer.sends ? lane.sends : lane.receives).push_back(transfer);
  }
  if (const auto mine = lanes.find(self); mine != lanes.end()) {
    if (Outcome copied = copyToSelf(mine->second); !copied) return copied;
    lanes.erase(mine);
  }
  while (true) {
    std::vector<pollfd> fds;
    std::vector<Lane*> order;
    for (auto& [peer, lane] : lanes) {
      if (!lane.wants()) continue;
      fds.push_back({lane.fd, lane.wants(), 0});
      order.push_back(&lane);
    }
    if (fds.empty()) return {};
    if (poll(fds.data(), fds.size(), kPollMs) > 0) {
      for (std::size_t i = 0; i < fds.size(); ++i) {
        if (!fds[i].revents) continue;
        if (Outcome done = order[i]->receiveSome(bound); !done) return done;
        if (Outcome done = order[i]->sendSome(bound); !done) return done;
      }
    }
    std::string whom;
    for (const Lane* lane : order) whom += fmt::format(" {}", lane->peer);
    if (Outcome over = bound.check("rank" + whom); !over) return over;
  }
}

}  // namespace standin
