#include "common/runtime/mover_loop.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/light_fence.h"
#include "common/base/log.h"
#include "common/base/relax_cpu.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

/// While copies are in flight the loop spins this many times longer than HOCCL_SPIN_US: a copy ends
/// within microseconds, and a nap would stretch it.
constexpr std::uint64_t kCopySpinFactor = 10;
constexpr std::uint64_t kFirstNapNs = 1000;
/// With nothing to do, naps go on for so long before the loop sleeps until it is rung.
constexpr std::uint64_t kDrowsyNs = 10'000'000;
constexpr std::uint64_t kRoundsBetweenLooks =
    64;  ///< behind places that are claimed and not filled

}  // namespace

MoverLoop::MoverLoop(Dependencies d, const Config& config)
    : segment_(d.segment),
      segmentRegistration_(d.segmentRegistration),
      queues_(d.queues),
      spinNs_(config.spinUs * 1000),
      pollMaxNs_(config.pollMaxUs * 1000),
      timeoutNs_(config.timeoutMs * 1'000'000),
      slots_(config.slots),
      slotBytes_(config.slotBytes),
      launches_(d.segment.launchSlots()),
      communicators_(kMaxCommunicators),
      imports_(d.segment, config.importCache, config.importIdleMs * 1'000'000),
      importCapacity_(config.importCache) {
  out_.lanes = std::move(d.out);
  in_.lanes = std::move(d.in);
  peer_.lanes = std::move(d.peer);
  doorbell_ = std::move(d.doorbell);
  out_.depth = in_.depth = peer_.depth = static_cast<std::uint32_t>(config.laneDepth);
  starting_.reserve(launches_.size());
}

MoverLoop::~MoverLoop() = default;

void MoverLoop::run() {
  lastProgressNs_ = monotonicNs();
  while (!stopped_) {
    bool moved = takeOperations();
    moved |= takeEvents();
    moved |= pollStarts();
    moved |= progressLinks();
    if (!closable_.empty()) acknowledgeCloses();
    if (!dying_.empty() || abandoned_) takeLeave();
    if (imports_.work()) unmapImports();
    if (unsettled_ > 0) settleOverdue();
    ringIfFinished();  // behind all that may end launches
    if (stopping_) tryStop();
    rest(moved);
  }
}

// --- One round -----------------------------------------------------------------------------------

bool MoverLoop::takeOperations() {
  OpDescriptor descriptor;
  bool any = false;
  // Seldom while it spins: that look takes a line away from the application.
  const bool beyond = napNs_ > 0 || ++rounds_ % kRoundsBetweenLooks == 0;
  while (segment_.tryPop(&descriptor, beyond)) {
    any = true;
    onDescriptor(descriptor);
  }
  return any;
}

