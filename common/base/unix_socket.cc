#include "common/base/unix_socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/time.h"

namespace hoccl {
namespace {

// Ranks of one node that may connect before the listener comes round to accept them.
constexpr int kBacklog = 256;
// Between two tries while the listener's backlog is full.
constexpr unsigned kConnectRetryUs = 1000;

Status abstractAddress(std::string_view name, sockaddr_un* address, socklen_t* length) {
  if (name.empty() || name.size() > sizeof address->sun_path - 1) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("socket name '{}' must have 1 to {} bytes", name,
                                     sizeof address->sun_path - 1));
  }
  *address = {};
  address->sun_family = AF_UNIX;
  // sun_path[0] stays 0: an abstract name, whose length counts.
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return {};
}

Status openSocket(UniqueFd* out) {
  out->reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!*out) return Status::fromErrno("cannot make a unix socket", errno);
  return {};
}

// Returns once `socket` shows `events` or its peer's end; the call that follows tells which.
Status waitFor(int socket, short events, const Deadline& deadline, const char* forWhat) {
  for (;;) {
    pollfd entry{socket, events, 0};
    const int ready = ::poll(&entry, 1, deadline.remainingMs());
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return Status::fromErrno("poll on a unix socket", errno);
    if (deadline.passed()) {
      return Status::error(Code::Timeout, fmt::format("timed out {} on a unix socket", forWhat));
    }
  }
}

}  // namespace

Status makeSocketPair(UniqueFd* one, UniqueFd* other) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    return Status::fromErrno("cannot make a socket pair", errno);
  }
  one->reset(ends[0]);
  other->reset(ends[1]);
  return {};
}

Status listenUnix(std::string_view name, UniqueFd* out) {
  sockaddr_un address;
  socklen_t length;
  if (Status status = abstractAddress(name, &address, &length); !status) return status;
  UniqueFd fd;
  if (Status status = openSocket(&fd); !status) return status;
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    return Status::fromErrno(fmt::format("cannot bind the socket name '@{}'", name), errno);
  }
  if (::listen(fd.get(), kBacklog) != 0) {
    return Status::fromErrno(fmt::format("cannot listen on '@{}'", name), errno);
  }
  *out = std::move(fd);
  return {};
}

Status connectUnix(std::string_view name, std::uint64_t timeoutMs, UniqueFd* out) {
  sockaddr_un address;
  socklen_t length;
  if (Status status = abstractAddress(name, &address, &length); !status) return status;
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  UniqueFd fd;
  if (Status status = openSocket(&fd); !status) return status;
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno == EINTR) continue;
    if (errno == ECONNREFUSED) {
      return Status::error(
          Code::Remote, fmt::format("nobody listens on '@{}': the process that should has ended, "
                                    "or runs in another network namespace",
                                    name));
    }
    if (errno != EAGAIN) {
      return Status::fromErrno(fmt::format("cannot connect to '@{}'", name), errno);
    }
    if (deadline.passed()) {
      return Status::error(
          Code::Timeout,
          fmt::format("'@{}' did not accept a connection within {} ms", name, timeoutMs));
    }
    ::usleep(kConnectRetryUs);
  }
  if (Status status = checkPeerUser(fd.get()); !status) {
    return status.inContext(fmt::format("listener of '@{}'", name));
  }
  *out = std::move(fd);
  return {};
}

Status acceptUnix(int listener, UniqueFd* out) {
  out->reset();
  UniqueFd fd;
  for (;;) {
    fd.reset(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) break;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
    return Status::fromErrno("cannot accept a connection on a unix socket", errno);
  }
  if (Status status = checkPeerUser(fd.get()); !status) return status;
  *out = std::move(fd);
  return {};
}

Status acceptUnixWithin(int listener, std::uint64_t timeoutMs, UniqueFd* out) {
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (;;) {
    if (Status status = acceptUnix(listener, out); !status || *out) return status;
    if (Status status = waitFor(listener, POLLIN, deadline, "waiting for a connection"); !status) {
      return status;
    }
  }
}

Status peerCredentials(int socket, PeerCredentials* out) {
  ucred credentials;
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return Status::fromErrno("cannot read who is at the other end of a unix socket", errno);
  }
  out->pid = credentials.pid;
  out->uid = credentials.uid;
  return {};
}

