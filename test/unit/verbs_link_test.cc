// Messages of the net plugin over queue pairs that fail: every byte arrives once, in the receive it
// was sent for, and none lands in a receive that is over.

#include "plugin-net/verbs_link.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "test/unit/fake_memory.h"
#include "test/unit/fake_verbs.h"
#include "test/unit/fakes.h"

namespace hoccl::net_plugin {
namespace {

using test::chance;
using test::FakeFabric;
using test::FakeQp;
using test::FakeSend;
using test::pick;
using test::Rng;
using test::testSeed;
using Fate = FakeFabric::Fate;

constexpr std::uint64_t kPiece = 8192, kWindow = Immediate::kMostPieces * kPiece;
constexpr std::size_t kRoom = 3 * kWindow + 5000;
constexpr std::uint32_t kSlots = 6, kSendings = 2 * kSlots;
constexpr std::byte kPoison{0xee};

/// What one end says to the other.
struct Channel final : LinkChannel {
  struct Frame {
    FrameHeader header;
    std::vector<std::byte> payload;
  };
  bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) override {
    if (refuse && refuse(kind)) return false;
    Frame frame;
    frame.header.kind = kind;
    frame.header.bytes = bytes;
    const auto* from = static_cast<const std::byte*>(payload);
    frame.payload.assign(from, from + bytes);
    frames.push_back(std::move(frame));
    return true;
  }
  [[nodiscard]] bool ending() const override { return false; }
  std::deque<Frame> frames;
  std::function<bool(std::uint16_t kind)> refuse;  ///< no room for such a one now
};

/// Of the ends that are made next.
std::uint64_t lastChanceMs = test::kPatienceMs;

struct End {
  explicit End(int host, bool connecting, const VerbsSettings* settings = nullptr) {
    ground = std::make_shared<VerbsGround>();
    ground->settings.qpsPerPeer = 2;
    ground->settings.lastChanceMs = lastChanceMs;
    EXPECT_TRUE(openNics(FakeFabric::library(host), ground->settings, &ground->nics));
    link = std::make_unique<VerbsLink>(channel, ground, settings ? *settings : ground->settings,
                                       connecting, kPiece);
  }
  /// One step of the thread of the calls, and of the one that mends.
  void step(Channel& from) {
    while (!from.frames.empty()) {
      const Channel::Frame frame = std::move(from.frames.front());
      from.frames.pop_front();
      Status bad;
      if (frame.header.bytes > 0) {
        std::byte* const to = link->place(frame.header, &bad);
        ASSERT_NE(to, nullptr) << bad.message();
        std::memcpy(to, frame.payload.data(), frame.payload.size());
      }
      link->arrived(frame.header);
    }
    pollfd fd{link->set().workFd(), POLLIN, 0};
    if (::poll(&fd, 1, 0) > 0) link->set().work();
    link->progress();
    ASSERT_TRUE(link->failure()) << link->failure().message();
  }
  std::shared_ptr<VerbsGround> ground;
  Channel channel;
  std::unique_ptr<VerbsLink> link;
};

class VerbsLinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fabric_.reset();
    for (int i = 0; i < 2; ++i) {
      fabric_.add(0, fmt::format("left_{}", i), fmt::format("10.0.{}.1", i));
      fabric_.add(1, fmt::format("right_{}", i), fmt::format("10.0.{}.2", i));
    }
    begin();
  }
  void begin(const VerbsSettings* settings = nullptr) {
    sender_ = std::make_unique<End>(0, true, settings);
    receiver_ = std::make_unique<End>(1, false);
    const PathExtent extent{2, 2};
    ASSERT_TRUE(sender_->link->make(extent));
    ASSERT_TRUE(receiver_->link->make(extent));
    sender_->link->start();
    receiver_->link->start();
    ASSERT_TRUE(test::waitUntil([&] {
      step();
      return sender_->link->set().up() == 4 && receiver_->link->set().up() == 4;
    }));
    for (std::uint32_t i = 0; i < kSendings; ++i) {
      from_[i].assign(kRoom, std::byte{0});
      ASSERT_TRUE(
          RailMemory::create(*sender_->ground, from_[i].data(), kRoom, {}, &fromMemory_[i]));
      sending_[i] = {};
    }
    for (std::uint32_t i = 0; i < kSlots; ++i) {
      into_[i].assign(kRoom, kPoison);
      ASSERT_TRUE(
          RailMemory::create(*receiver_->ground, into_[i].data(), kRoom, {}, &intoMemory_[i]));
      use_[i] = {};
    }
  }
  void end() {
    sender_.reset();
    receiver_.reset();
    for (auto& memory : fromMemory_) memory.reset();
    for (auto& memory : intoMemory_) memory.reset();
  }
  void TearDown() override {
    end();
    fabric_.reset();
  }
  void step() {
    sender_->step(receiver_->channel);
    receiver_->step(sender_->channel);
    std::uint32_t slot = 0;
    for (std::uint64_t upTo = 0; receiver_->link->takeMore(&slot, &upTo);) {
      sender_->link->more(sendOf_[slot], upTo);
    }
  }

  /// A receive of the receiver's, and the message for it. It is over once all has come, which may
  /// be long before the sender hears so.
  struct Use {
    bool open = false;
    std::uint64_t bytes = 0, key = 0;
  };
  struct Sending {
    bool active = false;
    std::uint64_t bytes = 0;
  };
  /// Moves so many messages, in any order of the receives. Some receives are named and not used.
  void run(Rng& rng, int messages, const std::function<void()>& disturb = {}) {
    const Deadline deadline = Deadline::afterMs(test::kPatienceMs);
    int begun = 0, over = 0;
    while (over < messages && !deadline.passed() && !HasFatalFailure()) {
      if (disturb) disturb();
      step();
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        if (use_[slot].open && receiver_->link->coming(slot).whole) finish(slot);
        if (!use_[slot].open && begun < messages && chance(rng, 0.5) && begin(slot, rng)) ++begun;
      }
      over = begun;
      for (std::uint32_t send = 0; send < kSendings; ++send) {
        Sending& sending = sending_[send];
        if (sending.active && sender_->link->written(send)) {
          sending.active = false;
          std::memset(from_[send].data(), 0x77, sending.bytes);  // the caller's again
        }
        over -= sending.active ? 1 : 0;
      }
      if (std::any_of(use_.begin(), use_.end(), [](const Use& use) { return use.open; })) {
        over = std::min(over, messages - 1);
      }
    }
    EXPECT_EQ(over, messages);
  }
  /// False: every send is under way, so none goes into it.
  bool begin(std::uint32_t slot, Rng& rng) {
    const auto free = std::find_if(sending_.begin(), sending_.end(),
                                   [](const Sending& each) { return !each.active; });
    if (free == sending_.end()) return false;
    const auto send = static_cast<std::uint32_t>(free - sending_.begin());
    Use& use = use_[slot];
    expectUntouched(slot);
    DirectPlace place;
    const std::uint64_t capacity = pick(rng, 1, mostBytes_);
    receiver_->link->open(slot, into_[slot].data(), capacity, *intoMemory_[slot], &place);
    if (chance(rng, 0.1)) {
      receiver_->link->close(slot);
      return true;
    }
    use.bytes = chance(rng, 0.3) ? capacity : pick(rng, 1, capacity);
    use.key = ++keys_;
    use.open = true;
    *free = {true, use.bytes};
    test::writePattern(from_[send].data(), use.key, 0, use.bytes);
    sendOf_[slot] = send;
    sender_->link->write(send, slot, place, from_[send].data(), use.bytes, fromMemory_[send]);
    return true;
  }
  void finish(std::uint32_t slot) {
    Use& use = use_[slot];
    EXPECT_EQ(receiver_->link->coming(slot).total, use.bytes);
    std::vector<std::byte> expected(use.bytes);
    test::writePattern(expected.data(), use.key, 0, use.bytes);
    EXPECT_EQ(std::memcmp(expected.data(), into_[slot].data(), use.bytes), 0);
    receiver_->link->close(slot);
    use.open = false;
    std::memset(into_[slot].data(), static_cast<int>(kPoison), use.bytes);
    expectUntouched(slot);
  }
  void expectUntouched(std::uint32_t slot) {
    const auto behind = static_cast<std::ptrdiff_t>(std::min(kRoom, mostBytes_ + kPiece));
    EXPECT_TRUE(std::all_of(into_[slot].begin(), into_[slot].begin() + behind, [](std::byte byte) {
      return byte == kPoison;
    })) << "a write beside the message, or after its receive was over";
  }

  FakeFabric& fabric_ = FakeFabric::get();
  std::unique_ptr<End> sender_, receiver_;
  std::array<std::vector<std::byte>, kSendings> from_;
  std::array<std::vector<std::byte>, kSlots> into_;
  std::array<std::shared_ptr<RailMemory>, kSendings> fromMemory_;
  std::array<std::shared_ptr<RailMemory>, kSlots> intoMemory_;
  std::array<Use, kSlots> use_;
  std::array<Sending, kSendings> sending_;
  std::array<std::uint32_t, kSlots> sendOf_{};  ///< the last one into it
  std::uint64_t keys_ = 0, mostBytes_ = kRoom;
};

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
  end();
  lastChanceMs = 200;
  begin();
  lastChanceMs = test::kPatienceMs;
  ASSERT_FALSE(HasFatalFailure());
  fabric_.atomically([&] {
    for (auto& device : fabric_.hosts[0]) device->cut = true;
  });
  DirectPlace place;
  receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
  sender_->link->write(0, 0, place, from_[0].data(), kRoom, fromMemory_[0]);
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
