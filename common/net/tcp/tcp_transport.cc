#include "common/net/tcp/tcp_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "common/net/tcp/interfaces.h"
#include "common/net/tcp/tcp_connection.h"

namespace hoccl {
namespace {

/// What a connecting mover says of itself.
struct MoverGreeting {
  PeerId from, to;
  std::uint64_t slotBytes;
  std::uint32_t slots;
  std::uint32_t padding;
};
static_assert(sizeof(MoverGreeting) <= sizeof(BundleHello));

enum Refusal : std::uint32_t { kRefused = 1, kCrossed = 2 };

std::string geometryText(std::uint32_t slots, std::uint64_t slotBytes) {
  return fmt::format("HOCCL_SLOTS={} HOCCL_SLOT_BYTES={}", slots, slotBytes);
}

class TcpHandshake : public Handshake {
 public:
  TcpHandshake(const StagingGeometry& geometry, std::unique_ptr<BundleSetup> setup)
      : geometry_(geometry), setup_(std::move(setup)) {}
  [[nodiscard]] int watchFd() const override { return setup_->watchFd(); }
  [[nodiscard]] const PeerId* peer() const override { return peerKnown_ ? &peer_ : nullptr; }
  [[nodiscard]] std::unique_ptr<Connection> take() override { return std::move(connection_); }
  [[nodiscard]] Status status() const override { return status_; }

  State advance() override {
    if (state_ != State::Pending) return state_;
    switch (setup_->advance()) {
      case BundleSetup::State::Pending:
        return state_;
      case BundleSetup::State::Failed:
        if (setup_->refusal() == kCrossed) return state_ = State::Crossed;
        return fail(setup_->status());
      case BundleSetup::State::Done:
        break;
    }
    if (Status status = connection_->open(*setup_); !status) {
      connection_.reset();
      return fail(status);
    }
    return state_ = State::Done;
  }

 protected:
  State fail(Status status) {
    status_ = std::move(status);
    return state_ = State::Failed;
  }
  Status makeStaging() {
    return TcpConnection::create(peer_, geometry_, &connection_)
        .inContext("staging of " + geometryText(geometry_.slots, geometry_.slotBytes));
  }

  StagingGeometry geometry_;
  std::unique_ptr<BundleSetup> setup_;
  PeerId peer_;
  bool peerKnown_ = false;
  State state_ = State::Pending;
  Status status_;
  std::unique_ptr<TcpConnection> connection_;
};

class TcpConnecting final : public TcpHandshake {
 public:
  using TcpHandshake::TcpHandshake;
  Status begin(const PeerId& peer) {
    peer_ = peer;
    peerKnown_ = true;
    return makeStaging();
  }
  void decide(Decision, const std::string&) override {}
  [[nodiscard]] bool accepting() const override { return false; }
};

class TcpAccepting final : public TcpHandshake {
 public:
  using TcpHandshake::TcpHandshake;
  /// Looks at what the peer said; refuses it if that does not fit.
  void greet(const PeerId& self) {
    MoverGreeting greeting;
    std::memcpy(&greeting, setup_->hello().data(), sizeof greeting);
    if (greeting.to != self) {
      refuse("greeting meant for another mover");
    } else if (greeting.slots != geometry_.slots || greeting.slotBytes != geometry_.slotBytes) {
      refuse(fmt::format("staging differs: {} here, {} there",
                         geometryText(geometry_.slots, geometry_.slotBytes),
                         geometryText(greeting.slots, greeting.slotBytes)));
    } else {
      peer_ = greeting.from;
      peerKnown_ = true;
    }
  }
  void decide(Decision decision, const std::string& reason) override {
    if (state_ != State::Pending || !peerKnown_) return;
    if (decision == Decision::Crossed) {
      setup_->refuse(kCrossed, reason);
      state_ = State::Crossed;
    } else if (decision == Decision::Refuse) {
      refuse(reason);
    } else if (Status status = makeStaging(); !status) {
      refuse(status.message());
    } else {
      setup_->accept({});
    }
  }
  [[nodiscard]] bool accepting() const override { return true; }

 private:
  void refuse(const std::string& reason) {
    setup_->refuse(kRefused, reason);
    fail(Status::error(Code::Remote, fmt::format("{}: {}", setup_->peerText(), reason)));
  }
};

class TcpTransport final : public Transport {
 public:
  TcpTransport(const PeerId& self, const StagingGeometry& geometry, const SocketAddress& local,
               const BundleOptions& options)
      : self_(self), geometry_(geometry), local_(local), options_(options) {}

