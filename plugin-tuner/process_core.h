#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "common/base/config.h"
#include "common/gpu/driver.h"
#include "common/gpu/stream_waits.h"
#include "common/runtime/mover_client.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// What the steering core keeps for the whole process. Made when the core starts, never destroyed:
/// NCCL may be called while the process exits.
class ProcessCore {
 public:
  static ProcessCore& get();

  [[nodiscard]] const Config& config() const { return config_; }
  /// Why this process steers nothing; ok when it may.
  [[nodiscard]] const Status& configStatus() const { return configStatus_; }
  [[nodiscard]] CommTable& comms() { return comms_; }
  /// The driver, loaded on first use.
  Status driver(const Driver** out);
  /// The mover of that device, started on first use or when the last one has ended.
  Status moverFor(CUdevice device, CUcontext* context, StreamWaits** waits, MoverClient** out);
  /// Whether no buffer of this process may be mapped by a mover. Settled before the first mover is
  /// up.
  [[nodiscard]] bool appCopiesOnly() const { return appCopiesOnly_; }
  /// HOCCL_OWN_BLOCK=kernel.
  [[nodiscard]] bool ownBlocksByKernel() const { return ownBlocksByKernel_; }
  void countOwnBlock() { ownBlocks_.fetch_add(1, std::memory_order_relaxed); }
  /// Own blocks copied by a kernel so far.
  [[nodiscard]] std::uint64_t ownBlocks() const {
    return ownBlocks_.load(std::memory_order_relaxed);
  }
  /// Waits of that kind enqueued so far, on all devices.
  [[nodiscard]] std::uint64_t waitCount(WaitKind kind);
  /// How often the movers have made the GPUs look at those waits.
  [[nodiscard]] std::uint64_t doorbells();

 private:
  ProcessCore();
  void chooseAppCopies();

  Config config_;
  Status configStatus_;
  CommTable comms_;
  bool appCopiesOnly_ = false;
  bool ownBlocksByKernel_ = false;
  std::atomic<std::uint64_t> ownBlocks_{0};
  std::mutex mutex_;  ///< set-up only
  struct Device {
    CUcontext context = nullptr;
    std::unique_ptr<StreamWaits> waits;
    std::vector<std::unique_ptr<MoverClient>> movers;  ///< the last one is in use
  };
  std::map<CUdevice, Device> devices_;
};

}  // namespace hoccl
