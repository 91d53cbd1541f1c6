#include "common/net/tcp/bundle.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/net/tcp/bundle_sockets.h"
#include "common/net/tcp/socket_workers.h"

namespace hoccl {
namespace {

/// Messages that the kernel has not taken wait here; beyond that sendControl says later.
constexpr std::size_t kControlBacklog = 256 << 10;
/// What one receiveControl() takes at most, so that a talkative peer does not keep its caller.
constexpr std::size_t kControlBudget = 256 << 10;
constexpr std::size_t kControlReadAhead = 16 << 10;
constexpr unsigned kManyCpus = 8;
constexpr std::uint64_t kMaxThreads = 16, kMaxSocketsPerThread = 16;

class TcpBundle final : public Bundle {
 public:
  TcpBundle(BundleSockets sockets, const BundleOptions& options, std::string peerText,
            FrameSink* dataSink)
      : peerText_(std::move(peerText)),
        control_(std::move(sockets.control),
                 {.maxPayload = kMaxControlPayload, .readAhead = kControlReadAhead, .queue = 1}),
        workers_({std::move(sockets.life), std::move(sockets.data), control_.fd()}, options,
                 dataSink, peerText_) {
    backlog_.reserve(2 * kControlBacklog);
  }
  ~TcpBundle() override { ::shutdown(control_.fd(), SHUT_WR); }
  Status start() { return workers_.start(); }

  [[nodiscard]] bool sendControl(std::uint16_t kind,
                                 const std::array<std::byte, kFrameUserBytes>& user,
                                 const void* payload, std::size_t bytes) override {
    if (sendEnded_ || bytes > kMaxControlPayload) return false;
    FrameHeader header;
    header.kind = kind;
    header.bytes = bytes;
    header.user = user;
    if (controlBacklog() > 0) flush();
    std::size_t sent = 0;
    if (controlBacklog() == 0) {
      iovec parts[2] = {{&header, sizeof header}, {const_cast<void*>(payload), bytes}};
      sent = put(parts, bytes > 0 ? 2 : 1);
      if (sendEnded_) return false;
    } else if (controlBacklog() + sizeof header + bytes > kControlBacklog) {
      return false;
    }
    const auto keep = [this, &sent](const void* data, std::size_t length) {
      const std::size_t skip = std::min(sent, length);
      sent -= skip;
      const auto* from = static_cast<const std::byte*>(data);
      backlog_.insert(backlog_.end(), from + skip, from + length);
    };
    if (sent == sizeof header + bytes) return true;
    keep(&header, sizeof header);
    keep(payload, bytes);
    workers_.awaitControlRoom();
    return true;
  }

  bool receiveControl(FrameSink& sink) override {
    if (controlBacklog() > 0) flush();
    if (receiveEnded_) return false;
    Counter counter(&sink);
    switch (control_.receive(counter, kControlBudget)) {
      case FramedSocket::Io::Ended:
        receiveEnded_ = true;
        workers_.end(
            Status::error(Code::Remote, "the peer closed the connection (its process has ended)"),
            false);
        break;
      case FramedSocket::Io::Failed:
        receiveEnded_ = true;
        workers_.end(control_.status(), control_.nonsense());
        break;
      default:
        break;
    }
    if (counter.any && workers_.ending()) lastMessageNs_ = monotonicNs();
    return counter.any;
  }
  [[nodiscard]] bool controlOver() const override {
    if (receiveEnded_ || workers_.cut()) return true;
    const std::uint64_t since = workers_.endingSinceNs();
    return since != 0 && monotonicNs() > std::max(since, lastMessageNs_) + kLastBytesNs;
  }
  void sayEnd() override { workers_.sayEnd(); }
  [[nodiscard]] std::size_t controlBacklog() const override { return backlog_.size() - flushed_; }
  [[nodiscard]] int controlFd() const override { return control_.fd(); }

  [[nodiscard]] bool post(const Transfer& transfer) override { return workers_.post(transfer); }
  void resumeData() override { workers_.resume(); }

  [[nodiscard]] bool gone() const override { return workers_.gone(); }
  [[nodiscard]] std::uint64_t endingSinceNs() const override { return workers_.endingSinceNs(); }
  [[nodiscard]] Status status() const override { return workers_.status(); }
  void nudge() override { workers_.nudge(); }
  [[nodiscard]] int watchFd() const override { return workers_.watchFd(); }

  [[nodiscard]] bool drained() const override {
    if (gone()) return true;
    int unsent = 0;
    if (controlBacklog() > 0) return false;
    if (::ioctl(control_.fd(), SIOCOUTQ, &unsent) == 0 && unsent > 0) return false;
    return workers_.drained();
  }
  [[nodiscard]] const std::string& peerText() const override { return peerText_; }
  [[nodiscard]] unsigned dataSockets() const override { return workers_.count(); }

 private:
  /// Passes on, and knows whether there was anything.
  struct Counter final : FrameSink {
    explicit Counter(FrameSink* sink) : sink(sink) {}
    std::byte* place(const FrameHeader& header, Status* bad) override {
      return sink->place(header, bad);
    }
    void arrived(const FrameHeader& header) override {
      any = true;
      sink->arrived(header);
    }
    FrameSink* sink;
    bool any = false;
  };

