// Direct copies between two GPUs of a node: whole movers with each other, and one with a peer that
// the test plays.

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/base/time.h"
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
using test::fakeImports;
using test::freshAllocation;
using test::kId;
using test::receiveFrom;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::waitUntil;
using Ticket = TestMover::Ticket;

/// For what must not happen: long enough for a mover that would do it.
constexpr std::uint64_t kSettleMs = 100;

PeerRecord inReach(PeerRecord record) {
  record.direct = 1;
  return record;
}

std::uint64_t directBytes(const TestMover& mover) {
  return mover.segment.communicator(0).directBytes.load();
}

struct TwoOfANode {
  explicit TwoOfANode(const TestMover::Options& options = {}) : a(options), b(options) {
    const std::vector<PeerRecord> peers{inReach(a.place("hostA", 1)), inReach(b.place("hostA", 2))};
    EXPECT_TRUE(a.addCommunicator(0, kId, 0, peers));
    EXPECT_TRUE(b.addCommunicator(0, kId, 1, peers));
  }
  TestMover a, b;
};

/// A mover, rank 0, with a scripted peer, rank 1, on another GPU of its node.
struct ScriptedNeighbour {
  ScriptedNeighbour() {
    EXPECT_TRUE(mover.addCommunicator(
        0, kId, 0, {inReach(mover.place("hostA", 1)), inReach(peer.place("hostA", 2))}));
  }
  /// A receive of `buffer`, and the mover's offer of it.
  Ticket offered(DeviceBuffer& buffer, Message* ready) {
    const Ticket ticket = mover.launch({receiveFrom(1, 0, buffer)});
    EXPECT_TRUE(peer.accept());
    EXPECT_TRUE(peer.receive(MessageType::Ready, ready));
    return ticket;
  }
  static Message direct(std::uint64_t bytes) {
    Message m = ScriptedPeer::chunk(kId, 1, 0, 0, 0, bytes, 0, bytes);
    m.type = MessageType::Direct;
    return m;
  }
  /// The copy that `direct` announced has ended.
  void land(std::uint64_t turn = 1) { peer.connection->staging().out[0].ready->set(turn); }

  ScriptedPeer peer;
  TestMover mover;
};

class EitherFirst : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Order, EitherFirst, ::testing::Bool());

TEST_P(EitherFirst, IsOneCopyIntoTheReceiversBuffer) {
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
  EXPECT_TRUE(waitUntil([&] { return two.a.engines.ended.load() == 8; }));
  EXPECT_EQ(two.a.engines.submitted.load(), 8u) << "a copy each";
  EXPECT_EQ(two.b.engines.submitted.load(), 0u) << "the receiver's engines do nothing";
  EXPECT_EQ(directBytes(two.a), directBytes(two.b));
  EXPECT_EQ(directBytes(two.a), 8u * 1'000'003 + 28);
}

TEST(Direct, ASecondCopyIsSubmittedWhileTheFirstRuns) {
  TwoOfANode two;
  DeviceBuffer from[2]{DeviceBuffer(300'001), DeviceBuffer(300'001)};
  DeviceBuffer to[2]{DeviceBuffer(300'001), DeviceBuffer(300'001)};
  two.a.engines.hold(true);
  std::vector<Ticket> tickets;
  for (int i = 0; i < 2; ++i) {
    from[i].fill(i);
    two.a.launch({sendTo(1, i, from[i])});
    tickets.push_back(two.b.launch({receiveFrom(0, i, to[i])}));
  }
  EXPECT_TRUE(waitUntil([&] { return two.a.engines.submitted.load() == 2; }));
  EXPECT_FALSE(two.b.finished(tickets[0]));
  two.a.engines.hold(false);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(two.b.waitFor(tickets[i]));
    EXPECT_EQ(to[i].check(i), "");
  }
}

TEST(Direct, Rule7ASendWithoutReceiveHoldsUpNoOther) {
  TestMover::Options options;
  options.slots = 1;
  options.laneDepth = 1;
  TwoOfANode two(options);
  DeviceBuffer alone(300'001), from(300'001), to(300'001);
  from.fill(7);
  const Ticket waits = two.a.launch({sendTo(1, 0, alone)});
  const Ticket sent = two.a.launch({sendTo(1, 1, from)});
  const Ticket received = two.b.launch({receiveFrom(0, 1, to)});
  ASSERT_TRUE(two.b.waitFor(received) && two.a.waitFor(sent));
  EXPECT_EQ(to.check(7), "");
  EXPECT_FALSE(two.a.finished(waits));
}

TEST(Direct, SizesThatDifferFailBothAndCopyNothing) {
  TwoOfANode two;
  DeviceBuffer from(300'001), to(200'001);
  const Ticket sent = two.a.launch({sendTo(1, 0, from)});
  const Ticket received = two.b.launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.a.waitFor(sent) && two.b.waitFor(received));
  EXPECT_TRUE(contains(two.a.errorText(0), "300001") && contains(two.a.errorText(0), "200001"));
  EXPECT_TRUE(contains(two.b.errorText(0), "300001") && contains(two.b.errorText(0), "200001"));
  EXPECT_EQ(to.untouched(), "");
}

