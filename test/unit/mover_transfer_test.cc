// The mover's loop when all goes well: bytes and sizes, pairs and flows in any order, launches over
// streams, launch slots used again. Two movers in one process, over fake copy engines.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/segment.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::DeviceBuffer;
using test::kId;
using test::pick;
using test::receiveFrom;
using test::Rng;
using test::sendTo;
using test::TestMover;
using test::testSeed;
using test::Two;
using test::waitUntil;
using Options = TestMover::Options;
using Ticket = TestMover::Ticket;

// --- Transfers -----------------------------------------------------------------------------------

TEST(MoverLoop, Rule12EveryByteOfManySizesBothWays) {
  const std::uint32_t seed = testSeed();
  Rng rng(seed);
  Options options;
  options.seed = seed;
  Two two(options);
  two.a->engines.jitterUs = two.b->engines.jitterUs = 50;
  struct Transfer {
    std::unique_ptr<DeviceBuffer> from, to;
    bool fromA;
    std::uint64_t key;
    Ticket send, receive;
  };
  std::uint64_t sequence[2] = {0, 0}, bytes = 0;
  for (int round = 0; round < 6; ++round) {
    std::vector<Transfer> transfers(8);
    for (Transfer& t : transfers) {
      std::uint64_t size = pick(rng, 64 << 10, 600 << 10);
      if (pick(rng, 0, 3) == 0) size = (64 << 10) * pick(rng, 1, 8) + pick(rng, 0, 2);
      t.from = std::make_unique<DeviceBuffer>(size, pick(rng, 0, 31));
      t.to = std::make_unique<DeviceBuffer>(size, pick(rng, 0, 31));
      t.fromA = pick(rng, 0, 1);
      t.key = rng();
      t.from->fill(t.key);
      bytes += size;
    }
    // Sends and receives of a pair are posted in the same order by both sides, at different times.
    for (int pass = 0; pass < 2; ++pass) {
      for (Transfer& t : transfers) {
        TestMover &from = t.fromA ? *two.a : *two.b, &to = t.fromA ? *two.b : *two.a;
        const bool sendFirst = round % 2 == 0;
        const std::uint64_t number =
            sequence[t.fromA] + static_cast<std::uint64_t>(&t - transfers.data());
        if ((pass == 0) == sendFirst) {
          t.send = from.launch({sendTo(t.fromA ? 1 : 0, number, *t.from)});
        } else {
          t.receive = to.launch({receiveFrom(t.fromA ? 0 : 1, number, *t.to)});
        }
      }
    }
    // Numbers of the other direction were skipped: they are never used, as the window allows.
    for (std::uint64_t& s : sequence) s += transfers.size();
    for (Transfer& t : transfers) {
      ASSERT_TRUE((t.fromA ? two.a : two.b)->waitFor(t.send)) << "send; seed " << seed;
      ASSERT_TRUE((t.fromA ? two.b : two.a)->waitFor(t.receive)) << "receive; seed " << seed;
      ASSERT_EQ(t.to->check(t.key), "") << "seed " << seed;
    }
  }
  EXPECT_EQ(two.a->errorText(0), "");
  EXPECT_EQ(two.b->errorText(0), "");
  std::uint64_t sent = 0, received = 0, ops = 0;
  // A copy lane may show the end of an operation before the loop has counted it.
  EXPECT_TRUE(waitUntil([&] {
    sent = received = ops = 0;
    for (TestMover* mover : {two.a.get(), two.b.get()}) {
      const CommunicatorRecord& record = mover->segment.communicator(0);
      sent += record.sentBytes;
      received += record.receivedBytes;
      ops += record.sentOps + record.receivedOps;
    }
    return ops == 2 * 6 * 8;
  }));
  EXPECT_EQ(sent, bytes);
  EXPECT_EQ(received, bytes);
}

TEST(MoverLoop, Rule5NoCopyIsShorterThan64KiB) {
  Two two;
  std::uint64_t sequence = 0;
  for (std::uint64_t bytes :
       {65536u, 65537u, 131071u, 131073u, 196607u, 196609u, 262145u, 393217u}) {
    DeviceBuffer from(bytes), to(bytes);
    from.fill(bytes);
    const Ticket receive = two.b->launch({receiveFrom(0, sequence, to)});
    const Ticket send = two.a->launch({sendTo(1, sequence, from)});
    ++sequence;
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive)) << bytes;
    EXPECT_EQ(to.check(bytes), "");
  }
  EXPECT_GE(two.a->engines.shortest.load(), 65536u);
  EXPECT_GE(two.b->engines.shortest.load(), 65536u);
}

