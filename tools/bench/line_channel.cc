#include "tools/bench/line_channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "common/base/time.h"

namespace hoccl::bench {
namespace {
// The longest message is the statistics of one rank, some kilobytes.
constexpr std::size_t kMaxLine = 4 << 20;
}  // namespace

Status LineChannel::send(const nlohmann::json& message, std::uint64_t timeoutMs) {
  // Text from outside (names, errors) may not be valid UTF-8: replaced, not thrown about.
  std::string line = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t sent =
        ::send(socket_.get(), line.data() + done, line.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      done += static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (deadline.passed())
        return Status::error(Code::Timeout, "the other process does not read its messages");
      pollfd entry{socket_.get(), POLLOUT, 0};
      ::poll(&entry, 1, deadline.remainingMs());
    } else if (errno != EINTR) {
      const int error = errno;
      if (error == EPIPE || error == ECONNRESET)
        return Status::error(Code::Remote, "the other process is gone");
      return Status::fromErrno("send on a bench channel", error);
    }
  }
  return {};
}

Status LineChannel::tryReceive(nlohmann::json* message, State* state) {
  for (;;) {
    if (const std::size_t end = buffer_.find('\n'); end != std::string::npos) {
      *message = nlohmann::json::parse(buffer_.begin(), buffer_.begin() + static_cast<long>(end),
                                       nullptr, false);
      const std::string line = buffer_.substr(0, std::min<std::size_t>(end, 80));
      buffer_.erase(0, end + 1);
      if (!message->is_object())
        return Status::error(Code::Remote,
                             fmt::format("a message that is no JSON object: {}", line));
      *state = State::Message;
      return {};
    }
    if (buffer_.size() > kMaxLine)
      return Status::error(Code::Remote, "a message longer than 4 MiB");
    char bytes[16384];
    const ssize_t got = ::recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
      buffer_.append(bytes, static_cast<std::size_t>(got));
    } else if (got == 0 || errno == ECONNRESET) {
      *state = State::Closed;
      return {};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      *state = State::Nothing;
      return {};
    } else if (errno != EINTR) {
      return Status::fromErrno("recv on a bench channel", errno);
    }
  }
}

Status LineChannel::receive(nlohmann::json* message, std::uint64_t timeoutMs) {
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (;;) {
    State state = State::Nothing;
    Status status = tryReceive(message, &state);
    if (!status || state == State::Message) return status;
    if (state == State::Closed) return Status::error(Code::Remote, "the other process is gone");
    if (deadline.passed())
      return Status::error(Code::Timeout, fmt::format("no message within {} ms", timeoutMs));
    pollfd entry{socket_.get(), POLLIN, 0};
    ::poll(&entry, 1, deadline.remainingMs());
  }
}

}  // namespace hoccl::bench
