#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "common/base/flag.h"

namespace hoccl {

/// A bounded queue between exactly two threads, without locks.
template <typename T>
class SpscQueue {
 public:
  explicit SpscQueue(std::size_t capacity) : items_(capacity) {}

  /// Moves from `item` only on success.
  [[nodiscard]] bool tryPush(T& item) {
    const std::size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) >= items_.size()) return false;
    items_[tail % items_.size()] = std::move(item);
    tail_.store(tail + 1, std::memory_order_release);
    return true;
  }
  [[nodiscard]] bool tryPop(T* item) {
    const std::size_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_acquire)) return false;
    *item = std::move(items_[head % items_.size()]);
    items_[head % items_.size()] = T{};
    head_.store(head + 1, std::memory_order_release);
    return true;
  }
  [[nodiscard]] bool empty() const {
    return head_.load(std::memory_order_acquire) == tail_.load(std::memory_order_acquire);
  }

 private:
  std::vector<T> items_;
  alignas(kCacheLine) std::atomic<std::size_t> head_{0};
  alignas(kCacheLine) std::atomic<std::size_t> tail_{0};
};

}  // namespace hoccl
