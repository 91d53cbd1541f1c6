#include "plugin-tuner/agreement.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/base/fd.h"
#include "common/base/host_identity.h"

namespace hoccl {
namespace {

using Clock = Agreement::Clock;
using std::chrono::milliseconds;

/// Between two attempts to connect.
constexpr milliseconds kRetryPause{50};

std::string errnoText(int error) {
  return fmt::format("{} (errno {})", std::strerror(error), error);
}

}  // namespace

class Agreement::Member {
 public:
  explicit Member(Options options) : options_(std::move(options)) {
    if (options_.host.empty()) options_.host = shortHostName();
  }

  Status start(std::uint32_t phase, std::string payload, std::string veto);
  State poll();
  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] bool said() const { return step_ == Step::Receive; }
  [[nodiscard]] const wire::Verdict& verdict() const { return verdict_; }
  [[nodiscard]] const Status& status() const { return status_; }

  /// What the next progress depends on; fd -1 where it is only time.
  [[nodiscard]] pollfd waitsFor() const;
  [[nodiscard]] Clock::time_point nextDeadline() const;

 private:
  enum class Step { Connect, Connecting, Send, Receive };

  void connectNow();
  void finishConnect();
  void connectFailed(int error);
  void sendSome();
  void receiveSome();
  void takeMessages();
  void fail(Code code, const std::string& what);
  void end(State state);

  Options options_;
  State state_ = State::Idle;
  Step step_ = Step::Connect;
  Status status_;
  wire::Verdict verdict_;
  UniqueFd socket_;
  std::uint32_t phase_ = 0;
  std::string out_;
  std::size_t sent_ = 0;
  std::string in_;
  bool welcomed_ = false;
  int connectError_ = 0;
  Clock::time_point retryAt_;
  Clock::time_point connectBy_;
  Clock::time_point verdictBy_;
};

Status Agreement::Member::start(std::uint32_t phase, std::string payload, std::string veto) {
  if (options_.nranks == 0 || options_.nranks > wire::kMaxRanks ||
      options_.rank >= options_.nranks) {
    return Status::error(Code::InvalidArgument, fmt::format("agreement: no rank {} of {} ranks",
                                                            options_.rank, options_.nranks));
  }
  if (payload.size() > wire::kMaxPayload) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("agreement: payload of {} bytes, at most {} are allowed",
                                     payload.size(), wire::kMaxPayload));
  }
  const bool first = state_ == State::Idle && phase_ == 0;
  const bool next = state_ == State::Done && verdict_.steer;
  if (!(first || next) || phase != phase_ + 1) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("agreement: phase {} cannot follow phase {} here", phase, phase_));
  }
  wire::Hello hello;
  hello.rootNonce = options_.root.nonce;
  hello.key = options_.key;
  hello.rank = options_.rank;
  hello.nranks = options_.nranks;
  hello.phase = phase;
  hello.host = options_.host;
  hello.policyDigest = options_.policyDigest;
  hello.policyText = options_.policyText;
  hello.veto = std::move(veto);
  hello.payload = std::move(payload);
  out_ = wire::encode(hello);
  sent_ = 0;
  phase_ = phase;
  verdict_ = {};
  welcomed_ = false;
  const auto now = Clock::now();
  retryAt_ = now;
  connectBy_ = now + milliseconds(options_.timeoutMs);
  verdictBy_ = connectBy_ + milliseconds(options_.agreeTimeoutMs);
  step_ = first ? Step::Connect : Step::Send;
  state_ = State::Pending;
  poll();
  return {};
}

Agreement::State Agreement::Member::poll() {
  if (state_ != State::Pending) return state_;
  if (step_ == Step::Connect && Clock::now() >= retryAt_) connectNow();
  if (step_ == Step::Connecting) finishConnect();
  if (state_ == State::Pending && step_ == Step::Send) sendSome();
  if (state_ == State::Pending && step_ == Step::Receive) receiveSome();
  if (state_ != State::Pending) return state_;
  const auto now = Clock::now();
  const bool connected = step_ == Step::Send || step_ == Step::Receive;
  if (!connected && now >= connectBy_) {
    fail(
        Code::Timeout,
        fmt::format("no connection within {} ms{}{}: is the process that made the unique id alive, "
                    "and does a firewall leave its ports open to this host?",
                    options_.timeoutMs, connectError_ ? ", last error " : "",
                    connectError_ ? errnoText(connectError_) : ""));
  } else if (now >= verdictBy_) {
    fail(Code::Timeout,
         fmt::format("{}: is the process that made the unique id stopped or overloaded?",
                     welcomed_ ? "it answered, but no verdict came in time"
                               : "connected, but it never answered"));
  }
  return state_;
}

pollfd Agreement::Member::waitsFor() const {
  const bool reads = step_ == Step::Receive;
  return {step_ == Step::Connect ? -1 : socket_.get(), static_cast<short>(reads ? POLLIN : POLLOUT),
          0};
}

Clock::time_point Agreement::Member::nextDeadline() const {
  if (step_ == Step::Connect) return std::min(retryAt_, connectBy_);
  return step_ == Step::Connecting ? connectBy_ : verdictBy_;
}

