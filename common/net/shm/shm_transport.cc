#include "common/net/shm/shm_transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "common/base/random.h"
#include "common/base/unix_socket.h"
#include "common/net/shm/shm_connection.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kGreetingMagic = 0x6d68732d4c434348ull;  // "HCCL-shm"
constexpr std::uint32_t kShmProtocol = 4;

struct Greeting {
  std::uint64_t magic;
  std::uint32_t protocol;
  std::uint32_t slots;
  std::uint64_t slotBytes;
  PeerId from, to;
};

struct Answer {
  std::uint64_t magic;
  Handshake::Decision decision;
  char reason[228];
};

std::string geometryText(std::uint32_t slots, std::uint64_t slotBytes) {
  return fmt::format("HOCCL_SLOTS={} HOCCL_SLOT_BYTES={}", slots, slotBytes);
}

/// What both sides of a handshake share: the socket, the outcome.
class ShmHandshake : public Handshake {
 public:
  explicit ShmHandshake(const StagingGeometry& geometry) : geometry_(geometry) {}
  [[nodiscard]] int watchFd() const override { return socket_.get(); }
  [[nodiscard]] const PeerId* peer() const override { return peerKnown_ ? &peer_ : nullptr; }
  [[nodiscard]] std::unique_ptr<Connection> take() override { return std::move(connection_); }
  [[nodiscard]] Status status() const override { return status_; }

 protected:
  State fail(Status status) {
    status_ = std::move(status);
    return state_ = State::Failed;
  }

  StagingGeometry geometry_;
  UniqueFd socket_;
  PeerId peer_;
  bool peerKnown_ = false;
  State state_ = State::Pending;
  Status status_;
  std::unique_ptr<Connection> connection_;
};

class Connecting final : public ShmHandshake {
 public:
  using ShmHandshake::ShmHandshake;

  Status start(const PeerId& self, const PeerId& peer, const std::string& address) {
    peer_ = peer;
    peerKnown_ = true;
    if (Status status = connectUnix(address, 0, &socket_); !status) return status;
    if (Status status = SharedMemory::create("hoccl-shm", ShmConnection::regionBytes(geometry_),
                                             &region_);
        !status) {
      return status.inContext("staging of " + geometryText(geometry_.slots, geometry_.slotBytes));
    }
    const Greeting greeting{kGreetingMagic, kShmProtocol, geometry_.slots, geometry_.slotBytes,
                            self, peer};
    const int fd = region_.fd();
    bool sent = false;
    if (Status status = sendWithFds(socket_.get(), &greeting, sizeof greeting, {&fd, 1}, &sent);
        !status) {
      return status;
    }
    return sent ? Status()
                : Status::error(Code::System, "the peer's set-up socket took no greeting");
  }

  State advance() override {
    if (state_ != State::Pending) return state_;
    Answer answer{};
    std::size_t bytes = 0;
    std::vector<UniqueFd> fds;
    ReceiveState received = ReceiveState::WouldBlock;
    if (Status status = recvWithFds(socket_.get(), &answer, sizeof answer, &bytes, &fds, &received);
        !status) {
      return fail(status);
    }
    if (received == ReceiveState::WouldBlock) return state_;
    if (received == ReceiveState::Closed) {
      return fail(Status::error(Code::Remote, "the peer's mover closed the set-up socket"));
    }
    if (bytes != sizeof answer || answer.magic != kGreetingMagic) {
      return fail(Status::error(Code::Remote, fmt::format("answer of {} bytes that is not HOCCL's",
                                                          bytes)));
    }
    if (answer.decision == Decision::Crossed) return state_ = State::Crossed;
    if (answer.decision != Decision::Accept) {
      answer.reason[sizeof answer.reason - 1] = 0;
      return fail(Status::error(Code::Remote, answer.reason));
    }
    connection_ = std::make_unique<ShmConnection>(std::move(region_), std::move(socket_), geometry_,
                                                  ShmConnection::Side::Connecting, peer_);
    return state_ = State::Done;
  }

  void decide(Decision, const std::string&) override {}
  [[nodiscard]] bool accepting() const override { return false; }

 private:
  SharedMemory region_;
};

class Accepting final : public ShmHandshake {
 public:
  Accepting(const StagingGeometry& geometry, const PeerId& self, UniqueFd socket)
      : ShmHandshake(geometry), self_(self) {
    socket_ = std::move(socket);
  }

