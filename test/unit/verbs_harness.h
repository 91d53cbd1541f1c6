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

/// One direction between two connections: slots filled with a pattern of their own, and numbered
/// messages between them.
class Traffic {
 public:
  Traffic(Connection& from, Connection& to, std::uint64_t key)
      : from_(from),
        to_(to),
        key_(key),
        sent_(from.staging().out.size()),
        taken_(from.staging().out.size()) {}

  /// Starts what can start; takes and checks what is there. True if anything moved.
  bool step(std::uint64_t slotsToSend, std::uint64_t messagesToSend) {
    bool moved = false;
    for (std::uint32_t i = 0; i < sent_.size(); ++i) {
      const Slot& out = from_.staging().out[i];
      if (slotsSent_ < slotsToSend && out.credit->reached(sent_[i])) {
        writePattern(out.data, keyOf(i, sent_[i] + 1), 0, bytesOf(i, sent_[i] + 1));
        if (from_.tryWrite(i, bytesOf(i, sent_[i] + 1), sent_[i] + 1)) {
          ++sent_[i];
          ++slotsSent_;
          moved = true;
        }
      }
    }
    if (messagesSent_ < messagesToSend) {
      Message message{};
      message.type = MessageType::Chunk;
      message.pairSequence = messagesSent_;
      message.bytes = ~messagesSent_;
      if (from_.trySend(message)) {
        ++messagesSent_;
        moved = true;
      }
    }
    for (Message message; to_.tryReceive(&message); moved = true) {
      EXPECT_EQ(message.pairSequence, messagesTaken_);
      EXPECT_EQ(message.bytes, ~messagesTaken_);
      ++messagesTaken_;
    }
    for (std::uint32_t i = 0; i < taken_.size(); ++i) {
      const Slot& in = to_.staging().in[i];
      if (!in.ready->reached(taken_[i] + 1)) continue;
      ++taken_[i];
      EXPECT_EQ(in.ready->value.load(), taken_[i]);
      const std::uint64_t bytes = bytesOf(i, taken_[i]);
      std::vector<std::byte> expected(bytes);
      writePattern(expected.data(), keyOf(i, taken_[i]), 0, bytes);
      EXPECT_EQ(std::memcmp(expected.data(), in.data, bytes), 0) << "slot " << i;
      // Nothing may write to it any more before it is given back; then anything may.
      std::memset(in.data, 0xee, bytes);
      in.credit->set(taken_[i]);
      ++slotsTaken_;
      moved = true;
    }
    return moved;
  }
  /// Goes on with the slots as an earlier traffic left them.
  void resume(const std::vector<std::uint64_t>& turns) {
    if (!turns.empty()) sent_ = taken_ = turns;
  }
  [[nodiscard]] const std::vector<std::uint64_t>& turns() const { return taken_; }
  [[nodiscard]] std::uint64_t slotsTaken() const { return slotsTaken_; }
  [[nodiscard]] std::uint64_t messagesTaken() const { return messagesTaken_; }

 private:
  [[nodiscard]] std::uint64_t keyOf(std::uint32_t slot, std::uint64_t turn) const {
    return key_ * 1'000'000 + turn * 64 + slot;
  }
  /// Odd sizes from a byte to the whole slot.
  [[nodiscard]] std::uint64_t bytesOf(std::uint32_t slot, std::uint64_t turn) const {
    const std::uint64_t most = from_.staging().slotBytes;
    return turn % 3 == 0 ? most : 1 + patternWord(slot, turn * 8) % most;
  }
  Connection &from_, &to_;
  std::uint64_t key_;
  std::vector<std::uint64_t> sent_, taken_;
  std::uint64_t slotsSent_ = 0, slotsTaken_ = 0, messagesSent_ = 0, messagesTaken_ = 0;
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
    Traffic right(*a_, *b_, ++runs_ * 2), left(*b_, *a_, runs_ * 2 + 1);
    right.resume(rightTurns_), left.resume(leftTurns_);
    const Deadline deadline = Deadline::afterMs(kPatienceMs);
    bool over = false;
    while (!over && !deadline.passed() && !HasFailure()) {
      if (disturb) disturb();
      tend(*a_);
      tend(*b_);
      bool moved = right.step(slots, messages);
      moved |= left.step(slots, messages);
      over = right.slotsTaken() == slots && left.slotsTaken() == slots &&
             right.messagesTaken() == messages && left.messagesTaken() == messages;
      if (!moved) std::this_thread::yield();
      if (a_->peerGone() || b_->peerGone()) break;
    }
    EXPECT_TRUE(over) << right.slotsTaken() << " and " << left.slotsTaken() << " of " << slots
                      << " slots, " << right.messagesTaken() << " and " << left.messagesTaken()
                      << " of " << messages << " messages; "
                      << (a_->peerGone() ? a_->goneReason() : "") << "; "
                      << (b_->peerGone() ? b_->goneReason() : "");
    rightTurns_ = right.turns();
    leftTurns_ = left.turns();
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
