// Two links joined by a connection inside one thread, over lanes that end their jobs at random
// times: the chunk state machines with everything around them under control. Each edge of both
// machines shows in something the link asks of its surroundings, and is counted there.

#include "common/runtime/link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/fakes.h"
#include "test/unit/link_harness.h"

namespace hoccl {
namespace {

using test::chance;
using test::DeviceBuffer;
using test::Edges;
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

class LinkTest : public ::testing::TestWithParam<Case> {};

TEST_P(LinkTest, EveryByteOfManyTransfersBothWays) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  Rng& rng = pair.rng;
  struct Transfer {
    std::unique_ptr<DeviceBuffer> from, to;
    bool fromA = false;
    std::uint64_t sequence = 0;
    Op *send = nullptr, *receive = nullptr;
    int sendAt = 0, receiveAt = 0;
  };
  std::vector<Transfer> transfers(24);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    Transfer& t = transfers[i];
    const std::uint64_t bytes = oddSize(rng);
    t.from = std::make_unique<DeviceBuffer>(bytes, pick(rng, 0, 31));
    t.to = std::make_unique<DeviceBuffer>(bytes, pick(rng, 0, 31));
    t.fromA = i % 2;
    t.sequence = i;  // numbers of both directions share one space here
    t.from->fill(i);
    t.sendAt = static_cast<int>(pick(rng, 0, 300));
    // Some long before, some long after their send.
    t.receiveAt = std::max(0, t.sendAt + static_cast<int>(pick(rng, 0, 200)) - 100);
  }
  const bool moved = pair.run([&, now = 0]() mutable {
    bool all = true;
    for (Transfer& t : transfers) {
      End &from = t.fromA ? pair.a : pair.b, &to = t.fromA ? pair.b : pair.a;
      if (!t.send && now >= t.sendAt) t.send = from.post(OpKind::Send, t.sequence, *t.from);
      if (!t.receive && now >= t.receiveAt) t.receive = to.post(OpKind::Recv, t.sequence, *t.to);
      all = all && t.send && t.receive && End::finished(t.send) && End::finished(t.receive);
    }
    ++now;
    return all;
  });
  ASSERT_TRUE(moved) << "seed " << seed;
  for (Transfer& t : transfers) EXPECT_EQ(t.to->check(t.sequence), "") << "transfer " << t.sequence;
  EXPECT_TRUE(pair.run([&] { return pair.quiet(); })) << "slots stay busy; seed " << seed;
  EXPECT_FALSE(pair.a.link.holdsEarly());
  EXPECT_FALSE(pair.b.link.holdsEarly());

  const Edges& e = pair.edges;
  const bool shared = GetParam().settings.shared;
  EXPECT_GT(e.announced, transfers.size());
  EXPECT_EQ(shared ? e.copiedShared : e.copiedUnshared, e.announced);
  EXPECT_EQ(shared ? e.copiedUnshared : e.copiedShared, 0u);
  EXPECT_EQ(pair.wire.writesTaken, shared ? 0 : e.announced);  // Sending → HandedOver
  EXPECT_EQ(pair.a.copiesIn() + pair.b.copiesIn(), e.announced);
  EXPECT_EQ(e.copiedIn, e.announced);
  EXPECT_EQ(e.unwanted, 0u);
  EXPECT_EQ(e.mirrored, 0u);
  // HandedOver → Idle: slots were used again, and in the end each credit shows the last turn.
  std::uint64_t reused = 0;
  for (const Staging& staging : pair.wire.staging) {
    for (const Slot& slot : staging.out) {
      EXPECT_EQ(slot.credit->value.load(), slot.ready->value.load());
      reused = std::max<std::uint64_t>(reused, slot.ready->value.load());
    }
  }
  EXPECT_GT(reused, 1u);
  EXPECT_EQ(pair.wire.writesRefused > 0, GetParam().settings.refuse > 0);
  if (GetParam().settings.ringMessages == 1) {
    EXPECT_GT(pair.wire.ringFull, 0u);
  }
}

