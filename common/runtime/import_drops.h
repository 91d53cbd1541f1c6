#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/base/time.h"
#include "common/runtime/segment.h"

namespace hoccl {

/// A request to a mover to let go of imports, on its way.
struct DropRequest {
  std::uint32_t slot = 0;
  std::uint64_t sequence = 0;  ///< 0: none was made
};

/// The application's side of drops (rule 8): hands requests over through the op ring and waits for
/// answers in shared memory. Any thread; every wait has a bound.
class ImportDrops {
 public:
  explicit ImportDrops(Segment segment) : segment_(segment) {}

  /// Takes a slot and writes it into the descriptor of a request. False while all slots are busy.
  [[nodiscard]] bool take(OpDescriptor* descriptor, DropRequest* request);
  /// Gives back a slot whose request was not handed over.
  void giveBack(const DropRequest& request);

  enum class Answer {
    Done,       ///< nothing of it is mapped any more
    MoverDied,  ///< and with it its mappings
    TimedOut,
  };
  /// A mover that let the last wait pass without a sign of life gets only a moment for each further
  /// one, until it answers: a process with many frees does not wait for each.
  Answer await(const DropRequest& request, const Deadline& deadline);
  /// Imports that were unmapped for it, once it is done.
  [[nodiscard]] std::uint64_t unmapped(const DropRequest& request) const;
  /// What the mover said it waits for; empty when it has said nothing.
  [[nodiscard]] std::string pending(const DropRequest& request) const;

 private:
  Segment segment_;
  std::atomic<std::uint64_t> nextSequence_{0};
  std::atomic<bool> silent_{false};
};

}  // namespace hoccl