  /// What the kernel takes at once; 0 as well when the connection has ended.
  std::size_t put(iovec* parts, std::size_t count) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    for (;;) {
      const ssize_t sent = ::sendmsg(control_.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent >= 0) return static_cast<std::size_t>(sent);
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      sendEnded_ = true;
      workers_.end(errno == EPIPE || errno == ECONNRESET
                       ? Status::error(Code::Remote,
                                       "the peer closed the connection (its process has ended)")
                       : Status::fromErrno("cannot send to the peer", errno),
                   false);
      return 0;
    }
  }
  void flush() {
    if (sendEnded_) return;
    iovec part{backlog_.data() + flushed_, controlBacklog()};
    flushed_ += put(&part, 1);
    if (flushed_ == backlog_.size()) {
      backlog_.clear();
      flushed_ = 0;
      return;
    }
    workers_.awaitControlRoom();
    if (flushed_ > kControlBacklog / 2) {
      backlog_.erase(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(flushed_));
      flushed_ = 0;
    }
  }

  std::string peerText_;
  FramedSocket control_;
  std::vector<std::byte> backlog_;  ///< from flushed_ on: not taken by the kernel yet
  std::size_t flushed_ = 0;
  bool sendEnded_ = false, receiveEnded_ = false;
  std::uint64_t lastMessageNs_ = 0;  ///< the last that came when it was ending already
  SocketWorkers workers_;
};

/// A number from one of NCCL's variables; `fallback` where it is unset, or makes no sense.
std::uint64_t ncclNumber(const char* variable, std::uint64_t highest, std::uint64_t fallback) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return fallback;
  const std::string_view view(text);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  if (error != std::errc() || end != view.data() + view.size() || value == 0 || value > highest) {
    logWarn("{}='{}' is not a number from 1 to {}; using {}", variable, view, highest, fallback);
    return fallback;
  }
  return value;
}

Status setOption(int fd, int level, int option, int value, const char* name) {
  if (::setsockopt(fd, level, option, &value, sizeof value) == 0) return {};
  return Status::fromErrno(fmt::format("cannot set {} of a TCP socket", name), errno);
}

}  // namespace

unsigned BundleOptions::usualSockets() {
  return std::thread::hardware_concurrency() >= kManyCpus ? 2 : 1;
}

Status BundleOptions::fromEnvironment(const Config& config, BundleOptions* out) {
  BundleOptions options;
  options.timeoutMs = config.timeoutMs;
  options.spinUs = config.spinUs;
  std::uint64_t threads = config.socketThreads, sockets = config.socketsPerThread;
  if (threads == 0) threads = ncclNumber("NCCL_SOCKET_NTHREADS", kMaxThreads, options.threads);
  if (sockets == 0) {
    sockets = ncclNumber("NCCL_NSOCKS_PERTHREAD", kMaxSocketsPerThread, options.socketsPerThread);
  }
  if (threads * sockets > kMaxSockets) {
    return Status::error(
        Code::InvalidConfig,
        fmt::format("{} socket threads (HOCCL_SOCKET_NTHREADS or NCCL_SOCKET_NTHREADS) of {} "
                    "sockets (HOCCL_NSOCKS_PERTHREAD or NCCL_NSOCKS_PERTHREAD) are more than {} "
                    "sockets a peer",
                    threads, sockets, kMaxSockets));
  }
  options.threads = static_cast<unsigned>(threads);
  options.socketsPerThread = static_cast<unsigned>(sockets);
  *out = std::move(options);
  return {};
}

Status makeBundle(BundleSockets sockets, const BundleOptions& options, std::string peerText,
                  FrameSink* dataSink, std::unique_ptr<Bundle>* out) {
  auto bundle =
      std::make_unique<TcpBundle>(std::move(sockets), options, std::move(peerText), dataSink);
  if (Status status = bundle->start(); !status) return status;
  *out = std::move(bundle);
  return {};
}

Status tuneSocket(int fd) { return setOption(fd, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"); }

Status tuneLifeSocket(int fd, std::uint64_t timeoutMs) {
  // A probe each second of silence; TCP_USER_TIMEOUT says when no answer means the end. On this
  // socket alone: on one with data it would also end a connection whose peer is merely stopped.
  // The clock is looked at with each probe, once a second, so less than the bound.
  const auto user = static_cast<int>(std::min<std::uint64_t>(timeoutMs - timeoutMs / 4, 1u << 30));
  if (Status s = setOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"); !s) return s;
  if (Status s = setOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1, "TCP_KEEPIDLE"); !s) return s;
  if (Status s = setOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1, "TCP_KEEPINTVL"); !s) return s;
  const int probes = std::clamp(user / 1000 - 1, 1, 127);
  if (Status s = setOption(fd, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT"); !s) return s;
  return setOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, user, "TCP_USER_TIMEOUT");
}

}  // namespace hoccl
