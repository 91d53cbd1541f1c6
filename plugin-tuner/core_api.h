#ifndef HOCCL_PLUGIN_TUNER_CORE_API_H_
#define HOCCL_PLUGIN_TUNER_CORE_API_H_

/* Between the preloaded shim (C, no run-time of its own) and the core it loads at the first
 * communicator. Both come from one build. */

#include <nccl.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOCCL_CORE_API_VERSION 1u

/* NCCL functions the core takes over: X(name in the table, NCCL's name). */
#define HOCCL_CORE_FUNCTIONS(X)                     \
  X(getUniqueId, ncclGetUniqueId)                   \
  X(commInitRank, ncclCommInitRank)                 \
  X(commInitRankConfig, ncclCommInitRankConfig)     \
  X(commSplit, ncclCommSplit)                       \
  X(commFinalize, ncclCommFinalize)                 \
  X(commDestroy, ncclCommDestroy)                   \
  X(commAbort, ncclCommAbort)                       \
  X(commGetAsyncError, ncclCommGetAsyncError)       \
  X(getLastError, ncclGetLastError)                 \
  X(groupStart, ncclGroupStart)                     \
  X(groupEnd, ncclGroupEnd)                         \
  X(send, ncclSend)                                 \
  X(recv, ncclRecv)

struct HocclCoreApi {
  unsigned version;
#define X(member, symbol) __typeof__(&symbol) member;
  HOCCL_CORE_FUNCTIONS(X)
#undef X
  /* An operation that stays with NCCL is about to be called: grouped starts and waits go around it. */
  void (*noteReal)(void);
  size_t (*statsJson)(char* out, size_t capacity);
};

/* Exported by libhoccl.so. `resolve` finds the real NCCL's functions by name. Never fails: bad
 * configuration leaves everything to NCCL, with one line that says so. */
typedef const struct HocclCoreApi* (*HocclCoreStart)(void* (*resolve)(const char* name));
#define HOCCL_CORE_START_SYMBOL "hocclCoreStart"

#ifdef __cplusplus
}
#endif
#endif
