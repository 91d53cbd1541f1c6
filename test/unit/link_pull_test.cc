// Sends that are lent to the peer (docs/direct.md) in the chunk tables of two links, over lanes
// that end their jobs at random times or when the test says so.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/runtime/link.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/link_harness.h"

namespace hoccl {
namespace {

using test::chance;
using test::DeviceBuffer;
using test::End;
using test::FakeWire;
using test::oddSize;
using test::Pair;
using test::pick;
using test::Rng;
using test::testSeed;

constexpr std::uint64_t kBytes = 300'001;

struct Case {
  const char* name;
  FakeWire::Settings settings;
  std::uint32_t depth;
  double refuses;
};

class LinkPull : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    All, LinkPull,
    ::testing::Values(Case{"Plain", {}, 3, 0}, Case{"Refusing", {}, 3, 0.5},
                      Case{"OneSlotDepthOne", {.slots = 1}, 1, 0.3},
                      Case{"ManySlotsDepthOne", {.slots = 8}, 1, 0.3},
                      Case{"RingOfTwo", {.ringMessages = 2}, 3, 0.3},
                      Case{"RingOfOne", {.slots = 2, .ringMessages = 1}, 2, 0.5}),
    [](const auto& info) { return std::string(info.param.name); });

/// Lent and staged ones in turn in the same slots, both ways.
TEST_P(LinkPull, EveryByteOfManyTransfersBothWays) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  pair.a.refuses = pair.b.refuses = GetParam().refuses;
  struct Transfer {
    std::unique_ptr<DeviceBuffer> from, to;
    bool fromA = false, lent = false;
    Op *send = nullptr, *receive = nullptr;
    int sendAt = 0, receiveAt = 0;
  };
  std::vector<Transfer> transfers(40);
  std::uint64_t lent = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    Transfer& t = transfers[i];
    const std::uint64_t bytes = oddSize(pair.rng);
    t.from = std::make_unique<DeviceBuffer>(bytes, pick(pair.rng, 0, 31));
    t.to = std::make_unique<DeviceBuffer>(bytes, pick(pair.rng, 0, 31));
    t.fromA = i % 2;
    t.lent = chance(pair.rng, 0.7);
    lent += t.lent;
    t.from->fill(i);
    t.sendAt = static_cast<int>(pick(pair.rng, 0, 300));
    t.receiveAt = std::max(0, t.sendAt + static_cast<int>(pick(pair.rng, 0, 200)) - 100);
  }
  const bool moved = pair.run([&, now = 0]() mutable {
    bool all = true;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      Transfer& t = transfers[i];
      End &from = t.fromA ? pair.a : pair.b, &to = t.fromA ? pair.b : pair.a;
      if (!t.send && now >= t.sendAt) {
        t.send = t.lent ? from.lend(i, *t.from) : from.post(OpKind::Send, i, *t.from);
      }
      if (!t.receive && now >= t.receiveAt) t.receive = to.post(OpKind::Recv, i, *t.to);
      // What is the application's again may have other bytes.
      if (t.send && End::finished(t.send) && t.lent && !t.send->copiesInFlight) {
        t.from->fill(1000 + i);
        t.lent = false;
      }
      all = all && t.send && t.receive && End::finished(t.send) && End::finished(t.receive);
    }
    ++now;
    return all;
  });
  ASSERT_TRUE(moved) << "seed " << seed;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    EXPECT_EQ(transfers[i].to->check(i), "") << "transfer " << i << ", seed " << seed;
  }
  EXPECT_TRUE(pair.run([&] { return pair.quiet(); })) << "slots stay busy; seed " << seed;
  EXPECT_EQ(pair.edges.lent, lent);
  EXPECT_EQ(pair.edges.returned + pair.edges.refused, lent);
  EXPECT_EQ(pair.edges.refused > 0, GetParam().refuses > 0);
  for (End* end : {&pair.a, &pair.b}) {
    EXPECT_FALSE(end->link.lends());
    EXPECT_FALSE(end->link.peerCopies());
    EXPECT_EQ(end->peerLanes().inFlight + end->inLanes().inFlight + end->outLanes().inFlight, 0u);
  }
}

