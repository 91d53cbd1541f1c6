#include "common/runtime/import_keeper.h"

#include <algorithm>
#include <cstring>

#include "common/base/time.h"

namespace hoccl {
namespace {

/// A drop that waits is described after so long: less than the shortest HOCCL_TIMEOUT_MS, after
/// which the description is read, and long enough for what is on its way to have come.
constexpr std::uint64_t kDescribeAfterNs = 50'000'000;

}  // namespace

ImportKeeper::ImportKeeper(Segment segment, std::size_t capacity, std::uint64_t idleNs)
    : segment_(segment), cache_(capacity), idleNs_(idleNs) {}

Import* ImportKeeper::acquire(const BufferRef& buffer, bool* fresh) {
  Import* import = cache_.acquire(buffer, fresh);
  work_ = work_ || *fresh;
  if (*fresh && idleNs_ > 0 && sweepAtNs_ == 0) sweepAtNs_ = monotonicNs() + idleNs_;
  return import;
}

void ImportKeeper::release(Import* import) {
  cache_.release(import);
  work_ = work_ || (import->users == 0 && cache_.crowded());
}

void ImportKeeper::drop(const OpDescriptor& descriptor) {
  if (descriptor.launchSlot >= kDropSlots) return;  // a torn segment
  PendingDrop drop{.slot = descriptor.launchSlot,
                   .sequence = descriptor.launchSequence,
                   .allocation = 0,
                   .askedBefore = unmapsAsked_,
                   .describeAtNs = monotonicNs() + kDescribeAfterNs};
  work_ = true;
  if (descriptor.kind == OpKind::DropIdle) {
    cache_.markIdle(cache_.now());
  } else if (Import* import = cache_.find(descriptor.buffer.allocationId)) {
    cache_.markStale(import);
    drop.allocation = descriptor.buffer.allocationId;
  }
  drops_.push_back(drop);
}

const Import* ImportKeeper::waitedFor(std::uint64_t nowNs) const {
  for (const PendingDrop& drop : drops_) {
    if (drop.allocation == 0 || drop.describeAtNs == 0 || nowNs < drop.describeAtNs) continue;
    const Import* import = cache_.find(drop.allocation);
    if (import && import->users > 0) return import;
  }
  return nullptr;
}

void ImportKeeper::describe(const Import* import, const std::string& text) {
  for (PendingDrop& drop : drops_) {
    if (drop.allocation != import->buffer.allocationId || drop.describeAtNs == 0) continue;
    drop.describeAtNs = 0;
    DropSlot& slot = segment_.header().drops[drop.slot];
    const std::size_t length = std::min(text.size(), sizeof slot.pending - 1);
    std::memcpy(slot.pending, text.data(), length);
    slot.pending[length] = 0;
    slot.described.store(drop.sequence, std::memory_order_release);
  }
}

bool ImportKeeper::nextUnmap(CUdeviceptr* address) {
  while (cache_.crowded() && cache_.evict(address)) {
    if (!*address) continue;  // one that could not be mapped
    ++unmapsAsked_;
    return true;
  }
  work_ = false;
  answerDrops();
  return false;
}

void ImportKeeper::unmapped() {
  ++unmapsDone_;
  segment_.header().unmaps.fetch_add(1, std::memory_order_relaxed);
  if (!drops_.empty()) work_ = true;
}

void ImportKeeper::answerDrops() {
  for (std::size_t i = 0; i < drops_.size();) {
    PendingDrop& drop = drops_[i];
    // An import taken out before the drop came may still be mapped: its unmap has to be over as
    // well.
    const bool out = drop.allocation == 0 || !cache_.find(drop.allocation);
    if (out && drop.until == kNotYet) drop.until = unmapsAsked_;
    if (!out || unmapsDone_ < drop.until) {
      ++i;
      continue;
    }
    DropSlot& slot = segment_.header().drops[drop.slot];
    slot.unmapped.store(drop.until - drop.askedBefore, std::memory_order_relaxed);
    slot.done.set(drop.sequence);
    drops_.erase(drops_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void ImportKeeper::sweep(std::uint64_t nowNs) {
  if (sweepAtNs_ == 0 || nowNs < sweepAtNs_) return;
  if (cache_.markIdle(sweptAt_) > 0) work_ = true;
  sweptAt_ = cache_.now();
  sweepAtNs_ = cache_.empty() ? 0 : nowNs + idleNs_;
}

}  // namespace hoccl
