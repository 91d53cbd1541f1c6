// The accepting side of a bundle's set-up.

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/time.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/tcp/bundle_sockets.h"
#include "common/net/tcp/bundle_wire.h"

namespace hoccl {
namespace {

using bundle_wire::Answer;
using bundle_wire::BundleId;
using bundle_wire::Greeting;
using bundle_wire::Role;

constexpr int kBacklog = 4096;
/// Sockets that have not said who they are. Beyond that the oldest goes: strangers cannot use up
/// this process's descriptors, and a peer's greeting comes right behind its connection.
constexpr std::size_t kMaxKnocks = 512;
/// Bundles of which sockets are missing or that nobody has taken.
constexpr std::size_t kMaxAssemblies = 4096;

void ring(int eventFd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(eventFd, &one, sizeof one);
}
void unring(int eventFd) {
  std::uint64_t rings = 0;
  [[maybe_unused]] ssize_t got = ::read(eventFd, &rings, sizeof rings);
}

/// A connection whose greeting has not come in full.
struct Knock {
  UniqueFd socket;
  Deadline deadline;
  std::string from;
  Greeting greeting;
  std::size_t got = 0;
};

/// The sockets of one bundle, as they come.
struct Assembly {
  explicit Assembly(std::uint64_t timeoutMs) : deadline(Deadline::afterMs(timeoutMs)) {}
  BundleSockets sockets;
  std::size_t missing = 0;  ///< sockets, of those a bundle of `expected` data sockets has
  unsigned expected = 0;
  BundleHello hello{};
  std::string from;
  Deadline deadline;
  bool offered = false;  ///< to the user, who then answers for it
  UniqueFd event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
};

bool sameNonce(const BundleNonce& a, const BundleNonce& b) {
  unsigned different = 0;  // as long for any guess
  for (std::size_t i = 0; i < a.size(); ++i) different |= a[i] ^ b[i];
  return different == 0;
}

bool sendAnswer(int socket, std::uint32_t code, const BundleHello& reply,
                const std::string& reason) {
  Answer answer;
  answer.code = code;
  answer.reply = reply;
  std::memcpy(answer.reason.data(), reason.data(),
              std::min(reason.size(), answer.reason.size() - 1));
  // A new socket has room for it.
  return ::send(socket, &answer, sizeof answer, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         static_cast<ssize_t>(sizeof answer);
}

/// The listening socket and what has come in by it; shared with the setups it has given out.
class Lobby {
 public:
  Status open(const SocketAddress& local, const BundleOptions& options) {
    options_ = options;
    if (Status status = randomBytes(nonce_.data(), nonce_.size()); !status) return status;
    SocketAddress any = local;
    any.setPort(0);
    sockaddr_storage address;
    socklen_t length = any.toSockaddr(&address);
    listener_.reset(
        ::socket(local.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
    if (!listener_) return Status::fromErrno("cannot make a TCP socket", errno);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
      return Status::fromErrno("cannot bind a TCP socket to " + any.text(), errno);
    }
    if (::listen(listener_.get(), kBacklog) != 0) {
      return Status::fromErrno("cannot listen at " + any.text(), errno);
    }
    length = sizeof address;
    if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
      return Status::fromErrno("getsockname of a TCP socket", errno);
    }
    if (Status status =
            SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&address), length, &address_);
        !status) {
      return status;
    }
    epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    timer_.reset(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    reserve_ = reserveDescriptor();
    offers_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_ || !timer_ || !offers_) {
      return Status::fromErrno("epoll, timerfd or eventfd of a listener", errno);
    }
    for (const UniqueFd* each : {&listener_, &timer_, &offers_}) watch(each->get());
    return {};
  }

  [[nodiscard]] const SocketAddress& address() const { return address_; }
  [[nodiscard]] const BundleNonce& nonce() const { return nonce_; }
  [[nodiscard]] const BundleOptions& options() const { return options_; }
  [[nodiscard]] int fd() const { return epoll_.get(); }

