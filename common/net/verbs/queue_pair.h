#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "common/base/status.h"
#include "common/net/verbs/nic.h"
#include "common/net/verbs/verbs_library.h"
#include "common/net/verbs/verbs_settings.h"

namespace hoccl {

/// A completion queue of a NIC, without events: it is polled.
class CompletionQueue {
 public:
  CompletionQueue() = default;
  CompletionQueue(CompletionQueue&& other) noexcept { *this = std::move(other); }
  CompletionQueue& operator=(CompletionQueue&& other) noexcept {
    std::swap(library_, other.library_);
    std::swap(cq_, other.cq_);
    return *this;
  }
  ~CompletionQueue() {
    if (cq_) library_->destroyCq(cq_);
  }
  static Status create(const Nic& nic, std::uint32_t entries, CompletionQueue* out);
  [[nodiscard]] ibv_cq* get() const { return cq_; }
  /// How many completions were taken; negative: the queue is broken.
  [[nodiscard]] int poll(ibv_wc* completions, int most) const {
    return cq_->context->ops.poll_cq(cq_, most, completions);
  }

 private:
  const VerbsLibrary* library_ = nullptr;
  ibv_cq* cq_ = nullptr;
};

/// Memory the NIC reads and the peer's NIC writes.
class MemoryRegion {
 public:
  MemoryRegion() = default;
  MemoryRegion(MemoryRegion&& other) noexcept { *this = std::move(other); }
  MemoryRegion& operator=(MemoryRegion&& other) noexcept {
    std::swap(library_, other.library_);
    std::swap(mr_, other.mr_);
    return *this;
  }
  ~MemoryRegion() {
    if (mr_) library_->deregMr(mr_);
  }
  /// A failure for want of locked memory names the limit, RLIMIT_MEMLOCK.
  static Status create(const Nic& nic, const VerbsSettings& settings, void* address,
                       std::size_t bytes, MemoryRegion* out, unsigned alsoAccess = 0);
  /// The same of memory that the CPU may not reach: [offset, offset + bytes) of a DMA-BUF, known by
  /// `address`.
  static Status createDmaBuf(const Nic& nic, const VerbsSettings& settings, void* address,
                             std::size_t bytes, int fd, std::uint64_t offset, MemoryRegion* out,
                             unsigned alsoAccess = 0);
  [[nodiscard]] std::uint32_t localKey() const { return mr_->lkey; }
  [[nodiscard]] std::uint32_t remoteKey() const { return mr_->rkey; }

 private:
  const VerbsLibrary* library_ = nullptr;
  ibv_mr* mr_ = nullptr;
};

/// The other end of a queue pair.
struct QueuePairPeer {
  PortAddress address;
  std::uint32_t number = 0;
  std::uint32_t sequence = 0;  ///< its first packet's (psn)
};

struct QueuePairShape {
  std::uint32_t sendDepth = 16, receiveDepth = 16;
  std::uint32_t inlineBytes = 0;  ///< asked for; a device without gets a queue pair without
  unsigned alsoAccess = 0;        ///< beside remote writes
};

/// A reliable connected queue pair. Not thread-safe, like everything here but the library.
class QueuePair {
 public:
  QueuePair() = default;
  QueuePair(QueuePair&& other) noexcept { *this = std::move(other); }
  QueuePair& operator=(QueuePair&& other) noexcept {
    std::swap(nic_, other.nic_);
    std::swap(qp_, other.qp_);
    std::swap(sequence_, other.sequence_);
    std::swap(inlineBytes_, other.inlineBytes_);
    return *this;
  }
  ~QueuePair() {
    if (qp_) nic_->library().destroyQp(qp_);
  }

  /// In state INIT: it takes receives, and its number can be told to the peer. `cq` gets both
  /// directions' completions and lives longer.
  static Status create(std::shared_ptr<const Nic> nic, const CompletionQueue& cq,
                       const VerbsSettings& settings, const QueuePairShape& shape, QueuePair* out);
  /// Up to RTS. May wait for the resolution of the peer's address.
  Status connect(const VerbsSettings& settings, const QueuePairPeer& peer);
  /// Nothing is sent or taken any more; what was posted ends with an error.
  Status toError();

  explicit operator bool() const { return qp_ != nullptr; }
  [[nodiscard]] std::uint32_t number() const { return qp_ ? qp_->qp_num : 0; }
  [[nodiscard]] std::uint32_t sequence() const { return sequence_; }
  [[nodiscard]] std::uint32_t inlineBytes() const { return inlineBytes_; }
  /// 0 or an errno value, and then whether the device has taken some of the requests: the first
  /// ones may be on their way.
  [[nodiscard]] int postSend(ibv_send_wr* requests, bool* someTaken) const {
    ibv_send_wr* bad = nullptr;
    const int error = qp_->context->ops.post_send(qp_, requests, &bad);
    *someTaken = error != 0 && bad != requests;
    return error;
  }
  [[nodiscard]] int postReceive(ibv_recv_wr* requests) const {
    ibv_recv_wr* bad = nullptr;
    return qp_->context->ops.post_recv(qp_, requests, &bad);
  }
  /// As the device has them, for tests and messages.
  Status query(ibv_qp_attr* attributes) const;

 private:
  std::shared_ptr<const Nic> nic_;
  ibv_qp* qp_ = nullptr;
  std::uint32_t sequence_ = 0, inlineBytes_ = 0;
};

/// Attributes of the three steps, apart from the calls.
ibv_qp_attr initAttributes(const Nic& nic, const VerbsSettings& settings);
ibv_qp_attr receiveAttributes(const Nic& nic, const VerbsSettings& settings,
                              const QueuePairPeer& peer);
ibv_qp_attr sendAttributes(const VerbsSettings& settings, std::uint32_t sequence);

}  // namespace hoccl
