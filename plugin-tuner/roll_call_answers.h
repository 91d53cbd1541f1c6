#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <vector>

#include "plugin-tuner/agreement.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// What ranks that are in no part of a split say in its roll call. The verdict concerns only the
/// others, so nobody waits for it; but the connection has to stand until then, or the rank would be
/// taken for one that has left.
class RollCallAnswers {
 public:
  static RollCallAnswers& ofThisProcess();

  /// Returns once the answer is on its way, within HOCCL_TIMEOUT_MS; one that cannot be given is a
  /// warning. The ranks in the split may be in the same thread.
  void give(const RollCall& call);
  /// Closes the connections that have served.
  void tend();
  /// When the process ends: until they all have, which the agreement bounds. Nothing in a child of
  /// fork.
  void finish();

 private:
  struct Answer {
    std::unique_ptr<Agreement> agreement;
    int rank = 0, ranks = 0;  ///< of the parent
  };
  [[nodiscard]] bool inherited() const;
  static void report(const Answer& answer, const Status& status);

  std::mutex mutex_;
  std::vector<Answer> answers_;
  pid_t process_ = 0;  ///< whose answers these are
};

}  // namespace hoccl
