#include "tools/bench/rank_device.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "common/base/time.h"
#include "test/emulator/hoccl_emu.h"

namespace hoccl::bench {
namespace {

// Host memory for filling and checking; one piece at a time, so that a gigabyte needs no gigabyte.
constexpr std::size_t kPieceBytes = 4 << 20;
static_assert(kPieceBytes % 8 == 0, "BytePattern counts in words of 8");

/// A function only the emulated driver has, or null.
template <typename Function>
Function emulatorFunction(const char* name) {
  void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  const auto function = reinterpret_cast<Function>(::dlsym(library, name));
  ::dlclose(library);  // drops only the reference just taken
  return function;
}

}  // namespace

RankDevice::~RankDevice() {
  if (stream_) driver_->cuStreamDestroy(stream_);
  if (context_) {
    driver_->cuCtxSetCurrent(nullptr);
    driver_->cuDevicePrimaryCtxRelease(device_);
  }
}

Status RankDevice::open(int wanted) {
  HOCCL_RETURN_IF_ERROR(Driver::load(&driver_));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDeviceGetCount(&info_.count)));
  if (info_.count < 1)
    return Status::error(Code::Unsupported,
                         "the driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)");
  info_.index = wanted % info_.count;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDeviceGet(&device_, info_.index)));
  char name[256] = "";
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDeviceGetName(name, sizeof name, device_)));
  info_.name = name;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDriverGetVersion(&info_.cudaVersion)));
  if (const auto dilation = emulatorFunction<double (*)()>("hocclEmuDilation")) {
    info_.emulated = true;
    info_.dilation = dilation();
  }
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuDevicePrimaryCtxRetain(&context_, device_)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuCtxSetCurrent(context_)));
  // Not ordered against the NULL stream, as the pool streams of PyTorch.
  return HOCCL_CU(driver_, cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
}

Status RankDevice::drain(CUstream stream, std::uint64_t timeoutMs,
                         const std::function<Status()>& failed) {
  // On a GPU it polls, as nccl-tests does: a thread that slept finds its caches cold. On the
  // emulated driver the same few cores do all the work.
  constexpr std::uint64_t kYieldNs = 2000000;
  constexpr std::uint64_t kAskEveryNs = 1000000;
  const std::uint64_t start = monotonicNs();
  std::uint64_t asked = start;
  for (;;) {
    const CUresult result = driver_->cuStreamQuery(stream);
    if (result == CUDA_SUCCESS) return {};
    if (result != CUDA_ERROR_NOT_READY) return driver_->error("cuStreamQuery", result);
    const std::uint64_t now = monotonicNs();
    if (now - asked > kAskEveryNs && failed) {
      asked = now;
      HOCCL_RETURN_IF_ERROR(failed());
    }
    if (now - start > timeoutMs * 1000000)
      return Status::error(Code::Timeout,
                           fmt::format("the stream did not become idle within {} ms", timeoutMs));
    if (!info_.emulated || now - start < kYieldNs)
      ::sched_yield();
    else
      ::usleep(20);
  }
}

Status RankDevice::upload(CUdeviceptr to, std::uint64_t bytes, const BytePattern& pattern,
                          bool inverted) {
  // A memset of this size would be a kernel and would count as one; copies of host memory are none.
  std::vector<std::uint8_t> piece(std::min<std::uint64_t>(bytes, kPieceBytes));
  for (std::uint64_t done = 0; done < bytes; done += piece.size()) {
    const std::size_t part = std::min<std::uint64_t>(piece.size(), bytes - done);
    pattern.fill(done, part, piece.data(), inverted);
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemcpyHtoD(to + done, piece.data(), part)));
  }
  // A copy from pageable memory may return when the bytes are staged, not when they are there.
  return HOCCL_CU(driver_, cuStreamSynchronize(nullptr));
}

Status RankDevice::countWrong(CUdeviceptr from, std::uint64_t bytes, const BytePattern& pattern,
                              std::uint64_t* wrong, std::uint64_t* firstWrong) {
  std::vector<std::uint8_t> piece(std::min<std::uint64_t>(bytes, kPieceBytes));
  *wrong = 0;
  for (std::uint64_t done = 0; done < bytes; done += piece.size()) {
    const std::size_t part = std::min<std::uint64_t>(piece.size(), bytes - done);
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemcpyDtoH(piece.data(), from + done, part)));
    std::uint64_t first = 0;
    const std::uint64_t here = pattern.countWrong(done, part, piece.data(), &first);
    if (*wrong == 0 && here > 0) *firstWrong = first;
    *wrong += here;
  }
  return {};
}

EmulatorCounters RankDevice::emulatorCounters() const {
  using Read = CUresult (*)(CUdevice, HocclEmuCounters*);
  const auto read = emulatorFunction<Read>("hocclEmuGetSessionCounters");
  EmulatorCounters sum;
  if (!read) return sum;
  for (int device = 0; device < info_.count; ++device) {
    HocclEmuCounters counters{};
    if (read(device, &counters) != CUDA_SUCCESS) return {};
    sum.known = true;
    sum.kernels += counters.smOps;
    sum.lateNs += counters.lateNanoseconds;
  }
  return sum;
}

Status DeviceBuffer::allocate(const Driver* driver, std::uint64_t bytes) {
  release();
  driver_ = driver;
  const std::uint64_t whole = (bytes + kDevicePageBytes - 1) / kDevicePageBytes * kDevicePageBytes;
  Status status = HOCCL_CU(driver, cuMemAlloc(&pointer_, whole));
  if (!status) pointer_ = 0;
  return status.inContext(fmt::format("{} bytes of device memory", bytes));
}

void DeviceBuffer::release() {
  if (pointer_) driver_->cuMemFree(pointer_);
  pointer_ = 0;
}

}  // namespace hoccl::bench
