#include "plugin-tuner/frees.h"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/gpu/exported_allocations.h"
#include "common/runtime/live_movers.h"
#include "common/runtime/mover_client.h"
#include "plugin-tuner/call_support.h"
#include "plugin-tuner/process_core.h"

namespace hoccl {
namespace {

/// Asks the movers of this process, all of them first so that they work at the same time, and waits
/// for each. `answered` gets what each one's answer was.
template <typename Answered>
void askMovers(OpKind kind, std::uint64_t allocation, const Deadline& deadline, Answered answered) {
  LiveMovers::ofThisProcess().visit([&](const std::vector<MoverClient*>& movers) {
    std::vector<DropRequest> requests;
    for (MoverClient* mover : movers)
      requests.push_back(mover->askDrop(kind, allocation, deadline));
    for (std::size_t i = 0; i < movers.size(); ++i) {
      const bool dead = movers[i]->segment().header().moverDead.load() != 0;
      if (requests[i].sequence != 0) {
        answered(*movers[i], requests[i], movers[i]->drops().await(requests[i], deadline));
      } else if (!dead) {
        answered(*movers[i], requests[i], ImportDrops::Answer::TimedOut);
      }
    }
  });
}

void warnOfPending(const MoverClient& mover, const DropRequest& request,
                   unsigned long long address) {
  std::string pending;
  if (request.sequence != 0) pending = mover.drops().pending(request);
  if (pending.empty()) pending = "the mover has not answered";
  logWarn(
      "the memory at {:#x} is freed while the mover (process {}) has it mapped, after {} ms "
      "(HOCCL_TIMEOUT_MS) of waiting for it: {}. Free it when its operations are over",
      address, mover.pid(), ProcessCore::get().config().timeoutMs, pending);
}

}  // namespace

void freeing(unsigned long long address, std::size_t bytes) {
  const ErrnoKeeper keeper;
  // A forked child has all of this, too, and even the locks as they were.
  if (LiveMovers::ofThisProcess().inherited()) return;
  const std::vector<std::uint64_t> freed =
      ExportedAllocations::ofThisProcess().take(address, bytes);
  if (freed.empty()) return;
  const Deadline deadline = Deadline::afterMs(ProcessCore::get().config().timeoutMs);
  for (const std::uint64_t allocation : freed) {
    askMovers(
        OpKind::Drop, allocation, deadline,
        [&](const MoverClient& mover, const DropRequest& request, ImportDrops::Answer answer) {
          if (answer == ImportDrops::Answer::TimedOut) warnOfPending(mover, request, address);
        });
  }
}

int allocationFailed() {
  const ErrnoKeeper keeper;
  if (LiveMovers::ofThisProcess().inherited()) return 0;
  const Deadline deadline = Deadline::afterMs(ProcessCore::get().config().timeoutMs);
  std::uint64_t unmapped = 0;
  askMovers(OpKind::DropIdle, 0, deadline,
            [&](const MoverClient& mover, const DropRequest& request, ImportDrops::Answer answer) {
              if (answer == ImportDrops::Answer::Done) unmapped += mover.drops().unmapped(request);
            });
  return unmapped > 0 ? 1 : 0;
}

}  // namespace hoccl
