#pragma once

#include <memory>

#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/net/transport.h"

namespace hoccl {

/// A mover's connection to itself, for a rank's operations with itself: what goes out comes in. Slot i
/// of `out` is slot i of `in`, flags included.
class LoopbackConnection final : public Connection {
 public:
  static Status create(const PeerId& self, const StagingGeometry& geometry,
                       std::unique_ptr<Connection>* out);

  [[nodiscard]] const char* transport() const override { return "loopback"; }
  [[nodiscard]] PeerId peer() const override { return self_; }
  [[nodiscard]] const Staging& staging() const override { return staging_; }
  [[nodiscard]] bool sharedSlots() const override { return true; }
  [[nodiscard]] bool trySend(const Message& message) override;
  [[nodiscard]] bool tryReceive(Message* message) override;
  [[nodiscard]] bool tryWrite(std::uint32_t, std::uint64_t, std::uint64_t) override { return false; }
  void nudge() override {}
  [[nodiscard]] bool peerGone() const override { return false; }
  /// Never readable.
  [[nodiscard]] int watchFd() const override { return watch_.get(); }
  void watch() override {}

 private:
  LoopbackConnection(const PeerId& self, const StagingGeometry& geometry, SharedMemory region,
                     UniqueFd watch);

  PeerId self_;
  SharedMemory region_;
  UniqueFd watch_;
  Staging staging_;
  std::vector<Message> messages_;  ///< a ring
  std::size_t head_ = 0, count_ = 0;
};

}  // namespace hoccl
