// Direct copies that the receiver's mover makes, as over PCIe: whole movers with each other, turns,
// frees.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "common/runtime/import_drops.h"
#include "test/unit/pull_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::kId;
using test::receiveFrom;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::pull::directBytes;
using test::pull::inReach;
using test::pull::kBytes;
using test::pull::kSettleMs;
using test::pull::pulling;
using test::pull::ScriptedNeighbour;
using test::pull::Ticket;
using test::pull::TwoOfANode;

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
