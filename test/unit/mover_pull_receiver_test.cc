// A mover that pulls what it receives, from a peer that the test plays.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "test/unit/pull_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::fakeImports;
using test::freshAllocation;
using test::kId;
using test::receiveFrom;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::waitUntil;
using test::pull::directBytes;
using test::pull::inReach;
using test::pull::kBytes;
using test::pull::kSettleMs;
using test::pull::lendTo;
using test::pull::messageOf;
using test::pull::pulling;
using test::pull::ScriptedNeighbour;
using test::pull::Ticket;

// --- The receiver's end (rule 9) -----------------------------------------------------------------

TEST(Pull, TheReceiveEndsOnlyWhenTheSenderHasHeldTheBytes) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  from.fill(8);
  const Ticket ticket = s.borrowing(to, from);
  ASSERT_TRUE(waitUntil([&] { return s.read(); }));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs));
  s.hold();
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(to.check(8), "");
}

/// Its copies are over: the lanes are others' meanwhile.
TEST(Pull, Rule7ASenderThatDoesNotSaySoHoldsUpNoOther) {
  TestMover::Options one = pulling();
  one.laneDepth = 1;
  ScriptedPeer silent;
  TestMover mover(one), other(one);
  const std::vector<PeerRecord> peers{inReach(mover.place("hostA", 1)),
                                      inReach(silent.place("hostA", 2)),
                                      inReach(other.place("hostA", 3))};
  ASSERT_TRUE(mover.addCommunicator(0, kId, 0, peers));
  ASSERT_TRUE(other.addCommunicator(0, kId, 2, peers));
  DeviceBuffer from(kBytes), to(kBytes), fromOther(kBytes), toOther(kBytes);
  const Ticket waits = mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(silent.accept());
  Message ready{};
  ASSERT_TRUE(silent.receive(MessageType::Ready, &ready));
  lendTo(silent, from);
  ASSERT_TRUE(waitUntil([&] { return silent.connection->staging().out[0].credit->reached(1); }));
  fromOther.fill(4);
  const Ticket sent = other.launch({sendTo(0, 0, fromOther)});
  const Ticket received = mover.launch({receiveFrom(2, 0, toOther)});
  ASSERT_TRUE(mover.waitFor(received) && other.waitFor(sent));
  EXPECT_EQ(toOther.check(4), "");
  EXPECT_FALSE(mover.finished(waits));
}

TEST(Pull, Rule9ASenderThatDiesBeforeItHasSaidSoFailsTheReceive) {
  for (const bool copied : {false, true}) {
    SCOPED_TRACE(copied);
    ScriptedNeighbour s;
    DeviceBuffer from(kBytes), to(kBytes);
    s.mover.engines.hold(!copied);
    const Ticket ticket = s.borrowing(to, from);
    ASSERT_TRUE(
        waitUntil([&] { return copied ? s.read() : s.mover.engines.submitted.load() == 1; }));
    s.peer.die();
    if (!copied) {
      EXPECT_FALSE(s.mover.waitFor(ticket, 3 * kSettleMs)) << "its own copy is under way";
      s.mover.engines.hold(false);
    }
    ASSERT_TRUE(s.mover.waitFor(ticket));
    EXPECT_EQ(s.mover.code(0), Code::Remote);
    EXPECT_TRUE(contains(s.mover.errorText(0), "rank 1 (host hostA, process 2)"));
  }
}

TEST(Pull, Rule9ASenderThatHasHeldTheBytesMayGo) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  from.fill(8);
  s.mover.engines.hold(true);
  const Ticket ticket = s.borrowing(to, from);
  ASSERT_TRUE(waitUntil([&] { return s.mover.engines.submitted.load() == 1; }));
  s.hold();
  s.peer.die();
  s.mover.engines.hold(false);
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(s.mover.code(0), Code::Ok);
  EXPECT_EQ(to.check(8), "");
}

