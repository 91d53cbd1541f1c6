#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "common/gpu/driver.h"

namespace hoccl {

struct FlagWrite {
  CUdeviceptr address = 0;
  std::uint64_t value = 0;
};

/// One copy with the flags that are written behind it, in order.
struct LaneJob {
  CUdeviceptr device = 0;  ///< device side of the copy
  /// In place of `device`: registered host memory. The copy then goes through the lane's scratch in
  /// the device, by both of its copy engines and no CPU.
  std::byte* staging = nullptr;
  std::byte* host = nullptr;  ///< host side of the copy, in registered memory
  CUdeviceptr peer = 0;       ///< in place of `host`: memory of another device
  bool fromPeer = false;      ///< from there
  std::uint64_t bytes = 0;
  std::array<FlagWrite, 2> writes;  ///< those whose address is set
};

/// Peer: between this device's memory and another one's, either way (`fromPeer`).
enum class LaneDirection { ToHost, ToDevice, Peer };

/// A copy engine's queue for one direction: copies and the flag writes behind them, in order. It
/// never blocks as long as the owner keeps few jobs in flight.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual Status submit(const LaneJob& job) = 0;
  /// Device memory as large as any job, for jobs between two places in host memory.
  virtual void useScratch(CUdeviceptr scratch) = 0;
};

/// A lane on a stream of its own in the current context. The stream is primed with a copy, so that
/// its memory operations run on the copy engine's channel, not on the compute channel (FACTS 4, 5).
Status makeStreamLane(const Driver* driver, LaneDirection direction, std::unique_ptr<Lane>* out);

}  // namespace hoccl
