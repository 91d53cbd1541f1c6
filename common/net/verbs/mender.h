#pragma once

#include <atomic>
#include <cstdint>

#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/net/verbs/path.h"

namespace hoccl {

/// Makes and connects queue pairs where that may take time: it waits for the resolution of the
/// peer's address, which must not hold up the thread that moves data. One order at a time; the
/// thread that places orders owns the order before and after, the one that calls work() in between.
class Mender {
 public:
  struct Order {
    enum class Kind { Make, MakeAndConnect, Connect } kind = Kind::Make;
    Path* path = nullptr;  ///< read only: its rail and index
    QueuePair old;         ///< released first
    QueuePair pair;        ///< the new one; to be connected, with Connect
    QueuePairPeer peer;
    std::uint32_t generation = 0;
    Status status;
  };

  Status open();
  /// Readable while there is work.
  [[nodiscard]] int fd() const { return event_.get(); }
  [[nodiscard]] bool idle() const { return state_.load(std::memory_order_acquire) == kIdle; }
  /// Only while it is idle.
  void place(Order order);
  /// Takes a finished order back.
  [[nodiscard]] bool take(Order* out);

  /// The other thread: does what has been ordered.
  void work(const VerbsSettings& settings, const QueuePairShape& shape);

 private:
  enum { kIdle, kOrdered, kDone };
  std::atomic<int> state_{kIdle};
  Order order_;
  UniqueFd event_;
};

}  // namespace hoccl
