#pragma once

// The memory the net plugin shares with its mover for one GPU (`hoccl-mover --copies`): staging
// slots, what is to be copied between them and the application's device memory, and what has become
// of it. Plain words, as in segment.h; only the mover registers it with CUDA, the application's
// side makes no CUDA call.

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/base/flag.h"
#include "common/runtime/mover_protocol.h"

namespace hoccl {

inline constexpr std::uint64_t kCopySegmentMagic = 0x7970632d4c434f48ull;  // "HOCL-cpy"
inline constexpr std::uint32_t kCopySegmentVersion = 1;
/// Of one staging slot, and so of the largest copy: long enough for a copy engine's rate, short
/// enough for copies, sockets and copies to overlap within one message of NCCL's (128 to 512 KiB).
inline constexpr std::uint64_t kCopySlotBytes = 256 << 10;
/// Allocations that may be mapped at once.
inline constexpr std::uint32_t kMaxCopyImports = 4096;
/// Pieces of one copy. Segments of virtual memory management are at least 2 MiB, so a slot's bytes
/// lie in two of them at most.
inline constexpr std::uint32_t kCopyPieces = 2;

/// A run of device memory, by the import it lies in.
struct CopyPiece {
  std::uint64_t import;  ///< its id; place id % kMaxCopyImports, never given twice
  std::uint64_t offset;
  std::uint64_t bytes;
};

/// One staging slot's copy. The application writes it before the slot's number enters the ring; the
/// mover reads it once.
struct alignas(kCacheLine) CopySlot {
  Flag done;  ///< the last turn whose copy is over, written by the copy lane
  std::atomic<std::uint64_t> failed;  ///< the last turn whose copy was not made; set before `done`
  std::uint64_t turn;
  std::uint32_t toDevice;
  std::uint32_t pieces;
  CopyPiece piece[kCopyPieces];
};

/// What has become of an import. Texts are complete before the state that they explain.
struct alignas(kCacheLine) CopyImport {
  std::atomic<std::uint64_t> ready;   ///< id: it is mapped
  std::atomic<std::uint64_t> failed;  ///< id: it could not be, as `text` says
  std::atomic<std::uint64_t> gone;    ///< id: nothing of it is mapped any more
  char text[232];
};

struct alignas(kCacheLine) CopyRingEntry {
  std::atomic<std::uint64_t> turn;  ///< Vyukov's bounded queue, as in segment.h
  std::uint32_t slot;
};

struct alignas(kCacheLine) CopyHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t slots;
  std::uint64_t bytes;
  alignas(kCacheLine) std::atomic<std::uint64_t> tail;  ///< next position producers take
  alignas(kCacheLine) std::atomic<std::uint32_t> moverSleeps;
  std::atomic<std::uint32_t> broken;  ///< the device fails, as `text` says
  // What the mover did.
  alignas(kCacheLine) std::atomic<std::uint64_t> copiesOut;
  std::atomic<std::uint64_t> copiesIn, bytesOut, bytesIn;
  std::atomic<std::uint64_t> smallIn;  ///< of copiesIn, pieces under 32 KiB
  std::atomic<std::uint64_t> imports, unmaps;
  char text[400];
  CopyImport import[kMaxCopyImports];
};

/// Typed views of a mapped copy segment. Does not own the mapping.
class CopySegment {
 public:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t roundUp(std::size_t value) {
    return (value + kPage - 1) / kPage * kPage;
  }
  static std::uint32_t ringEntries(std::uint32_t slots) { return std::bit_ceil(slots); }
  static std::size_t bytesFor(std::uint32_t slots) {
    return stagingOffset(slots) + slots * kCopySlotBytes;
  }

