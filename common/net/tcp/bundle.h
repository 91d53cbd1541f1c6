#pragma once

// The connection of two processes over TCP: one control socket, one life socket, and data sockets
// with threads of their own. Made by bundle_setup.h.
//
// Threads: all calls are the caller's, one thread at a time (NCCL's proxy thread, the mover's
// loop), except where said. The control socket is driven by that thread inside send() and
// receive(): a small message costs one system call on each side and no change of thread. The data
// sockets belong to the worker threads, which sleep in epoll while there is nothing to do.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/base/config.h"
#include "common/base/status.h"
#include "common/net/tcp/frames.h"

namespace hoccl {

struct BundleOptions {
  unsigned threads = 2;  ///< worker threads of this side
  /// Data sockets = threads * socketsPerThread, as connecting side.
  unsigned socketsPerThread = usualSockets();
  std::uint64_t pieceBytes = 1 << 20;  ///< largest payload of one frame of a transfer
  std::uint64_t spinUs = 200;          ///< how long a worker without work looks for some, awake
  std::uint64_t timeoutMs = 5000;  ///< set-up; a host that does not answer is gone after so long
  /// Connecting: a listener that lives and has not accepted yet is waited for without a bound
  /// (NCCL's proxy may come late); `timeoutMs` then bounds the way there only.
  bool waitForAccept = false;
  /// What the data sink says "not now" to outlives the peer's end: the bundle is not gone before it
  /// has been taken. Whoever waits looks at endingSinceNs().
  bool keepHeld = false;
  std::string name = "hoccl";  ///< of the threads and in messages

  static constexpr unsigned kMaxSockets = 64;  ///< data sockets of one bundle
  static constexpr std::uint64_t kMaxPieceBytes = 64 << 20;
  /// 2 on a host with at least eight CPUs, else 1.
  static unsigned usualSockets();
  /// HOCCL_SOCKET_NTHREADS and HOCCL_NSOCKS_PERTHREAD, else NCCL's, else the defaults;
  /// HOCCL_SPIN_US, HOCCL_TIMEOUT_MS.
  static Status fromEnvironment(const Config& config, BundleOptions* out);
};

/// What every piece of a transfer says of itself: the frame header's `user` bytes.
struct PieceHeader {
  std::uint64_t offset = 0;          ///< of this piece in the transfer
  std::array<std::byte, 40> user{};  ///< the transfer's, the same in each piece
};
static_assert(sizeof(PieceHeader) == kFrameUserBytes);

/// A payload to be sent over the data sockets, in pieces, in any order.
struct Transfer {
  std::uint16_t kind = 0;
  std::array<std::byte, 40> user{};
  const std::byte* data = nullptr;  ///< stays until `done` shows `bytes` more
  std::uint64_t bytes = 0;          ///< more than 0
  /// Grows by each piece the kernel has taken (release, by the workers). The caller's, and alive
  /// until then or until the bundle is destroyed.
  std::atomic<std::uint64_t>* done = nullptr;
};

class Bundle {
 public:
  static constexpr std::size_t kMaxControlPayload = 64 << 10;

  /// Stops the workers and closes the sockets; what the kernel has taken still goes out. Never
  /// waits for the peer. Afterwards nothing touches memory given to transfers or by sinks.
  virtual ~Bundle() = default;

  // --- Control socket: small messages, in order. The caller's thread.
  /// Sends a message with up to kMaxControlPayload bytes, which are copied; usually inside the
  /// call. False: no room, try later (or the bundle has failed: see `gone`).
  [[nodiscard]] virtual bool sendControl(std::uint16_t kind,
                                         const std::array<std::byte, kFrameUserBytes>& user,
                                         const void* payload, std::size_t bytes) = 0;
  /// Hands what has come to `sink`, and sends on what did not go out at once. True if anything
  /// came.
  virtual bool receiveControl(FrameSink& sink) = 0;
  /// Bytes of messages that the kernel has not taken yet.
  [[nodiscard]] virtual std::size_t controlBacklog() const = 0;
  /// Nothing more comes by receiveControl(): the peer's end has been read, or a moment has passed
  /// since that end without a message. What a sender leaves to its kernel may come after gone().
  [[nodiscard]] virtual bool controlOver() const = 0;
  /// This side ends soon: the peer sees endingSinceNs(). Who closes a socket on unread input makes
  /// the kernel throw away what is under way, so that a peer which sees it says nothing more.
  virtual void sayEnd() = 0;
  /// Readable when receiveControl() has something; for epoll only.
  [[nodiscard]] virtual int controlFd() const = 0;

  // --- Data sockets.
  /// Queues a transfer; false while the queue is full (or the bundle has failed).
  [[nodiscard]] virtual bool post(const Transfer& transfer) = 0;
  /// The data sink said "not now" and may say otherwise now. Any thread; cheap where none waits.
  virtual void resumeData() = 0;

  // --- The peer.
  /// The peer is gone or the connection has failed: every piece it sent before has been handed to
  /// the data sink, what it said before can still be taken by receiveControl(), nothing more comes.
  /// Any thread.
  [[nodiscard]] virtual bool gone() const = 0;
  /// When the first sign of the peer's end was seen (monotonicNs); 0: it lives. Any thread.
  [[nodiscard]] virtual std::uint64_t endingSinceNs() const = 0;
  /// How long after that the rest of what the peer sent is waited for.
  static constexpr std::uint64_t kLastBytesNs = 1'000'000'000;
  /// Why, once gone: one line; for an orderly end "the peer closed the connection".
  [[nodiscard]] virtual Status status() const = 0;
  /// Wakes the peer's watchFd().
  virtual void nudge() = 0;
  /// An eventfd: becomes readable when the peer nudges, or is gone. Whoever watches reads it.
  [[nodiscard]] virtual int watchFd() const = 0;

  /// Nothing of this side is on its way any more: the peer's host has acknowledged all that was
  /// sent. Some system calls.
  [[nodiscard]] virtual bool drained() const = 0;

  /// "10.0.0.1:4242", for messages.
  [[nodiscard]] virtual const std::string& peerText() const = 0;
  [[nodiscard]] virtual unsigned dataSockets() const = 0;
};

}  // namespace hoccl
