// Transports whose payloads go through slots (shm, verbs), measured without copy engines. Over shm
// the CPU fills and empties the slots; over verbs the NIC moves what lies in them, as ib_write_bw
// has it.

#include <algorithm>
#include <cstring>
#include <string>

#include "common/base/random.h"
#include "common/base/time.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/verbs/verbs_transport.h"
#include "tools/bench/net_link.h"

namespace hoccl::bench {
namespace {

struct Invitation {
  PeerId id;
  char address[64];
};

/// Payloads over verbs in one write up to here, whatever HOCCL_SLOT_BYTES says.
constexpr std::uint64_t kMostWrite = 1 << 20;

class SlotLink final : public NetLink {
 public:
  SlotLink(const NetPair& pair, const char* name) : NetLink(pair), name_(name) {}

  static Status makeTransport(const char* name, const PeerId& self, const NetPair& pair,
                              std::uint64_t maxBytes, std::unique_ptr<Transport>* out) {
    StagingGeometry geometry{static_cast<std::uint32_t>(pair.config.slots), pair.config.slotBytes};
    if (name == std::string("shm")) return makeShmTransport(self, geometry, out);
    geometry.slotBytes = std::clamp<std::uint64_t>(maxBytes, 64 << 10, kMostWrite);
    return makeVerbsTransport(self, geometry, pair.config, out);
  }

  Status open(std::uint64_t maxBytes) {
    if (Status status = NetBuffer::create(maxBytes, &buffer_); !status) return status;
    PeerId self;
    if (Status status = randomBytes(&self, sizeof self); !status) return status;
    std::unique_ptr<Transport> transport;
    if (Status s = makeTransport(name_, self, pair_, maxBytes, &transport); !s) return s;
    Invitation invitation{self, {}};
    NetWait wait(pair_, "the set-up of the transport");
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
    const bool shared = connection_->sharedSlots();
    for (int i = 0; i < iterations; ++i) {
      for (std::uint64_t at = 0; at < bytes; at += staging.slotBytes) {
        const std::uint64_t length = std::min(staging.slotBytes, bytes - at);
        const std::uint64_t turn = chunk_ / staging.out.size() + 1;
        const std::size_t slot = chunk_++ % staging.out.size();
        if (pair_.side == 0) {
          const Slot& out = staging.out[slot];
          if (Status s = await(*out.credit, turn - 1); !s) return s;
          if (shared) {
            std::memcpy(out.data, buffer_.data() + at, length);
            out.ready->set(turn);
          } else if (Status s = write(slot, length, turn); !s) {
            return s;
          }
        } else {
          const Slot& in = staging.in[slot];
          if (Status s = await(*in.ready, turn); !s) return s;
          if (shared) std::memcpy(buffer_.data() + at, in.data, length);
          in.credit->set(turn);
        }
      }
    }
    if (pair_.side == 1) return say();
    if (Status status = listen(); !status) return status;
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

 private:
  /// Takes what has come; without shared slots nothing comes otherwise.
  Status look() {
    Message message;
    while (connection_->tryReceive(&message)) ++heard_;
    return connection_->peerGone() ? Status::error(Code::Remote, connection_->goneReason())
                                   : Status();
  }
  Status await(const Flag& flag, std::uint64_t value) {
    NetWait wait(pair_, "a slot");
    while (!flag.reached(value)) {
      if (!connection_->sharedSlots()) {
        if (Status status = look(); !status) return status;
        if (flag.reached(value)) break;
      }
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  Status write(std::size_t slot, std::uint64_t bytes, std::uint64_t turn) {
    NetWait wait(pair_, "room for a slot");
    while (!connection_->tryWrite(static_cast<std::uint32_t>(slot), bytes, turn)) {
      if (Status status = look(); !status) return status;
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  Status say() override {
    Message message{};
    message.type = MessageType::Ready;
    NetWait wait(pair_, "room for a message");
    while (!connection_->trySend(message)) {
      if (Status status = look(); !status) return status;
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  Status listen() override {
    NetWait wait(pair_, "a message");
    while (heard_ == 0) {
      // The end of a peer that has said everything is no error.
      const Status status = look();
      if (heard_ > 0) break;
      if (!status) return status;
      if (Status s = wait.again(); !s) return s;
    }
    --heard_;
    return {};
  }

  const char* name_;
  NetBuffer buffer_;
  std::unique_ptr<Connection> connection_;
  std::uint64_t heard_ = 0;  ///< messages that nobody has waited for yet
  std::uint64_t chunk_ = 0;  ///< how many chunks have gone, so that both sides know slot and turn
};

}  // namespace

Status makeShmLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out) {
  auto link = std::make_unique<SlotLink>(pair, "shm");
  if (Status status = link->open(maxBytes); !status) return status.inContext("shm");
  *out = std::move(link);
  return {};
}

Status makeVerbsLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out) {
  auto link = std::make_unique<SlotLink>(pair, "verbs");
  if (Status status = link->open(maxBytes); !status) return status.inContext("verbs");
  *out = std::move(link);
  return {};
}

}  // namespace hoccl::bench
