#pragma once

#include <cstdint>

#include "common/base/status.h"
#include "tools/bench/layout.h"

namespace hoccl::bench {

/// The copies that one rank's share of an operation consists of. Used by one thread.
class CopySet {
 public:
  virtual ~CopySet() = default;
  /// Takes the memory and streams for operations up to this one.
  virtual Status allocate(const RankLayout& largest) = 0;
  /// Whether an operation has any.
  [[nodiscard]] virtual bool any(const RankLayout& layout) const = 0;
  /// Enqueues one operation's.
  virtual Status enqueue(const RankLayout& layout) = 0;
  /// Waits for all that are enqueued. Error: Code::Timeout.
  virtual Status drain() = 0;
};

}  // namespace hoccl::bench
