// The shm transport, measured without copy engines.

#include <algorithm>
#include <cstring>

#include "common/base/random.h"
#include "common/base/time.h"
#include "common/net/shm/shm_transport.h"
#include "tools/bench/net_link.h"

namespace hoccl::bench {
namespace {

struct Invitation {
  PeerId id;
  char address[64];
};

class ShmLink final : public NetLink {
 public:
  using NetLink::NetLink;

  Status open(std::uint64_t maxBytes) {
    if (Status status = NetBuffer::create(maxBytes, &buffer_); !status) return status;
    PeerId self;
    if (Status status = randomBytes(&self, sizeof self); !status) return status;
    const StagingGeometry geometry{static_cast<std::uint32_t>(pair_.config.slots),
                                   pair_.config.slotBytes};
    std::unique_ptr<Transport> transport;
    if (Status s = makeShmTransport(self, geometry, &transport); !s) return s;
    Invitation invitation{self, {}};
    NetWait wait(pair_, "the set-up of the shm transport");
    std::unique_ptr<Handshake> handshake;
    if (pair_.side == 0) {
      std::memcpy(invitation.address, transport->address().data(), transport->address().size());
      if (Status s = tell(pair_, &invitation, sizeof invitation); !s) return s;
      while (!(handshake = transport->accept())) {
        if (Status status = wait.again(); !status) return status;
      }
      while (handshake->advance() == Handshake::State::Pending && !handshake->peer()) {
        if (Status status = wait.again(); !status) return status;
      }
      handshake->decide(Handshake::Decision::Accept, "");
    } else {
      if (Status s = hear(pair_, &invitation, sizeof invitation); !s) return s;
      const std::string address(invitation.address,
                                ::strnlen(invitation.address, sizeof invitation.address));
      if (Status s = transport->connect(invitation.id, address, &handshake); !s) return s;
    }
    while (handshake->advance() == Handshake::State::Pending) {
      if (Status status = wait.again(); !status) return status;
    }
    if (handshake->advance() != Handshake::State::Done) return handshake->status();
    connection_ = handshake->take();
    return {};
  }

  Status stream(std::uint64_t bytes, int iterations, double* seconds) override {
    const std::uint64_t begin = monotonicNs();
    const Staging& staging = connection_->staging();
    for (int i = 0; i < iterations; ++i) {
      for (std::uint64_t at = 0; at < bytes; at += staging.slotBytes) {
        const std::uint64_t length = std::min(staging.slotBytes, bytes - at);
        const std::uint64_t turn = chunk_ / staging.out.size() + 1;
        const std::size_t slot = chunk_++ % staging.out.size();
        if (pair_.side == 0) {
          const Slot& out = staging.out[slot];
          if (Status s = await(*out.credit, turn - 1); !s) return s;
          std::memcpy(out.data, buffer_.data() + at, length);
          out.ready->set(turn);
        } else {
          const Slot& in = staging.in[slot];
          if (Status s = await(*in.ready, turn); !s) return s;
          std::memcpy(buffer_.data() + at, in.data, length);
          in.credit->set(turn);
        }
      }
    }
    if (pair_.side == 1) return say();
    if (Status status = listen(); !status) return status;
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

  Status burst(int messages, double* seconds) override {
    const std::uint64_t begin = monotonicNs();
    for (int i = 0; i < messages; ++i) {
      if (Status s = pair_.side == 0 ? say() : listen(); !s) return s;
    }
    if (Status s = pair_.side == 0 ? listen() : say(); !s) return s;
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

 private:
  Status await(const Flag& flag, std::uint64_t value) {
    NetWait wait(pair_, "a slot of the shm transport");
    while (!flag.reached(value)) {
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  Status say() override {
    Message message{};
    message.type = MessageType::Ready;
    NetWait wait(pair_, "room for a message over shm");
    while (!connection_->trySend(message)) {
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  Status listen() override {
    Message message;
    NetWait wait(pair_, "a message over shm");
    while (!connection_->tryReceive(&message)) {
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }

  NetBuffer buffer_;
  std::unique_ptr<Connection> connection_;
  std::uint64_t chunk_ = 0;  ///< how many chunks have gone, so that both sides know slot and turn
};

}  // namespace

Status makeShmLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out) {
  auto link = std::make_unique<ShmLink>(pair);
  if (Status status = link->open(maxBytes); !status) return status.inContext("shm");
  *out = std::move(link);
  return {};
}

}  // namespace hoccl::bench
