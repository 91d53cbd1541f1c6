// When the mover rings: behind the end of a launch, once a round, and never for nothing.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/runtime/segment.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::DeviceBuffer;
using test::receiveFrom;
using test::Scripted;
using test::sendTo;
using test::TestMover;
using test::Two;
using test::waitUntil;
using Ticket = TestMover::Ticket;

TEST(MoverDoorbell, EveryEndIsRungFor) {
  Two two;
  DeviceBuffer from(200'001), to(200'001);
  for (std::uint64_t i = 0; i < 5; ++i) {
    const std::uint64_t before[] = {two.a->doorbell.rings, two.b->doorbell.rings};
    const Ticket receive = two.b->launch({receiveFrom(0, i, to)});
    const Ticket send = two.a->launch({sendTo(1, i, from)});
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
    // A lane may have written the end before the loop sees it.
    EXPECT_TRUE(waitUntil([&] { return two.a->doorbell.rings == before[0] + 1; }));
    EXPECT_TRUE(waitUntil([&] { return two.b->doorbell.rings == before[1] + 1; }));
  }
  EXPECT_EQ(two.a->segment.header().doorbells, 5u);
}

/// A ring before `finish` would make the GPU look at the old value and then wait its 9 us.
TEST(MoverDoorbell, BehindFinishOfAllThatEndedInTheRound) {
  Two two(TestMover::Options{.startLoop = false});
  std::vector<std::unique_ptr<DeviceBuffer>> from, to;
  std::vector<Ticket> sends, receives;
  std::atomic<std::uint64_t> early{0};
  two.b->doorbell.look = [&] {
    // `released` comes behind `finish`.
    for (std::uint32_t slot = 0; slot < two.b->segment.launchSlots(); ++slot) {
      const LaunchFlags& flags = two.b->segment.launch(slot);
      if (!flags.finish.reached(flags.released.value.load())) early.fetch_add(1);
    }
  };
  for (TestMover* mover : {two.a.get(), two.b.get()}) mover->startLoop();
  for (std::uint64_t i = 0; i < 8; ++i) {
    from.push_back(std::make_unique<DeviceBuffer>(65'536));
    to.push_back(std::make_unique<DeviceBuffer>(65'536));
    receives.push_back(two.b->launch({receiveFrom(0, i, *to.back())}));
    sends.push_back(two.a->launch({sendTo(1, i, *from.back())}));
  }
  for (const Ticket& ticket : receives) ASSERT_TRUE(two.b->waitFor(ticket));
  for (const Ticket& ticket : sends) ASSERT_TRUE(two.a->waitFor(ticket));
  EXPECT_EQ(early, 0u);
  EXPECT_GT(two.b->doorbell.rings, 0u);
  EXPECT_LE(two.b->doorbell.rings, 8u);
}

/// The GPU may have looked for the ring that is under way before this launch had ended.
TEST(MoverDoorbell, WhatEndsWhileARingIsUnderWayIsRungForBehindIt) {
  Two two;
  two.b->doorbell.busy = 3;
  DeviceBuffer from(70'001), to(70'001);
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  const Ticket send = two.a->launch({sendTo(1, 0, from)});
  ASSERT_TRUE(two.b->waitFor(receive) && two.a->waitFor(send));
  EXPECT_TRUE(waitUntil([&] { return two.b->doorbell.rings == 1; }, 2000));
  EXPECT_EQ(two.b->segment.header().doorbells, 1u);
}

/// They end when the peer is taken leave of, with nothing left to do: the loop goes to sleep.
TEST(MoverDoorbell, WhatAPeersDeathEndsIsRungFor) {
  Scripted s;
  DeviceBuffer to(70'001);
  const Ticket receive = s.mover.launch({receiveFrom(1, 0, to)});
  ASSERT_TRUE(s.peer.accept());
  s.peer.die();
  ASSERT_TRUE(s.mover.waitFor(receive));
  EXPECT_EQ(s.mover.code(0), Code::Remote);
  EXPECT_TRUE(waitUntil([&] { return s.mover.doorbell.rings == 1; }, 2000));
}

TEST(MoverDoorbell, OneThatTheDriverRefusesEndsTheMover) {
  Two two;
  two.b->doorbell.refuses = true;
  DeviceBuffer from(70'001), to(70'001);
  const Ticket receive = two.b->launch({receiveFrom(0, 0, to)});
  const Ticket send = two.a->launch({sendTo(1, 0, from)});
  ASSERT_TRUE(two.b->waitFor(receive) && two.a->waitFor(send));
  EXPECT_TRUE(waitUntil([&] { return two.b->code(0) == Code::Cuda; }));
  EXPECT_NE(two.b->errorText(0).find("fake doorbell refuses"), std::string::npos)
      << two.b->errorText(0);
}

}  // namespace
}  // namespace hoccl
