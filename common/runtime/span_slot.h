#pragma once

#include <atomic>
#include <cstdint>

#include "common/base/flag.h"

namespace hoccl {

inline constexpr std::uint32_t kSpanSlots = 2048;
inline constexpr std::uint32_t kNoSpan = ~0u;

/// What application and mover both know of one span (BufferKind::Span). The mover may unmap a span
/// by itself, and the application cannot hand over its descriptors in a launch, so a launch *pins*
/// the span before it relies on it: one pin for each operation, which the mover takes note of when
/// it takes the operation. It unmaps when it has noted all pins, and by the same exchange no pin
/// comes after.
///
/// One application at a time uses a slot; its generation counts the spans that have been here.
struct alignas(kCacheLine) SpanSlot {
  /// Generation, closed, and the number of pins so far, which wraps. The mover writes it only to
  /// close.
  std::atomic<std::uint64_t> word;
  /// Generation of the last span that is over; the slot is free when it has reached the word's.
  alignas(kCacheLine) std::atomic<std::uint64_t> ended;

  static constexpr std::uint64_t kPins = (1ull << 24) - 1;
  static constexpr std::uint64_t kClosed = 1ull << 24;
  static constexpr int kGenerationShift = 25;

  [[nodiscard]] std::uint64_t generation() const {
    return word.load(std::memory_order_relaxed) >> kGenerationShift;
  }
  /// Application, one thread at a time.
  [[nodiscard]] bool free() const { return ended.load(std::memory_order_acquire) == generation(); }
  /// The next span, pinned once; its generation.
  std::uint64_t open() {
    const std::uint64_t next = generation() + 1;
    word.store(next << kGenerationShift | 1, std::memory_order_release);
    return next;
  }
  /// Of a span that the mover was not given, or has unmapped.
  void end(std::uint64_t of) { ended.store(of, std::memory_order_release); }

  /// False when that span is over, or about to be.
  [[nodiscard]] bool pin(std::uint64_t of) {
    std::uint64_t now = word.load(std::memory_order_relaxed);
    do {
      if (now >> kGenerationShift != of || now & kClosed) return false;
    } while (!word.compare_exchange_weak(now, counted(now, 1), std::memory_order_acq_rel));
    return true;
  }
  /// One more, or one less, by whoever has one that the mover has not noted.
  void pinAgain() { add(1); }
  void unpin() { add(kPins); }
  /// No further pins of that span.
  void close(std::uint64_t of) {
    std::uint64_t now = word.load(std::memory_order_relaxed);
    while (now >> kGenerationShift == of && !(now & kClosed) &&
           !word.compare_exchange_weak(now, now | kClosed, std::memory_order_acq_rel)) {
    }
  }
  [[nodiscard]] bool closed(std::uint64_t of) const {
    const std::uint64_t now = word.load(std::memory_order_relaxed);
    return now >> kGenerationShift != of || (now & kClosed) != 0;
  }
  /// The mover does not have that span any more.
  [[nodiscard]] bool over(std::uint64_t of) const {
    return ended.load(std::memory_order_acquire) >= of;
  }

  /// Mover: somebody has pinned it whose operation has not come; `noted` are those that have.
  [[nodiscard]] bool pinned(std::uint64_t noted) const {
    return ((word.load(std::memory_order_acquire) ^ noted) & kPins) != 0;
  }
  /// Closes it unless it is pinned.
  [[nodiscard]] bool tryClose(std::uint64_t noted) {
    std::uint64_t now = word.load(std::memory_order_acquire);
    do {
      if ((now ^ noted) & kPins) return false;
    } while (!word.compare_exchange_weak(now, now | kClosed, std::memory_order_acq_rel));
    return true;
  }

 private:
  static constexpr std::uint64_t counted(std::uint64_t now, std::uint64_t pins) {
    return (now & ~kPins) | ((now + pins) & kPins);
  }
  void add(std::uint64_t pins) {
    std::uint64_t now = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(now, counted(now, pins), std::memory_order_acq_rel)) {
    }
  }
};

/// A span's number among all allocations of the process. The driver's count up from a small number,
/// those of staging memory from 1 << 63.
inline constexpr std::uint64_t kSpanIds = 1ull << 62;
constexpr std::uint64_t spanId(std::uint32_t slot, std::uint64_t generation) {
  return kSpanIds | generation << 12 | slot;
}
constexpr std::uint32_t slotOfSpan(std::uint64_t id) {
  return static_cast<std::uint32_t>(id & 0xfff);
}
constexpr bool isSpan(std::uint64_t id) { return id >> 62 == 1; }
constexpr std::uint64_t generationOfSpan(std::uint64_t id) { return (id & (kSpanIds - 1)) >> 12; }
static_assert(kSpanSlots <= 0x1000);

}  // namespace hoccl