Status checkPeerUser(int socket) {
  PeerCredentials peer;
  if (Status status = peerCredentials(socket, &peer); !status) return status;
  if (peer.uid != ::geteuid()) {
    return Status::error(
        Code::Remote, fmt::format("refused: process {} runs as user {}, this one as user {}; the "
                                  "ranks of a job must run as one user",
                                  peer.pid, peer.uid, ::geteuid()));
  }
  return {};
}

Status sendWithFds(int socket, const void* data, std::size_t bytes, std::span<const int> fds,
                   bool* sent) {
  *sent = false;
  if (bytes == 0 || fds.size() > kMaxMessageFds) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("a message of {} bytes with {} descriptors cannot be sent (at "
                                     "least 1 byte, at most {} descriptors)",
                                     bytes, fds.size(), kMaxMessageFds));
  }
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxMessageFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
      *sent = true;  // SOCK_SEQPACKET: all or nothing
      return {};
    }
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:
      case ENOBUFS:
        return {};
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return Status::error(Code::Remote,
                             "the peer closed the connection (its process has ended)");
      case EMSGSIZE:
        return Status::error(
            Code::InvalidArgument,
            fmt::format("a message of {} bytes is too large for a unix socket; see "
                        "net.core.wmem_max",
                        bytes));
      default:
        return Status::fromErrno(
            fmt::format("cannot send {} bytes with {} descriptors", bytes, fds.size()), errno);
    }
  }
}

Status sendWithFdsWithin(int socket, const void* data, std::size_t bytes, std::span<const int> fds,
                         std::uint64_t timeoutMs) {
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (;;) {
    bool sent = false;
    if (Status status = sendWithFds(socket, data, bytes, fds, &sent); !status || sent) {
      return status;
    }
    if (Status status = waitFor(socket, POLLOUT, deadline, "waiting to send"); !status) {
      return status;
    }
  }
}

Status recvWithFds(int socket, void* buffer, std::size_t capacity, std::size_t* bytes,
                   std::vector<UniqueFd>* fds, ReceiveState* state) {
  *bytes = 0;
  fds->clear();
  iovec part{buffer, capacity};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxMessageFds * sizeof(int))];
  msghdr message{};
  ssize_t got;
  do {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      *state = ReceiveState::WouldBlock;
      return {};
    }
    if (errno == ECONNRESET) {  // closed with messages of ours unread
      *state = ReceiveState::Closed;
      return {};
    }
    return Status::fromErrno("cannot receive from a unix socket", errno);
  }
  // Taken over before anything is judged, so that nothing leaks.
  std::vector<UniqueFd> arrived;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      arrived.emplace_back(fd);
    }
  }
  if (got == 0) {
    *state = ReceiveState::Closed;
    return {};
  }
  *state = ReceiveState::Message;
  if (message.msg_flags & MSG_TRUNC) {
    return Status::error(Code::Remote,
                         fmt::format("the peer sent a message longer than {} bytes; both processes "
                                     "must run the same HOCCL version",
                                     capacity));
  }
  if (message.msg_flags & MSG_CTRUNC) {
    return Status::error(
        Code::System, fmt::format("not all descriptors of a message arrived: more than {} were "
                                  "sent, or this process is out of descriptors (raise ulimit -n)",
                                  kMaxMessageFds));
  }
  *bytes = static_cast<std::size_t>(got);
  *fds = std::move(arrived);
  return {};
}

Status recvWithFdsWithin(int socket, void* buffer, std::size_t capacity, std::size_t* bytes,
                         std::vector<UniqueFd>* fds, std::uint64_t timeoutMs) {
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (;;) {
    ReceiveState state = ReceiveState::WouldBlock;
    if (Status status = recvWithFds(socket, buffer, capacity, bytes, fds, &state); !status) {
      return status;
    }
    if (state == ReceiveState::Message) return {};
    if (state == ReceiveState::Closed) {
      return Status::error(Code::Remote, "the peer closed the connection (its process has ended)");
    }
    if (Status status = waitFor(socket, POLLIN, deadline, "waiting for a message"); !status) {
      return status;
    }
  }
}

}  // namespace hoccl