bool MoverLoop::takeEvents() {
  bool any = false;
  while (!requests_.empty() && queues_->toControl.tryPush(requests_.front())) {
    requests_.erase(requests_.begin());
  }
  for (LoopEvent event; queues_->toLoop.tryPop(&event); any = true) {
    switch (event.kind) {
      case LoopEvent::Kind::None:
        break;
      case LoopEvent::Kind::CommunicatorAdded: {
        const std::uint32_t index = event.communicator->index;
        auto communicator = std::make_unique<Communicator>();
        communicator->info = std::move(*event.communicator);
        communicator->pairs.resize(communicator->info.peers.size());
        for (Communicator::Pair& pair : communicator->pairs) pair.loneSends.reserve(slots_);
        communicator->record = &segment_.communicator(index);
        communicatorById_[communicator->info.id] = communicator.get();
        communicators_[index] = std::move(communicator);
        segment_.communicator(index).state.store(
            static_cast<std::uint32_t>(CommunicatorState::Open), std::memory_order_release);
        break;
      }
      case LoopEvent::Kind::LinkUp:
        linkUp(event);
        break;
      case LoopEvent::Kind::LinkFailed:
        peerGone(event.peer, event.status.message());
        break;
      case LoopEvent::Kind::Imported: {
        if (event.serial != 0) {
          targetImported(event);
          break;
        }
        Import* import = imports_.find(event.allocation);
        if (!import) break;
        import->address = event.status ? event.address : 0;
        import->status = event.status;
        segment_.header().imports.fetch_add(1, std::memory_order_relaxed);
        // While it is pending, an operation that ends takes itself off the list, and going on with
        // one may end others.
        while (Op* op = import->waiters) {
          if (!event.status) {
            failCommunicator(*op->communicator, Code::Cuda, event.status.message());
            continue;
          }
          import->waiters = std::exchange(op->next, nullptr);
          op->address = import->address + op->descriptor.buffer.offset;
          arrived(op, Op::kForImport);
        }
        import->state = event.status ? Import::State::Ready : Import::State::Failed;
        imports_.settled();
        break;
      }
      case LoopEvent::Kind::SpanAdded:
        imports_.addSpan(event.buffer, event.address);
        segment_.header().imports.fetch_add(1, std::memory_order_relaxed);
        break;
      case LoopEvent::Kind::SpanShared:
        spanShared(event);
        break;
      case LoopEvent::Kind::Unmapped:
        if (event.serial != 0) {
          const auto link = links_.find(event.peer);
          if (link != links_.end()) link->second->imports().unmapped(event.serial);
          break;
        }
        imports_.unmapped(event.allocation);
        break;
      case LoopEvent::Kind::Scratch:
        out_.useScratch(event.address, slotBytes_);
        in_.useScratch(event.address + SharedLanes::kCount * slotBytes_, slotBytes_);
        break;
      case LoopEvent::Kind::DetourMade:
        if (const auto self = links_.find(event.peer); self != links_.end()) {
          event.detour->out.depth = event.detour->in.depth = peer_.depth;
          self->second->useDetour(std::move(event.detour));
        }
        break;
      case LoopEvent::Kind::Stop:
        stopping_ = true;
        stopDeadlineNs_ = monotonicNs() + timeoutNs_;
        for (auto& communicator : communicators_) {
          if (!communicator) continue;
          failCommunicator(*communicator, Code::Aborted, "the application has ended");
        }
        break;
    }
  }
  return any;
}

bool MoverLoop::pollStarts() {
  bool any = false;
  for (std::size_t i = 0; i < starting_.size();) {
    Launch& launch = launches_[starting_[i]];
    bool come = launch.complete();
    for (std::size_t s = 0; come && s < launch.streams.size(); ++s) {
      const Launch::Stream& stream = launch.streams[s];
      come = segment_.launch(stream.slot).start.reached(stream.sequence);
    }
    // A slot may stand here twice when a launch ended before its start and the slot was used again.
    const bool over = !launch.active || launch.started;
    if (!come && !over) {
      ++i;
      continue;
    }
    starting_[i] = starting_.back();
    starting_.pop_back();
    any = true;
    if (over) continue;
    launch.started = true;
    giveTurns(launch);
    // An operation that is ready at once may end inside arrived(), and with it the launch.
    for (std::size_t k = 0; k < launch.ops.size(); ++k) {
      if (launch.ops[k]) arrived(launch.ops[k], Op::kForStart);
    }
  }
  return any;
}

bool MoverLoop::progressLinks() {
  bool any = false;
  for (auto& [peer, link] : links_) {
    if (!link->up()) continue;
    Message message;
    while (link->receive(&message)) {
      any = true;
      onMessage(*link, message);
    }
    if (link->imports().work()) tendTargets(*link);
    any |= link->progress();
    if (link->connection()->peerGone() && !link->leaving()) {
      peerGone(peer, link->connection()->goneReason());
    }
  }
  return any;
}

/// One ring for all launches that ended in the round. While the last ring is under way the GPU may
/// have looked already, before these ended: then they are rung for in a later round.
void MoverLoop::ringIfFinished() {
  if (!finished_ || !doorbell_ || broken_) return;
  bool rang = false;
  if (const Status status = doorbell_->ring(&rang); !status) return fatal(status);
  if (!rang) return;
  finished_ = false;
  segment_.header().doorbells.fetch_add(1, std::memory_order_relaxed);
}

