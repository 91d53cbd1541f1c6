// A rank's own block of a collective that sends it to others as well: an AllGather out of place,
// seen by the mover. Copied out once, for one peer, and copied in both there and here.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
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
using test::mirrorOf;
using test::pick;
using test::receiveFrom;
using test::refTo;
using test::Rng;
using test::Scripted;
using test::sendTo;
using test::TestMover;
using test::testSeed;
using test::Two;
using test::waitUntil;
using Options = TestMover::Options;
using Ticket = TestMover::Ticket;

/// One rank's side of an AllGather between two, out of place.
struct Gather {
  Gather(std::uint64_t bytes, std::uint64_t key, std::size_t shift = 0)
      : in(bytes, shift), own(bytes, shift / 2), other(bytes, shift / 3) {
    in.fill(key);
  }
  Ticket launch(TestMover& mover, std::int32_t peer, std::uint64_t number) {
    const std::uint64_t sequence = number | kCollectiveSequence;
    return mover.launch({sendTo(peer, sequence, in), receiveFrom(peer, sequence, other),
                         mirrorOf(peer, sequence, own)});
  }
  DeviceBuffer in, own, other;
};

std::uint64_t chunksOut(const TestMover& mover) { return mover.segment.header().chunksOut; }
std::uint64_t chunksIn(const TestMover& mover) { return mover.segment.header().chunksIn; }

TEST(Mirror, Rule12EveryByteOfManySizesIsCopiedOutOnceAndInTwice) {
  const std::uint32_t seed = testSeed();
  Rng rng(seed);
  Options options;
  options.seed = seed;
  const std::uint32_t registered = fakeImports().registered;
  Two two(options);
  two.a->engines.jitterUs = two.b->engines.jitterUs = 50;
  std::uint64_t number = 0, bytes = 0, launches = 0;
  for (int round = 0; round < 6; ++round) {
    struct Both {
      std::unique_ptr<Gather> a, b;
      Ticket atA, atB;
    };
    std::vector<Both> all(6);
    for (Both& g : all) {
      std::uint64_t size = pick(rng, 64 << 10, 600 << 10);
      if (pick(rng, 0, 3) == 0) size = (64 << 10) * pick(rng, 1, 8) + pick(rng, 0, 2);
      g.a = std::make_unique<Gather>(size, 2 * number, pick(rng, 0, 31));
      g.b = std::make_unique<Gather>(size, 2 * number + 1, pick(rng, 0, 31));
      // Several under way at once; now and then the other rank is late.
      g.atA = g.a->launch(*two.a, 1, number);
      if (pick(rng, 0, 2) == 0) ::usleep(1000);
      g.atB = g.b->launch(*two.b, 0, number);
      ++number;
      ++launches;
      bytes += size;
    }
    number -= all.size();
    for (Both& g : all) {
      ASSERT_TRUE(two.a->waitFor(g.atA) && two.b->waitFor(g.atB)) << "seed " << seed;
      ASSERT_EQ(g.a->own.check(2 * number), "") << "seed " << seed;
      ASSERT_EQ(g.b->other.check(2 * number), "") << "seed " << seed;
      ASSERT_EQ(g.b->own.check(2 * number + 1), "") << "seed " << seed;
      ASSERT_EQ(g.a->other.check(2 * number + 1), "") << "seed " << seed;
      ++number;
    }
  }
  for (TestMover* mover : {two.a.get(), two.b.get()}) {
    EXPECT_EQ(mover->errorText(0), "");
    EXPECT_GT(chunksOut(*mover), launches);
    const CommunicatorRecord& record = mover->segment.communicator(0);
    EXPECT_EQ(record.sentBytes.load(), bytes);
    EXPECT_EQ(record.receivedBytes.load(), 2 * bytes);
  }
  EXPECT_EQ(chunksIn(*two.a), chunksOut(*two.a) + chunksOut(*two.b));
  EXPECT_EQ(chunksIn(*two.b), chunksIn(*two.a));
  EXPECT_EQ(fakeImports().registered, registered + 2) << "the ranks' links to themselves were made";
}

