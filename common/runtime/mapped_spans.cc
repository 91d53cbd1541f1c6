#include "common/runtime/mapped_spans.h"

#include <errno.h>
#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "common/base/associative_cache.h"
#include "common/base/log.h"
#include "common/base/time.h"
#include "common/gpu/buffer.h"
#include "common/runtime/mover_client.h"

namespace hoccl {
namespace {

constexpr std::size_t kMostRefused = 1 << 16;

std::atomic<bool> gAny{false};

/// Whether the segment is one of those, which are in the order of their addresses.
bool contains(const std::vector<MappedSegment>& segments, const MappedSegment& segment) {
  const auto at = std::lower_bound(
      segments.begin(), segments.end(), segment,
      [](const MappedSegment& a, const MappedSegment& b) { return a.base < b.base; });
  return at != segments.end() && *at == segment;
}

/// Whether this process, or the system, has no file descriptor left. The driver does not say why an
/// export has failed.
bool noDescriptorLeft() {
  const UniqueFd probe(::eventfd(0, EFD_CLOEXEC));
  return !probe && (errno == EMFILE || errno == ENFILE);
}

}  // namespace

/// What a thread remembers of a buffer. The identities of its first and last segment are compared
/// at every use; those between go only with cuMemUnmap, which closes the span (forget).
struct MappedSpans::Memo {
  std::uint64_t firstId = 0, lastId = 0;
  SpanSlot* slot = nullptr;  ///< null: cannot be mapped
  std::uint64_t generation = 0;
  BufferRef ref{};
};

struct MappedSpans::MemoKey {
  const MappedSpans* owner = nullptr;
  CUdeviceptr address = 0;
  std::uint64_t bytes = 0;
  bool operator==(const MemoKey&) const = default;
  [[nodiscard]] std::uint64_t hash() const { return spreadBits(address ^ spreadBits(bytes)); }
};

struct MappedSpans::Memos : AssociativeCache<MemoKey, Memo, 128, 8> {};

MappedSpans::Memos& MappedSpans::memos() {
  thread_local std::unique_ptr<Memos> memos;
  if (!memos) memos = std::make_unique<Memos>();
  return *memos;
}

bool MappedSpans::fits(const Memo& memo, CUdeviceptr address, std::uint64_t bytes,
                       std::uint64_t firstId) const {
  if (memo.firstId != firstId) return false;
  if (memo.lastId == memo.firstId) return true;
  std::uint64_t lastId = 0;
  return driver_->cuPointerGetAttribute(&lastId, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                        address + bytes - 1) == CUDA_SUCCESS &&
         lastId == memo.lastId;
}

Status MappedSpans::take(CUdeviceptr address, std::uint64_t bytes, std::uint64_t firstId,
                         BufferRef* out, SpanSlot** pin) {
  const MemoKey key{this, address, bytes};
  const Memo* memo = memos().find(key);
  const bool known = memo && fits(*memo, address, bytes, firstId);
  if (known && !memo->slot) return cannotBeMapped(driver_, reinterpret_cast<void*>(address));
  if (!known || !memo->slot->pin(memo->generation)) {
    Memo fresh;
    bool lasting = true;
    const Status status = takeSlowly(address, bytes, &fresh, &lasting);
    if (lasting) memo = &memos().insert(key, fresh);
    if (!status) return status;
  }
  *out = memo->ref;
  *pin = memo->slot;
  return {};
}

/// `lasting`: the outcome is worth remembering.
Status MappedSpans::takeSlowly(CUdeviceptr address, std::uint64_t bytes, Memo* memo,
                               bool* lasting) {
  *lasting = false;
  const ContextGuard guard(driver_, context_);
  std::vector<MappedSegment> segments;
  HOCCL_RETURN_IF_ERROR(segmentsOf(driver_, address, bytes, &segments));
  Entry entry;
  Status status;
  {
    std::lock_guard one(handingOver_);
    std::vector<std::uint64_t> replaced;
    const bool found = findAndPin(segments, &entry, &replaced);
    // Freed without being seen. Nobody waits for that: the mover lets go when it can.
    for (const std::uint64_t id : replaced) {
      (void)mover_->askDrop(OpKind::Drop, id, Deadline::afterMs(0));
    }
    *lasting = true;
    if (!found) status = handOver(segments, &entry, lasting);
    if (!*lasting) return status;
  }
  memo->firstId = segments.front().id;
  memo->lastId = segments.back().id;
  if (!status) return status;
  memo->slot = &segment_.header().spans[entry.slot];
  memo->generation = entry.generation;
  memo->ref.kind = BufferKind::Span;
  memo->ref.allocationId = spanId(entry.slot, entry.generation);
  memo->ref.allocationBase = segments.front().base;
  memo->ref.allocationBytes = segments.back().end() - segments.front().base;
  memo->ref.offset = address - segments.front().base;
  return {};
}

void MappedSpans::removeOver() {
  std::erase_if(entries_, [&](const Entry& entry) {
    return segment_.header().spans[entry.slot].over(entry.generation);
  });
}

/// The span of exactly these segments, if the mover has it. Spans with a segment that has been
/// replaced by one of these are `replaced`.
bool MappedSpans::findAndPin(const std::vector<MappedSegment>& segments, Entry* out,
                             std::vector<std::uint64_t>* replaced) {
  const CUdeviceptr from = segments.front().base, to = segments.back().end();
  std::lock_guard lock(mutex_);
  removeOver();
  for (const Entry& entry : entries_) {
    SpanSlot& slot = segment_.header().spans[entry.slot];
    if (slot.closed(entry.generation) || !entry.overlaps(from, to)) continue;
    if (entry.segments == segments && slot.pin(entry.generation)) {
      *out = entry;
      return true;
    }
    const bool gone = std::any_of(
        entry.segments.begin(), entry.segments.end(), [&](const MappedSegment& segment) {
          return segment.base < to && from < segment.end() && !contains(segments, segment);
        });
    if (!gone) continue;
    slot.close(entry.generation);
    replaced->push_back(spanId(entry.slot, entry.generation));
  }
  return false;
}

/// Gives the mover a span, in a slot of its own and pinned. Whatever goes wrong, the buffer can
/// still be copied by the application; `lasting`: it would go wrong again.
Status MappedSpans::handOver(const std::vector<MappedSegment>& segments, Entry* out,
                             bool* lasting) {
  {
    std::lock_guard lock(mutex_);
    for (const MappedSegment& segment : segments) {
      if (refused_.count(segment.id) == 0) continue;
      return cannotBeMapped(driver_, reinterpret_cast<void*>(segment.base));
    }
  }
  SpanSlot* const slots = segment_.header().spans;
  std::uint32_t tried = 0;
  while (tried < kSpanSlots && !slots[(lastSlot_ + 1 + tried) % kSpanSlots].free()) ++tried;
  if (tried == kSpanSlots) {
    *lasting = false;
    return Status::error(Code::Unsupported, "the mover has as many spans of memory as it can have");
  }
  out->slot = lastSlot_ = (lastSlot_ + 1 + tried) % kSpanSlots;
  out->generation = slots[out->slot].open();
  out->segments = segments;
  bool answered = true;
  std::size_t refused = segments.size();
  bool passing = false;
  const Status status =
      send(segments, spanId(out->slot, out->generation), &answered, &refused, &passing);
  if (passing) *lasting = false;
  std::lock_guard lock(mutex_);
  if (status) {
    gAny.store(true, std::memory_order_release);
    entries_.push_back(*out);
    return {};
  }
  slots[out->slot].close(out->generation);
  // A mover that has not answered may map it all the same: the slot is lost.
  if (answered) slots[out->slot].end(out->generation);
  if (refused_.size() >= kMostRefused) refused_.clear();
  if (refused < segments.size()) refused_.insert(segments[refused].id);
  return Status::error(Code::Unsupported, status.message());
}

/// `refused`: the segment that cannot be exported or mapped, if it is one of them that is at fault.
/// `passing`: another time it may go well.
Status MappedSpans::send(const std::vector<MappedSegment>& segments, std::uint64_t id,
                         bool* answered, std::size_t* refused, bool* passing) {
  const RelaxedCapture relaxed(driver_);
  AddSpan message{};
  message.magic = kMoverMagic;
  message.id = id;
  message.base = segments.front().base;
  message.bytes = segments.back().end() - segments.front().base;
  MoverReply reply{};
  for (std::size_t first = 0; first < segments.size(); first += message.pieces) {
    std::vector<SegmentHandle> owned(std::min(kSpanPieces, segments.size() - first));
    std::vector<int> descriptors;
    message.fabric = 0;
    for (std::size_t i = 0; i < owned.size(); ++i) {
      const Status exported = exportSegment(driver_, segments[first + i], &owned[i]);
      if (!exported) {
        *passing = noDescriptorLeft();
        if (!*passing) *refused = first + i;
        if (*passing && !std::exchange(toldDescriptors_, true)) {
          logWarn(
              "no file descriptor is left (ulimit -n) to hand memory of cuMemCreate at {:#x} to "
              "the "
              "mover, which takes one for each of {} segments: until there are, such "
              "buffers take application-side copies",
              message.base, segments.size());
        }
        message.pieces = 0;  // lets go of what came before
        if (first > 0) (void)mover_->addSpan(message, {}, &reply, answered);
        return exported;
      }
      if (owned[i].fd) {
        descriptors.push_back(owned[i].fd.get());
      } else {
        message.fabric |= 1ull << i;
        std::memcpy(message.fabricHandles[i], owned[i].fabric.data(), kFabricHandleBytes);
      }
      message.pieceBytes[i] = segments[first + i].bytes;
    }
    message.pieces = owned.size();
    const Status mapped = mover_->addSpan(message, descriptors, &reply, answered);
    if (!mapped) {
      if (*answered && reply.refused < message.pieces) *refused = first + reply.refused;
      if (!std::exchange(told_, true)) {
        logWarn("{}. Such buffers take application-side copies", mapped.message());
      }
      return mapped;
    }
    for (std::size_t i = 0; i < owned.size(); ++i) message.done += message.pieceBytes[i];
  }
  return {};
}

bool MappedSpans::forget(CUdeviceptr address, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  removeOver();
  bool any = false;
  // They stay until the mover has unmapped them, for whoever frees another segment meanwhile.
  for (const Entry& entry : entries_) {
    if (!entry.overlaps(address, address + bytes)) continue;
    segment_.header().spans[entry.slot].close(entry.generation);
    any = true;
  }
  return any;
}

bool MappedSpans::any() { return gAny.load(std::memory_order_acquire); }

}  // namespace hoccl
