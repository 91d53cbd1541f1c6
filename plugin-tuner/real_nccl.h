#pragma once

#include <nccl.h>

#include "plugin-tuner/core_api.h"

namespace hoccl {

/// The real NCCL's functions as the core calls them: X(name).
#define HOCCL_REAL_FUNCTIONS(X) \
  X(ncclGetUniqueId)            \
  X(ncclCommInitRank)           \
  X(ncclCommInitRankConfig)     \
  X(ncclCommInitAll)            \
  X(ncclCommSplit)              \
  X(ncclCommFinalize)           \
  X(ncclCommDestroy)            \
  X(ncclCommAbort)              \
  X(ncclCommGetAsyncError)      \
  X(ncclGetLastError)           \
  X(ncclCommCount)              \
  X(ncclCommCuDevice)           \
  X(ncclCommUserRank)           \
  X(ncclGroupStart)             \
  X(ncclGroupEnd)               \
  X(ncclSend)                   \
  X(ncclRecv)

struct RealNccl {
#define X(name) decltype(&::name) name = nullptr;
  HOCCL_REAL_FUNCTIONS(X)
#undef X
  // Newer than the oldest NCCL.
#define HOCCL_NEW_REAL_FUNCTIONS(X) \
  X(ncclCommInitRankScalable)       \
  X(ncclCommShrink)                 \
  X(ncclCommRevoke)                 \
  X(ncclCommGetUniqueId)            \
  X(ncclCommGrow)                   \
  X(ncclGroupSimulateEnd)
  HocclInitRankScalable ncclCommInitRankScalable = nullptr;
  HocclShrink ncclCommShrink = nullptr;
  HocclRevoke ncclCommRevoke = nullptr;
  HocclCommGetUniqueId ncclCommGetUniqueId = nullptr;
  HocclGrow ncclCommGrow = nullptr;
  decltype(&::ncclGroupSimulateEnd) ncclGroupSimulateEnd = nullptr;
};

/// Set once when the core starts; a function an old NCCL lacks is null.
extern RealNccl realNccl;

/// True while this thread is inside a call of the real NCCL: NCCL calls some of its own public
/// functions through the dynamic linker, so that an interposed one can be entered from inside.
[[nodiscard]] bool insideReal();

/// Marks the scope as being inside the real NCCL.
class RealCall {
 public:
  RealCall();
  ~RealCall();
  RealCall(const RealCall&) = delete;
  RealCall& operator=(const RealCall&) = delete;
};

/// The same in two halves, for the shim: an operation of the open group stays with NCCL.
void enterReal();
ncclResult_t leaveReal(ncclResult_t result);

/// Calls a real function under the guard; one this NCCL lacks is ncclInvalidUsage.
template <typename... Parameters, typename... Args>
ncclResult_t callReal(ncclResult_t (*function)(Parameters...), Args... args) {
  if (!function) return ncclInvalidUsage;
  RealCall guard;
  return function(args...);
}

}  // namespace hoccl
