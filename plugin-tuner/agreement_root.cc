#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "common/base/fd.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/time.h"
#include "plugin-tuner/agreement.h"
#include "plugin-tuner/agreement_ledger.h"

namespace hoccl {
namespace {

using Clock = AgreementLedger::Clock;
using std::chrono::milliseconds;

constexpr int kBacklog = 4096;
/// Out of descriptors: how long the listening socket is left alone.
constexpr milliseconds kAcceptPause{100};
/// Strangers are reported at most so often at warning level, so that a port scan cannot fill a log.
constexpr unsigned kLoudStrangers = 32;
/// epoll's names for what is not a connection; connections count from there.
constexpr std::uint64_t kListener = 0;
constexpr std::uint64_t kWakeUp = 1;
constexpr std::uint64_t kFirstConnection = 2;

std::string peerText(const sockaddr_storage& address) {
  Tail tail;
  if (address.ss_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, &address, sizeof v4);
    tail.family = 4;
    tail.port = ntohs(v4.sin_port);
    std::memcpy(tail.address.data(), &v4.sin_addr, 4);
  } else {
    sockaddr_in6 v6;
    std::memcpy(&v6, &address, sizeof v6);
    const bool mapped = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    tail.family = mapped ? 4 : 6;
    tail.port = ntohs(v6.sin6_port);
    tail.scopeId = v6.sin6_scope_id;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&v6.sin6_addr);
    std::copy(bytes + (mapped ? 12 : 0), bytes + 16, tail.address.begin());
  }
  return addressText(tail);
}

Status openListener(UniqueFd* out, std::uint16_t* port) {
  // One socket for both families where the host has IPv6, else IPv4 alone.
  UniqueFd fd(socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_storage address{};
  socklen_t length = 0;
  const int off = 0;
  if (fd && setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) {
    address.ss_family = AF_INET6;
    length = sizeof(sockaddr_in6);
  }
  if (!length || bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    address = {};
    address.ss_family = AF_INET;
    length = sizeof(sockaddr_in);
    fd = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd || bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      return Status::fromErrno("agreement root: no socket to listen on", errno);
    }
  }
  length = sizeof address;
  if (listen(fd.get(), kBacklog) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return Status::fromErrno("agreement root: cannot listen", errno);
  }
  // The port lies at the same place in both families.
  *port = ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  *out = std::move(fd);
  return {};
}

}  // namespace

class AgreementRoot::Service {
 public:
  Service() = default;
  ~Service() { stop(); }

  Status start(const Options& options);
  Status newRoot(Tail* tail);
  void drain(std::uint64_t timeoutMs);
  void stop();

 private:
  struct Connection {
    UniqueFd fd;
    std::string peer;
    std::string in;
    std::deque<AgreementLedger::Message> out;
    std::size_t sent = 0;  ///< of out.front()
    bool known = false;    ///< has shown a nonce of ours
    std::optional<Clock::time_point> deadline;
  };
  using Connections = std::unordered_map<std::uint64_t, Connection>;

  void run();
  void acceptAll();
  void readFrom(std::uint64_t id, Connection& connection);
  Status takeMessages(std::uint64_t id, Connection& connection);
  void deliver(std::vector<AgreementLedger::Delivery> deliveries);
  bool flush(Connection& connection);
  void watch(std::uint64_t id, const Connection& connection);
  void drop(std::uint64_t id, const std::string& why);
  void setDeadline(std::uint64_t id, Connection& connection, std::optional<Clock::time_point> when);
  void expire();
  [[nodiscard]] int sleepMs() const;
  bool isOurs(std::uint64_t nonce);

  std::mutex mutex_;  ///< start, stop and the nonces
  /// Eight bytes for each unique id this process ever made: never dropped, since an old
  /// communicator may still be split.
  std::unordered_set<std::uint64_t> nonces_;
  Options options_;
  std::uint16_t port_ = 0;
  std::thread thread_;
  UniqueFd listener_, epoll_, wakeUp_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> draining_{false}, drained_{false};

  // The thread's own.
  std::optional<AgreementLedger> ledger_;
  Connections connections_;
  std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines_;
  std::vector<AgreementLedger::Delivery> pending_;
  std::uint64_t nextId_ = kFirstConnection;
  std::optional<Clock::time_point> acceptAgain_;
  unsigned strangers_ = 0;
};

Status AgreementRoot::Service::start(const Options& options) {
  const std::lock_guard lock(mutex_);
  if (thread_.joinable()) return {};
  options_ = options;
  if (Status status = openListener(&listener_, &port_); !status) return status;
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  wakeUp_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event listenerEvent{EPOLLIN, {.u64 = kListener}};
  epoll_event wakeUpEvent{EPOLLIN, {.u64 = kWakeUp}};
  if (!epoll_ || !wakeUp_ ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &listenerEvent) != 0 ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeUp_.get(), &wakeUpEvent) != 0) {
    return Status::fromErrno("agreement root: epoll", errno);
  }
  ledger_.emplace(milliseconds(options.agreeTimeoutMs), options.maxVerdicts);
  stopping_ = false;
  // The application's signals are the application's threads' business.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "hoccl-agree");
  } catch (const std::system_error& error) {
    status = Status::fromErrno("agreement root: cannot start its thread", error.code().value());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

/// `tail` holds the address.
Status AgreementRoot::Service::newRoot(Tail* tail) {
  Tail made = *tail;
  if (Status status = random64(&made.nonce); !status) return status;
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    return Status::error(Code::InvalidArgument, "agreement root: not started");
  }
  made.port = port_;
  nonces_.insert(made.nonce);
  *tail = made;
  return {};
}

