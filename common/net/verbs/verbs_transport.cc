#include "common/net/verbs/verbs_transport.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "common/net/tcp/bundle_setup.h"
#include "common/net/tcp/interfaces.h"
#include "common/net/tcp/tcp_transport.h"
#include "common/net/verbs/verbs_connection.h"

namespace hoccl {
namespace {

/// What a connecting mover says of itself.
struct MoverGreeting {
  PeerId from, to;
  std::uint64_t slotBytes;
  std::uint32_t slots;
  std::uint16_t rails, pairs;  ///< what it has
};
static_assert(sizeof(MoverGreeting) <= sizeof(BundleHello));

/// The answer: what both have.
struct MoverReply {
  PathExtent extent;
};

/// Completions ring nobody: while queue pairs are being tried, the handshake looks so often.
constexpr long kLookNs = 500'000;

enum Refusal : std::uint32_t { kRefused = 1, kCrossed = 2 };

std::string geometryText(std::uint32_t slots, std::uint64_t slotBytes) {
  return fmt::format("HOCCL_SLOTS={} HOCCL_SLOT_BYTES={}", slots, slotBytes);
}

/// What the handshakes of a transport share with it.
struct Ground {
  PeerId self;
  StagingGeometry geometry;
  VerbsSettings settings;
  Nics nics;
};

class VerbsHandshake : public Handshake {
 public:
  VerbsHandshake(std::shared_ptr<const Ground> ground, std::unique_ptr<BundleSetup> setup)
      : ground_(std::move(ground)),
        setup_(std::move(setup)),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
    watchAlso(setup_->watchFd());
  }
  [[nodiscard]] int watchFd() const override { return epoll_.get(); }
  [[nodiscard]] const PeerId* peer() const override { return peerKnown_ ? &peer_ : nullptr; }
  [[nodiscard]] std::unique_ptr<Connection> take() override { return std::move(connection_); }
  [[nodiscard]] Status status() const override { return status_; }

  State advance() override {
    if (state_ != State::Pending) return state_;
    if (!opened_) {
      switch (setup_->advance()) {
        case BundleSetup::State::Pending:
          return state_;
        case BundleSetup::State::Failed:
          if (setup_->refusal() == kCrossed) return state_ = State::Crossed;
          return fail(setup_->status());
        case BundleSetup::State::Done:
          break;
      }
      if (Status status = openPairs(); !status) return fail(status);
    }
    std::uint64_t expirations = 0;
    [[maybe_unused]] ssize_t got = ::read(timer_.get(), &expirations, sizeof expirations);
    switch (connection_->advanceSetUp()) {
      case VerbsConnection::SetUp::Pending:
        return state_;
      case VerbsConnection::SetUp::Failed:
        return fail(connection_->setUpStatus());
      case VerbsConnection::SetUp::Done:
        break;
    }
    return state_ = State::Done;
  }

 protected:
  State fail(Status status) {
    status_ = std::move(status);
    connection_.reset();
    return state_ = State::Failed;
  }
  Status makeStaging(bool connecting) {
    return VerbsConnection::create(peer_, ground_->geometry, ground_->settings, connecting,
                                   &connection_)
        .inContext("staging of " +
                   geometryText(ground_->geometry.slots, ground_->geometry.slotBytes));
  }
  /// Connecting: the queue pairs, now that their number is known.
  virtual Status prepare() { return {}; }
  Status openPairs() {
    if (Status status = prepare(); !status) return status;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, setup_->watchFd(), nullptr);
    if (Status status = connection_->open(*setup_); !status) return status;
    watchAlso(connection_->setUpFd());
    watchAlso(timer_.get());
    const itimerspec often{{0, kLookNs}, {0, kLookNs}};
    ::timerfd_settime(timer_.get(), 0, &often, nullptr);
    opened_ = true;
    return {};
  }
  void watchAlso(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  std::shared_ptr<const Ground> ground_;
  std::unique_ptr<BundleSetup> setup_;
  UniqueFd epoll_, timer_;
  PeerId peer_;
  bool peerKnown_ = false, opened_ = false;
  State state_ = State::Pending;
  Status status_;
  std::unique_ptr<VerbsConnection> connection_;
};

class VerbsConnecting final : public VerbsHandshake {
 public:
  using VerbsHandshake::VerbsHandshake;
  Status begin(const PeerId& peer) {
    peer_ = peer;
    peerKnown_ = true;
    return makeStaging(true);
  }
  void decide(Decision, const std::string&) override {}
  [[nodiscard]] bool accepting() const override { return false; }

