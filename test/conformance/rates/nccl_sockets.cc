#include "test/conformance/rates/nccl_sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace conformance {
namespace {

constexpr std::size_t kMostInline = 128;

/// A connected socket of this side; `from` is the side that connects.
int connected(const Side& side, int from) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(fd >= 0);
  if (side.rank() == from) {
    side.take(&address.sin_port, sizeof address.sin_port);
    REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  } else {
    socklen_t size = sizeof address;
    REQUIRE(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(fd, 1) == 0);
    REQUIRE(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    side.give(&address.sin_port, sizeof address.sin_port);
    const int accepted = ::accept(fd, nullptr, nullptr);
    REQUIRE(accepted >= 0);
    ::close(fd);
    fd = accepted;
  }
  const int on = 1;
  REQUIRE(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  REQUIRE(::fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  return fd;
}

/// Calls until all bytes have gone or come; yields when there is nothing to do, as the proxies do.
template <typename Call>
void progress(Call call, std::size_t bytes) {
  for (std::size_t offset = 0; offset < bytes;) {
    const ssize_t moved = call(offset);
    REQUIRE(moved > 0 || (moved < 0 && errno == EAGAIN));
    if (moved > 0)
      offset += static_cast<std::size_t>(moved);
    else
      ::sched_yield();
  }
}

void send(int fd, std::size_t bytes) {
  std::array<char, sizeof(int) + kMostInline> message{};
  const int size = static_cast<int>(bytes);
  std::memcpy(message.data(), &size, sizeof size);
  const std::size_t all = sizeof size + bytes;
  progress([&](std::size_t at) { return ::send(fd, message.data() + at, all - at, MSG_DONTWAIT); },
           all);
}

void receive(int fd, std::size_t bytes) {
  std::array<char, kMostInline> data{};
  int size = 0;
  const auto into = [fd](void* to, std::size_t all) {
    progress(
        [&](std::size_t at) {
          return ::recv(fd, static_cast<char*>(to) + at, all - at, MSG_DONTWAIT);
        },
        all);
  };
  into(&size, sizeof size);
  REQUIRE(size == static_cast<int>(bytes));
  into(data.data(), bytes);
}

}  // namespace

double ncclSocketsPingPong(const Side& side, std::size_t bytes, std::size_t count) {
  REQUIRE(bytes <= kMostInline);
  int out = -1, in = -1;
  for (const int from : {0, 1}) (side.rank() == from ? out : in) = connected(side, from);
  side.meet();
  const double begin = now();
  for (std::size_t i = 0; i < count; ++i) {
    if (side.rank() == 0) send(out, bytes);
    receive(in, bytes);
    if (side.rank() == 1) send(out, bytes);
  }
  const double seconds = (now() - begin) / static_cast<double>(count) / 2;
  side.meet();
  ::close(out);
  ::close(in);
  return seconds;
}

}  // namespace conformance
