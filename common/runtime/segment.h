#pragma once

// The memory one application process shares with its mover for one GPU: what the two say to each
// other on the fast path. Laid out in plain words (fixed sizes, no pointers) since both processes
// map it at different addresses; both register it with CUDA, so that the streams of both can write
// and wait on the flags.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/base/flag.h"
#include "common/base/status.h"
#include "common/runtime/span_slot.h"

namespace hoccl {

inline constexpr std::uint64_t kSegmentMagic = 0x314c43434f48ull;  // "HOCCL1"
inline constexpr std::uint32_t kSegmentVersion = 11;
inline constexpr std::uint32_t kMaxCommunicators = 1024;
inline constexpr std::uint32_t kOpRingEntries = 4096;  // power of two
inline constexpr std::size_t kIpcHandleBytes = 64;
inline constexpr std::uint32_t kDropSlots = 32;

/// The flags of one launch slot. A launch is all steered operations of one outermost group on one
/// stream. `start` is written by the user's stream, `finish` by a copy lane or the mover, and
/// `released` by the mover when it has let go of the launch: a lane's `finish` shows before the
/// mover has seen it, and the slot must not be used again in between.
struct LaunchFlags {
  Flag start;
  Flag finish;
  Flag released;

  /// May be given to the next launch after the one with that sequence. A start written late would
  /// step back behind the next one's (rule 3), so it has to have come, too.
  [[nodiscard]] bool free(std::uint64_t sequence) const {
    return released.reached(sequence) && start.reached(sequence);
  }
};

enum class OpKind : std::uint32_t {
  Send = 1,
  Recv = 2,
  ExtraStream = 3,  ///< one more stream of a group's launch: it has a start and a finish of its own
  Abort = 4,        ///< end every operation of a communicator now, then acknowledge
  Close = 5,        ///< acknowledge when no operation of the communicator is left
  Drop = 6,         ///< unmap buffer.allocationId once no operation uses it; answered in a DropSlot
  DropIdle = 7,     ///< unmap every import that no operation uses; answered in a DropSlot
  /// This rank's own block of a collective that sends it to others as well: a copy of what the send
  /// with the same peer and pairSequence carries, which stands before it in the same launch.
  Mirror = 8,
  Nothing = 9,  ///< fills the place of an operation whose call failed
  /// Unmap every span that reaches into [allocationBase, allocationBase + allocationBytes) once no
  /// operation uses it; answered in a DropSlot.
  DropSpans = 10,
  /// A send (launchSlot 0) or receive (1) with `peer` that was about to be passed on to NCCL, and
  /// that cannot match what the peer waits in (pair_counts.h): fail the communicator on both sides.
  /// `pairSequence` and `passed` as if it had been passed on.
  Disagree = 11,
};

enum class BufferKind : std::uint32_t {
  Device = 0,   ///< an allocation of the application, to be imported by its handle
  Staging = 1,  ///< host memory of a StagingPool, which the mover has been given (AddStaging)
  /// Neighbouring segments of virtual memory management (cuMemCreate, cuMemMap), which the mover
  /// has been given (AddSpan) and has mapped side by side. Pinned by the operation (SpanSlot).
  Span = 2,
};

/// A buffer as the mover can find it: the allocation's identity and where in it.
struct BufferRef {
  BufferKind kind;
  /// Device: CU_POINTER_ATTRIBUTE_BUFFER_ID. Staging: a StagingPool's number. Span: spanId().
  /// Unique in the process for ever.
  std::uint64_t allocationId;
  std::uint64_t allocationBase;  ///< application's address of the allocation, only to tell overlap
  std::uint64_t allocationBytes;
  std::uint64_t offset;  ///< bytes from the allocation's start
  unsigned char ipcHandle[kIpcHandleBytes];
};

/// One entry of the op ring: what an NCCL call asks the mover to do.
struct OpDescriptor {
  OpKind kind;
  std::uint32_t communicator;  ///< index into Segment's communicators
  std::int32_t peer;           ///< rank in the communicator
  std::uint32_t launchSlot;
  std::uint64_t launchSequence;
  std::uint32_t launchOps;      ///< operations of this launch in all (the same in each)
  std::uint32_t launchStreams;  ///< streams of this launch, of which launchStreams-1 ExtraStream
  /// 2: its bytes count where the record counts direct copies; 3: so does the call it belongs to.
  std::uint32_t counted;
  std::uint64_t bytes;
  /// Which of the communicators that had this index; one that has ended takes no operation any
  /// more.
  std::uint64_t generation;
  std::uint64_t pairSequence;  ///< counts the steered operations of (communicator, peer, direction)
  std::uint64_t passed;        ///< how many of that pair had been passed on to NCCL before (pair_counts.h)
  BufferRef buffer;
};

struct alignas(kCacheLine) OpRingEntry {
  /// Position + 1 when written, position + kOpRingEntries when free again (Vyukov's bounded queue).
  std::atomic<std::uint64_t> turn;
  OpDescriptor op;
};

/// Closed by the mover, which writes nothing there any more; free when the application has read what
/// was counted.
enum class CommunicatorState : std::uint32_t { Free = 0, Open = 1, Closed = 2 };

/// What the mover reports of one communicator. The application reads, the mover writes.
struct alignas(kCacheLine) CommunicatorRecord {
  std::atomic<std::uint32_t> state;      ///< CommunicatorState
  std::atomic<std::uint32_t> errorCode;  ///< hoccl::Code; not 0 once an operation has failed
  std::atomic<std::uint64_t> closes;     ///< Abort and Close descriptors acknowledged
  std::atomic<std::uint64_t>
      generation;       ///< the application counts it up for each new communicator
  char errorText[400];  ///< complete before errorCode is set
  /// On a line of their own: the mover writes them with every operation, and the launch path reads
  /// what is above.
  alignas(kCacheLine) std::atomic<std::uint64_t> sentBytes;
  std::atomic<std::uint64_t> sentOps, receivedBytes, receivedOps;
  /// Of what has gone directly from GPU to GPU: calls and bytes. Written before `finish` is.
  std::atomic<std::uint64_t> directCalls, directBytes;

