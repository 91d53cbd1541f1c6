#pragma once

#include <atomic>
#include <deque>
#include <memory>

#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/net/transport.h"

namespace hoccl {

/// The shared region of one connection, seen by one side.
class ShmConnection final : public Connection {
 public:
  enum class Side { Connecting, Accepting };

  /// Bytes of the region for that geometry.
  static std::size_t regionBytes(const StagingGeometry& geometry);

  /// Takes over the region and the set-up socket, which stays open to tell the peer's end.
  ShmConnection(SharedMemory region, UniqueFd socket, const StagingGeometry& geometry, Side side,
                const PeerId& peer);

  [[nodiscard]] const char* transport() const override { return "shm"; }
  [[nodiscard]] PeerId peer() const override { return peer_; }
  [[nodiscard]] const Staging& staging() const override { return staging_; }
  [[nodiscard]] bool sharedSlots() const override { return true; }
  [[nodiscard]] bool trySend(const Message& message) override;
  [[nodiscard]] bool tryReceive(Message* message) override;
  [[nodiscard]] bool tryWrite(std::uint32_t, std::uint64_t, std::uint64_t) override {
    return false;
  }
  [[nodiscard]] bool peerGone() const override { return gone_.load(std::memory_order_acquire); }
  [[nodiscard]] int watchFd() const override { return socket_.get(); }
  void nudge() override;
  void watch() override;
  Status handOver(const void* data, std::size_t bytes, std::span<const int> fds,
                  std::uint64_t timeoutMs) override;
  [[nodiscard]] bool takeHandedOver(HandedOver* out) override;

 private:
  struct MessageRing;
  SharedMemory region_;
  UniqueFd socket_;
  PeerId peer_;
  Staging staging_;
  MessageRing* sendRing_ = nullptr;
  MessageRing* receiveRing_ = nullptr;
  std::atomic<bool> gone_{false};
  std::deque<HandedOver> handedOver_;  ///< of the watching thread
};

}  // namespace hoccl
