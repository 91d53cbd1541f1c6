// What a peer can do to the mover's loop: die at any moment, say what makes no sense, be out of
// reach. One mover, and a peer that the test plays.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "common/net/transport.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/segment.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::fakeImports;
using test::kId;
using test::receiveFrom;
using test::Scripted;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::waitUntil;
using Ticket = TestMover::Ticket;

// --- Dead peers ----------------------------------------------------------------------------------

TEST(MoverLoop, Rule9ADeadPeerFailsOnlyItsCommunicators) {
  // Rank 1 of communicator 0 dies mid-transfer; communicator 1 is with another mover.
  Scripted s;
  TestMover other;
  const std::vector<PeerRecord> peers{s.mover.place("hostA", 111), other.place("hostC", 333)};
  ASSERT_TRUE(s.mover.addCommunicator(1, kId + 1, 0, peers));
  ASSERT_TRUE(other.addCommunicator(1, kId + 1, 1, peers));
  DeviceBuffer doomed(300'001), waiting(300'001), from(2'000'001), to(2'000'001);
  from.fill(1);
  const Ticket broken = s.mover.launch({receiveFrom(1, 0, doomed)});
  const Ticket never = s.mover.launch({sendTo(1, 0, waiting)});
  ASSERT_TRUE(s.peer.accept());
  Message ready{};
  ASSERT_TRUE(s.peer.receive(MessageType::Ready, &ready));
  const Message chunk = ScriptedPeer::chunk(kId, 1, 0, 0, 0, 300'001, 0, 100'000);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 9);
  s.mover.engines.jitterUs = 2000;
  const Ticket send = s.mover.launch({sendTo(1, 0, from, 1)});
  s.peer.die();
  ASSERT_TRUE(s.mover.waitFor(broken) && s.mover.waitFor(never));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
  EXPECT_TRUE(contains(s.mover.errorText(0), "rank 1 (host hostB, process 222)"));
  EXPECT_TRUE(contains(s.mover.errorText(0), "ended")) << s.mover.errorText(0);
  const Ticket receive = other.launch({receiveFrom(0, 0, to, 1)});
  ASSERT_TRUE(s.mover.waitFor(send) && other.waitFor(receive));
  EXPECT_EQ(to.check(1), "");
  EXPECT_EQ(s.mover.errorText(1), "");
  // Whatever comes later for the dead one ends at once.
  EXPECT_TRUE(s.mover.waitFor(s.mover.launch({receiveFrom(1, 1, doomed)})));
  s.mover.end(0, OpKind::Close);
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(MoverLoop, WhatADeadPeerAnnouncedInFullIsStillTaken) {
  Scripted s;
  DeviceBuffer to(200'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  Message ready{};
  ASSERT_TRUE(s.peer.receive(MessageType::Ready, &ready));
  EXPECT_EQ(ready.bytes, 200'001u);
  s.mover.engines.hold(true);
  const Message chunks[] = {ScriptedPeer::chunk(kId, 1, 0, 0, 2, 200'001, 0, 100'000),
                            ScriptedPeer::chunk(kId, 1, 0, 0, 0, 200'001, 100'000, 100'001)};
  for (const Message& chunk : chunks) {
    ASSERT_TRUE(s.peer.send(chunk));
    s.peer.deliver(chunk, 4);
  }
  ASSERT_TRUE(waitUntil([&] { return s.mover.engines.submitted == 2; }));
  s.peer.die();
  EXPECT_FALSE(s.mover.waitFor(receive, 250)) << "longer than a dead peer is given";
  s.mover.engines.hold(false);
  ASSERT_TRUE(s.mover.waitFor(receive));
  EXPECT_EQ(to.check(4), "");
  EXPECT_EQ(s.mover.errorText(0), "");
}

TEST(MoverLoop, AReceivePostedAfterTheSendersEndTakesWhatLiesInTheSlots) {
  Scripted s;
  DeviceBuffer first(70'001), late(200'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, first)});
  ASSERT_TRUE(s.peer.accept());
  const Message chunks[] = {ScriptedPeer::chunk(kId, 1, 0, 0, 0, 70'001, 0, 70'001),
                            ScriptedPeer::chunk(kId, 1, 0, 1, 1, 200'001, 0, 100'000),
                            ScriptedPeer::chunk(kId, 1, 0, 1, 2, 200'001, 100'000, 100'001),
                            ScriptedPeer::chunk(kId, 1, 0, 2, 3, 200'001, 0, 100'000)};
  for (const Message& chunk : chunks) {
    ASSERT_TRUE(s.peer.send(chunk));
    s.peer.deliver(chunk, chunk.pairSequence);
  }
  ASSERT_TRUE(s.mover.waitFor(receive));
  s.peer.die();
  ::usleep(300'000);  // well after the loop has taken its leave of the peer
  EXPECT_EQ(s.mover.errorText(0), "") << "nothing has failed yet";
  const Ticket after = s.mover.launch({receiveFrom(1, 1, late)});
  ASSERT_TRUE(s.mover.waitFor(after));
  EXPECT_EQ(late.check(1), "");
  EXPECT_EQ(s.mover.errorText(0), "");
  // The next one lies here only in part.
  const Ticket part = s.mover.launch({receiveFrom(1, 2, late)});
  ASSERT_TRUE(s.mover.waitFor(part));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
}

TEST(MoverLoop, WhatADeadPeerSentWaitsForRoomInTheLane) {
  // The lane is full of another link's copies when the dead peer is taken leave of.
  TestMover::Options options;
  options.laneDepth = 1;
  Scripted s(options);
  TestMover other;
  const std::vector<PeerRecord> peers{s.mover.place("hostA", 111), other.place("hostC", 333)};
  ASSERT_TRUE(s.mover.addCommunicator(1, kId + 1, 0, peers));
  ASSERT_TRUE(other.addCommunicator(1, kId + 1, 1, peers));
  DeviceBuffer from(70'001), busy(70'001), to(70'001);
  from.fill(1);
  s.mover.engines.hold(true);
  const Ticket before = s.mover.launch({receiveFrom(1, 0, busy, 1)});
  const Ticket send = other.launch({sendTo(0, 0, from, 1)});
  ASSERT_TRUE(waitUntil([&] { return s.mover.engines.submitted == 1; }));
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  const Message chunk = ScriptedPeer::chunk(kId, 1, 0, 0, 0, 70'001, 0, 70'001);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 4);
  s.peer.die();
  EXPECT_FALSE(s.mover.waitFor(receive, 250)) << "longer than a dead peer is given";
  s.mover.engines.hold(false);
  ASSERT_TRUE(s.mover.waitFor(before) && other.waitFor(send));
  ASSERT_TRUE(s.mover.waitFor(receive, 5'000)) << "its link went, and the chunk with it";
  EXPECT_EQ(to.check(4), "");
  EXPECT_EQ(s.mover.errorText(0), "");
}

/// A mover whose peer has died and left an early chunk that nobody has asked for.
struct LeftBehind : Scripted {
  LeftBehind() {
    DeviceBuffer first(70'001);
    const Ticket receive = mover.launch({receiveFrom(1, 0, first)});
    EXPECT_TRUE(peer.accept());
    for (std::uint64_t sequence : {0u, 1u}) {
      const Message chunk = ScriptedPeer::chunk(
          kId, 1, 0, sequence, static_cast<std::uint32_t>(sequence), 70'001, 0, 70'001);
      EXPECT_TRUE(peer.send(chunk));
      peer.deliver(chunk, sequence);
    }
    EXPECT_TRUE(mover.waitFor(receive));
    peer.die();
    ::usleep(300'000);  // well after the loop has taken its leave of the peer
  }
};

TEST(MoverLoop, ADeadPeersLinkGoesWithTheLastOfItsChunks) {
  for (bool take : {true, false}) {
    const std::uint32_t before = fakeImports().registered;
    LeftBehind s;
    ASSERT_EQ(fakeImports().registered, before + 1);
    if (take) {
      DeviceBuffer to(70'001);
      ASSERT_TRUE(s.mover.waitFor(s.mover.launch({receiveFrom(1, 1, to)})));
      EXPECT_EQ(to.check(1), "");
    }
    s.mover.end(0, OpKind::Close);
    ASSERT_TRUE(s.mover.waitForClose(0));
    EXPECT_TRUE(waitUntil([&] { return fakeImports().registered == before; }, 3'000))
        << "the link and its registered memory stay; early chunk taken: " << take;
  }
}

TEST(MoverLoop, Rule9ADeadPeerIsDeadForLaterCommunicatorsToo) {
  LeftBehind s;
  ASSERT_TRUE(s.mover.addCommunicator(1, kId + 1, 0,
                                      {s.mover.place("hostA", 111), s.peer.place("hostB", 222)}));
  DeviceBuffer to(70'001);
  EXPECT_TRUE(s.mover.waitFor(s.mover.launch({receiveFrom(1, 0, to, 1)}), 3'000));
  EXPECT_EQ(s.mover.code(1), Code::Remote);
}

TEST(MoverLoop, Rule9AnnouncedBytesThatNeverArrivedFailTheReceive) {
  Scripted s;
  DeviceBuffer to(200'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  const Message whole[] = {ScriptedPeer::chunk(kId, 1, 0, 0, 0, 200'001, 0, 100'000),
                           ScriptedPeer::chunk(kId, 1, 0, 0, 1, 200'001, 100'000, 100'001)};
  for (const Message& chunk : whole) ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(whole[0], 1);  // the other one's copy died with its mover
  s.peer.die();
  ASSERT_TRUE(s.mover.waitFor(receive));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
}

TEST(MoverLoop, Rule9APeerThatAbortsAndThenDiesInTheMiddleOfItsCopy) {
  Scripted s;
  DeviceBuffer to(70'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  ASSERT_TRUE(s.peer.send(ScriptedPeer::chunk(kId, 1, 0, 0, 0, 70'001, 0, 70'001)));
  Message failed{};
  failed.type = MessageType::Failed;
  failed.slot = static_cast<std::uint32_t>(FailReason::Aborted);
  failed.communicator = kId;
  failed.source = 1;
  ASSERT_TRUE(s.peer.send(failed));
  EXPECT_FALSE(s.mover.waitFor(receive, 30));  // announced in full: its copy may still end
  s.peer.die();
  EXPECT_TRUE(s.mover.waitFor(receive, 5'000)) << "the bytes can never come";
  EXPECT_EQ(s.mover.code(0), Code::Remote);
}

TEST(MoverLoop, Rule9APeerThatCannotBeReached) {
  TestMover mover;
  PeerRecord nowhere{};
  {
    ScriptedPeer gone;
    nowhere = gone.place("hostX", 999);
  }
  ASSERT_TRUE(mover.addCommunicator(0, kId, 0, {mover.place("hostA", 1), nowhere}));
  DeviceBuffer buffer(70'001);
  const Ticket receive = mover.launch({receiveFrom(1, 0, buffer)});
  ASSERT_TRUE(mover.waitFor(receive));
  EXPECT_EQ(mover.code(0), Code::Remote);
  EXPECT_TRUE(contains(mover.errorText(0), "rank 1 (host hostX, process 999)"));
  EXPECT_TRUE(contains(mover.errorText(0), "reached")) << mover.errorText(0);
}

// --- Strange messages ----------------------------------------------------------------------------

TEST(MoverLoop, Rule10APeersMessageThatMakesNoSense) {
  for (int kind = 0; kind < 3; ++kind) {
    Scripted s;
    DeviceBuffer to(200'001);
    const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
    ASSERT_TRUE(s.peer.accept());
    Message m = ScriptedPeer::chunk(kId, 1, 0, 0, 0, 200'001, 0, 100'000);
    if (kind == 0) m.slot = 4;
    if (kind == 1) m.offset = 200'000;
    if (kind == 2) m.type = static_cast<MessageType>(77);
    ASSERT_TRUE(s.peer.send(m));
    ASSERT_TRUE(s.mover.waitFor(receive)) << kind;
    EXPECT_EQ(s.mover.code(0), Code::Remote);
    EXPECT_TRUE(contains(s.mover.errorText(0), "makes no sense")) << s.mover.errorText(0);
  }
}

TEST(MoverLoop, Rule10StrangeRanksAndNumbersInMessagesAreIgnored) {
  Scripted s;
  DeviceBuffer to(70'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  for (MessageType type : {MessageType::Ready, MessageType::Failed}) {
    Message m{};
    m.type = type;
    m.slot = 99;
    m.communicator = kId;
    for (std::int32_t rank : {-1, 2, 1 << 30}) {
      m.source = m.destination = rank;
      ASSERT_TRUE(s.peer.send(m));
    }
    m.source = m.destination = 1;
    m.pairSequence = ~0ull;
    ASSERT_TRUE(s.peer.send(m));
    m.communicator = kId + 5;
    ASSERT_TRUE(s.peer.send(m));
  }
  Message chunk = ScriptedPeer::chunk(kId, 1 << 30, 0, 0, 0, 70'001, 0, 70'001);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 1);
  chunk = ScriptedPeer::chunk(kId, 1, 0, ~0ull, 1, 70'001, 0, 70'001);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 1);
  // Both slots come back, and the real one is taken.
  const auto& out = s.peer.connection->staging().out;
  EXPECT_TRUE(waitUntil([&] { return out[0].credit->reached(1) && out[1].credit->reached(1); }));
  chunk = ScriptedPeer::chunk(kId, 1, 0, 0, 0, 70'001, 0, 70'001, 2);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 6);
  ASSERT_TRUE(s.mover.waitFor(receive));
  EXPECT_EQ(to.check(6), "");
  EXPECT_EQ(s.mover.errorText(0), "");
}

}  // namespace
}  // namespace hoccl
