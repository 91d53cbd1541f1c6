// What the mover's loop does about an operation, from its descriptor to its end.

#include <fmt/format.h>

#include <utility>

#include "common/runtime/mover_loop.h"

namespace hoccl {

void MoverLoop::onDescriptor(const OpDescriptor& descriptor) {
  if (descriptor.communicator >= kMaxCommunicators) return;  // a torn segment
  // Its communicator was announced before, but perhaps after this round's look at the events.
  if (!communicators_[descriptor.communicator]) takeEvents();
  Communicator* communicator = communicators_[descriptor.communicator].get();
  // A call that waited for room while its communicator was aborted comes after the next one's
  // start.
  if (descriptor.generation != segment_.communicator(descriptor.communicator).generation.load()) {
    communicator = nullptr;
  }
  switch (descriptor.kind) {
    case OpKind::Nothing:
      return;
    case OpKind::ExtraStream:
      if (Launch* launch = launchOf(descriptor)) {
        // The first stream's slot names the launch; the further one's rides in pairSequence/bytes.
        launch->streams.push_back(
            {static_cast<std::uint32_t>(descriptor.pairSequence), descriptor.bytes});
      }
      return;
    case OpKind::Abort:
    case OpKind::Close:
      if (!communicator) return;
      ++communicator->closesAsked;
      if (descriptor.kind == OpKind::Abort) {
        failCommunicator(*communicator, Code::Aborted, "the communicator was aborted");
      }
      closable_.push_back(descriptor.communicator);
      return;
    case OpKind::Disagree:
      if (communicator) onDisagree(*communicator, descriptor);
      return;
    case OpKind::Drop:
    case OpKind::DropIdle:
    case OpKind::DropSpans:
      imports_.drop(descriptor);
      return;
    case OpKind::Send:
    case OpKind::Recv:
    case OpKind::Mirror: {
      if (descriptor.buffer.kind == BufferKind::Span) {
        const std::uint64_t span = descriptor.buffer.allocationId;
        if (!imports_.find(span)) takeEvents();  // as of a communicator
        imports_.notePin(span);
      }
      Launch* launch = launchOf(descriptor);
      if (!launch) return;
      if (!communicator || descriptor.peer < 0 ||
          static_cast<std::size_t>(descriptor.peer) >= communicator->pairs.size() ||
          descriptor.bytes == 0) {
        ++launch->opsSeen;
        if (++launch->opsDone == launch->opsExpected) finishLaunch(*launch);
        return;
      }
      admit(descriptor, *communicator, *launch);
      return;
    }
  }
}

Launch* MoverLoop::launchOf(const OpDescriptor& descriptor) {
  if (descriptor.launchSlot >= launches_.size()) return nullptr;  // a torn segment
  Launch& launch = launches_[descriptor.launchSlot];
  if (!launch.active) {
    launch.active = true;
    launch.started = false;
    launch.finishByLane = false;
    launch.opsSeen = launch.opsDone = 0;
    launch.opsExpected = descriptor.launchOps;
    launch.streamsExpected = descriptor.launchStreams;
    launch.ops.clear();
    launch.streams.clear();
    launch.streams.push_back({descriptor.launchSlot, descriptor.launchSequence});
    starting_.push_back(descriptor.launchSlot);
  }
  return &launch;
}

void MoverLoop::admit(const OpDescriptor& descriptor, Communicator& communicator, Launch& launch) {
  Op* op = pool_.take();
  op->descriptor = descriptor;
  op->communicator = &communicator;
  op->waiting = Op::kForStart | Op::kForImport | Op::kForLink;
  launch.ops.push_back(op);
  ++launch.opsSeen;
  ++pendingOps_;
  ++communicator.pending;

  Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(descriptor.peer)];
  if (op->mirror()) {
    admitMirror(op, pair);
    return;
  }
  PairWindows& window = op->send() ? pair.sends : pair.receives;
  PairWindow::Entry* entry = window.find(descriptor.pairSequence);
  if (!entry || entry->op) {
    // In no window, so that failing the communicator does not reach it.
    failCommunicator(communicator, Code::Internal,
                     fmt::format("operation {} with {} is out of sequence", descriptor.pairSequence,
                                 describePeer(communicator, descriptor.peer)));
    op->failed = true;
    finishOutOfSequence(op);
    return;
  }
  entry->op = op;
  if (communicator.failed || broken_) {
    failOp(op);
    return;
  }
  op->link = linkTo(communicator.info.peers[static_cast<std::size_t>(descriptor.peer)]);
  if (pair.dead || op->link->abandoned()) {
    if (!pair.dead)
      pair.why = describePeer(communicator, descriptor.peer) + ": its mover has ended";
    // What the peer sent before it went may lie here in full.
    const bool here =
        !op->send() && op->link->earlyBytes(communicator.info.id, descriptor.peer,
                                            descriptor.pairSequence) == descriptor.bytes;
    if (!here) {
      failCommunicator(communicator, Code::Remote, pair.why);
      return;
    }
  }
  if (op->send() && reachOf(*op) != Reach::None) op->waiting |= Op::kForRoute;
  if (!mapBuffer(op)) return;
  if (op->link->up()) op->waiting &= ~Op::kForLink;
  if (entry->peerReady) match(op, *entry);
}

