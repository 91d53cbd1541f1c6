// A mover that lends what it sends, to a peer that the test plays.

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cstdint>

#include "test/unit/pull_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::freshAllocation;
using test::kId;
using test::mirrorOf;
using test::refTo;
using test::sendTo;
using test::waitUntil;
using test::pull::directBytes;
using test::pull::inReach;
using test::pull::kBytes;
using test::pull::kSettleMs;
using test::pull::messageOf;
using test::pull::ScriptedNeighbour;
using test::pull::Ticket;

// --- The sender's end (rule 9) -------------------------------------------------------------------

TEST(Pull, TheSendLastsUntilItIsRead) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  EXPECT_EQ(pull.offset, 1u);
  EXPECT_EQ(pull.bytes, kBytes);
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs));
  EXPECT_FALSE(s.slotOf(pull).ready->reached(pull.turn));
  s.slotOf(pull).credit->set(pull.turn);
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_TRUE(s.slotOf(pull).ready->reached(pull.turn)) << "the bytes have been held";
  EXPECT_EQ(s.mover.code(0), Code::Ok);
}

TEST(Pull, WhatIsRefusedIsStagedAndTheAllocationNotLentAgain) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  from.fill(4);
  const BufferRef ref = refTo(from, freshAllocation());
  const auto send = [&](std::uint64_t sequence) {
    return s.mover.launch({{OpKind::Send, 0, 1, kBytes, sequence, ref}});
  };
  const Ticket first = send(0);
  ASSERT_TRUE(s.peer.accept());
  Message m = messageOf(MessageType::Ready, 0);
  m.slot = 1;
  ASSERT_TRUE(s.peer.send(m));
  ASSERT_TRUE(s.peer.receive(MessageType::Pull, &m));
  EXPECT_EQ(m.length, ref.allocationId);
  m.type = MessageType::Refused;
  m.offset = 1;
  ASSERT_TRUE(s.peer.send(m));
  const auto takeChunks = [&](const Ticket& ticket) {
    std::uint64_t got = 0;
    while (got < kBytes && s.peer.receive(MessageType::Chunk, &m)) {
      got += m.length;
      const Slot slot = s.peer.connection->staging().in[m.slot];
      EXPECT_TRUE(waitUntil([&] { return slot.ready->reached(m.turn); }));
      slot.credit->set(m.turn);
    }
    EXPECT_EQ(got, kBytes);
    EXPECT_TRUE(s.mover.waitFor(ticket));
  };
  takeChunks(first);
  const Ticket second = send(1);
  m = messageOf(MessageType::Ready, 0);
  m.slot = 1;
  m.pairSequence = 1;
  ASSERT_TRUE(s.peer.send(m));
  Message next{};
  ASSERT_TRUE(waitUntil([&] { return s.peer.connection->tryReceive(&next); }));
  EXPECT_EQ(next.type, MessageType::Chunk) << "not lent again";
  const Slot slot = s.peer.connection->staging().in[next.slot];
  ASSERT_TRUE(waitUntil([&] { return slot.ready->reached(next.turn); }));
  slot.credit->set(next.turn);
  for (std::uint64_t got = next.length; got < kBytes; got += m.length) {
    ASSERT_TRUE(s.peer.receive(MessageType::Chunk, &m));
    const Slot further = s.peer.connection->staging().in[m.slot];
    ASSERT_TRUE(waitUntil([&] { return further.ready->reached(m.turn); }));
    further.credit->set(m.turn);
  }
  EXPECT_TRUE(s.mover.waitFor(second));
  EXPECT_EQ(directBytes(s.mover), 0u);
}

TEST(Pull, Rule9AnAbortedSendWaitsWhileThePeerReads) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  s.mover.end(0, OpKind::Abort);
  Message failed{};
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &failed));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs)) << "released while the peer reads";
  s.slotOf(pull).credit->set(pull.turn);
  EXPECT_TRUE(s.mover.waitFor(ticket, 1000));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Pull, Rule9ARefusalAlsoEndsAnAbortedSend) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  s.mover.end(0, OpKind::Abort);
  pull.type = MessageType::Refused;
  pull.offset = 0;
  ASSERT_TRUE(s.peer.send(pull));
  EXPECT_TRUE(s.mover.waitFor(ticket, 1000));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Pull, Rule9ASilentPeerIsNotWaitedForForEverAndMustNotUseTheBytes) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message message{}, pull{};
  const Ticket ticket = s.lent(from, &pull);
  s.mover.end(0, OpKind::Abort);
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &message));
  EXPECT_EQ(message.slot, static_cast<std::uint32_t>(FailReason::Aborted));
  EXPECT_TRUE(s.mover.waitFor(ticket, 4500)) << "half of HOCCL_TIMEOUT_MS is 2.5 s";
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &message));
  EXPECT_EQ(message.slot, static_cast<std::uint32_t>(FailReason::LocalError));
  s.slotOf(pull).credit->set(pull.turn);
  ::usleep(kSettleMs * 1000);
  EXPECT_FALSE(s.slotOf(pull).ready->reached(pull.turn)) << "they may be newer bytes";
}

TEST(Pull, Rule9APeerThatDiesBeforeItHasReadFailsTheSend) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  s.peer.die();
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
  EXPECT_TRUE(contains(s.mover.errorText(0), "rank 1 (host hostA, process 2)"));
}

TEST(Pull, AReceiverThatFailsBeforeItHasReadFailsTheSend) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::failed(FailReason::Aborted)));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs)) << "it may still be reading";
  pull.type = MessageType::Refused;
  pull.offset = 0;
  ASSERT_TRUE(s.peer.send(pull));
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
}

