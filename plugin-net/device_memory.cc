#include "plugin-net/device_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/gpu/buffer.h"
#include "common/gpu/mapped_segments.h"
#include "plugin-net/ll128.h"

namespace hoccl::net_plugin {

std::size_t Registration::pieces(const void* data, std::uint64_t bytes,
                                 std::span<CopyPiece, kCopyPieces> out) const {
  auto at = reinterpret_cast<CUdeviceptr>(data);
  auto run = std::upper_bound(runs_.begin(), runs_.end(), at,
                              [](CUdeviceptr a, const Run& r) { return a < r.base; });
  if (run == runs_.begin()) return 0;
  --run;
  for (std::size_t count = 0; count < out.size() && run != runs_.end(); ++run) {
    if (at < run->base || at - run->base >= run->bytes) return 0;
    const std::uint64_t offset = at - run->base;
    const std::uint64_t here = std::min(bytes, run->bytes - offset);
    out[count++] = {run->import, offset, here};
    bytes -= here;
    if (bytes == 0) return count;
    at += here;
  }
  return 0;
}

DeviceMemory& DeviceMemory::ofThisProcess() {
  static auto* const instance =
      new DeviceMemory;  // NCCL's threads may use it while the process ends
  return *instance;
}

void DeviceMemory::prepare(int abiVersion, const Config& config) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto refuse = [&](const std::string& why) {
    const bool works = std::any_of(gpus_.begin(), gpus_.end(),
                                   [](auto& entry) { return entry.second.mover->alive(); });
    // What other communicators have been told stays so.
    claimed_.store(claimed() && works, std::memory_order_relaxed);
    logWarn("HOCCL_NET_STAGING=1 has no effect, device memory is not taken: {}", why);
  };
  if (config.netStaging == 0) return;
  if (const Ll128 ll128 = ll128KeptOff(abiVersion); !ll128.off) return refuse(ll128.why);
  config_ = config;
  if (const Status status = Driver::load(&driver_); !status) return refuse(status.message());
  CUcontext context = nullptr;
  CUdevice device = 0;
  if (driver_->cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == nullptr ||
      driver_->cuCtxGetDevice(&device) != CUDA_SUCCESS) {
    return refuse("no GPU is current in the thread that calls init");
  }
  if (const Status status = startFor(context, device); !status) return refuse(status.message());
  claimed_.store(true, std::memory_order_relaxed);
}

Status DeviceMemory::startFor(CUcontext context, CUdevice device) {
  // One that has died served connections that have failed; what they registered stays theirs.
  const auto known = gpus_.find(device);
  if (known != gpus_.end() && known->second.mover->alive()) return {};
  std::unique_ptr<CopyClient> started;
  HOCCL_RETURN_IF_ERROR(CopyClient::start(driver_, context, config_, &started));
  Gpu& gpu = gpus_[device];
  gpu.mover = std::move(started);
  gpu.imports.clear();
  logInfo(
      "device memory of GPU {} goes through {} slots of {} KiB by the mover (process {}), "
      "HOCCL_NET_STAGING=1",
      gpu.mover->gpuUuid(), gpu.mover->slots(), kCopySlotBytes >> 10, gpu.mover->pid());
  return {};
}

Status DeviceMemory::gpuOf(CUdeviceptr address, Gpu** out) {
  int device = -1;
  if (driver_->cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) !=
      CUDA_SUCCESS) {
    return cannotBeMapped(driver_, reinterpret_cast<const void*>(address));
  }
  auto known = gpus_.find(device);
  if (known == gpus_.end()) {
    CUcontext context = nullptr;
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDevicePrimaryCtxRetain(&context, device)));
    const Status status = startFor(context, device);
    (void)driver_->cuDevicePrimaryCtxRelease(device);  // whoever allocated there has it, too
    if (!status) return status;
    known = gpus_.find(device);
  }
  if (!known->second.mover->alive()) return known->second.mover->whyDead();
  *out = &known->second;
  return {};
}

Status DeviceMemory::add(void* data, std::uint64_t bytes, Registration** out) {
  const std::uint64_t began = monotonicNs();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!claimed()) {
    return Status::error(Code::Unsupported, "device memory is not claimed");
  }
  const RelaxedCapture relaxed(driver_);
  const ContextGuard guard(driver_, gpus_.begin()->second.mover->context());
  const auto address = reinterpret_cast<CUdeviceptr>(data);
  Gpu* gpu = nullptr;
  HOCCL_RETURN_IF_ERROR(gpuOf(address, &gpu));
  std::vector<Registration::Run> runs;
  if (Status status = describe(address, bytes, *gpu, &runs); !status) {
    release(*gpu, runs);
    return status;
  }
  auto made = std::make_shared<Registration>(gpu->mover, std::move(runs));
  *out = made.get();
  registered_.emplace(*out, std::move(made));
  const std::uint64_t took = monotonicNs() - began;
  ++registrations_;
  slowestNs_ = std::max(slowestNs_, took);
  if (bytes > largestBytes_ || (bytes == largestBytes_ && took > largestNs_)) {
    largestBytes_ = bytes;
    largestNs_ = took;
  }
  return {};
}

