// What the mover's loop does about direct copies between the GPUs of a node (docs/direct.md):
// offers and routes, peers' memory that is mapped here, and the end of receives that a peer may be
// copying into.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/runtime/mover_loop.h"

namespace hoccl {
namespace {

/// For as long as a direct copy takes at this rate the loop does not nap, but not longer than so
/// many times HOCCL_SPIN_US.
constexpr std::uint64_t kSlowestBytesPerNs = 100;
constexpr std::uint64_t kDirectSpinFactor = 64;
/// For operations that have waited for their peers' word for too long.
constexpr std::uint64_t kBetweenLooksNs = 1'000'000;

void describeTo(Link& link, const BufferRef& buffer) {
  Message parts[HandlePart::kParts];
  PeerImports::describe(buffer, &parts);
  for (const Message& part : parts) link.send(part);
}

}  // namespace

Reach MoverLoop::reachOf(const Op& op) const {
  const CommunicatorInfo& info = op.communicator->info;
  if (op.descriptor.peer == info.rank) return Reach::None;
  return info.peers[static_cast<std::size_t>(op.descriptor.peer)].reach;
}

/// From one place of this GPU's memory to another, as far as is known, with memory of a neighbour
/// at hand.
bool MoverLoop::mayDetour(const Op& send) {
  Communicator& communicator = *send.communicator;
  if (send.descriptor.peer != communicator.info.rank || !send.link->hasDetour() ||
      send.descriptor.buffer.kind == BufferKind::Staging) {
    return false;
  }
  // That of the same group is here, although it may not have started.
  Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(send.descriptor.peer)];
  const PairWindow::Entry* entry = pair.receives.find(send.descriptor.pairSequence);
  return entry && entry->op && entry->op->descriptor.buffer.kind != BufferKind::Staging;
}

/// Whether the peer knows of that memory. A span takes the control threads of both movers some
/// milliseconds: what is received in it meanwhile goes through the slots.
bool MoverLoop::tellOf(Link& link, const BufferRef& buffer) {
  if (buffer.kind == BufferKind::Device) {
    const ToldPeer::State state = link.told().tell(buffer.allocationId);
    if (state == ToldPeer::State::New) describeTo(link, buffer);
    return state == ToldPeer::State::New || state == ToldPeer::State::Told;
  }
  const ToldPeer::State state = link.told().share(buffer.allocationId);
  if (state == ToldPeer::State::New) {
    ControlRequest share;
    share.kind = ControlRequest::Kind::ShareSpan;
    share.peer = link.peer();
    share.buffer = buffer;
    request(std::move(share));
  }
  return state == ToldPeer::State::Told;
}

/// A span of this side has been handed over to a peer's mover, or cannot be.
void MoverLoop::spanShared(const LoopEvent& event) {
  const auto position = links_.find(event.peer);
  if (position == links_.end()) return;
  Link& link = *position->second;
  bool tell = false, forget = false;
  link.told().shared(event.buffer.allocationId, event.share, &tell, &forget);
  if (tell) describeTo(link, event.buffer);
  if (forget) askToForget(link, event.buffer.allocationId);
  if (!event.status) tellStaged(event.status);
}

/// Once.
void MoverLoop::tellStaged(const Status& why) {
  if (std::exchange(toldStaged_, true)) return;
  logInfo("some transfers within the node go through host memory and not directly: {}",
          why.message());
}

/// The receive's Ready says where the sender may copy to, or that this side could pull; it chooses.
void MoverLoop::offer(Op* op, Message* ready) {
  const BufferRef& buffer = op->descriptor.buffer;
  const Reach reach = reachOf(*op);
  if (reach == Reach::None || buffer.kind == BufferKind::Staging || op->link->abandoned() ||
      !op->link->connection()->sharedSlots()) {
    return;
  }
  if (reach == Reach::Pull) {
    op->pulls = true;
    ready->slot = 1;
    return;
  }
  if (!tellOf(*op->link, buffer)) return;
  ready->turn = buffer.allocationId;
  ready->offset = buffer.offset;
  op->offered = true;
}