/// One that has aborted and has nothing left to do sleeps, and looks at no message until it is
/// woken: what was lent to it in the meantime would stay so for ever.
TEST(Pull, Rule9AReceiverThatHasFailedIsWokenForWhatIsLentToIt) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message pull{};
  const Ticket ticket = s.lent(from, &pull);
  ::usleep(kSettleMs * 1000);
  s.peer.connection->watch();  // takes the nudges so far
  pollfd bell{s.peer.connection->watchFd(), POLLIN, 0};
  ASSERT_EQ(::poll(&bell, 1, 0), 0);
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::failed(FailReason::Aborted)));
  EXPECT_EQ(::poll(&bell, 1, 2000), 1) << "it sleeps on";
  pull.type = MessageType::Refused;
  pull.offset = 0;
  ASSERT_TRUE(s.peer.send(pull));
  EXPECT_TRUE(s.mover.waitFor(ticket));
}

/// How long an earlier failure has waited for the peer is not taken off a later one's time.
TEST(Pull, Rule9EachCommunicatorWaitsForItself) {
  ScriptedNeighbour s;
  constexpr std::uint64_t kOther = kId + 1;
  ASSERT_TRUE(s.mover.addCommunicator(
      1, kOther, 0, {inReach(s.mover.place("hostA", 1)), inReach(s.peer.place("hostA", 2))}));
  DeviceBuffer from(kBytes), later(kBytes);
  Message pull{}, ready{};
  const Ticket first = s.lent(from, &pull);
  const Ticket second = s.mover.launch({sendTo(1, 0, later, 1)});
  ready = messageOf(MessageType::Ready, 0);
  ready.communicator = kOther;
  ready.slot = 1;
  ASSERT_TRUE(s.peer.send(ready));
  ASSERT_TRUE(s.peer.receive(MessageType::Pull, &pull));
  ASSERT_EQ(pull.communicator, kOther);
  s.mover.end(0, OpKind::Abort);
  ::usleep(1'500'000);
  s.mover.end(1, OpKind::Abort);
  ASSERT_TRUE(s.mover.waitFor(first, 2500));
  EXPECT_FALSE(s.mover.waitFor(second, 500)) << "it has waited for less than half of its time";
  s.slotOf(pull).credit->set(pull.turn);
  ASSERT_TRUE(s.mover.waitFor(second, 500));
  EXPECT_TRUE(s.slotOf(pull).ready->reached(pull.turn)) << "the bytes have been held";
}

/// What a failed receive does not want says nothing of the memory.
TEST(Pull, WhatIsNotWantedInOneCommunicatorIsLentInAnother) {
  ScriptedNeighbour s;
  constexpr std::uint64_t kOther = kId + 1;
  ASSERT_TRUE(s.mover.addCommunicator(
      1, kOther, 0, {inReach(s.mover.place("hostA", 1)), inReach(s.peer.place("hostA", 2))}));
  DeviceBuffer from(kBytes);
  const BufferRef ref = refTo(from, freshAllocation());
  Message m = messageOf(MessageType::Ready, 0);
  m.slot = 1;
  const Ticket first = s.mover.launch({{OpKind::Send, 0, 1, kBytes, 0, ref}});
  ASSERT_TRUE(s.peer.accept());
  ASSERT_TRUE(s.peer.send(m));
  ASSERT_TRUE(s.peer.receive(MessageType::Pull, &m));
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::failed(FailReason::Aborted)));
  m.type = MessageType::Refused;
  m.offset = 0;
  ASSERT_TRUE(s.peer.send(m));
  ASSERT_TRUE(s.mover.waitFor(first));
  const Ticket second = s.mover.launch({{OpKind::Send, 1, 1, kBytes, 0, ref}});
  m = messageOf(MessageType::Ready, 0);
  m.communicator = kOther;
  m.slot = 1;
  ASSERT_TRUE(s.peer.send(m));
  ASSERT_TRUE(s.peer.receive(MessageType::Pull, &m));
  EXPECT_EQ(m.length, ref.allocationId);
  s.slotOf(m).credit->set(m.turn);
  EXPECT_TRUE(s.mover.waitFor(second));
}

/// The mirror takes its bytes from the slots, also where the receiver is ready before the send.
TEST(Pull, ASendWithAMirrorIsNotLent) {
  ScriptedNeighbour s;
  DeviceBuffer first(kBytes), from(kBytes), own(kBytes);
  from.fill(6);
  Message m{};
  const Ticket before = s.lent(first, &m);
  s.slotOf(m).credit->set(m.turn);
  ASSERT_TRUE(s.mover.waitFor(before));
  Message ready = messageOf(MessageType::Ready, 0);
  ready.pairSequence = 1;
  ready.slot = 1;
  ASSERT_TRUE(s.peer.send(ready));
  ::usleep(kSettleMs * 1000);
  const Ticket ticket = s.mover.launch({sendTo(1, 1, from), mirrorOf(1, 1, own)});
  for (std::uint64_t got = 0; got < kBytes; got += m.length) {
    ASSERT_TRUE(waitUntil([&] { return s.peer.connection->tryReceive(&m); }));
    if (m.type == MessageType::Handle) {
      m.length = 0;
      continue;
    }
    ASSERT_EQ(m.type, MessageType::Chunk);
    const Slot slot = s.slotOf(m);
    ASSERT_TRUE(waitUntil([&] { return slot.ready->reached(m.turn); }));
    slot.credit->set(m.turn);
  }
  ASSERT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(own.check(6), "");
}

}  // namespace
}  // namespace hoccl