  /// Takes what has come, drops what is overdue.
  void pump() {
    std::uint64_t expirations = 0;
    [[maybe_unused]] ssize_t got = ::read(timer_.get(), &expirations, sizeof expirations);
    acceptAll();
    for (auto knock = knocks_.begin(); knock != knocks_.end();) {
      if (read(*knock) == Reading::Pending && !knock->deadline.passed()) {
        ++knock;
      } else {
        knock = knocks_.erase(knock);
      }
    }
    for (auto each = assemblies_.begin(); each != assemblies_.end();) {
      const bool overdue = !each->second->offered && each->second->deadline.passed();
      each = overdue ? assemblies_.erase(each) : std::next(each);
    }
    setTimer();
  }

  /// The next bundle whose control socket is there, or null.
  std::shared_ptr<Assembly> next(BundleId* id) {
    while (!ready_.empty()) {
      *id = ready_.front();
      ready_.pop_front();
      auto found = assemblies_.find(*id);
      if (found == assemblies_.end()) continue;
      found->second->offered = true;
      if (ready_.empty()) unring(offers_.get());
      return found->second;
    }
    unring(offers_.get());
    return nullptr;
  }
  void forget(const BundleId& id) { assemblies_.erase(id); }

 private:
  enum class Reading { Pending, Over };

  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = fd;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void acceptAll() {
    for (;;) {
      sockaddr_storage address;
      socklen_t length = sizeof address;
      UniqueFd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length,
                                SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket && (errno == EINTR || errno == ECONNABORTED)) continue;
      if (!socket && (errno == EMFILE || errno == ENFILE)) {
        turnAway();
        return;
      }
      if (!socket) return;
      SocketAddress from;
      if (!SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&address), length, &from)) {
        continue;
      }
      if (knocks_.size() >= kMaxKnocks) knocks_.pop_front();
      watch(socket.get());
      knocks_.push_back(
          {std::move(socket), Deadline::afterMs(options_.timeoutMs), from.text(), Greeting{}, 0});
    }
  }

  /// Out of descriptors, which the kernel says whether there is a connection or not. One that is
  /// there would stay where it keeps this loop awake.
  void turnAway() {
    pollfd waiting{listener_.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 0) <= 0) return;
    reserve_.reset();
    const bool gone = UniqueFd(::accept(listener_.get(), nullptr, nullptr)).get() >= 0;
    if (gone) {
      logf(std::exchange(saidTurnedAway_, true) ? LogLevel::Debug : LogLevel::Warn,
           "out of descriptors (raise ulimit -n): a connection to {} was turned away",
           address_.text());
    }
    reserve_ = reserveDescriptor();
  }
  static UniqueFd reserveDescriptor() {
    return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }

  Reading read(Knock& knock) {
    auto* bytes = reinterpret_cast<std::byte*>(&knock.greeting);
    const ssize_t got = ::recv(knock.socket.get(), bytes + knock.got,
                               sizeof knock.greeting - knock.got, MSG_DONTWAIT);
    if (got < 0) {
      const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      return later ? Reading::Pending : Reading::Over;
    }
    if (got == 0) return Reading::Over;
    knock.got += static_cast<std::size_t>(got);
    if (knock.got >= sizeof knock.greeting.magic && knock.greeting.magic != bundle_wire::kMagic) {
      logDebug("{} sent something that is not HOCCL's to {}", knock.from, address_.text());
      return Reading::Over;
    }
    if (knock.got < sizeof knock.greeting) return Reading::Pending;
    greeted(knock);
    return Reading::Over;
  }

  void greeted(Knock& knock) {
    const Greeting& greeting = knock.greeting;
    if (!sameNonce(greeting.nonce, nonce_)) {
      logDebug("{} does not know the nonce of {}", knock.from, address_.text());
      return;
    }
    if (greeting.version != bundle_wire::kVersion) {
      const std::string reason =
          fmt::format("TCP protocol {} here, {} there: the two builds of HOCCL differ",
                      bundle_wire::kVersion, greeting.version);
      logWarn("refused a connection from {}: {}", knock.from, reason);
      if (greeting.role == Role::Control) {
        (void)sendAnswer(knock.socket.get(), bundle_wire::kVersionDiffers, {}, reason);
      }
      return;
    }
    if (greeting.dataSockets == 0 || greeting.dataSockets > BundleOptions::kMaxSockets) return;
    auto found = assemblies_.find(greeting.bundle);
    if (found == assemblies_.end()) {
      if (assemblies_.size() >= kMaxAssemblies) return;
      auto assembly = std::make_shared<Assembly>(options_.timeoutMs);
      assembly->expected = greeting.dataSockets;
      assembly->missing = std::size_t{greeting.dataSockets} + 2;
      assembly->sockets.data.resize(greeting.dataSockets);
      found = assemblies_.emplace(greeting.bundle, std::move(assembly)).first;
    }
    Assembly& assembly = *found->second;
    UniqueFd* place = nullptr;
    if (greeting.dataSockets != assembly.expected) return;
    if (greeting.role == Role::Control) place = &assembly.sockets.control;
    if (greeting.role == Role::Life) place = &assembly.sockets.life;
    if (greeting.role == Role::Data && greeting.index < assembly.expected) {
      place = &assembly.sockets.data[greeting.index];
    }
    if (!place || *place) return;
    // Whoever watches it from now on does so by itself.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, knock.socket.get(), nullptr);
    *place = std::move(knock.socket);
    --assembly.missing;
    if (greeting.role == Role::Control) {
      assembly.hello = greeting.hello;
      assembly.from = knock.from;
      ready_.push_back(greeting.bundle);
      // A setup under way may have been the one that looked; the listener's user has to come.
      ring(offers_.get());
    }
    if (assembly.missing == 0) ring(assembly.event.get());
  }

  void setTimer() {
    int nextMs = -1;
    auto consider = [&nextMs](const Deadline& deadline) {
      const int ms = std::max(deadline.remainingMs(), 1);
      nextMs = nextMs < 0 ? ms : std::min(nextMs, ms);
    };
    for (const Knock& knock : knocks_) consider(knock.deadline);
    for (const auto& [id, assembly] : assemblies_) {
      if (!assembly->offered) consider(assembly->deadline);
    }
    itimerspec when{};
    if (nextMs > 0) {
      when.it_value.tv_sec = nextMs / 1000;
      when.it_value.tv_nsec = nextMs % 1000 * 1'000'000L;
    }
    ::timerfd_settime(timer_.get(), 0, &when, nullptr);
  }

  BundleOptions options_;
  BundleNonce nonce_{};
  SocketAddress address_;
  UniqueFd listener_, epoll_, timer_, reserve_;
  UniqueFd offers_;  ///< an eventfd, readable while `ready_` may hold some
  bool saidTurnedAway_ = false;
  std::list<Knock> knocks_;
  std::map<BundleId, std::shared_ptr<Assembly>> assemblies_;
  std::deque<BundleId> ready_;
};