/// Both sides of a send within the node are known. This side alone decides how it moves, so that
/// the two cannot disagree; the receiver takes what comes.
void MoverLoop::decideRoute(Op* op, const PairWindow::Entry& entry) {
  const BufferRef& buffer = op->descriptor.buffer;
  const bool may = !op->partner && buffer.kind != BufferKind::Staging && !op->link->abandoned();
  PeerImport* target = nullptr;
  if (may && entry.offer != 0 && reachOf(*op) == Reach::Push) {
    target = importOf(*op->link, entry.offer, entry.offerOffset, op->descriptor.bytes);
  } else if (may && entry.pulls && tellOf(*op->link, buffer)) {
    op->route = Op::Route::Lent;
  }
  if (!target) {
    arrived(op, Op::kForRoute);
    return;
  }
  op->route = Op::Route::Direct;
  op->target = target;
  op->targetAddress = entry.offerOffset;
  if (target->state == PeerImport::State::Ready) {
    op->targetAddress += target->address;
    arrived(op, Op::kForRoute);
  } else {
    op->nextForTarget = std::exchange(target->waiters, op);
  }
}

/// A peer's allocation, which is mapped here or being mapped; null if it cannot be, or does not
/// hold so many bytes from there.
PeerImport* MoverLoop::importOf(Link& link, std::uint64_t allocation, std::uint64_t offset,
                                std::uint64_t bytes) {
  bool fresh = false;
  PeerImport* import = link.imports().acquire(allocation, &fresh);
  if (!import) return nullptr;
  if (fresh) {
    ControlRequest ask;
    ask.kind = ControlRequest::Kind::Import;
    ask.peer = link.peer();
    ask.serial = import->serial;
    ask.buffer = import->buffer;
    request(std::move(ask));
  }
  const std::uint64_t all = import->buffer.allocationBytes;
  const bool inside = offset <= all && bytes <= all - offset;
  if (inside && import->state != PeerImport::State::Failed) return import;
  link.imports().release(import);
  return nullptr;
}

/// A peer's allocation has been mapped here, or cannot be.
void MoverLoop::targetImported(const LoopEvent& event) {
  const auto position = links_.find(event.peer);
  PeerImport* target =
      position == links_.end() ? nullptr : position->second->imports().find(event.serial);
  if (!target) {  // its peer has gone meanwhile
    if (event.status) unmapTarget(event.peer, event.buffer, event.address, event.serial);
    return;
  }
  PeerImports& imports = position->second->imports();
  imports.settle(target, event.status ? event.address : 0);
  if (!event.status) tellStaged(event.status);
  while (Op* op = target->waiters) {
    target->waiters = std::exchange(op->nextForTarget, nullptr);
    if (event.status) {
      op->targetAddress += event.address;
    } else {
      releaseTarget(op);
    }
    arrived(op, Op::kForRoute);
  }
}

void MoverLoop::unmapTarget(const PeerId& peer, const BufferRef& which, CUdeviceptr address,
                            std::uint64_t serial) {
  ControlRequest unmap;
  unmap.kind = ControlRequest::Kind::Unmap;
  unmap.buffer = which;
  unmap.peer = peer;
  unmap.mapped = address;
  unmap.serial = serial;
  request(std::move(unmap));
}

/// Goes back to the staged route, or ends.
void MoverLoop::releaseTarget(Op* op) {
  PeerImport* target = std::exchange(op->target, nullptr);
  op->route = Op::Route::Staged;
  if (!target) return;
  for (Op** at = &target->waiters; *at; at = &(*at)->nextForTarget) {
    if (*at != op) continue;
    *at = std::exchange(op->nextForTarget, nullptr);
    break;
  }
  op->link->imports().release(target);
}

void MoverLoop::tendTargets(Link& link) {
  CUdeviceptr address = 0;
  std::uint64_t serial = 0, allocation = 0;
  BufferRef which;
  while (link.imports().nextUnmap(&address, &serial, &which)) {
    unmapTarget(link.peer(), which, address, serial);
  }
  while (link.imports().nextForgotten(&allocation)) {
    Message message{};
    message.type = MessageType::Forgotten;
    message.turn = allocation;
    link.send(message);
  }
}

