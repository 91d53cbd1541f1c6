// Random schedules of everything that may happen to a verbs connection's queue pairs at once, as in
// verbs_link_storm_test.cc: slots and messages arrive all the same, once, in order, with every byte
// right; NICs that fall silent lose nothing here, since a slot is the sender's until the peer has
// given it back.

#include <gtest/gtest.h>

#include <cerrno>

#include "common/base/log.h"
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

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 2;  // it takes a hundred times as long
#else
constexpr int kRounds = 10;
#endif

class VerbsStormTest : public test::VerbsPairTest {
 protected:
  void begin(Rng& rng) {
    addNics(2);
    const bool small = chance(rng, 0.3), adaptive = chance(rng, 0.5);
    for (auto& host : fabric_.hosts) {
      for (auto& device : host) {
        device->mostRequests = small ? 8 : 16384;
        device->mostInline = small ? 0 : 256;
      }
    }
    for (VerbsSettings* settings : {&settingsA_, &settingsB_}) {
      settings->qpsPerPeer = 2;
      settings->drainMs = 3;
      settings->firstBackoffMs = 1;
      settings->lastBackoffMs = 4;
      settings->lastChanceMs = 10 * test::kPatienceMs;
      settings->adaptiveRouting = adaptive ? VerbsSettings::Choice::On : VerbsSettings::Choice::Off;
    }
    fabric_.purgeOnDestroy = chance(rng, 0.5);
    fabric_.longWire = true;
    join();
  }
  void calm() {
    fabric_.atomically([&] {
      fabric_.fate = nullptr;
      fabric_.refusal = nullptr;
      for (auto& host : fabric_.hosts) {
        for (auto& device : host) {
          device->cut = device->silent = false;
          device->connectError = device->queueError = device->stopError = 0;
        }
      }
    });
  }
  void change(Rng& rng) {
    const auto some = [&](double most) { return chance(rng, 0.25) ? most : 0.0; };
    const double lost = some(0.02), ackLost = some(0.02), ackLate = some(0.3), held = some(0.3),
                 refused = some(0.01);
    fabric_.atomically([&] {
      fabric_.fate = [=, its = Rng(rng())](const FakeQp&, const FakeSend&) mutable {
        return chance(its, held)      ? Fate::Held
               : chance(its, lost)    ? Fate::Lost
               : chance(its, ackLost) ? Fate::AckLost
               : chance(its, ackLate) ? Fate::AckLate
                                      : Fate::Arrives;
      };
      fabric_.refusal = [refused, its = Rng(rng())](const FakeQp&, const ibv_send_wr&) mutable {
        return chance(its, refused) ? ENOMEM : 0;
      };
      for (auto& host : fabric_.hosts) {
        for (auto& device : host) {
          device->cut = chance(rng, 0.15);
          device->silent = chance(rng, 0.1);
          device->connectError = chance(rng, 0.15) ? ETIMEDOUT : 0;
          device->queueError = chance(rng, 0.15) ? ENOMEM : 0;
          device->stopError = chance(rng, 0.1) ? EIO : 0;
        }
      }
    });
  }
};

TEST_F(VerbsStormTest, EverythingAtOnceAndAllArrives) {
  Rng rng(testSeed());
  setLogHandler([](LogLevel, std::string_view) {});
  std::uint32_t generations = 0;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    TearDown();
    begin(rng);
    ASSERT_FALSE(HasFatalFailure());
    int steps = 0;
    run(300, 3000, [&] {
      if (++steps % 150 == 0 && steps < 4000) change(rng);
      if (steps == 4000) calm();
    });
    calm();
    EXPECT_TRUE(idleUntil([&] { return a_->pathsUp() == 4 && b_->pathsUp() == 4; }));
    run(50, 500);
    for (const Path& path : a_->paths()) generations = std::max(generations, path.generation);
  }
  setLogHandler(nullptr);
  EXPECT_GT(generations, 2u) << "nothing failed";
}

}  // namespace
}  // namespace hoccl