TEST(Mirror, OneSmallSlotIsEnough) {
  Options options;
  options.slots = 1;
  options.laneDepth = 1;
  Two two(options);
  Gather a(500'001, 1), b(500'001, 2);
  const Ticket atA = a.launch(*two.a, 1, 0), atB = b.launch(*two.b, 0, 0);
  ASSERT_TRUE(two.a->waitFor(atA) && two.b->waitFor(atB));
  EXPECT_EQ(a.own.check(1), "");
  EXPECT_EQ(a.other.check(2), "");
  EXPECT_EQ(b.own.check(2), "");
  EXPECT_EQ(b.other.check(1), "");
}

TEST(Mirror, TheNumbersOfTheRanksPairWithItselfGoOn) {
  // As in AllGathers and AlltoAlls in turn: only the latter take numbers of that pair.
  Two two;
  for (std::uint64_t i = 0; i < 8; ++i) {
    Gather a(200'001, 1), b(200'001, 2);
    DeviceBuffer from(70'001), to(70'001);
    from.fill(i);
    const Ticket atA = a.launch(*two.a, 1, i), atB = b.launch(*two.b, 0, i);
    const std::uint64_t own = i | kCollectiveSequence;
    const Ticket itself = two.a->launch({sendTo(0, own, from), receiveFrom(0, own, to)});
    ASSERT_TRUE(two.a->waitFor(atA) && two.b->waitFor(atB) && two.a->waitFor(itself)) << i;
    EXPECT_EQ(to.check(i), "");
    EXPECT_EQ(a.own.check(1), "");
  }
  EXPECT_EQ(two.a->errorText(0), "");
}