/// Of an allocation that is being unmapped here: so do those that have been told of it.
void MoverLoop::takeBack(std::uint64_t allocation) {
  for (auto& [peer, link] : links_) {
    if (!link->up()) continue;
    const std::uint64_t ticket = imports_.hold();
    switch (link->told().takeBack(allocation, ticket)) {
      case ToldPeer::TakenBack::NotTold:
        imports_.unholdLast();
        break;
      case ToldPeer::TakenBack::Ask:
        askToForget(*link, allocation);
        break;
      case ToldPeer::TakenBack::Later:  // spanShared
        break;
    }
  }
}

void MoverLoop::askToForget(Link& link, std::uint64_t allocation) {
  Message message{};
  message.type = MessageType::Forget;
  message.turn = allocation;
  link.send(message);
  link.connection()->nudge();
}

void MoverLoop::onForgotten(Link& link, const Message& message) {
  std::uint64_t ticket = 0;
  if (link.told().answered(message.turn, &ticket)) imports_.unhold(ticket);
}

/// The peer has gone, and with it what it had mapped.
void MoverLoop::releaseHolds(Link& link) {
  for (std::uint64_t ticket = 0; link.told().nextVoid(&ticket);) imports_.unhold(ticket);
}

/// Before anything of the launch moves.
void MoverLoop::giveTurns(Launch& launch) {
  scratch_.clear();
  for (Op* op : launch.ops) {
    if (op && op->send() && reachOf(*op) != Reach::None &&
        op->descriptor.bytes >= Turns::kLeastBytes) {
      scratch_.push_back(op);
    }
  }
  if (scratch_.size() < 2) return;
  launch.turns.begin(static_cast<std::uint32_t>(scratch_.size()));
  const auto distance = [](const Op* op) {
    const CommunicatorInfo& info = op->communicator->info;
    const auto ranks = static_cast<std::int32_t>(info.peers.size());
    return (op->descriptor.peer - info.rank + ranks) % ranks;
  };
  std::sort(scratch_.begin(), scratch_.end(), [&](const Op* a, const Op* b) {
    return std::pair(distance(a), a->descriptor.pairSequence) <
           std::pair(distance(b), b->descriptor.pairSequence);
  });
  for (std::uint32_t turn = 0; turn < scratch_.size(); ++turn) scratch_[turn]->turn = turn;
}

void MoverLoop::leaveTurn(const Op& op) {
  if (op.turn != Turns::kNone) launches_[op.descriptor.launchSlot].turns.leave(op.turn);
}

bool MoverLoop::mayGo(const Op& op) {
  if (op.turn == Turns::kNone) return true;
  // What is lent keeps its turn until it is read: receivers would not know in which order.
  const bool busy = peer_.inFlight >= SharedLanes::kCount || lentTurns_ > 0;
  return launches_[op.descriptor.launchSlot].turns.mayGo(op.turn, busy, monotonicNs(),
                                                         pace_.of(op.descriptor.bytes));
}

void MoverLoop::directCopyTook(std::uint64_t bytes, std::uint64_t ns) { pace_.took(bytes, ns); }

void MoverLoop::movesDirectly(const Op& op) {
  leaveTurn(op);
  spinFor(op.descriptor.bytes);
  countDirect(op);
}

/// A direct copy is one piece, and a nap at its end would stretch it.
void MoverLoop::spinFor(std::uint64_t bytes) {
  const std::uint64_t longest = spinNs_ * kDirectSpinFactor;
  spinUntilNs_ =
      std::max(spinUntilNs_, monotonicNs() + std::min(longest, bytes / kSlowestBytesPerNs));
}

void MoverLoop::countDirect(const Op& op) {
  if (op.descriptor.counted == 0) return;
  CommunicatorRecord& record = *op.communicator->record;
  record.directBytes.fetch_add(op.descriptor.bytes, std::memory_order_relaxed);
  if (op.descriptor.counted & 1) record.directCalls.fetch_add(1, std::memory_order_relaxed);
}

// --- Copies that the receiver's mover makes ------------------------------------------------------