/// Its send has been admitted, but not started: a launch starts when all of its operations are
/// here.
void MoverLoop::admitMirror(Op* op, Communicator::Pair& pair) {
  Communicator& communicator = *op->communicator;
  const OpDescriptor& d = op->descriptor;
  op->waiting &= ~Op::kForLink;  // the send does
  communicator.mirrors.push_back(op);
  if (communicator.failed || broken_) {
    failOp(op);
    return;
  }
  const PairWindow::Entry* entry = pair.sends.find(d.pairSequence);
  Op* send = entry ? entry->op : nullptr;
  const bool fits = send && !send->partner && send->descriptor.bytes == d.bytes &&
                    send->descriptor.launchSlot == d.launchSlot &&
                    send->descriptor.launchSequence == d.launchSequence;
  if (!fits) {
    failCommunicator(
        communicator, Code::Internal,
        fmt::format("there is no send of {} bytes to {} whose block this rank could "
                    "copy ({})",
                    d.bytes, describePeer(communicator, d.peer), describeSequence(d.pairSequence)));
    return;
  }
  // The mirror takes its bytes from the slots.
  if (send->route == Op::Route::Direct) {
    releaseTarget(send);
    send->waiting &= ~Op::kForRoute;
  }
  send->route = Op::Route::Staged;
  op->link = send->link;
  op->partner = send;
  send->partner = op;
  send->waiting |= Op::kForMirror;
  mapBuffer(op);
}

/// Has the operation's buffer mapped here; false if that failed the communicator, and with it the
/// operation.
bool MoverLoop::mapBuffer(Op* op) {
  const BufferRef& buffer = op->descriptor.buffer;
  bool fresh = false;
  op->import = imports_.acquire(buffer, &fresh);
  if (fresh) {
    unmapImports();
    ControlRequest import;
    import.kind = ControlRequest::Kind::Import;
    import.buffer = buffer;
    request(std::move(import));
  }
  if (op->import->state == Import::State::Failed) {
    failCommunicator(*op->communicator, Code::Cuda, op->import->status.message());
    return false;
  }
  if (op->import->state == Import::State::Ready) {
    op->address = op->import->address + buffer.offset;
    op->waiting &= ~Op::kForImport;
  } else {
    op->next = std::exchange(op->import->waiters, op);
  }
  return true;
}

/// Both sides of a send are known: they must be of one size.
void MoverLoop::match(Op* op, const PairWindow::Entry& entry) {
  if (entry.peerBytes == op->descriptor.bytes) {
    op->matched = true;
    if (op->waiting & Op::kForRoute) decideRoute(op, entry);
    return;
  }
  mismatch(*op->communicator, op->link, op->descriptor.peer, op->descriptor.pairSequence, true,
           op->descriptor.bytes, entry.peerBytes);
}

void MoverLoop::arrived(Op* op, Op::Waiting what) {
  op->waiting &= ~static_cast<std::uint32_t>(what);
  if (op->failed) return;
  if (op->waiting == Op::kForRoute) tellWaiting(*op);
  if (op->waiting == 0) activate(op);
}

