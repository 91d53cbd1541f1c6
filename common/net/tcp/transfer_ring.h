#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/base/flag.h"
#include "common/net/tcp/bundle.h"

namespace hoccl {

/// Transfers that wait to be sent: one thread posts, the workers take pieces, without locks. A
/// worker takes the next piece only when its socket has room, so that a fast socket gets more of
/// them.
class TransferRing {
 public:
  explicit TransferRing(std::size_t capacity) : slots_(capacity) {}

  /// The posting thread. False while the ring is full.
  [[nodiscard]] bool post(const Transfer& transfer, std::uint64_t pieceBytes) {
    const std::uint64_t tail = tail_.load(std::memory_order_relaxed);
    Slot& slot = slots_[tail % slots_.size()];
    // Every piece of the last use has been taken, and read by whoever took it.
    if (slot.read.load(std::memory_order_acquire) != slot.pieces) return false;
    slot.transfer = transfer;
    slot.pieceBytes = pieceBytes;
    slot.pieces = static_cast<std::uint32_t>((transfer.bytes + pieceBytes - 1) / pieceBytes);
    slot.read.store(0, std::memory_order_relaxed);
    posted_.fetch_add(slot.pieces, std::memory_order_relaxed);
    slot.claim.store(std::uint64_t{slot.pieces} << 32, std::memory_order_release);
    tail_.store(tail + 1, std::memory_order_seq_cst);
    return true;
  }

  /// Any worker: the next piece as a frame. False if there is none.
  [[nodiscard]] bool take(OutFrame* out) {
    for (;;) {
      std::uint64_t head = head_.load(std::memory_order_acquire);
      if (head == tail_.load(std::memory_order_seq_cst)) return false;
      Slot& slot = slots_[head % slots_.size()];
      // A slot that has been filled anew since `head` was read gives a piece of its new transfer.
      std::uint64_t claim = slot.claim.load(std::memory_order_acquire);
      if (next(claim) < pieces(claim)) claim = slot.claim.fetch_add(1, std::memory_order_acq_rel);
      if (next(claim) >= pieces(claim)) {
        head_.compare_exchange_strong(head, head + 1, std::memory_order_acq_rel);
        continue;
      }
      const std::uint64_t offset = next(claim) * slot.pieceBytes;
      const std::uint64_t left = slot.transfer.bytes - offset;
      out->header = FrameHeader{};
      out->header.kind = slot.transfer.kind;
      out->header.bytes = left < slot.pieceBytes ? left : slot.pieceBytes;
      const PieceHeader piece{offset, slot.transfer.user};
      std::memcpy(out->header.user.data(), &piece, sizeof piece);
      out->payload = slot.transfer.data + offset;
      out->done = slot.transfer.done;
      slot.read.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  /// Whether take() may find something.
  [[nodiscard]] bool any() {
    for (;;) {
      std::uint64_t head = head_.load(std::memory_order_acquire);
      if (head == tail_.load(std::memory_order_seq_cst)) return false;
      const std::uint64_t claim =
          slots_[head % slots_.size()].claim.load(std::memory_order_acquire);
      if (next(claim) < pieces(claim)) return true;
      head_.compare_exchange_strong(head, head + 1, std::memory_order_acq_rel);
    }
  }
  /// Pieces of all transfers posted so far.
  [[nodiscard]] std::uint64_t posted() const { return posted_.load(std::memory_order_relaxed); }

 private:
  static std::uint64_t next(std::uint64_t claim) { return claim & 0xffffffffu; }
  static std::uint64_t pieces(std::uint64_t claim) { return claim >> 32; }

  struct alignas(kCacheLine) Slot {
    Transfer transfer;
    std::uint64_t pieceBytes = 1;
    std::uint32_t pieces = 0;
    std::atomic<std::uint64_t> claim{0};  ///< pieces in the upper half, the next one in the lower
    std::atomic<std::uint32_t> read{0};   ///< pieces that their takers have read
  };
  std::vector<Slot> slots_;
  alignas(kCacheLine) std::atomic<std::uint64_t> head_{0};
  alignas(kCacheLine) std::atomic<std::uint64_t> tail_{0};
  std::atomic<std::uint64_t> posted_{0};
};

}  // namespace hoccl
