#include "tools/bench/net_link.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/relax_cpu.h"
#include "common/base/time.h"

namespace hoccl::bench {
namespace {

/// Between two looks at the clock, and two offers of the CPU to somebody else.
constexpr unsigned kSpins = 256;

}  // namespace

Status NetLink::pingPong(int iterations, double* seconds) {
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < iterations; ++i) {
    if (pair_.side == 0) {
      if (Status status = say(); !status) return status;
    }
    if (Status status = listen(); !status) return status;
    if (pair_.side == 1) {
      if (Status status = say(); !status) return status;
    }
  }
  *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
  return {};
}

Status NetLink::burst(int messages, double* seconds) {
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < messages; ++i) {
    if (Status status = pair_.side == 0 ? say() : listen(); !status) return status;
  }
  if (Status status = pair_.side == 0 ? listen() : say(); !status) return status;
  *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
  return {};
}

Status tell(const NetPair& pair, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(pair.talk, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return Status::fromErrno("the other process of the bench", errno);
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return {};
}

Status hear(const NetPair& pair, void* data, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  const Deadline deadline = Deadline::afterMs(pair.timeoutMs);
  while (bytes > 0) {
    pollfd entry{pair.talk, POLLIN, 0};
    if (::poll(&entry, 1, deadline.remainingMs()) <= 0 && deadline.passed()) {
      return Status::error(Code::Timeout, fmt::format("the other process of the bench has said "
                                                      "nothing for {} ms",
                                                      pair.timeoutMs));
    }
    const ssize_t got = ::recv(pair.talk, at, bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return Status::error(Code::Remote, "the other process of the bench has ended");
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

Status NetBuffer::create(std::uint64_t bytes, NetBuffer* out) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::fromErrno(fmt::format("cannot take {} bytes of memory", bytes), errno);
  }
  std::memset(memory, 1, bytes);
  NetBuffer buffer;
  buffer.data_ = static_cast<std::byte*>(memory);
  buffer.bytes_ = bytes;
  *out = std::move(buffer);
  return {};
}

NetBuffer::~NetBuffer() {
  if (data_) ::munmap(data_, bytes_);
}

NetWait::NetWait(const NetPair& pair, const char* what)
    : what_(what), endNs_(monotonicNs() + pair.timeoutMs * 1'000'000) {}

Status NetWait::again() {
  if (++rounds_ % kSpins != 0) {
    relaxCpu();
    return {};
  }
  ::sched_yield();
  if (monotonicNs() < endNs_) return {};
  return Status::error(Code::Timeout, fmt::format("{} took too long", what_));
}

}  // namespace hoccl::bench
