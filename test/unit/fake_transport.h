#pragma once

// A connection inside one thread: both ends belong to the test, which carries what is on its way.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "common/base/flag.h"
#include "common/net/transport.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

/// Two ends of a connection in one thread. With shared slots both ends' slots are the same memory;
/// otherwise `pump` carries writes and credits, in order, some of them late.
struct FakeWire {
  struct Settings {
    std::uint32_t slots = 4;
    std::uint64_t slotBytes = 128 << 10;
    std::size_t ringMessages = 64;
    bool shared = true;
    double refuse = 0;  ///< how often tryWrite says "later"
    double late = 0;    ///< how often pump leaves a write or credit for the next time
  };

  class End final : public Connection {
   public:
    End(FakeWire* wire, int side) : wire_(wire), side_(side) {}
    [[nodiscard]] const char* transport() const override { return "fake"; }
    [[nodiscard]] PeerId peer() const override {
      return {0, static_cast<std::uint64_t>(2 - side_)};
    }
    [[nodiscard]] const Staging& staging() const override { return wire_->staging[side_]; }
    [[nodiscard]] bool sharedSlots() const override { return wire_->settings.shared; }
    [[nodiscard]] bool trySend(const Message& message) override {
      auto& ring = wire_->messages[side_];
      if (ring.size() >= wire_->settings.ringMessages) {
        ++wire_->ringFull;
        return false;
      }
      ring.push_back(message);
      return true;
    }
    [[nodiscard]] bool tryReceive(Message* message) override {
      auto& ring = wire_->messages[1 - side_];
      if (ring.empty()) return false;
      *message = ring.front();
      ring.pop_front();
      return true;
    }
    [[nodiscard]] bool tryWrite(std::uint32_t slot, std::uint64_t bytes,
                                std::uint64_t turn) override {
      if (chance(wire_->rng, wire_->settings.refuse)) {
        ++wire_->writesRefused;
        return false;
      }
      ++wire_->writesTaken;
      wire_->writes.push_back({side_, slot, bytes, turn});
      return true;
    }
    [[nodiscard]] bool peerGone() const override { return false; }
    void nudge() override { wire_->nudgedFor[side_] = wire_->messages[side_].size(); }
    [[nodiscard]] int watchFd() const override { return -1; }
    void watch() override {}

   private:
    FakeWire* wire_;
    int side_;
  };

  struct Write {
    int side;
    std::uint32_t slot;
    std::uint64_t bytes, turn;
  };

  FakeWire(const Settings& s, std::uint32_t seed) : settings(s), rng(seed) {
    // out and in of each side; shared: the in of one side is the out of the other.
    for (int side = 0; side < 2; ++side) makeSlots(&staging[side].out, &staging[side]);
    for (int side = 0; side < 2; ++side) {
      if (settings.shared) {
        staging[side].in = staging[1 - side].out;
      } else {
        makeSlots(&staging[side].in, &staging[side]);
      }
      staging[side].slotBytes = settings.slotBytes;
    }
  }

  /// Without shared slots: carries what is on its way.
  void pump() {
    if (settings.shared) return;
    while (!writes.empty() && !chance(rng, settings.late)) {
      const Write w = writes.front();
      writes.pop_front();
      const Slot& from = staging[w.side].out[w.slot];
      const Slot& to = staging[1 - w.side].in[w.slot];
      std::memcpy(to.data, from.data, w.bytes);
      to.ready->set(w.turn);
    }
    for (int side = 0; side < 2; ++side) {
      for (std::uint32_t i = 0; i < settings.slots; ++i) {
        if (chance(rng, settings.late)) continue;
        const std::uint64_t credit = staging[side].in[i].credit->value.load();
        Flag& there = *staging[1 - side].out[i].credit;
        if (there.value.load() < credit) there.set(credit);
      }
    }
  }

  Settings settings;
  Rng rng;
  Staging staging[2];
  std::deque<Message> messages[2];  ///< by sending side
  std::size_t nudgedFor[2] = {};    ///< messages not taken yet at the side's last nudge
  std::deque<Write> writes;
  std::uint64_t writesTaken = 0, writesRefused = 0, ringFull = 0;

 private:
  void makeSlots(std::vector<Slot>* out, Staging*) {
    for (std::uint32_t i = 0; i < settings.slots; ++i) {
      memory_.push_back(std::make_unique<std::byte[]>(settings.slotBytes));
      flags_.push_back(std::make_unique<Flag[]>(3));
      for (int flag = 0; flag < 3; ++flag) flags_.back()[flag].value.store(0);
      Flag* flags = flags_.back().get();
      out->push_back({memory_.back().get(), &flags[0], &flags[1], &flags[2]});
    }
  }
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Flag[]>> flags_;
};

}  // namespace hoccl::test