 private:
  Status prepare() override {
    MoverReply reply;
    std::memcpy(&reply, setup_->hello().data(), sizeof reply);
    const auto [rails, pairs] = reply.extent;
    if (rails == 0 || rails > ground_->nics.size() || pairs == 0 ||
        pairs > ground_->settings.qpsPerPeer) {
      return Status::error(
          Code::Remote, fmt::format("{}: its answer of {} NICs and {} queue pairs makes no sense",
                                    setup_->peerText(), rails, pairs));
    }
    return connection_->makeRails(ground_->nics, reply.extent);
  }
};

class VerbsAccepting final : public VerbsHandshake {
 public:
  using VerbsHandshake::VerbsHandshake;
  /// Looks at what the peer said; refuses it if that does not fit.
  void greet() {
    MoverGreeting greeting;
    std::memcpy(&greeting, setup_->hello().data(), sizeof greeting);
    const StagingGeometry& geometry = ground_->geometry;
    extent_ = {
        static_cast<std::uint32_t>(std::min<std::size_t>(ground_->nics.size(), greeting.rails)),
        std::min<std::uint32_t>(ground_->settings.qpsPerPeer, greeting.pairs)};
    if (extent_.rails > 0) {
      extent_.pairs = std::min(extent_.pairs, Immediate::kMostPieces / extent_.rails);
    }
    if (greeting.to != ground_->self) {
      refuse("greeting meant for another mover");
    } else if (greeting.slots != geometry.slots || greeting.slotBytes != geometry.slotBytes) {
      refuse(fmt::format("staging differs: {} here, {} there",
                         geometryText(geometry.slots, geometry.slotBytes),
                         geometryText(greeting.slots, greeting.slotBytes)));
    } else if (extent_.rails == 0 || extent_.pairs == 0) {
      refuse("a greeting without NICs or queue pairs");
    } else {
      peer_ = greeting.from;
      peerKnown_ = true;
    }
  }
  void decide(Decision decision, const std::string& reason) override {
    if (state_ != State::Pending || !peerKnown_ || std::exchange(decided_, true)) return;
    if (decision == Decision::Crossed) {
      setup_->refuse(kCrossed, reason);
      state_ = State::Crossed;
      return;
    }
    if (decision == Decision::Refuse) return refuse(reason);
    Status status = makeStaging(false);
    if (status) status = connection_->makeRails(ground_->nics, extent_);
    if (!status) return refuse(status.message());
    const MoverReply reply{extent_};
    BundleHello hello{};
    std::memcpy(hello.data(), &reply, sizeof reply);
    setup_->accept(hello);
  }
  [[nodiscard]] bool accepting() const override { return true; }

 private:
  void refuse(const std::string& reason) {
    setup_->refuse(kRefused, reason);
    fail(Status::error(Code::Remote, fmt::format("{}: {}", setup_->peerText(), reason)));
  }
  PathExtent extent_;
  bool decided_ = false;
};

class VerbsTransport final : public Transport {
 public:
  VerbsTransport(std::shared_ptr<const Ground> ground, const SocketAddress& local,
                 const BundleOptions& options)
      : ground_(std::move(ground)), local_(local), options_(options) {}

