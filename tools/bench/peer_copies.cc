#include "tools/bench/peer_copies.h"

#include <fmt/format.h>

#include <algorithm>

namespace hoccl::bench {

PeerCopies::~PeerCopies() {
  if (stream_) device_->driver()->cuStreamDestroy(stream_);
}

/// Those to others, beginning with the next rank, so that no GPU receives from two at once.
std::vector<Message> PeerCopies::outgoing(const RankLayout& layout) const {
  std::vector<Message> messages;
  for (const Message& message : layout.sends)
    if (message.peer != rank_ && message.bytes > 0) messages.push_back(message);
  std::stable_partition(messages.begin(), messages.end(),
                        [&](const Message& message) { return message.peer > rank_; });
  return messages;
}

bool PeerCopies::any(const RankLayout& layout) const { return !outgoing(layout).empty(); }

Status PeerCopies::allocate(const RankLayout& largest) {
  const Driver* driver = device_->driver();
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING)));
  CUdevice self = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDeviceGet(&self, device_->info().index)));
  std::uint64_t most = 0;
  for (const Message& message : outgoing(largest)) {
    most = std::max(most, message.bytes);
    const int gpu = message.peer % device_->info().count;
    CUdevice peer = 0;
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDeviceGet(&peer, gpu)));
    HOCCL_RETURN_IF_ERROR(
        PeerMemory::create(driver, self, peer, message.bytes, &targets_[message.peer])
            .inContext(fmt::format("bare copies to rank {} on GPU {} (HOCCL_P2P=0 compares with "
                                   "copies through the host)",
                                   message.peer, gpu)));
  }
  return most == 0 ? Status() : source_.allocate(driver, most);
}

Status PeerCopies::enqueue(const RankLayout& layout) {
  for (const Message& message : outgoing(layout)) {
    HOCCL_RETURN_IF_ERROR(
        HOCCL_CU(device_->driver(), cuMemcpyDtoDAsync(targets_.at(message.peer).address(),
                                                      source_.at(0), message.bytes, stream_)));
  }
  return {};
}

Status PeerCopies::drain() { return device_->drain(stream_, timeoutMs_, nullptr); }

}  // namespace hoccl::bench
