#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/shared_memory.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/transport.h"

namespace hoccl {

/// A link over a bundle. Messages and credits go over the control socket, in the thread of the
/// calls; slots go over the data sockets, out of this side's memory and straight into the peer's.
class TcpConnection final : public Connection {
 public:
  /// Takes the staging memory; `open` then takes the bundle of a setup that is done.
  static Status create(const PeerId& peer, const StagingGeometry& geometry,
                       std::unique_ptr<TcpConnection>* out);
  ~TcpConnection() override;
  Status open(BundleSetup& setup);

  [[nodiscard]] const char* transport() const override { return "tcp"; }
  [[nodiscard]] PeerId peer() const override { return peer_; }
  [[nodiscard]] const Staging& staging() const override { return staging_; }
  [[nodiscard]] bool sharedSlots() const override { return false; }
  [[nodiscard]] bool trySend(const Message& message) override;
  [[nodiscard]] bool tryReceive(Message* message) override;
  [[nodiscard]] bool tryWrite(std::uint32_t slot, std::uint64_t bytes, std::uint64_t turn) override;
  void nudge() override { bundle_->nudge(); }
  [[nodiscard]] bool peerGone() const override;
  [[nodiscard]] std::string goneReason() const override;
  [[nodiscard]] int watchFd() const override { return bundle_->watchFd(); }
  void watch() override;
  [[nodiscard]] bool drained() const override { return bundle_->drained(); }

 private:
  TcpConnection(const PeerId& peer, const StagingGeometry& geometry, SharedMemory memory);
  void returnCredits();
  void nonsense(const char* what);

  /// What arrives on the data sockets, on the workers' threads.
  struct SlotSink final : FrameSink {
    explicit SlotSink(TcpConnection* owner) : owner(owner) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;
    TcpConnection* owner;
  };
  /// What arrives on the control socket.
  struct MessageSink final : FrameSink {
    explicit MessageSink(TcpConnection* owner) : owner(owner) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;
    TcpConnection* owner;
  };
  struct Credit {
    std::uint32_t slot, padding;
    std::uint64_t turn;
  };
  static constexpr std::size_t kInbox = 256;

  PeerId peer_;
  SharedMemory memory_;
  Staging staging_;
  SlotSink slotSink_{this};
  MessageSink messageSink_{this};
  std::vector<std::atomic<std::uint64_t>> arrivedBytes_;  ///< of each in-slot's turn
  std::vector<std::uint64_t> returned_;                   ///< credits the peer has been told of
  std::vector<std::uint64_t> written_;  ///< turns of out-slots handed to the workers
  std::array<Message, kInbox> inbox_;   ///< received, not taken yet: a ring
  std::size_t inboxHead_ = 0, inboxCount_ = 0;
  Credit credit_{};
  std::uint64_t quietSinceNs_ = 0;  ///< when the control socket was last found empty
  std::atomic<bool> broken_{false};
  std::unique_ptr<Bundle> bundle_;  ///< last: its workers end before what they write to
};

}  // namespace hoccl