TEST(MoverLoop, Rule3FinishFlagsOnlyGrowWhileSlotsAreUsedAgain) {
  Options options;
  options.launchSlots = 4;
  Two two(options);
  std::atomic<bool> stop{false}, fell{false};
  std::thread watcher([&] {
    std::vector<std::uint64_t> last(8, 0);
    while (!stop) {
      for (std::uint32_t i = 0; i < 8; ++i) {
        const TestMover& mover = i < 4 ? *two.a : *two.b;
        const std::uint64_t now = mover.segment.launch(i % 4).finish.value.load();
        if (now < last[i]) fell = true;
        last[i] = now;
      }
      std::this_thread::yield();
    }
  });
  DeviceBuffer from(70'001), to(70'001);
  from.fill(1);
  std::vector<Ticket> sends, receives;
  for (std::uint64_t i = 0; i < 60 && !HasFailure(); ++i) {
    sends.push_back(two.a->launch({sendTo(1, i, from)}));
    receives.push_back(two.b->launch({receiveFrom(0, i, to)}));
  }
  for (std::size_t i = 0; i < sends.size(); ++i) {
    EXPECT_TRUE(two.a->waitFor(sends[i]) && two.b->waitFor(receives[i])) << i;
  }
  stop = true;
  watcher.join();
  EXPECT_FALSE(fell);
}

TEST(MoverLoop, Rule7AReceiverThatNeverComesHoldsUpNoOtherFlow) {
  Two two;
  two.add(1, kId + 1);
  std::vector<std::unique_ptr<DeviceBuffer>> stuck;
  for (std::uint64_t i = 0; i < 8; ++i) {
    stuck.push_back(std::make_unique<DeviceBuffer>(500'001));
    two.a->launch({sendTo(1, i, *stuck.back())});
  }
  for (std::uint64_t i = 0; i < 5; ++i) {
    DeviceBuffer from(300'001), to(300'001);
    from.fill(i);
    const Ticket send = two.a->launch({sendTo(1, i, from, 1)});
    const Ticket receive = two.b->launch({receiveFrom(0, i, to, 1)});
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive)) << i;
    EXPECT_EQ(to.check(i), "");
  }
  two.a->end(0, OpKind::Abort);
  EXPECT_TRUE(two.a->waitForClose(0));
}

TEST(MoverLoop, Rule7TwoCommunicatorsInOppositeOrderDoNotDeadlock) {
  Two two;
  two.add(1, kId + 1);
  constexpr std::uint64_t kBytes = 1'000'001;
  for (std::uint64_t i = 0; i < 4; ++i) {
    DeviceBuffer from0(kBytes), to0(kBytes), from1(kBytes), to1(kBytes);
    from0.fill(i);
    from1.fill(i + 100);
    // Each launch one stream: both streams of both ranks block on the one posted first.
    std::vector<Ticket> atA{two.a->launch({sendTo(1, i, from0, 0)}),
                            two.a->launch({sendTo(1, i, from1, 1)})};
    std::vector<Ticket> atB{two.b->launch({receiveFrom(0, i, to1, 1)}),
                            two.b->launch({receiveFrom(0, i, to0, 0)})};
    for (const Ticket& t : atA) ASSERT_TRUE(two.a->waitFor(t));
    for (const Ticket& t : atB) ASSERT_TRUE(two.b->waitFor(t));
    EXPECT_EQ(to0.check(i), "");
    EXPECT_EQ(to1.check(i + 100), "");
  }
}

TEST(MoverLoop, LaterReceivesMayStartFirst) {
  Two two;
  DeviceBuffer from0(400'001), from1(400'001), to0(400'001), to1(400'001);
  from0.fill(0);
  from1.fill(1);
  const Ticket r0 = two.b->launch({receiveFrom(0, 0, to0)}, 1, false);
  const Ticket r1 = two.b->launch({receiveFrom(0, 1, to1)});
  const Ticket s0 = two.a->launch({sendTo(1, 0, from0)});
  const Ticket s1 = two.a->launch({sendTo(1, 1, from1)});
  ASSERT_TRUE(two.b->waitFor(r1) && two.a->waitFor(s1));
  EXPECT_EQ(to1.check(1), "");
  EXPECT_FALSE(two.b->finished(r0));
  EXPECT_EQ(to0.untouched(), "") << "bytes must not move before the user's stream is there";
  two.b->start(r0, 0);
  ASSERT_TRUE(two.b->waitFor(r0) && two.a->waitFor(s0));
  EXPECT_EQ(to0.check(0), "");
}

// --- Launches ------------------------------------------------------------------------------------

