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
  std::uint64_t lastUse = 0;
  bool stale = false;     ///< its allocation is gone or going: unmap as soon as nobody holds it
  Op* waiters = nullptr;  ///< list by Op::next

  /// Nobody uses it, and nobody is at mapping it.
  [[nodiscard]] bool idle() const { return users == 0 && state != State::Pending; }
};

/// Mapped allocations by identity, bounded; the least recently used idle one goes first (rule 8).
/// Staging memory, which is nobody's to free, stays and does not count.
class ImportCache {
 public:
  explicit ImportCache(std::size_t capacity) : capacity_(capacity) {}

  /// The import for `buffer`'s allocation. `fresh` is set when the caller has to have it mapped.
  Import* acquire(const BufferRef& buffer, bool* fresh) {
    auto [position, added] = imports_.try_emplace(buffer.allocationId);
    Import& import = position->second;
    *fresh = added;
    if (added) {
      import.buffer = buffer;
      if (staging(import)) ++staging_;
      markOverlaps(buffer);
    }
    ++import.users;
    import.lastUse = ++clock_;
    return &import;
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
  [[nodiscard]] bool crowded() const { return counted() > capacity_ || stale_ > 0; }
  void markStale(Import* import) {
    if (!std::exchange(import->stale, true)) ++stale_;
  }
  /// Takes one idle import out that is stale or, when there are too many, the oldest. False: none.
  bool evict(CUdeviceptr* address) {
    auto victim = imports_.end();
    for (auto i = imports_.begin(); i != imports_.end(); ++i) {
      const Import& import = i->second;
      if (!import.idle()) continue;
      if (import.stale) {
        victim = i;
        break;
      }
      if (counted() <= capacity_ || staging(import)) continue;
      if (victim == imports_.end() || import.lastUse < victim->second.lastUse) victim = i;
    }
    if (victim == imports_.end()) return false;
    *address = victim->second.address;
    if (victim->second.stale) --stale_;
    if (staging(victim->second)) --staging_;
    imports_.erase(victim);
    return true;
  }
  /// Marks idle imports stale that were last used before `since` (a value of `now`); their number.
  std::size_t markIdle(std::uint64_t since) {
    std::size_t marked = 0;
    for (auto& [id, import] : imports_) {
      if (import.stale || !import.idle() || import.lastUse > since || staging(import)) continue;
      markStale(&import);
      ++marked;
    }
    return marked;
  }
  /// Counts uses, so that two values have a stretch of use between them.
  [[nodiscard]] std::uint64_t now() const { return clock_; }

 private:
  /// An allocation where another one lay means that the other one has been freed.
  void markOverlaps(const BufferRef& fresh) {
    for (auto& [id, import] : imports_) {
      if (id == fresh.allocationId || import.stale) continue;
      const BufferRef& old = import.buffer;
      if (old.allocationBase < fresh.allocationBase + fresh.allocationBytes &&
          fresh.allocationBase < old.allocationBase + old.allocationBytes) {
        markStale(&import);
      }
    }
  }

  [[nodiscard]] static bool staging(const Import& import) {
    return import.buffer.kind == BufferKind::Staging;
  }
  [[nodiscard]] std::size_t counted() const { return imports_.size() - staging_; }

  std::size_t capacity_;
  std::size_t staging_ = 0;
  std::size_t stale_ = 0;
  std::uint64_t clock_ = 0;
  std::unordered_map<std::uint64_t, Import> imports_;
};

}  // namespace hoccl
