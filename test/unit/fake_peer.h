#pragma once

// A peer mover played by the test, over the shm transport: it says what it is told to say.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/base/random.h"
#include "common/base/status.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/transport.h"
#include "common/runtime/mover_protocol.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

/// A peer played by the test: takes one connection and says what it is told to say.
class ScriptedPeer {
 public:
  explicit ScriptedPeer(const StagingGeometry& geometry = {4, 128 << 10}) {
    EXPECT_TRUE(random64(&self_.high));
    EXPECT_TRUE(random64(&self_.low));
    Status status = makeShmTransport(self_, geometry, &transport_);
    EXPECT_TRUE(status) << status.message();
  }
  [[nodiscard]] PeerRecord place(const std::string& host, std::uint64_t pid) const {
    PeerRecord record{};
    record.mover = self_;
    record.pid = pid;
    setText(record.address, transport_->address());
    setText(record.host, host);
    return record;
  }
  /// Waits for the mover's connection.
  [[nodiscard]] bool accept() {
    std::unique_ptr<Handshake> handshake;
    return waitUntil([&] {
      if (!handshake) handshake = transport_->accept();
      if (!handshake) return false;
      Handshake::State state = handshake->advance();
      if (state == Handshake::State::Pending && handshake->peer()) {
        handshake->decide(Handshake::Decision::Accept, "");
        state = handshake->advance();
      }
      if (state == Handshake::State::Done) connection = handshake->take();
      return connection != nullptr;
    });
  }
  void die() { connection.reset(); }
  [[nodiscard]] bool send(const Message& message) { return connection->trySend(message); }
  /// The next message of that type; others are dropped.
  [[nodiscard]] bool receive(MessageType type, Message* message, std::uint64_t ms = kPatienceMs) {
    return waitUntil(
        [&] {
          while (connection->tryReceive(message)) {
            if (message->type == type) return true;
          }
          return false;
        },
        ms);
  }
  /// A Chunk message of the pair (source → destination); turn 1 unless the slot was used before.
  [[nodiscard]] static Message chunk(std::uint64_t communicator, std::int32_t source,
                                     std::int32_t destination, std::uint64_t sequence,
                                     std::uint32_t slot, std::uint64_t bytes, std::uint64_t offset,
                                     std::uint64_t length, std::uint64_t turn = 1) {
    Message m{};
    m.type = MessageType::Chunk;
    m.slot = slot;
    m.communicator = communicator;
    m.source = source;
    m.destination = destination;
    m.pairSequence = sequence;
    m.bytes = bytes;
    m.offset = offset;
    m.length = length;
    m.turn = turn;
    return m;
  }
  /// Fills the slot of a chunk with the pattern of `key` and shows it.
  void deliver(const Message& m, std::uint64_t key) {
    const Slot& slot = connection->staging().out[m.slot];
    writePattern(slot.data, key, m.offset, m.length);
    slot.ready->set(m.turn);
  }

  std::unique_ptr<Connection> connection;

 private:
  PeerId self_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace hoccl::test
