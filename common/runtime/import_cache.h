#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "common/runtime/op.h"

namespace hoccl {

/// An application's allocation, mapped (or being mapped) in the mover.
struct Import {
  enum class State { Pending, Ready, Failed };
  State state = State::Pending;
  BufferRef buffer{};
  CUdeviceptr address = 0;
  Status status;
  std::uint32_t users = 0;  ///< operations that hold it
  std::uint64_t pins = 0;   ///< a span: operations that have come, whose pins are over
  std::uint64_t lastUse = 0;
  bool stale = false;     ///< its allocation is gone or going: unmap as soon as nobody holds it
  Op* waiters = nullptr;  ///< list by Op::next
};

/// Mapped allocations by identity, bounded; the least recently used idle one goes first (rule 8).
/// Staging memory, which is nobody's to free, stays and does not count.
class ImportCache {
 public:
  /// `spans`: the segment's slots, kSpanSlots of them; null where there are no spans.
  explicit ImportCache(std::size_t capacity, SpanSlot* spans = nullptr)
      : capacity_(capacity), spanSlots_(spans) {}

  /// The import for `buffer`'s allocation. `fresh` is set when the caller has to have it mapped.
  Import* acquire(const BufferRef& buffer, bool* fresh) {
    auto [position, added] = imports_.try_emplace(buffer.allocationId);
    Import& import = position->second;
    *fresh = added;
    if (added) {
      import.buffer = buffer;
      if (staging(import)) ++staging_;
      if (span(import)) ++spans_;
      markOverlaps(buffer);
    }
    ++import.users;
    import.lastUse = ++clock_;
    return &import;
  }
  /// A span that is mapped at `address` already.
  void add(const BufferRef& buffer, CUdeviceptr address) {
    auto [position, added] = imports_.try_emplace(buffer.allocationId);
    if (!added) return;  // a torn segment
    Import& import = position->second;
    import.buffer = buffer;
    import.address = address;
    import.state = Import::State::Ready;
    import.lastUse = ++clock_;
    ++spans_;
    markOverlaps(buffer);
  }
  void release(Import* import) {
    --import->users;
    import->lastUse = ++clock_;
  }
  Import* find(std::uint64_t allocation) {
    auto position = imports_.find(allocation);
    return position == imports_.end() ? nullptr : &position->second;
  }
  [[nodiscard]] const Import* find(std::uint64_t allocation) const {
    auto position = imports_.find(allocation);
    return position == imports_.end() ? nullptr : &position->second;
  }
  /// Nothing here that could go.
  [[nodiscard]] bool empty() const { return counted() == 0; }
  [[nodiscard]] bool crowded() const { return tooMany() || stale_ > 0; }
  /// Something that has to go is held only by pins, whose end nobody tells.
  [[nodiscard]] bool pinned() const {
    if (spans_ == 0 || stale_ == 0) return false;
    for (const auto& [id, import] : imports_) {
      if (import.stale && import.users == 0 && pinned(import)) return true;
    }
    return false;
  }
  void markStale(Import* import) {
    if (!std::exchange(import->stale, true)) ++stale_;
  }
  /// Marks the spans that reach into a range of the application's addresses.
  void markSpans(std::uint64_t base, std::uint64_t bytes) {
    for (auto& [id, import] : imports_) {
      if (span(import) && overlaps(import.buffer, base, bytes)) markStale(&import);
    }
  }
  /// One of them that is still there; null: none.
  [[nodiscard]] const Import* markedSpan(std::uint64_t base, std::uint64_t bytes) const {
    for (const auto& [id, import] : imports_) {
      if (span(import) && import.stale && overlaps(import.buffer, base, bytes)) return &import;
    }
    return nullptr;
  }
  /// Takes one idle import out that is stale or, when there are too many, the oldest. False: none.
  /// `which` gets what it was.
  bool evict(CUdeviceptr* address, BufferRef* which = nullptr) {
    auto victim = imports_.end();
    for (auto i = imports_.begin(); i != imports_.end(); ++i) {
      const Import& import = i->second;
      if (!idle(import)) continue;
      if (import.stale) {
        victim = i;
        break;
      }
      if (!tooMany() || staging(import)) continue;
      if (victim == imports_.end() || import.lastUse < victim->second.lastUse) victim = i;
    }
    if (victim == imports_.end() || !closed(victim->second)) return false;
    *address = victim->second.address;
    if (which) *which = victim->second.buffer;
    if (victim->second.stale) --stale_;
    if (staging(victim->second)) --staging_;
    if (span(victim->second)) --spans_;
    imports_.erase(victim);
    return true;
  }
  /// Marks idle imports stale that were last used before `since` (a value of `now`); their number.
  std::size_t markIdle(std::uint64_t since) {
    std::size_t marked = 0;
    for (auto& [id, import] : imports_) {
      if (import.stale || !idle(import) || import.lastUse > since || staging(import)) continue;
      markStale(&import);
      ++marked;
    }
    return marked;
  }
  /// Counts uses, so that two values have a stretch of use between them.
  [[nodiscard]] std::uint64_t now() const { return clock_; }

 private:
  /// An allocation where another one lay means that the other one has been freed. But spans share
  /// segments; of them the application knows (MappedSpans).
  void markOverlaps(const BufferRef& fresh) {
    for (auto& [id, import] : imports_) {
      if (id == fresh.allocationId || import.stale) continue;
      if (span(import) && fresh.kind == BufferKind::Span) continue;
      if (overlaps(import.buffer, fresh.allocationBase, fresh.allocationBytes)) markStale(&import);
    }
  }

  [[nodiscard]] static bool overlaps(const BufferRef& buffer, std::uint64_t base,
                                     std::uint64_t bytes) {
    return buffer.allocationBase < base + bytes &&
           base < buffer.allocationBase + buffer.allocationBytes;
  }
  [[nodiscard]] static bool span(const Import& import) {
    return import.buffer.kind == BufferKind::Span;
  }
  [[nodiscard]] SpanSlot& slot(const Import& import) const {
    return spanSlots_[slotOfSpan(import.buffer.allocationId)];
  }
  /// By operations of which the mover does not know yet.
  [[nodiscard]] bool pinned(const Import& import) const {
    return span(import) && import.state == Import::State::Ready && slot(import).pinned(import.pins);
  }
  /// Nobody uses it, and nobody is at mapping it.
  [[nodiscard]] bool idle(const Import& import) const {
    return import.users == 0 && import.state != Import::State::Pending && !pinned(import);
  }
  /// Nobody will use it any more.
  [[nodiscard]] bool closed(const Import& import) const {
    return !span(import) || import.state != Import::State::Ready ||
           slot(import).tryClose(import.pins);
  }

  [[nodiscard]] static bool staging(const Import& import) {
    return import.buffer.kind == BufferKind::Staging;
  }
  [[nodiscard]] std::size_t counted() const { return imports_.size() - staging_; }
  /// Half of the slots are left to spans that are on their way in or out.
  [[nodiscard]] bool tooMany() const { return counted() > capacity_ || spans_ > kSpanSlots / 2; }

  std::size_t capacity_;
  SpanSlot* spanSlots_;
  std::size_t staging_ = 0;
  std::size_t spans_ = 0;
  std::size_t stale_ = 0;
  std::uint64_t clock_ = 0;
  std::unordered_map<std::uint64_t, Import> imports_;
};

}  // namespace hoccl
