#pragma once

// How the sockets of a bundle find each other. The listener has a nonce, which travels with its
// address over a way of the user's own (the agreement, NCCL's bootstrap); every socket's first
// message carries it, the bundle's random id and its place in the bundle. What does not is dropped,
// at once or, if it says nothing, after the timeout; it never reaches the user and holds nobody up.
// Sockets may come in any order, and those of several bundles mixed.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/base/status.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/interfaces.h"
#include "common/net/tcp/socket_address.h"

namespace hoccl {

using BundleNonce = std::array<std::uint8_t, 16>;
/// What the user says with a connection: who it is, what it expects.
using BundleHello = std::array<std::byte, 64>;

/// A bundle being made by either side. Poll `advance` now and then; `watchFd` becomes readable when
/// there is something to do.
class BundleSetup {
 public:
  enum class State { Pending, Done, Failed };
  virtual ~BundleSetup() = default;
  virtual State advance() = 0;
  [[nodiscard]] virtual int watchFd() const = 0;
  /// After Failed: one line; a refusal's reason is in it.
  [[nodiscard]] virtual Status status() const = 0;
  /// Accepting: the connecting side's hello, there from the beginning. Connecting: the accepting
  /// side's reply, after Done.
  [[nodiscard]] virtual const BundleHello& hello() const = 0;
  /// After Failed on the connecting side: the code the refusal carried; 0 if it was none.
  [[nodiscard]] virtual std::uint32_t refusal() const { return 0; }
  /// "10.0.0.1:4242".
  [[nodiscard]] virtual const std::string& peerText() const = 0;

  /// Accepting side, once: `reply` goes to the peer; Done follows when all sockets are there.
  virtual void accept(const BundleHello& reply) = 0;
  /// Accepting side, once: the peer's setup fails with that code (not 0) and reason; so does this.
  virtual void refuse(std::uint32_t code, const std::string& reason) = 0;

  /// After Done, once. `sink` gets the payloads of the data sockets, on the worker threads, and
  /// must live as long as the bundle. Workers start here.
  virtual Status take(FrameSink* dataSink, std::unique_ptr<Bundle>* out) = 0;
};

/// A listening socket. Setups keep what they need of it: it may go before them.
class BundleListener {
 public:
  virtual ~BundleListener() = default;
  /// Listens on any free port of `local`'s address.
  static Status open(const SocketAddress& local, const BundleOptions& options,
                     std::unique_ptr<BundleListener>* out);
  [[nodiscard]] virtual const SocketAddress& address() const = 0;
  [[nodiscard]] virtual const BundleNonce& nonce() const = 0;
  /// Readable when `accept` has something to do.
  [[nodiscard]] virtual int watchFd() const = 0;
  /// The next peer that has said its hello, or null. Never blocks.
  [[nodiscard]] virtual std::unique_ptr<BundleSetup> accept() = 0;
};

/// Begins to connect to a listener. Nothing is waited for; errors that show at once fail the call,
/// others the setup. Ends by itself after the options' timeout. `local`: where a link-local address
/// is reached from, else ignored.
Status connectBundle(const SocketAddress& listener, const BundleNonce& nonce,
                     const SocketAddress& local, const BundleHello& hello,
                     const BundleOptions& options, std::unique_ptr<BundleSetup>* out);

}  // namespace hoccl