/// Chunks nobody wants any more go back, whatever state they were caught in.
TEST_P(LinkTest, Rule9DroppedOperationsLeaveNoSlotBusy) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  Rng& rng = pair.rng;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::uint64_t unwantedLater = 0;
  for (std::uint64_t i = 0; i < 30; ++i) {
    const std::uint64_t bytes = oddSize(rng);
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes));
    DeviceBuffer& from = *buffers.back();
    from.fill(i);
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes));
    DeviceBuffer& to = *buffers.back();
    Op* send = pair.a.post(OpKind::Send, i, from);
    Op* receive = chance(rng, 0.7) ? pair.b.post(OpKind::Recv, i, to) : nullptr;
    const int steps = static_cast<int>(pick(rng, 0, 40));
    for (int s = 0; s < steps; ++s) pair.step();
    if (receive && End::finished(send) && End::finished(receive)) {
      EXPECT_EQ(to.check(i), "");
      continue;
    }
    if (receive) pair.b.drop(receive);
    pair.b.over.insert(i);
    pair.a.drop(send);
    pair.b.link.dropEarly(kCommunicator);
    unwantedLater += 1;
    // Once the copies that were under way have ended, nothing of it moves any more.
    ASSERT_TRUE(pair.run([&] { return pair.quiet(); })) << "seed " << seed << " operation " << i;
    EXPECT_EQ(to.checkGuards(), "");
    EXPECT_EQ(send->copiesInFlight, 0u);
    if (receive) {
      EXPECT_EQ(receive->copiesInFlight, 0u);
    }
  }
  EXPECT_GT(unwantedLater, 0u);
  // One that is surely caught as announced: its receiver says Ready and is gone when the send
  // comes.
  DeviceBuffer lost(400'001), never(400'001);
  Op* receive = pair.b.post(OpKind::Recv, 50, never);
  for (int i = 0; i < 50; ++i) pair.step();
  pair.b.drop(receive);
  Op* lostSend = pair.a.post(OpKind::Send, 50, lost);
  ASSERT_TRUE(lostSend->matched);
  ASSERT_TRUE(pair.run([&] { return End::finished(lostSend) && pair.quiet(); })) << "seed " << seed;
  EXPECT_EQ(never.untouched(), "");
  // Announced → Idle was seen: credits were given without a copy.
  EXPECT_LT(pair.a.copiesIn() + pair.b.copiesIn(), pair.edges.announced);
  // And the link still works.
  DeviceBuffer from(300'001), to(300'001);
  from.fill(99);
  Op* send = pair.a.post(OpKind::Send, 99, from);
  Op* last = pair.b.post(OpKind::Recv, 99, to);
  ASSERT_TRUE(pair.run([&] { return End::finished(send) && End::finished(last); }));
  EXPECT_EQ(to.check(99), "");
}

/// A receiver that never comes must not hold up another flow on the same link.
TEST_P(LinkTest, Rule7AReceiverThatNeverComesHoldsUpNobody) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  auto buffer = [&](std::uint64_t bytes) -> DeviceBuffer& {
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes));
    return *buffers.back();
  };
  // More unmatched sends than there are slots, each of many chunks.
  for (std::uint64_t i = 0; i < 10; ++i) pair.a.post(OpKind::Send, i, buffer(1'000'001));
  for (int i = 0; i < 200; ++i) pair.step();
  EXPECT_LE(pair.edges.announced, GetParam().settings.slots / 2);
  for (std::uint64_t i = 100; i < 106; ++i) {
    DeviceBuffer &from = buffer(400'003), &to = buffer(400'003);
    from.fill(i);
    Op* send = pair.a.post(OpKind::Send, i, from);
    Op* receive = pair.b.post(OpKind::Recv, i, to);
    ASSERT_TRUE(pair.run([&] { return End::finished(send) && End::finished(receive); }))
        << "operation " << i << " is stuck behind one whose receiver does not come; seed " << seed;
    EXPECT_EQ(to.check(i), "");
  }
  // When they do come in the end, whatever lay here early is theirs.
  for (auto& [sequence, send] : pair.a.sends) {
    if (sequence >= 100) continue;
    pair.b.post(OpKind::Recv, sequence, buffer(1'000'001));
  }
  ASSERT_TRUE(pair.run([&] {
    return std::all_of(pair.b.receives.begin(), pair.b.receives.end(),
                       [](auto& entry) { return End::finished(entry.second); });
  }));
  EXPECT_TRUE(pair.run([&] { return pair.quiet(); }));
}

