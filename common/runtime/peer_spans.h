#pragma once

#include <cstdint>
#include <map>

#include "common/base/status.h"
#include "common/gpu/driver.h"
#include "common/net/transport.h"
#include "common/runtime/segment.h"
#include "common/runtime/span_mapper.h"

namespace hoccl {

/// Spans (BufferKind::Span) between the movers of a node, on the control thread. Such memory has no
/// handle that fits into a message, so its segments go as descriptors beside the messages, and the
/// peer maps them as they come. It hears of the span, as of any allocation, in a Handle message,
/// which the loop sends once `share` has succeeded.
class PeerSpans {
 public:
  explicit PeerSpans(const Driver* driver) : driver_(driver) {}

  /// Hands the peer a span that is mapped in `own`. An error leaves the peer without it.
  Status share(Connection* to, const SpanMapper& own, const BufferRef& span);
  /// Takes what that peer has handed over, and maps it.
  void take(Connection* from);
  /// Where a span of that peer is mapped.
  Status find(const PeerId& peer, std::uint64_t id, CUdeviceptr* address) const;
  Status unmap(const PeerId& peer, std::uint64_t id);
  /// The peer has gone.
  void abandon(const PeerId& peer);

 private:
  const Driver* driver_;
  std::map<PeerId, SpanMapper> mapped_;
};

}  // namespace hoccl
