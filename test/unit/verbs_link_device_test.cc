// Devices that fail for good, or refuse for a while, under the net plugin's queue pairs.

#include <gtest/gtest.h>

#include <cerrno>
#include <utility>

#include "test/unit/verbs_link_harness.h"

namespace hoccl::net_plugin {
namespace {

class VerbsLinkDeviceTest : public VerbsLinkTest {
 protected:
  void change(const std::function<void(VerbsSettings&)>& how) {
    end();
    quick_ = how;
    begin();
    quick_ = nullptr;
  }
};

TEST_F(VerbsLinkDeviceTest, ABrokenCompletionQueueLeavesTheOtherRail) {
  Rng rng(testSeed());
  for (const int host : {0, 1}) {
    change([](VerbsSettings& settings) { settings.firstBackoffMs = 1; });
    ASSERT_FALSE(HasFatalFailure());
    test::FakeDevice& device = *fabric_.hosts[host][0];
    // The receiver's under traffic would take with it what it has acknowledged: an error.
    int steps = host == 0 ? 0 : 20;
    if (host == 1) run(rng, 20);
    fabric_.atomically([&] { device.pollFails = host == 1; });
    run(rng, 60, [&] {
      if (++steps == 20) fabric_.atomically([&] { device.pollFails = true; });
    });
    ASSERT_FALSE(HasFailure());
    const PathSet& set = (host == 0 ? sender_ : receiver_)->link->set();
    EXPECT_EQ(set.up(), 2u);
    EXPECT_NE(set.paths()[0].problem.find("completion queue of " + device.title), std::string::npos)
        << set.paths()[0].problem;
    run(rng, 60);  // while the peer tries again
    EXPECT_EQ(set.up(), 2u);
    fabric_.atomically([&] { device.pollFails = false; });
  }
}

TEST_F(VerbsLinkDeviceTest, WithAllCompletionQueuesBrokenItEndsAndSaysSo) {
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[1]) device->pollFails = true;
  });
  EXPECT_TRUE(test::waitUntil(
      [&] {
        sender_->stepToItsEnd(receiver_->channel);
        receiver_->stepToItsEnd(sender_->channel);
        return !sender_->link->failure() && !receiver_->link->failure();
      },
      test::kPatienceMs / 2));
  for (const auto* each : {sender_.get(), receiver_.get()}) {
    const std::string why = each->link->failure().message();
    EXPECT_NE(why.find("completion queue of right_"), std::string::npos) << why;
  }
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[1]) device->pollFails = false;
  });
}

// With none left there is no time for longer and longer waits between tries, whatever fails.
TEST_F(VerbsLinkDeviceTest, TriesOfTheLastChanceDoNotGetRarer) {
  change([](VerbsSettings& settings) {
    settings.firstBackoffMs = 10;
    settings.lastChanceMs = 10 * test::kPatienceMs;
  });
  ASSERT_FALSE(HasFatalFailure());
  const auto all = [this](bool away) {
    fabric_.atomically([&] {
      for (auto& device : fabric_.hosts[0]) {
        device->cut = away;
        device->queueError = away ? ENOMEM : 0;
        device->queueTries = 0;
      }
    });
  };
  all(true);
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  sender_->link->write(0, 0, place, from_[0].data(), kRoom, fromMemory_[0]);
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return fabric_.hosts[0][0]->queueTries + fabric_.hosts[0][1]->queueTries > 200;
  }));
  all(false);
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return receiver_->link->coming(0).whole && sender_->link->written(0);
  }));
}

// A NIC that stays away costs those in use nothing between its tries, and is found when it is back.
TEST_F(VerbsLinkDeviceTest, ANicThatStaysAwayPressesNobody) {
  change([](VerbsSettings& settings) { settings.firstBackoffMs = 600; });
  ASSERT_FALSE(HasFatalFailure());
  fabric_.atomically([&] { fabric_.hosts[1][0]->cut = true; });
  Rng rng(testSeed());
  run(rng, 30);
  const auto rests = [this] {
    return sender_->link->set().failing() && receiver_->link->set().failing() &&
           !sender_->link->set().pressing() && !receiver_->link->set().pressing();
  };
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return rests();
  }));
  fabric_.atomically([&] { fabric_.hosts[1][0]->cut = false; });
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4;
  }));
  run(rng, 30);
  EXPECT_FALSE(sender_->link->set().pressing());
}

}  // namespace
}  // namespace hoccl::net_plugin