/// The runs of the range. NCCL rounds user buffers to pages, so the range may end behind its
/// memory; it has to begin in some.
Status DeviceMemory::describe(CUdeviceptr address, std::uint64_t bytes, Gpu& gpu,
                              std::vector<Registration::Run>* out) {
  const ContextGuard guard(driver_, gpu.mover->context());
  for (CUdeviceptr at = address; at < address + bytes;) {
    MappedSegment segment;
    int capable = 0;
    if (!segmentAt(driver_, at, &segment) ||
        driver_->cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                       at) != CUDA_SUCCESS) {
      if (at > address) return {};
      return cannotBeMapped(driver_, reinterpret_cast<const void*>(at));
    }
    Registration::Run run{};
    run.allocation = segment.id;
    run.base = segment.base;
    run.bytes = segment.bytes;
    HOCCL_RETURN_IF_ERROR(import(gpu, at, capable != 0, &run));
    out->push_back(run);
    at = segment.end();
  }
  return {};
}

Status DeviceMemory::import(Gpu& gpu, CUdeviceptr address, bool capable, Registration::Run* run) {
  if (const auto known = gpu.imports.find(run->allocation); known != gpu.imports.end()) {
    ++known->second.users;
    run->import = known->second.id;
    return {};
  }
  const ContextGuard guard(driver_, gpu.mover->context());
  CUipcMemHandle handle{};
  if (capable && driver_->cuIpcGetMemHandle(&handle, run->base) == CUDA_SUCCESS) {
    HOCCL_RETURN_IF_ERROR(gpu.mover->importHandle(run->base, run->bytes, handle, &run->import));
  } else {
    const void* const pointer = reinterpret_cast<const void*>(address);
    if (!foreignMemory(driver_, pointer).segments) return cannotBeMapped(driver_, pointer);
    UniqueFd segment;
    if (Status status = exportSegment(driver_, {run->base, run->bytes, run->allocation}, &segment);
        !status) {
      return status.inContext(
          fmt::format("the memory at {} was not created to be shared by file descriptor, so the "
                      "mover cannot map it",
                      pointer));
    }
    HOCCL_RETURN_IF_ERROR(
        gpu.mover->importSegment(run->base, run->bytes, std::move(segment), &run->import));
  }
  gpu.imports.emplace(run->allocation, Import{run->import, 1});
  return {};
}

/// mutex_ is held while the mover unmaps: what is registered meanwhile must not find an import that
/// goes.
void DeviceMemory::release(Gpu& gpu, const std::vector<Registration::Run>& runs) {
  std::vector<std::uint64_t> unused;
  for (const Registration::Run& run : runs) {
    const auto known = gpu.imports.find(run.allocation);
    if (known == gpu.imports.end() || known->second.id != run.import) continue;  // a dead mover's
    if (--known->second.users > 0) continue;
    unused.push_back(run.import);
    gpu.imports.erase(known);
  }
  if (!unused.empty()) gpu.mover->drop(unused);
}

void DeviceMemory::remove(Registration* registration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = registered_.find(registration);
  if (known == registered_.end()) return;
  const std::shared_ptr<Registration> kept = std::move(known->second);
  registered_.erase(known);
  for (auto& [device, gpu] : gpus_) {
    if (gpu.mover.get() == &kept->mover()) release(gpu, kept->runs());
  }
}

void DeviceMemory::countSent(std::uint64_t bytes) {
  sends_.fetch_add(1, std::memory_order_relaxed);
  sentBytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void DeviceMemory::countReceived(std::uint64_t bytes) {
  receives_.fetch_add(1, std::memory_order_relaxed);
  receivedBytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void DeviceMemory::report() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t sends = sends_.load(), receives = receives_.load();
  if (sends + receives + registrations_ == reported_) return;
  reported_ = sends + receives + registrations_;
  std::uint64_t out = 0, in = 0, small = 0;
  for (const auto& [device, gpu] : gpus_) {
    out += gpu.mover->counters().copiesOut.load();
    in += gpu.mover->counters().copiesIn.load();
    small += gpu.mover->counters().smallIn.load();
  }
  logInfo(
      "staging: {} sends ({} bytes) and {} receives ({} bytes) of device memory, by {} copies out "
      "and "
      "{} in ({} under 32 KiB); {} registrations, the slowest {:.1f} us, the largest ({} bytes) "
      "{:.1f} "
      "us",
      sends, sentBytes_.load(), receives, receivedBytes_.load(), out, in, small, registrations_,
      static_cast<double>(slowestNs_) / 1000, largestBytes_,
      static_cast<double>(largestNs_) / 1000);
}

}  // namespace hoccl::net_plugin