TEST(Pull, Rule9AnAbortedReceiveWaitsForItsCopyAndNotForTheSender) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  s.mover.engines.hold(true);
  const Ticket ticket = s.borrowing(to, from);
  ASSERT_TRUE(waitUntil([&] { return s.mover.engines.submitted.load() == 1; }));
  s.mover.end(0, OpKind::Abort);
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs));
  s.mover.engines.hold(false);
  EXPECT_TRUE(s.mover.waitFor(ticket, 1000));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Pull, WhatCannotBeMappedIsRefusedAndComesThroughTheSlots) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.borrowing(to, from, CUDA_ERROR_INVALID_VALUE);
  Message refused{};
  ASSERT_TRUE(s.peer.receive(MessageType::Refused, &refused));
  EXPECT_EQ(refused.offset, 1u);
  EXPECT_EQ(refused.turn, 1u);
  EXPECT_FALSE(s.read()) << "the sender would take it for read";
  constexpr std::uint64_t kSlot = 128 << 10;
  std::uint64_t at = 0;
  for (std::uint32_t slot = 0; at < kBytes; ++slot) {
    const std::uint64_t length = std::min(kSlot, kBytes - at);
    const Message chunk = ScriptedPeer::chunk(kId, 1, 0, 0, slot, kBytes, at, length, 2);
    ASSERT_TRUE(s.peer.send(chunk));
    s.peer.deliver(chunk, 6);
    at += length;
  }
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(to.check(6), "");
  EXPECT_EQ(directBytes(s.mover), 0u);
}

TEST(Pull, Rule8WhatTheSenderWantsBackIsUnmappedBeforeItIsTold) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.borrowing(to, from);
  ASSERT_TRUE(waitUntil([&] { return s.read(); }));
  const std::uint64_t unmapped = fakeImports().closed.load();
  s.hold();
  ASSERT_TRUE(s.mover.waitFor(ticket));
  Message message{};
  message.type = MessageType::Forget;
  message.turn = s.borrowed;
  ASSERT_TRUE(s.peer.send(message));
  s.peer.connection->nudge();
  ASSERT_TRUE(s.peer.receive(MessageType::Forgotten, &message, 2000));
  EXPECT_EQ(message.turn, s.borrowed);
  EXPECT_EQ(fakeImports().closed.load(), unmapped + 1);
}

/// The receive goes on through the slots, for as long as it takes; the sender's application may free
/// meanwhile what else lies there.
TEST(Pull, WhatIsRefusedIsLetGo) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.borrowing(to, from, CUDA_ERROR_INVALID_VALUE);
  Message message{};
  ASSERT_TRUE(s.peer.receive(MessageType::Refused, &message));
  Message forget{};
  forget.type = MessageType::Forget;
  forget.turn = message.length;
  ASSERT_TRUE(s.peer.send(forget));
  ASSERT_TRUE(s.peer.receive(MessageType::Forgotten, &message, 2000));
  EXPECT_EQ(message.turn, forget.turn);
  EXPECT_FALSE(s.mover.finished(ticket));
}

TEST(Pull, WhatCannotBeMappedOfASenderThatHasAbortedFailsTheReceive) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.borrowing(to, from, CUDA_ERROR_INVALID_VALUE);
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::failed(FailReason::Aborted)));
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
  EXPECT_TRUE(contains(s.mover.errorText(0), "aborted or destroyed")) << s.mover.errorText(0);
}

TEST(Pull, WhatNobodyWantsIsRefusedAndNotRead) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  Message message{};
  ASSERT_TRUE(s.peer.receive(MessageType::Ready, &message));
  s.mover.end(0, OpKind::Abort);
  ASSERT_TRUE(s.mover.waitFor(ticket, 1000)) << "nothing can be copied into it by the peer";
  Message pull = messageOf(MessageType::Pull, 1);
  pull.length = freshAllocation();
  pull.turn = 1;
  ASSERT_TRUE(s.peer.send(pull));
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &message)) << "why, before that it is";
  ASSERT_TRUE(s.peer.receive(MessageType::Refused, &message));
  EXPECT_EQ(message.offset, 0u);
  EXPECT_FALSE(s.read());
  EXPECT_EQ(s.mover.engines.submitted.load(), 0u);
}

