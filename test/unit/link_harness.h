#pragma once

// Two links joined by a connection inside one thread, over lanes that end their jobs at random
// times or when the test says so.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/runtime/chunk_plan.h"
#include "common/runtime/link.h"
#include "test/unit/fake_lanes.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_transport.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

inline constexpr std::uint64_t kCommunicator = 77;

/// How often each edge was taken, both ends together.
struct Edges {
  std::uint64_t announced = 0;       // in:  Idle → Announced, out: Idle → Copying
  std::uint64_t copiedShared = 0;    // out: Copying → HandedOver
  std::uint64_t copiedUnshared = 0;  // out: Copying → Sending
  std::uint64_t copyIn = 0;          // in:  Announced → Copying
  std::uint64_t unwanted = 0;        // in:  Announced → Idle
  std::uint64_t copiedIn = 0;        // in:  Copying → Idle
  std::uint64_t mirrored = 0;        // the same of mirror slots
  // What is lent (Pull), which the edges above do not count.
  std::uint64_t lent = 0;      // out: Idle → Lent
  std::uint64_t returned = 0;  // out: Lent → Idle, read
  std::uint64_t refused = 0;   // in:  Announced → Idle; out: Lent → Idle
};

/// One end: a link with the mover around it reduced to what the link asks for.
class End final : public LinkOwner {
 public:
  End(FakeWire* wire, int side, std::uint32_t depth, Edges* edges)
      : wire_(wire),
        side_(side),
        edges_(edges),
        rng_(static_cast<std::uint32_t>(side) + 11),
        link(this, {0, static_cast<std::uint64_t>(2 - side)}) {
    out_.depth = in_.depth = peer_.depth = depth;
    for (std::size_t i = 0; i < SharedLanes::kCount; ++i) {
      auto out = std::make_unique<ManualLane>(LaneDirection::ToHost);
      auto in = std::make_unique<ManualLane>(LaneDirection::ToDevice);
      lanes.push_back(out.get());
      lanes.push_back(in.get());
      inLanes_.push_back(in.get());
      out_.lanes[i] = std::move(out);
      in_.lanes[i] = std::move(in);
    }
    for (std::unique_ptr<Lane>& lane : peer_.lanes) {
      auto peer = std::make_unique<ManualLane>(LaneDirection::Peer);
      lanes.push_back(peer.get());
      lane = std::move(peer);
    }
    link.establish(std::make_unique<FakeWire::End>(wire, side), HostRegistration());
  }

  Op* post(OpKind kind, std::uint64_t sequence, DeviceBuffer& buffer,
           DeviceBuffer* mirror = nullptr) {
    Op* op = make(kind, sequence, buffer);
    if (mirror) {
      op->partner = make(OpKind::Mirror, sequence, *mirror);
      op->partner->partner = op;
    }
    if (op->send()) {
      sends[sequence] = op;
      if (readyBefore_.count(sequence)) op->matched = true;
      link.startSend(op);
    } else {
      receives[sequence] = op;
      op->pulls = true;
      Message ready{};
      ready.type = MessageType::Ready;
      address(*op, &ready);
      link.send(ready);
      link.startReceive(op);
    }
    return op;
  }
  /// A send that is lent once its receiver is ready.
  Op* lend(std::uint64_t sequence, DeviceBuffer& buffer) {
    Op* op = make(OpKind::Send, sequence, buffer);
    op->route = Op::Route::Lent;
    sends[sequence] = op;
    if (readyBefore_.count(sequence)) startLoan(op);
    return op;
  }
  /// Ends an operation early, as an abort does.
  void drop(Op* op) {
    op->failed = true;
    link.forget(op);
    if (op->mirror()) return;
    (op->send() ? sends : receives).erase(op->descriptor.pairSequence);
    over.insert(op->descriptor.pairSequence);
  }
  static bool finished(const Op* op) { return op->done == op->descriptor.bytes; }

  /// One round: messages, then whatever moves.
  void round() {
    Message message;
    while (link.receive(&message)) {
      if (message.type == MessageType::Ready) {
        readyBefore_.insert(message.pairSequence);
        auto send = sends.find(message.pairSequence);
        if (send == sends.end()) continue;
        if (send->second->route == Op::Route::Lent && !send->second->matched) {
          startLoan(send->second);
        }
        send->second->matched = true;
      } else if (message.type == MessageType::Pull) {
        ASSERT_TRUE(link.announce(message)) << "slot " << message.slot << " turn " << message.turn;
        ++edges_->lent;
      } else if (message.type == MessageType::Refused) {
        ASSERT_TRUE(link.takeBack(message)) << "slot " << message.slot << " turn " << message.turn;
        ++edges_->refused;
      } else {
        ASSERT_EQ(message.type, MessageType::Chunk);
        ASSERT_GE(message.length, kMinChunkBytes);
        ASSERT_TRUE(link.announce(message)) << "slot " << message.slot << " turn " << message.turn;
        ++edges_->announced;
      }
    }
    for (auto& import : imports_) {
      if (imports == Imports::Never) break;
      if (import->state != PeerImport::State::Pending || !chance(rng_, 0.1)) continue;
      import->state = chance(rng_, refuses) ? PeerImport::State::Failed : PeerImport::State::Ready;
    }
    (void)link.progress();
    EXPECT_LE(out_.inFlight, out_.depth);
    EXPECT_LE(in_.inFlight, in_.depth);
    EXPECT_LE(peer_.inFlight, peer_.depth);
  }
  std::uint64_t copiesIn() const { return submittedTo(inLanes_); }
  std::uint64_t copiesOut() const { return submittedTo(lanes) - copiesIn(); }

