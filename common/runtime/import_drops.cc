#include "common/runtime/import_drops.h"

#include <unistd.h>

#include "common/base/relax_cpu.h"

namespace hoccl {
namespace {

/// A mover that is awake answers a drop of something it has not mapped within microseconds; an
/// unmap takes long enough to sleep.
constexpr int kSpins = 2000;
constexpr useconds_t kNapUs = 50;
constexpr std::uint64_t kSilentMs = 100;

}  // namespace

bool ImportDrops::take(OpDescriptor* descriptor, DropRequest* request) {
  const std::uint64_t sequence = nextSequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  for (std::uint32_t i = 0; i < kDropSlots; ++i) {
    const std::uint32_t index = static_cast<std::uint32_t>((sequence + i) % kDropSlots);
    DropSlot& slot = segment_.header().drops[index];
    std::uint64_t before = slot.request.load(std::memory_order_acquire);
    // A later request than this one may have been here already: `done` must not step back (rule 3).
    if (before > sequence || !slot.done.reached(before)) continue;
    if (!slot.request.compare_exchange_strong(before, sequence, std::memory_order_acq_rel))
      continue;
    *request = {index, sequence};
    descriptor->launchSlot = index;
    descriptor->launchSequence = sequence;
    return true;
  }
  return false;
}

void ImportDrops::giveBack(const DropRequest& request) {
  segment_.header().drops[request.slot].done.set(request.sequence);
}

ImportDrops::Answer ImportDrops::await(const DropRequest& request, const Deadline& deadline) {
  const DropSlot& slot = segment_.header().drops[request.slot];
  const bool silent = silent_.load(std::memory_order_relaxed);
  const Deadline moment = Deadline::afterMs(kSilentMs);
  for (int spins = 0;; ++spins) {
    if (slot.done.reached(request.sequence)) {
      silent_.store(false, std::memory_order_relaxed);
      return Answer::Done;
    }
    if (segment_.header().moverDead.load(std::memory_order_relaxed)) return Answer::MoverDied;
    if (spins < kSpins) {
      relaxCpu();
      continue;
    }
    if (deadline.passed() || (silent && moment.passed())) {
      silent_.store(pending(request).empty(), std::memory_order_relaxed);
      return Answer::TimedOut;
    }
    ::usleep(kNapUs);
  }
}

std::uint64_t ImportDrops::unmapped(const DropRequest& request) const {
  return segment_.header().drops[request.slot].unmapped.load(std::memory_order_relaxed);
}

std::string ImportDrops::pending(const DropRequest& request) const {
  const DropSlot& slot = segment_.header().drops[request.slot];
  if (slot.described.load(std::memory_order_acquire) != request.sequence) return {};
  return slot.pending;
}

}  // namespace hoccl
