#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>

#include "common/base/status.h"
#include "common/gpu/driver.h"
#include "tools/bench/pattern.h"

namespace hoccl::bench {

/// What a rank says about its GPU.
struct DeviceInfo {
  std::string name;
  int index = 0, count = 0, cudaVersion = 0;
  bool emulated = false;
  double dilation = 1;
};

/// Counters of the emulated driver, all processes of the session together.
struct EmulatorCounters {
  bool known = false;
  std::uint64_t kernels = 0;  ///< everything that needs an SM
  std::uint64_t lateNs = 0;   ///< model time by which this CPU outlasted modelled copies
};

/// One GPU's primary context, current on the calling thread, with one stream.
class RankDevice {
 public:
  RankDevice() = default;
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;
  ~RankDevice();

  /// Opens GPU `wanted` modulo the number of GPUs.
  Status open(int wanted);
  [[nodiscard]] const Driver* driver() const { return driver_; }
  [[nodiscard]] const DeviceInfo& info() const { return info_; }
  [[nodiscard]] CUstream stream() const { return stream_; }

  /// Waits until `stream` is empty: polls, so that it can ask `failed` (may be empty) about once
  /// a millisecond whether waiting still makes sense. Error: what that said, or Code::Timeout.
  Status drain(CUstream stream, std::uint64_t timeoutMs, const std::function<Status()>& failed);
  /// Writes the pattern (inverted: the poison) to device memory; returns when it is there.
  Status upload(CUdeviceptr to, std::uint64_t bytes, const BytePattern& pattern, bool inverted);
  /// Counts bytes of device memory that differ from the pattern.
  Status countWrong(CUdeviceptr from, std::uint64_t bytes, const BytePattern& pattern,
                    std::uint64_t* wrong, std::uint64_t* firstWrong);
  [[nodiscard]] EmulatorCounters emulatorCounters() const;

 private:
  const Driver* driver_ = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  DeviceInfo info_;
};

/// The large page of device memory. An allocation that is no multiple of 64 KiB is mapped in small
/// pages: copies from another GPU into it take up to 1.35 times as long
/// (docs/results/2026-11-30-2gpu-both-ways.txt).
constexpr std::uint64_t kDevicePageBytes = 2 << 20;

/// A piece of device memory, wherever it comes from; it goes with the object.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  virtual ~Buffer() = default;
  [[nodiscard]] CUdeviceptr at(std::uint64_t offset) const { return pointer_ + offset; }

 protected:
  CUdeviceptr pointer_ = 0;
};

/// Device memory from cuMemAlloc, in whole pages, as allocators take it.
class DeviceBuffer final : public Buffer {
 public:
  ~DeviceBuffer() override { release(); }
  Status allocate(const Driver* driver, std::uint64_t bytes);
  void release();

 private:
  const Driver* driver_ = nullptr;
};

}  // namespace hoccl::bench
