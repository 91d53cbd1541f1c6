// Messages of the net plugin over queue pairs that fail: every byte arrives once, in the receive it
// was sent for, and none lands in a receive that is over.

#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "test/unit/verbs_link_harness.h"

namespace hoccl::net_plugin {
namespace {

TEST_F(VerbsLinkTest, MessagesOfOneWindowAndMore) {
  Rng rng(testSeed());
  run(rng, 150);
}

// The receiver has all of a message, and names the receive again, before the sender knows.
TEST_F(VerbsLinkTest, AcknowledgementsThatAreLate) {
  Rng rng(testSeed());
  fabric_.atomically([&] {
    fabric_.fate = [chances = Rng(rng())](const FakeQp&, const FakeSend&) mutable {
      return chance(chances, 0.3)   ? Fate::Held
             : chance(chances, 0.3) ? Fate::AckLate
                                    : Fate::Arrives;
    };
  });
  mostBytes_ = 2 * kPiece;  // a piece or two, so that a single acknowledgement decides
  for (int round = 0; round < 4; ++round) run(rng, 500);
}

// As with NCCL, the connecting side's, also behind a failure.
TEST_F(VerbsLinkTest, BothEndsHaveTheConnectingSidesTrafficClass) {
  VerbsSettings settings = sender_->ground->settings;
  ASSERT_TRUE(settings.takeTrafficClass(106, false));
  settings.serviceLevel = 3;
  end();
  begin(&settings);
  ASSERT_FALSE(HasFatalFailure());
  const auto expectIt = [&] {
    for (const auto* end : {sender_.get(), receiver_.get()}) {
      for (const Path& path : end->link->set().paths()) {
        ibv_qp_attr has{};
        ASSERT_TRUE(path.pair.query(&has));
        EXPECT_EQ(has.ah_attr.grh.traffic_class, 106);
        EXPECT_EQ(has.ah_attr.sl, 3);
      }
    }
  };
  expectIt();
  fabric_.atomically([&] {
    fabric_.fate = [first = true](const FakeQp&, const FakeSend&) mutable {
      return std::exchange(first, false) ? Fate::Lost : Fate::Arrives;
    };
  });
  Rng rng(testSeed());
  run(rng, 20);
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4;
  }));
  expectIt();
}

TEST_F(VerbsLinkTest, WithAdaptiveRouting) {
  end();
  for (int host : {0, 1}) {
    for (auto& device : fabric_.hosts[host]) device->linkLayer = IBV_LINK_LAYER_INFINIBAND;
  }
  begin();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(sender_->link->set().rails()[0]->adaptive);
  Rng rng(testSeed());
  run(rng, 100);
}

TEST_F(VerbsLinkTest, AnyFailuresInAnyOrder) {
  Rng rng(testSeed());
  for (int round = 0; round < 4; ++round) {
    end();
    fabric_.purgeOnDestroy = round % 2 == 0;
    begin();
    ASSERT_FALSE(HasFatalFailure());
    // One queue pair stays, so that there is always a way.
    const std::uint32_t spared = sender_->link->set().paths()[3].pair.number(),
                        other = receiver_->link->set().paths()[3].pair.number();
    fabric_.atomically([&] {
      fabric_.fate = [&, chances = Rng(rng())](const FakeQp& qp, const FakeSend&) mutable {
        if (chance(chances, 0.05)) return Fate::Held;
        if (chance(chances, 0.05)) return Fate::AckLate;
        if (qp.qp_num == spared || qp.qp_num == other) return Fate::Arrives;
        return chance(chances, 0.01)   ? Fate::Lost
               : chance(chances, 0.01) ? Fate::AckLost
                                       : Fate::Arrives;
      };
    });
    std::size_t fewest = 4;
    run(rng, 50, [&] { fewest = std::min(fewest, sender_->link->set().up()); });
    EXPECT_LT(fewest, 4u) << "nothing failed";
    fabric_.atomically([&] { fabric_.fate = nullptr; });
    EXPECT_TRUE(test::waitUntil([&] {
      step();
      return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4;
    }));
    run(rng, 20);
  }
}

TEST_F(VerbsLinkTest, ARailThatIsCutLeavesTheOther) {
  Rng rng(testSeed());
  int steps = 0;
  run(rng, 60, [&] {
    if (++steps == 40) fabric_.atomically([&] { fabric_.hosts[1][0]->cut = true; });
  });
  EXPECT_EQ(sender_->link->set().up(), 2u);
}

