// The connecting side of a bundle's set-up.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "common/base/random.h"
#include "common/base/time.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/tcp/bundle_sockets.h"
#include "common/net/tcp/bundle_wire.h"

namespace hoccl {
namespace {

using bundle_wire::Answer;
using bundle_wire::Greeting;
using bundle_wire::Role;

/// When another socket fails first, the control socket is given so long to say why.
constexpr std::uint64_t kReasonMs = 500;

class Connecting final : public BundleSetup {
 public:
  Connecting(const SocketAddress& to, const BundleOptions& options)
      : options_(options),
        to_(to),
        peerText_(to.text()),
        deadline_(Deadline::afterMs(options.timeoutMs)),
        reasonDeadline_(deadline_) {}

  Status start(const BundleNonce& nonce, const BundleHello& hello) {
    greeting_.nonce = nonce;
    greeting_.hello = hello;
    greeting_.dataSockets =
        static_cast<std::uint16_t>(options_.threads * options_.socketsPerThread);
    if (greeting_.dataSockets == 0 || greeting_.dataSockets > BundleOptions::kMaxSockets) {
      return Status::error(Code::InvalidArgument,
                           fmt::format("{} data sockets; 1 to {} are possible",
                                       greeting_.dataSockets, BundleOptions::kMaxSockets));
    }
    if (Status s = randomBytes(greeting_.bundle.data(), greeting_.bundle.size()); !s) return s;
    epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_) return Status::fromErrno("epoll of a TCP connection", errno);
    ends_.resize(std::size_t{greeting_.dataSockets} + 2);
    for (std::size_t i = 0; i < ends_.size(); ++i) {
      if (Status status = open(ends_[i], i); !status) return status;
    }
    // Over loopback the connections stand already.
    for (End& end : ends_) {
      if (problem_) greet(end);
    }
    return {};
  }

  State advance() override {
    if (state_ != State::Pending) return state_;
    epoll_event events[16];
    // Whom they concern does not matter: every socket is looked at.
    (void)::epoll_wait(epoll_.get(), events, 16, 0);
    for (End& end : ends_) {
      if (!end.greeted && problem_) greet(end);
    }
    if (ends_[0].greeted) readAnswer();
    if (state_ != State::Pending) return state_;
    if (!problem_ && (!ends_[0].greeted || reasonDeadline_.passed())) return fail(problem_);
    if (options_.waitForAccept && ends_[0].greeted) {
      if (problem_) lookForEnds();
      return state_;
    }
    if (deadline_.passed()) {
      return fail(Status::error(
          Code::Timeout,
          ends_[0].greeted
              ? fmt::format("no answer within {} ms (HOCCL_TIMEOUT_MS)", options_.timeoutMs)
              : fmt::format("no connection within {} ms (HOCCL_TIMEOUT_MS): does the network or a "
                            "firewall hold it back?",
                            options_.timeoutMs)));
    }
    return state_;
  }
  [[nodiscard]] int watchFd() const override { return epoll_.get(); }
  [[nodiscard]] Status status() const override { return status_; }
  [[nodiscard]] const BundleHello& hello() const override { return answer_.reply; }
  [[nodiscard]] std::uint32_t refusal() const override { return refusal_; }
  [[nodiscard]] const std::string& peerText() const override { return peerText_; }
  void accept(const BundleHello&) override {}
  void refuse(std::uint32_t, const std::string&) override {}

  Status take(FrameSink* dataSink, std::unique_ptr<Bundle>* out) override {
    if (state_ != State::Done) return Status::error(Code::Internal, "no bundle to take");
    BundleSockets sockets;
    sockets.control = std::move(ends_[0].socket);
    sockets.life = std::move(ends_[1].socket);
    for (std::size_t i = 2; i < ends_.size(); ++i) {
      sockets.data.push_back(std::move(ends_[i].socket));
    }
    return makeBundle(std::move(sockets), options_, peerText_, dataSink, out);
  }

 private:
  struct End {
    UniqueFd socket;
    Greeting greeting;
    std::size_t sent = 0;
    bool greeted = false;
  };

