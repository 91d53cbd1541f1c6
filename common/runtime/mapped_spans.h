#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "common/gpu/mapped_segments.h"
#include "common/runtime/segment.h"

namespace hoccl {

class MoverClient;

/// Application side: what one mover has been given of virtual memory management (cuMemCreate,
/// PyTorch's expandable_segments). Such memory has no handle that fits into the op ring, so its
/// segments are handed over as descriptors before the first launch that needs them. The unit is the
/// *span*: the segments that a buffer lies in. The mover maps it in one piece, and from then on it
/// is an import like any other.
class MappedSpans {
 public:
  MappedSpans(const Driver* driver, CUcontext context, MoverClient* mover, Segment segment)
      : driver_(driver), context_(context), mover_(mover), segment_(segment) {}

  /// The span of a buffer whose first segment has that identity, pinned once: `pin` has to be
  /// handed over with an operation or given back (SpanSlot::unpin). A buffer that the thread has
  /// used before costs an identity or none; it takes no lock then. Else the mover may have to map
  /// the span, which takes milliseconds and is bounded by HOCCL_TIMEOUT_MS. Errors: Unsupported
  /// where the mover cannot map it, which is remembered unless this process had
  /// no file descriptor left; InvalidArgument where the buffer reaches
  /// beyond what is mapped.
  Status take(CUdeviceptr address, std::uint64_t bytes, std::uint64_t firstId, BufferRef* out,
              SpanSlot** pin);

  /// The segments in that range of addresses are about to go: no further operation gets a span with
  /// one of them. False if the mover has none. No CUDA call.
  bool forget(CUdeviceptr address, std::size_t bytes);
  /// Whether any mover of this process has ever been given one.
  static bool any();

 private:
  /// A span that the mover has, or is about to let go of.
  struct Entry {
    std::uint32_t slot = 0;
    std::uint64_t generation = 0;
    std::vector<MappedSegment> segments;
    [[nodiscard]] bool overlaps(CUdeviceptr from, CUdeviceptr to) const {
      return segments.front().base < to && from < segments.back().end();
    }
  };
  struct Memo;
  struct MemoKey;
  struct Memos;
  static Memos& memos();
  [[nodiscard]] bool fits(const Memo& memo, CUdeviceptr address, std::uint64_t bytes,
                          std::uint64_t firstId) const;
  Status takeSlowly(CUdeviceptr address, std::uint64_t bytes, Memo* memo, bool* lasting);
  void removeOver();
  bool findAndPin(const std::vector<MappedSegment>& segments, Entry* out,
                  std::vector<std::uint64_t>* replaced);
  Status handOver(const std::vector<MappedSegment>& segments, Entry* out, bool* lasting);
  Status send(const std::vector<MappedSegment>& segments, std::uint64_t id, bool* answered,
              std::size_t* refused, bool* passing);

  const Driver* driver_;
  CUcontext context_;
  MoverClient* mover_;
  Segment segment_;
  std::mutex handingOver_;  ///< one span at a time; held while the mover maps
  std::mutex mutex_;        ///< what is below; taken in frees, never held across a call
  std::vector<Entry> entries_;
  std::unordered_set<std::uint64_t> refused_;  ///< segments that cannot be mapped
  std::uint32_t lastSlot_ = 0;
  bool told_ = false, toldDescriptors_ = false;
};

}  // namespace hoccl