INSTANTIATE_TEST_SUITE_P(
    All, LinkTest,
    ::testing::Values(
        Case{"Shared", {}, 3}, Case{"SharedOneSlot", {.slots = 1}, 3},
        Case{"SharedDepthOne", {.slots = 8}, 1}, Case{"SharedRingOfTwo", {.ringMessages = 2}, 3},
        Case{"SharedRingOfOne", {.ringMessages = 1}, 3},
        Case{"Separate", {.shared = false, .refuse = 0.5, .late = 0.3}, 3},
        Case{"SeparateOneSlot", {.slots = 1, .shared = false, .refuse = 0.5, .late = 0.3}, 2},
        Case{"SeparateRingOfTwo",
             {.ringMessages = 2, .shared = false, .refuse = 0.2, .late = 0.2},
             3}),
    [](const ::testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

TEST(Link, EarlyBytesAreCountedByOperation) {
  Pair pair({}, 1);
  DeviceBuffer first(100'000), second(70'000), to(100'000);
  first.fill(0);
  pair.a.post(OpKind::Send, 0, first);
  pair.a.post(OpKind::Send, 1, second);
  ASSERT_TRUE(pair.run([&] { return pair.edges.announced == 2; }));
  EXPECT_EQ(pair.b.link.earlyBytes(kCommunicator, 0, 0), 100'000u);
  EXPECT_EQ(pair.b.link.earlyBytes(kCommunicator, 0, 1), 70'000u);
  EXPECT_EQ(pair.b.link.earlyBytes(kCommunicator, 0, 2), 0u);
  EXPECT_EQ(pair.b.link.earlyBytes(kCommunicator + 1, 0, 0), 0u);
  EXPECT_TRUE(pair.b.link.holdsEarly());
  Op* receive = pair.b.post(OpKind::Recv, 0, to);
  ASSERT_TRUE(pair.run([&] { return End::finished(receive); }));
  EXPECT_EQ(to.check(0), "");
  EXPECT_EQ(pair.b.link.earlyBytes(kCommunicator, 0, 0), 0u);
  pair.b.link.dropEarly(kCommunicator);
  EXPECT_FALSE(pair.b.link.holdsEarly());
  EXPECT_TRUE(pair.run([&] { return pair.quiet(); }));
}

/// What ends something and finds no room is nudged for again when it goes.
TEST(Link, MessagesWithoutRoomAreNudgedForWhenTheyGo) {
  Pair pair({.ringMessages = 2}, 1);
  FakeWire::End there(&pair.wire, 1);
  Message failed{};
  failed.type = MessageType::Failed;
  for (int i = 0; i < 3; ++i) pair.a.link.send(failed);
  EXPECT_EQ(pair.wire.messages[0].size(), 2u);
  pair.wire.nudgedFor[0] = 0;
  EXPECT_FALSE(pair.a.link.progress()) << "no room, and nobody to be woken again and again";
  EXPECT_EQ(pair.wire.nudgedFor[0], 0u);
  Message taken{};
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(there.tryReceive(&taken));
  EXPECT_TRUE(pair.a.link.progress());
  EXPECT_EQ(pair.wire.nudgedFor[0], 1u) << "for the third, which lies there now";
}

TEST(Rule10, AnAnnouncementThatContradictsTheSlotIsRefused) {
  Pair pair({}, 1);
  const Message good = test::ScriptedPeer::chunk(kCommunicator, 1, 0, 0, 1, 100'000, 0, 70'000);
  auto changed = [&](const std::function<void(Message&)>& change) {
    Message m = good;
    change(m);
    return m;
  };
  Link& link = pair.a.link;
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.slot = 4; })));
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.slot = ~0u; })));
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.turn = 0; })));
  EXPECT_FALSE(link.announce(changed([](Message& m) {
    m.length = (128 << 10) + 1;
    m.bytes = 1 << 20;
  })));
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.offset = 100'001; })));
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.offset = 30'001; })));
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.offset = ~0ull; })));
  EXPECT_FALSE(link.holdsEarly()) << "a refused message changes nothing";
  EXPECT_TRUE(link.announce(good));
  EXPECT_FALSE(link.announce(good)) << "the slot is taken";
  EXPECT_FALSE(link.announce(changed([](Message& m) { m.turn = 2; })));
}

