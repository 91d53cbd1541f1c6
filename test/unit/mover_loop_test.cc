// The mover's loop with its control thread and the shm transport, over fake copy engines and a fake
// driver table: two movers in one process, or one mover and a peer that the test plays.

#include "common/runtime/mover_loop.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <new>

#include "test/unit/fakes.h"

// Counts what the loop's thread allocates; the other threads may.
namespace {
void* countedAllocation(std::size_t bytes) {
  if (auto* counter = hoccl::test::allocationCounter) counter->fetch_add(1);
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* countedAllocation(std::size_t bytes, std::align_val_t alignment) {
  if (auto* counter = hoccl::test::allocationCounter) counter->fetch_add(1);
  const auto align = static_cast<std::size_t>(alignment);
  if (void* memory = std::aligned_alloc(align, (bytes + align) / align * align)) return memory;
  throw std::bad_alloc();
}
}  // namespace
void* operator new(std::size_t bytes) { return countedAllocation(bytes); }
void* operator new[](std::size_t bytes) { return countedAllocation(bytes); }
void* operator new(std::size_t bytes, std::align_val_t a) { return countedAllocation(bytes, a); }
void* operator new[](std::size_t bytes, std::align_val_t a) { return countedAllocation(bytes, a); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace hoccl {
namespace {

using test::DeviceBuffer;
using test::fakeImports;
using test::kPatienceMs;
using test::pick;
using test::refTo;
using test::Rng;
using test::ScriptedPeer;
using test::TestMover;
using test::testSeed;
using test::waitUntil;
using Options = TestMover::Options;
using Ticket = TestMover::Ticket;

std::uint64_t freshAllocation() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}
TestMover::OpSpec sendTo(std::int32_t peer, std::uint64_t sequence, DeviceBuffer& buffer,
                         std::uint32_t communicator = 0) {
  return {OpKind::Send,   communicator, peer,
          buffer.bytes(), sequence,     refTo(buffer, freshAllocation())};
}
TestMover::OpSpec receiveFrom(std::int32_t peer, std::uint64_t sequence, DeviceBuffer& buffer,
                              std::uint32_t communicator = 0) {
  return {OpKind::Recv,   communicator, peer,
          buffer.bytes(), sequence,     refTo(buffer, freshAllocation())};
}

bool contains(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

constexpr std::uint64_t kId = 0xc0ffee;  ///< of communicator index 0

/// Two movers, ranks 0 and 1 of communicator 0.
struct Two {
  explicit Two(const Options& options = {}) : Two(options, options) {}
  Two(const Options& ofA, const Options& ofB)
      : a(std::make_unique<TestMover>(ofA)), b(std::make_unique<TestMover>(ofB)) {
    add(0, kId);
  }
  void add(std::uint32_t index, std::uint64_t id) {
    const std::vector<PeerRecord> peers{a->place("hostA", 111), b->place("hostB", 222)};
    for (auto& [mover, rank] : {std::pair{a.get(), 0}, std::pair{b.get(), 1}}) {
      const Status status = mover->addCommunicator(index, id, rank, peers);
      EXPECT_TRUE(status) << status.message();
    }
  }
  std::unique_ptr<TestMover> a, b;
};

/// A mover, rank 0, with a scripted peer, rank 1 of communicator 0.
struct Scripted {
  explicit Scripted(const Options& options = {}) : mover(options) {
    const Status status =
        mover.addCommunicator(0, kId, 0, {mover.place("hostA", 111), peer.place("hostB", 222)});
    EXPECT_TRUE(status) << status.message();
  }
  ScriptedPeer peer;
  TestMover mover;
};

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
  Ticket send, receive;
  for (std::uint64_t i = 0; i < 60 && !HasFailure(); ++i) {
    send = two.a->launch({sendTo(1, i, from)});
    receive = two.b->launch({receiveFrom(0, i, to)});
  }
  EXPECT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
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

// --- Errors --------------------------------------------------------------------------------------

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

// --- Imports -------------------------------------------------------------------------------------

TEST(MoverLoop, Rule8ImportsAreReusedAndBounded) {
  Options options;
  options.importCache = 4;
  Two two(options);
  const std::uint32_t opened = fakeImports().opened, closed = fakeImports().closed;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<BufferRef> refs;
  for (int i = 0; i < 8; ++i) {
    buffers.push_back(std::make_unique<DeviceBuffer>(70'001));
    buffers.back()->fill(static_cast<std::uint64_t>(i));
    refs.push_back(refTo(*buffers.back(), freshAllocation()));
  }
  DeviceBuffer to(70'001);
  const BufferRef target = refTo(to, freshAllocation());
  std::uint64_t sequence = 0;
  auto transfer = [&](std::size_t i) {
    const Ticket receive = two.b->launch({{OpKind::Recv, 0, 0, to.bytes(), sequence, target}});
    const Ticket send = two.a->launch({{OpKind::Send, 0, 1, to.bytes(), sequence, refs[i]}});
    ++sequence;
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
    EXPECT_EQ(to.check(i), "");
  };
  for (int round = 0; round < 5; ++round) {
    for (std::size_t i = 0; i < 3; ++i) transfer(i);
  }
  EXPECT_EQ(fakeImports().opened - opened, 4u) << "each allocation is mapped once";
  for (std::size_t i = 3; i < 8; ++i) transfer(i);
  EXPECT_EQ(fakeImports().opened - opened, 9u);
  EXPECT_TRUE(waitUntil([&] { return fakeImports().closed - closed == 4; }))
      << fakeImports().closed - closed << " were unmapped";
  transfer(0);
  EXPECT_EQ(fakeImports().opened - opened, 10u) << "what was evicted is mapped anew";
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

// --- Idleness and cost ---------------------------------------------------------------------------

TEST(MoverLoop, Rule11AnIdleLoopSleepsUntilItIsRung) {
  Two two;
  DeviceBuffer from(70'001), to(70'001);
  for (std::uint64_t i = 0; i < 3; ++i) {
    from.fill(i);
    SegmentHeader& header = two.a->segment.header();
    std::uint64_t wakeups = 0;
    // Asleep: rung for by the flag, and no round goes by.
    ASSERT_TRUE(waitUntil([&] {
      if (!header.moverSleeps.load()) return false;
      wakeups = header.loopWakeups.load();
      ::usleep(100'000);
      return header.moverSleeps.load() == 1 && header.loopWakeups.load() == wakeups;
    })) << "the loop does not come to rest";
    const Ticket receive = two.b->launch({receiveFrom(0, i, to)});
    const Ticket send = two.a->launch({sendTo(1, i, from)});
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
    EXPECT_GT(header.loopWakeups.load(), wakeups);
    EXPECT_EQ(to.check(i), "");
  }
}

TEST(MoverLoop, TheLoopAllocatesNothingOnceItIsWarm) {
  Options options;
  options.launchSlots = 8;
  Two two(options);
  constexpr int kBuffers = 4;
  std::vector<std::unique_ptr<DeviceBuffer>> from, to;
  std::vector<BufferRef> fromRefs, toRefs;
  const std::uint64_t sizes[kBuffers] = {65'536, 70'001, 300'003, 1'000'001};
  for (std::uint64_t bytes : sizes) {
    from.push_back(std::make_unique<DeviceBuffer>(bytes));
    to.push_back(std::make_unique<DeviceBuffer>(bytes));
    from.back()->fill(bytes);
    fromRefs.push_back(refTo(*from.back(), freshAllocation()));
    toRefs.push_back(refTo(*to.back(), freshAllocation()));
  }
  std::uint64_t sequence = 0;
  auto transfers = [&](int count) {
    for (int i = 0; i < count; ++i) {
      std::vector<TestMover::OpSpec> sends, receives;
      for (int k = 0; k < kBuffers; ++k) {
        const auto at = static_cast<std::size_t>(k);
        sends.push_back({OpKind::Send, 0, 1, sizes[k], sequence, fromRefs[at]});
        receives.push_back({OpKind::Recv, 0, 0, sizes[k], sequence, toRefs[at]});
        ++sequence;
      }
      // Groups of all, and single ones whose end the lane shows.
      const Ticket a = two.a->launch(sends), b = two.b->launch(receives);
      ASSERT_TRUE(two.a->waitFor(a) && two.b->waitFor(b));
      const Ticket c = two.a->launch({{OpKind::Send, 0, 1, sizes[0], sequence, fromRefs[0]}});
      const Ticket d = two.b->launch({{OpKind::Recv, 0, 0, sizes[0], sequence, toRefs[0]}});
      ++sequence;
      ASSERT_TRUE(two.a->waitFor(c) && two.b->waitFor(d));
    }
  };
  transfers(16);  // each launch slot has been used by either kind
  EXPECT_GT(two.a->allocations.load(), 0u) << "the counter does not count";
  const std::uint64_t beforeA = two.a->allocations, beforeB = two.b->allocations;
  transfers(20);
  EXPECT_EQ(two.a->allocations - beforeA, 0u) << "in " << 20 * (kBuffers + 1) << " sends";
  EXPECT_EQ(two.b->allocations - beforeB, 0u) << "in " << 20 * (kBuffers + 1) << " receives";
  for (std::size_t k = 0; k < kBuffers; ++k) EXPECT_EQ(to[k]->check(sizes[k]), "");
}

}  // namespace
}  // namespace hoccl