  // LinkOwner.
  SharedLanes& outLanes() override { return out_; }
  SharedLanes& inLanes() override { return in_; }
  SharedLanes& peerLanes() override { return peer_; }
  void movesDirectly(const Op&) override {}
  void lent(Op& op) override { op.lent = true; }
  void returned(Op& op, bool read) override {
    op.lent = false;
    --op.copiesInFlight;
    if (read) {
      op.done += op.descriptor.bytes;
      ++edges_->returned;
    } else if (!op.failed) {
      op.issued = 0;
      op.route = Op::Route::Staged;
      link.startSend(&op);
    }
  }
  void borrow(Op& op, const Message& message) override {
    EXPECT_EQ(message.length, op.descriptor.pairSequence + 1);
    if (chance(rng_, refuses / 2)) return;  // out of reach at once
    imports_.push_back(std::make_unique<PeerImport>());
    op.target = imports_.back().get();
    op.target->address = kImportedAt;
    op.target->state = PeerImport::State::Pending;
  }
  void refused(Op& op) override { op.target = nullptr; }
  bool mayGo(const Op&) override { return true; }
  void directCopyTook(std::uint64_t, std::uint64_t) override {}
  FlagWrite finishWrite(const Op&) override { return {}; }
  void address(const Op& op, Message* message) override {
    message->communicator = kCommunicator;
    message->source = op.send() ? side_ : 1 - side_;
    message->destination = 1 - message->source;
    message->pairSequence = op.descriptor.pairSequence;
    message->bytes = op.descriptor.bytes;
  }
  void copyEnded(Op& op, std::uint64_t bytes) override {
    --op.copiesInFlight;
    op.done += bytes;
    if (op.send()) {
      ++(wire_->settings.shared ? edges_->copiedShared : edges_->copiedUnshared);
    } else if (op.target) {
      op.target = nullptr;
    } else {
      ++(op.mirror() ? edges_->mirrored : edges_->copiedIn);
    }
  }
  Claim claim(const Message& message, Op** op) override {
    if (over.count(message.pairSequence)) {
      ++edges_->unwanted;
      return Claim::Unwanted;
    }
    auto receive = receives.find(message.pairSequence);
    if (receive == receives.end()) return Claim::Early;
    *op = receive->second;
    if ((*op)->descriptor.bytes != message.bytes) return Claim::Mismatch;
    return Claim::Ready;
  }
  void fatal(const Status& status) override { fatals.push_back(status.message()); }

 private:
  Op* make(OpKind kind, std::uint64_t sequence, DeviceBuffer& buffer) {
    ops_.push_back(std::make_unique<Op>());
    Op* op = ops_.back().get();
    op->descriptor.kind = kind;
    op->descriptor.bytes = buffer.bytes();
    op->descriptor.pairSequence = sequence;
    op->descriptor.buffer.allocationId = sequence + 1;
    op->descriptor.buffer.offset = buffer.address() - kImportedAt;
    op->address = buffer.address();
    op->link = &link;
    return op;
  }
  void startLoan(Op* op) {
    op->matched = true;
    link.startSend(op);
  }
  static std::uint64_t submittedTo(const std::vector<ManualLane*>& lanes) {
    std::uint64_t sum = 0;
    for (const ManualLane* lane : lanes) sum += lane->submitted;
    return sum;
  }

  FakeWire* wire_;
  int side_;
  Edges* edges_;
  SharedLanes out_, in_, peer_;
  std::vector<ManualLane*> inLanes_;
  static constexpr CUdeviceptr kImportedAt = 0x1000;
  Rng rng_;
  std::vector<std::unique_ptr<PeerImport>> imports_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::set<std::uint64_t> readyBefore_;

 public:
  Link link;
  std::vector<ManualLane*> lanes;
  std::map<std::uint64_t, Op*> sends, receives;
  std::set<std::uint64_t> over;
  std::vector<std::string> fatals;
  enum class Imports { AtRandom, Never } imports = Imports::AtRandom;
  double refuses = 0;  ///< how often what is lent cannot be mapped here
};

/// Both ends and the wire, driven round by round in random order.
struct Pair {
  Pair(const FakeWire::Settings& settings, std::uint32_t seed, std::uint32_t depth = 3)
      : rng(seed),
        wire(settings, seed + 1),
        a(&wire, 0, depth, &edges),
        b(&wire, 1, depth, &edges) {}
  void step() {
    for (End* end : {&a, &b}) {
      if (chance(rng, 0.8)) end->round();
      for (ManualLane* lane : end->lanes) {
        if (chance(rng, 0.4)) lane->completeOne();
      }
    }
    wire.pump();
  }
  /// Steps until `condition`; a link that is stuck does not make it in so many.
  [[nodiscard]] bool run(const std::function<bool()>& condition, int steps = 100'000) {
    for (int i = 0; i < steps; ++i) {
      if (condition()) return true;
      step();
      if (::testing::Test::HasFatalFailure()) return false;
    }
    return condition();
  }
  [[nodiscard]] bool quiet() const {
    return a.link.quiet() && b.link.quiet() && !a.link.copying() && !b.link.copying();
  }
  Rng rng;
  Edges edges;
  FakeWire wire;
  End a, b;
};

inline std::uint64_t oddSize(Rng& rng) { return pick(rng, 64 << 10, 700 << 10) | 1; }

}  // namespace hoccl::test
