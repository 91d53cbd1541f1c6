// The scheduler's callers that wait: synchronisations, full channels, and the calls that hold up
// others of the process (FACTS 3).

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "test/emulator/engine.h"

namespace hoccl::emu {
namespace {

// A waiter that has seen nothing for this long says what it waits for, once.
constexpr auto kComplainAfter = std::chrono::seconds(10);

const char* kindName(OpKind kind) {
  switch (kind) {
    case OpKind::Nothing:
      return "empty operation";
    case OpKind::Write:
      return "write value";
    case OpKind::Wait:
      return "wait value";
    case OpKind::RecordEvent:
      return "event record";
    case OpKind::WaitEvent:
      return "wait for event";
    case OpKind::Work:
      return "copy, memset or kernel";
    case OpKind::Free:
      return "free of pool memory";
  }
  return "?";
}

}  // namespace

template <typename Done>
void Scheduler::waitFor(const char* what, Done&& isDone) {
  std::unique_lock lock(mutex_);
  ++waiters_;
  bool complained = false;
  while (!isDone()) {
    if (done_.wait_for(lock, kComplainAfter) == std::cv_status::timeout && !isDone() &&
        !complained) {
      complained = true;
      std::fprintf(stderr, "emucuda: pid %d: %s has waited 10 s for: %s\n", getpid(), what,
                   describePending().c_str());
    }
  }
  --waiters_;
}

/// A full channel keeps its submitter inside the call. With kernels and copies that holds up all
/// submissions of the process; with memory operations only the caller.
void Scheduler::waitForRoom(const StreamPtr& stream, const Op& op) {
  const auto hasRoom = [&] {
    const ChannelUse& use = stream->uses[static_cast<int>(channelOf(*stream, op))];
    return use.unfinished == 0 || use.channel->inside.size() < kChannelDepth;
  };
  {
    std::lock_guard lock(mutex_);
    if (hasRoom()) return;
  }
  std::unique_lock gate(gate_, std::defer_lock);
  if (op.kind == OpKind::Work) gate.lock();
  waitFor("a submission to a full channel", hasRoom);
}

Scheduler::Targets Scheduler::raiseBarrier(Context* context, std::uint64_t* barrier) {
  std::lock_guard lock(mutex_);
  *barrier = lastTicket_;
  barriers_.insert(lastTicket_);
  return pendingOf(context);
}

void Scheduler::dropBarrier(std::uint64_t barrier) {
  {
    std::lock_guard lock(mutex_);
    barriers_.erase(barriers_.find(barrier));
    kicked_ = true;
  }
  wake_.notify_one();
}

/// The heads of all streams that hold work, for a person who looks at a hang.
std::string Scheduler::describePending() {
  std::string text;
  for (const StreamPtr& stream : busy_) {
    if (stream->queue.empty()) continue;
    const Op& op = stream->queue.front();
    char line[200];
    std::snprintf(line, sizeof line, "%sstream %llu of device %d: %s", text.empty() ? "" : "; ",
                  static_cast<unsigned long long>(stream->id), stream->context->ordinal,
                  kindName(op.kind));
    text += line;
    if (!op.begun && op.channel != nullptr && op.channel->holds(op.ticket))
      text += " behind another stream's operation in its channel";
    if (op.kind == OpKind::Wait) {
      std::snprintf(
          line, sizeof line, " at %p (holds %llu, wants %llu)", static_cast<void*>(op.address),
          static_cast<unsigned long long>(op.is64 ? loadAcquire<std::uint64_t>(op.address)
                                                  : loadAcquire<std::uint32_t>(op.address)),
          static_cast<unsigned long long>(op.value));
      text += line;
    }
  }
  return text.empty() ? "nothing" : text;
}

bool Scheduler::idle(const StreamPtr& stream) {
  std::lock_guard lock(mutex_);
  return stream->completed == stream->submitted;
}

void Scheduler::wait(const StreamPtr& stream) {
  std::uint64_t target = 0;
  {
    std::lock_guard lock(mutex_);
    target = stream->submitted;
  }
  waitFor("a stream synchronisation", [&] { return stream->completed >= target; });
}

/// Call with the lock held.
Scheduler::Targets Scheduler::pendingOf(Context* context) {
  Targets targets;
  for (const StreamPtr& stream : busy_)
    if (stream->context == context) targets.emplace_back(stream, stream->submitted);
  return targets;
}

void Scheduler::wait(const Targets& targets, const char* what) {
  waitFor(what, [&] {
    return std::all_of(targets.begin(), targets.end(),
                       [](const auto& t) { return t.first->completed >= t.second; });
  });
}

void Scheduler::wait(Context* context) {
  Targets targets;
  {
    std::lock_guard lock(mutex_);
    targets = pendingOf(context);
  }
  wait(targets, "a context synchronisation (or a free, which implies one)");
}

bool Scheduler::recordDone(const EventRecord& record) {
  std::lock_guard lock(mutex_);
  return record.done;
}

void Scheduler::wait(const std::shared_ptr<EventRecord>& record) {
  waitFor("an event synchronisation", [&] { return record->done; });
}

void Scheduler::waitUnused(const std::shared_ptr<Region>& region) {
  waitFor("the end of a registration", [&] {
    for (const StreamPtr& stream : busy_)
      for (const Op& op : stream->queue)
        if (op.region == region ||
            (op.work != nullptr && (op.work->pins[0] == region || op.work->pins[1] == region)))
          return false;
    return true;
  });
}

}  // namespace hoccl::emu
