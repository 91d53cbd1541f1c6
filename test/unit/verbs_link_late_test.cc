// What comes late over queue pairs of the net plugin that have failed, and tries of new ones that
// fail or take long.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "test/unit/verbs_link_harness.h"

namespace hoccl::net_plugin {
namespace {

class VerbsLinkLateTest : public VerbsLinkTest {
 protected:
  /// As if the sender had found a queue pair broken, and got nothing over it.
  void tellOfFailure(std::uint32_t path) {
    verbs_wire::Report report;
    report.path = path;
    report.generation = 1;
    FrameHeader header;
    header.kind = verbs_wire::kReport;
    header.bytes = sizeof report;
    Status bad;
    std::memcpy(receiver_->link->place(header, &bad), &report, sizeof report);
    receiver_->link->arrived(header);
  }
};

// What a queue pair brought, and is seen only after the sender has been told what has come over it,
// goes again: taken for that, it would end a receive into which a write is on its way.
TEST_F(VerbsLinkLateTest, WhatIsSeenOfAQueuePairBehindItsReportDoesNotCount) {
  constexpr std::uint64_t kBytes = 4 * kPiece;
  receiver_->mendMs = 200;  // and the old queue pair stays as long
  const std::uint32_t failing = sender_->link->set().paths()[0].pair.number();
  fabric_.atomically([&] {
    fabric_.hosts[1][0]->silent = true;
    fabric_.fate = [failing](const FakeQp& qp, const FakeSend& send) {
      const bool word = send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
      return word && qp.qp_num == failing ? Fate::AckLost : Fate::Arrives;
    };
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  test::writePattern(from_[0].data(), 1, 0, kBytes);
  sender_->link->write(0, 0, place, from_[0].data(), kBytes, fromMemory_[0]);
  // All of it has come, but the sender has no acknowledgement of one piece.
  std::vector<std::byte> expected(kBytes);
  test::writePattern(expected.data(), 1, 0, kBytes);
  ASSERT_TRUE(test::waitUntil([&] {
    sender_->link->progress();
    return std::memcmp(expected.data(), into_[0].data(), kBytes) == 0 &&
           sender_->link->set().paths()[0].state != Path::State::Up &&
           sender_->link->set().sendsOut() == 0;
  }));
  fabric_.atomically([&] {
    fabric_.fate = [](const FakeQp&, const FakeSend& send) {
      return send.bytes == kPiece ? Fate::Held : Fate::Arrives;
    };
  });
  ASSERT_TRUE(test::waitUntil([&] {
    step();
    return receiver_->link->set().paths()[0].state == Path::State::Mending;
  }));
  fabric_.atomically([&] { fabric_.hosts[1][0]->silent = false; });
  for (int i = 0; i < 400; ++i) step();
  EXPECT_FALSE(receiver_->link->coming(0).whole) << "while a piece is on its way";
  fabric_.atomically([&] { fabric_.fate = nullptr; });
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return receiver_->link->coming(0).whole && sender_->link->written(0);
  }));
  EXPECT_EQ(std::memcmp(expected.data(), into_[0].data(), kBytes), 0);
  Rng rng(testSeed());
  receiver_->link->close(0);
  into_[0].assign(kRoom, kPoison);
  run(rng, 20);
}

// A thread that stood still looks at all that came meanwhile before it says what has come.
TEST_F(VerbsLinkLateTest, AReportHoldsWhatLiesInTheQueue) {
  tellOfFailure(1);  // leaves its receives in the queue, ahead of the message
  const std::uint32_t first = sender_->link->set().paths()[0].pair.number();
  fabric_.atomically([&] {
    fabric_.fate = [first](const FakeQp& qp, const FakeSend&) {
      return qp.qp_num == first ? Fate::Arrives : Fate::Held;
    };
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  for (std::uint32_t send = 0; send < 4; ++send) {  // one of them takes the first path
    if (send > 0)
      receiver_->link->open(send, into_[send].data(), kRoom, *intoMemory_[send], &place);
    from_[send][0] = std::byte{0x55};
    sender_->link->write(send, send, place, from_[send].data(), 1, fromMemory_[send]);
  }
  const auto arrived = [&] {
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
      if (into_[slot][0] == std::byte{0x55}) return static_cast<int>(slot);
    }
    return -1;
  };
  ASSERT_TRUE(test::waitUntil([&] {
    sender_->link->progress();
    return arrived() >= 0 && sender_->link->set().paths()[0].sends == 0;
  }));
  tellOfFailure(0);
  ::usleep(1'100'000);
  for (int i = 0; i < 40; ++i) receiver_->link->progress();
  EXPECT_EQ(receiver_->link->set().paths()[0].state, Path::State::Resting);
  EXPECT_TRUE(receiver_->link->coming(static_cast<std::uint32_t>(arrived())).whole);
  const auto report = std::find_if(
      receiver_->channel.frames.begin(), receiver_->channel.frames.end(), [](const auto& frame) {
        return frame.header.kind == verbs_wire::kReport && frame.payload[0] == std::byte{0};
      });
  ASSERT_NE(report, receiver_->channel.frames.end());
  verbs_wire::Report says;
  std::memcpy(&says, report->payload.data(), sizeof says);
  EXPECT_EQ(says.slot[static_cast<std::uint32_t>(arrived())].ready, 1u);
}

// It would be waited for without end.
TEST_F(VerbsLinkLateTest, WhatANicAcknowledgedAndNeverGaveIsAnError) {
  fabric_.atomically([&] { fabric_.hosts[1][0]->silent = true; });
  for (std::uint32_t send = 0; send < 4; ++send) {  // one over each path
    DirectPlace place;
    receiver_->link->open(send, into_[send].data(), kRoom, *intoMemory_[send], &place);
    sender_->link->write(send, send, place, from_[send].data(), 1, fromMemory_[send]);
  }
  ASSERT_TRUE(test::waitUntil([&] {
    step();
    return sender_->link->written(0) && sender_->link->written(1) && sender_->link->written(2) &&
           sender_->link->written(3);
  }));
  tellOfFailure(0);
  EXPECT_TRUE(test::waitUntil([&] {
    sender_->stepToItsEnd(receiver_->channel);
    receiver_->stepToItsEnd(sender_->channel);
    return !sender_->link->failure() && !receiver_->link->failure();
  }));
  EXPECT_NE(sender_->link->failure().message().find("acknowledged, over left_0"), std::string::npos)
      << sender_->link->failure().message();
}

// The same once the numbers of those sends are other messages'.
TEST_F(VerbsLinkLateTest, WhatANicNeverGaveIsAnErrorAlsoWhenItsSendIsAnothers) {
  fabric_.atomically([&] { fabric_.hosts[1][0]->silent = true; });
  const auto write = [this](std::uint32_t send, std::uint32_t slot) {
    DirectPlace place;
    receiver_->link->open(slot, into_[send].data(), kRoom, *intoMemory_[send], &place);
    sender_->link->write(send, slot, place, from_[send].data(), 1, fromMemory_[send]);
  };
  for (std::uint32_t send = 0; send < 4; ++send) write(send, send);  // one over each path
  ASSERT_TRUE(test::waitUntil([&] {
    step();
    return sender_->link->written(0) && sender_->link->written(1) && sender_->link->written(2) &&
           sender_->link->written(3);
  }));
  fabric_.atomically(
      [&] { fabric_.fate = [](const FakeQp&, const FakeSend&) { return Fate::Held; }; });
  for (std::uint32_t send = 0; send < 4; ++send) write(send, 10 + send);
  tellOfFailure(0);
  EXPECT_TRUE(test::waitUntil([&] {
    sender_->stepToItsEnd(receiver_->channel);
    receiver_->stepToItsEnd(sender_->channel);
    return !sender_->link->failure() && !receiver_->link->failure();
  }));
  EXPECT_NE(sender_->link->failure().message().find("acknowledged, over left_0"), std::string::npos)
      << sender_->link->failure().message();
}

// A queue pair that cannot be stopped is destroyed, and with it what it has brought, unless that is
// taken first.
TEST_F(VerbsLinkLateTest, WhatAQueuePairThatCannotBeStoppedHasBroughtCounts) {
  for (std::uint32_t send = 0; send < 4; ++send) {  // one over each path
    DirectPlace place;
    receiver_->link->open(send, into_[send].data(), kRoom, *intoMemory_[send], &place);
    sender_->link->write(send, send, place, from_[send].data(), 1, fromMemory_[send]);
  }
  ASSERT_TRUE(test::waitUntil([&] {
    sender_->link->progress();
    return sender_->link->written(0) && sender_->link->written(1) && sender_->link->written(2) &&
           sender_->link->written(3);
  }));
  fabric_.atomically([&] { fabric_.hosts[1][0]->stopError = EIO; });
  tellOfFailure(0);
  tellOfFailure(1);
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return HasFatalFailure() ||
           (receiver_->link->coming(0).whole && receiver_->link->coming(1).whole &&
            receiver_->link->coming(2).whole && receiver_->link->coming(3).whole);
  }));
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return HasFatalFailure() || sender_->link->set().up() == 4;
  }));
}

