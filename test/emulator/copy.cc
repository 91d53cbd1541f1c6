#include <algorithm>
#include <cuda.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/hoccl_emu.h"
#include "test/emulator/memory.h"
#include "test/emulator/session.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

// Model times of an H200, read with probes/copy_speed: first byte, then nanoseconds a
// byte.
constexpr double kHostLatencyNs = 2400, kHostNsPerByte = 1 / 55.4;
constexpr double kPushLatencyNs = 2000, kPullLatencyNs = 8700, kPeerNsPerByte = 1 / 397.0;
// Not measured, and nothing HOCCL does may depend on them: kernels, and copies within the host.
constexpr double kKernelLatencyNs = 2500, kDeviceNsPerByte = 1 / 1800.0;
constexpr double kHostCopyNsPerByte = 1 / 20.0;
constexpr double kSmallMemsetLatencyNs = 1500;
// Up to here a memset needs no SM (FACTS 1: 4 KiB does not, 1 MiB does), and a pageable source is
// taken at the call (as CUDA's documentation says of copies up to 64 KB).
constexpr std::size_t kSmallMemset = 64 << 10, kPageableSnapshot = 64 << 10;
constexpr std::size_t kSmallH2D = 32 << 10;  // FACTS 4: not inlined from here on

/// One side of a copy.
struct Side {
  std::shared_ptr<Region> region;  ///< null: the host's pageable memory
  std::byte* bytes = nullptr;
  [[nodiscard]] bool isDevice() const { return region != nullptr && region->isDevice(); }
};

/// False for what a copy of the device `physical` cannot reach.
bool resolve(std::uintptr_t address, std::size_t bytes, int physical, Side* out) {
  out->region = regions::find(address);
  if (out->region == nullptr) {
    out->bytes = reinterpret_cast<std::byte*>(address);
    return address != 0;
  }
  if (out->region->isDevice() && !out->region->contains(address, bytes)) return false;
  // Mapped without access for that device: the real copy would fault.
  if (((out->region->access >> physical) & 1) == 0) return false;
  out->bytes = out->region->at(address);
  return true;
}

CUresult submitWork(const StreamPtr& stream, std::unique_ptr<Work> work, bool* captured) {
  std::vector<Op> ops(1);
  ops[0].kind = OpKind::Work;
  ops[0].work = std::move(work);
  return Scheduler::get().submit(stream, std::move(ops), captured);
}

/// Fills in the copy's engine and time, and which counter it belongs to.
Counter plan(const Side& to, const Side& from, const Stream& stream, Work* work) {
  const int here = stream.context->physical;
  if (to.isDevice() && from.isDevice()) {
    const int source = from.region->physical, target = to.region->physical;
    if (source == target) {
      work->path = Path::Sm;
      work->physical = source;
      work->sms = 1;
      work->latencyNs = kKernelLatencyNs;
      work->nsPerByte = kDeviceNsPerByte;
      return Counter::SameDeviceD2D;
    }
    work->physical = here;
    work->sourcePhysical = source;
    work->peerPhysical = target;
    if (reachEachOther(source, target)) {
      work->path = Path::P2P;
      work->latencyNs = here == source ? kPushLatencyNs : kPullLatencyNs;
      work->nsPerByte = settings().nvlink ? kPeerNsPerByte : kHostNsPerByte;
    } else {
      // Without peer access the driver goes through the host, at the host's speed.
      work->path = Path::D2H;
      work->physical = source;
      work->latencyNs = 2 * kHostLatencyNs;
      work->nsPerByte = kHostNsPerByte;
    }
    return Counter::CopiesP2P;
  }
  if (!to.isDevice() && !from.isDevice()) {
    work->path = Path::Immediate;
    work->physical = here;
    work->nsPerByte = kHostCopyNsPerByte;
    return Counter::Count;
  }
  const bool toHost = from.isDevice();
  work->path = toHost ? Path::D2H : Path::H2D;
  work->physical = (toHost ? from : to).region->physical;
  work->latencyNs = kHostLatencyNs;
  work->nsPerByte = kHostNsPerByte;
  return toHost ? Counter::CopiesD2H : Counter::CopiesH2D;
}

void countCopy(int physical, Counter kind, std::size_t bytes) {
  using session::count;
  if (kind == Counter::Count) return;
  count(physical, kind);
  switch (kind) {
    case Counter::SameDeviceD2D:
      count(physical, Counter::SmOps);
      break;
    case Counter::CopiesP2P:
      count(physical, Counter::BytesP2P, bytes);
      break;
    case Counter::CopiesD2H:
      count(physical, Counter::BytesD2H, bytes);
      break;
    default:
      count(physical, Counter::BytesH2D, bytes);
      if (bytes < kSmallH2D) count(physical, Counter::H2DUnder32KiB);
      if (bytes <= kInlinedH2D) count(physical, Counter::InlinedH2D);
  }
}

/// How much of a copy stays within one mapping of a range of addresses that consists of several.
std::size_t withinMapping(std::uintptr_t address, std::size_t bytes) {
  const auto region = regions::find(address);
  if (region == nullptr || region->kind != RegionKind::Mapped) return bytes;
  return std::min(bytes, region->base + region->size - address);
}

