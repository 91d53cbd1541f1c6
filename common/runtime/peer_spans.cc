#include "common/runtime/peer_spans.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/span_slot.h"

namespace hoccl {
namespace {

/// A peer that is stopped lets its socket fill up; the control thread has others to serve.
constexpr std::uint64_t kLongestMs = 200;
static_assert(sizeof(AddSpan) <= 4096, "a connection of this host carries no more");

AddSpan headerOf(const BufferRef& span) {
  AddSpan message{};
  message.magic = kMoverMagic;
  message.id = span.allocationId;
  message.base = span.allocationBase;
  message.bytes = span.allocationBytes;
  return message;
}

Status shareParts(Connection* to, const SpanMapper& own, const BufferRef& span) {
  AddSpan message = headerOf(span);
  while (message.done < message.bytes) {
    std::vector<int> fds;
    HOCCL_RETURN_IF_ERROR(own.passOn(&message, &fds));
    HOCCL_RETURN_IF_ERROR(to->handOver(&message, sizeof message, fds, kLongestMs));
    for (std::size_t i = 0; i < message.pieces; ++i) message.done += message.pieceBytes[i];
  }
  return {};
}

}  // namespace

Status PeerSpans::share(Connection* to, const SpanMapper& own, const BufferRef& span) {
  Status status = shareParts(to, own, span);
  if (status) return {};
  // Takes back the parts before.
  const AddSpan over = headerOf(span);
  (void)to->handOver(&over, sizeof over, {}, kLongestMs);
  return status.inContext(
      fmt::format("memory at {:#x} ({} bytes) cannot be given to a peer's mover",
                  span.allocationBase, span.allocationBytes));
}

void PeerSpans::take(Connection* from) {
  for (HandedOver parcel; from->takeHandedOver(&parcel);) {
    AddSpan message{};
    if (parcel.data.size() != sizeof message) continue;
    std::memcpy(&message, parcel.data.data(), sizeof message);
    if (message.magic != kMoverMagic || !isSpan(message.id)) continue;
    bool whole = false;
    CUdeviceptr address = 0;
    std::uint32_t refused = 0;
    auto [peer, added] = mapped_.try_emplace(from->peer(), driver_);
    const Status status = peer->second.add(message, parcel.fds, &whole, &address, &refused);
    // Who wants to copy there hears that it is not mapped.
    if (!status) logInfo("memory of a peer is not mapped: {}", status.message());
  }
}

Status PeerSpans::find(const PeerId& peer, std::uint64_t id, CUdeviceptr* address) const {
  const auto position = mapped_.find(peer);
  *address = position == mapped_.end() ? 0 : position->second.addressOf(id);
  if (*address) return {};
  return Status::error(Code::Cuda,
                       fmt::format("the segments of a peer's memory could not be mapped here "
                                   "(span {:#x})",
                                   id));
}

Status PeerSpans::unmap(const PeerId& peer, std::uint64_t id) {
  const auto position = mapped_.find(peer);
  return position == mapped_.end() ? Status() : position->second.unmap(id);
}

void PeerSpans::abandon(const PeerId& peer) {
  const auto position = mapped_.find(peer);
  if (position == mapped_.end()) return;
  if (Status status = position->second.unmapAll(); !status) {
    logWarn("memory of a peer that has gone stays mapped: {}", status.message());
  }
  mapped_.erase(position);
}

}  // namespace hoccl