// All queue pairs fail at once and the way is free again: what was under way goes on.
TEST_F(VerbsLinkTest, AFlapOfAllRailsIsSurvived) {
  Rng rng(testSeed());
  for (const int at : {1, 20, 60}) {
    int steps = 0;
    bool cut = false, gone = false;
    run(rng, 60, [&] {
      cut = ++steps >= at && !gone;
      if (cut && sender_->link->set().up() == 0 && receiver_->link->set().up() == 0) gone = true;
      fabric_.atomically([&] {
        for (auto& device : fabric_.hosts[1]) device->cut = cut && !gone;
      });
    });
    EXPECT_TRUE(gone) << "some queue pair was left";
    EXPECT_TRUE(test::waitUntil([&] {
      step();
      return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4;
    }));
    EXPECT_FALSE(sender_->link->set().lastChance() || receiver_->link->set().lastChance());
  }
}

// A try that one side gives up before the other has heard of it, or has done its part, is not the
// last.
TEST_F(VerbsLinkTest, ATryThatIsGivenUpIsFollowedByAnother) {
  Rng rng(testSeed());
  for (const std::uint16_t kind :
       {verbs_wire::kAgain, verbs_wire::kAnswer, verbs_wire::kAgainGo, verbs_wire::kReport}) {
    int refused = 0;
    const auto once = [&](std::uint16_t its) { return its == kind && refused++ == 0; };
    sender_->channel.refuse = receiver_->channel.refuse = once;
    fabric_.atomically([&] {
      fabric_.fate = [first = true](const FakeQp&, const FakeSend&) mutable {
        return std::exchange(first, false) ? Fate::Lost : Fate::Arrives;
      };
    });
    run(rng, 20);
    EXPECT_TRUE(test::waitUntil([&] {
      step();
      return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4 && refused > 1;
    })) << "kind "
        << kind;
  }
}

TEST_F(VerbsLinkTest, WithNothingLeftItSaysWhat) {
  beginAndCutAll(200);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_TRUE(test::waitUntil([&] {
    sender_->link->progress();
    return !sender_->link->failure();
  }));
  const std::string why = sender_->link->failure().message();
  for (const char* part : {"left_", "right_", "GID 10.0.", "queue pair 0x", "status 12",
                           "200 ms (HOCCL_TIMEOUT_MS)"}) {
    EXPECT_NE(why.find(part), std::string::npos) << part << " in: " << why;
  }
  EXPECT_FALSE(sender_->link->written(0));
}

// Tries of the last chance end in ways of their own, which are not why there is none left.
TEST_F(VerbsLinkTest, TriesThatFailInAnotherWayDoNotHideWhatBroke) {
  beginAndCutAll(1000);
  ASSERT_FALSE(HasFatalFailure());
  bool refusing = false;
  EXPECT_TRUE(test::waitUntil([&] {
    sender_->stepToItsEnd(receiver_->channel);
    receiver_->stepToItsEnd(sender_->channel);
    if (!refusing && sender_->link->set().lastChance() && receiver_->link->set().lastChance()) {
      refusing = true;
      fabric_.atomically(
          [&] { fabric_.refusal = [](const FakeQp&, const ibv_send_wr&) { return ENODEV; }; });
    }
    return !sender_->link->failure();
  }));
  EXPECT_TRUE(refusing);
  const std::string why = sender_->link->failure().message();
  for (const char* part : {"the last was", "status 12", "the last try since then was", "errno 19",
                           "1000 ms (HOCCL_TIMEOUT_MS)"}) {
    EXPECT_NE(why.find(part), std::string::npos) << part << " in: " << why;
  }
}

// The receiver has everything and goes; the acknowledgement is lost with it.
TEST_F(VerbsLinkTest, AByeStandsForLostAcknowledgements) {
  fabric_.atomically([&] {
    fabric_.fate = [](const FakeQp&, const FakeSend& send) {
      return send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? Fate::AckLost : Fate::Arrives;
    };
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  sender_->link->write(0, 0, place, from_[0].data(), kPiece - 1, fromMemory_[0]);
  ASSERT_TRUE(test::waitUntil([&] {
    receiver_->link->progress();
    return receiver_->link->coming(0).whole;
  }));
  receiver_->link->sayBye();
  EXPECT_FALSE(sender_->link->written(0));
  const Channel::Frame bye = receiver_->channel.frames.back();
  receiver_->channel.frames.clear();
  Status bad;
  std::memcpy(sender_->link->place(bye.header, &bad), bye.payload.data(), bye.payload.size());
  sender_->link->arrived(bye.header);
  EXPECT_TRUE(sender_->link->written(0));
}

// Whoever is told of an error may use the memory again: nothing lands there any more.
TEST_F(VerbsLinkTest, NothingLandsBehindStop) {
  fabric_.atomically(
      [&] { fabric_.fate = [](const FakeQp&, const FakeSend&) { return Fate::Held; }; });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  sender_->link->write(0, 0, place, from_[0].data(), kRoom, fromMemory_[0]);
  receiver_->link->stop();
  fabric_.atomically([&] { fabric_.fate = nullptr; });
  for (int i = 0; i < 200; ++i) sender_->link->progress();
  expectUntouched(0);
}

}  // namespace
}  // namespace hoccl::net_plugin