TEST(MoverLoop, ALaunchOverTwoStreamsStartsAndFinishesTogether) {
  Two two;
  DeviceBuffer from0(200'001), from1(70'001), to0(200'001), to1(70'001);
  from0.fill(0);
  from1.fill(1);
  const Ticket r0 = two.b->launch({receiveFrom(0, 0, to0)});
  const Ticket launch = two.a->launch({sendTo(1, 0, from0), sendTo(1, 1, from1)}, 2, false);
  two.a->start(launch, 1);
  EXPECT_FALSE(waitUntil([&] { return two.b->finished(r0); }, 50)) << "one stream has not started";
  EXPECT_EQ(two.a->engines.submitted.load(), 0u);
  two.a->engines.hold(true);
  two.a->start(launch, 0);
  // Two chunks of the first and one of the second: while one copy is left, no stream goes on.
  ASSERT_TRUE(waitUntil([&] { return two.a->engines.submitted.load() >= 3; }));
  two.a->engines.letThrough(2);
  ASSERT_TRUE(waitUntil([&] { return two.a->engines.ended.load() == 2; }));
  EXPECT_FALSE(
      waitUntil([&] { return two.a->finished(launch, 0) || two.a->finished(launch, 1); }, 50));
  two.a->engines.hold(false);
  ASSERT_TRUE(two.a->waitFor(launch) && two.b->waitFor(r0));
  EXPECT_EQ(to0.check(0), "");
  const Ticket r1 = two.b->launch({receiveFrom(0, 1, to1)});
  ASSERT_TRUE(two.b->waitFor(r1));
  EXPECT_EQ(to1.check(1), "");
}

TEST(MoverLoop, AnOperationBeforeItsCommunicatorsEvent) {
  Options options;
  options.startLoop = false;
  TestMover a(options);
  TestMover b;
  const std::vector<PeerRecord> peers{a.place("hostA", 1), b.place("hostB", 2)};
  ASSERT_TRUE(a.addCommunicator(0, kId, 0, peers));
  ASSERT_TRUE(b.addCommunicator(0, kId, 1, peers));
  DeviceBuffer from(150'001), to(150'001);
  from.fill(5);
  // The loop looks at its ring first: the operation is there together with the event.
  const Ticket send = a.launch({sendTo(1, 0, from)});
  const Ticket receive = b.launch({receiveFrom(0, 0, to)});
  a.startLoop();
  ASSERT_TRUE(a.waitFor(send) && b.waitFor(receive));
  EXPECT_EQ(to.check(5), "");
}

TEST(MoverLoop, ASlotUsedAgainAsSoonAsTheLaneShowsItsEnd) {
  // The lane writes `finish` before the flag by which the loop learns of the copy's end: with one
  // slot the application's next operation comes in between.
  Options one;
  one.launchSlots = 1;
  Two two(one, Options{});
  two.a->engines.betweenUs = 20'000;
  std::vector<std::unique_ptr<DeviceBuffer>> from, to;
  std::vector<Ticket> receives;
  for (std::uint64_t i = 0; i < 5; ++i) {
    from.push_back(std::make_unique<DeviceBuffer>(70'001));
    from.back()->fill(i);
    to.push_back(std::make_unique<DeviceBuffer>(70'001));
    receives.push_back(two.b->launch({receiveFrom(0, i, *to.back())}));
  }
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Ticket send = two.a->launch({sendTo(1, i, *from[i])});
    ASSERT_TRUE(two.a->waitFor(send, 5'000)) << "operation " << i << " is lost";
  }
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(two.b->waitFor(receives[i])) << i;
    EXPECT_EQ(to[i]->check(i), "");
  }
}

TEST(MoverLoop, ASlotUsedAgainWhileTheLoopDrainsItsRing) {
  // An operation that ends as soon as it is seen; the application takes its slot for the next one
  // before the loop has looked at the starts again.
  Options options;
  options.launchSlots = 1;
  Two two(options);
  DeviceBuffer from(70'001), to(70'001);
  TestMover::OpSpec op = sendTo(1, 0, from);
  const Ticket warm = two.a->launch({op});
  ASSERT_TRUE(two.b->waitFor(two.b->launch({receiveFrom(0, 0, to)})) && two.a->waitFor(warm));
  ASSERT_TRUE(waitUntil([&] { return two.a->segment.header().moverSleeps.load() == 1; }));
  from.fill(1);
  OpDescriptor d{};
  d.kind = OpKind::Send;
  d.launchOps = d.launchStreams = 1;
  d.bytes = from.bytes();
  d.buffer = op.buffer;
  d.peer = -1;
  d.launchSequence = 2;
  two.a->push(d);
  d.peer = 1;
  d.pairSequence = 1;
  d.launchSequence = 3;
  two.a->segment.launch(0).start.set(3);
  two.a->push(d);
  two.a->ring();
  const Ticket receive = two.b->launch({receiveFrom(0, 1, to)});
  ASSERT_TRUE(two.b->waitFor(receive));
  ASSERT_TRUE(waitUntil([&] { return two.a->segment.launch(0).finish.reached(3); }));
  EXPECT_EQ(to.check(1), "");
  EXPECT_GE(two.a->engines.shortest.load(), 65536u) << "it was started twice";
  EXPECT_EQ(two.a->engines.submitted.load(), 2u);
}

}  // namespace
}  // namespace hoccl
