// Random schedules of everything that may happen to the net plugin's queue pairs at once: losses,
// cuts, late and lost acknowledgements, what is on the wire when a queue pair fails, devices that
// refuse, a control channel and a mender that are late, NICs that fall silent. Every byte is
// checked, that none is written when its receive is over, and that everything ends.

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "common/base/log.h"
#include "test/unit/verbs_link_harness.h"

namespace hoccl::net_plugin {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 2;  // it takes a hundred times as long
#else
constexpr int kRounds = 24;
#endif

class VerbsLinkStormTest : public VerbsLinkTest {
 protected:
  struct Chances {
    double lost = 0, ackLost = 0, ackLate = 0, held = 0;
    double refused = 0;  ///< a request that is posted
  };

  void SetUp() override {
    VerbsLinkTest::SetUp();
    end();
  }
  /// Two ends whose times are so short that much happens.
  void beginStorm(Rng& rng) {
    const bool adaptive = chance(rng, 0.5), small = chance(rng, 0.3);
    calm();
    fabric_.purgeOnDestroy = chance(rng, 0.5);
    quick_ = [](VerbsSettings& settings) {
      settings.drainMs = 3;
      settings.firstBackoffMs = 1;
      settings.lastBackoffMs = 4;
    };
    for (auto& host : fabric_.hosts) {
      for (auto& device : host) {
        device->linkLayer = adaptive ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
        device->mostRequests = small ? 8 : 16384;
        device->mostInline = small ? 0 : 256;
      }
    }
    begin();
    quick_ = nullptr;
    for (End* each : {sender_.get(), receiver_.get()}) {
      each->channel.late = [&rng] { return chance(rng, 0.5); };
      each->channel.refuse = [&rng](std::uint16_t) { return chance(rng, 0.05); };
    }
    named_ = {};
  }
  void calm() {
    fabric_.atomically([&] {
      fabric_.fate = nullptr;
      fabric_.refusal = nullptr;
      fabric_.longWire = true;
      for (auto& host : fabric_.hosts) {
        for (auto& device : host) {
          device->cut = device->silent = false;
          device->connectError = device->queueError = device->stopError = 0;
        }
      }
    });
  }
  /// New weather. `mayEnd`: NICs may fall silent, or refuse to stop queue pairs; then what they
  /// have acknowledged may be lost, which ends a connection.
  void change(Rng& rng, bool mayEnd) {
    Chances chances;
    const auto some = [&](double most) { return chance(rng, 0.5) ? 0 : most * chance(rng, 0.5); };
    chances.lost = some(0.05);
    chances.ackLost = some(0.05);
    chances.ackLate = some(0.3);
    chances.held = some(0.3);
    chances.refused = some(0.02);
    fabric_.atomically([&] {
      fabric_.fate = [chances, its = Rng(rng())](const FakeQp&, const FakeSend&) mutable {
        return chance(its, chances.held)      ? Fate::Held
               : chance(its, chances.lost)    ? Fate::Lost
               : chance(its, chances.ackLost) ? Fate::AckLost
               : chance(its, chances.ackLate) ? Fate::AckLate
                                              : Fate::Arrives;
      };
      fabric_.refusal = [chances, its = Rng(rng())](const FakeQp&, const ibv_send_wr&) mutable {
        return chance(its, chances.refused) ? ENOMEM : 0;
      };
      for (auto& host : fabric_.hosts) {
        for (auto& device : host) {
          device->cut = chance(rng, 0.15);
          device->silent = mayEnd && chance(rng, 0.1);
          device->connectError = chance(rng, 0.15) ? ETIMEDOUT : 0;
          device->queueError = chance(rng, 0.15) ? ENOMEM : 0;
          device->stopError = mayEnd && chance(rng, 0.15) ? EIO : 0;
        }
      }
    });
    for (End* each : {sender_.get(), receiver_.get()}) each->mendMs = chance(rng, 0.3) ? 2 : 0;
  }
  [[nodiscard]] bool over() const {
    return !sender_->link->failure() || !receiver_->link->failure();
  }
  void stepStorm(Rng& rng) {
    if (chance(rng, 0.7)) sender_->stepToItsEnd(receiver_->channel);
    if (chance(rng, 0.7)) receiver_->stepToItsEnd(sender_->channel);
    std::uint32_t slot = 0;
    for (std::uint64_t upTo = 0; receiver_->link->takeMore(&slot, &upTo);) {
      mores_.push_back({slot, upTo});
    }
    // On the way as the other words are.
    while (!mores_.empty() && chance(rng, 0.5)) {
      sender_->link->more(sendOf_[mores_.front().slot], mores_.front().upTo);
      mores_.pop_front();
    }
    for (slot = 0; slot < kSlots; ++slot) {
      if (named_[slot].on && chance(rng, 0.3)) hearName(slot);
    }
  }
  /// A receive is opened, and its name on the way.
  void name(std::uint32_t slot, Rng& rng) {
    expectUntouched(slot);
    Named& named = named_[slot];
    const std::uint64_t capacity = pick(rng, 1, mostBytes_);
    receiver_->link->open(slot, into_[slot].data(), capacity, *intoMemory_[slot], &named.place);
    if (chance(rng, 0.05)) return receiver_->link->close(slot);
    use_[slot] = {true, pick(rng, 1, capacity), ++keys_};
    named.on = true;
  }
  void hearName(std::uint32_t slot) {
    const auto free = std::find_if(sending_.begin(), sending_.end(),
                                   [](const Sending& each) { return !each.active; });
    if (free == sending_.end()) return;
    const auto send = static_cast<std::uint32_t>(free - sending_.begin());
    named_[slot].on = false;
    *free = {true, use_[slot].bytes};
    test::writePattern(from_[send].data(), use_[slot].key, 0, use_[slot].bytes);
    sendOf_[slot] = send;
    sender_->link->write(send, slot, named_[slot].place, from_[send].data(), use_[slot].bytes,
                         fromMemory_[send]);
  }
  void finishWhatIs() {
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      if (use_[slot].open && receiver_->link->coming(slot).whole) {
        finish(slot);
        ++finished_;
      }
    }
    for (std::uint32_t send = 0; send < kSendings; ++send) {
      if (!sending_[send].active || !sender_->link->written(send)) continue;
      sending_[send].active = false;
      std::memset(from_[send].data(), 0x77, sending_[send].bytes);  // the caller's again
    }
  }
  [[nodiscard]] bool quiet() const {
    return std::none_of(use_.begin(), use_.end(), [](const Use& use) { return use.open; }) &&
           std::none_of(sending_.begin(), sending_.end(),
                        [](const Sending& s) { return s.active; });
  }
  /// The connection has ended: whoever has the memory of an open receive again is not disturbed.
  void stopAndLook() {
    receiver_->link->stop();
    sender_->link->stop();
    std::array<std::vector<std::byte>, kSlots> then = into_;
    for (int i = 0; i < 20; ++i) {
      sender_->link->progress();
      receiver_->link->progress();
    }
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) EXPECT_EQ(then[slot], into_[slot]);
    mores_.clear();
  }
  void weather(Rng& rng, int steps, bool mayEnd) {
    const Deadline deadline = Deadline::afterMs(test::kPatienceMs);
    for (int i = 0; i < steps && !over() && !HasFailure(); ++i) {
      if (i % 150 == 0) change(rng, mayEnd);
      stepStorm(rng);
      finishWhatIs();
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        if (!use_[slot].open && chance(rng, 0.1)) name(slot, rng);
      }
    }
    if (over()) return;
    calm();
    while (!HasFailure() && !over() && !deadline.passed()) {
      stepStorm(rng);
      finishWhatIs();
      if (quiet() && sender_->link->set().up() == 4 && receiver_->link->set().up() == 4) return;
    }
    if (over() || HasFailure()) return;
    ADD_FAILURE() << "it does not end:" << text();
  }
  [[nodiscard]] std::string text() const {
    std::string text;
    for (const auto* each : {sender_.get(), receiver_.get()}) {
      for (const Path& path : each->link->set().paths()) {
        text += fmt::format("\n{} generation {} state {} sends {} receives {} reported {}/{}: {}",
                            path.index, path.generation, static_cast<int>(path.state), path.sends,
                            path.receives, path.peerReported, !path.reportDue, path.problem);
      }
    }
    for (const Use& use : use_) text += fmt::format("\nreceive {} {}", use.open, use.bytes);
    for (const Sending& each : sending_)
      text += fmt::format("\nsend {} {}", each.active, each.bytes);
    return text;
  }

  struct Named {
    bool on = false;
    DirectPlace place;
  };
  struct More {
    std::uint32_t slot;
    std::uint64_t upTo;
  };
  std::array<Named, kSlots> named_{};
  std::deque<More> mores_;
  std::uint64_t finished_ = 0;
};

