// What the mover's loop does about a send and its receive of which one is steered and the other has
// gone to NCCL, because their sizes lie on different sides of HOCCL_MIN_BYTES: neither would ever
// end. An operation that has waited for a while is told to the peer's mover, which compares what
// its own application has called (pair_counts.h). Nothing is concluded from how long it waits.

#include <utility>
#include <vector>

#include "common/base/time.h"
#include "common/runtime/mover_loop.h"

namespace hoccl {
namespace {

/// An operation is told when it waits at two looks. Long enough that those whose peer is only late
/// seldom are: it costs the peer's mover a wake-up.
constexpr std::uint64_t kBetweenLooksNs = 50'000'000;

/// Whether nothing of the other side has shown yet. That its streams have not come to it does not
/// matter: the calls are compared, and what holds the streams up may be waiting for the peer, too.
bool waitsForPeer(const Op& op) {
  if (op.failed || (op.descriptor.pairSequence & kCollectiveSequence)) return false;
  if (op.waiting & Op::kForLink) return false;  // nobody to tell yet
  return op.send() ? !op.matched : op.announced == 0;
}

}  // namespace

void MoverLoop::tellStalled(std::uint64_t now) {
  lookForStallsNs_ = now + kBetweenLooksNs;
  untold_ = false;
  for (auto& communicator : communicators_) {
    if (!communicator || communicator->failed) continue;
    if (communicator->pending + communicator->loneSends == 0) continue;
    for (std::size_t rank = 0; rank < communicator->pairs.size(); ++rank) {
      if (static_cast<std::int32_t>(rank) == communicator->info.rank) continue;
      untold_ |= tellStalled(*communicator, rank, true);
      untold_ |= tellStalled(*communicator, rank, false);
    }
  }
}

/// Only the first that waits: what the peer calls next is that one, or never comes. Returns whether
/// it is to be told at the next look, if it still waits then.
bool MoverLoop::tellStalled(Communicator& communicator, std::size_t rank, bool send) {
  Communicator::Pair& pair = communicator.pairs[rank];
  if (pair.dead) return false;
  const PairCounts& counts = communicator.info.counts[rank];
  if ((send ? counts.sends : counts.receives).captured.load(std::memory_order_relaxed) != 0) {
    return false;
  }
  LoneSend first{StallWatch::kNone, 0, 0};
  (send ? pair.sends : pair.receives).forEach([&](PairWindow::Entry& entry) {
    if (!entry.op || !waitsForPeer(*entry.op)) return;
    const OpDescriptor& d = entry.op->descriptor;
    if (d.pairSequence < first.sequence) first = {d.pairSequence, d.passed, d.bytes};
  });
  if (send) {
    for (const LoneSend& each : pair.loneSends) {
      if (each.sequence < first.sequence) first = each;
    }
  }
  StallWatch& watch = send ? pair.sendWatch : pair.receiveWatch;
  const bool still = std::exchange(watch.front, first.sequence) == first.sequence;
  if (first.sequence == StallWatch::kNone || watch.told == first.sequence) return false;
  if (!still) return true;
  watch.told = first.sequence;
  const auto link = links_.find(communicator.info.peers[rank].mover);
  if (link == links_.end() || !link->second->up()) return false;
  const auto peer = static_cast<std::int32_t>(rank);
  Message message{};
  message.type = MessageType::Stalled;
  message.slot = send ? 0 : 1;
  message.communicator = communicator.info.id;
  message.source = send ? communicator.info.rank : peer;
  message.destination = send ? peer : communicator.info.rank;
  message.pairSequence = first.sequence;
  message.bytes = first.bytes;
  message.length = first.passed;
  link->second->send(message);
  link->second->connection()->nudge();
  return false;
}

/// A send whose bytes have all gone before its receive has come.
void MoverLoop::noteLoneSend(const Op& op) {
  const OpDescriptor& d = op.descriptor;
  Communicator& communicator = *op.communicator;
  if ((d.pairSequence & kCollectiveSequence) || d.peer == communicator.info.rank) return;
  communicator.pairs[static_cast<std::size_t>(d.peer)].loneSends.push_back(
      {d.pairSequence, d.passed, d.bytes});
  ++communicator.loneSends;
  untold_ = true;
}

void MoverLoop::receiveCame(Communicator& communicator, const Message& ready) {
  if (communicator.loneSends == 0) return;
  auto& lone = communicator.pairs[static_cast<std::size_t>(ready.destination)].loneSends;
  communicator.loneSends -= static_cast<std::uint32_t>(std::erase_if(
      lone, [&](const LoneSend& each) { return each.sequence == ready.pairSequence; }));
  untold_ = untold_ || !lone.empty();  // another is the first now
}

void MoverLoop::onStalled(Link& link, const Message& message) {
  Communicator* communicator = byId(message.communicator);
  if (!communicator || communicator->failed) return;
  const bool theirSend = message.slot == 0;
  const std::int32_t peer = theirSend ? message.source : message.destination;
  const std::int32_t self = theirSend ? message.destination : message.source;
  if (self != communicator->info.rank || peer < 0 || peer == self ||
      static_cast<std::size_t>(peer) >= communicator->pairs.size() ||
      (message.pairSequence & kCollectiveSequence)) {
    return;
  }
  const auto index = static_cast<std::size_t>(peer);
  PairCounts& counts = communicator->info.counts[index];
  PairDirection& own = theirSend ? counts.receives : counts.sends;
  Communicator::Pair& pair = communicator->pairs[index];
  StallWatch& watch = theirSend ? pair.receiveWatch : pair.sendWatch;
  watch.theirs = message.pairSequence;
  watch.theirPassed = message.length;
  watch.theirBytes = message.bytes;
  if (noteAwaited(own, message.pairSequence, message.length)) {
    mismatch(*communicator, &link, peer, message.pairSequence, !theirSend, 0, message.bytes);
  }
}

void MoverLoop::onDisagree(Communicator& communicator, const OpDescriptor& descriptor) {
  if (communicator.failed || descriptor.peer < 0 ||
      static_cast<std::size_t>(descriptor.peer) >= communicator.pairs.size()) {
    return;
  }
  const auto index = static_cast<std::size_t>(descriptor.peer);
  const bool send = descriptor.launchSlot == 0;
  const StallWatch& watch =
      send ? communicator.pairs[index].sendWatch : communicator.pairs[index].receiveWatch;
  const auto link = links_.find(communicator.info.peers[index].mover);
  if (watch.theirs == StallWatch::kNone ||
      !disagree(descriptor.pairSequence, descriptor.passed, watch.theirs, watch.theirPassed)) {
    return;
  }
  // The peer may have gone since it told: then this side learns of it all the same.
  mismatch(communicator, link == links_.end() ? nullptr : link->second.get(), descriptor.peer,
           watch.theirs, send, descriptor.bytes, watch.theirBytes);
}

}  // namespace hoccl
