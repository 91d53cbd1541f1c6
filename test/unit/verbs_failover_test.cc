// Queue pairs and NICs that fail under a verbs connection: what is under way arrives all the same,
// once and in order, over what is left; what works again is used again; with nothing left the error
// says what was.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "test/unit/verbs_harness.h"

namespace hoccl {
namespace {

using test::chance;
using test::FakeFabric;
using test::FakeQp;
using test::FakeSend;
using test::Rng;
using test::testSeed;
using Fate = FakeFabric::Fate;

class VerbsFailoverTest : public test::VerbsPairTest {
 protected:
  /// That fate for the `nth` request of a queue pair of that device, once.
  void disturbOnce(const test::FakeDevice& device, Fate what, int nth) {
    fabric_.atomically([&] {
      fabric_.fate = [&device, what, nth, count = 0](const FakeQp& qp, const FakeSend&) mutable {
        return qp.device == &device && count++ == nth ? what : Fate::Arrives;
      };
    });
  }
};

TEST_F(VerbsFailoverTest, WithoutFailuresEverythingArrives) {
  addNics(2);
  join();
  EXPECT_EQ(a_->paths().size(), 8u);
  run(200, 2000);
  EXPECT_TRUE(idleUntil([&] { return a_->drained() && b_->drained(); }));
  EXPECT_EQ(a_->pathsUp(), 8u);
  EXPECT_EQ(b_->pathsUp(), 8u);
  EXPECT_FALSE(a_->busy());
  EXPECT_FALSE(b_->busy());
}

TEST_F(VerbsFailoverTest, AFailingQueuePairIsTakenOutAndComesBack) {
  for (const Fate what : {Fate::Lost, Fate::AckLost}) {
    for (const int nth : {0, 1, 40, 97}) {
      TearDown();
      addNics(1);
      join();
      ASSERT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
      disturbOnce(*fabric_.hosts[0][0], what, nth);
      std::size_t fewest = 8;
      run(60, 300, [&] { fewest = std::min(fewest, a_->pathsUp()); });
      EXPECT_EQ(fewest, 3u) << "no queue pair was out";
      EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
      run(60, 300);
    }
  }
}

TEST_F(VerbsFailoverTest, ACutRailLeavesTheOther) {
  addNics(2);
  join();
  test::FakeDevice& first = *fabric_.hosts[1][0];
  int steps = 0;
  run(100, 1000, [&] {
    if (++steps == 50) fabric_.atomically([&] { first.cut = true; });
  });
  EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
  run(50, 500);
  fabric_.atomically([&] { first.cut = false; });
  EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 8 && b_->pathsUp() == 8; }));
  run(50, 500);
}

TEST_F(VerbsFailoverTest, IdlePathsOfACutRailAreFoundByTheFirstFailure) {
  addNics(2);
  join();
  ASSERT_TRUE(idleUntil([&] { return a_->pathsUp() == 8 && b_->pathsUp() == 8; }));
  fabric_.atomically([&] { fabric_.hosts[0][0]->cut = true; });
  Message message{};
  ASSERT_TRUE(a_->trySend(message));  // over the first path
  EXPECT_TRUE(test::waitUntil([&] {
    tend(*a_);
    tend(*b_);
    (void)a_->tryReceive(&message);
    (void)b_->tryReceive(&message);
    return a_->pathsUp() == 4 && b_->pathsUp() == 4;
  }));
}

// A link that flaps, or a host that stood still, fails all queue pairs at once.
TEST_F(VerbsFailoverTest, AFlapOfAllRailsIsSurvived) {
  for (const int nics : {1, 2}) {
    TearDown();
    addNics(nics);
    join();
    for (const int at : {1, 30, 90}) {
      int steps = 0;
      bool gone = false;
      run(100, 1000, [&] {
        const bool cut = ++steps >= at && !gone;
        if (cut && a_->pathsUp() == 0 && b_->pathsUp() == 0) gone = true;
        fabric_.atomically([&] {
          for (auto& device : fabric_.hosts[1]) device->cut = cut && !gone;
        });
      });
      EXPECT_TRUE(gone) << "some queue pair was left";
      const auto all = static_cast<std::size_t>(4 * nics);
      EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == all && b_->pathsUp() == all; }));
    }
  }
}