void Agreement::Member::connectNow() {
  sockaddr_storage address;
  const socklen_t length = toSocketAddress(options_.root, &address);
  socket_ = UniqueFd(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_) return connectFailed(errno);
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  step_ = Step::Connecting;
  if (connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 &&
      errno != EINPROGRESS && errno != EINTR) {
    connectFailed(errno);
  }
}

void Agreement::Member::finishConnect() {
  pollfd ready{socket_.get(), POLLOUT, 0};
  if (::poll(&ready, 1, 0) <= 0) return;
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error) return connectFailed(error);
  step_ = Step::Send;
}

void Agreement::Member::connectFailed(int error) {
  connectError_ = error;
  socket_.reset();
  step_ = Step::Connect;
  retryAt_ = Clock::now() + kRetryPause;
}

void Agreement::Member::sendSome() {
  while (sent_ < out_.size()) {
    const ssize_t n = send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (n >= 0) {
      sent_ += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      // The root may have sent a verdict and closed; what it said counts more than the error here.
      break;
    }
  }
  step_ = Step::Receive;
}

void Agreement::Member::receiveSome() {
  char buffer[65536];
  while (state_ == State::Pending) {
    const ssize_t n = recv(socket_.get(), buffer, sizeof buffer, 0);
    if (n > 0) {
      in_.append(buffer, static_cast<std::size_t>(n));
      takeMessages();
    } else if (n == 0) {
      fail(Code::Remote, welcomed_
                             ? "it closed the connection before the verdict: has its process "
                               "ended?"
                             : "it closed the connection without an answer: does the unique id "
                               "come from a process that still runs?");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      fail(Code::Remote, "connection lost, " + errnoText(errno) + ": has its process ended?");
    }
  }
}

void Agreement::Member::takeMessages() {
  while (state_ == State::Pending && in_.size() >= wire::kHeaderBytes) {
    wire::Header header;
    Status status = wire::decodeHeader(in_, &header);
    if (status && header.type == wire::Type::Hello) {
      status = Status::error(Code::Remote, "sent what only a rank sends");
    }
    if (status && header.bodyBytes > wire::maxVerdictBody(options_.nranks)) {
      status = Status::error(Code::Remote, fmt::format("message of {} bytes", header.bodyBytes));
    }
    if (!status) return fail(Code::Remote, status.message());
    if (in_.size() < wire::kHeaderBytes + header.bodyBytes) return;
    const auto body = std::string_view(in_).substr(wire::kHeaderBytes, header.bodyBytes);
    if (header.type == wire::Type::Welcome) {
      wire::Welcome welcome;
      status = wire::decode(body, &welcome);
      // The root's timeout counts, not ours: wait at least that long for what it decides.
      if (status && !welcomed_) {
        welcomed_ = true;
        verdictBy_ = std::max(verdictBy_, Clock::now() + milliseconds(welcome.agreeTimeoutMs) +
                                              milliseconds(options_.timeoutMs));
      }
    } else {
      wire::Verdict verdict;
      status = wire::decode(body, options_.nranks, &verdict);
      if (status) {
        verdict_ = std::move(verdict);
        end(State::Done);
      }
    }
    if (!status) return fail(Code::Remote, status.message());
    in_.erase(0, wire::kHeaderBytes + header.bodyBytes);
  }
}

void Agreement::Member::fail(Code code, const std::string& what) {
  status_ = Status::error(
      code,
      fmt::format("rank {} of {} on host {} cannot learn whether to steer from the agreement "
                  "root at {}: {} (HOCCL_STEER=0 on all ranks leaves the job to plain NCCL)",
                  options_.rank, options_.nranks, options_.host, addressText(options_.root), what));
  end(State::Failed);
}

void Agreement::Member::end(State state) {
  state_ = state;
  // No further phase follows a no or a failure: give the descriptor back at once.
  if (state == State::Failed || !verdict_.steer) socket_.reset();
}

Agreement::Agreement(Options options) : member_(std::make_unique<Member>(std::move(options))) {}
Agreement::~Agreement() = default;
Agreement::Agreement(Agreement&&) noexcept = default;
Agreement& Agreement::operator=(Agreement&&) noexcept = default;

Status Agreement::start(std::uint32_t phase, std::string payload, std::string veto) {
  return member_->start(phase, std::move(payload), std::move(veto));
}
Agreement::State Agreement::poll() { return member_->poll(); }
Agreement::State Agreement::state() const { return member_->state(); }
bool Agreement::said() const { return member_->said(); }
const wire::Verdict& Agreement::verdict() const { return member_->verdict(); }
const Status& Agreement::status() const { return member_->status(); }

Agreement::State Agreement::wait(Clock::time_point deadline) {
  Agreement* const self = this;
  waitAll({&self, 1}, deadline);
  return state();
}

bool Agreement::waitAll(std::span<Agreement* const> agreements, Clock::time_point deadline) {
  std::vector<pollfd> fds;
  while (true) {
    fds.clear();
    auto until = deadline;
    bool pending = false;
    for (Agreement* each : agreements) {
      if (each->poll() != State::Pending) continue;
      pending = true;
      fds.push_back(each->member_->waitsFor());
      until = std::min(until, each->member_->nextDeadline());
    }
    if (!pending) return true;
    const auto now = Clock::now();
    if (now >= deadline) return false;
    // Rounded up, so that the last millisecond is slept and not spun through.
    const auto left = std::chrono::ceil<milliseconds>(until - now).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
  }
}

}  // namespace hoccl