// --- What makes no sense (rule 10) ---------------------------------------------------------------

TEST(Pull, Rule10NonsenseOfAPeerEndsItsLinkAlone) {
  Message notAsked = messageOf(MessageType::Pull, 1);
  notAsked.pairSequence = 5;  // no receive
  notAsked.turn = 1;
  Message notLent = messageOf(MessageType::Refused, 0);
  notLent.turn = 1;
  Message noSlot = notLent;
  noSlot.slot = 99;
  for (const Message& nonsense : {notAsked, notLent, noSlot}) {
    SCOPED_TRACE(&nonsense - &notAsked);
    ScriptedNeighbour s;
    DeviceBuffer to(kBytes);
    const Ticket ticket = s.mover.launch({receiveFrom(1, 0, to)});
    ASSERT_TRUE(s.peer.accept());
    Message ready{};
    ASSERT_TRUE(s.peer.receive(MessageType::Ready, &ready));
    ASSERT_TRUE(s.peer.send(nonsense));
    ASSERT_TRUE(s.mover.waitFor(ticket));
    EXPECT_TRUE(contains(s.mover.errorText(0), "makes no sense")) << s.mover.errorText(0);
  }
}

/// Of a receive that waits for a copy of the sender's mover.
TEST(Pull, Rule10APullThatWasNotOfferedEndsTheLink) {
  TestMover mover;
  ScriptedPeer peer;
  ASSERT_TRUE(mover.addCommunicator(
      0, kId, 0, {inReach(mover.place("hostA", 1)), inReach(peer.place("hostA", 2))}));
  DeviceBuffer to(kBytes);
  const Ticket ticket = mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(peer.accept());
  Message m{};
  ASSERT_TRUE(peer.receive(MessageType::Ready, &m));
  EXPECT_EQ(m.slot, 0u);
  m = messageOf(MessageType::Pull, 1);
  m.turn = 1;
  ASSERT_TRUE(peer.send(m));
  ASSERT_TRUE(mover.waitFor(ticket));
  EXPECT_TRUE(contains(mover.errorText(0), "makes no sense")) << mover.errorText(0);
}

/// The sender knows from the refusal that it is not lent again.
TEST(Pull, Rule10WhatWasRefusedIsNotLentOnceMore) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes), to(kBytes);
  const Ticket ticket = s.borrowing(to, from, CUDA_ERROR_INVALID_VALUE);
  Message pull{};
  ASSERT_TRUE(s.peer.receive(MessageType::Refused, &pull));
  pull.type = MessageType::Pull;
  pull.offset = 0;
  pull.turn = 2;
  ASSERT_TRUE(s.peer.send(pull));
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_TRUE(contains(s.mover.errorText(0), "makes no sense")) << s.mover.errorText(0);
}

/// Beyond the allocation, or in one that the peer has not told of: as if it could not be mapped.
TEST(Pull, Rule10BytesThatAreNotThereAreRefused) {
  for (const bool told : {false, true}) {
    SCOPED_TRACE(told);
    ScriptedNeighbour s;
    DeviceBuffer from(1000), to(kBytes);
    Message message{};
    if (told) {
      s.borrowing(to, from);
    } else {
      s.mover.launch({receiveFrom(1, 0, to)});
      ASSERT_TRUE(s.peer.accept());
      ASSERT_TRUE(s.peer.receive(MessageType::Ready, &message));
      Message pull = messageOf(MessageType::Pull, 1);
      pull.length = 12345;
      pull.turn = 1;
      ASSERT_TRUE(s.peer.send(pull));
    }
    ASSERT_TRUE(s.peer.receive(MessageType::Refused, &message));
    EXPECT_EQ(s.mover.engines.submitted.load(), 0u);
  }
}

}  // namespace
}  // namespace hoccl
