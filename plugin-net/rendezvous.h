#pragma once

// Listeners, and connections while they are being made.

#include <memory>
#include <string>
#include <vector>

#include "common/net/tcp/bundle_setup.h"
#include "plugin-net/net_plugin.h"
#include "plugin-net/receive_connection.h"
#include "plugin-net/send_connection.h"

namespace hoccl::net_plugin {

class Listener {
 public:
  Listener(std::unique_ptr<BundleListener> listener, std::shared_ptr<const VerbsGround> ground)
      : listener_(std::move(listener)), ground_(std::move(ground)) {}
  /// The next connection that stands, or null.
  Status accept(std::unique_ptr<ReceiveEnd>* out);
  [[nodiscard]] const BundleListener& socket() const { return *listener_; }

 private:
  /// A peer that has said its hello, and what is there of the connection.
  struct Coming {
    std::unique_ptr<BundleSetup> setup;
    std::unique_ptr<ReceiveEnd> end;
    bool attached = false;  ///< the sockets stand; the queue pairs are being tried
  };
  Status welcome(Coming& coming) const;
  static Status advance(Coming& coming, bool* stands);
  std::unique_ptr<BundleListener> listener_;
  std::shared_ptr<const VerbsGround> ground_;
  std::vector<Coming> coming_;
};

/// The connecting side, from the first call of connect to the last.
class Connecting {
 public:
  static Status begin(const Device& device, const void* handle, const BundleOptions& options,
                      std::uint64_t inlineBytes, int trafficClass,
                      std::unique_ptr<Connecting>* out);
  /// `out` stays null while it is under way.
  Status advance(std::unique_ptr<SendEnd>* out);

 private:
  Status attach();
  std::unique_ptr<BundleSetup> setup_;
  std::shared_ptr<const VerbsGround> ground_;
  VerbsSettings settings_;  ///< the ground's, but for the communicator's traffic class
  std::uint64_t inlineBytes_ = 0;
  std::unique_ptr<SendEnd> end_;  ///< once the sockets stand
};

}  // namespace hoccl::net_plugin
