#pragma once

#include <cstdint>
#include <utility>

#include "common/gpu/driver.h"

namespace hoccl {

/// Memory on another GPU of the node, which this process has allocated there and mapped for its own
/// GPU. It needs no context on the other GPU, and no process there knows of it.
class PeerMemory {
 public:
  /// `bytes` are rounded up to the driver's granularity (2 MiB). Errors: Cuda; the other GPU cannot
  /// be reached or has no memory left.
  static Status create(const Driver* driver, CUdevice self, CUdevice peer, std::uint64_t bytes,
                       PeerMemory* out);
  PeerMemory() = default;
  PeerMemory(PeerMemory&& other) noexcept { *this = std::move(other); }
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory() { release(); }

  [[nodiscard]] CUdeviceptr address() const { return mapped_ ? address_ : 0; }

 private:
  Status map(CUdevice self, CUdevice peer);
  void release();

  const Driver* driver_ = nullptr;
  CUdeviceptr address_ = 0;  ///< reserved
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace hoccl
