#include "test/emulator/engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <type_traits>

#include "test/emulator/capture.h"
#include "test/emulator/faults.h"
#include "test/emulator/session.h"

namespace hoccl::emu {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// Copies on one link take turns at this grain, within a process and between processes.
constexpr std::size_t kChunkBytes = 1 << 20;
// Bytes moved before the other streams are looked at again: some 50 us of this CPU.
constexpr std::size_t kSliceBytes = 256 << 10;
// A GPU has several copy engines for NVLink, so that small copies to different peers overlap.
constexpr int kP2pEngines = 4;

/// Memory that other processes write is polled: fast while things move, slower when nothing has for
/// a while, so that many parked processes leave the CPU to those with work.
std::int64_t pollInterval(std::int64_t quietFor) {
  if (quietFor < 2'000'000) return 20'000;
  if (quietFor < 20'000'000) return 50'000;
  if (quietFor < 200'000'000) return 100'000;
  return 500'000;
}

template <typename T>
bool satisfied(T now, T wanted, unsigned flags) {
  switch (flags & 3u) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::make_signed_t<T>>(static_cast<T>(now - wanted)) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return now == wanted;
    case CU_STREAM_WAIT_VALUE_AND:
      return (now & wanted) != 0;
    default:
      return static_cast<T>(~(now | wanted)) != 0;
  }
}

bool waitSatisfied(const Op& op) {
  if (op.is64) return satisfied(loadAcquire<std::uint64_t>(op.address), op.value, op.waitFlags);
  return satisfied(loadAcquire<std::uint32_t>(op.address), static_cast<std::uint32_t>(op.value),
                   op.waitFlags);
}

void storeRelease(const Op& op) {
  if (op.is64)
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(op.address))
        .store(op.value, std::memory_order_release);
  else
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(op.address))
        .store(static_cast<std::uint32_t>(op.value), std::memory_order_release);
}

void moveBytes(const Work& work, std::size_t offset, std::size_t bytes) {
  if (work.from != nullptr) {
    std::memmove(work.to + offset, work.from + offset, bytes);
  } else if (work.patternSize == 1) {
    std::memset(work.to + offset, static_cast<int>(work.pattern), bytes);
  } else {
    for (std::size_t i = 0; i < bytes; i += work.patternSize)
      std::memcpy(work.to + offset + i, &work.pattern, work.patternSize);
  }
}

}  // namespace

Scheduler& Scheduler::get() {
  // Never destroyed: its thread runs until the process ends.
  static Scheduler* scheduler = new Scheduler;
  return *scheduler;
}

Scheduler::Scheduler() : random_(settings().seed) {
  for (auto& device : engines_) {
    device[static_cast<int>(Path::Sm)].slots = kSms;
    device[static_cast<int>(Path::P2P)].slots = kP2pEngines;
  }
  busy_.reserve(64);
}

CUresult Scheduler::submit(const StreamPtr& stream, std::vector<Op> ops, bool* captured) {
  delayCall();
  if (!ops.empty()) waitForRoom(stream, ops.front());
  std::shared_lock gate(gate_);
  std::unique_lock lock(mutex_);
  bool drop = false;
  const CUresult allowed = checkSubmission(stream, &drop);
  if (captured != nullptr) *captured = drop;
  if (allowed != CUDA_SUCCESS || drop || ops.empty()) return allowed;
  if (!started_) {
    // The application's signals are its own threads' business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    started_ = true;
  }
  addDefaultStreamOrder(stream, &ops.front());
  const std::int64_t now = realNow();
  for (Op& op : ops) {
    op.submittedAt = now;
    if (op.kind == OpKind::Wait && waitSatisfied(op)) op.seenAt = now;
    if (op.record != nullptr && op.kind == OpKind::RecordEvent) {
      op.record->stream = stream;
      op.record->sequence = stream->submitted + 1;
    }
    enterChannel(stream, &op);
    stream->queue.push_back(std::move(op));
    ++stream->submitted;
  }
  if (!stream->inBusyList) {
    stream->inBusyList = true;
    busy_.push_back(stream);
  }
  lastProgress_ = now;
  kicked_ = true;
  lock.unlock();
  wake_.notify_one();
  return CUDA_SUCCESS;
}

