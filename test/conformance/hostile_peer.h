#pragma once

// The other end of a connection, in a process without the plugin: it speaks the wire protocol
// itself and says what the test tells it to.

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "common/net/tcp/bundle_setup.h"
#include "plugin-net/wire.h"
#include "test/conformance/session.h"

namespace conformance {

/// Until the set-up is done; ends the child when it takes longer than 5 s or fails.
std::unique_ptr<hoccl::Bundle> finishSetup(hoccl::BundleSetup& setup, hoccl::FrameSink& sink);

class HostilePeer {
 public:
  /// A sending end for a plugin that receives, and the other way about. With the other side's
  /// acceptFor and connectFor.
  static HostilePeer sender(const Side& side);
  static HostilePeer receiver(const Side& side);
  static void* acceptFor(const Side& side, Session& session);
  static void* connectFor(const Side& side, Session& session);

  /// A control message with so many bytes of payload.
  void say(hoccl::net_plugin::Kind kind, const hoccl::net_plugin::Control& control,
           std::size_t payload = 0);
  /// One transfer over the data sockets; waits until the kernel has taken it, or the plugin has
  /// hung up.
  void send(const hoccl::net_plugin::PieceBody& body, std::size_t bytes);
  void sendAhead(const hoccl::net_plugin::AheadBody& body, std::size_t bytes);
  /// Until the plugin has named receive `index` of tag 0.
  hoccl::net_plugin::Control awaitPosted(std::uint64_t index);
  /// Until it has announced so many messages.
  void awaitAnnounce(std::size_t count);
  /// Long enough for a plugin that tests its requests all the time to have taken what was sent.
  static void letItTake();
  /// Until the plugin has hung up, which it has to within 5 s.
  void stayUntilClosed();

 private:
  /// Takes whatever comes, and keeps the control messages.
  struct Sink final : hoccl::FrameSink {
    std::byte* place(const hoccl::FrameHeader& header, hoccl::Status* bad) override;
    void arrived(const hoccl::FrameHeader& header) override;
    std::vector<std::byte> memory;
    std::deque<hoccl::FrameHeader> heard;
  };

  HostilePeer() = default;
  void post(hoccl::Transfer transfer);
  bool heard(hoccl::net_plugin::Kind kind, std::size_t count, std::uint64_t index,
             hoccl::net_plugin::Control* out);

  std::unique_ptr<Sink> data_ = std::make_unique<Sink>(), control_ = std::make_unique<Sink>();
  std::vector<std::byte> payload_ = std::vector<std::byte>(1 << 20, std::byte{0x11});
  std::unique_ptr<std::atomic<std::uint64_t>> moved_ =
      std::make_unique<std::atomic<std::uint64_t>>(0);
  std::unique_ptr<hoccl::BundleListener> listener_;
  std::unique_ptr<hoccl::Bundle> bundle_;  ///< last: its threads send from payload_
};

}  // namespace conformance