/// Every copy call ends here. Returns when the driver would: at once, or with pageable memory when
/// the application may touch it again.
CUresult copy(const StreamPtr& stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  if (bytes == 0) return Scheduler::get().submit(stream, std::vector<Op>(1));
  const std::size_t part = std::min(withinMapping(to, bytes), withinMapping(from, bytes));
  if (part < bytes) {
    const CUresult first = copy(stream, to, from, part);
    return first == CUDA_SUCCESS ? copy(stream, to + part, from + part, bytes - part) : first;
  }
  Side target, source;
  const int here = stream->context->physical;
  if (!resolve(to, bytes, here, &target) || !resolve(from, bytes, here, &source))
    return CUDA_ERROR_INVALID_VALUE;
  auto work = std::make_unique<Work>();
  const Counter kind = plan(target, source, *stream, work.get());
  work->to = target.bytes;
  work->from = source.bytes;
  work->bytes = bytes;
  work->pins[0] = target.region;
  work->pins[1] = source.region;
  const bool pageable = (target.region == nullptr || source.region == nullptr);
  bool mustWait = pageable;
  if (source.region == nullptr && target.isDevice() && bytes <= kPageableSnapshot) {
    work->snapshot.assign(source.bytes, source.bytes + bytes);
    work->from = work->snapshot.data();
    mustWait = false;
  }
  const int countedAt = kind == Counter::CopiesP2P ? stream->context->physical : work->physical;
  bool captured = false;
  const CUresult result = submitWork(stream, std::move(work), &captured);
  if (result != CUDA_SUCCESS || captured) return result;
  countCopy(countedAt, kind, bytes);
  if (mustWait) Scheduler::get().wait(stream);
  return CUDA_SUCCESS;
}

CUresult copyAndWait(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  return streamCall(nullptr, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (const CUresult result = copy(stream, to, from, bytes); result != CUDA_SUCCESS)
      return result;
    Scheduler::get().wait(stream);
    return CUDA_SUCCESS;
  });
}

CUresult copyOn(CUstream handle, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
  return streamCall(
      handle, [&](Context&, const StreamPtr& stream) { return copy(stream, to, from, bytes); });
}

CUresult fill(const StreamPtr& stream, CUdeviceptr to, std::uint32_t pattern, unsigned patternSize,
              std::size_t count) {
  const std::size_t bytes = count * patternSize;
  if (to % patternSize != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes == 0) return CUDA_SUCCESS;
  std::shared_ptr<Region> region = regions::find(to);
  if (region == nullptr || !region->contains(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  auto work = std::make_unique<Work>();
  work->to = region->at(to);
  work->bytes = bytes;
  work->pattern = pattern;
  work->patternSize = patternSize;
  work->physical = region->isDevice() ? region->physical : stream->context->physical;
  const bool large = bytes > kSmallMemset;
  if (large) {
    work->path = Path::Sm;
    work->sms = 1;
    work->latencyNs = kKernelLatencyNs;
    work->nsPerByte = kDeviceNsPerByte;
  } else {
    work->latencyNs = kSmallMemsetLatencyNs;
  }
  const int physical = work->physical;
  work->pins[0] = std::move(region);
  bool captured = false;
  const CUresult result = submitWork(stream, std::move(work), &captured);
  if (result == CUDA_SUCCESS && !captured && large) {
    session::count(physical, Counter::LargeMemsets);
    session::count(physical, Counter::SmOps);
  }
  return result;
}

CUresult fillOn(CUstream handle, CUdeviceptr to, std::uint32_t pattern, unsigned size,
                std::size_t count, bool wait) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    const CUresult result = fill(stream, to, pattern, size, count);
    if (result == CUDA_SUCCESS && wait) Scheduler::get().wait(stream);
    return result;
  });
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copyOn(stream, to, from, bytes);
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (regions::find(from) == nullptr && bytes > 0) return CUDA_ERROR_INVALID_VALUE;
  return copyOn(stream, address(to), from, bytes);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (regions::find(to) == nullptr && bytes > 0) return CUDA_ERROR_INVALID_VALUE;
  return copyOn(stream, to, address(from), bytes);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (bytes > 0 && (regions::find(to) == nullptr || regions::find(from) == nullptr))
    return CUDA_ERROR_INVALID_VALUE;
  return copyOn(stream, to, from, bytes);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext toContext, CUdeviceptr from,
                           CUcontext fromContext, size_t bytes, CUstream stream) {
  if (contextFrom(toContext) == nullptr || contextFrom(fromContext) == nullptr)
    return CUDA_ERROR_INVALID_CONTEXT;
  return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copyAndWait(to, from, bytes);
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  if (regions::find(from) == nullptr && bytes > 0) return CUDA_ERROR_INVALID_VALUE;
  return copyAndWait(address(to), from, bytes);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  if (regions::find(to) == nullptr && bytes > 0) return CUDA_ERROR_INVALID_VALUE;
  return copyAndWait(to, address(from), bytes);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  if (bytes > 0 && (regions::find(to) == nullptr || regions::find(from) == nullptr))
    return CUDA_ERROR_INVALID_VALUE;
  return copyAndWait(to, from, bytes);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return fillOn(nullptr, to, value, 1, count, true);
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
  return fillOn(nullptr, to, value, 4, count, true);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return fillOn(stream, to, value, 1, count, false);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  return fillOn(stream, to, value, 4, count, false);
}

}  // extern "C"
