#pragma once

#include <nccl.h>

#include <cstddef>

namespace e2e {

/// NCCL as an application calls it: the functions the loader finds first, so the preloaded
/// library's where there is one.
#define E2E_NCCL_FUNCTIONS(X) \
  X(ncclGetUniqueId)          \
  X(ncclCommInitRank)         \
  X(ncclCommInitRankConfig)   \
  X(ncclCommInitAll)          \
  X(ncclCommInitRankScalable) \
  X(ncclCommSplit)            \
  X(ncclCommShrink)           \
  X(ncclCommRevoke)           \
  X(ncclCommFinalize)         \
  X(ncclCommDestroy)          \
  X(ncclCommAbort)            \
  X(ncclCommGetAsyncError)    \
  X(ncclCommCount)            \
  X(ncclCommUserRank)         \
  X(ncclGetLastError)         \
  X(ncclGroupStart)           \
  X(ncclGroupEnd)             \
  X(ncclSend)                 \
  X(ncclRecv)                 \
  X(ncclAllReduce)            \
  X(ncclAllGather)            \
  X(ncclAlltoAll)             \
  X(ncclGather)               \
  X(ncclScatter)              \
  X(ncclBroadcast)            \
  X(ncclBcast)

struct NcclApi {
#define X(name) decltype(&::name) name = nullptr;
  E2E_NCCL_FUNCTIONS(X)
#undef X
  /// HOCCL's counters; null without the preloaded library.
  std::size_t (*hocclStatsJson)(char* out, std::size_t capacity) = nullptr;
};

/// Loads libnccl.so.2 on first use; ends the process with a line that says what is missing.
const NcclApi& nccl();

}  // namespace e2e