void AgreementRoot::Service::stop() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) return;
  stopping_ = true;
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from its end.
  [[maybe_unused]] const ssize_t n = write(wakeUp_.get(), &one, sizeof one);
  thread_.join();
  connections_.clear();
  deadlines_.clear();
  listener_.reset();
  epoll_.reset();
  wakeUp_.reset();
}

bool AgreementRoot::Service::isOurs(std::uint64_t nonce) {
  const std::lock_guard lock(mutex_);
  return nonces_.contains(nonce);
}

void AgreementRoot::Service::run() {
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const int n = epoll_wait(epoll_.get(), events.data(), events.size(), sleepMs());
    for (int i = 0; i < n && !stopping_; ++i) {
      const std::uint64_t id = events[i].data.u64;
      if (id == kListener) {
        acceptAll();
      } else if (id == kWakeUp) {
        std::uint64_t wakes = 0;
        [[maybe_unused]] const ssize_t got = read(wakeUp_.get(), &wakes, sizeof wakes);
      } else {
        const auto found = connections_.find(id);
        if (found == connections_.end()) continue;
        if (events[i].events & EPOLLOUT && !flush(found->second)) {
          drop(id, "");
          continue;
        }
        watch(id, found->second);
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readFrom(id, found->second);
      }
    }
    expire();
    if (draining_ && std::all_of(connections_.begin(), connections_.end(),
                                 [](const auto& each) { return each.second.out.empty(); })) {
      drained_ = true;
    }
  }
}

void AgreementRoot::Service::drain(std::uint64_t timeoutMs) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) return;
  drained_ = false;
  draining_ = true;
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  while (!drained_ && !deadline.passed()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(wakeUp_.get(), &one, sizeof one);
    ::usleep(200);
  }
  draining_ = false;
}

int AgreementRoot::Service::sleepMs() const {
  auto next = ledger_->nextDeadline();
  if (!deadlines_.empty()) next = std::min(next, deadlines_.begin()->first);
  if (acceptAgain_) next = std::min(next, *acceptAgain_);
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60000));
}

void AgreementRoot::Service::expire() {
  const auto now = Clock::now();
  if (acceptAgain_ && now >= *acceptAgain_) {
    acceptAgain_.reset();
    epoll_event event{EPOLLIN, {.u64 = kListener}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
  }
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    drop(deadlines_.begin()->second, fmt::format("nothing moved for {} ms", options_.timeoutMs));
  }
  std::vector<AgreementLedger::Delivery> out;
  ledger_->expire(now, &out);
  deliver(std::move(out));
}

void AgreementRoot::Service::acceptAll() {
  while (true) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    UniqueFd fd(accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      logWarn(
          "agreement root: cannot accept a connection: {} (errno {}); {} are open, raise the "
          "limit of open files (ulimit -n) of this process",
          std::strerror(errno), errno, connections_.size());
      epoll_event event{0, {.u64 = kListener}};
      epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
      acceptAgain_ = Clock::now() + kAcceptPause;
      return;
    }
    const int on = 1;
    // Keep-alive finds hosts that died between two phases, where nothing is due from them.
    setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    const std::uint64_t id = nextId_++;
    epoll_event event{EPOLLIN, {.u64 = id}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) continue;
    Connection& connection = connections_[id];
    connection.fd = std::move(fd);
    connection.peer = peerText(address);
    setDeadline(id, connection, Clock::now() + milliseconds(options_.timeoutMs));
  }
}

void AgreementRoot::Service::readFrom(std::uint64_t id, Connection& connection) {
  char buffer[wire::kMaxHelloBody + wire::kHeaderBytes];
  while (true) {
    const ssize_t n = recv(connection.fd.get(), buffer, sizeof buffer, 0);
    if (n > 0) {
      connection.in.append(buffer, static_cast<std::size_t>(n));
      const Status status = takeMessages(id, connection);
      // Deliveries may fail and drop connections, this one too: nothing of it is used after them.
      const bool still = status.ok();
      if (!still) drop(id, status.message());
      deliver(std::exchange(pending_, {}));
      if (!still || !connections_.contains(id)) return;
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    } else {
      const std::string cut =
          connection.in.empty()
              ? std::string()
              : fmt::format("ended after {} bytes of a message", connection.in.size());
      return drop(id, cut);
    }
  }
}

