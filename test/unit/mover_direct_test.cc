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

// --- The peer's memory ---------------------------------------------------------------------------

void tell(PeerImports& imports, std::uint64_t allocation) {
  BufferRef ref{};
  ref.allocationId = allocation;
  ref.allocationBase = 0x1000 * allocation;
  ref.allocationBytes = 4096;
  std::memset(ref.ipcHandle, static_cast<int>(allocation), sizeof ref.ipcHandle);
  Message parts[HandlePart::kParts];
  PeerImports::describe(ref, &parts);
  for (const Message& part : parts) ASSERT_TRUE(imports.tell(part));
}

TEST(PeerImports, ADescriptionArrivesWhole) {
  PeerImports imports(4);
  tell(imports, 3);
  bool fresh = false;
  PeerImport* import = imports.acquire(3, &fresh);
  ASSERT_NE(import, nullptr);
  EXPECT_TRUE(fresh);
  EXPECT_EQ(import->buffer.allocationBase, 0x3000u);
  EXPECT_EQ(import->buffer.allocationBytes, 4096u);
  for (unsigned char c : import->buffer.ipcHandle) EXPECT_EQ(c, 3);
  EXPECT_EQ(imports.acquire(3, &fresh), import);
  EXPECT_FALSE(fresh);
  EXPECT_EQ(imports.acquire(4, &fresh), nullptr);
}

TEST(PeerImports, WhatIsForgottenGoesWhenItsLastUserHasGone) {
  PeerImports imports(4);
  tell(imports, 3);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0, allocation = 0;
  PeerImport* import = imports.acquire(3, &fresh);
  const std::uint64_t first = import->serial;
  imports.forget(3);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "it is just being mapped";
  ASSERT_EQ(imports.find(first), import);
  imports.settle(import, 0x5000);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "it has a user";
  EXPECT_FALSE(imports.nextForgotten(&allocation));
  imports.release(import);
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x5000u);
  EXPECT_EQ(serial, first);
  EXPECT_FALSE(imports.nextForgotten(&allocation)) << "it is not unmapped yet";
  imports.unmapped(serial);
  ASSERT_TRUE(imports.nextForgotten(&allocation));
  EXPECT_EQ(allocation, 3u);
  // Told again, it is another one.
  tell(imports, 3);
  ASSERT_NE(imports.acquire(3, &fresh), nullptr);
  EXPECT_TRUE(fresh);
}

TEST(PeerImports, NoMoreThanTheCapacityStaysMapped) {
  PeerImports imports(2);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 3; ++n) {
    tell(imports, n);
    PeerImport* import = imports.acquire(n, &fresh);
    imports.settle(import, 0x1000 * n);
    imports.release(import);
  }
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x1000u) << "the one used longest ago";
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which));
  imports.acquire(1, &fresh);
  EXPECT_TRUE(fresh) << "it is known, and has to be mapped anew";
}

/// The control thread maps a span when it comes, needed or not, and could not do so again.
TEST(PeerImports, SpansStayUntilThePeerWantsThemBackAndThenGoEvenUnused) {
  PeerImports imports(1);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0, allocation = 0;
  const std::uint64_t used = spanId(1, 1), unused = spanId(2, 1);
  for (std::uint64_t id : {used, unused, std::uint64_t{3}}) tell(imports, id);
  PeerImport* import = imports.acquire(used, &fresh);
  EXPECT_EQ(import->buffer.kind, BufferKind::Span);
  imports.settle(import, 0x5000);
  imports.release(import);
  import = imports.acquire(3, &fresh);
  imports.settle(import, 0x6000);
  imports.release(import);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "a span counts for no capacity";
  for (std::uint64_t id : {used, unused}) {
    imports.forget(id);
    ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
    EXPECT_EQ(which.kind, BufferKind::Span);
    EXPECT_EQ(which.allocationId, id);
    EXPECT_NE(serial, 0u);
    EXPECT_FALSE(imports.nextForgotten(&allocation)) << "it is not unmapped yet";
    imports.unmapped(serial);
    ASSERT_TRUE(imports.nextForgotten(&allocation));
    EXPECT_EQ(allocation, id);
  }
}

