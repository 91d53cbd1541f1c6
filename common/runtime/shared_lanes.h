#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/gpu/lane.h"

namespace hoccl {

/// The lanes of one direction, shared by all links of a mover. Two, used in turn: while one writes
/// a chunk's flag, which ends with a fence, the other copies (docs/staging.md). The number of jobs
/// in flight is bounded, since a full queue would block the submitting call.
struct SharedLanes {
  static constexpr std::size_t kCount = 2;
  std::array<std::unique_ptr<Lane>, kCount> lanes;
  std::uint32_t depth = 1;
  std::uint32_t inFlight = 0;
  std::size_t next = 0;
  [[nodiscard]] bool room() const { return inFlight < depth; }
  /// `scratch` holds a job of `bytes` for each lane.
  void useScratch(CUdeviceptr scratch, std::uint64_t bytes) {
    for (std::size_t i = 0; i < kCount; ++i) lanes[i]->useScratch(scratch + i * bytes);
  }
  Status submit(const LaneJob& job) {
    ++inFlight;
    next = (next + 1) % kCount;
    return lanes[next]->submit(job);
  }
};

/// How a rank's own block moves where a neighbouring GPU is at hand: instead of in host memory the
/// chunks lie in memory on that GPU between their two copies, which are both NVLink's. A copy
/// within the GPU would be a kernel.
struct Detour {
  CUdeviceptr memory = 0;    ///< as large as the slots of a link
  std::uint64_t stride = 0;  ///< bytes from slot to slot
  SharedLanes out, in;
};

}  // namespace hoccl