// --- The receiver's end (rule 9) -----------------------------------------------------------------

TEST(Direct, Rule9AnAbortedReceiveWaitsUntilThePeerCopiesNoMore) {
  ScriptedNeighbour s;
  DeviceBuffer buffer(300'001);
  Message ready{}, failed{};
  const Ticket ticket = s.offered(buffer, &ready);
  EXPECT_NE(ready.turn, 0u);
  s.mover.end(0, OpKind::Abort);
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &failed));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs)) << "released although the peer may copy";
  Message settled{};
  settled.type = MessageType::Settled;
  settled.communicator = kId;
  settled.source = 1;
  settled.destination = 0;
  ASSERT_TRUE(s.peer.send(settled));
  EXPECT_TRUE(s.mover.waitFor(ticket));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Direct, Rule9ACopyThatOvertookTheAbortIsWaitedFor) {
  ScriptedNeighbour s;
  DeviceBuffer buffer(300'001);
  Message message{};
  const Ticket ticket = s.offered(buffer, &message);
  s.mover.end(0, OpKind::Abort);
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &message));
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::direct(300'001)));
  Message settled{};
  settled.type = MessageType::Settled;
  settled.communicator = kId;
  settled.source = 1;
  ASSERT_TRUE(s.peer.send(settled));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs)) << "released in the middle of the copy";
  s.land();
  EXPECT_TRUE(s.mover.waitFor(ticket));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Direct, Rule9AnAbortedReceiveWaitsForTheCopyThatIsUnderWay) {
  ScriptedNeighbour s;
  DeviceBuffer buffer(300'001);
  Message message{};
  const Ticket ticket = s.offered(buffer, &message);
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::direct(300'001)));
  ASSERT_TRUE(waitUntil([&] { return directBytes(s.mover) == 300'001; })) << "not announced";
  s.mover.end(0, OpKind::Abort);
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &message));
  EXPECT_FALSE(s.mover.waitFor(ticket, kSettleMs)) << "released while the peer copies";
  s.land();
  EXPECT_TRUE(s.mover.waitFor(ticket, 1000));
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(Direct, Rule9ASilentPeerIsNotWaitedForForEver) {
  ScriptedNeighbour s;
  DeviceBuffer buffer(300'001);
  Message ready{};
  const Ticket ticket = s.offered(buffer, &ready);
  s.mover.end(0, OpKind::Abort);
  EXPECT_TRUE(s.mover.waitFor(ticket, 4500)) << "half of HOCCL_TIMEOUT_MS is 2.5 s";
}

TEST(Direct, Rule9APeerThatDiesMidCopyFailsTheReceive) {
  for (const bool announced : {false, true}) {
    SCOPED_TRACE(announced);
    ScriptedNeighbour s;
    DeviceBuffer buffer(300'001);
    Message ready{};
    const Ticket ticket = s.offered(buffer, &ready);
    if (announced) {
      ASSERT_TRUE(s.peer.send(ScriptedNeighbour::direct(300'001)));
    }
    s.peer.die();
    ASSERT_TRUE(s.mover.waitFor(ticket));
    EXPECT_EQ(s.mover.code(0), Code::Remote);
    EXPECT_TRUE(contains(s.mover.errorText(0), "rank 1 (host hostA, process 2)"));
  }
}

TEST(Direct, TheSenderAnswersAFailureAfterItsLastCopy) {
  ScriptedNeighbour s;
  DeviceBuffer from(300'001), to(300'001);
  from.fill(3);
  s.mover.engines.hold(true);
  const Ticket ticket = s.mover.launch({sendTo(1, 0, from)});
  ASSERT_TRUE(s.peer.accept());
  const BufferRef ref = test::refTo(to, freshAllocation());
  Message parts[HandlePart::kParts];
  PeerImports::describe(ref, &parts);
  for (const Message& part : parts) ASSERT_TRUE(s.peer.send(part));
  Message ready{};
  ready.type = MessageType::Ready;
  ready.communicator = kId;
  ready.source = 0;
  ready.destination = 1;
  ready.bytes = 300'001;
  ready.turn = ref.allocationId;
  ASSERT_TRUE(s.peer.send(ready));
  ASSERT_TRUE(waitUntil([&] { return s.mover.engines.submitted.load() == 1; }));
  Message failed = ready;
  failed.type = MessageType::Failed;
  failed.slot = static_cast<std::uint32_t>(FailReason::Aborted);
  failed.source = 1;
  failed.destination = 0;
  ASSERT_TRUE(s.peer.send(failed));
  // In this order: the announcement, then the answer.
  std::vector<MessageType> seen;
  ASSERT_TRUE(waitUntil([&] {
    Message message{};
    while (s.peer.connection->tryReceive(&message)) seen.push_back(message.type);
    return !seen.empty() && seen.back() == MessageType::Settled;
  }));
  ASSERT_GE(seen.size(), 2u);
  EXPECT_EQ(seen[seen.size() - 2], MessageType::Direct);
  EXPECT_FALSE(s.mover.finished(ticket)) << "its own copy is under way";
  s.mover.engines.hold(false);
  EXPECT_TRUE(s.mover.waitFor(ticket));
}

TEST(Direct, ASendToARankThatHasEndedTheCommunicatorFails) {
  TwoOfANode two;
  DeviceBuffer from(300'001);
  two.b.end(0, OpKind::Abort);  // before the movers have a link
  ASSERT_TRUE(two.b.waitForClose(0));
  const Ticket sent = two.a.launch({sendTo(1, 0, from)});
  ASSERT_TRUE(two.a.waitFor(sent));
  EXPECT_EQ(two.a.code(0), Code::Remote);
  EXPECT_TRUE(contains(two.a.errorText(0), "aborted or destroyed")) << two.a.errorText(0);
}

// --- Frees (rule 8) ------------------------------------------------------------------------------

TEST(Direct, Rule8ADropWaitsForThePeerThatHasBeenTold) {
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    ScriptedNeighbour s;
    DeviceBuffer buffer(300'001);
    Message message{};
    const Ticket ticket = s.offered(buffer, &message);
    const std::uint64_t allocation = message.turn;
    ASSERT_TRUE(s.peer.send(ScriptedNeighbour::direct(300'001)));
    s.land();
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
    const Deadline described = Deadline::afterMs(5000);
    while (drops.pending(request).empty() && !described.passed()) std::this_thread::yield();
    EXPECT_TRUE(contains(drops.pending(request), "another GPU of the node"));
    if (dies) {
      s.peer.die();
    } else {
      message.type = MessageType::Forgotten;
      ASSERT_TRUE(s.peer.send(message));
    }
    EXPECT_EQ(drops.await(request, Deadline::afterMs(test::kPatienceMs)),
              ImportDrops::Answer::Done);
  }
}

/// One that has nothing to do sleeps, and the free would wait for it.
TEST(Direct, Rule8APeerThatSleepsIsWokenToForget) {
  ScriptedNeighbour s;
  DeviceBuffer buffer(300'001);
  Message message{};
  const Ticket ticket = s.offered(buffer, &message);
  const std::uint64_t allocation = message.turn;
  ASSERT_TRUE(s.peer.send(ScriptedNeighbour::direct(300'001)));
  s.land();
  ASSERT_TRUE(s.mover.waitFor(ticket));
  s.peer.connection->watch();  // takes the nudges so far
  pollfd bell{s.peer.connection->watchFd(), POLLIN, 0};
  ASSERT_EQ(::poll(&bell, 1, 0), 0);
  ImportDrops drops(s.mover.segment);
  OpDescriptor descriptor{};
  descriptor.kind = OpKind::Drop;
  descriptor.buffer.allocationId = allocation;
  DropRequest request;
  ASSERT_TRUE(drops.take(&descriptor, &request));
  s.mover.push(descriptor);
  s.mover.ring();
  EXPECT_EQ(::poll(&bell, 1, 2000), 1) << "it sleeps on";
}

// --- What makes no sense (rule 10) ---------------------------------------------------------------

TEST(Direct, Rule10NonsenseOfAPeerEndsItsLinkAlone) {
  Message inside = ScriptedNeighbour::direct(300'001);
  inside.offset = 1;
  inside.length -= 1;
  Message partly = ScriptedNeighbour::direct(300'001);
  partly.length -= 1;
  Message notOffered = ScriptedNeighbour::direct(300'001);
  notOffered.pairSequence = 5;  // no receive
  Message part{};
  part.type = MessageType::Handle;
  part.slot = 1;  // without the first
  part.communicator = 9;
  for (const Message& nonsense : {inside, partly, notOffered, part}) {
    SCOPED_TRACE(&nonsense - &inside);
    ScriptedNeighbour s;
    DeviceBuffer buffer(300'001);
    Message ready{};
    const Ticket ticket = s.offered(buffer, &ready);
    ASSERT_TRUE(s.peer.send(nonsense));
    ASSERT_TRUE(s.mover.waitFor(ticket));
    EXPECT_TRUE(contains(s.mover.errorText(0), "makes no sense")) << s.mover.errorText(0);
  }
}

TEST(Direct, AnOfferOfUnknownMemoryIsStaged) {
  ScriptedNeighbour s;
  DeviceBuffer from(100'001);
  from.fill(3);
  const Ticket ticket = s.mover.launch({sendTo(1, 0, from)});
  ASSERT_TRUE(s.peer.accept());
  Message ready{};
  ready.type = MessageType::Ready;
  ready.communicator = kId;
  ready.source = 0;
  ready.destination = 1;
  ready.bytes = 100'001;
  ready.turn = 4711;
  ASSERT_TRUE(s.peer.send(ready));
  Message chunk{};
  ASSERT_TRUE(s.peer.receive(MessageType::Chunk, &chunk));
  EXPECT_EQ(chunk.length, 100'001u);
  EXPECT_TRUE(s.mover.waitFor(ticket));
  EXPECT_EQ(directBytes(s.mover), 0u);
}

}  // namespace
}  // namespace hoccl
