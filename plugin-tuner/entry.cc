// What the preloaded shim calls: the core's table of functions.

#include <cstdlib>

#include "plugin-tuner/communicators.h"
#include "plugin-tuner/core_api.h"
#include "plugin-tuner/frees.h"
#include "plugin-tuner/open_group.h"
#include "plugin-tuner/operations.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/roll_call_answers.h"
#include "plugin-tuner/stats.h"

namespace hoccl {
namespace {

constexpr HocclCoreApi kApi = {
    .version = HOCCL_CORE_API_VERSION,
#define X(member, symbol) .member = member,
    HOCCL_CORE_FUNCTIONS(X)
#undef X
        .commInitRankScalable = commInitRankScalable,
    .commShrink = commShrink,
    .commRevoke = commRevoke,
    .commGetUniqueId = commGetUniqueId,
    .commGrow = commGrow,
    .allGather = allGather,
    .allToAll = allToAll,
    .broadcast = broadcast,
    .gather = gather,
    .scatter = scatter,
    .enterReal = enterReal,
    .leaveReal = leaveReal,
    .statsJson = statsJson,
    .freeing = freeing,
    .allocationFailed = allocationFailed,
};

}  // namespace
}  // namespace hoccl

extern "C" __attribute__((visibility("default"))) const HocclCoreApi* hocclCoreStart(
    void* (*resolve)(const char* name)) {
  using namespace hoccl;
#define X(name) realNccl.name = reinterpret_cast<decltype(realNccl.name)>(resolve(#name));
  HOCCL_REAL_FUNCTIONS(X)
  HOCCL_NEW_REAL_FUNCTIONS(X)
#undef X
  if (ProcessCore::get().config().stats) std::atexit(printStats);
  // The others may still be waiting for a verdict that this process has just learnt, or depends on
  // what it has said.
  std::atexit([] {
    RollCallAnswers::ofThisProcess().finish();
    AgreementRoot::drainThisProcess(ProcessCore::get().config().timeoutMs);
  });
  return &kApi;
}