TEST_F(VerbsFailoverTest, WithNothingLeftTheReasonNamesDevicesAddressesQueuePairAndStatus) {
  addNics(2);
  settingsA_.lastChanceMs = settingsB_.lastChanceMs = 200;
  join();
  run(10, 10);
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[0]) device->cut = true;
  });
  ASSERT_TRUE(a_->tryWrite(0, 100'000, a_->staging().in[0].credit->value.load() + 1000));
  EXPECT_TRUE(test::waitUntil([&] {
    for (VerbsConnection* each : {a_.get(), b_.get()}) {
      tend(*each);
      Message none;
      (void)each->trySend(none);
      (void)each->tryReceive(&none);
    }
    return a_->peerGone() && b_->peerGone();
  }));
  const std::string why = a_->goneReason();
  // Whichever side saw the last one fail: 0x81 at this one, 0x82 at the other.
  for (const char* part : {"left_", "right_", "GID 10.0.", "queue pair 0x", "status 12",
                           "vendor error 0x8", "retry counter exceeded"}) {
    EXPECT_NE(why.find(part), std::string::npos) << part << " in: " << why;
  }
  EXPECT_FALSE(b_->goneReason().empty());
}

TEST_F(VerbsFailoverTest, NicPairsThatDoNotReachEachOtherAreLeftOut) {
  addNics(2);
  fabric_.hosts[0][0]->cut = true;
  join();
  EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
  run(50, 500);
}

TEST_F(VerbsFailoverTest, Rule10NoNicPairThatReachesEachOther) {
  addNics(1);
  fabric_.hosts[1][0]->cut = true;
  handshake();
  for (Handshake* side : {asking_.get(), answering_.get()}) {
    ASSERT_EQ(side->advance(), Handshake::State::Failed);
    const std::string why = side->status().message();
    EXPECT_NE(why.find("HOCCL_IB_HCA"), std::string::npos) << why;
    EXPECT_NE(why.find("left_0"), std::string::npos) << why;
    EXPECT_NE(why.find("right_0"), std::string::npos) << why;
  }
}

TEST_F(VerbsFailoverTest, TheSmallerNumbersOfNicsAndQueuePairsAreUsed) {
  addNics(2);
  fabric_.hosts[1].pop_back();
  settingsA_.qpsPerPeer = 3;
  settingsB_.qpsPerPeer = 2;
  join();
  EXPECT_EQ(a_->paths().size(), 2u);
  EXPECT_EQ(b_->paths().size(), 2u);
  run(50, 500);
}

TEST_F(VerbsFailoverTest, NoMoreThan64Paths) {
  addNics(8);
  settingsA_.qpsPerPeer = settingsB_.qpsPerPeer = 16;
  join();
  EXPECT_EQ(a_->paths().size(), 64u);
  run(40, 100);
}

TEST_F(VerbsFailoverTest, SmallQueuesAndNoInlineOnlyTakeLonger) {
  addNics(1);
  for (int host : {0, 1}) {
    fabric_.hosts[host][0]->mostRequests = 16;
    fabric_.hosts[host][0]->mostInline = 0;
    fabric_.hosts[host][0]->mostCompletions = 200;
  }
  join();
  run(50, 2000);
}

TEST_F(VerbsFailoverTest, QueuesOfAFewReceivesAreFilledInTime) {
  addNics(1);
  for (int host : {0, 1}) fabric_.hosts[host][0]->mostRequests = 8;
  join();
  run(20, 500);
}

// The peer's end is an error soon, however long new queue pairs would be tried.
TEST_F(VerbsFailoverTest, APeerThatEndsWhileNewQueuePairsAreTriedIsNotWaitedFor) {
  addNics(2);
  settingsA_.lastChanceMs = settingsB_.lastChanceMs = 10 * test::kPatienceMs;
  join();
  run(10, 10);
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[0]) device->cut = true;
  });
  Message message{};
  ASSERT_TRUE(a_->trySend(message));
  ASSERT_TRUE(test::waitUntil([&] {
    for (VerbsConnection* each : {a_.get(), b_.get()}) {
      tend(*each);
      (void)each->tryReceive(&message);
    }
    return a_->pathsUp() == 0 && b_->pathsUp() == 0;
  }));
  EXPECT_FALSE(a_->peerGone());
  b_.reset();
  EXPECT_TRUE(test::waitUntil(
      [&] {
        tend(*a_);
        (void)a_->tryReceive(&message);
        return a_->peerGone();
      },
      5000));
}

