// How the mover's loop ends what cannot go on: operations and communicators that fail, aborts and
// closes. Nothing is left waiting, and either side learns why.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/net/transport.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/pair_window.h"
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
using test::freshAllocation;
using test::kId;
using test::receiveFrom;
using test::refTo;
using test::Scripted;
using test::ScriptedPeer;
using test::sendTo;
using test::TestMover;
using test::Two;
using test::waitUntil;
using Ticket = TestMover::Ticket;

// --- Failures ------------------------------------------------------------------------------------

TEST(MoverLoop, ASizeMismatchNamesBothSidesOnBothSides) {
  for (bool sendFirst : {true, false}) {
    for (std::uint64_t sendBytes : {70'001u, 900'001u}) {
      Two two;
      DeviceBuffer from(sendBytes), to(80'002);
      Ticket send, receive;
      // A mover whose send has ended may sleep (see AFailureReachesAMoverThatSleeps).
      DeviceBuffer pending(70'001);
      const Ticket keepsAwake = two.a->launch({receiveFrom(1, 0, pending)});
      if (sendFirst) {
        send = two.a->launch({sendTo(1, 0, from)});
        EXPECT_FALSE(waitUntil([&] { return two.a->code(0) != Code::Ok; }, 20));
        receive = two.b->launch({receiveFrom(0, 0, to)});
      } else {
        receive = two.b->launch({receiveFrom(0, 0, to)});
        EXPECT_FALSE(waitUntil([&] { return two.b->code(0) != Code::Ok; }, 20));
        send = two.a->launch({sendTo(1, 0, from)});
      }
      for (TestMover* mover : {two.a.get(), two.b.get()}) {
        EXPECT_TRUE(waitUntil([&] { return mover->code(0) != Code::Ok; }));
        ASSERT_EQ(mover->code(0), Code::InvalidArgument)
            << mover->errorText(0) << (sendFirst ? "; send first" : "; receive first");
        const std::string text = mover->errorText(0);
        EXPECT_TRUE(contains(text, std::to_string(sendBytes))) << text;
        EXPECT_TRUE(contains(text, "80002")) << text;
        const bool isA = mover == two.a.get();
        EXPECT_TRUE(contains(
            text, isA ? "rank 1 (host hostB, process 222)" : "rank 0 (host hostA, process 111)"))
            << text;
      }
      EXPECT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive)) << "streams are released";
      EXPECT_TRUE(two.a->waitFor(keepsAwake));
      EXPECT_EQ(to.checkGuards(), "");
    }
  }
}