// The bytes of a piece may be on their way though their word was refused: gone again at once over
// another queue pair they could land when the receive is over.
TEST_F(VerbsLinkLateTest, WhatADeviceTookInPartGoesAgainOnlyBehindTheReport) {
  fabric_.atomically([&] {
    fabric_.fate = [](const FakeQp&, const FakeSend&) { return Fate::Held; };
    fabric_.refusal = [first = true](const FakeQp&, const ibv_send_wr& request) mutable {
      const bool word = request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
      return word && std::exchange(first, false) ? ENOMEM : 0;
    };
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  test::writePattern(from_[0].data(), 1, 0, kPiece);
  sender_->link->write(0, 0, place, from_[0].data(), kPiece, fromMemory_[0]);
  EXPECT_EQ(sender_->link->set().up(), 3u);
  const auto underWay = [&] {
    std::size_t bytes = 0;
    for (const Path& path : sender_->link->set().paths()) bytes += path.bytes;
    return bytes;
  };
  for (int i = 0; i < 100; ++i) sender_->link->progress();
  EXPECT_EQ(underWay(), 0u) << "before the peer has stopped its end";
  fabric_.atomically([&] { fabric_.fate = nullptr; });
  EXPECT_TRUE(test::waitUntil([&] {
    step();
    return receiver_->link->coming(0).whole && sender_->link->written(0);
  }));
}

TEST(OutPiecesTest, ACompletionBehindTheReportThatItIsLackingSaysNothing) {
  OutPieces out;
  out.begin(1, 2 * kPiece, kPiece);
  out.posted(0, 3);
  out.posted(1, 2);
  EXPECT_TRUE(out.failedOver(3, {}));
  out.completed(0, 3);
  out.completed(1, 2);
  EXPECT_FALSE(out.complete()) << "and a piece to post";
  out.posted(0, 2);
  out.completed(0, 2);
  EXPECT_TRUE(out.complete());
}

// More messages into each receive than the turns of immediates can count, over queue pairs that
// fail.
TEST_F(VerbsLinkLateTest, TurnsBeyondTheRangeOfImmediates) {
  Rng rng(testSeed());
  const std::uint32_t spared = sender_->link->set().paths()[3].pair.number();
  fabric_.atomically([&] {
    fabric_.fate = [spared, chances = Rng(rng())](const FakeQp& qp, const FakeSend&) mutable {
      if (chance(chances, 0.1)) return Fate::AckLate;
      if (qp.qp_num == spared || qp.attributes.dest_qp_num == spared) return Fate::Arrives;
      return chance(chances, 0.001)   ? Fate::Lost
             : chance(chances, 0.001) ? Fate::AckLost
                                      : Fate::Arrives;
    };
  });
  mostBytes_ = 2 * kPiece;
  run(rng, kSlots * (1 << Immediate::kTurnBits) * 5 / 4);
}

// New queue pairs of a NIC that is gone may take a second each (an address that is not resolved):
// the other NIC's have their turn.
TEST_F(VerbsLinkLateTest, ANicThatStaysAwayDoesNotHoldUpTheOther) {
  receiver_->mendMs = 400;
  const auto away = [this](int nic, bool is) {
    fabric_.hosts[1][static_cast<std::size_t>(nic)]->cut = is;
    fabric_.hosts[1][static_cast<std::size_t>(nic)]->connectError = is ? ETIMEDOUT : 0;
  };
  Rng rng(testSeed());
  int steps = 0;
  Deadline back = Deadline::afterMs(0);
  run(rng, 30, [&] {
    if (++steps == 10) {
      back = Deadline::afterMs(1500);
      fabric_.atomically([&] { away(0, true), away(1, true); });
    } else if (steps > 10 && back.passed()) {
      fabric_.atomically([&] { away(1, false); });
    }
  });
  EXPECT_GT(steps, 10);
  EXPECT_TRUE(back.passed());
}

TEST_F(VerbsLinkLateTest, AnOfferOfAnotherLayoutIsThatOfAnotherBuild) {
  FrameHeader header;
  header.kind = verbs_wire::kOffer;
  header.bytes = sizeof(verbs_wire::Offer) - 8;
  Status bad;
  EXPECT_EQ(receiver_->link->place(header, &bad), nullptr);
  EXPECT_NE(bad.message().find("builds of HOCCL differ"), std::string::npos) << bad.message();
}

std::atomic<int> linesOfFailures{0};

TEST_F(VerbsLinkLateTest, TriesThatDoNotWorkFillNoLog) {
  end();
  lastChanceMs = 1500;
  begin();
  lastChanceMs = test::kPatienceMs;
  ASSERT_FALSE(HasFatalFailure());
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[0]) device->cut = true;
  });
  linesOfFailures = 0;
  setLogHandler([](LogLevel level, std::string_view) {
    if (level <= LogLevel::Info) ++linesOfFailures;
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  sender_->link->write(0, 0, place, from_[0].data(), kRoom, fromMemory_[0]);
  std::uint32_t tries = 0;
  EXPECT_TRUE(test::waitUntil([&] {
    sender_->stepToItsEnd(receiver_->channel);
    receiver_->stepToItsEnd(sender_->channel);
    for (const Path& path : sender_->link->set().paths()) tries = std::max(tries, path.generation);
    return !sender_->link->failure();
  }));
  setLogHandler(nullptr);
  EXPECT_GT(tries, 2u);
  // A line for each queue pair of either side, and that none is left.
  EXPECT_LE(linesOfFailures.load(), 2 * (4 + 1));
}

}  // namespace
}  // namespace hoccl::net_plugin
