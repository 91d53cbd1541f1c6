#pragma once

// Two verbs connections over the fake library, and traffic between them whose every byte is
// checked.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/net/verbs/verbs_connection.h"
#include "common/net/verbs/verbs_transport.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_verbs.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

/// What one direction carries: slots filled with a pattern of their own, and numbered messages
/// between them.
struct TrafficPlan {
  std::uint64_t key = 0, slotBytes = 0;
  [[nodiscard]] std::uint64_t keyOf(std::uint32_t slot, std::uint64_t turn) const {
    return key * 1'000'000 + turn * 64 + slot;
  }
  /// Odd sizes from a byte to the whole slot.
  [[nodiscard]] std::uint64_t bytesOf(std::uint32_t slot, std::uint64_t turn) const {
    return turn % 3 == 0 ? slotBytes : 1 + patternWord(slot, turn * 8) % slotBytes;
  }
};

/// One end's sending. `turns`: as an earlier traffic left the slots.
class Sending {
 public:
  Sending(Connection& over, std::uint64_t key, const std::vector<std::uint64_t>& turns = {})
      : over_(over), plan_{key, over.staging().slotBytes}, turns_(turns) {
    turns_.resize(over.staging().out.size());
  }
  /// Starts what can start; true if anything did.
  bool step(std::uint64_t slotsToSend, std::uint64_t messagesToSend) {
    bool moved = false;
    for (std::uint32_t i = 0; i < turns_.size(); ++i) {
      const Slot& out = over_.staging().out[i];
      if (slots_ >= slotsToSend || !out.credit->reached(turns_[i])) continue;
      const std::uint64_t turn = turns_[i] + 1, bytes = plan_.bytesOf(i, turn);
      writePattern(out.data, plan_.keyOf(i, turn), 0, bytes);
      if (!over_.tryWrite(i, bytes, turn)) continue;
      turns_[i] = turn;
      ++slots_;
      moved = true;
    }
    if (messages_ < messagesToSend) {
      Message message{};
      message.type = MessageType::Chunk;
      message.pairSequence = messages_;
      message.bytes = ~messages_;
      if (over_.trySend(message)) {
        ++messages_;
        moved = true;
      }
    }
    return moved;
  }
  [[nodiscard]] std::uint64_t slots() const { return slots_; }
  [[nodiscard]] const std::vector<std::uint64_t>& turns() const { return turns_; }

 private:
  Connection& over_;
  TrafficPlan plan_;
  std::vector<std::uint64_t> turns_;
  std::uint64_t slots_ = 0, messages_ = 0;
};

/// One end's receiving, which checks every byte.
class Receiving {
 public:
  Receiving(Connection& over, std::uint64_t key, const std::vector<std::uint64_t>& turns = {})
      : over_(over), plan_{key, over.staging().slotBytes}, turns_(turns) {
    turns_.resize(over.staging().in.size());
  }
  bool step() {
    bool moved = false;
    for (Message message; over_.tryReceive(&message); moved = true) {
      EXPECT_EQ(message.pairSequence, messages_);
      EXPECT_EQ(message.bytes, ~messages_);
      ++messages_;
    }
    for (std::uint32_t i = 0; i < turns_.size(); ++i) {
      const Slot& in = over_.staging().in[i];
      if (!in.ready->reached(turns_[i] + 1)) continue;
      ++turns_[i];
      EXPECT_EQ(in.ready->value.load(), turns_[i]);
      const std::uint64_t bytes = plan_.bytesOf(i, turns_[i]);
      expected_.resize(bytes);
      writePattern(expected_.data(), plan_.keyOf(i, turns_[i]), 0, bytes);
      EXPECT_EQ(std::memcmp(expected_.data(), in.data, bytes), 0) << "slot " << i;
      std::memset(in.data, 0xee, bytes);  // the next turn's has to come anew
      in.credit->set(turns_[i]);
      ++slots_;
      moved = true;
    }
    return moved;
  }
  [[nodiscard]] bool got(std::uint64_t slots, std::uint64_t messages) const {
    return slots_ >= slots && messages_ >= messages;
  }
  [[nodiscard]] const std::vector<std::uint64_t>& turns() const { return turns_; }
  [[nodiscard]] std::string text() const {
    return fmt::format("{} slots, {} messages", slots_, messages_);
  }

 private:
  Connection& over_;
  TrafficPlan plan_;
  std::vector<std::uint64_t> turns_;
  std::vector<std::byte> expected_;
  std::uint64_t slots_ = 0, messages_ = 0;
};

class VerbsPairTest : public ::testing::Test {
 protected:
  static constexpr PeerId kA{1, 10}, kB{1, 20};
  static constexpr StagingGeometry kGeometry{4, 512 << 10};

