// Mirrors: what a send takes to the peer comes in on this side as well, out of the same slots.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/runtime/link.h"
#include "test/unit/fake_lanes.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/link_harness.h"

namespace hoccl {
namespace {

using test::chance;
using test::DeviceBuffer;
using test::End;
using test::FakeWire;
using test::kCommunicator;
using test::ManualLane;
using test::oddSize;
using test::Pair;
using test::pick;
using test::Rng;
using test::testSeed;

struct Case {
  const char* name;
  FakeWire::Settings settings;
  std::uint32_t depth = 3;
};

class MirrorLinkTest : public ::testing::TestWithParam<Case> {};

TEST_P(MirrorLinkTest, Rule12EveryByteIsThereTwiceAndCopiedOutOnce) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  Rng& rng = pair.rng;
  struct Transfer {
    std::unique_ptr<DeviceBuffer> from, to, own;
    End *source = nullptr, *target = nullptr;
    Op *send = nullptr, *mirror = nullptr, *receive = nullptr;
    int sendAt = 0, receiveAt = 0;
  };
  std::vector<Transfer> transfers(24);
  std::uint64_t mirrors = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    Transfer& t = transfers[i];
    const std::uint64_t bytes = oddSize(rng);
    t.from = std::make_unique<DeviceBuffer>(bytes, pick(rng, 0, 31));
    t.to = std::make_unique<DeviceBuffer>(bytes, pick(rng, 0, 31));
    if (i % 3 != 2) {  // between others that have none
      t.own = std::make_unique<DeviceBuffer>(bytes, pick(rng, 0, 31));
      ++mirrors;
    }
    t.source = i % 2 ? &pair.a : &pair.b;
    t.target = i % 2 ? &pair.b : &pair.a;
    t.from->fill(i);
    t.sendAt = static_cast<int>(pick(rng, 0, 300));
    t.receiveAt = std::max(0, t.sendAt + static_cast<int>(pick(rng, 0, 200)) - 100);
  }
  const bool moved = pair.run([&, now = 0]() mutable {
    bool all = true;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      Transfer& t = transfers[i];
      if (!t.send && now >= t.sendAt) {
        t.send = t.source->post(OpKind::Send, i, *t.from, t.own.get());
        t.mirror = t.send->partner;
      }
      if (!t.receive && now >= t.receiveAt) t.receive = t.target->post(OpKind::Recv, i, *t.to);
      all = all && t.send && t.receive && End::finished(t.send) && End::finished(t.receive) &&
            (!t.mirror || End::finished(t.mirror));
    }
    ++now;
    return all;
  });
  ASSERT_TRUE(moved) << "seed " << seed;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    EXPECT_EQ(transfers[i].to->check(i), "") << "transfer " << i;
    if (transfers[i].own) {
      EXPECT_EQ(transfers[i].own->check(i), "") << "mirror " << i;
    }
  }
  EXPECT_TRUE(pair.run([&] { return pair.quiet(); })) << "slots stay busy; seed " << seed;
  EXPECT_FALSE(pair.a.link.needed() || pair.b.link.needed());
  const test::Edges& e = pair.edges;
  EXPECT_EQ(pair.a.copiesOut() + pair.b.copiesOut(), e.announced);
  EXPECT_EQ(pair.a.copiesIn() + pair.b.copiesIn(), e.announced + e.mirrored);
  EXPECT_GT(e.mirrored, mirrors) << "several chunks of each, more or less";
  EXPECT_LT(e.mirrored, e.announced);
}

TEST_P(MirrorLinkTest, Rule9DroppedInTheMiddleTheyLeaveNoSlotBusy) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  Rng& rng = pair.rng;
  std::uint64_t torn = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const std::uint64_t bytes = oddSize(rng);
    DeviceBuffer from(bytes), to(bytes), own(bytes);
    from.fill(i);
    Op* send = pair.a.post(OpKind::Send, i, from, &own);
    Op* mirror = send->partner;
    Op* receive = pair.b.post(OpKind::Recv, i, to);
    const int steps = static_cast<int>(pick(rng, 0, 40));
    for (int s = 0; s < steps; ++s) pair.step();
    const std::uint64_t issued = mirror->issued;
    if (!End::finished(mirror)) ++torn;
    for (Op* op : {send, mirror}) pair.a.drop(op);
    pair.b.drop(receive);
    ASSERT_TRUE(pair.run([&] { return pair.quiet(); })) << "seed " << seed << " operation " << i;
    EXPECT_EQ(mirror->issued, issued) << "a copy into a buffer that nobody waits for any more";
    for (Op* op : {send, mirror, receive}) EXPECT_EQ(op->copiesInFlight, 0u);
    EXPECT_FALSE(pair.a.link.needed());
    EXPECT_EQ(pair.a.inLanes().inFlight + pair.a.outLanes().inFlight, 0u);
    EXPECT_EQ(own.checkGuards(), "");
  }
  EXPECT_GT(torn, 0u);
  DeviceBuffer from(300'001), to(300'001), own(300'001);
  from.fill(99);
  Op* send = pair.a.post(OpKind::Send, 99, from, &own);
  Op* receive = pair.b.post(OpKind::Recv, 99, to);
  ASSERT_TRUE(pair.run([&] { return End::finished(send->partner) && End::finished(receive); }));
  EXPECT_EQ(to.check(99), "");
  EXPECT_EQ(own.check(99), "");
}

