#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/net/tcp/bundle.h"
#include "plugin-net/loopback.h"
#include "plugin-net/net_plugin.h"
#include "plugin-net/verbs_link.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {

/// What both ends have: the sockets, the queue pairs if there are any, control messages that did
/// not go out at once, and how it ends.
class Endpoint final : private LinkChannel {
 public:
  /// `peer`: who is at the other end, for messages.
  Endpoint(const char* role, std::string peer) : role_(role), peer_(std::move(peer)) {}
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  ~Endpoint() override { shut(false); }

  /// Before the sockets.
  Status makeLink(std::shared_ptr<const VerbsGround> ground, const VerbsSettings& settings,
                  const PathExtent& extent, bool connecting);
  /// Null: everything goes over the sockets.
  [[nodiscard]] VerbsLink* link() { return link_.get(); }
  [[nodiscard]] const VerbsLink* link() const { return link_.get(); }
  /// Stopped with the link; null: none.
  void alsoStop(Loopback* loopback) { loopback_ = loopback; }
  /// With the sockets: tells the peer of the queue pairs.
  void startLink() {
    if (link_) link_->start();
  }

  void attach(std::unique_ptr<Bundle> bundle) { bundle_ = std::move(bundle); }
  [[nodiscard]] Bundle* bundle() { return bundle_.get(); }
  [[nodiscard]] const Status& failure() const { return failure_; }

  /// Sends a control message, if need be later (`receive` does that).
  void say(Kind kind, const Control& control, const DirectPlace* place = nullptr);
  /// Sends a message with its payload; false: no room now.
  [[nodiscard]] bool sayNow(Kind kind, const Control& control, const void* payload,
                            std::size_t bytes);
  /// Where the control stream is: a message said when it was at `p` is with the kernel once
  /// `taken() >= p`.
  [[nodiscard]] std::uint64_t said() const { return said_; }
  [[nodiscard]] std::uint64_t taken() const { return said_ - bundle_->controlBacklog(); }

  /// Hands what has come on the control socket to `sink`, sends what waits. `gone` becomes true
  /// once the peer is gone and nothing it said is left.
  void receive(FrameSink& sink, bool* gone);
  /// Why the peer is gone.
  [[nodiscard]] Status whyGone() const;

  /// Says what went wrong, once, and closes the sockets, so that the peer knows, too.
  Status fail(const Status& status);
  /// Closes the sockets. With `linger` only once the peer's host has what was sent, or after
  /// kLingerMs: unread input (places, credits) at the close would make the kernel throw away what
  /// is under way. The peer is told first, and then says nothing; what it had said is read. So what
  /// does not fit its host goes on by itself behind the close.
  void shut(bool linger);

  static constexpr std::uint64_t kLingerMs = 100;

 private:
  struct Waiting {
    Kind kind;
    Control control;
    DirectPlace place;
    bool placed;
  };
  [[nodiscard]] bool flush();
  /// The caller may do with its memory what it likes afterwards.
  void stopNics();
  // LinkChannel.
  [[nodiscard]] bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) override;
  [[nodiscard]] bool ending() const override { return !bundle_ || bundle_->endingSinceNs() != 0; }

  const char* role_;
  const std::string peer_;
  std::unique_ptr<Bundle> bundle_;
  std::deque<Waiting> outbox_;
  std::uint64_t said_ = 0;
  Status failure_;
  std::unique_ptr<VerbsLink> link_;
  Loopback* loopback_ = nullptr;
};

}  // namespace hoccl::net_plugin
