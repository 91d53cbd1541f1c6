#pragma once

// Device memory that NCCL has registered (HOCCL_NET_STAGING=1), and the movers that copy it. The
// only CUDA calls of the plugin are here, in init and regMr: attributes of a pointer, and the
// export of an allocation that is new to the process. None waits for the device, and none is made
// on the data path.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/base/config.h"
#include "common/runtime/copy_client.h"

namespace hoccl::net_plugin {

/// A registered range. Kept by the requests that use it, also beyond deregMr; its imports are gone
/// then, and copies of it fail.
class Registration : public std::enable_shared_from_this<Registration> {
 public:
  /// An allocation, or a segment of one of cuMemCreate's, that the range reaches into.
  struct Run {
    CUdeviceptr base;
    std::uint64_t bytes;
    std::uint64_t allocation;  ///< CU_POINTER_ATTRIBUTE_BUFFER_ID
    std::uint64_t import;
  };
  Registration(std::shared_ptr<CopyClient> mover, std::vector<Run> runs)
      : mover_(std::move(mover)), runs_(std::move(runs)) {}

  [[nodiscard]] CopyClient& mover() const { return *mover_; }
  [[nodiscard]] const std::vector<Run>& runs() const { return runs_; }
  /// Where [data, data + bytes) lies; 0 pieces: not in what was registered, or in too many.
  std::size_t pieces(const void* data, std::uint64_t bytes,
                     std::span<CopyPiece, kCopyPieces> out) const;

 private:
  std::shared_ptr<CopyClient> mover_;
  std::vector<Run> runs_;  ///< by address, side by side
};

class DeviceMemory {
 public:
  static DeviceMemory& ofThisProcess();

  /// At every init. Decides whether device memory is claimed from now on; starts the mover of the
  /// current GPU if it is. A refusal is one warning.
  void prepare(int abiVersion, const Config& config);
  [[nodiscard]] bool claimed() const { return claimed_.load(std::memory_order_relaxed); }

  /// Nothing is pinned, and nothing waited for, but for the first memory of a further GPU, whose
  /// mover is started.
  Status add(void* data, std::uint64_t bytes, Registration** out);
  /// The mover has let go of it when this returns, or it has warned that it has not.
  void remove(Registration* registration);

  /// For the log.
  void countSent(std::uint64_t bytes);
  void countReceived(std::uint64_t bytes);
  /// One line with what has been done, if anything has since the last one.
  void report();

 private:
  struct Import {
    std::uint64_t id = 0;
    std::size_t users = 0;
  };
  struct Gpu {
    std::shared_ptr<CopyClient> mover;
    std::unordered_map<std::uint64_t, Import> imports;  ///< by allocation
  };
  Status startFor(CUcontext context, CUdevice device);
  Status gpuOf(CUdevice device, Gpu** out);
  struct Place;
  static bool placeOf(const Driver* driver, CUdeviceptr address, Place* out);
  Status describe(const Place& first, CUdeviceptr address, std::uint64_t bytes, Gpu& gpu,
                  std::vector<Registration::Run>* out);
  Status import(Gpu& gpu, CUdeviceptr address, bool handle, Registration::Run* run);
  void release(Gpu& gpu, const std::vector<Registration::Run>& runs);

  std::mutex mutex_;
  Config config_ = Config::defaults();
  const Driver* driver_ = nullptr;
  std::map<CUdevice, Gpu> gpus_;
  std::unordered_map<Registration*, std::shared_ptr<Registration>> registered_;
  std::atomic<bool> claimed_{false};

  std::atomic<std::uint64_t> sends_{0}, receives_{0}, sentBytes_{0}, receivedBytes_{0};
  /// `fresh`: some of the memory had not been registered before.
  void countRegistration(std::uint64_t bytes, std::uint64_t tookNs, bool fresh);
  static constexpr std::size_t kTimes = 64;
  std::uint64_t registrations_ = 0, slowestNs_ = 0, largestBytes_ = 0, largestCount_ = 0;
  std::array<std::uint64_t, kTimes> largestNs_{};  ///< of the last ones of that size, fresh
  std::uint64_t reported_ = 0;
};

}  // namespace hoccl::net_plugin