Status AgreementRoot::Service::takeMessages(std::uint64_t id, Connection& connection) {
  while (connection.in.size() >= wire::kHeaderBytes) {
    wire::Header header;
    if (Status status = wire::decodeHeader(connection.in, &header); !status) return status;
    if (header.type != wire::Type::Hello || header.bodyBytes > wire::kMaxHelloBody) {
      return Status::error(Code::Remote,
                           fmt::format("message of type {} with {} bytes",
                                       static_cast<int>(header.type), header.bodyBytes));
    }
    if (connection.in.size() < wire::kHeaderBytes + header.bodyBytes) return {};
    const auto body = std::string_view(connection.in).substr(wire::kHeaderBytes, header.bodyBytes);
    wire::Hello hello;
    if (Status status = wire::decode(body, header.version, &hello); !status) return status;
    if (!isOurs(hello.rootNonce)) {
      return Status::error(Code::Remote,
                           "its nonce is not that of a unique id made by this process");
    }
    connection.in.erase(0, wire::kHeaderBytes + header.bodyBytes);
    connection.known = true;
    setDeadline(id, connection, std::nullopt);
    wire::Welcome welcome{static_cast<std::uint32_t>(options_.agreeTimeoutMs)};
    pending_.push_back({id, std::make_shared<const std::string>(wire::encode(welcome))});
    if (Status status =
            ledger_->take(id, header.version, std::move(hello), Clock::now(), &pending_);
        !status) {
      return status;
    }
  }
  return {};
}

void AgreementRoot::Service::deliver(std::vector<AgreementLedger::Delivery> deliveries) {
  for (auto& [id, message] : deliveries) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Connection& connection = found->second;
    connection.out.push_back(std::move(message));
    if (!flush(connection)) {
      drop(id, "");
      continue;
    }
    watch(id, connection);
  }
}

/// False when the connection is broken.
bool AgreementRoot::Service::flush(Connection& connection) {
  while (!connection.out.empty()) {
    const std::string& message = *connection.out.front();
    const ssize_t n = send(connection.fd.get(), message.data() + connection.sent,
                           message.size() - connection.sent, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
    connection.sent += static_cast<std::size_t>(n);
    if (connection.sent == message.size()) {
      connection.out.pop_front();
      connection.sent = 0;
    }
  }
  return true;
}

/// Asks for EPOLLOUT, and sets a deadline, while something is left to send.
void AgreementRoot::Service::watch(std::uint64_t id, const Connection& connection) {
  const bool sending = !connection.out.empty();
  epoll_event event{EPOLLIN | (sending ? std::uint32_t{EPOLLOUT} : 0u), {.u64 = id}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
  if (!connection.known) return;
  setDeadline(
      id, connections_.at(id),
      sending ? std::optional(Clock::now() + milliseconds(options_.timeoutMs)) : std::nullopt);
}

void AgreementRoot::Service::setDeadline(std::uint64_t id, Connection& connection,
                                         std::optional<Clock::time_point> when) {
  if (connection.deadline) deadlines_.erase({*connection.deadline, id});
  connection.deadline = when;
  if (when) deadlines_.insert({*when, id});
}

/// `why` is empty for an end that needs no line in the log.
void AgreementRoot::Service::drop(std::uint64_t id, const std::string& why) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if (!why.empty()) {
    const bool loud = found->second.known || strangers_++ < kLoudStrangers;
    logf(loud ? LogLevel::Warn : LogLevel::Debug,
         "agreement root: closed the connection from {}: {}", found->second.peer, why);
  }
  setDeadline(id, found->second, std::nullopt);
  connections_.erase(found);
  std::vector<AgreementLedger::Delivery> out;
  ledger_->forget(id, &out);
  deliver(std::move(out));
}

AgreementRoot::AgreementRoot() : service_(std::make_unique<Service>()) {}
AgreementRoot::~AgreementRoot() = default;

namespace {
struct Slot {
  pid_t process;
  AgreementRoot* root;
};
std::atomic<Slot*> current{nullptr};
}  // namespace

AgreementRoot& AgreementRoot::ofThisProcess() {
  // A child of fork has no thread of its parent's, so it needs a root of its own. The old one is
  // left as it is: its descriptors are shared with the parent.
  Slot* slot = current.load();
  while (!slot || slot->process != getpid()) {
    auto* fresh = new Slot{getpid(), new AgreementRoot};
    if (current.compare_exchange_strong(slot, fresh)) return *fresh->root;
    delete fresh->root;
    delete fresh;
  }
  return *slot->root;
}

void AgreementRoot::drainThisProcess(std::uint64_t timeoutMs) {
  const Slot* slot = current.load();
  if (slot && slot->process == getpid()) slot->root->service_->drain(timeoutMs);
}

Status AgreementRoot::start(const Options& options) { return service_->start(options); }
Status AgreementRoot::newCommunicator(const char id[kUniqueIdBytes], Tail* tail) {
  Tail made;
  if (!readBootstrapAddress(id, &made)) readInterfaceAddress(&made);
  Status status = service_->newRoot(&made);
  if (status) *tail = made;
  return status;
}
Status AgreementRoot::newRoot(Tail* tail) {
  Tail made;
  readInterfaceAddress(&made);
  Status status = service_->newRoot(&made);
  if (status) *tail = made;
  return status;
}
void AgreementRoot::stop() { service_->stop(); }

}  // namespace hoccl