TEST_F(VerbsLinkStormTest, EverythingAtOnceAndAllArrives) {
  Rng rng(testSeed());
  setLogHandler([](LogLevel, std::string_view) {});
  std::uint32_t generations = 0;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    mostBytes_ = round % 2 == 0 ? 3 * kPiece : kRoom;
    beginStorm(rng);
    ASSERT_FALSE(HasFatalFailure());
    weather(rng, 3000, false);
    EXPECT_TRUE(sender_->link->failure()) << sender_->link->failure().message();
    EXPECT_TRUE(receiver_->link->failure()) << receiver_->link->failure().message();
    for (const Path& path : sender_->link->set().paths()) {
      generations = std::max(generations, path.generation);
    }
    end();
  }
  setLogHandler(nullptr);
  EXPECT_GT(finished_, 0u);
  EXPECT_GT(generations, 2u) << "nothing failed";
}

// A receiving end that closes when it has everything: the sender's acknowledgements are lost with
// its queue pairs, some of which have failed before, and the sends are over all the same.
TEST_F(VerbsLinkStormTest, AReceiverThatClosesInTheStormLeavesNoSendOpen) {
  Rng rng(testSeed());
  setLogHandler([](LogLevel, std::string_view) {});
  std::size_t open = 0;
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    mostBytes_ = round % 2 == 0 ? 3 * kPiece : kRoom;
    beginStorm(rng);
    ASSERT_FALSE(HasFatalFailure());
    weather(rng, 300, false);
    fabric_.atomically([&] {
      fabric_.fate = [its = Rng(rng())](const FakeQp&, const FakeSend&) mutable {
        return chance(its, 0.02) ? Fate::AckLost : Fate::AckLate;
      };
    });
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) name(slot, rng);
    EXPECT_TRUE(test::waitUntil([&] {
      stepStorm(rng);
      finishWhatIs();
      return over() ||
             std::none_of(use_.begin(), use_.end(), [](const Use& use) { return use.open; });
    }));
    for (const Sending& each : sending_) open += each.active ? 1 : 0;
    receiver_->channel.refuse = nullptr;
    receiver_->link->sayBye();
    receiver_->link->stop();
    EXPECT_TRUE(test::waitUntil([&] {
      sender_->stepToItsEnd(receiver_->channel);
      finishWhatIs();
      return quiet();
    })) << text();
    end();
  }
  setLogHandler(nullptr);
  EXPECT_GT(open, 0u) << "no acknowledgement was missing";
}

TEST_F(VerbsLinkStormTest, WithNicsThatFallSilentItEndsOrAllArrives) {
  Rng rng(testSeed());
  setLogHandler([](LogLevel, std::string_view) {});
  for (int round = 0; round < kRounds && !HasFailure(); ++round) {
    mostBytes_ = round % 2 == 0 ? 3 * kPiece : kRoom;
    beginStorm(rng);
    ASSERT_FALSE(HasFatalFailure());
    weather(rng, 2000, true);
    if (over()) stopAndLook();
    end();
  }
  setLogHandler(nullptr);
  EXPECT_GT(finished_, 0u);
}

}  // namespace
}  // namespace hoccl::net_plugin
