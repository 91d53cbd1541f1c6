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
    : segment_(segment), cache_(capacity, segment.header().spans), idleNs_(idleNs) {}

Import* ImportKeeper::acquire(const BufferRef& buffer, bool* fresh) {
  Import* import = cache_.acquire(buffer, fresh);
  work_ = work_ || *fresh;
  if (*fresh && idleNs_ > 0 && sweepAtNs_ == 0) sweepAtNs_ = monotonicNs() + idleNs_;
  return import;
}

void ImportKeeper::addSpan(const BufferRef& buffer, CUdeviceptr address) {
  cache_.add(buffer, address);
  work_ = true;
  if (idleNs_ > 0 && sweepAtNs_ == 0) sweepAtNs_ = monotonicNs() + idleNs_;
}

void ImportKeeper::notePin(std::uint64_t span) {
  Import* import = cache_.find(span);
  if (!import) return;
  ++import->pins;
  work_ = work_ || import->stale;
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
                   .base = 0,
                   .bytes = 0,
                   .askedBefore = unmapsAsked_,
                   .describeAtNs = monotonicNs() + kDescribeAfterNs};
  work_ = true;
  if (descriptor.kind == OpKind::DropIdle) {
    cache_.markIdle(cache_.now());
  } else if (descriptor.kind == OpKind::DropSpans) {
    drop.base = descriptor.buffer.allocationBase;
    drop.bytes = descriptor.buffer.allocationBytes;
    cache_.markSpans(drop.base, drop.bytes);
  } else if (Import* import = cache_.find(descriptor.buffer.allocationId)) {
    cache_.markStale(import);
    drop.allocation = descriptor.buffer.allocationId;
  }
  drops_.push_back(drop);
}

const Import* ImportKeeper::left(const PendingDrop& drop) const {
  if (drop.allocation != 0) return cache_.find(drop.allocation);
  return drop.bytes > 0 ? cache_.markedSpan(drop.base, drop.bytes) : nullptr;
}

const Import* ImportKeeper::waitedFor(std::uint64_t nowNs) const {
  for (const PendingDrop& drop : drops_) {
    if (drop.describeAtNs == 0 || nowNs < drop.describeAtNs) continue;
    const Import* import = left(drop);
    if (import && import->users > 0) return import;
  }
  return nullptr;
}

void ImportKeeper::describe(const Import* import, const std::string& text) {
  for (PendingDrop& drop : drops_) {
    if (drop.describeAtNs == 0 || left(drop) != import) continue;
    describe(drop, text);
  }
}

void ImportKeeper::describe(PendingDrop& drop, const std::string& text) {
  drop.describeAtNs = 0;
  DropSlot& slot = segment_.header().drops[drop.slot];
  const std::size_t length = std::min(text.size(), sizeof slot.pending - 1);
  std::memcpy(slot.pending, text.data(), length);
  slot.pending[length] = 0;
  slot.described.store(drop.sequence, std::memory_order_release);
}

void ImportKeeper::describeHeld(std::uint64_t nowNs) {
  if (holds_.empty()) return;
  for (PendingDrop& drop : drops_) {
    if (drop.describeAtNs == 0 || nowNs < drop.describeAtNs || !held(drop)) continue;
    describe(drop, "the mover of another GPU of the node, which copies into it, has it mapped");
  }
}

bool ImportKeeper::nextUnmap(CUdeviceptr* address, BufferRef* which) {
  while (cache_.crowded() && cache_.evict(address, which)) {
    if (!*address) continue;  // one that could not be mapped
    ++unmapsAsked_;
    return true;
  }
  work_ = false;
  waitsForPins_ = cache_.pinned();
  answerDrops();
  return false;
}

void ImportKeeper::unmapped(std::uint64_t allocation) {
  ++unmapsDone_;
  SegmentHeader& header = segment_.header();
  header.unmaps.fetch_add(1, std::memory_order_relaxed);
  if (isSpan(allocation)) {
    ending_.push_back({allocation, lastHold_});
    endSpans();
  }
  if (!drops_.empty()) work_ = true;
}

/// The application takes a span that is over for one that nobody has mapped, and frees its memory.
void ImportKeeper::endSpans() {
  std::erase_if(ending_, [&](const EndingSpan& span) {
    if (!holds_.empty() && *holds_.begin() <= span.heldUntil) return false;
    segment_.header().spans[slotOfSpan(span.id)].end(generationOfSpan(span.id));
    return true;
  });
}

void ImportKeeper::answerDrops() {
  for (std::size_t i = 0; i < drops_.size();) {
    PendingDrop& drop = drops_[i];
    // An import taken out before the drop came may still be mapped: its unmap has to be over as
    // well.
    const bool out = left(drop) == nullptr;
    if (out && drop.until == kNotYet) {
      drop.until = unmapsAsked_;
      drop.heldUntil = lastHold_;
    }
    if (!out || unmapsDone_ < drop.until || held(drop)) {
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
