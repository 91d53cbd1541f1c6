#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hoccl {

inline constexpr std::size_t kCacheLine = 64;
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// A flag on a cache line of its own, in memory that two processes and their GPU streams share.
/// Values only grow and are waited for with >=, so that a flag is never reset (rule 3).
struct alignas(kCacheLine) Flag {
  std::atomic<std::uint64_t> value;

  [[nodiscard]] bool reached(std::uint64_t target) const {
    return value.load(std::memory_order_acquire) >= target;
  }
  void set(std::uint64_t target) { value.store(target, std::memory_order_release); }
};
static_assert(sizeof(Flag) == kCacheLine);

}  // namespace hoccl
