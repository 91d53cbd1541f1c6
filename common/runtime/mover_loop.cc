#include "common/runtime/mover_loop.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/base/light_fence.h"
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

}  // namespace hoccl
