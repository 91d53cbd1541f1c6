#include "tools/bench/bare_copies.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/base/time.h"

namespace hoccl::bench {
namespace {

// Large enough that a copy runs at the engine's full rate.
constexpr std::uint64_t kChunkBytes = 8 << 20;
constexpr std::uint64_t kRingBytes = 64 << 20;

}  // namespace

BareCopies::~BareCopies() {
  for (Lane* lane : {&out_, &in_}) {
    if (lane->host) device_->driver()->cuMemFreeHost(lane->host);
    if (lane->stream) device_->driver()->cuStreamDestroy(lane->stream);
  }
}

Status BareCopies::allocate(Lane* lane, std::uint64_t maxBytes) {
  if (maxBytes == 0) return {};
  const Driver* driver = device_->driver();
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuStreamCreate(&lane->stream, CU_STREAM_NON_BLOCKING)));
  lane->ringBytes = std::min(maxBytes, kRingBytes);
  Status status =
      HOCCL_CU(driver, cuMemHostAlloc(&lane->host, lane->ringBytes, CU_MEMHOSTALLOC_PORTABLE));
  if (!status) {
    lane->host = nullptr;
    return status.inContext(fmt::format("{} bytes of pinned host memory", lane->ringBytes));
  }
  return lane->memory.allocate(driver, lane->ringBytes);
}

Status BareCopies::allocate(std::uint64_t maxBytes) {
  // In place nothing is copied that is not copied out of place, too.
  const RankLayout largest = layoutOf(plan_, rank_, {maxBytes, false});
  HOCCL_RETURN_IF_ERROR(allocate(&out_, largest.bytesOut()));
  return allocate(&in_, largest.bytesIn());
}

Status BareCopies::enqueue(Lane* lane, bool out, std::uint64_t bytes) {
  const Driver* driver = device_->driver();
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min({bytes - done, kChunkBytes, lane->ringBytes});
    if (lane->at + part > lane->ringBytes) lane->at = 0;
    char* host = static_cast<char*>(lane->host) + lane->at;
    const CUdeviceptr memory = lane->memory.at(lane->at);
    HOCCL_RETURN_IF_ERROR(
        out ? HOCCL_CU(driver, cuMemcpyDtoHAsync(host, memory, part, lane->stream))
            : HOCCL_CU(driver, cuMemcpyHtoDAsync(memory, host, part, lane->stream)));
    lane->at += part;
    done += part;
  }
  return {};
}

Status BareCopies::enqueue(std::uint64_t out, std::uint64_t in) {
  HOCCL_RETURN_IF_ERROR(enqueue(&out_, true, out));
  return enqueue(&in_, false, in);
}

Status BareCopies::drain() {
  for (const Lane* lane : {&out_, &in_})
    if (lane->stream)
      HOCCL_RETURN_IF_ERROR(device_->drain(lane->stream, timeoutMs_ - timeoutMs_ / 10, nullptr));
  return {};
}

Status BareCopies::run(const Shape& shape, int count, bool steady, nlohmann::json* answer) {
  const RankLayout layout = layoutOf(plan_, rank_, shape);
  const std::uint64_t out = layout.bytesOut(), in = layout.bytesIn();
  const auto ranks = static_cast<unsigned>(plan_.ranks);
  if (!steady) {
    std::vector<std::uint64_t> samples;
    for (int i = 0; i < count; ++i) {
      HOCCL_RETURN_IF_ERROR(start_->meet(ranks, timeoutMs_));
      const std::uint64_t begin = monotonicNs();
      HOCCL_RETURN_IF_ERROR(enqueue(out, in));
      HOCCL_RETURN_IF_ERROR(drain());
      samples.push_back(monotonicNs() - begin);
    }
    (*answer)["singleNs"] = samples;
    return {};
  }
  const std::uint64_t goal = ++steadyRuns_ * ranks;
  HOCCL_RETURN_IF_ERROR(start_->meet(ranks, timeoutMs_));
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < count; ++i) HOCCL_RETURN_IF_ERROR(enqueue(out, in));
  HOCCL_RETURN_IF_ERROR(drain());
  (*answer)["ns"] = monotonicNs() - begin;
  start_->finished.fetch_add(1);
  if (out + in == 0) return StartPage::waitFor(start_->finished, goal, timeoutMs_);
  const Deadline deadline = Deadline::afterMs(timeoutMs_);
  while (start_->finished.load() < goal) {
    if (deadline.passed())
      return Status::error(Code::Timeout, "another rank did not finish its copies");
    HOCCL_RETURN_IF_ERROR(enqueue(out, in));
    HOCCL_RETURN_IF_ERROR(drain());
  }
  return {};
}

}  // namespace hoccl::bench