  void SetUp() override { fabric_.reset(); }
  void TearDown() override {
    a_.reset();
    b_.reset();
    asking_.reset();
    answering_.reset();
    atA_.reset();
    atB_.reset();
    rightTurns_.clear();
    leftTurns_.clear();
    fabric_.reset();
  }
  void addNics(int count) {
    for (int i = 0; i < count; ++i) {
      fabric_.add(0, fmt::format("left_{}", i), fmt::format("10.0.{}.1", i)).vendorError = 0x81;
      fabric_.add(1, fmt::format("right_{}", i), fmt::format("10.0.{}.2", i)).vendorError = 0x82;
    }
  }
  Status open(int host, const VerbsSettings& settings, std::unique_ptr<Transport>* out) {
    SocketAddress local;
    EXPECT_TRUE(SocketAddress::parse("127.0.0.1", &local));
    return makeVerbsTransport(host == 0 ? kA : kB, kGeometry, FakeFabric::library(host), settings,
                              local, {}, out);
  }
  /// Both sides' handshakes until both are over.
  void handshake() {
    ASSERT_TRUE(open(0, settingsA_, &atA_));
    ASSERT_TRUE(open(1, settingsB_, &atB_));
    ASSERT_TRUE(atA_->connect(kB, atB_->address(), &asking_));
    ASSERT_TRUE(waitUntil([&] { return (answering_ = atB_->accept()) != nullptr; }));
    ASSERT_TRUE(waitUntil([&] {
      answering_->advance();
      return answering_->peer() != nullptr;
    }));
    answering_->decide(Handshake::Decision::Accept, "");
    EXPECT_TRUE(waitUntil([&] {
      const auto asker = asking_->advance(), answerer = answering_->advance();
      return asker != Handshake::State::Pending && answerer != Handshake::State::Pending;
    }));
  }
  void join() {
    handshake();
    take(*asking_, &a_);
    take(*answering_, &b_);
    ASSERT_TRUE(a_ && b_);
  }
  static void take(Handshake& handshake, std::unique_ptr<VerbsConnection>* out) {
    ASSERT_EQ(handshake.advance(), Handshake::State::Done) << handshake.status().message();
    out->reset(dynamic_cast<VerbsConnection*>(handshake.take().release()));
  }
  /// What the two threads of a mover do about a connection without traffic.
  static void tend(VerbsConnection& connection) {
    pollfd fd{connection.watchFd(), POLLIN, 0};
    if (::poll(&fd, 1, 0) > 0) connection.watch();
  }
  /// Moves everything both ways; `disturb` is called between two steps.
  void run(std::uint64_t slots, std::uint64_t messages, const std::function<void()>& disturb = {}) {
    const std::uint64_t key = 2 * ++runs_;
    Sending right(*a_, key, rightTurns_), left(*b_, key + 1, leftTurns_);
    Receiving atRight(*b_, key, rightTurns_), atLeft(*a_, key + 1, leftTurns_);
    const Deadline deadline = Deadline::afterMs(kPatienceMs);
    bool over = false;
    while (!over && !deadline.passed() && !HasFailure() && !a_->peerGone() && !b_->peerGone()) {
      if (disturb) disturb();
      tend(*a_);
      tend(*b_);
      bool moved = right.step(slots, messages);
      moved |= left.step(slots, messages);
      moved |= atRight.step();
      moved |= atLeft.step();
      over = atRight.got(slots, messages) && atLeft.got(slots, messages);
      if (!moved) std::this_thread::yield();
    }
    EXPECT_TRUE(over) << atRight.text() << " and " << atLeft.text() << " of " << slots << " and "
                      << messages << "; " << (a_->peerGone() ? a_->goneReason() : "") << "; "
                      << (b_->peerGone() ? b_->goneReason() : "");
    rightTurns_ = atRight.turns();
    leftTurns_ = atLeft.turns();
  }
  /// Without traffic, until something holds.
  bool idleUntil(const std::function<bool()>& condition) {
    return waitUntil([&] {
      tend(*a_);
      tend(*b_);
      Message none;
      EXPECT_FALSE(a_->tryReceive(&none));
      EXPECT_FALSE(b_->tryReceive(&none));
      return condition();
    });
  }

  FakeFabric& fabric_ = FakeFabric::get();
  VerbsSettings settingsA_, settingsB_;
  std::unique_ptr<Transport> atA_, atB_;
  std::unique_ptr<Handshake> asking_, answering_;
  std::unique_ptr<VerbsConnection> a_, b_;

 private:
  std::uint64_t runs_ = 0;
  std::vector<std::uint64_t> rightTurns_, leftTurns_;
};

}  // namespace hoccl::test
