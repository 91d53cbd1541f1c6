#include "plugin-tuner/process_core.h"

#include "common/base/log.h"
#include "common/gpu/frees_seen.h"
#include "plugin-tuner/own_blocks.h"

namespace hoccl {

ProcessCore& ProcessCore::get() {
  static ProcessCore* core = new ProcessCore;
  return *core;
}

ProcessCore::ProcessCore() : config_(Config::defaults()) {
  setLogRole("app");
  configStatus_ = Config::fromEnvironment(&config_);
  ownBlocksByKernel_ = config_.ownBlock == "kernel";
  if (!configStatus_) {
    logError("{}; this job stays with plain NCCL", configStatus_.message());
  } else if (!config_.steer) {
    configStatus_ = Status::error(Code::Unsupported, "HOCCL_STEER=0");
  }
}

Status ProcessCore::driver(const Driver** out) { return Driver::load(out); }

Status ProcessCore::moverFor(CUdevice device, CUcontext* context, StreamWaits** waits,
                             MoverClient** out) {
  std::lock_guard lock(mutex_);
  const Driver* driver = nullptr;
  HOCCL_RETURN_IF_ERROR(Driver::load(&driver));
  Device& entry = devices_[device];
  if (!entry.context) {
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDevicePrimaryCtxRetain(&entry.context, device)));
  }
  *context = entry.context;
  const bool dead =
      !entry.movers.empty() && entry.movers.back()->segment().header().moverDead.load() != 0;
  if (entry.movers.empty() || dead) {
    std::unique_ptr<MoverClient> client;
    // Registering the segment and loading a kernel must not disturb a capture another thread is
    // recording.
    const RelaxedCapture relaxed(driver);
    Status status;
    if (devices_.size() == 1 && entry.movers.empty()) chooseAppCopies();
    if (!entry.waits) {
      ContextGuard guard(driver, entry.context);
      if (ownBlocksByKernel_) status = prepareOwnBlocks(driver, config_.timeoutMs);
      if (status) {
        status = StreamWaits::create(driver, config_.wait, config_.timeoutMs, &entry.waits);
      }
    }
    if (status) {
      status = MoverClient::start(driver, entry.context, config_, entry.waits->mayUseMemoryOps(),
                                  &client);
    }
    if (!status) return status;
    entry.movers.push_back(std::move(client));
  }
  *waits = entry.waits.get();
  *out = entry.movers.back().get();
  return {};
}

void ProcessCore::chooseAppCopies() {
  appCopiesOnly_ = config_.appCopies == "always";
  const FreesSeen frees = lookForFrees();
  if (frees.seen || appCopiesOnly_) return;
  appCopiesOnly_ = config_.appCopies == "auto";
  logf(appCopiesOnly_ ? LogLevel::Warn : LogLevel::Info,
       "frees of device memory are not seen in this process: {}. {}", frees.why,
       appCopiesOnly_
           ? "All its buffers take application-side copies, with three times the traffic on PCIe; "
             "HOCCL_APP_COPIES=unexportable avoids that, for a program that frees no buffer an "
             "operation has used before its communicators are destroyed"
           : "What was used in a steered operation stays mapped by the mover for a while after it "
             "is freed");
}

std::uint64_t ProcessCore::waitCount(WaitKind kind) {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [device, entry] : devices_) sum += entry.waits ? entry.waits->count(kind) : 0;
  return sum;
}

std::uint64_t ProcessCore::doorbells() {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [device, entry] : devices_) {
    for (const auto& mover : entry.movers) sum += mover->segment().header().doorbells.load();
  }
  return sum;
}

}  // namespace hoccl
