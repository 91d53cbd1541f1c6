// Direct copies that the receiver's mover makes, as over PCIe: whole movers with each other, and
// one with a peer that the test plays.

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/runtime/import_drops.h"
#include "common/runtime/peer_imports.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::freshAllocation;
using test::kId;
using test::mirrorOf;
using test::receiveFrom;
using test::refTo;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::waitUntil;
using Ticket = TestMover::Ticket;

constexpr std::uint64_t kBytes = 300'001;
/// For what must not happen: long enough for a mover that would do it.
constexpr std::uint64_t kSettleMs = 100;

TestMover::Options pulling() {
  TestMover::Options options;
  options.p2p = 3;
  return options;
}

PeerRecord inReach(PeerRecord record) {
  record.direct = 1;
  return record;
}

std::uint64_t directBytes(const TestMover& mover) {
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
Message messageOf(MessageType type, std::int32_t source) {
  Message m{};
  m.type = type;
  m.communicator = kId;
  m.source = source;
  m.destination = 1 - source;
  m.bytes = kBytes;
  return m;
}

/// `peer`, rank 1, tells of the allocation of `from` and lends it to rank 0 in slot 0.
void lendTo(ScriptedPeer& peer, DeviceBuffer& from, CUresult result = CUDA_SUCCESS) {
  const BufferRef ref = refTo(from, freshAllocation(), result);
  Message parts[HandlePart::kParts];
  PeerImports::describe(ref, &parts);
  for (const Message& part : parts) EXPECT_TRUE(peer.send(part));
  Message pull = messageOf(MessageType::Pull, 1);
  pull.offset = ref.offset;
  pull.length = ref.allocationId;
  pull.turn = 1;
  EXPECT_TRUE(peer.send(pull));
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
    lendTo(peer, from, result);
    return ticket;
  }
  [[nodiscard]] bool read() const { return peer.connection->staging().out[0].credit->reached(1); }
  void hold() { peer.connection->staging().out[0].ready->set(1); }

  ScriptedPeer peer;
  TestMover mover;
};

class EitherFirst : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Order, EitherFirst, ::testing::Bool());

TEST_P(EitherFirst, IsOneCopyByTheReceiversMover) {
  TwoOfANode two;
  for (std::uint64_t n = 0; n < 8; ++n) {
    DeviceBuffer from(1'000'003 + n, n), to(1'000'003 + n, 3);
    from.fill(n);
    Ticket sent, received;
    if (GetParam()) sent = two.a.launch({sendTo(1, n, from)});
    received = two.b.launch({receiveFrom(0, n, to)});
    if (!GetParam()) {
      ::usleep(2000);
      sent = two.a.launch({sendTo(1, n, from)});
    }
    ASSERT_TRUE(two.a.waitFor(sent) && two.b.waitFor(received)) << two.a.errorText(0);
    EXPECT_EQ(to.check(n), "") << n;
  }
  EXPECT_EQ(two.a.engines.submitted.load(), 0u) << "the sender's engines do nothing";
  EXPECT_EQ(two.b.engines.submitted.load(), 8u) << "a copy each";
  EXPECT_EQ(directBytes(two.a), directBytes(two.b));
  EXPECT_EQ(directBytes(two.a), 8u * 1'000'003 + 28);
}

/// One side takes the way for NVLink, the other for PCIe, as with different HOCCL_P2P.
TEST(Pull, TheReceiversViewDecides) {
  for (const bool receiverPulls : {false, true}) {
    SCOPED_TRACE(receiverPulls);
    TestMover::Options ofA = pulling(), ofB = pulling();
    (receiverPulls ? ofA : ofB).p2p = 1;
    TwoOfANode two(ofA, ofB);
    DeviceBuffer from(kBytes), to(kBytes);
    from.fill(5);
    const Ticket sent = two.a.launch({sendTo(1, 0, from)});
    const Ticket received = two.b.launch({receiveFrom(0, 0, to)});
    ASSERT_TRUE(two.a.waitFor(sent) && two.b.waitFor(received));
    EXPECT_EQ(to.check(5), "");
    EXPECT_EQ(directBytes(two.b), receiverPulls ? kBytes : 0) << "never pushed by who would pull";
    EXPECT_EQ(directBytes(two.a), directBytes(two.b));
  }
}

TEST(Pull, BothWaysAtOnceInManySlots) {
  TestMover::Options few = pulling();
  few.slots = 2;
  few.laneDepth = 2;
  TwoOfANode two(few, few);
  constexpr int kEach = 24;
  std::vector<DeviceBuffer> buffers;
  buffers.reserve(4 * kEach);
  std::vector<Ticket> ofA, ofB;
  for (std::uint64_t n = 0; n < kEach; ++n) {
    for (int i = 0; i < 4; ++i) buffers.emplace_back(kBytes + n);
    DeviceBuffer* four = &buffers[4 * n];
    four[0].fill(2 * n);
    four[2].fill(2 * n + 1);
    ofA.push_back(two.a.launch({sendTo(1, n, four[0]), receiveFrom(1, n, four[3])}));
    ofB.push_back(two.b.launch({receiveFrom(0, n, four[1]), sendTo(0, n, four[2])}));
  }
  for (std::uint64_t n = 0; n < kEach; ++n) {
    ASSERT_TRUE(two.a.waitFor(ofA[n]) && two.b.waitFor(ofB[n])) << n;
    EXPECT_EQ(buffers[4 * n + 1].check(2 * n), "");
    EXPECT_EQ(buffers[4 * n + 3].check(2 * n + 1), "");
  }
  EXPECT_EQ(directBytes(two.a), directBytes(two.b));
}