void MoverLoop::activate(Op* op) {
  if (op->send()) {
    tellWaiting(*op);
    op->detour = mayDetour(*op);
    if (op->route == Op::Route::Staged) leaveTurn(*op);
    op->link->startSend(op);
    return;
  }
  if (op->mirror()) {
    arrived(op->partner, Op::kForMirror);
    return;
  }
  Message message{};
  message.type = MessageType::Ready;
  address(*op, &message);
  offer(op, &message);
  op->link->send(message);
  if (firstOfPair(*op)) op->link->connection()->nudge();
  op->link->startReceive(op);
}

FlagWrite MoverLoop::finishWrite(const Op& op) {
  Launch& launch = launches_[op.descriptor.launchSlot];
  if (launch.opsExpected != 1 || launch.streamsExpected != 1 || op.failed) return {};
  launch.finishByLane = true;
  return {segmentRegistration_->deviceAddress(segment_.launch(op.descriptor.launchSlot).finish),
          op.descriptor.launchSequence};
}

void MoverLoop::address(const Op& op, Message* message) {
  const Communicator& communicator = *op.communicator;
  message->communicator = communicator.info.id;
  message->source = op.send() ? communicator.info.rank : op.descriptor.peer;
  message->destination = op.send() ? op.descriptor.peer : communicator.info.rank;
  message->pairSequence = op.descriptor.pairSequence;
  message->bytes = op.descriptor.bytes;
}

void MoverLoop::copyEnded(Op& op, std::uint64_t bytes) {
  --op.copiesInFlight;
  op.done += bytes;
  SegmentHeader& header = segment_.header();
  (op.send() ? header.chunksOut : header.chunksIn).fetch_add(1, std::memory_order_relaxed);
  if (op.copiesInFlight == 0 && (op.failed || op.done == op.descriptor.bytes)) finishOp(&op);
}

/// Ends an operation without its bytes; copies in flight are waited for.
void MoverLoop::failOp(Op* op) {
  if (op->failed) return;
  op->failed = true;
  if (op->link) op->link->forget(op);
  if (op->lent || awaitsPeer(*op)) {
    ++unsettled_;  // settleOverdue
    return;
  }
  op->offered = false;
  if (op->copiesInFlight == 0) finishOp(op);
}

void MoverLoop::finishOp(Op* op) {
  Communicator& communicator = *op->communicator;
  if (op->partner) op->partner->partner = nullptr;
  if (op->mirror()) {
    std::erase(communicator.mirrors, op);
  } else {
    Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(op->descriptor.peer)];
    (op->send() ? pair.sends : pair.receives).finish(op->descriptor.pairSequence);
    if (op->send() && !op->matched && !op->failed) noteLoneSend(*op);
  }
  finishOutOfSequence(op);
}

/// Ends an operation that is in no window.
void MoverLoop::finishOutOfSequence(Op* op) {
  Communicator& communicator = *op->communicator;
  if (op->target) releaseTarget(op);
  if (op->import) {
    if (op->import->state == Import::State::Pending) {
      for (Op** at = &op->import->waiters; *at; at = &(*at)->next) {
        if (*at == op) {
          *at = op->next;
          break;
        }
      }
    }
    imports_.release(op->import);
  }
  if (!op->failed) {
    CommunicatorRecord& record = *communicator.record;
    (op->send() ? record.sentOps : record.receivedOps).fetch_add(1, std::memory_order_relaxed);
    (op->send() ? record.sentBytes : record.receivedBytes)
        .fetch_add(op->descriptor.bytes, std::memory_order_relaxed);
  }
  leaveTurn(*op);
  Launch& launch = launches_[op->descriptor.launchSlot];
  if (!launch.started)
    std::replace(launch.ops.begin(), launch.ops.end(), op, static_cast<Op*>(nullptr));
  ++launch.opsDone;
  --pendingOps_;
  --communicator.pending;
  pool_.give(op);
  if (launch.opsDone == launch.opsExpected) finishLaunch(launch);
  if (communicator.closesAsked > 0) closable_.push_back(communicator.info.index);
}

void MoverLoop::finishLaunch(Launch& launch) {
  for (const Launch::Stream& stream : launch.streams) {
    LaunchFlags& flags = segment_.launch(stream.slot);
    if (!launch.finishByLane) flags.finish.set(stream.sequence);
  }
  launch.active = false;
  finished_ = true;
  for (const Launch::Stream& stream : launch.streams) {
    segment_.launch(stream.slot).released.set(stream.sequence);
  }
}

}  // namespace hoccl
