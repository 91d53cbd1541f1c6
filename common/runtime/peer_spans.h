#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/gpu/driver.h"
#include "common/net/transport.h"
#include "common/runtime/mover_events.h"
#include "common/runtime/segment.h"
#include "common/runtime/span_mapper.h"

namespace hoccl {

/// Spans (BufferKind::Span) between the movers of a node, on the control thread. Such memory has no
/// handle that fits into a message, so its segments go as descriptors beside the messages, and the
/// peer maps them as they come. It hears of the span, as of any allocation, in a Handle message,
/// which the loop sends once `share` has succeeded.
class PeerSpans {
 public:
  /// `meanwhile` is called again and again while a peer's socket is full: it takes what all peers
  /// have handed over. They may be waiting for that themselves, and for no other reason not look.
  PeerSpans(const Driver* driver, std::uint64_t timeoutMs, std::function<void()> meanwhile)
      : driver_(driver), timeoutMs_(timeoutMs), meanwhile_(std::move(meanwhile)) {}

  /// Hands the peer a span that is mapped in `own`; the error says why it has not all of it. A peer
  /// that does not look is waited for once and not with every span, and for a part of the time
  /// only, since frees wait for this thread meanwhile.
  Status share(Connection* to, const SpanMapper& own, const BufferRef& span, SpanShare* has);
  /// Looks at what has come from that peer, takes what it has handed over, and maps it.
  void take(Connection* from);
  /// Where a span of that peer is mapped.
  Status find(const PeerId& peer, std::uint64_t id, CUdeviceptr* address) const;
  Status unmap(const PeerId& peer, std::uint64_t id);
  /// The peer has gone.
  void abandon(const PeerId& peer);

 private:
  Status handOver(Connection* to, const AddSpan& message, const std::vector<int>& fds);

  const Driver* driver_;
  std::uint64_t timeoutMs_;
  std::function<void()> meanwhile_;
  std::set<PeerId> deaf_;  ///< those that did not look last time
  std::map<PeerId, SpanMapper> mapped_;
};

}  // namespace hoccl
