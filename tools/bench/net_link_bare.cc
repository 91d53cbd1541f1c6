// Plain sockets, measured: what the tcp transport is compared with.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include "common/base/time.h"
#include "tools/bench/net_link.h"

namespace hoccl::bench {
namespace {

/// What goes over one socket before it is the next one's turn, where a thread has several.
constexpr std::uint64_t kTurnBytes = 256 << 10;

Status sendAll(int fd, const std::byte* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return Status::fromErrno("send on a bare socket", errno);
    data += sent;
    bytes -= static_cast<std::uint64_t>(sent);
  }
  return {};
}

Status receiveAll(int fd, std::byte* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, data, bytes, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Status::fromErrno("receive on a bare socket", got < 0 ? errno : EPIPE);
    data += got;
    bytes -= static_cast<std::uint64_t>(got);
  }
  return {};
}

/// Sockets of one thread: `bytes` over all of them, in turns.
template <typename Move>
Status inTurns(const std::vector<int>& fds, std::byte* data, std::uint64_t bytes, Move&& move) {
  const std::uint64_t turn = fds.size() == 1 ? bytes : kTurnBytes;
  std::size_t next = 0;
  for (std::uint64_t at = 0; at < bytes; at += turn) {
    if (Status s = move(fds[next++ % fds.size()], data + at, std::min(turn, bytes - at)); !s) {
      return s;
    }
  }
  return {};
}

class BareLink final : public NetLink {
 public:
  using NetLink::NetLink;

  Status open(std::uint64_t maxBytes) {
    if (Status status = NetBuffer::create(maxBytes, &buffer_); !status) return status;
    const std::size_t count =
        1 + std::size_t{pair_.options.threads} * pair_.options.socketsPerThread;
    UniqueFd listener;
    SocketAddress::Packed where{};
    sockaddr_storage address;
    socklen_t length = pair_.local.toSockaddr(&address);
    if (pair_.side == 0) {
      listener.reset(::socket(pair_.local.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (!listener || ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
          ::listen(listener.get(), 128) != 0) {
        return Status::fromErrno("listen on a bare socket", errno);
      }
      length = sizeof address;
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length);
      SocketAddress bound;
      if (Status status =
              SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&address), length, &bound);
          !status) {
        return status;
      }
      where = bound.pack();
      if (Status status = tell(pair_, where.data(), where.size()); !status) return status;
    } else {
      if (Status status = hear(pair_, where.data(), where.size()); !status) return status;
      SocketAddress to;
      if (Status status = SocketAddress::unpack(where, &to); !status) return status;
      length = to.withScopeOf(pair_.local).toSockaddr(&address);
    }
    for (std::size_t i = 0; i < count; ++i) {
      UniqueFd fd;
      if (pair_.side == 0) {
        fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      } else {
        fd.reset(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (fd && ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
          fd.reset();
      }
      const int on = 1;
      // No wait is endless: a peer that is gone ends it, one that hangs does after the time-out.
      const timeval limit{static_cast<time_t>(pair_.timeoutMs / 1000), 0};
      if (!fd || ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0 ||
          ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) != 0 ||
          ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
        return Status::fromErrno("connect a bare socket", errno);
      }
      sockets_.push_back(std::move(fd));
      // One after the other, so that both sides number them alike.
      char byte = 0;
      if (Status s = pair_.side == 0 ? tell(pair_, &byte, 1) : hear(pair_, &byte, 1); !s) return s;
    }
    return {};
  }

  Status stream(std::uint64_t bytes, int iterations, double* seconds) override {
    const std::uint64_t begin = monotonicNs();
    const std::size_t threads = pair_.options.threads;
    std::vector<Status> results(threads);
    std::vector<std::thread> workers;
    for (std::size_t t = 0; t < threads; ++t) {
      workers.emplace_back([this, t, threads, bytes, iterations, &results] {
        std::vector<int> fds;
        for (std::size_t i = 1 + t; i < sockets_.size(); i += threads) {
          fds.push_back(sockets_[i].get());
        }
        const std::uint64_t from = bytes * t / threads, to = bytes * (t + 1) / threads;
        for (int i = 0; i < iterations && results[t]; ++i) {
          results[t] = pair_.side == 0 ? inTurns(fds, buffer_.data() + from, to - from, sendAll)
                                       : inTurns(fds, buffer_.data() + from, to - from, receiveAll);
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    for (const Status& status : results) {
      if (!status) return status;
    }
    if (pair_.side == 1) return say();
    if (Status status = listen(); !status) return status;
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

 private:
  Status say() override {
    const std::uint64_t word = 42;
    return sendAll(sockets_[0].get(), reinterpret_cast<const std::byte*>(&word), sizeof word);
  }
  /// Looks without sleeping in the kernel, as a program does that wants the latency.
  Status listen() override {
    std::uint64_t word = 0;
    std::size_t got = 0;
    NetWait wait(pair_, "a message over a bare socket");
    while (got < sizeof word) {
      const ssize_t now = ::recv(sockets_[0].get(), reinterpret_cast<std::byte*>(&word) + got,
                                 sizeof word - got, MSG_DONTWAIT);
      if (now > 0) {
        got += static_cast<std::size_t>(now);
      } else if (now == 0 || (errno != EAGAIN && errno != EINTR)) {
        return Status::fromErrno("receive on a bare socket", now < 0 ? errno : EPIPE);
      } else if (Status status = wait.again(); !status) {
        return status;
      }
    }
    return {};
  }

  NetBuffer buffer_;
  std::vector<UniqueFd> sockets_;  ///< the first for messages, the others for payloads
};

}  // namespace

Status makeBareLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out) {
  auto link = std::make_unique<BareLink>(pair);
  if (Status status = link->open(maxBytes); !status) return status.inContext("bare sockets");
  *out = std::move(link);
  return {};
}

}  // namespace hoccl::bench