  CopySegment() = default;
  /// Lays a new one out in zeroed memory.
  static CopySegment create(void* memory, std::uint32_t slots) {
    CopySegment segment(memory, slots);
    CopyHeader& header = segment.header();
    header.version = kCopySegmentVersion;
    header.slots = slots;
    header.bytes = bytesFor(slots);
    for (std::uint64_t i = 0; i < ringEntries(slots); ++i) {
      segment.entry(i).turn.store(i, std::memory_order_relaxed);
    }
    header.magic = kCopySegmentMagic;
    return segment;
  }
  /// False: not one that this build has laid out.
  [[nodiscard]] static bool attach(void* memory, std::size_t bytes, CopySegment* out) {
    if (bytes < sizeof(CopyHeader)) return false;
    const auto& header = *static_cast<const CopyHeader*>(memory);
    if (header.magic != kCopySegmentMagic || header.version != kCopySegmentVersion ||
        header.slots == 0 || header.bytes != bytes || bytes != bytesFor(header.slots)) {
      return false;
    }
    *out = CopySegment(memory, header.slots);
    return true;
  }

  [[nodiscard]] CopyHeader& header() const { return *reinterpret_cast<CopyHeader*>(base_); }
  [[nodiscard]] std::uint32_t slots() const { return slots_; }
  [[nodiscard]] CopySlot& slot(std::uint32_t index) const {
    return reinterpret_cast<CopySlot*>(base_ + kSlotsOffset)[index];
  }
  [[nodiscard]] std::byte* staging(std::uint32_t index) const {
    return base_ + stagingOffset(slots_) + index * kCopySlotBytes;
  }
  [[nodiscard]] CopyImport& import(std::uint64_t id) const {
    return header().import[id % kMaxCopyImports];
  }

  /// Application side, any thread. Never full: a slot is in the ring once, and it has room for all.
  void push(std::uint32_t slot) const {
    const std::uint64_t position = header().tail.fetch_add(1, std::memory_order_relaxed);
    CopyRingEntry& its = entry(position);
    its.slot = slot;
    its.turn.store(position + 1, std::memory_order_release);
  }
  /// Mover side, one thread: the oldest entry. `head` is the caller's, 0 at first.
  [[nodiscard]] bool pop(std::uint64_t* head, std::uint32_t* slot) const {
    CopyRingEntry& its = entry(*head);
    if (its.turn.load(std::memory_order_acquire) != *head + 1) return false;
    *slot = its.slot;
    ++*head;
    return true;
  }
  [[nodiscard]] bool empty(std::uint64_t head) const {
    return entry(head).turn.load(std::memory_order_acquire) != head + 1;
  }

 private:
  CopySegment(void* memory, std::uint32_t slots)
      : base_(static_cast<std::byte*>(memory)), slots_(slots) {}
  static constexpr std::size_t kSlotsOffset = (sizeof(CopyHeader) + kPage - 1) / kPage * kPage;
  static std::size_t ringOffset(std::uint32_t slots) {
    return kSlotsOffset + roundUp(slots * sizeof(CopySlot));
  }
  static std::size_t stagingOffset(std::uint32_t slots) {
    return ringOffset(slots) + roundUp(ringEntries(slots) * sizeof(CopyRingEntry));
  }
  [[nodiscard]] CopyRingEntry& entry(std::uint64_t position) const {
    return reinterpret_cast<CopyRingEntry*>(base_ +
                                            ringOffset(slots_))[position % ringEntries(slots_)];
  }

  std::byte* base_ = nullptr;
  std::uint32_t slots_ = 0;
};

// --- Over the socket pair. The mover answers CopyHello only (MoverReply); what becomes of imports
// shows in the segment.

enum class CopyMessageKind : std::uint32_t {
  ImportHandle = 1,   ///< an allocation of cudaMalloc, by its IPC handle
  ImportSegment = 2,  ///< memory of cuMemCreate, with its descriptor
  Drop = 3,           ///< unmap it once no copy uses it; copies asked for later fail
};

struct CopyHello {
  std::uint64_t magic;
  std::uint32_t protocol;
  std::int32_t applicationPid;
  std::uint64_t segmentBytes;
  char gpuUuid[48];
};

struct CopyMessage {
  std::uint64_t magic;
  CopyMessageKind kind;
  std::uint32_t reserved;
  std::uint64_t import;
  std::uint64_t base;  ///< application's address, for messages
  std::uint64_t bytes;
  unsigned char ipcHandle[64];
};

}  // namespace hoccl