TEST(MoverLoop, AFailureReachesAMoverThatSleeps) {
  // The send's bytes fitted the eager slots, so it is over when the receiver finds the sizes to
  // differ.
  Two two;
  DeviceBuffer from(70'001), to(80'002);
  ASSERT_TRUE(two.a->waitFor(two.a->launch({sendTo(1, 0, from)})));
  ASSERT_TRUE(waitUntil([&] { return two.a->segment.header().moverSleeps.load() == 1; }));
  ASSERT_TRUE(two.b->waitFor(two.b->launch({receiveFrom(0, 0, to)})));
  EXPECT_EQ(two.b->code(0), Code::InvalidArgument);
  EXPECT_TRUE(waitUntil([&] { return two.a->code(0) == Code::InvalidArgument; }, 3'000))
      << "who asks for the communicator's error is not told";
}

TEST(MoverLoop, Rule10DescriptorsThatMakeNoSenseEndWithoutACrash) {
  Two two;
  DeviceBuffer buffer(70'001);
  auto spec = [&](const std::function<void(TestMover::OpSpec&)>& change) {
    TestMover::OpSpec op = sendTo(1, 0, buffer);
    change(op);
    return op;
  };
  for (const TestMover::OpSpec& op :
       {spec([](auto& o) { o.communicator = 7; }), spec([](auto& o) { o.peer = -1; }),
        spec([](auto& o) { o.peer = 2; }), spec([](auto& o) { o.bytes = 0; })}) {
    EXPECT_TRUE(two.a->waitFor(two.a->launch({op})));
  }
  OpDescriptor torn{};
  torn.kind = OpKind::Send;
  torn.communicator = kMaxCommunicators;
  two.a->push(torn);
  torn.communicator = 0;
  torn.launchSlot = 1 << 20;
  two.a->push(torn);
  torn.kind = static_cast<OpKind>(99);
  two.a->push(torn);
  two.a->ring();
  DeviceBuffer to(70'001);
  buffer.fill(3);
  const Ticket send = two.a->launch({sendTo(1, 0, buffer)});
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
  EXPECT_EQ(to.check(3), "");
}

TEST(MoverLoop, AnOperationOutOfSequenceFailsAndEnds) {
  Two two;
  DeviceBuffer buffer(70'001);
  const Ticket send = two.a->launch({sendTo(1, PairWindow::kMaxSpan + 5, buffer)});
  ASSERT_TRUE(waitUntil([&] { return two.a->code(0) == Code::Internal; }));
  EXPECT_TRUE(contains(two.a->errorText(0), "out of sequence")) << two.a->errorText(0);
  EXPECT_TRUE(two.a->waitFor(send, 5'000)) << "the user's stream waits for ever";
  two.a->end(0, OpKind::Abort);
  EXPECT_TRUE(waitUntil([&] { return two.a->segment.communicator(0).closes.load() == 1; }, 5'000))
      << "the abort is never acknowledged";
}

TEST(MoverLoop, AnAllocationThatCannotBeMapped) {
  Two two;
  DeviceBuffer buffer(70'001), to(70'001);
  const Ticket warm = two.a->launch({sendTo(1, 0, buffer)});
  ASSERT_TRUE(two.b->waitFor(two.b->launch({receiveFrom(0, 0, to)})) && two.a->waitFor(warm));
  TestMover::OpSpec send = sendTo(1, 1, buffer);
  send.buffer = refTo(buffer, freshAllocation(), CUDA_ERROR_INVALID_VALUE);
  // Two operations wait for the same mapping.
  TestMover::OpSpec second = send;
  second.pairSequence = 2;
  const Ticket at = two.a->launch({send, second});
  const Ticket there = two.b->launch({receiveFrom(0, 1, to)});
  ASSERT_TRUE(two.a->waitFor(at));
  EXPECT_EQ(two.a->code(0), Code::Cuda);
  EXPECT_TRUE(contains(two.a->errorText(0), "cannot map")) << two.a->errorText(0);
  ASSERT_TRUE(two.b->waitFor(there)) << "the peer of a failed communicator is not told";
  EXPECT_EQ(two.b->code(0), Code::Remote);
}

TEST(MoverLoop, Rule9AFailureBeforeTheLinkStandsReachesThePeer) {
  // The communicator fails while the peer cannot be told, and the peer waits for it.
  Scripted s;
  DeviceBuffer buffer(70'001);
  TestMover::OpSpec send = sendTo(1, 0, buffer);
  send.buffer = refTo(buffer, freshAllocation(), CUDA_ERROR_INVALID_VALUE);
  const Ticket failing = s.mover.launch({send});
  ASSERT_TRUE(s.mover.waitFor(failing));
  EXPECT_EQ(s.mover.code(0), Code::Cuda);
  ASSERT_TRUE(s.peer.accept());
  // Unasked: it may be asleep when the peer asks.
  Message told{};
  ASSERT_TRUE(s.peer.receive(MessageType::Failed, &told, 3'000));
  EXPECT_EQ(told.communicator, kId);
  EXPECT_EQ(static_cast<FailReason>(told.slot), FailReason::LocalError);
  Message ready{};
  ready.type = MessageType::Ready;
  ready.communicator = kId;
  ready.source = 0;
  ready.destination = 1;
  ready.bytes = 70'001;
  ASSERT_TRUE(s.peer.send(ready));
  Message answer{};
  EXPECT_TRUE(s.peer.receive(MessageType::Failed, &answer, 3'000))
      << "the peer waits for a communicator that has failed";
  s.mover.end(0, OpKind::Abort);
  EXPECT_TRUE(s.mover.waitForClose(0));
}

TEST(MoverLoop, ADriverCallThatFailsEndsEverythingWithItsReason) {
  Two two;
  DeviceBuffer from(70'001), to(70'001);
  two.a->engines.refuse = true;
  two.a->launch({sendTo(1, 0, from)});
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(waitUntil([&] { return two.a->code(0) == Code::Cuda; }));
  EXPECT_TRUE(contains(two.a->errorText(0), "fake engines refuse")) << two.a->errorText(0);
  ASSERT_TRUE(two.b->waitFor(receive));
  EXPECT_EQ(two.b->code(0), Code::Remote) << "a receive without its bytes must not succeed";
}

TEST(MoverLoop, AReceiveThatComesAfterThePeersDriverFailedEnds) {
  // The chunk was announced, its copy never made.
  Two two;
  DeviceBuffer from(70'001), to(70'001);
  two.a->engines.refuse = true;
  two.a->launch({sendTo(1, 0, from)});
  ASSERT_TRUE(waitUntil([&] { return two.a->code(0) == Code::Cuda; }));
  ::usleep(50'000);
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.b->waitFor(receive, 3'000)) << "while the failed mover is still there";
  EXPECT_EQ(two.b->code(0), Code::Remote) << two.b->errorText(0);
}

TEST(MoverLoop, AReceiveThatComesAfterALocalErrorEndsWhileThePeerLives) {
  Scripted s;
  DeviceBuffer first(70'001), to(70'001);
  const Ticket warm = s.mover.launch({receiveFrom(1, 0, first)});
  ASSERT_TRUE(s.peer.accept());
  const Message chunk = ScriptedPeer::chunk(kId, 1, 0, 0, 0, 70'001, 0, 70'001);
  ASSERT_TRUE(s.peer.send(chunk));
  s.peer.deliver(chunk, 1);
  ASSERT_TRUE(s.mover.waitFor(warm));
  ASSERT_TRUE(s.peer.send(ScriptedPeer::chunk(kId, 1, 0, 1, 1, 70'001, 0, 70'001)));
  Message failed{};
  failed.type = MessageType::Failed;
  failed.slot = static_cast<std::uint32_t>(FailReason::LocalError);
  failed.communicator = kId;
  failed.source = 1;
  failed.destination = 0;
  ASSERT_TRUE(s.peer.send(failed));
  s.peer.connection->nudge();
  ::usleep(50'000);
  const Ticket receive = s.mover.launch({receiveFrom(1, 1, to)});
  ASSERT_TRUE(s.mover.waitFor(receive, 3'000));
  EXPECT_EQ(s.mover.code(0), Code::Remote) << s.mover.errorText(0);
}

TEST(MoverLoop, AFailureAsTheImportComesLeavesNoWaiterBehind) {
  // Two receives wait for one mapping; the first that goes on finds that sizes differ.
  Scripted s;
  DeviceBuffer small(70'001), buffer(200'001);
  const Ticket first = s.mover.launch({receiveFrom(1, 0, small)});
  Message ready{};
  ASSERT_TRUE(s.peer.accept() && s.peer.receive(MessageType::Ready, &ready));
  struct Hold {
    Hold() { fakeImports().held = true; }
    ~Hold() { fakeImports().held = false; }
  } hold;
  const BufferRef ref = refTo(buffer, freshAllocation());
  const Ticket both = s.mover.launch(
      {{OpKind::Recv, 0, 1, 100'001, 1, ref}, {OpKind::Recv, 0, 1, 100'001, 2, ref}});
  const Message wrong = ScriptedPeer::chunk(kId, 1, 0, 2, 0, 99'001, 0, 99'001);
  const Message right = ScriptedPeer::chunk(kId, 1, 0, 0, 1, 70'001, 0, 70'001);
  for (const Message& m : {wrong, right}) {
    ASSERT_TRUE(s.peer.send(m));
    s.peer.deliver(m, 1);
  }
  ASSERT_TRUE(s.mover.waitFor(first));  // and with it the one before has been seen
  fakeImports().held = false;
  ASSERT_TRUE(s.mover.waitFor(both));
  EXPECT_EQ(s.mover.code(0), Code::InvalidArgument);
  EXPECT_TRUE(contains(s.mover.errorText(0), "99001") && contains(s.mover.errorText(0), "100001"))
      << s.mover.errorText(0);
}

// --- Abort and close -----------------------------------------------------------------------------

TEST(MoverLoop, Rule9AbortEndsWhatIsPendingAndTellsThePeer) {
  Two two;
  DeviceBuffer to(70'001), from(900'001), other(70'001);
  const Ticket receive = two.a->launch({receiveFrom(1, 0, to)});
  const Ticket send = two.a->launch({sendTo(1, 0, from)});
  const Ticket unstarted = two.a->launch({receiveFrom(1, 1, to)}, 1, false);
  const Ticket there = two.b->launch({receiveFrom(0, 1, other)});
  EXPECT_FALSE(two.a->waitFor(receive, 20));
  two.a->end(0, OpKind::Abort);
  ASSERT_TRUE(two.a->waitForClose(0));
  EXPECT_TRUE(two.a->finished(receive) && two.a->finished(send) && two.a->finished(unstarted));
  EXPECT_EQ(two.a->code(0), Code::Aborted);
  EXPECT_EQ(two.a->segment.communicator(0).state.load(),
            static_cast<std::uint32_t>(CommunicatorState::Closed));
  ASSERT_TRUE(two.b->waitFor(there));
  EXPECT_EQ(two.b->code(0), Code::Remote);
  EXPECT_TRUE(contains(two.b->errorText(0), "aborted or destroyed")) << two.b->errorText(0);
  two.a->start(unstarted, 0);  // the stream comes later: the slot is used again without harm
  two.b->end(0, OpKind::Close);
  ASSERT_TRUE(two.b->waitForClose(0));
  two.add(0, kId + 9);
  DeviceBuffer from2(200'001), to2(200'001);
  from2.fill(2);
  const Ticket again = two.a->launch({sendTo(1, 0, from2)});
  const Ticket there2 = two.b->launch({receiveFrom(0, 0, to2)});
  ASSERT_TRUE(two.a->waitFor(again) && two.b->waitFor(there2));
  EXPECT_EQ(to2.check(2), "");
}

TEST(MoverLoop, Rule9AbortWaitsForCopiesInTheApplicationsMemory) {
  Two two;
  DeviceBuffer from(900'001);
  two.a->engines.hold(true);
  const Ticket send = two.a->launch({sendTo(1, 0, from)});
  ASSERT_TRUE(waitUntil([&] { return two.a->engines.submitted.load() > 0; }));
  two.a->end(0, OpKind::Abort);
  EXPECT_FALSE(waitUntil([&] { return two.a->segment.communicator(0).closes.load() > 0; }, 100));
  EXPECT_FALSE(two.a->finished(send));
  two.a->engines.hold(false);
  EXPECT_TRUE(two.a->waitForClose(0));
  EXPECT_TRUE(two.a->finished(send));
  EXPECT_EQ(two.a->engines.ended, two.a->engines.submitted);
}

TEST(MoverLoop, CloseWaitsForPendingOperations) {
  Two two;
  DeviceBuffer from(900'001), to(900'001);
  from.fill(8);
  const Ticket send = two.a->launch({sendTo(1, 0, from)});
  two.a->end(0, OpKind::Close);
  EXPECT_FALSE(waitUntil([&] { return two.a->segment.communicator(0).closes.load() > 0; }, 100));
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.b->waitFor(receive) && two.a->waitFor(send));
  EXPECT_TRUE(two.a->waitForClose(0));
  EXPECT_EQ(to.check(8), "");
  two.b->end(0, OpKind::Close);
  EXPECT_TRUE(two.b->waitForClose(0));
  EXPECT_EQ(two.a->errorText(0), "");
  EXPECT_EQ(two.b->errorText(0), "");
}

TEST(MoverLoop, AReceivePostedAfterTheSenderHasClosedTakesWhatLiesInTheSlots) {
  Two two;
  DeviceBuffer from(70'001), to(70'001);
  from.fill(3);
  ASSERT_TRUE(two.a->waitFor(two.a->launch({sendTo(1, 0, from)})));
  two.a->end(0, OpKind::Close);
  ASSERT_TRUE(two.a->waitForClose(0));
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  ASSERT_TRUE(two.b->waitFor(receive));
  EXPECT_EQ(to.check(3), "");
  EXPECT_EQ(two.b->errorText(0), "");
}

TEST(MoverLoop, ACommunicatorThatThePeerDoesNotKnow) {
  Two two;
  DeviceBuffer warmFrom(70'001), warmTo(70'001), buffer(900'001);
  const Ticket warmSend = two.a->launch({sendTo(1, 0, warmFrom)});
  ASSERT_TRUE(two.b->waitFor(two.b->launch({receiveFrom(0, 0, warmTo)})) &&
              two.a->waitFor(warmSend));
  const std::vector<PeerRecord> peers{two.a->place("hostA", 111), two.b->place("hostB", 222)};
  ASSERT_TRUE(two.a->addCommunicator(5, kId + 5, 0, peers));
  ASSERT_TRUE(two.a->addCommunicator(6, kId + 6, 0, peers));
  // Something pending keeps the other mover awake, as it would be while it is in use.
  DeviceBuffer pending(70'001);
  const Ticket keepsAwake = two.b->launch({receiveFrom(0, 1, pending)});
  const Ticket receive = two.a->launch({receiveFrom(1, 0, buffer, 5)});
  ASSERT_TRUE(two.a->waitFor(receive, 5'000)) << "receive";
  EXPECT_EQ(two.a->code(5), Code::Remote);
  EXPECT_TRUE(contains(two.a->errorText(5), "rank 1")) << two.a->errorText(5);
  const Ticket send = two.a->launch({sendTo(1, 0, buffer, 6)});
  EXPECT_TRUE(two.a->waitFor(send, 5'000)) << "a send of more than the eager slots waits for ever";
  EXPECT_EQ(two.a->errorText(0), "") << "other communicators are not concerned";
  EXPECT_FALSE(two.b->finished(keepsAwake));
}

TEST(MoverLoop, Rule9StoppingAMoverReleasesItsPeers) {
  Two two;
  DeviceBuffer to(70'001);
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  EXPECT_FALSE(two.b->waitFor(receive, 50));
  two.a->stop();
  ASSERT_TRUE(two.b->waitFor(receive));
  EXPECT_EQ(two.b->code(0), Code::Remote);
  EXPECT_TRUE(contains(two.b->errorText(0), "rank 0 (host hostA, process 111)"));
}

}  // namespace
}  // namespace hoccl