TEST_F(VerbsFailoverTest, WithAdaptiveRoutingTheWordGoesByItself) {
  addNics(1);
  settingsA_.adaptiveRouting = settingsB_.adaptiveRouting = VerbsSettings::Choice::On;
  join();
  std::atomic<int> bodies{0}, large{0};
  fabric_.atomically([&] {
    fabric_.fate = [&](const FakeQp&, const FakeSend& send) {
      if (send.opcode == IBV_WR_RDMA_WRITE) ++bodies;
      if (send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && send.bytes > 8192) ++large;
      return Fate::Arrives;
    };
  });
  run(50, 100);
  EXPECT_GT(bodies, 0);
  EXPECT_EQ(large, 0);
  disturbOnce(*fabric_.hosts[0][0], Fate::Lost, 20);
  run(50, 100);
}

TEST_F(VerbsFailoverTest, WithAdaptiveRoutingTwoRequestsAPieceFitTheQueue) {
  addNics(1);
  settingsA_.adaptiveRouting = settingsB_.adaptiveRouting = VerbsSettings::Choice::On;
  for (int host : {0, 1}) fabric_.hosts[host][0]->mostRequests = 16;
  join();
  run(200, 5000);
  for (const auto* end : {a_.get(), b_.get()}) {
    for (const Path& path : end->paths()) EXPECT_EQ(path.generation, 1u) << path.problem;
  }
}

TEST_F(VerbsFailoverTest, AnyFailuresInAnyOrder) {
  Rng rng(testSeed());
  for (int round = 0; round < 6; ++round) {
    TearDown();
    addNics(2);
    fabric_.purgeOnDestroy = round % 2 == 0;
    join();
    // One queue pair of the second rail stays, so that there is always a way.
    const std::uint32_t spared = a_->paths()[7].pair.number(), other = b_->paths()[7].pair.number();
    fabric_.atomically([&] {
      fabric_.fate = [&, chances = Rng(rng())](const FakeQp& qp, const FakeSend&) mutable {
        if (chance(chances, 0.05)) return Fate::Held;
        if (qp.qp_num == spared || qp.qp_num == other) return Fate::Arrives;
        return chance(chances, 0.004)   ? Fate::Lost
               : chance(chances, 0.004) ? Fate::AckLost
                                        : Fate::Arrives;
      };
    });
    std::size_t fewest = 8, most = 0;
    bool mended = false;
    run(400, 3000, [&] {
      fewest = std::min(fewest, a_->pathsUp());
      for (const Path& path : a_->paths()) mended = mended || path.generation > 1;
      most = std::max(most, a_->pathsUp());
    });
    EXPECT_LT(fewest, 7u);
    fabric_.atomically([&] { fabric_.fate = nullptr; });
    EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 8 && b_->pathsUp() == 8; }));
    run(20, 100);
  }
}

// What a failed queue pair carried may have to go again: this side does not end before it knows.
TEST_F(VerbsFailoverTest, TheLastWordsGoAgainWhenTheirQueuePairFails) {
  addNics(1);
  join();
  ASSERT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
  disturbOnce(*fabric_.hosts[0][0], Fate::Lost, 0);
  Message message{};
  message.bytes = 7;
  ASSERT_TRUE(a_->trySend(message));
  bool heard = false;
  std::atomic<bool> over{false};
  std::thread peer([&] {
    // Once more when the sender has ended: what it has sent is here by then.
    for (bool last = false; !heard && !last;) {
      last = over;
      tend(*b_);
      Message got;
      if (b_->tryReceive(&got)) heard = got.bytes == 7;
      std::this_thread::yield();
    }
  });
  a_.reset();
  over = true;
  peer.join();
  EXPECT_TRUE(heard);
}

TEST_F(VerbsFailoverTest, ASleepingMoverHearsOfAFailureAndANudge) {
  addNics(1);
  join();
  ASSERT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
  EXPECT_TRUE(idleUntil([&] { return !a_->busy() && !b_->busy(); }));
  // b looks only when its descriptor says so, or while it is busy.
  const auto sleeper = [&] {
    pollfd fd{b_->watchFd(), POLLIN, 0};
    const bool rung = ::poll(&fd, 1, 0) > 0;
    if (rung) b_->watch();
    Message message;
    if (rung || b_->busy()) return b_->tryReceive(&message);
    return false;
  };
  disturbOnce(*fabric_.hosts[0][0], Fate::Lost, 0);
  Message message{};
  ASSERT_TRUE(a_->trySend(message));
  a_->nudge();
  Message none;
  EXPECT_TRUE(test::waitUntil([&] {
    tend(*a_);
    (void)a_->tryReceive(&none);
    return sleeper();
  }));
}

}  // namespace
}  // namespace hoccl
