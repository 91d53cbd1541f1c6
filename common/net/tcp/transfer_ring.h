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
  /// Of one transfer.
  static constexpr std::uint64_t kMostPieces = (1 << 24) - 1;
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
    slot.claim.store(turnOf(tail) << 48 | std::uint64_t{slot.pieces} << 24,
                     std::memory_order_release);
    tail_.store(tail + 1, std::memory_order_seq_cst);
    return true;
  }

  /// Any worker: the next piece as a frame, in the order of the posts. False if there is none.
  [[nodiscard]] bool take(OutFrame* out) {
    std::uint64_t head = 0, claim = 0;
    do {
      if (!findNext(&head, &claim)) return false;
      // Not a plain addition: the slot may have been filled anew since `head` was read, and a piece
      // of that later transfer must not come before others.
    } while (
        !slotOf(head).claim.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel));
    Slot& slot = slotOf(head);
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
  /// Whether take() may find something.
  [[nodiscard]] bool any() {
    std::uint64_t head = 0, claim = 0;
    return findNext(&head, &claim);
  }
  /// Pieces of all transfers posted so far.
  [[nodiscard]] std::uint64_t posted() const { return posted_.load(std::memory_order_relaxed); }

 private:
  struct Slot;
  // A claim: 16 bits of the slot's turn, the number of pieces, the next one to be taken.
  static std::uint64_t next(std::uint64_t claim) { return claim & kMostPieces; }
  static std::uint64_t pieces(std::uint64_t claim) { return claim >> 24 & kMostPieces; }
  [[nodiscard]] std::uint64_t turnOf(std::uint64_t position) const {
    return position / slots_.size() & 0xffff;
  }
  Slot& slotOf(std::uint64_t position) { return slots_[position % slots_.size()]; }

  /// The first transfer that has a piece left, and its claim.
  bool findNext(std::uint64_t* head, std::uint64_t* claim) {
    for (;;) {
      *head = head_.load(std::memory_order_acquire);
      if (*head == tail_.load(std::memory_order_seq_cst)) return false;
      *claim = slotOf(*head).claim.load(std::memory_order_acquire);
      // Filled anew: all pieces of its last use have been taken.
      const bool again = *claim >> 48 != turnOf(*head);
      if (!again && next(*claim) < pieces(*claim)) return true;
      std::uint64_t expected = *head;
      head_.compare_exchange_strong(expected, *head + 1, std::memory_order_acq_rel);
    }
  }

  struct alignas(kCacheLine) Slot {
    Transfer transfer;
    std::uint64_t pieceBytes = 1;
    std::uint32_t pieces = 0;
    std::atomic<std::uint64_t> claim{0};
    std::atomic<std::uint32_t> read{0};  ///< pieces that their takers have read
  };
  std::vector<Slot> slots_;
  alignas(kCacheLine) std::atomic<std::uint64_t> head_{0};
  alignas(kCacheLine) std::atomic<std::uint64_t> tail_{0};
  std::atomic<std::uint64_t> posted_{0};
};

}  // namespace hoccl
