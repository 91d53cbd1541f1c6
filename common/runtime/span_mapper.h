#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/gpu/driver.h"
#include "common/gpu/mapped_segments.h"
#include "common/runtime/mover_protocol.h"

namespace hoccl {

/// The mover's mappings of spans (BufferKind::Span), on the control thread. A span has an address
/// range of its own, in which its segments lie side by side; a segment that lies in several spans
/// is mapped as often, its memory is one. What is mapped at its end goes with the process.
///
/// Mappings keep the memory, so no handle stays. Descriptors do where peers may want the span,
/// since the driver exports no memory that it has imported.
class SpanMapper {
 public:
  /// Keeps up to `mostKept` descriptors; spans that come later are mapped and cannot be passed on.
  explicit SpanMapper(const Driver* driver, std::size_t mostKept = 0)
      : driver_(driver), mostKept_(mostKept) {}

  /// Takes a message's segments, and those descriptors that it keeps. `whole`: the span is complete
  /// and mapped at `address`. On failure nothing of the span is left, and `refused` is the segment
  /// of the message that could not be mapped, or the number of its segments if it was none of them.
  Status add(const AddSpan& message, std::vector<UniqueFd>& segments, bool* whole,
             CUdeviceptr* address, std::uint32_t* refused);
  /// Error: what could not be undone; the rest has been.
  Status unmap(std::uint64_t id);
  Status unmapAll();
  /// Where all of that span is mapped; 0: it is not.
  [[nodiscard]] CUdeviceptr addressOf(std::uint64_t id) const;
  /// For another mover of this node: the segments of `message->id` behind `message->done` bytes, as
  /// many as one message takes. The descriptors stay this one's. Unsupported: they were not kept.
  Status passOn(AddSpan* message, std::vector<int>* segments) const;

 private:
  struct Span {
    CUdeviceptr address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t mapped = 0;
    std::vector<std::uint64_t> pieces;  ///< bytes of each
    std::vector<SegmentHandle> kept;    ///< all of theirs, or fewer and of no use
    std::size_t descriptors = 0;        ///< of those
  };
  Status begin(const AddSpan& message, Span* span);
  Status map(Span* span, SegmentHandle& segment, std::uint64_t bytes);
  void keep(Span* span, SegmentHandle segment);
  Status allowAccess(const Span& span);
  Status undo(const Span& span);

  const Driver* driver_;
  std::size_t mostKept_, kept_ = 0;      ///< descriptors
  std::map<std::uint64_t, Span> spans_;  ///< by id
  std::uint64_t building_ = 0;           ///< the one whose last segments are still to come; 0: none
};

}  // namespace hoccl
