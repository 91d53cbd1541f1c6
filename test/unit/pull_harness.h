#pragma once

// What the tests of pulled copies share: movers that pull, and a peer that the test plays.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/runtime/peer_imports.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl::test::pull {

using Ticket = TestMover::Ticket;

inline constexpr std::uint64_t kBytes = 300'001;
/// For what must not happen: long enough for a mover that would do it.
inline constexpr std::uint64_t kSettleMs = 100;

inline TestMover::Options pulling() {
  TestMover::Options options;
  options.p2p = 3;
  return options;
}

inline PeerRecord inReach(PeerRecord record) {
  record.direct = 1;
  return record;
}

inline std::uint64_t directBytes(const TestMover& mover) {
  return mover.segment.communicator(0).directBytes.load();
}

struct TwoOfANode {
  explicit TwoOfANode(const TestMover::Options& ofA = pulling(),
                      const TestMover::Options& ofB = pulling())
      : a(ofA), b(ofB) {
    const std::vector<PeerRecord> peers{inReach(a.place("hostA", 1)), inReach(b.place("hostA", 2))};
    EXPECT_TRUE(a.addCommunicator(0, kId, 0, peers));
    EXPECT_TRUE(b.addCommunicator(0, kId, 1, peers));
  }
  TestMover a, b;
};

/// A message of ranks 0 and 1 in that direction.
inline Message messageOf(MessageType type, std::int32_t source) {
  Message m{};
  m.type = type;
  m.communicator = kId;
  m.source = source;
  m.destination = 1 - source;
  m.bytes = kBytes;
  return m;
}

/// `peer`, rank 1, tells of the allocation of `from` and lends it to rank 0 in slot 0.
/// Returns the allocation.
inline std::uint64_t lendTo(ScriptedPeer& peer, DeviceBuffer& from,
                            CUresult result = CUDA_SUCCESS) {
  const BufferRef ref = refTo(from, freshAllocation(), result);
  Message parts[HandlePart::kParts];
  PeerImports::describe(ref, &parts);
  for (const Message& part : parts) EXPECT_TRUE(peer.send(part));
  Message pull = messageOf(MessageType::Pull, 1);
  pull.offset = ref.offset;
  pull.length = ref.allocationId;
  pull.turn = 1;
  EXPECT_TRUE(peer.send(pull));
  return ref.allocationId;
}

/// A mover, rank 0, with a scripted peer, rank 1, on another GPU of its node.
struct ScriptedNeighbour {
  ScriptedNeighbour() : mover(pulling()) {
    EXPECT_TRUE(mover.addCommunicator(
        0, kId, 0, {inReach(mover.place("hostA", 1)), inReach(peer.place("hostA", 2))}));
  }
  static Message failed(FailReason reason) {
    Message m = messageOf(MessageType::Failed, 1);
    m.slot = static_cast<std::uint32_t>(reason);
    return m;
  }

  // The mover sends.
  /// A send of `buffer`, for which the peer is ready, up to what it says then.
  Ticket lent(DeviceBuffer& buffer, Message* pull) {
    const Ticket ticket = mover.launch({sendTo(1, 0, buffer)});
    EXPECT_TRUE(peer.accept());
    Message ready = messageOf(MessageType::Ready, 0);
    ready.slot = 1;
    EXPECT_TRUE(peer.send(ready));
    EXPECT_TRUE(peer.receive(MessageType::Pull, pull));
    return ticket;
  }
  [[nodiscard]] Slot slotOf(const Message& pull) const {
    return peer.connection->staging().in[pull.slot];
  }

  // The mover receives.
  /// A receive of `to`, to which the peer lends `from`.
  Ticket borrowing(DeviceBuffer& to, DeviceBuffer& from, CUresult result = CUDA_SUCCESS) {
    const Ticket ticket = mover.launch({receiveFrom(1, 0, to)});
    Message ready{};
    EXPECT_TRUE(peer.accept());
    EXPECT_TRUE(peer.receive(MessageType::Ready, &ready));
    EXPECT_EQ(ready.slot, 1u);
    EXPECT_EQ(ready.turn, 0u) << "nothing to push into";
    borrowed = lendTo(peer, from, result);
    return ticket;
  }
  [[nodiscard]] bool read() const { return peer.connection->staging().out[0].credit->reached(1); }
  void hold() { peer.connection->staging().out[0].ready->set(1); }

  ScriptedPeer peer;
  TestMover mover;
  std::uint64_t borrowed = 0;  ///< the allocation that the peer lends
};

}  // namespace hoccl::test::pull
