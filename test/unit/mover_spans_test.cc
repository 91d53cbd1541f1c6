// Spans over their life between two movers of a node: what is taken back while it is handed over.

#include <gtest/gtest.h>

#include <cstdint>

#include "common/base/time.h"
#include "common/runtime/import_drops.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::DeviceBuffer;
using test::fakeImports;
using test::kId;
using test::kPatienceMs;
using test::receiveFrom;
using test::ScriptedPeer;
using test::TestMover;
using test::waitUntil;
using Answer = ImportDrops::Answer;
using Ticket = TestMover::Ticket;

constexpr std::uint64_t kSegment = 2 << 20;
constexpr std::uint64_t kBytes = 70'001;
/// For what must not happen: long enough for a mover that would do it.
constexpr std::uint64_t kSettleMs = 100;

PeerRecord inReach(PeerRecord record) {
  record.direct = 1;
  return record;
}

// The control thread is slow to hand the span over, its application unmaps it meanwhile, and then
// the peer has it: it is asked for it like any other that maps the span.
TEST(Rule8, ASpanThatGoesWhileAPeerIsGivenItIsAskedBack) {
  ScriptedPeer peer;
  TestMover mover;
  ASSERT_TRUE(mover.addCommunicator(
      0, kId, 0, {inReach(mover.place("hostA", 1)), inReach(peer.place("hostA", 2))}));
  BufferRef span;
  const Status added = mover.addSpan(3, kSegment, &span);
  ASSERT_TRUE(added) << added.message();

  DeviceBuffer first(kBytes), other(kBytes);
  Message message{};
  (void)mover.launch({receiveFrom(1, 0, first)});
  ASSERT_TRUE(peer.accept() && peer.receive(MessageType::Ready, &message));

  // Behind this import the control thread does nothing else.
  fakeImports().held = true;
  (void)mover.launch({receiveFrom(1, 1, other)});
  const Ticket received = mover.launch({{OpKind::Recv, 0, 1, kBytes, 2, span}});
  ASSERT_TRUE(waitUntil(
      [&] { return peer.receive(MessageType::Ready, &message) && message.pairSequence == 2; }));
  EXPECT_EQ(message.turn, 0u) << "offered before the peer has it";
  const Message chunk = ScriptedPeer::chunk(kId, 1, 0, 2, 0, kBytes, 0, kBytes);
  ASSERT_TRUE(peer.send(chunk));
  peer.deliver(chunk, 7);
  ASSERT_TRUE(mover.waitFor(received)) << mover.errorText(0);

  ImportDrops drops(mover.segment);
  OpDescriptor drop{};
  drop.kind = OpKind::DropSpans;
  drop.buffer.allocationBase = span.allocationBase;
  drop.buffer.allocationBytes = span.allocationBytes;
  DropRequest request;
  ASSERT_TRUE(drops.take(&drop, &request));
  mover.push(drop);
  mover.ring();
  EXPECT_FALSE(peer.receive(MessageType::Forget, &message, kSettleMs)) << "it does not have it yet";

  fakeImports().held = false;
  ASSERT_TRUE(peer.receive(MessageType::Forget, &message));
  EXPECT_EQ(message.turn, span.allocationId);
  EXPECT_EQ(drops.await(request, Deadline::afterMs(kSettleMs)), Answer::TimedOut)
      << "the peer may still copy into it";
  message = {};
  message.type = MessageType::Forgotten;
  message.turn = span.allocationId;
  ASSERT_TRUE(peer.send(message));
  peer.connection->nudge();
  EXPECT_EQ(drops.await(request, Deadline::afterMs(kPatienceMs)), Answer::Done);
}

}  // namespace
}  // namespace hoccl
