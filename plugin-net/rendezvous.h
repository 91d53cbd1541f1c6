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
  Listener(std::unique_ptr<BundleListener> listener) : listener_(std::move(listener)) {}
  /// The next connection that stands, or null.
  Status accept(std::unique_ptr<ReceiveEnd>* out);
  [[nodiscard]] const BundleListener& socket() const { return *listener_; }

 private:
  std::unique_ptr<BundleListener> listener_;
  std::vector<std::unique_ptr<BundleSetup>> coming_;
};

/// The connecting side, from the first call of connect to the last.
class Connecting {
 public:
  static Status begin(const Device& device, const void* handle, const BundleOptions& options,
                      std::uint64_t inlineBytes, std::unique_ptr<Connecting>* out);
  /// `out` stays null while it is under way.
  Status advance(std::unique_ptr<SendEnd>* out);

 private:
  std::unique_ptr<BundleSetup> setup_;
  std::uint64_t inlineBytes_ = 0;
};

}  // namespace hoccl::net_plugin