  State advance() override {
    if (state_ != State::Pending || peerKnown_) return state_;
    Greeting greeting{};
    std::size_t bytes = 0;
    ReceiveState received = ReceiveState::WouldBlock;
    if (Status status =
            recvWithFds(socket_.get(), &greeting, sizeof greeting, &bytes, &fds_, &received);
        !status) {
      return fail(status);
    }
    if (received == ReceiveState::WouldBlock) return state_;
    if (received == ReceiveState::Closed) {
      return fail(Status::error(Code::Remote, "the peer went away before its greeting"));
    }
    if (bytes != sizeof greeting || greeting.magic != kGreetingMagic || fds_.size() != 1) {
      return fail(Status::error(Code::Remote, fmt::format("greeting of {} bytes and {} descriptors "
                                                          "that is not HOCCL's",
                                                          bytes, fds_.size())));
    }
    if (greeting.protocol != kShmProtocol) {
      return refuse(fmt::format("protocol {} here, {} there: the two builds of HOCCL differ",
                                kShmProtocol, greeting.protocol));
    }
    if (greeting.to != self_) return refuse("greeting meant for another mover");
    if (greeting.slots != geometry_.slots || greeting.slotBytes != geometry_.slotBytes) {
      return refuse(fmt::format("staging differs: {} here, {} there",
                                geometryText(geometry_.slots, geometry_.slotBytes),
                                geometryText(greeting.slots, greeting.slotBytes)));
    }
    peer_ = greeting.from;
    peerKnown_ = true;
    return state_;
  }

  void decide(Decision decision, const std::string& reason) override {
    if (state_ != State::Pending || !peerKnown_) return;
    if (decision == Decision::Crossed) {
      if (answer(decision, reason)) state_ = State::Crossed;
      return;
    }
    if (decision == Decision::Refuse) {
      refuse(reason);
      return;
    }
    SharedMemory region;
    if (Status status = SharedMemory::map(std::move(fds_[0]),
                                          ShmConnection::regionBytes(geometry_), &region);
        !status) {
      refuse(status.message());
      return;
    }
    if (!answer(decision, "")) return;
    connection_ = std::make_unique<ShmConnection>(std::move(region), std::move(socket_), geometry_,
                                                  ShmConnection::Side::Accepting, peer_);
    state_ = State::Done;
  }
  [[nodiscard]] bool accepting() const override { return true; }

 private:
  bool answer(Decision decision, const std::string& reason) {
    Answer answer{};
    answer.magic = kGreetingMagic;
    answer.decision = decision;
    std::memcpy(answer.reason, reason.data(), std::min(reason.size(), sizeof answer.reason - 1));
    bool sent = false;
    Status status = sendWithFds(socket_.get(), &answer, sizeof answer, {}, &sent);
    if (status && !sent) status = Status::error(Code::System, "the set-up socket took no answer");
    if (!status) fail(status);
    return status.ok();
  }
  State refuse(const std::string& reason) {
    if (!answer(Decision::Refuse, reason)) return state_;
    return fail(Status::error(Code::Remote, reason));
  }

  PeerId self_;
  std::vector<UniqueFd> fds_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(const PeerId& self, const StagingGeometry& geometry) : self_(self), geometry_(geometry) {}

  Status listen() {
    std::uint64_t high = 0, low = 0;
    if (Status status = random64(&high); !status) return status;
    if (Status status = random64(&low); !status) return status;
    address_ = fmt::format("hoccl-{:016x}{:016x}", high, low);
    return listenUnix(address_, &listener_);
  }

  [[nodiscard]] const char* name() const override { return "shm"; }
  [[nodiscard]] const std::string& address() const override { return address_; }
  [[nodiscard]] int listenFd() const override { return listener_.get(); }

  [[nodiscard]] std::unique_ptr<Handshake> accept() override {
    UniqueFd socket;
    if (!acceptUnix(listener_.get(), &socket) || !socket) return nullptr;
    return std::make_unique<Accepting>(geometry_, self_, std::move(socket));
  }

  Status connect(const PeerId& peer, const std::string& address,
                 std::unique_ptr<Handshake>* out) override {
    auto handshake = std::make_unique<Connecting>(geometry_);
    if (Status status = handshake->start(self_, peer, address); !status) return status;
    *out = std::move(handshake);
    return {};
  }

 private:
  PeerId self_;
  StagingGeometry geometry_;
  std::string address_;
  UniqueFd listener_;
};

}  // namespace

Status makeShmTransport(const PeerId& self, const StagingGeometry& geometry,
                        std::unique_ptr<Transport>* out) {
  auto transport = std::make_unique<ShmTransport>(self, geometry);
  if (Status status = transport->listen(); !status) return status;
  *out = std::move(transport);
  return {};
}

}  // namespace hoccl