/// What the loop does between rounds: goes on at once while things move, spins, naps, sleeps.
void MoverLoop::rest(bool moved) {
  if (moved) {
    lastProgressNs_ = 0;
    napNs_ = 0;
    return;
  }
  const std::uint64_t now = monotonicNs();
  if (lastProgressNs_ == 0) lastProgressNs_ = now;
  imports_.sweep(now);
  while (const Import* import = imports_.waitedFor(now)) {
    imports_.describe(import, describeUsers(import));
  }
  imports_.describeHeld(now);
  if ((pendingOps_ > 0 || untold_) && now >= lookForStallsNs_) tellStalled(now);
  if (imports_.work()) return;
  bool copying = out_.inFlight + in_.inFlight + peer_.inFlight > 0;
  for (auto& [peer, link] : links_) copying = copying || link->peerCopies();
  if (now - lastProgressNs_ < spinNs_ * (copying ? kCopySpinFactor : 1) ||
      (copying && now < spinUntilNs_)) {
    relaxCpu();
    return;
  }

  if (imports_.waitsForPins()) imports_.settled();  // in the next round
  bool active = imports_.waitsForPins() || pendingOps_ > 0 || untold_ || !requests_.empty() ||
                !dying_.empty() || leaving_ || stopping_;
  for (auto& [peer, link] : links_) {
    active = active || link->active() || link->told().waits() ||
             (link->up() && link->connection()->busy());
  }
  // Only a mover that sleeps without a bound is rung awake: a ring costs the application a system
  // call, and a nap ends by itself.
  bool sleep = !active && now - lastProgressNs_ > kDrowsyNs;
  SegmentHeader& header = segment_.header();
  if (sleep) {
    header.moverSleeps.store(1, std::memory_order_seq_cst);
    if (header.lightFences.load(std::memory_order_relaxed) && !heavyFence()) {
      // Filtered in this process alone: the application fences in full from now on, and one nap is
      // longer than a ring that has not seen that can be under way.
      header.lightFences.store(0);
      header.moverSleeps.store(0);
      sleep = false;
    }
  }
  if (!sleep || (segment_.empty() && queues_->toLoop.empty())) {
    napNs_ = std::clamp(napNs_ * 2, kFirstNapNs, std::max(kFirstNapNs, pollMaxNs_));
    // Imports that may become idle bound even the sleep.
    const std::uint64_t sweepAt = imports_.sweepAtNs();
    const std::uint64_t restNs = sleep ? std::max(sweepAt, now) - now : napNs_;
    const timespec nap{static_cast<time_t>(restNs / 1'000'000'000),
                       static_cast<long>(restNs % 1'000'000'000)};
    pollfd bell{queues_->loopEventFd, POLLIN, 0};
    if (::ppoll(&bell, 1, sleep && sweepAt == 0 ? nullptr : &nap, nullptr) > 0) {
      std::uint64_t rings = 0;
      [[maybe_unused]] ssize_t got = ::read(queues_->loopEventFd, &rings, sizeof rings);
      lastProgressNs_ = 0;
      napNs_ = 0;
    }
    header.loopWakeups.fetch_add(1, std::memory_order_relaxed);
  }
  if (sleep) header.moverSleeps.store(0, std::memory_order_relaxed);
}

void MoverLoop::tryStop() {
  // Without shared slots what has been copied out still has to reach the peer.
  const bool quiet = out_.inFlight + in_.inFlight + peer_.inFlight == 0 &&
                     std::all_of(links_.begin(), links_.end(), [](const auto& e) {
                       return !e.second->copying() && e.second->drained();
                     });
  if (quiet || monotonicNs() > stopDeadlineNs_) stopped_ = true;
}

// --- Operations ----------------------------------------------------------------------------------

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