  Status open(End& end, std::size_t index) {
    end.greeting = greeting_;
    end.greeting.role = index == 0 ? Role::Control : index == 1 ? Role::Life : Role::Data;
    end.greeting.index = static_cast<std::uint16_t>(index < 2 ? 0 : index - 2);
    end.socket.reset(
        ::socket(to_.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
    if (!end.socket) return Status::fromErrno("cannot make a TCP socket", errno);
    if (Status status = tuneSocket(end.socket.get()); !status) return status;
    if (index == 1) {
      if (Status s = tuneLifeSocket(end.socket.get(), options_.timeoutMs); !s) return s;
    }
    sockaddr_storage address;
    const socklen_t length = to_.toSockaddr(&address);
    if (::connect(end.socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 &&
        errno != EINPROGRESS && errno != EINTR) {
      return connectError(errno);
    }
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, end.socket.get(), &event) != 0) {
      return Status::fromErrno("epoll_ctl of a TCP connection", errno);
    }
    return {};
  }

  Status connectError(int error) const {
    if (error == ECONNREFUSED) {
      return Status::error(
          Code::Remote,
          fmt::format("nobody listens at {}: the process that should has ended", peerText_));
    }
    if (error == ETIMEDOUT) {
      return Status::error(Code::Timeout, fmt::format("{} does not answer", peerText_));
    }
    return Status::fromErrno("cannot connect to " + peerText_, error);
  }

  void greet(End& end) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&end.greeting);
    while (end.sent < sizeof end.greeting) {
      const ssize_t sent = ::send(end.socket.get(), bytes + end.sent,
                                  sizeof end.greeting - end.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent >= 0) {
        end.sent += static_cast<std::size_t>(sent);
        continue;
      }
      // ENOTCONN: under way; the error of a connection that failed comes as its own.
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOTCONN) return;
      if (errno == EINTR) continue;
      problem_ = connectError(errno);
      reasonDeadline_ = Deadline::afterMs(kReasonMs);
      return;
    }
    end.greeted = true;
  }

  /// Without a deadline: a host or process that is gone shows on the sockets (on the life socket, if
  /// by nothing else).
  void lookForEnds() {
    for (End& end : ends_) {
      if (&end == &ends_[0] || !end.greeted) continue;
      char byte;
      const ssize_t got = ::recv(end.socket.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
      if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) {
        continue;
      }
      problem_ = got == 0 ? Status::error(Code::Remote, "its process has ended")
                          : connectError(errno);
      reasonDeadline_ = Deadline::afterMs(kReasonMs);
      return;
    }
  }

  void readAnswer() {
    End& control = ends_[0];
    auto* bytes = reinterpret_cast<std::byte*>(&answer_);
    while (answered_ < sizeof answer_) {
      const ssize_t got =
          ::recv(control.socket.get(), bytes + answered_, sizeof answer_ - answered_, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (got <= 0) {
        fail(Status::error(Code::Remote,
                           "it closed the connection without an answer: it is not HOCCL's, or "
                           "another process has taken over the port"));
        return;
      }
      answered_ += static_cast<std::size_t>(got);
      if (answered_ >= sizeof answer_.magic && answer_.magic != bundle_wire::kMagic) {
        fail(
            Status::error(Code::Remote, "its answer is not HOCCL's: another program has the port"));
        return;
      }
    }
    if (answer_.code != 0) {
      answer_.reason.back() = 0;
      refusal_ = answer_.code;
      fail(Status::error(Code::Remote, answer_.reason.data()));
      return;
    }
    // It answers yes only once it has every socket.
    state_ = State::Done;
  }

  State fail(const Status& why) {
    status_ = why.inContext(peerText_);
    return state_ = State::Failed;
  }

  BundleOptions options_;
  SocketAddress to_;
  std::string peerText_;
  Deadline deadline_, reasonDeadline_;
  Greeting greeting_;
  UniqueFd epoll_;
  std::vector<End> ends_;  ///< control, life, data
  Answer answer_;
  std::size_t answered_ = 0;
  std::uint32_t refusal_ = 0;
  State state_ = State::Pending;
  Status problem_;  ///< of a socket; the control socket may still tell a better reason
  Status status_;
};

}  // namespace

Status connectBundle(const SocketAddress& listener, const BundleNonce& nonce,
                     const SocketAddress& local, const BundleHello& hello,
                     const BundleOptions& options, std::unique_ptr<BundleSetup>* out) {
  if (!listener.valid()) return Status::error(Code::InvalidArgument, "no address to connect to");
  auto setup = std::make_unique<Connecting>(listener.withScopeOf(local), options);
  if (Status status = setup->start(nonce, hello); !status) return status;
  *out = std::move(setup);
  return {};
}

}  // namespace hoccl
