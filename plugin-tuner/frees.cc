#include "plugin-tuner/frees.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
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
/// for each. `ask` makes a mover's request, none if there is nothing to ask it; `answered` gets
/// what its answer was.
template <typename Ask, typename Answered>
void askMovers(const Deadline& deadline, Ask ask, Answered answered) {
  LiveMovers::ofThisProcess().visit([&](const std::vector<MoverClient*>& movers) {
    std::vector<std::optional<DropRequest>> requests;
    for (MoverClient* mover : movers) requests.push_back(ask(*mover));
    for (std::size_t i = 0; i < movers.size(); ++i) {
      if (!requests[i]) continue;
      const DropRequest& request = *requests[i];
      const bool dead = movers[i]->segment().header().moverDead.load() != 0;
      if (request.sequence != 0) {
        answered(*movers[i], request, movers[i]->drops().await(request, deadline));
      } else if (!dead) {
        answered(*movers[i], request, ImportDrops::Answer::TimedOut);
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
  // Only cuMemUnmap says how much goes.
  const bool spans = bytes > 0 && MappedSpans::any();
  if (freed.empty() && !spans) return;
  const Deadline deadline = Deadline::afterMs(ProcessCore::get().config().timeoutMs);
  const auto answered = [&](const MoverClient& mover, const DropRequest& request,
                            ImportDrops::Answer answer) {
    if (answer == ImportDrops::Answer::TimedOut) warnOfPending(mover, request, address);
  };
  for (const std::uint64_t allocation : freed) {
    askMovers(
        deadline,
        [&](MoverClient& mover) { return mover.askDrop(OpKind::Drop, allocation, deadline); },
        answered);
  }
  if (!spans) return;
  askMovers(
      deadline,
      [&](MoverClient& mover) -> std::optional<DropRequest> {
        if (!mover.spans().forget(address, bytes)) return {};
        return mover.askDropSpans(address, bytes, deadline);
      },
      answered);
}

int allocationFailed() {
  const ErrnoKeeper keeper;
  if (LiveMovers::ofThisProcess().inherited()) return 0;
  const Deadline deadline = Deadline::afterMs(ProcessCore::get().config().timeoutMs);
  std::uint64_t unmapped = 0;
  askMovers(
      deadline, [&](MoverClient& mover) { return mover.askDrop(OpKind::DropIdle, 0, deadline); },
      [&](const MoverClient& mover, const DropRequest& request, ImportDrops::Answer answer) {
        if (answer == ImportDrops::Answer::Done) unmapped += mover.drops().unmapped(request);
      });
  return unmapped > 0 ? 1 : 0;
}

}  // namespace hoccl