TEST_P(MirrorLinkTest, Rule9ItGoesOnWhenThePeerDies) {
  const std::uint32_t seed = testSeed();
  for (int steps = 0; steps < 20; ++steps) {
    Pair pair(GetParam().settings, seed + static_cast<std::uint32_t>(steps), GetParam().depth);
    DeviceBuffer from(100'001), own(100'001);
    from.fill(7);
    Op* send = pair.a.post(OpKind::Send, 0, from, &own);
    if (GetParam().settings.slots == 1) send->matched = true;  // one slot is not for eager chunks
    pair.a.round();
    ASSERT_EQ(send->issued, 100'001u) << "the peer has it";
    for (int i = 0; i < steps; ++i) pair.step();
    std::vector<Op*> lost;
    pair.a.link.abandonPeer(&lost);
    EXPECT_TRUE(lost.empty());
    EXPECT_NE(pair.a.link.needed(), End::finished(send->partner))
        << "the link goes while bytes in it are still to come in";
    ASSERT_TRUE(pair.run([&] { return End::finished(send) && !pair.a.link.needed(); }));
    EXPECT_TRUE(End::finished(send->partner));
    EXPECT_EQ(own.check(7), "");
    pair.a.round();
    EXPECT_TRUE(pair.a.link.quiet());
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, MirrorLinkTest,
    ::testing::Values(
        Case{"Shared", {}, 3}, Case{"SharedOneSlot", {.slots = 1}, 3},
        Case{"SharedDepthOne", {.slots = 8}, 1},
        Case{"Separate", {.shared = false, .refuse = 0.5, .late = 0.3}, 3},
        Case{"SeparateOneSlot", {.slots = 1, .shared = false, .refuse = 0.5, .late = 0.3}, 2}),
    [](const ::testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

/// One slot, and every step by hand. Lanes of an end: out, in, out, in.
struct ByHand {
  ByHand() : pair({.slots = 1}, 1) {
    from.fill(1);
    next.fill(2);
    pair.b.post(OpKind::Recv, 0, to);
    pair.b.post(OpKind::Recv, 1, toNext);
    pair.b.round();
    pair.a.round();  // both are Ready
    send = pair.a.post(OpKind::Send, 0, from, &own);
    mirror = send->partner;
    second = pair.a.post(OpKind::Send, 1, next);
  }
  static void complete(End& end, LaneDirection direction) {
    const std::size_t first = direction == LaneDirection::ToHost ? 0 : 1;
    for (std::size_t i = first; i < end.lanes.size(); i += 2) {
      while (end.lanes[i]->completeOne()) {
      }
    }
  }
  DeviceBuffer from{100'001}, next{100'001}, to{100'001}, toNext{100'001}, own{100'001};
  Pair pair;
  Op *send, *mirror, *second;
};

TEST(MirrorLink, ASlotIsFreeWhenThePeerAndTheMirrorAreDoneWithIt) {
  for (bool peerFirst : {true, false}) {
    ByHand h;
    End &a = h.pair.a, &b = h.pair.b;
    a.round();
    EXPECT_EQ(h.mirror->issued, 0u) << "nothing has been copied out";
    ByHand::complete(a, LaneDirection::ToHost);
    a.round();
    b.round();
    EXPECT_EQ(h.mirror->issued, 100'001u);
    EXPECT_TRUE(End::finished(h.send));
    End &sooner = peerFirst ? b : a, &later = peerFirst ? a : b;
    ByHand::complete(sooner, LaneDirection::ToDevice);
    for (int i = 0; i < 3; ++i) {
      a.round();
      b.round();
    }
    EXPECT_EQ(h.second->issued, 0u) << "the slot is used again under a copy";
    EXPECT_EQ(End::finished(h.mirror), !peerFirst);
    ByHand::complete(later, LaneDirection::ToDevice);
    for (int i = 0; i < 3; ++i) a.round();
    EXPECT_EQ(h.second->issued, 100'001u);
    EXPECT_TRUE(End::finished(h.mirror));
    EXPECT_EQ(h.own.check(1), "");
    EXPECT_TRUE(h.pair.run([&] { return h.pair.quiet(); }));
    EXPECT_EQ(h.to.check(1), "");
    EXPECT_EQ(h.toNext.check(2), "");
  }
}

TEST(MirrorLink, ALaneThatRefusesTheCopyInIsFatalAndLeavesNothingBusy) {
  ByHand h;
  End& a = h.pair.a;
  a.round();
  for (ManualLane* lane : a.lanes) lane->fail = true;
  ByHand::complete(a, LaneDirection::ToHost);
  a.round();
  ASSERT_EQ(a.fatals.size(), 1u);
  EXPECT_NE(a.fatals[0].find("fake lane refuses"), std::string::npos);
  a.round();
  EXPECT_EQ(h.mirror->copiesInFlight, 0u) << "it waits for a copy that never began";
  EXPECT_EQ(a.inLanes().inFlight, 0u);
  EXPECT_FALSE(a.link.needed());
  EXPECT_EQ(h.own.untouched(), "");
}

TEST(MirrorLink, ALaneThatRefusesTheCopyOutLeavesNothingToMirror) {
  ByHand h;
  End& a = h.pair.a;
  for (ManualLane* lane : a.lanes) lane->fail = true;
  a.round();
  ASSERT_EQ(a.fatals.size(), 1u);
  EXPECT_EQ(h.mirror->issued, 0u);
  EXPECT_FALSE(a.link.needed());
  for (ManualLane* lane : a.lanes) lane->fail = false;
  for (int i = 0; i < 5; ++i) {
    a.round();
    ByHand::complete(a, LaneDirection::ToDevice);
  }
  EXPECT_EQ(h.own.untouched(), "") << "a slot that was never filled";
}

}  // namespace
}  // namespace hoccl