TEST(Rule9, ADeadPeersAnnouncementsThatCannotComeAreNamed) {
  Pair pair({}, 1);
  DeviceBuffer whole(70'000), torn(200'001);
  Op* fine = pair.a.post(OpKind::Recv, 0, whole);
  Op* broken = pair.a.post(OpKind::Recv, 1, torn);
  Staging& there = pair.wire.staging[1];
  auto announce = [&](std::uint32_t slot, std::uint64_t sequence, std::uint64_t bytes,
                      std::uint64_t offset, std::uint64_t length, bool arrived) {
    ASSERT_TRUE(pair.a.link.announce(
        test::ScriptedPeer::chunk(kCommunicator, 1, 0, sequence, slot, bytes, offset, length)));
    if (arrived) there.out[slot].ready->set(1);
  };
  announce(0, 0, 70'000, 0, 70'000, true);
  announce(1, 1, 200'001, 0, 100'000, true);
  announce(2, 1, 200'001, 100'000, 100'001, false);
  announce(3, 9, 70'000, 0, 70'000, false);  // early and torn
  std::vector<Op*> lost;
  pair.a.link.abandonPeer(&lost);
  EXPECT_TRUE(pair.a.link.abandoned());
  EXPECT_EQ(lost, std::vector<Op*>{broken});
  EXPECT_FALSE(pair.a.link.holdsEarly());
  for (Op* op : lost) pair.a.drop(op);
  EXPECT_TRUE(pair.run([&] { return End::finished(fine) && !pair.a.link.copying(); }));
  for (int i = 0; i < 50; ++i) pair.step();
  EXPECT_TRUE(pair.a.link.quiet()) << "every slot is taken back";
}

TEST(Link, ALaneThatRefusesIsFatalAndNothingPassesForArrived) {
  Pair pair({}, 1);
  DeviceBuffer from(70'001), to(70'001);
  Op* receive = pair.b.post(OpKind::Recv, 0, to);
  for (ManualLane* lane : pair.a.lanes) lane->fail = true;
  Op* send = pair.a.post(OpKind::Send, 0, from);
  pair.a.round();
  ASSERT_EQ(pair.a.fatals.size(), 1u);
  EXPECT_NE(pair.a.fatals[0].find("fake lane refuses"), std::string::npos);
  pair.a.round();
  EXPECT_EQ(send->copiesInFlight, 0u)
      << "an operation that waits for a copy that never began hangs";
  EXPECT_EQ(pair.a.outLanes().inFlight, 0u);
  // The chunk was announced before; its slot holds whatever lay there.
  EXPECT_FALSE(pair.run([&] { return End::finished(receive); }, 1000))
      << "the receiver takes a slot that was never filled";
  EXPECT_EQ(to.untouched(), "");
}

TEST(Link, AReceivingLaneThatRefusesIsFatal) {
  Pair pair({}, 1);
  DeviceBuffer from(70'001), to(70'001);
  for (ManualLane* lane : pair.b.lanes) lane->fail = true;
  Op* receive = pair.b.post(OpKind::Recv, 0, to);
  Op* send = pair.a.post(OpKind::Send, 0, from);
  EXPECT_TRUE(pair.run([&] { return !pair.b.fatals.empty() && End::finished(send); }));
  for (int i = 0; i < 100; ++i) pair.step();
  EXPECT_EQ(receive->copiesInFlight, 0u);
  EXPECT_EQ(pair.b.inLanes().inFlight, 0u);
  EXPECT_TRUE(pair.a.link.quiet()) << "the sender's slot comes back";
}

}  // namespace
}  // namespace hoccl
