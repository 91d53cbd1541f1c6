#include "tools/bench/host_copies.h"

#include <fmt/format.h>

#include <algorithm>

namespace hoccl::bench {
namespace {

// Large enough that a copy runs at the engine's full rate.
constexpr std::uint64_t kChunkBytes = 8 << 20;
constexpr std::uint64_t kRingBytes = 64 << 20;

}  // namespace

HostCopies::~HostCopies() {
  for (Lane* lane : {&out_, &in_}) {
    if (lane->host) device_->driver()->cuMemFreeHost(lane->host);
    if (lane->stream) device_->driver()->cuStreamDestroy(lane->stream);
  }
}

Status HostCopies::allocate(Lane* lane, std::uint64_t maxBytes) {
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

Status HostCopies::allocate(const RankLayout& largest) {
  HOCCL_RETURN_IF_ERROR(allocate(&out_, largest.bytesOut()));
  return allocate(&in_, largest.bytesIn());
}

Status HostCopies::enqueue(Lane* lane, bool out, std::uint64_t bytes) {
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

bool HostCopies::any(const RankLayout& layout) const {
  return layout.bytesOut() + layout.bytesIn() > 0;
}

Status HostCopies::enqueue(const RankLayout& layout) {
  HOCCL_RETURN_IF_ERROR(enqueue(&out_, true, layout.bytesOut()));
  return enqueue(&in_, false, layout.bytesIn());
}

Status HostCopies::drain() {
  for (const Lane* lane : {&out_, &in_})
    if (lane->stream) HOCCL_RETURN_IF_ERROR(device_->drain(lane->stream, timeoutMs_, nullptr));
  return {};
}

}  // namespace hoccl::bench
