#include "tools/bench/bare_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/base/time.h"

namespace hoccl::bench {
namespace {

constexpr unsigned kHalves = 2;
// Large enough that a copy runs at the engine's full rate.
constexpr std::uint64_t kChunkBytes = 8 << 20;
constexpr std::uint64_t kRingBytes = 64 << 20;

}  // namespace

BareCopies::~BareCopies() {
  if (host_) device_->driver()->cuMemFreeHost(host_);
}

Status BareCopies::allocate(std::uint64_t maxBytes) {
  const Driver* driver = device_->driver();
  ringBytes_ = std::min(std::max(maxBytes, std::uint64_t{1}), kRingBytes);
  Status status = HOCCL_CU(driver, cuMemHostAlloc(&host_, ringBytes_, CU_MEMHOSTALLOC_PORTABLE));
  if (!status) {
    host_ = nullptr;
    return status.inContext(fmt::format("{} bytes of pinned host memory", ringBytes_));
  }
  return memory_.allocate(driver, ringBytes_);
}

Status BareCopies::enqueue(std::uint64_t bytes) {
  const Driver* driver = device_->driver();
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min({bytes - done, kChunkBytes, ringBytes_});
    if (at_ + part > ringBytes_) at_ = 0;
    char* host = static_cast<char*>(host_) + at_;
    const CUdeviceptr memory = memory_.at(at_);
    HOCCL_RETURN_IF_ERROR(
        rank_ == 0 ? HOCCL_CU(driver, cuMemcpyDtoHAsync(host, memory, part, device_->stream()))
                   : HOCCL_CU(driver, cuMemcpyHtoDAsync(memory, host, part, device_->stream())));
    at_ += part;
    done += part;
  }
  return {};
}

Status BareCopies::run(std::uint64_t bytes, int count, bool steady, nlohmann::json* answer) {
  if (!steady) {
    std::vector<std::uint64_t> samples;
    for (int i = 0; i < count; ++i) {
      HOCCL_RETURN_IF_ERROR(start_->meet(kHalves, timeoutMs_));
      const std::uint64_t begin = monotonicNs();
      HOCCL_RETURN_IF_ERROR(enqueue(bytes));
      HOCCL_RETURN_IF_ERROR(drain());
      samples.push_back(monotonicNs() - begin);
    }
    (*answer)["singleNs"] = samples;
    return {};
  }
  const std::uint64_t goal = ++steadyRuns_ * kHalves;
  HOCCL_RETURN_IF_ERROR(start_->meet(kHalves, timeoutMs_));
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < count; ++i) HOCCL_RETURN_IF_ERROR(enqueue(bytes));
  HOCCL_RETURN_IF_ERROR(drain());
  (*answer)["ns"] = monotonicNs() - begin;
  start_->finished.fetch_add(1);
  const Deadline deadline = Deadline::afterMs(timeoutMs_);
  while (start_->finished.load() < goal) {
    if (deadline.passed())
      return Status::error(Code::Timeout, "the other half did not finish its copies");
    HOCCL_RETURN_IF_ERROR(enqueue(bytes));
    HOCCL_RETURN_IF_ERROR(drain());
  }
  return {};
}

}  // namespace hoccl::bench