/// Aborts of either side or of both, whatever state what is lent was caught in.
TEST_P(LinkPull, Rule9DroppedOperationsLeaveNoSlotBusy) {
  const std::uint32_t seed = testSeed();
  Pair pair(GetParam().settings, seed, GetParam().depth);
  pair.a.refuses = pair.b.refuses = GetParam().refuses;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  for (std::uint64_t i = 0; i < 200; ++i) {
    const std::uint64_t bytes = oddSize(pair.rng);
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes));
    DeviceBuffer& from = *buffers.back();
    from.fill(i);
    buffers.push_back(std::make_unique<DeviceBuffer>(bytes));
    DeviceBuffer& to = *buffers.back();
    Op* send = pair.a.lend(i, from);
    Op* receive = pair.b.post(OpKind::Recv, i, to);
    for (std::uint64_t n = pick(pair.rng, 0, 40); n > 0; --n) pair.step();
    const std::uint64_t who = pick(pair.rng, 0, 2);
    if (who != 0) pair.a.drop(send);
    for (std::uint64_t n = pick(pair.rng, 0, 5); n > 0; --n) pair.step();
    if (who != 1) pair.b.drop(receive);
    ASSERT_TRUE(pair.run([&] { return pair.quiet(); })) << "seed " << seed << " operation " << i;
    if (!receive->failed && End::finished(receive)) {
      EXPECT_EQ(to.check(i), "");
    } else if (!receive->failed) {
      pair.b.drop(receive);  // as the sender's failure does
    }
    if (!send->failed && !End::finished(send)) pair.a.drop(send);
    ASSERT_TRUE(pair.run([&] { return pair.quiet(); })) << "seed " << seed << " operation " << i;
    EXPECT_EQ(to.checkGuards(), "");
    EXPECT_EQ(send->copiesInFlight + receive->copiesInFlight, 0u);
  }
  DeviceBuffer from(kBytes), to(kBytes);
  from.fill(99);
  Op* send = pair.a.lend(999, from);
  Op* last = pair.b.post(OpKind::Recv, 999, to);
  ASSERT_TRUE(pair.run([&] { return End::finished(send) && End::finished(last); }));
  EXPECT_EQ(to.check(99), "") << "and the link still works";
}

/// One way by hand: `a` has lent, `b` has submitted its copy.
struct Reading {
  explicit Reading(std::uint32_t depth = 3) : pair({}, 1, depth) {
    from.fill(1);
    receive = pair.b.post(OpKind::Recv, 0, to);
    send = pair.a.lend(0, from);
    for (int i = 0; i < 1000 && !pair.b.link.copying(); ++i) {
      pair.a.round();
      pair.b.round();
    }
    EXPECT_TRUE(pair.b.link.copying());
  }
  /// The copies of `b` end, and it looks.
  void read() {
    for (test::ManualLane* lane : pair.b.lanes) {
      while (lane->completeOne()) {
      }
    }
    pair.b.round();
  }
  [[nodiscard]] Flag& ready() { return *pair.wire.staging[0].out[slot()].ready; }
  [[nodiscard]] std::uint32_t slot() {
    for (std::uint32_t i = 0;; ++i) {
      if (pair.wire.staging[0].out[i].credit->value.load() > 0) return i;
    }
  }
  DeviceBuffer from{kBytes}, to{kBytes};
  Pair pair;
  Op *send = nullptr, *receive = nullptr;
};

/// A stopped sender's mover keeps the receive waiting, but not a lane (rule 7).
TEST(LinkPull, Rule7ACopyThatHasEndedLeavesItsLane) {
  Reading r(1);
  EXPECT_EQ(r.pair.b.peerLanes().inFlight, 1u);
  r.read();
  EXPECT_FALSE(End::finished(r.receive)) << "the sender has not said that it has held the bytes";
  EXPECT_EQ(r.pair.b.peerLanes().inFlight, 0u);
  EXPECT_FALSE(r.pair.b.link.copying());
  r.pair.a.round();
  r.pair.b.round();
  EXPECT_TRUE(End::finished(r.send) && End::finished(r.receive));
  EXPECT_EQ(r.to.check(1), "");
}

/// The peer dies between this side's last look at its credit and the end of the link.
TEST(LinkPull, Rule9AReadLoanOfADeadPeerKeepsTheLinkUntilItIsSeen) {
  Reading r;
  r.read();
  std::vector<Op*> torn;
  r.pair.a.link.abandonPeer(&torn);
  EXPECT_FALSE(End::finished(r.send));
  EXPECT_TRUE(r.pair.a.link.needed()) << "the send would never end";
  r.pair.a.round();
  EXPECT_TRUE(End::finished(r.send));
  EXPECT_FALSE(r.pair.a.link.needed());
}

TEST(LinkPull, Rule9WhatADeadPeerHasNotReadIsTakenBack) {
  Reading r;
  std::vector<Op*> torn;
  r.pair.a.link.abandonPeer(&torn);
  EXPECT_EQ(r.send->copiesInFlight, 0u);
  EXPECT_FALSE(End::finished(r.send));
  EXPECT_FALSE(r.pair.a.link.needed());
}

TEST(LinkPull, Rule9ADeadSendersBytesAreTornUntilItHasSaidThatItHeldThem) {
  for (const bool held : {false, true}) {
    SCOPED_TRACE(held);
    Reading r;
    r.read();
    if (held) r.pair.a.round();
    std::vector<Op*> torn;
    r.pair.b.link.abandonPeer(&torn);
    EXPECT_EQ(torn.size(), held ? 0u : 1u);
    for (Op* op : torn) op->failed = true;
    r.pair.b.round();
    EXPECT_EQ(End::finished(r.receive), held);
    EXPECT_EQ(r.receive->copiesInFlight, 0u);
    EXPECT_FALSE(r.pair.b.link.needed());
  }
}

