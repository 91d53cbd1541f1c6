#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/base/fd.h"
#include "common/base/flag.h"
#include "common/base/status.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/frames.h"
#include "common/net/tcp/transfer_ring.h"

namespace hoccl {

/// The data sockets of a bundle, its life socket, and the threads that drive them. They sleep in
/// epoll while there is nothing to do.
class SocketWorkers {
 public:
  struct Sockets {
    UniqueFd life;
    std::vector<UniqueFd> data;
    int control = -1;  ///< the owner's; only watched
  };
  SocketWorkers(Sockets sockets, const BundleOptions& options, FrameSink* sink,
                std::string peerText);
  ~SocketWorkers();
  SocketWorkers(const SocketWorkers&) = delete;
  SocketWorkers& operator=(const SocketWorkers&) = delete;
  Status start();

  /// The posting thread.
  [[nodiscard]] bool post(const Transfer& transfer);
  void resume();
  void nudge();
  /// The watch rings once when the control socket has room again. Any thread.
  void awaitControlRoom();

  /// The connection ends because of `why`. What has come is still read, for a moment; or, if `now`,
  /// nothing any more. The first reason is kept. Any thread.
  void end(const Status& why, bool now);
  /// The peer's life socket shows that this side ends.
  void sayEnd();
  /// It ended `now`.
  [[nodiscard]] bool cut() const { return cut_.load(std::memory_order_acquire); }
  [[nodiscard]] bool gone() const { return gone_.load(std::memory_order_acquire); }
  [[nodiscard]] bool ending() const { return endingSinceNs_.load() != 0; }
  [[nodiscard]] std::uint64_t endingSinceNs() const { return endingSinceNs_.load(); }
  [[nodiscard]] Status status() const;
  [[nodiscard]] int watchFd() const { return watchEvent_.get(); }
  [[nodiscard]] unsigned count() const { return dataSockets_; }
  /// Every piece posted is sent, and acknowledged by the peer's host.
  [[nodiscard]] bool drained() const;

 private:
  enum Sleep : int { kAwake, kCanSend, kCannotSend };
  struct Socket;
  struct Worker;

  void run(Worker& worker);
  bool sendOn(Socket& socket);
  bool receiveOn(Worker& worker, Socket& socket);
  void setHolding(Socket& socket, bool holding);
  bool takeEvents(Worker& worker, int timeoutMs);
  static void wakeAt(Socket& socket, std::uint64_t missing);
  bool readLife();
  void watchControl(int operation, std::uint32_t events);

  void ended(Socket& socket, const Status& why, bool now);
  void finishEnding();
  void wake(Worker& worker);

  BundleOptions options_;
  FrameSink* sink_;
  std::string peerText_;
  UniqueFd life_;
  int control_;
  bool lifeEnded_ = false;
  UniqueFd watchEvent_;
  TransferRing ring_;
  std::vector<std::unique_ptr<Worker>> workers_;
  unsigned dataSockets_ = 0;
  std::size_t nextWake_ = 0;
  std::atomic<std::uint64_t> piecesSent_{0};
  std::atomic<unsigned> open_{0};     ///< data sockets that may still bring something
  std::atomic<unsigned> holding_{0};  ///< of those, with a payload that has no place yet
  std::atomic<std::uint64_t> endingSinceNs_{0};
  std::atomic<std::uint64_t> lastBytesNs_{0};  ///< something came when it was ending already
  std::atomic<bool> gone_{false};
  std::atomic<bool> cut_{false};
  std::atomic<bool> stop_{false};
  mutable std::mutex statusMutex_;  ///< once in a bundle's life
  Status status_;
};

}  // namespace hoccl
