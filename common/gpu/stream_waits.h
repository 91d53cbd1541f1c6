#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "common/base/flag.h"
#include "common/gpu/driver.h"

namespace hoccl {

/// How a stream is made to wait for a flag (rule 6).
enum class WaitKind : std::uint8_t {
  MemoryOp,  ///< a stream memory operation: costs nothing, but holds the stream's channel
  Kernel,    ///< one warp that polls: holds no channel, occupies an SM's warp slot
  Parked,    ///< a memory operation behind a small copy to the device: holds that copy channel
             ///< instead
};

/// What is submitted to a stream for the first time may load something, which must not happen while a
/// transfer is pending (FACTS 3): waits until it has run, for at most `timeoutMs`, by calls that do
/// not block, and destroys the stream.
Status awaitFirstRun(const Driver* driver, CUstream stream, std::uint64_t timeoutMs);

/// The ways of waiting in one context, and which one is right at the moment. A pending memory-op
/// wait holds a hardware channel, and whatever else is mapped there stands still until the flag
/// shows, so there must be more channels than streams that wait.
class StreamWaits {
 public:
  /// HOCCL_WAIT's values.
  enum class Policy { Auto, MemoryOp, Kernel, Parked };

  /// Channels a process has in each direction of the copy engines while CUDA_DEVICE_MAX_CONNECTIONS
  /// is not set (docs/facts.md); it has twice as many for kernels.
  static constexpr unsigned kDefaultChannels = 4;

  /// `policy` as HOCCL_WAIT has it. Loads the kernel and runs it once, for at most `timeoutMs`, and
  /// allocates what parking needs: neither may happen while a transfer is pending. The context must
  /// be current. What is allocated stays: a free could wait for whatever is pending in the context.
  static Status create(const Driver* driver, const std::string& policy, std::uint64_t timeoutMs,
                       std::unique_ptr<StreamWaits>* out);
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;

  /// The kind for a wait of `stream` that ends when `flag` shows `value`, and remembers it. Any
  /// thread, no lock.
  WaitKind choose(CUstream stream, const Flag* flag, std::uint64_t value);
  /// Enqueues a Kernel or Parked wait for the flag at that device address.
  Status enqueue(WaitKind kind, CUstream stream, CUdeviceptr flag, std::uint64_t value) const;

  /// Whether any stream may wait by a memory operation where its kernels run.
  [[nodiscard]] bool mayUseMemoryOps() const {
    return policy_ == Policy::MemoryOp || (policy_ == Policy::Auto && channels_ > 1);
  }

  [[nodiscard]] std::uint64_t count(WaitKind kind) const {
    return counts_[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
  }

 private:
  struct Pending {
    std::atomic<CUstream> stream{nullptr};
    std::atomic<const Flag*> flag{nullptr};
    std::atomic<std::uint64_t> value{0};
  };
  StreamWaits() = default;
  Status loadKernel(std::uint64_t timeoutMs);
  Status prepareParking();
  /// Whether a memory-op wait of that stream leaves a channel to others; remembers it if so.
  bool takesChannel(CUstream stream, const Flag* flag, std::uint64_t value);

  const Driver* driver_ = nullptr;
  Policy policy_ = Policy::Auto;
  unsigned channels_ = kDefaultChannels;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUdeviceptr parkTo_ = 0;
  void* parkFrom_ = nullptr;
  /// The last memory-op wait of each stream; further streams wait by kernel.
  std::array<Pending, 32> pending_;
  std::array<std::atomic<std::uint64_t>, 3> counts_{};
};

}  // namespace hoccl