/// The kind of the channel that an operation goes through: that of its engine, and for one that
/// needs no engine that of the engine its stream used last.
Path Scheduler::channelOf(const Stream& stream, const Op& op) {
  if (op.kind != OpKind::Work || op.work->path == Path::Immediate) return stream.channel;
  const bool inlined = op.work->path == Path::H2D && op.work->bytes <= kInlinedH2D;
  return inlined ? Path::Sm : op.work->path;
}

void Scheduler::enterChannel(const StreamPtr& stream, Op* op) {
  op->ticket = ++lastTicket_;
  stream->channel = channelOf(*stream, *op);
  if (op->kind != OpKind::Write && op->kind != OpKind::Wait && op->kind != OpKind::Work) return;
  op->path = stream->channel;
  op->channel =
      stream->context->channels->enter(op->path, &stream->uses[static_cast<int>(op->path)]);
  op->channel->inside.push_back(op->ticket);
}

/// The operation was executed or is with its engine. It is the oldest in the channel, since nothing
/// begins behind another.
void Scheduler::leaveChannel(Op* op, std::int64_t at) {
  if (op->channel == nullptr || op->queued) return;
  op->channel->inside.pop_front();
  op->channel->movedAt = at;
}

/// The legacy stream runs after all work that blocking streams of its context have, and they after
/// it.
void Scheduler::addDefaultStreamOrder(const StreamPtr& stream, Op* op) {
  if (stream->isLegacy()) {
    for (const StreamPtr& other : busy_)
      if (other != stream && other->context == stream->context && other->isBlocking() &&
          other->completed < other->submitted)
        op->after.emplace_back(other, other->submitted);
  } else if (stream->isBlocking()) {
    const StreamPtr& legacy = stream->context->legacy;
    if (legacy->completed < legacy->submitted) op->after.emplace_back(legacy, legacy->submitted);
  }
}

void Scheduler::run() {
  pthread_setname_np(pthread_self(), "emucuda");
  prctl(PR_SET_TIMERSLACK, 1000ul);  // ns: the default of 50 us would be 2.5 us of model time
  std::unique_lock lock(mutex_);
  for (;;) {
    kicked_ = false;
    polling_ = false;
    nextTimer_ = kNever;
    bool progress = false;
    for (std::size_t i = 0; i < busy_.size(); ++i) {
      const StreamPtr& stream = busy_[i];
      while (!stream->queue.empty() && step(stream, realNow())) progress = true;
    }
    startTransfers();
    if (advanceTransfers(lock)) progress = true;
    std::erase_if(busy_, [](const StreamPtr& stream) {
      if (!stream->queue.empty()) return false;
      stream->inBusyList = false;
      return true;
    });
    if (finishedSome_) {
      finishedSome_ = false;
      if (waiters_ > 0) done_.notify_all();
    }
    if (progress)
      lastProgress_ = realNow();
    else
      sleep(lock);
  }
}