  Status listen() {
    if (Status status = BundleListener::open(local_, options_, &listener_); !status) return status;
    address_ = encodeTcpAddress(listener_->address(), listener_->nonce());
    return {};
  }
  [[nodiscard]] const char* name() const override { return "verbs"; }
  [[nodiscard]] const std::string& address() const override { return address_; }
  [[nodiscard]] int listenFd() const override { return listener_->watchFd(); }

  [[nodiscard]] std::unique_ptr<Handshake> accept() override {
    std::unique_ptr<BundleSetup> setup = listener_->accept();
    if (!setup) return nullptr;
    auto handshake = std::make_unique<VerbsAccepting>(ground_, std::move(setup));
    handshake->greet();
    return handshake;
  }

  Status connect(const PeerId& peer, const std::string& address,
                 std::unique_ptr<Handshake>* out) override {
    SocketAddress to;
    BundleNonce nonce;
    if (Status status = decodeTcpAddress(address, &to, &nonce); !status) return status;
    const MoverGreeting greeting{ground_->self,
                                 peer,
                                 ground_->geometry.slotBytes,
                                 ground_->geometry.slots,
                                 static_cast<std::uint16_t>(ground_->nics.size()),
                                 static_cast<std::uint16_t>(ground_->settings.qpsPerPeer)};
    BundleHello hello{};
    std::memcpy(hello.data(), &greeting, sizeof greeting);
    std::unique_ptr<BundleSetup> setup;
    if (Status s = connectBundle(to, nonce, local_, hello, options_, &setup); !s) return s;
    auto handshake = std::make_unique<VerbsConnecting>(ground_, std::move(setup));
    if (Status status = handshake->begin(peer); !status) return status;
    *out = std::move(handshake);
    return {};
  }

 private:
  std::shared_ptr<const Ground> ground_;
  SocketAddress local_;
  BundleOptions options_;
  std::unique_ptr<BundleListener> listener_;
  std::string address_;
};

}  // namespace

Status makeVerbsTransport(const PeerId& self, const StagingGeometry& geometry,
                          const VerbsLibrary& library, const VerbsSettings& settings,
                          const SocketAddress& local, const BundleOptions& options,
                          std::unique_ptr<Transport>* out) {
  auto ground = std::make_shared<Ground>();
  ground->self = self;
  ground->geometry = geometry;
  ground->settings = settings;
  if (Status status = openNics(library, settings, &ground->nics); !status) return status;
  BundleOptions quiet = options;
  // The data sockets are not used; a bundle has at least one, whose thread watches for the end.
  quiet.threads = quiet.socketsPerThread = 1;
  quiet.spinUs = 0;
  auto transport = std::make_unique<VerbsTransport>(std::move(ground), local, quiet);
  if (Status status = transport->listen(); !status) return status;
  *out = std::move(transport);
  return {};
}

Status makeVerbsTransport(const PeerId& self, const StagingGeometry& geometry, const Config& config,
                          std::unique_ptr<Transport>* out) {
  if (const char* disable = std::getenv("NCCL_IB_DISABLE");
      disable && std::string_view(disable) == "1") {
    return Status::error(Code::Unsupported, "NCCL_IB_DISABLE=1");
  }
  VerbsSettings settings;
  if (Status status = VerbsSettings::fromEnvironment(config, &settings); !status) return status;
  const VerbsLibrary* library = nullptr;
  if (Status status = VerbsLibrary::load(&library); !status) return status;
  BundleOptions options;
  if (Status status = BundleOptions::fromEnvironment(config, &options); !status) return status;
  options.name = "hoccl-verbs";
  InterfaceChoice choice;
  if (Status status = InterfaceChoice::fromEnvironment(config, &choice); !status) return status;
  std::vector<Interface> interfaces;
  if (Status status = chooseInterfaces(choice, &interfaces); !status) return status;
  return makeVerbsTransport(self, geometry, *library, settings, interfaces.front().address, options,
                            out);
}

}  // namespace hoccl