TEST(LinkPull, Rule9WhatIsStillToBeMappedIsTornWhenTheSenderDies) {
  Pair pair({}, 1);
  DeviceBuffer from(kBytes), to(kBytes);
  pair.b.imports = End::Imports::Never;
  Op* receive = pair.b.post(OpKind::Recv, 0, to);
  pair.a.lend(0, from);
  for (int i = 0; i < 10; ++i) {
    pair.a.round();
    pair.b.round();
  }
  ASSERT_EQ(receive->announced, kBytes);
  std::vector<Op*> torn;
  pair.b.link.abandonPeer(&torn);
  EXPECT_EQ(torn, std::vector<Op*>{receive});
  pair.b.drop(receive);
  pair.b.round();
  EXPECT_EQ(receive->copiesInFlight, 0u);
  EXPECT_FALSE(pair.b.link.needed());
  EXPECT_EQ(to.untouched(), "");
}

/// A sender that has given a loan up uses the slot again; the flags overtake its messages.
TEST(LinkPull, Rule9ALaterUseOfTheSlotDoesNotPassForTheSendersWord) {
  for (const bool failed : {false, true}) {
    SCOPED_TRACE(failed);
    Reading r;
    r.read();
    const std::uint32_t slot = r.slot();
    r.ready().set(2);
    r.pair.b.round();
    EXPECT_FALSE(End::finished(r.receive));
    if (failed) r.receive->failed = true;  // as it has told before it used the slot
    Message next{};
    next.type = MessageType::Chunk;
    next.communicator = test::kCommunicator;
    next.destination = 1;
    next.pairSequence = 7;
    next.slot = slot;
    next.bytes = next.length = 70'000;
    next.turn = 2;
    EXPECT_TRUE(r.pair.b.link.announce(next));
    EXPECT_EQ(End::finished(r.receive), !failed);
    EXPECT_EQ(r.receive->copiesInFlight, 0u);
  }
}

TEST(LinkPull, Rule9WhatWasGivenUpIsNotSaidToHaveBeenHeld) {
  Reading r;
  r.pair.a.drop(r.send);
  r.pair.a.link.giveUp(r.send);
  r.read();
  r.pair.a.round();
  EXPECT_FALSE(r.ready().reached(1));
  EXPECT_TRUE(r.pair.a.link.quiet()) << "but the slot comes back";
  r.pair.b.round();
  EXPECT_FALSE(End::finished(r.receive));
}

/// What is lent or not needs no lane of this side.
TEST(LinkPull, Rule7BusyLanesHoldNoLoanUp) {
  Pair pair({.slots = 8}, 1, 1);
  DeviceBuffer staged(kBytes), from(kBytes), to(kBytes);
  pair.a.post(OpKind::Send, 0, staged);
  pair.a.round();
  ASSERT_FALSE(pair.a.outLanes().room());
  pair.a.peerLanes().inFlight = pair.a.peerLanes().depth;
  pair.b.post(OpKind::Recv, 1, to);
  pair.a.lend(1, from);
  pair.a.round();
  EXPECT_TRUE(pair.a.link.lends());
}

/// Until the memory is mapped here; meanwhile others pass.
TEST(LinkPull, Rule7AnImportThatTakesLongHoldsUpNoOther) {
  Pair pair({}, 1, 1);
  DeviceBuffer from(kBytes), to(kBytes), from2(kBytes), to2(kBytes);
  pair.b.imports = End::Imports::Never;
  Op* receive = pair.b.post(OpKind::Recv, 0, to);
  pair.a.lend(0, from);
  for (int i = 0; i < 200; ++i) pair.step();
  EXPECT_EQ(pair.edges.lent, 1u);
  EXPECT_EQ(pair.b.peerLanes().inFlight, 0u) << "it reads from memory that is not mapped";
  from2.fill(2);
  Op* send = pair.a.post(OpKind::Send, 1, from2);
  Op* other = pair.b.post(OpKind::Recv, 1, to2);
  ASSERT_TRUE(pair.run([&] { return End::finished(send) && End::finished(other); }));
  EXPECT_EQ(to2.check(2), "");
  pair.b.imports = End::Imports::AtRandom;
  from.fill(3);
  ASSERT_TRUE(pair.run([&] { return End::finished(receive) && pair.quiet(); }));
  EXPECT_EQ(to.check(3), "");
}

TEST(LinkPull, Rule10ARefusalOfAnotherTurnIsNonsense) {
  Reading r;
  Message refusal{};
  refusal.type = MessageType::Refused;
  for (std::uint32_t slot = 0; slot < 4; ++slot) {
    for (const std::uint64_t turn : {0, 2}) {
      refusal.slot = slot;
      refusal.turn = turn;
      EXPECT_FALSE(r.pair.a.link.takeBack(refusal)) << slot << " " << turn;
    }
  }
}

}  // namespace
}  // namespace hoccl
