#include "common/runtime/peer_spans.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/span_slot.h"

namespace hoccl {
namespace {

/// A peer that does not look at its socket is waited for that part of HOCCL_TIMEOUT_MS, looking at
/// the other peers so often.
constexpr std::uint64_t kPartOfTimeout = 4;
constexpr std::uint64_t kLookMs = 2;
static_assert(sizeof(AddSpan) <= HandedOver::kMostBytes);

AddSpan headerOf(const BufferRef& span) {
  AddSpan message{};
  message.magic = kMoverMagic;
  message.id = span.allocationId;
  message.base = span.allocationBase;
  message.bytes = span.allocationBytes;
  return message;
}

}  // namespace

Status PeerSpans::handOver(Connection* to, const AddSpan& message, const std::vector<int>& fds) {
  const bool deaf = deaf_.count(to->peer()) > 0;
  const Deadline deadline = Deadline::afterMs(deaf ? 0 : timeoutMs_ / kPartOfTimeout);
  for (;;) {
    Status status = to->handOver(&message, bytesOf(message), fds, deaf ? 0 : kLookMs);
    if (status.code() != Code::Timeout) {
      deaf_.erase(to->peer());
      return status;
    }
    meanwhile_();
    if (!deadline.passed()) continue;
    deaf_.insert(to->peer());
    return status;
  }
}

Status PeerSpans::share(Connection* to, const SpanMapper& own, const BufferRef& span,
                        SpanShare* has) {
  AddSpan message = headerOf(span);
  Status status;
  while (status && message.done < message.bytes) {
    std::vector<int> fds;
    status = own.passOn(&message, &fds);
    if (status) status = handOver(to, message, fds);
    for (std::size_t i = 0; status && i < message.pieces; ++i) {
      message.done += message.pieceBytes[i];
    }
  }
  *has = SpanShare::Whole;
  if (status) return {};
  *has = status.code() == Code::Timeout ? SpanShare::Later : SpanShare::Nothing;
  // Takes back the parts before.
  if (message.done > 0 && !handOver(to, headerOf(span), {})) *has = SpanShare::Part;
  return status.inContext(
      fmt::format("memory at {:#x} ({} bytes) cannot be given to a peer's mover",
                  span.allocationBase, span.allocationBytes));
}

void PeerSpans::take(Connection* from) {
  // As long as `watch` finds any: it leaves in the socket what would take too many descriptors.
  for (bool any = true; std::exchange(any, false);) {
    from->watch();
    for (HandedOver parcel; from->takeHandedOver(&parcel); any = true) {
      AddSpan message{};
      const std::size_t bytes = parcel.data.size();
      if (bytes != sizeof message && bytes != kShortAddSpan) continue;
      std::memcpy(&message, parcel.data.data(), bytes);
      if (bytes != bytesOf(message)) continue;
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
  deaf_.erase(peer);
  const auto position = mapped_.find(peer);
  if (position == mapped_.end()) return;
  if (Status status = position->second.unmapAll(); !status) {
    logWarn("memory of a peer that has gone stays mapped: {}", status.message());
  }
  mapped_.erase(position);
}

}  // namespace hoccl