  Status listen() {
    if (Status status = BundleListener::open(local_, options_, &listener_); !status) return status;
    address_ = encodeTcpAddress(listener_->address(), listener_->nonce());
    return {};
  }
  [[nodiscard]] const char* name() const override { return "tcp"; }
  [[nodiscard]] const std::string& address() const override { return address_; }
  [[nodiscard]] int listenFd() const override { return listener_->watchFd(); }

  [[nodiscard]] std::unique_ptr<Handshake> accept() override {
    std::unique_ptr<BundleSetup> setup = listener_->accept();
    if (!setup) return nullptr;
    auto handshake = std::make_unique<TcpAccepting>(geometry_, std::move(setup));
    handshake->greet(self_);
    return handshake;
  }

  Status connect(const PeerId& peer, const std::string& address,
                 std::unique_ptr<Handshake>* out) override {
    SocketAddress to;
    BundleNonce nonce;
    if (Status status = decodeTcpAddress(address, &to, &nonce); !status) return status;
    const MoverGreeting greeting{self_, peer, geometry_.slotBytes, geometry_.slots, 0};
    BundleHello hello{};
    std::memcpy(hello.data(), &greeting, sizeof greeting);
    std::unique_ptr<BundleSetup> setup;
    if (Status s = connectBundle(to, nonce, local_, hello, options_, &setup); !s) return s;
    auto handshake = std::make_unique<TcpConnecting>(geometry_, std::move(setup));
    if (Status status = handshake->begin(peer); !status) return status;
    *out = std::move(handshake);
    return {};
  }

 private:
  PeerId self_;
  StagingGeometry geometry_;
  SocketAddress local_;
  BundleOptions options_;
  std::unique_ptr<BundleListener> listener_;
  std::string address_;
};

// Six bits a character (RFC 4648's URL-safe alphabet, without padding).
constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
constexpr std::size_t kRawBytes = SocketAddress::kPackedBytes + std::tuple_size_v<BundleNonce>;
constexpr std::size_t kTextBytes = (kRawBytes * 8 + 5) / 6;
static_assert(kTextBytes <= 64);

}  // namespace

std::string encodeTcpAddress(const SocketAddress& address, const BundleNonce& nonce) {
  std::array<std::uint8_t, kRawBytes> raw;
  const SocketAddress::Packed packed = address.pack();
  std::copy(nonce.begin(), nonce.end(), std::copy(packed.begin(), packed.end(), raw.begin()));
  std::string text;
  unsigned bits = 0, count = 0;
  for (const std::uint8_t byte : raw) {
    bits = bits << 8 | byte;
    for (count += 8; count >= 6; count -= 6) text += kAlphabet[bits >> (count - 6) & 63];
  }
  if (count > 0) text += kAlphabet[bits << (6 - count) & 63];
  return text;
}

Status decodeTcpAddress(std::string_view text, SocketAddress* address, BundleNonce* nonce) {
  std::vector<std::uint8_t> raw;
  unsigned bits = 0, count = 0;
  bool fits = text.size() == kTextBytes;
  for (const char c : text) {
    const std::size_t value = kAlphabet.find(c);
    fits = fits && value != std::string_view::npos;
    if (!fits) break;
    bits = bits << 6 | static_cast<unsigned>(value);
    if ((count += 6) >= 8) {
      raw.push_back(static_cast<std::uint8_t>(bits >> (count - 8)));
      count -= 8;
    }
  }
  SocketAddress result;
  fits = fits && raw.size() >= kRawBytes && SocketAddress::unpack(raw, &result);
  if (!fits) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("'{}' is no address of the tcp transport", text));
  }
  *address = result;
  std::copy_n(raw.begin() + SocketAddress::kPackedBytes, nonce->size(), nonce->begin());
  return {};
}

Status makeTcpTransport(const PeerId& self, const StagingGeometry& geometry,
                        const SocketAddress& local, const BundleOptions& options,
                        std::unique_ptr<Transport>* out) {
  auto transport = std::make_unique<TcpTransport>(self, geometry, local, options);
  if (Status status = transport->listen(); !status) return status;
  *out = std::move(transport);
  return {};
}

Status makeTcpTransport(const PeerId& self, const StagingGeometry& geometry, const Config& config,
                        std::unique_ptr<Transport>* out) {
  BundleOptions options;
  if (Status status = BundleOptions::fromEnvironment(config, &options); !status) return status;
  InterfaceChoice choice;
  if (Status status = InterfaceChoice::fromEnvironment(config, &choice); !status) return status;
  std::vector<Interface> interfaces;
  if (Status status = chooseInterfaces(choice, &interfaces); !status) return status;
  options.name = "hoccl-tcp";
  return makeTcpTransport(self, geometry, interfaces.front().address, options, out);
}

}  // namespace hoccl