TEST(Mirror, NothingMovesBeforeItsBufferIsMapped) {
  Two two;
  DeviceBuffer in(300'001), own(300'001), to(300'001);
  const BufferRef mapped = refTo(in, freshAllocation());
  in.fill(1);
  const Ticket warm = two.a->launch({{OpKind::Send, 0, 1, in.bytes(), 0, mapped}});
  ASSERT_TRUE(two.b->waitFor(two.b->launch({receiveFrom(0, 0, to)})) && two.a->waitFor(warm));
  const Ticket receive = two.b->launch({receiveFrom(0, 1, to)});
  const std::uint64_t before = two.a->engines.submitted;
  fakeImports().held = true;
  const Ticket launch =
      two.a->launch({{OpKind::Send, 0, 1, in.bytes(), 1, mapped}, mirrorOf(1, 1, own)});
  EXPECT_FALSE(waitUntil([&] { return two.a->engines.submitted != before; }, 50));
  fakeImports().held = false;
  ASSERT_TRUE(two.a->waitFor(launch) && two.b->waitFor(receive));
  EXPECT_EQ(own.check(1), "");
}

TEST(Mirror, ABufferThatCannotBeMappedFailsTheWholeLaunch) {
  for (bool late : {false, true}) {
    Two two;
    DeviceBuffer in(300'001), own(300'001), to(300'001), pending(70'001);
    // A failed mover with nothing to do sleeps, and does not see that the other rank comes.
    two.add(1, kId + 1);
    two.a->launch({receiveFrom(1, 0, pending, 1)});
    TestMover::OpSpec mirror = mirrorOf(1, 0, own);
    mirror.buffer = refTo(own, freshAllocation(), CUDA_ERROR_INVALID_VALUE);
    fakeImports().held = late;
    const Ticket launch = two.a->launch({sendTo(1, 0, in), mirror});
    const Ticket there = two.b->launch({receiveFrom(0, 0, to)});
    if (late) ::usleep(20'000);
    fakeImports().held = false;
    ASSERT_TRUE(two.a->waitFor(launch) && two.b->waitFor(there));
    EXPECT_EQ(two.a->code(0), Code::Cuda);
    EXPECT_TRUE(contains(two.a->errorText(0), "cannot map")) << two.a->errorText(0);
    EXPECT_EQ(own.untouched(), "");
    two.a->end(0, OpKind::Abort);
    EXPECT_TRUE(two.a->waitForClose(0));
  }
}

TEST(Mirror, Rule10OneWithoutItsSendFailsAndEnds) {
  DeviceBuffer in(300'001), own(300'001), shorter(200'001);
  const std::vector<std::function<std::vector<TestMover::OpSpec>()>> wrong = {
      [&] { return std::vector{mirrorOf(1, 0, own)}; },
      [&] {
        return std::vector{mirrorOf(1, 0, own), sendTo(1, 0, in)};
      },
      [&] {
        return std::vector{sendTo(1, 0, in), mirrorOf(1, 1, own)};
      },
      [&] {
        return std::vector{sendTo(1, 0, in), mirrorOf(0, 0, own)};
      },
      [&] {
        return std::vector{sendTo(1, 0, in), mirrorOf(1, 0, shorter)};
      },
      [&] {
        return std::vector{sendTo(1, 0, in), mirrorOf(1, 0, own), mirrorOf(1, 0, own)};
      }};
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    Two two;
    const Ticket launch = two.a->launch(wrong[i]());
    ASSERT_TRUE(two.a->waitFor(launch)) << i;
    EXPECT_EQ(two.a->code(0), Code::Internal) << i;
    EXPECT_TRUE(contains(two.a->errorText(0), "no send of")) << two.a->errorText(0);
    EXPECT_EQ(own.untouched(), "");
    two.a->end(0, OpKind::Abort);
    EXPECT_TRUE(two.a->waitForClose(0)) << i;
  }
  // Nor of a send that another launch has begun.
  Two two;
  two.a->launch({sendTo(1, 0, in)});
  ASSERT_TRUE(waitUntil([&] { return two.a->engines.submitted > 0; }));
  ASSERT_TRUE(two.a->waitFor(two.a->launch({mirrorOf(1, 0, own)})));
  EXPECT_EQ(two.a->code(0), Code::Internal);
}

// --- Ends in the middle --------------------------------------------------------------------------

/// A mover whose mirror stands still, its bytes in the slots. The peer is played by the test.
struct HeldMirror : Scripted {
  static constexpr std::uint64_t kBytes = 200'001;  // two chunks, which go out eagerly
  explicit HeldMirror(const Options& options = {}) : Scripted(options) {
    in.fill(5);
    mover.engines.holdIn(true);
    launch = mover.launch({sendTo(1, 0, in), mirrorOf(1, 0, own)});
    EXPECT_TRUE(peer.accept());
    const std::uint64_t copies = 2 + std::min(options.laneDepth, 2u);
    EXPECT_TRUE(waitUntil([&] {
      return chunksOut(mover) == 2 && mover.engines.submitted == copies;
    })) << chunksOut(mover)
        << " copies out have ended";
  }
  DeviceBuffer in{kBytes}, own{kBytes};
  Ticket launch;
};

Options shallow() {
  Options options;
  options.laneDepth = 1;
  return options;
}

TEST(Mirror, Rule9AbortWaitsForItsCopies) {
  for (const Options& options : {Options{}, shallow()}) {
    HeldMirror h(options);
    h.mover.end(0, OpKind::Abort);
    EXPECT_FALSE(waitUntil([&] { return h.mover.segment.communicator(0).closes.load() > 0; }, 100));
    EXPECT_FALSE(h.mover.finished(h.launch));
    const std::uint64_t submitted = h.mover.engines.submitted;
    h.mover.engines.holdIn(false);
    ASSERT_TRUE(h.mover.waitForClose(0));
    EXPECT_TRUE(h.mover.finished(h.launch));
    EXPECT_EQ(h.mover.engines.submitted, submitted) << "a copy was begun after the abort";
    EXPECT_EQ(h.mover.engines.ended, submitted);
    EXPECT_EQ(h.own.checkGuards(), "");
  }
}

TEST(Mirror, Rule9APeerThatDiesWithAllItsBytesCostsTheOwnBlockNothing) {
  // With lanes one deep the second chunk has not even been begun when the peer is taken leave of.
  for (const Options& options : {Options{}, shallow()}) {
    HeldMirror h(options);
    h.peer.die();
    EXPECT_FALSE(h.mover.waitFor(h.launch, 250)) << "longer than a dead peer is given";
    h.mover.engines.holdIn(false);
    ASSERT_TRUE(h.mover.waitFor(h.launch));
    EXPECT_EQ(h.own.check(5), "");
    EXPECT_EQ(h.mover.errorText(0), "");
  }
}

TEST(Mirror, Rule9TheLinkOfADeadPeerGoesAfterTheMirror) {
  const std::uint32_t before = fakeImports().registered;
  HeldMirror h;
  h.peer.die();
  ::usleep(250'000);
  EXPECT_EQ(fakeImports().registered, before + 1);
  h.mover.engines.holdIn(false);
  ASSERT_TRUE(h.mover.waitFor(h.launch));
  EXPECT_TRUE(waitUntil([&] { return fakeImports().registered == before; }, 3'000))
      << "the link and its registered memory stay";
}

TEST(Mirror, Rule9APeerThatDiesInTheMiddleFailsBoth) {
  for (bool hold : {false, true}) {
    Scripted s;
    Gather g(2'000'001, 3);
    s.mover.engines.holdIn(hold);
    const Ticket launch = g.launch(s.mover, 1, 0);
    ASSERT_TRUE(s.peer.accept());
    // It takes no chunk, so no more than the slots hold goes out.
    ASSERT_TRUE(waitUntil([&] { return chunksOut(s.mover) >= 2; }));
    s.peer.die();
    if (hold) {
      EXPECT_TRUE(waitUntil([&] { return s.mover.code(0) == Code::Remote; }));
      EXPECT_FALSE(s.mover.finished(launch)) << "a copy into the application's memory is under way";
      s.mover.engines.holdIn(false);
    }
    ASSERT_TRUE(s.mover.waitFor(launch, 5'000));
    EXPECT_EQ(s.mover.code(0), Code::Remote);
    EXPECT_TRUE(contains(s.mover.errorText(0), "rank 1 (host hostB, process 222)"));
    EXPECT_EQ(s.mover.engines.ended, s.mover.engines.submitted);
    EXPECT_EQ(g.own.checkGuards(), "");
    s.mover.end(0, OpKind::Close);
    EXPECT_TRUE(s.mover.waitForClose(0));
  }
}

TEST(Mirror, Rule9APeerThatAbortsInTheMiddleFailsBoth) {
  Two two;
  Gather a(2'000'001, 3), b(2'000'001, 4);
  two.a->engines.jitterUs = two.b->engines.jitterUs = 3000;
  const Ticket atA = a.launch(*two.a, 1, 0), atB = b.launch(*two.b, 0, 0);
  ASSERT_TRUE(waitUntil([&] { return chunksOut(*two.b) >= 3; }));
  two.b->end(0, OpKind::Abort);
  ASSERT_TRUE(two.b->waitForClose(0) && two.a->waitFor(atA) && two.b->waitFor(atB));
  EXPECT_EQ(two.a->code(0), Code::Remote) << two.a->errorText(0);
  for (Gather* g : {&a, &b}) EXPECT_EQ(g->own.checkGuards(), "");
  // The slots are free for whoever comes next.
  two.a->end(0, OpKind::Close);
  ASSERT_TRUE(two.a->waitForClose(0));
  two.a->engines.jitterUs = two.b->engines.jitterUs = 0;
  two.add(0, kId + 9);
  Gather nextA(900'001, 7), nextB(900'001, 8);
  const Ticket thenA = nextA.launch(*two.a, 1, 0), thenB = nextB.launch(*two.b, 0, 0);
  ASSERT_TRUE(two.a->waitFor(thenA) && two.b->waitFor(thenB));
  EXPECT_EQ(nextA.own.check(7), "");
  EXPECT_EQ(nextB.other.check(7), "");
}

TEST(Mirror, Rule9RandomDelaysAndAbortsAtRandomMoments) {
  const std::uint32_t seed = testSeed();
  Rng rng(seed);
  Options options;
  options.seed = seed;
  Two two(options);
  two.a->engines.jitterUs = two.b->engines.jitterUs = 100;
  for (std::uint64_t round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<Gather>> all;
    std::vector<Ticket> atA, atB;
    for (std::uint64_t i = 0; i < 3; ++i) {
      for (int side = 0; side < 2; ++side) {
        all.push_back(std::make_unique<Gather>(300'001, round));
        (side ? atB : atA).push_back(all.back()->launch(side ? *two.b : *two.a, 1 - side, i));
      }
    }
    ::usleep(static_cast<useconds_t>(pick(rng, 0, 3000)));
    TestMover& first = pick(rng, 0, 1) ? *two.a : *two.b;
    TestMover& second = &first == two.a.get() ? *two.b : *two.a;
    first.end(0, OpKind::Abort);
    ASSERT_TRUE(first.waitForClose(0)) << "seed " << seed;
    second.end(0, OpKind::Abort);
    ASSERT_TRUE(second.waitForClose(0)) << "seed " << seed;
    for (const Ticket& t : atA) ASSERT_TRUE(two.a->finished(t)) << "seed " << seed;
    for (const Ticket& t : atB) ASSERT_TRUE(two.b->finished(t)) << "seed " << seed;
    for (auto& g : all) {
      ASSERT_EQ(g->own.checkGuards(), "") << "seed " << seed;
      ASSERT_EQ(g->other.checkGuards(), "") << "seed " << seed;
    }
    two.add(0, kId + round + 1);
  }
  Gather a(900'001, 7), b(900'001, 8);
  const Ticket atA = a.launch(*two.a, 1, 0), atB = b.launch(*two.b, 0, 0);
  ASSERT_TRUE(two.a->waitFor(atA) && two.b->waitFor(atB)) << "seed " << seed;
  EXPECT_EQ(a.own.check(7), "");
  EXPECT_EQ(b.own.check(8), "");
}

TEST(Mirror, ADriverCallThatFailsEndsEverything) {
  HeldMirror h(shallow());
  h.mover.engines.refuse = true;  // the second chunk's copy in
  h.mover.engines.holdIn(false);
  ASSERT_TRUE(h.mover.waitFor(h.launch));
  EXPECT_EQ(h.mover.code(0), Code::Cuda);
  EXPECT_TRUE(contains(h.mover.errorText(0), "fake engines refuse")) << h.mover.errorText(0);
}

TEST(Mirror, WhoFreesItsBufferIsToldWhatItWaitsFor) {
  Scripted s;
  Gather g(2'000'001, 3);
  const TestMover::OpSpec mirror = mirrorOf(1, 0, g.own);
  const Ticket launch = s.mover.launch({sendTo(1, 0, g.in), mirror});
  ASSERT_TRUE(s.peer.accept());
  ASSERT_TRUE(waitUntil([&] { return chunksOut(s.mover) >= 2; }));
  OpDescriptor drop{};
  drop.kind = OpKind::Drop;
  drop.launchSequence = 1;
  drop.buffer.allocationId = mirror.buffer.allocationId;
  DropSlot& slot = s.mover.segment.header().drops[0];
  slot.request.store(1);
  s.mover.push(drop);
  s.mover.ring();
  ASSERT_TRUE(waitUntil([&] { return slot.described.load() == 1; }));
  const std::string text = slot.pending;
  EXPECT_TRUE(contains(text, "a copy of a send of 2000001 bytes to rank 1")) << text;
  EXPECT_TRUE(contains(text, "has not called its receive")) << text;
  EXPECT_FALSE(slot.done.reached(1));
  s.mover.end(0, OpKind::Abort);
  EXPECT_TRUE(waitUntil([&] { return slot.done.reached(1); }));
  EXPECT_TRUE(s.mover.finished(launch));
}

}  // namespace
}  // namespace hoccl
