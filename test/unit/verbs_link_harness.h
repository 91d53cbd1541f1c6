#pragma once

// Two ends of the net plugin's queue pairs over the fake library, and messages between them whose
// every byte is checked.

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugin-net/verbs_link.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_verbs.h"
#include "test/unit/fakes.h"

namespace hoccl::net_plugin {

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
  std::function<bool()> late;                      ///< the next is still on its way
  std::function<bool(std::uint16_t kind)> refuse;  ///< no room for such a one now
};

/// Of the ends that are made next.
inline std::uint64_t lastChanceMs = test::kPatienceMs;

struct End {
  explicit End(int host, bool connecting, const VerbsSettings* settings = nullptr,
               const std::function<void(VerbsSettings&)>& change = {}) {
    ground = std::make_shared<VerbsGround>();
    ground->settings.qpsPerPeer = 2;
    ground->settings.lastChanceMs = lastChanceMs;
    if (change) change(ground->settings);
    EXPECT_TRUE(openNics(FakeFabric::library(host), ground->settings, &ground->nics));
    link = std::make_unique<VerbsLink>(channel, ground, settings ? *settings : ground->settings,
                                       connecting, kPiece);
  }
  /// One step of the thread of the calls, and of the one that mends.
  void step(Channel& from) {
    stepToItsEnd(from);
    ASSERT_TRUE(link->failure()) << link->failure().message();
  }
  /// The same of a connection that may end.
  void stepToItsEnd(Channel& from) {
    while (!from.frames.empty() && !(from.late && from.late())) {
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
    if (::poll(&fd, 1, 0) <= 0) {
      ordered = Deadline::afterMs(mendMs);
    } else if (mendMs == 0 || ordered.passed()) {
      link->set().work();
      ordered = Deadline::afterMs(mendMs);  // if another follows at once
    }
    link->progress();
  }
  std::uint64_t mendMs = 0;  ///< so long an order of the other thread's takes
  Deadline ordered = Deadline::afterMs(0);
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
    sender_ = std::make_unique<End>(0, true, settings, quick_);
    receiver_ = std::make_unique<End>(1, false, nullptr, quick_);
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
  /// Anew, with so long for tries once no queue pair is left; then nothing gets through any more, and
  /// a sending is under way.
  void beginAndCutAll(std::uint64_t triesMs) {
    end();
    lastChanceMs = triesMs;
    begin();
    lastChanceMs = test::kPatienceMs;
    ASSERT_FALSE(HasFatalFailure());
    fabric_.atomically([&] {
      for (auto& device : fabric_.hosts[0]) device->cut = true;
    });
    DirectPlace place;
    receiver_->link->open(0, into_[0].data(), kRoom, *intoMemory_[0], &place);
    sender_->link->write(0, 0, place, from_[0].data(), kRoom, fromMemory_[0]);
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
  std::function<void(VerbsSettings&)> quick_;  ///< of the ends that are made next
};

}  // namespace hoccl::net_plugin
