#include "plugin-net/device_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/gpu/buffer.h"
#include "common/gpu/mapped_segments.h"
#include "plugin-net/ll128.h"

namespace hoccl::net_plugin {

/// An allocation or mapping, and what is said of it.
struct DeviceMemory::Place {
  CUdevice device = -1;
  bool capable = false;  ///< it has an IPC handle
  MappedSegment segment;
};

/// Mostly one call of the driver, each of which is a microsecond or two when it has not been used
/// for a while.
bool DeviceMemory::placeOf(const Driver* driver, CUdeviceptr address, Place* out) {
  Place place;
  int device = -1, capable = 0;
  std::size_t size = 0;
  CUpointer_attribute names[] = {
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_BUFFER_ID,
      CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
      CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void* values[] = {&device, &place.segment.id, &capable, &place.segment.base, &size};
  if (driver->cuPointerGetAttributes(std::size(names), names, values, address) != CUDA_SUCCESS ||
      place.segment.id == 0 || device < 0) {
    return false;
  }
  place.device = device;
  place.capable = capable != 0;
  place.segment.bytes = size;
  // Of mapped memory the range is the reservation.
  if (!place.capable && !segmentAt(driver, address, &place.segment)) return false;
  *out = place;
  return true;
}

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

Status DeviceMemory::gpuOf(CUdevice device, Gpu** out) {
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
  Place first;
  if (!placeOf(driver_, reinterpret_cast<CUdeviceptr>(data), &first)) {
    return cannotBeMapped(driver_, data);
  }
  Gpu* gpu = nullptr;
  HOCCL_RETURN_IF_ERROR(gpuOf(first.device, &gpu));
  std::vector<Registration::Run> runs;
  const std::size_t before = gpu->imports.size();
  if (Status status = describe(first, reinterpret_cast<CUdeviceptr>(data), bytes, *gpu, &runs);
      !status) {
    release(*gpu, runs);
    return status;
  }
  auto made = std::make_shared<Registration>(gpu->mover, std::move(runs));
  *out = made.get();
  registered_.emplace(*out, std::move(made));
  countRegistration(bytes, monotonicNs() - began, gpu->imports.size() > before);
  return {};
}

/// The runs of the range. NCCL rounds user buffers to pages, so the range may end behind its
/// memory; it has to begin in some.
Status DeviceMemory::describe(const Place& first, CUdeviceptr address, std::uint64_t bytes,
                              Gpu& gpu, std::vector<Registration::Run>* out) {
  Place place = first;
  for (CUdeviceptr at = address;;) {
    Registration::Run run{};
    run.allocation = place.segment.id;
    run.base = place.segment.base;
    run.bytes = place.segment.bytes;
    HOCCL_RETURN_IF_ERROR(import(gpu, at, place.capable, &run));
    out->push_back(run);
    at = place.segment.end();
    if (at >= address + bytes || !placeOf(driver_, at, &place)) return {};
  }
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
    SegmentHandle segment;
    Status status = exportSegment(driver_, {run->base, run->bytes, run->allocation}, &segment);
    if (status && !segment.fd) {
      status = Status::error(Code::Unsupported, "it has a fabric handle alone");
    }
    if (!status) {
      return status.inContext(
          fmt::format("the memory at {} was not created to be shared by file descriptor, so the "
                      "mover cannot map it",
                      pointer));
    }
    HOCCL_RETURN_IF_ERROR(
        gpu.mover->importSegment(run->base, run->bytes, std::move(segment.fd), &run->import));
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

void DeviceMemory::countRegistration(std::uint64_t bytes, std::uint64_t tookNs, bool fresh) {
  ++registrations_;
  slowestNs_ = std::max(slowestNs_, tookNs);
  if (!fresh || bytes < largestBytes_) return;
  if (bytes > largestBytes_) {
    largestBytes_ = bytes;
    largestCount_ = 0;
  }
  largestNs_[largestCount_++ % kTimes] = tookNs;
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
  const std::size_t count = std::min<std::uint64_t>(largestCount_, kTimes);
  std::array<std::uint64_t, kTimes> times = largestNs_;
  std::sort(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(count));
  logInfo(
      "staging: {} sends ({} bytes) and {} receives ({} bytes) of device memory, by {} copies out "
      "and {} in ({} under 32 KiB); {} registrations, the slowest {:.1f} us, the largest of new "
      "memory "
      "({} bytes, {} times) {:.1f} us in the median",
      sends, sentBytes_.load(), receives, receivedBytes_.load(), out, in, small, registrations_,
      static_cast<double>(slowestNs_) / 1000, largestBytes_, largestCount_,
      static_cast<double>(times[count / 2]) / 1000);
}

}  // namespace hoccl::net_plugin
