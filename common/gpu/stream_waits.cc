#include "common/gpu/stream_waits.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

/// Small enough to cost nothing, large enough not to ride on the compute channel (FACTS 4).
constexpr std::size_t kParkBytes = 32 << 10;

/// Polls a word until it is at least `value`. In PTX, so that no CUDA compiler is needed to build.
constexpr char kKernelPtx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry hoccl_wait_geq_u64(.param .u64 flag, .param .u64 value)
{
  .reg .u64 %address, %wanted, %seen;
  .reg .pred %reached;
  ld.param.u64 %address, [flag];
  ld.param.u64 %wanted, [value];
look:
  ld.acquire.sys.u64 %seen, [%address];
  setp.ge.u64 %reached, %seen, %wanted;
  @%reached bra done;
  nanosleep.u32 100;
  bra look;
done:
  ret;
}
)";

StreamWaits::Policy policyOf(const std::string& text) {
  if (text == "memop") return StreamWaits::Policy::MemoryOp;
  if (text == "kernel") return StreamWaits::Policy::Kernel;
  if (text == "parked") return StreamWaits::Policy::Parked;
  return StreamWaits::Policy::Auto;
}

/// As the driver reads it: 1 to 32 connections.
unsigned channelsOfThisProcess() {
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const long set = text ? std::strtol(text, nullptr, 10) : 0;
  return set > 0 ? static_cast<unsigned>(std::min(set, 32L)) : StreamWaits::kDefaultChannels;
}

}  // namespace

Status awaitFirstRun(const Driver* driver, CUstream stream, std::uint64_t timeoutMs) {
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  CUresult state = CUDA_ERROR_NOT_READY;
  while ((state = driver->cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY) {
    if (deadline.passed()) {
      return Status::error(Code::Timeout,
                           fmt::format("its first run did not end within {} ms (HOCCL_TIMEOUT_MS): "
                                       "the GPU, or what is pending on it, holds it up",
                                       timeoutMs));
    }
    ::usleep(50);
  }
  if (state != CUDA_SUCCESS) return driver->error("cuStreamQuery", state);
  driver->cuStreamDestroy(stream);
  return {};
}

Status StreamWaits::create(const Driver* driver, const std::string& policy, std::uint64_t timeoutMs,
                           std::unique_ptr<StreamWaits>* out) {
  std::unique_ptr<StreamWaits> waits(new StreamWaits);
  waits->driver_ = driver;
  waits->policy_ = policyOf(policy);
  waits->channels_ = channelsOfThisProcess();
  if (waits->policy_ == Policy::Auto || waits->policy_ == Policy::Kernel) {
    if (Status status = waits->loadKernel(timeoutMs); !status) {
      status = status.inContext("HOCCL_WAIT=" + policy + " needs a kernel that waits");
      if (waits->policy_ == Policy::Kernel || waits->channels_ == 1) return status;
      logWarn(
          "{}; streams wait by memory operations, and {} or more that wait at once can stop others",
          status.message(), waits->channels_);
      waits->policy_ = Policy::MemoryOp;
    }
  }
  if (waits->policy_ == Policy::Parked) HOCCL_RETURN_IF_ERROR(waits->prepareParking());
  *out = std::move(waits);
  return {};
}

Status StreamWaits::loadKernel(std::uint64_t timeoutMs) {
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuModuleLoadData(&module_, kKernelPtx)));
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver_, cuModuleGetFunction(&kernel_, module_, "hoccl_wait_geq_u64")));
  // The first launch of a kernel can wait for everything that is pending (FACTS 3): now, not later.
  void* word = nullptr;
  CUdeviceptr address = 0;
  CUstream stream = nullptr;
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver_, cuMemHostAlloc(&word, sizeof(std::uint64_t), CU_MEMHOSTALLOC_DEVICEMAP)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemHostGetDevicePointer(&address, word, 0)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)));
  HOCCL_RETURN_IF_ERROR(enqueue(WaitKind::Kernel, stream, address, 0));
  return awaitFirstRun(driver_, stream, timeoutMs);
}

Status StreamWaits::prepareParking() {
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemAlloc(&parkTo_, kParkBytes)));
  return HOCCL_CU(driver_, cuMemHostAlloc(&parkFrom_, kParkBytes, CU_MEMHOSTALLOC_PORTABLE));
}

bool StreamWaits::takesChannel(CUstream stream, const Flag* flag, std::uint64_t value) {
  Pending* own = nullptr;
  unsigned others = 0;
  for (Pending& each : pending_) {
    const Flag* its = each.flag.load(std::memory_order_acquire);
    // Without a look at the flag, which the GPU wrote last.
    if (its && each.stream.load(std::memory_order_relaxed) == stream) {
      own = &each;
      continue;
    }
    if (!its || its->reached(each.value.load(std::memory_order_relaxed))) {
      if (!own) own = &each;
    } else if (++others + 1 >= channels_) {
      return false;
    }
    if (!its) break;  // entries are taken from the front
  }
  if (!own) return false;
  // Two threads may take one entry; then a stream goes uncounted for a while.
  own->stream.store(stream, std::memory_order_relaxed);
  own->value.store(value, std::memory_order_relaxed);
  own->flag.store(flag, std::memory_order_release);
  return true;
}

WaitKind StreamWaits::choose(CUstream stream, const Flag* flag, std::uint64_t value) {
  WaitKind kind = WaitKind::MemoryOp;
  switch (policy_) {
    case Policy::MemoryOp:
      break;
    case Policy::Kernel:
      kind = WaitKind::Kernel;
      break;
    case Policy::Parked:
      kind = WaitKind::Parked;
      break;
    case Policy::Auto:
      if (channels_ == 1 || !takesChannel(stream, flag, value)) kind = WaitKind::Kernel;
      break;
  }
  counts_[static_cast<std::size_t>(kind)].fetch_add(1, std::memory_order_relaxed);
  return kind;
}

Status StreamWaits::enqueue(WaitKind kind, CUstream stream, CUdeviceptr flag,
                            std::uint64_t value) const {
  if (kind == WaitKind::Kernel) {
    void* arguments[] = {&flag, &value};
    return HOCCL_CU(driver_,
                    cuLaunchKernel(kernel_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
  }
  if (kind == WaitKind::Parked) {
    HOCCL_RETURN_IF_ERROR(
        HOCCL_CU(driver_, cuMemcpyHtoDAsync(parkTo_, parkFrom_, kParkBytes, stream)));
  }
  return HOCCL_CU(driver_, cuStreamWaitValue64(stream, flag, value, CU_STREAM_WAIT_VALUE_GEQ));
}

}  // namespace hoccl