void Scheduler::sleep(std::unique_lock<std::mutex>& lock) {
  if (busy_.empty() && running_.empty()) {
    wake_.wait(lock, [this] { return kicked_; });
    return;
  }
  const std::int64_t now = realNow();
  std::int64_t until = std::min(nextTimer_, now + 1'000'000'000);
  if (polling_) until = std::min(until, now + pollInterval(now - lastProgress_));
  if (until <= now) return;
  const std::chrono::steady_clock::time_point target{std::chrono::nanoseconds(until)};
  wake_.wait_until(lock, target, [this] { return kicked_; });
}

/// What the head waits for has happened; sets when it became ready.
bool Scheduler::begin(const StreamPtr& stream, Op* op) {
  if (!barriers_.empty() && *barriers_.begin() < op->ticket) return false;
  if (op->channel != nullptr && op->channel->holds(op->ticket)) {
    op->heldUp = true;
    return false;
  }
  std::int64_t readyAt = std::max(op->submittedAt, stream->lastDoneAt);
  if (op->heldUp) readyAt = std::max(readyAt, op->channel->movedAt);
  for (const auto& [other, sequence] : op->after) {
    if (other->completed < sequence) return false;
    readyAt = std::max(readyAt, other->lastDoneAt);
  }
  op->after.clear();
  if (const std::uint32_t longest = settings().delayUs; longest > 0)
    readyAt += static_cast<std::int64_t>(random_() % (longest * 1000ull + 1));
  op->readyAt = readyAt;
  op->begun = true;
  return true;
}

/// Notes when the wait behind a running copy becomes satisfied, so that this thread's lateness at
/// the copy's end is not taken for waiting.
void Scheduler::lookAhead(Stream* stream, std::int64_t now) {
  constexpr std::size_t kDepth = 4;  // copy, its flag, and the next copy's wait are within
  for (std::size_t i = 1; i < std::min(stream->queue.size(), kDepth); ++i) {
    Op& op = stream->queue[i];
    if (op.kind == OpKind::Wait && op.seenAt == 0 && waitSatisfied(op)) op.seenAt = now;
  }
}

/// Advances the stream's first operation; true if anything changed.
bool Scheduler::step(const StreamPtr& stream, std::int64_t now) {
  Op& op = stream->queue.front();
  if (op.queued) {
    lookAhead(stream.get(), now);
    return false;
  }
  if (!op.begun && !begin(stream, &op)) return false;
  if (now < op.readyAt) {
    nextTimer_ = std::min(nextTimer_, op.readyAt);
    return false;
  }
  switch (op.kind) {
    case OpKind::Nothing:
      finish(stream, op.readyAt);
      return true;
    case OpKind::Write:
      storeRelease(op);
      finish(stream, op.readyAt);
      return true;
    case OpKind::Wait:
      if (!waitSatisfied(op)) {
        polling_ = true;
        op.seenAt = 0;
        return false;
      }
      // Not before it was seen satisfied: what follows must not begin before the flag was written.
      finish(stream, std::max(op.readyAt, op.seenAt != 0 ? op.seenAt : now));
      return true;
    case OpKind::RecordEvent:
      op.record->done = true;
      op.record->at = op.readyAt;
      finish(stream, op.readyAt);
      return true;
    case OpKind::WaitEvent:
      if (!op.record->done) return false;
      finish(stream, std::max(op.readyAt, op.record->at));
      return true;
    case OpKind::Free:
      regions::remove(op.region->base, RegionKind::Pool);
      finish(stream, op.readyAt);
      return true;
    case OpKind::Work: {
      auto transfer = std::make_unique<Transfer>();
      transfer->stream = stream;
      transfer->op = &op;  // a deque's elements stay where they are
      transfer->chunkReadyAt = op.readyAt;
      leaveChannel(&op, op.readyAt);
      op.queued = true;
      if (op.work->path == Path::Immediate) {
        startChunk(transfer.get());
        running_.push_back(std::move(transfer));
      } else {
        engineOf(*op.work).waiting.push_back(std::move(transfer));
      }
      return true;
    }
  }
  return false;
}

void Scheduler::finish(const StreamPtr& stream, std::int64_t at) {
  stream->lastDoneAt = std::max(stream->lastDoneAt, at);
  Op& op = stream->queue.front();
  leaveChannel(&op, at);
  if (op.channel != nullptr) ChannelSet::leave(&stream->uses[static_cast<int>(op.path)]);
  stream->queue.pop_front();
  ++stream->completed;
  finishedSome_ = true;
}

Scheduler::Engine& Scheduler::engineOf(const Work& work) {
  return engines_[work.physical][static_cast<int>(work.path)];
}

void Scheduler::startTransfers() {
  for (int device = 0; device < settings().devices; ++device) {
    for (Engine& engine : engines_[device]) {
      while (!engine.waiting.empty()) {
        Transfer* next = engine.waiting.front().get();
        const int need = std::max(1, next->op->work->sms);
        if (need > engine.slots) break;
        engine.slots -= need;
        startChunk(next);
        running_.push_back(std::move(engine.waiting.front()));
        engine.waiting.pop_front();
      }
    }
  }
}

/// Fixes when the transfer's next chunk ends: it waits for its links, which other processes use
/// too.
void Scheduler::startChunk(Transfer* transfer) {
  const Work& work = *transfer->op->work;
  const std::size_t left = work.bytes - transfer->finished;
  const bool whole = work.path == Path::Immediate || work.path == Path::Sm;
  transfer->chunk = whole ? left : std::min(left, kChunkBytes);
  transfer->moved = 0;
  const std::int64_t latency = transfer->first ? toReal(work.latencyNs) : 0;
  const std::int64_t busy = toReal(work.nsPerByte * static_cast<double>(transfer->chunk));
  const std::int64_t ready = std::max(transfer->chunkReadyAt, transfer->engineFreeAt);
  switch (work.path) {
    case Path::D2H:
    case Path::H2D: {
      const Link link = work.path == Path::D2H ? Link::D2H : Link::H2D;
      const std::int64_t start = session::reserve(work.physical, link, ready, latency + busy);
      transfer->deadline = start + latency + busy;
      break;
    }
    case Path::P2P: {
      // The latency is the engine's own; only the bytes occupy the links.
      const std::int64_t out =
          session::reserve(work.sourcePhysical, Link::NvlinkOut, ready + latency, busy);
      transfer->deadline = session::reserve(work.peerPhysical, Link::NvlinkIn, out, busy) + busy;
      break;
    }
    default:
      transfer->deadline = ready + latency + busy;
  }
  // With random delays, half of the copies move their bytes at the modelled end instead of the
  // beginning, so that neither an early reader nor an early writer gets away with it.
  transfer->moveFrom = settings().delayUs > 0 && (random_() & 1) != 0 ? transfer->deadline : ready;
}

/// Moves one slice of every running transfer and ends the chunks that are due.
bool Scheduler::advanceTransfers(std::unique_lock<std::mutex>& lock) {
  bool progress = false;
  for (std::size_t i = 0; i < running_.size();) {
    Transfer* transfer = running_[i].get();
    const Work& work = *transfer->op->work;
    const std::int64_t now = realNow();
    if (now < transfer->moveFrom) {
      nextTimer_ = std::min(nextTimer_, transfer->moveFrom);
      ++i;
      continue;
    }
    if (transfer->moved < transfer->chunk || (transfer->first && work.body != nullptr)) {
      const std::size_t slice = std::min(transfer->chunk - transfer->moved, kSliceBytes);
      // Only this thread changes running_ and the heads of queues, so both outlast the gap.
      lock.unlock();
      if (transfer->first && work.body != nullptr) work.body(work.argument);
      if (slice > 0) moveBytes(work, transfer->finished + transfer->moved, slice);
      lock.lock();
      transfer->first = false;
      transfer->moved += slice;
      transfer->movedAt = realNow();
      progress = true;
    }
    if (work.until != nullptr && now >= transfer->deadline) {
      if (loadAcquire<std::uint64_t>(work.until) < work.untilValue) {
        polling_ = true;
        ++i;
        continue;
      }
      transfer->deadline = now;
    }
    if (transfer->moved < transfer->chunk || realNow() < transfer->deadline) {
      if (transfer->moved == transfer->chunk) nextTimer_ = std::min(nextTimer_, transfer->deadline);
      ++i;
      continue;
    }
    progress = true;
    if (endChunk(i)) continue;  // running_[i] is another one now
    ++i;
  }
  return progress;
}

/// True if the transfer left running_: it is done, or others wait for its engine.
bool Scheduler::endChunk(std::size_t index) {
  Transfer* transfer = running_[index].get();
  const Work& work = *transfer->op->work;
  std::int64_t doneAt = transfer->deadline;
  if (transfer->movedAt > doneAt) {
    const std::int64_t late = transfer->movedAt - std::max(doneAt, transfer->moveFrom);
    session::count(work.physical, Counter::LateNanoseconds,
                   static_cast<std::uint64_t>(static_cast<double>(late) / settings().dilation));
    doneAt = transfer->movedAt;
  }
  transfer->finished += transfer->chunk;
  transfer->first = false;
  const bool done = transfer->finished == work.bytes;
  Engine* engine = work.path == Path::Immediate ? nullptr : &engineOf(work);
  if (!done && engine->waiting.empty()) {
    transfer->chunkReadyAt = doneAt;
    startChunk(transfer);
    return false;
  }
  if (engine != nullptr) {
    engine->slots += std::max(1, work.sms);
    for (auto& next : engine->waiting)
      if (next->engineFreeAt < doneAt) next->engineFreeAt = doneAt;
  }
  auto owned = std::move(running_[index]);
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  if (done) {
    finish(owned->stream, doneAt);
  } else {
    owned->chunkReadyAt = doneAt;
    engine->waiting.push_back(std::move(owned));
  }
  return true;
}

}  // namespace hoccl::emu