TEST(Pull, Rule7ASendWithoutReceiveHoldsUpNoOther) {
  TestMover::Options one = pulling();
  one.slots = 1;
  one.laneDepth = 1;
  TwoOfANode two(one, one);
  DeviceBuffer alone(kBytes), from(kBytes), to(kBytes);
  from.fill(7);
  const Ticket waits = two.a.launch({sendTo(1, 0, alone)});
  const Ticket sent = two.a.launch({sendTo(1, 1, from)});
  const Ticket received = two.b.launch({receiveFrom(0, 1, to)});
  ASSERT_TRUE(two.b.waitFor(received) && two.a.waitFor(sent));
  EXPECT_EQ(to.check(7), "");
  EXPECT_FALSE(two.a.finished(waits));
}

TEST(Pull, SizesThatDifferFailBothAndCopyNothing) {
  TwoOfANode two;
  DeviceBuffer from(kBytes), to(200'001);
  const Ticket sent = two.a.launch({sendTo(1, 0, from)});
  const Ticket received = two.b.launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.a.waitFor(sent) && two.b.waitFor(received));
  EXPECT_TRUE(contains(two.a.errorText(0), "300001") && contains(two.a.errorText(0), "200001"));
  EXPECT_TRUE(contains(two.b.errorText(0), "300001") && contains(two.b.errorText(0), "200001"));
  EXPECT_EQ(to.untouched(), "");
}

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

// --- Turns ---------------------------------------------------------------------------------------

/// What is lent keeps its turn until it is read, and then no longer.
TEST(Pull, InRotationOneAfterTheOther) {
  constexpr std::uint64_t kShort = 1 << 20, kLong = 16 << 20;
  ScriptedPeer peers[2];
  TestMover mover(pulling());
  ASSERT_TRUE(
      mover.addCommunicator(0, kId, 0,
                            {inReach(mover.place("hostA", 1)), inReach(peers[0].place("hostA", 2)),
                             inReach(peers[1].place("hostA", 3))}));
  const auto ready = [&](std::int32_t rank, std::uint64_t sequence, std::uint64_t bytes) {
    Message m{};
    m.type = MessageType::Ready;
    m.communicator = kId;
    m.destination = rank;
    m.pairSequence = sequence;
    m.bytes = bytes;
    m.slot = 1;
    EXPECT_TRUE(peers[rank - 1].send(m));
  };
  const auto read = [&](std::int32_t rank, const Message& pull) {
    peers[rank - 1].connection->staging().in[pull.slot].credit->set(pull.turn);
  };
  Message pull{}, next{};
  DeviceBuffer small(kShort), first(kLong), second(kLong);
  // The mover comes to think that copies take long: then it has patience.
  for (std::uint64_t n = 0; n < 16; ++n) {
    const Ticket ticket = mover.launch({sendTo(1, n, small)});
    ASSERT_TRUE(n > 0 || peers[0].accept());
    ready(1, n, kShort);
    ASSERT_TRUE(peers[0].receive(MessageType::Pull, &pull));
    ::usleep(2000);
    read(1, pull);
    ASSERT_TRUE(mover.waitFor(ticket));
  }
  const Ticket both = mover.launch({sendTo(2, 0, second), sendTo(1, 16, first)});
  ASSERT_TRUE(peers[1].accept());
  ready(1, 16, kLong);
  ASSERT_TRUE(peers[0].receive(MessageType::Pull, &pull));
  ready(2, 0, kLong);
  EXPECT_FALSE(peers[1].receive(MessageType::Pull, &next, 250));
  read(1, pull);
  ASSERT_TRUE(peers[1].receive(MessageType::Pull, &next, 250));
  read(2, next);
  ASSERT_TRUE(mover.waitFor(both));
  // Nothing is lent now: one whose turn has not come waits for about as long as a copy takes.
  const Ticket again = mover.launch({sendTo(1, 17, first), sendTo(2, 1, second)});
  ready(2, 1, kLong);
  ASSERT_TRUE(peers[1].receive(MessageType::Pull, &next, 250)) << "a turn that nobody has";
  read(2, next);
  ready(1, 17, kLong);
  ASSERT_TRUE(peers[0].receive(MessageType::Pull, &pull));
  read(1, pull);
  ASSERT_TRUE(mover.waitFor(again));
}

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

// --- Frees (rule 8) ------------------------------------------------------------------------------

TEST(Pull, Rule8ADropOfASendersMemoryWaitsForThePeerThatHasBeenTold) {
  ScriptedNeighbour s;
  DeviceBuffer from(kBytes);
  Message message{};
  const Ticket ticket = s.lent(from, &message);
  const std::uint64_t allocation = message.length;
  s.slotOf(message).credit->set(message.turn);
  ASSERT_TRUE(s.mover.waitFor(ticket));
  ImportDrops drops(s.mover.segment);
  OpDescriptor descriptor{};
  descriptor.kind = OpKind::Drop;
  descriptor.buffer.allocationId = allocation;
  DropRequest request;
  ASSERT_TRUE(drops.take(&descriptor, &request));
  s.mover.push(descriptor);
  s.mover.ring();
  ASSERT_TRUE(s.peer.receive(MessageType::Forget, &message));
  EXPECT_EQ(message.turn, allocation);
  EXPECT_EQ(drops.await(request, Deadline::afterMs(kSettleMs)), ImportDrops::Answer::TimedOut);
  message.type = MessageType::Forgotten;
  ASSERT_TRUE(s.peer.send(message));
  EXPECT_EQ(drops.await(request, Deadline::afterMs(test::kPatienceMs)), ImportDrops::Answer::Done);
}

}  // namespace
}  // namespace hoccl
