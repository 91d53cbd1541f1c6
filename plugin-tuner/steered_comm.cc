#include "plugin-tuner/steered_comm.h"

#include <algorithm>
#include <utility>

#include "plugin-tuner/comm_setup.h"

namespace hoccl {

const char* pathName(Path path) {
  switch (path) {
    case Path::Staged:
      return "staged";
    case Path::AppCopies:
      return "app-copies";
    case Path::Direct:
      return "direct";
    case Path::OwnBlock:
      return "own-block";
    case Path::NcclSmall:
      return "nccl-small";
    case Path::NcclUnsteered:
      return "nccl-unsteered";
    case Path::NcclPair:
      return "nccl-pair";
    case Path::NcclCapture:
      return "nccl-capture";
    case Path::kCount:
      break;
  }
  return "?";
}

SteeredComm::SteeredComm() = default;
SteeredComm::~SteeredComm() = default;

void SteeredComm::countDirect() {
  std::lock_guard lock(countMutex);
  if (!mover || leftMover) return;
  const CommunicatorRecord& record = mover->segment().communicator(moverIndex);
  PathCounters& counter = counters[static_cast<int>(Path::Direct)];
  counter.ops.store(record.directCalls.load(std::memory_order_relaxed), std::memory_order_relaxed);
  counter.bytes.store(record.directBytes.load(std::memory_order_relaxed),
                      std::memory_order_relaxed);
}

void SteeredComm::leaveMover() {
  countDirect();
  std::lock_guard lock(countMutex);
  if (mover && !leftMover) leftMover = mover->freeCommunicator(moverIndex);
}

SteeredComm::Moved SteeredComm::moved(Path path) const {
  auto get = [this](Path p) {
    const PathCounters& counter = counters[static_cast<int>(p)];
    return Moved{counter.ops.load(std::memory_order_relaxed),
                 counter.bytes.load(std::memory_order_relaxed)};
  };
  Moved moved = get(path);
  if (path == Path::Staged) {
    const Moved direct = get(Path::Direct);
    // Counted by different threads, the mover's number may be newer.
    moved.ops -= std::min(moved.ops, direct.ops);
    moved.bytes -= std::min(moved.bytes, direct.bytes);
  }
  return moved;
}

Status SteeredComm::health() {
  if (hasFailed.load(std::memory_order_acquire)) {
    std::lock_guard lock(errorMutex);
    return failed;
  }
  return mover ? mover->communicatorStatus(moverIndex) : Status();
}

void SteeredComm::fail(const Status& status) {
  std::lock_guard lock(errorMutex);
  if (failed) failed = status;
  hasFailed.store(true, std::memory_order_release);
}

void SteeredComm::noteLastError(std::string text) {
  std::lock_guard lock(errorMutex);
  // Mostly the same again, since a watchdog asks for ever. Nothing at either end of a deque moves
  // what is in it.
  if (!lastErrors.empty() && lastErrors.front() == text) return;
  lastErrors.push_front(std::move(text));
  if (lastErrors.size() > kLastErrors) lastErrors.pop_back();
}

std::size_t CommTable::hash(ncclComm_t comm) {
  // Handles are heap addresses: the low bits carry little.
  auto value = reinterpret_cast<std::uintptr_t>(comm) >> 6;
  return (value * 0x9e3779b97f4a7c15ull >> 32) & (kCapacity - 1);
}

SteeredComm* CommTable::find(ncclComm_t comm) const {
  if (!comm) return nullptr;
  for (std::size_t i = hash(comm), probes = 0; probes < kCapacity;
       i = (i + 1) & (kCapacity - 1), ++probes) {
    const ncclComm_t key = entries_[i].key.load(std::memory_order_acquire);
    if (!key) return nullptr;
    if (key == comm) return entries_[i].value.load(std::memory_order_acquire);
  }
  return nullptr;
}

SteeredComm* CommTable::add(ncclComm_t comm) {
  std::lock_guard lock(mutex_);
  // A handle is used again once its communicator is gone, so its old entry is too; otherwise
  // entries stay where they are, since a reader may be walking past them.
  for (std::size_t i = hash(comm), probes = 0; probes < kCapacity;
       i = (i + 1) & (kCapacity - 1), ++probes) {
    Entry& entry = entries_[i];
    const ncclComm_t key = entry.key.load(std::memory_order_relaxed);
    if (key && key != comm) continue;
    all_.push_back(std::make_unique<SteeredComm>());
    all_.back()->comm = comm;
    entry.value.store(all_.back().get(), std::memory_order_release);
    entry.key.store(comm, std::memory_order_release);
    return all_.back().get();
  }
  return nullptr;
}

void CommTable::remove(ncclComm_t comm) {
  std::lock_guard lock(mutex_);
  for (std::size_t i = hash(comm), probes = 0; probes < kCapacity;
       i = (i + 1) & (kCapacity - 1), ++probes) {
    Entry& entry = entries_[i];
    const ncclComm_t key = entry.key.load(std::memory_order_relaxed);
    if (!key) return;
    if (key != comm) continue;
    if (SteeredComm* gone = entry.value.exchange(nullptr, std::memory_order_acq_rel)) {
      removed_.push_back(gone);
    }
    break;
  }
  if (removed_.size() <= kKept) return;
  const auto oldest =
      std::find_if(all_.begin(), all_.end(), [&](auto& c) { return c.get() == removed_.front(); });
  ++forgotten_.communicators;
  for (int i = 0; i < static_cast<int>(Path::kCount); ++i) {
    const SteeredComm::Moved moved = (*oldest)->moved(static_cast<Path>(i));
    forgotten_.ops[i] += moved.ops;
    forgotten_.bytes[i] += moved.bytes;
  }
  all_.erase(oldest);
  removed_.pop_front();
}

}  // namespace hoccl