  /// The application has read what was counted. False, and nothing is done, while the mover has not
  /// closed it, or when it is free already.
  bool leave() {
    auto closed = static_cast<std::uint32_t>(CommunicatorState::Closed);
    return state.compare_exchange_strong(closed,
                                         static_cast<std::uint32_t>(CommunicatorState::Free));
  }
};

/// One request to let go of imports (Drop, DropIdle, DropSpans), and its answer. The descriptor
/// names the slot in launchSlot and the request in launchSequence.
struct alignas(kCacheLine) DropSlot {
  /// Sequence of the last request here; the application takes the slot when `done` has reached it.
  std::atomic<std::uint64_t> request;
  std::atomic<std::uint64_t> described;  ///< the request that `pending` tells about
  std::atomic<std::uint64_t> unmapped;   ///< imports; complete before `done` is set
  Flag done;                             ///< nothing of it is mapped any more
  char pending[256];  ///< what the mover waits for first; complete before `described` is set
};

struct alignas(kCacheLine) SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t launchSlots;
  std::uint64_t bytes;
  alignas(kCacheLine) std::atomic<std::uint64_t> opTail;  ///< next position producers take
  alignas(kCacheLine) std::atomic<std::uint64_t> opHead;  ///< next position the mover reads
  /// 1 while the mover sleeps without a bound: who adds an operation rings the event descriptor.
  alignas(kCacheLine) std::atomic<std::uint32_t> moverSleeps;
  std::atomic<std::uint32_t> moverDead;  ///< set by the application's watcher thread
  /// 1: the application rings with light fences, so that a mover issues a heavy one before it
  /// sleeps.
  std::atomic<std::uint32_t> lightFences;
  // What the mover did, for `hoccl` and the tests.
  alignas(kCacheLine) std::atomic<std::uint64_t> loopWakeups;
  std::atomic<std::uint64_t> chunksOut, chunksIn, imports, unmaps, doorbells;
  DropSlot drops[kDropSlots];
  SpanSlot spans[kSpanSlots];
};

/// Offsets and typed views of a mapped segment. Does not own the mapping.
class Segment {
 public:
  /// Bytes a segment with that many launch slots takes, a multiple of the page size.
  static std::size_t bytesFor(std::uint32_t launchSlots);

  Segment() = default;
  /// Lays a new segment out in zeroed memory.
  static Segment create(void* memory, std::uint32_t launchSlots);
  /// Checks what another process laid out: magic, version, size. Error names what does not fit.
  static Status attach(void* memory, std::size_t bytes, Segment* out);

  [[nodiscard]] SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  [[nodiscard]] LaunchFlags& launch(std::uint32_t slot) const { return launches_[slot]; }
  [[nodiscard]] CommunicatorRecord& communicator(std::uint32_t index) const {
    return communicators_[index];
  }
  [[nodiscard]] std::uint32_t launchSlots() const { return header().launchSlots; }
  [[nodiscard]] std::byte* base() const { return base_; }
  /// Distance from the segment's start, to turn a flag into a device address.
  [[nodiscard]] std::size_t offsetOf(const Flag& flag) const {
    return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(&flag) - base_);
  }

  /// Application side, any thread: takes the next place in the ring, which `fill` has to follow.
  /// False while the ring is full.
  [[nodiscard]] bool tryClaim(std::uint64_t* position) const;
  void fill(std::uint64_t position, const OpDescriptor& op) const;
  /// Both at once.
  [[nodiscard]] bool tryPush(const OpDescriptor& op) const {
    std::uint64_t position = 0;
    if (!tryClaim(&position)) return false;
    fill(position, op);
    return true;
  }
  /// Asks for the cache lines the next tryPush writes; the mover had them last.
  void prefetchPush() const {
    const std::uint64_t position = header().opTail.load(std::memory_order_relaxed);
    const auto* next = reinterpret_cast<const std::byte*>(&entry(position));
    for (std::size_t at = 0; at < sizeof(OpRingEntry); at += kCacheLine) {
      __builtin_prefetch(next + at, 1);
    }
  }
  /// Mover side, one thread: takes the oldest operation. False when there is none. A thread may
  /// stay in a driver call between `tryClaim` and `fill` for as long as its channel is full;
  /// `beyond` looks for operations behind such places, too, and reads a line that the producers
  /// write.
  [[nodiscard]] bool tryPop(OpDescriptor* op, bool beyond) const;
  /// No operation there, behind claimed places neither. Mover side.
  [[nodiscard]] bool empty() const;

 private:
  explicit Segment(void* memory) : base_(static_cast<std::byte*>(memory)) {}
  void locate();
  OpRingEntry& entry(std::uint64_t position) const { return ring_[position % kOpRingEntries]; }
  /// The place of the oldest operation; false when there is none.
  bool oldest(bool beyond, std::uint64_t* position) const;

  std::byte* base_ = nullptr;
  OpRingEntry* ring_ = nullptr;
  LaunchFlags* launches_ = nullptr;
  CommunicatorRecord* communicators_ = nullptr;
};

}  // namespace hoccl