class Accepting final : public BundleSetup {
 public:
  Accepting(std::shared_ptr<Lobby> lobby, const BundleId& id, std::shared_ptr<Assembly> assembly)
      : lobby_(std::move(lobby)), id_(id), assembly_(std::move(assembly)) {}
  ~Accepting() override { lobby_->forget(id_); }

  State advance() override {
    if (state_ != State::Pending) return state_;
    unring(assembly_->event.get());
    lobby_->pump();
    char byte;
    // It sends nothing before the answer.
    const ssize_t peeked =
        ::recv(assembly_->sockets.control.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (peeked == 0 || (peeked < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      return fail("it went away during the set-up");
    }
    if (!accepted_) return state_;
    if (assembly_->missing > 0) {
      if (!deadline_.passed()) return state_;
      return fail(fmt::format("{} of its {} sockets did not come within {} ms (HOCCL_TIMEOUT_MS)",
                              assembly_->missing, assembly_->expected + 2,
                              lobby_->options().timeoutMs));
    }
    if (Status status = tuneAll(); !status) return fail(status.message());
    if (!sendAnswer(assembly_->sockets.control.get(), 0, reply_, "")) {
      return fail("it took no answer");
    }
    lobby_->forget(id_);
    return state_ = State::Done;
  }
  [[nodiscard]] int watchFd() const override { return assembly_->event.get(); }
  [[nodiscard]] Status status() const override { return status_; }
  [[nodiscard]] const BundleHello& hello() const override { return assembly_->hello; }
  [[nodiscard]] const std::string& peerText() const override { return assembly_->from; }

  void accept(const BundleHello& reply) override {
    if (state_ != State::Pending) return;
    accepted_ = true;
    reply_ = reply;
    deadline_ = Deadline::afterMs(lobby_->options().timeoutMs);
    ring(assembly_->event.get());
  }
  void refuse(std::uint32_t code, const std::string& reason) override {
    if (state_ != State::Pending) return;
    (void)sendAnswer(assembly_->sockets.control.get(), code, {}, reason);
    ::shutdown(assembly_->sockets.control.get(), SHUT_WR);
    fail(reason);
    ring(assembly_->event.get());
  }

  Status take(FrameSink* dataSink, std::unique_ptr<Bundle>* out) override {
    if (state_ != State::Done) return Status::error(Code::Internal, "no bundle to take");
    return makeBundle(std::move(assembly_->sockets), lobby_->options(), assembly_->from, dataSink,
                      out);
  }

 private:
  State fail(const std::string& why) {
    status_ = Status::error(Code::Remote, fmt::format("{}: {}", assembly_->from, why));
    lobby_->forget(id_);
    return state_ = State::Failed;
  }
  Status tuneAll() {
    BundleSockets& sockets = assembly_->sockets;
    if (Status status = tuneSocket(sockets.control.get()); !status) return status;
    for (const UniqueFd& each : sockets.data) {
      if (Status status = tuneSocket(each.get()); !status) return status;
    }
    return tuneLifeSocket(sockets.life.get(), lobby_->options().timeoutMs);
  }

  std::shared_ptr<Lobby> lobby_;
  BundleId id_;
  std::shared_ptr<Assembly> assembly_;
  State state_ = State::Pending;
  Status status_;
  bool accepted_ = false;
  BundleHello reply_{};
  Deadline deadline_ = Deadline::afterMs(0);
};

class Listener final : public BundleListener {
 public:
  explicit Listener(std::shared_ptr<Lobby> lobby) : lobby_(std::move(lobby)) {}
  [[nodiscard]] const SocketAddress& address() const override { return lobby_->address(); }
  [[nodiscard]] const BundleNonce& nonce() const override { return lobby_->nonce(); }
  [[nodiscard]] int watchFd() const override { return lobby_->fd(); }
  [[nodiscard]] std::unique_ptr<BundleSetup> accept() override {
    lobby_->pump();
    BundleId id;
    std::shared_ptr<Assembly> assembly = lobby_->next(&id);
    if (!assembly) return nullptr;
    return std::make_unique<Accepting>(lobby_, id, std::move(assembly));
  }

 private:
  std::shared_ptr<Lobby> lobby_;
};

}  // namespace

Status BundleListener::open(const SocketAddress& local, const BundleOptions& options,
                            std::unique_ptr<BundleListener>* out) {
  auto lobby = std::make_shared<Lobby>();
  if (Status status = lobby->open(local, options); !status) return status;
  *out = std::make_unique<Listener>(std::move(lobby));
  return {};
}

}  // namespace hoccl
