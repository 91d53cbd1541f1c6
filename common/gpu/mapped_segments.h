#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/base/fd.h"
#include "common/gpu/driver.h"

namespace hoccl {

/// One mapping of virtual memory management (cuMemMap). A buffer may reach over many that lie side
/// by side: PyTorch's expandable_segments map 20 MiB at a time.
struct MappedSegment {
  CUdeviceptr base = 0;
  std::uint64_t bytes = 0;
  std::uint64_t id = 0;  ///< CU_POINTER_ATTRIBUTE_BUFFER_ID, another one for each mapping

  [[nodiscard]] CUdeviceptr end() const { return base + bytes; }
  friend bool operator==(const MappedSegment&, const MappedSegment&) = default;
};

/// By what another process can map a segment: a descriptor, or where its memory was created without
/// one (NVLink between nodes) a fabric handle, which is bytes that hold nothing.
struct SegmentHandle {
  using Fabric = std::array<unsigned char, 64>;
  static_assert(sizeof(Fabric) == sizeof(CUmemFabricHandle));
  UniqueFd fd;  ///< empty: `fabric` is it
  Fabric fabric{};
};

/// The allocation or mapping at the address; false: nothing is mapped there. With a context
/// current.
[[nodiscard]] bool segmentAt(const Driver* driver, CUdeviceptr address, MappedSegment* out);
/// The segments that the buffer lies in, in the order of their addresses. InvalidArgument where it
/// reaches beyond what is mapped. Inside an NCCL call; three attributes for each segment.
Status segmentsOf(const Driver* driver, CUdeviceptr address, std::uint64_t bytes,
                  std::vector<MappedSegment>* out);

/// Error: the segment's memory was not created so that it can be exported. No call that waits for
/// the device.
Status exportSegment(const Driver* driver, const MappedSegment& segment, SegmentHandle* out);
/// The memory behind a handle of another process, to be released.
Status importSegment(const Driver* driver, SegmentHandle& segment,
                     CUmemGenericAllocationHandle* out);

}  // namespace hoccl
