#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/transport.h"
#include "common/net/verbs/message_window.h"
#include "common/net/verbs/path_set.h"
#include "common/net/verbs/slot_pieces.h"

namespace hoccl {

/// A link over queue pairs of one or more NICs. Slots go in pieces over all of them, messages and
/// credits over one at a time, each as a write whose immediate says what it was (immediate.h). The
/// completion queues are polled inside the calls; there is no thread, and no system call while
/// nothing fails. A bundle (common/net/tcp) carries the set-up, what is said about failures,
/// nudges, and shows the peer's end.
class VerbsConnection final : public Connection, private PathUser {
 public:
  static constexpr std::uint32_t kMostSlots = 64;  ///< creditsDue_ has a bit for each
  /// Takes the staging memory. `connecting`: which side this is.
  static Status create(const PeerId& peer, const StagingGeometry& geometry,
                       const VerbsSettings& settings, bool connecting,
                       std::unique_ptr<VerbsConnection>* out);
  /// Registers it with the first of the NICs and makes the queue pairs.
  Status makeRails(const Nics& all, const PathExtent& extent);
  ~VerbsConnection() override;

  // --- Set-up, by the handshake's thread.
  /// Takes the bundle and tells the peer of this side's queue pairs.
  Status open(BundleSetup& setup);
  enum class SetUp { Pending, Done, Failed };
  /// Done when the first queue pair is known to carry something; the others follow as they may.
  SetUp advanceSetUp();
  [[nodiscard]] Status setUpStatus() const { return setUpStatus_; }
  [[nodiscard]] int setUpFd() const { return epoll_.get(); }

  // --- Connection.
  [[nodiscard]] const char* transport() const override { return "verbs"; }
  [[nodiscard]] PeerId peer() const override { return peer_; }
  [[nodiscard]] const Staging& staging() const override { return staging_; }
  [[nodiscard]] bool sharedSlots() const override { return false; }
  [[nodiscard]] bool trySend(const Message& message) override;
  [[nodiscard]] bool tryReceive(Message* message) override;
  [[nodiscard]] bool tryWrite(std::uint32_t slot, std::uint64_t bytes, std::uint64_t turn) override;
  void nudge() override;
  [[nodiscard]] bool peerGone() const override;
  [[nodiscard]] std::string goneReason() const override;
  [[nodiscard]] int watchFd() const override { return epoll_.get(); }
  void watch() override;
  [[nodiscard]] bool busy() const override;
  [[nodiscard]] bool drained() const override;

  // --- For tests and figures.
  [[nodiscard]] std::size_t pathsUp() const { return set_.up(); }
  [[nodiscard]] const std::vector<Path>& paths() const { return set_.paths(); }

 private:
  VerbsConnection(const PeerId& peer, const StagingGeometry& geometry, SharedMemory memory,
                  const VerbsSettings& settings, bool connecting);

  // PathUser.
  [[nodiscard]] bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) override;
  [[nodiscard]] bool ending() const override;
  [[nodiscard]] bool heard(std::uint32_t immediate) override;
  void landed(const WorkId& id) override;
  void fillReport(verbs_wire::Report* report) override;
  void failedOver(const Path& path, const verbs_wire::Report& report) override;

  void progress();
  void pump();
  bool pumpMessages();
  bool pumpPiece(std::uint32_t slot);
  void settleSlot(std::uint32_t slot);
  void noteCredits();
  Path* messagePath();
  void takeControl();

  struct ControlSink final : FrameSink {
    explicit ControlSink(VerbsConnection* owner) : owner(owner) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;
    VerbsConnection* owner;
    verbs_wire::Nudge nudge;
  };

  /// Where something lies in the registered memory, here and, alike, at the peer.
  [[nodiscard]] std::uint64_t offsetOf(const void* address) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - staging_.base);
  }

  PeerId peer_;
  SharedMemory memory_;
  Staging staging_;
  Message* said_ = nullptr;   ///< ring of kMessageWindow: what this side has sent
  Message* heard_ = nullptr;  ///< the same of the peer, written by its NIC
  PathSet set_;
  int messagePath_ = -1;

  SendWindow sending_;
  ReceiveWindow receiving_;
  std::vector<OutPieces> out_;
  std::vector<InPieces> in_;
  std::vector<std::uint32_t> queue_;     ///< out-slots with pieces to post, oldest first
  std::vector<std::uint64_t> returned_;  ///< the last turn of in-slots given back
  std::uint64_t creditsDue_ = 0;         ///< in-slots whose credit is to be posted: a bit each
  bool consumedDue_ = false;
  std::uint64_t nudgedUpTo_ = 0;

  Status setUpStatus_;
  UniqueFd epoll_;
  std::atomic<bool> controlReady_{true};
  ControlSink controlSink_{this};
  std::unique_ptr<FrameSink> noData_;
  std::unique_ptr<Bundle> bundle_;
};

}  // namespace hoccl