void MoverLoop::lent(Op& op) {
  op.lent = true;
  if (op.turn != Turns::kNone) ++lentTurns_;
  spinFor(op.descriptor.bytes);
}

void MoverLoop::returned(Op& op, bool read) {
  op.lent = false;
  if (op.turn != Turns::kNone) --lentTurns_;
  leaveTurn(op);
  if (op.failed) --unsettled_;
  if (read || op.failed) {
    if (read) countDirect(op);
    copyEnded(op, read ? op.descriptor.bytes : 0);
    return;
  }
  --op.copiesInFlight;
  op.issued = 0;
  op.route = Op::Route::Staged;
  if (op.link->abandoned()) return;  // pairEnded finds what has not been issued
  Communicator& communicator = *op.communicator;
  const Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(op.descriptor.peer)];
  if (pair.dead) {
    failCommunicator(communicator, Code::Remote, pair.why);
    return;
  }
  op.link->startSend(&op);
}

void MoverLoop::borrow(Op& op, const Message& message) {
  op.target = importOf(*op.link, message.length, message.offset, message.bytes);
}

void MoverLoop::refused(Op& op) {
  releaseTarget(&op);
  Communicator& communicator = *op.communicator;
  const Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(op.descriptor.peer)];
  if (pair.dead) failCommunicator(communicator, Code::Remote, pair.why);
}

/// The peer has been silent for so long that what it may still copy does not matter.
void MoverLoop::giveUpLent(Communicator& communicator, std::int32_t peer) {
  std::vector<Op*> over;
  communicator.pairs[static_cast<std::size_t>(peer)].sends.forEach([&](PairWindow::Entry& entry) {
    if (entry.op && entry.op->failed && entry.op->lent) over.push_back(entry.op);
  });
  for (Op* op : over) {
    op->link->giveUp(op);
    // It must not take newer bytes for the send's.
    tellPeer(communicator, static_cast<std::size_t>(peer), *op->link, FailReason::LocalError);
    returned(*op, false);
  }
}

/// A receive that has failed, and into whose buffer the peer may still begin to copy: its stream is
/// released only when the peer has said that it will not (rule 9).
bool MoverLoop::awaitsPeer(const Op& op) const {
  if (!op.offered || broken_ || op.link->abandoned()) return false;
  return !op.communicator->pairs[static_cast<std::size_t>(op.descriptor.peer)].quiet;
}

/// No copy of that peer that is not announced will be made any more.
void MoverLoop::settle(Communicator& communicator, std::int32_t peer) {
  Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(peer)];
  pair.quiet = true;
  std::vector<Op*> over;
  pair.receives.forEach([&](PairWindow::Entry& entry) {
    if (entry.op && entry.op->failed && std::exchange(entry.op->offered, false)) {
      over.push_back(entry.op);
    }
  });
  for (Op* op : over) {
    --unsettled_;
    if (op->copiesInFlight == 0) finishOp(op);
  }
}

void MoverLoop::settleOverdue() {
  const std::uint64_t now = monotonicNs();
  if (now < lookForOverdueNs_) return;  // others' copies go on meanwhile
  lookForOverdueNs_ = now + kBetweenLooksNs;
  for (auto& communicator : communicators_) {
    if (!communicator || !communicator->failed || now < communicator->settleByNs) continue;
    for (std::size_t rank = 0; rank < communicator->pairs.size(); ++rank) {
      bool waits = false;
      const auto look = [&](const PairWindow::Entry& entry) {
        waits = waits || (entry.op && entry.op->failed && (entry.op->offered || entry.op->lent));
      };
      communicator->pairs[rank].receives.forEach(look);
      communicator->pairs[rank].sends.forEach(look);
      if (!waits) continue;
      logError(
          "{} does not say that it copies no more into or out of this rank's memory (is it "
          "stopped?): what lies there may still change",
          describePeer(*communicator, static_cast<std::int32_t>(rank)));
      giveUpLent(*communicator, static_cast<std::int32_t>(rank));
      settle(*communicator, static_cast<std::int32_t>(rank));
    }
  }
}

}  // namespace hoccl