TEST(ToldPeer, KnowsOfASpanOnceItHasBeenHandedOver) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  EXPECT_EQ(told.share(span), ToldPeer::State::Sharing);
  told.shared(span, SpanShare::Whole, &tell, &forget);
  EXPECT_TRUE(tell && !forget);
  EXPECT_EQ(told.share(span), ToldPeer::State::Told);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Ask);
  std::uint64_t ticket = 0;
  EXPECT_TRUE(told.answered(span, &ticket));
  EXPECT_EQ(ticket, 7u);
}

TEST(ToldPeer, ASpanThatCouldNotBeHandedOverIsNotTriedAgainNorAskedFor) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Nothing, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
  EXPECT_EQ(told.share(span), ToldPeer::State::Refused);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::NotTold);
  EXPECT_FALSE(told.waits());
}

TEST(ToldPeer, ASpanForWhichItHadNoEarIsTriedAgain) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Later, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::NotTold);
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
}

/// It may map that part, or have it in its socket, and keeps the memory so.
TEST(ToldPeer, ASpanOfWhichItHasAPartIsAskedFor) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = false, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Part, &tell, &forget);
  EXPECT_TRUE(tell && !forget);
  EXPECT_NE(told.share(span), ToldPeer::State::Told) << "nobody may copy there";
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Ask);
  EXPECT_TRUE(told.waits());
}

/// Its memory may be on the way: the peer is asked when it can have all of it, and a drop waits.
TEST(ToldPeer, ASpanTakenBackWhileItIsHandedOverIsAskedForBehindThat) {
  for (SpanShare share :
       {SpanShare::Whole, SpanShare::Nothing, SpanShare::Later, SpanShare::Part}) {
    ToldPeer told;
    const std::uint64_t span = spanId(1, 1);
    bool tell = false, forget = false;
    EXPECT_EQ(told.share(span), ToldPeer::State::New);
    EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Later);
    EXPECT_TRUE(told.waits());
    told.shared(span, share, &tell, &forget);
    EXPECT_TRUE(tell && forget) << "whatever has arrived has to go";
    std::uint64_t ticket = 0;
    EXPECT_TRUE(told.answered(span, &ticket));
    EXPECT_EQ(ticket, 7u);
  }
}

TEST(ToldPeer, APeerThatHasGoneHoldsNoSpan) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Later);
  std::uint64_t ticket = 0;
  EXPECT_TRUE(told.nextVoid(&ticket));
  EXPECT_EQ(ticket, 7u);
  EXPECT_FALSE(told.nextVoid(&ticket));
  told.shared(span, SpanShare::Whole, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
}

/// Nothing else would have the loop look again: the peer's free waits.
TEST(PeerImports, WhatIsWantedBackGoesWithItsLastUse) {
  PeerImports imports(2);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  tell(imports, 1);
  PeerImport* import = imports.acquire(1, &fresh);
  imports.settle(import, 0x5000);
  imports.forget(1);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_FALSE(imports.work());
  imports.release(import);
  EXPECT_TRUE(imports.work());
  EXPECT_TRUE(imports.nextUnmap(&address, &serial, &which));
}

TEST(PeerImports, WhatCannotBeMappedTakesNothingOfTheCapacity) {
  PeerImports imports(1);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 2; ++n) {
    tell(imports, n);
    PeerImport* import = imports.acquire(n, &fresh);
    imports.settle(import, n == 1 ? 0 : 0x5000);
    imports.release(import);
  }
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "there is only one";
}

/// Nor does what the peer has taken back, unmapped or not.
TEST(PeerImports, WhatIsWantedBackTakesNothingOfTheCapacity) {
  PeerImports imports(1);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 2; ++n) {
    tell(imports, n);
    PeerImport* import = imports.acquire(n, &fresh);
    imports.settle(import, 0x1000 * n);
    imports.release(import);
    if (n == 1) imports.forget(n);
  }
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x1000u);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "there is only one";
}

TEST(PeerImports, WhatCannotBeMappedIsTriedOnce) {
  PeerImports imports(2);
  tell(imports, 1);
  bool fresh = false;
  PeerImport* import = imports.acquire(1, &fresh);
  imports.settle(import, 0);
  imports.release(import);
  EXPECT_EQ(imports.acquire(1, &fresh)->state, PeerImport::State::Failed);
  EXPECT_FALSE(fresh);
}

}  // namespace
}  // namespace hoccl
