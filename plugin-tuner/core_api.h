#ifndef HOCCL_PLUGIN_TUNER_CORE_API_H_
#define HOCCL_PLUGIN_TUNER_CORE_API_H_

/* Between the preloaded shim (C, no run-time of its own) and the core it loads at the first
 * communicator. Both come from one build. */

#include <nccl.h>
#include <stdbool.h>
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
  X(commInitAll, ncclCommInitAll)                   \
  X(commSplit, ncclCommSplit)                       \
  X(commFinalize, ncclCommFinalize)                 \
  X(commDestroy, ncclCommDestroy)                   \
  X(commAbort, ncclCommAbort)                       \
  X(commGetAsyncError, ncclCommGetAsyncError)       \
  X(getLastError, ncclGetLastError)                 \
  X(groupStart, ncclGroupStart)                     \
  X(groupEnd, ncclGroupEnd)                         \
  X(groupSimulateEnd, ncclGroupSimulateEnd)         \
  X(send, ncclSend)                                 \
  X(recv, ncclRecv)

/* Newer than the oldest NCCL whose header this may be built with, so declared here: a function that the
 * NCCL of the job lacks is never called. */
typedef ncclResult_t (*HocclInitRankScalable)(ncclComm_t* comm, int ranks, int rank, int idCount,
                                              ncclUniqueId* ids, ncclConfig_t* config);
typedef ncclResult_t (*HocclShrink)(ncclComm_t parent, int* excluded, int excludedCount,
                                    ncclComm_t* comm, ncclConfig_t* config, int flags);
typedef ncclResult_t (*HocclRevoke)(ncclComm_t comm, int flags);
typedef ncclResult_t (*HocclCommGetUniqueId)(ncclComm_t parent, ncclUniqueId* id);
typedef ncclResult_t (*HocclGrow)(ncclComm_t parent, int ranks, const ncclUniqueId* id, int rank,
                                  ncclComm_t* comm, ncclConfig_t* config);

struct HocclCoreApi {
  unsigned version;
#define X(member, symbol) __typeof__(&symbol) member;
  HOCCL_CORE_FUNCTIONS(X)
#undef X
  HocclInitRankScalable commInitRankScalable;
  HocclShrink commShrink;
  HocclRevoke commRevoke;
  HocclCommGetUniqueId commGetUniqueId;
  HocclGrow commGrow;
  /* Collectives: true when the call was taken over, with its result; false leaves it to NCCL. */
  bool (*allGather)(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream, ncclResult_t* result);
  bool (*allToAll)(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream, ncclResult_t* result);
  bool (*broadcast)(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                   ncclComm_t comm, cudaStream_t stream, ncclResult_t* result);
  bool (*gather)(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                cudaStream_t stream, ncclResult_t* result);
  bool (*scatter)(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                 ncclComm_t comm, cudaStream_t stream, ncclResult_t* result);
  /* Around a call of NCCL's function about data: in a group, starts and waits go around it, and what NCCL
   * calls from inside is left alone. leaveReal takes and returns the call's result. */
  void (*enterReal)(void);
  ncclResult_t (*leaveReal)(ncclResult_t result);
  size_t (*statsJson)(char* out, size_t capacity);
  /* Device memory is about to go: the allocation that begins at `address` (bytes 0), or all mappings that
   * begin in the range. Returns when no mover has any of it mapped, or after HOCCL_TIMEOUT_MS with a line
   * that says what still used it. No CUDA call; keeps errno. */
  void (*freeing)(unsigned long long address, size_t bytes);
  /* An allocation of device memory failed: the movers let go of every import nobody uses. 1 when one was
   * let go, so that another try may succeed. */
  int (*allocationFailed)(void);
};

/* Exported by libhoccl.so. `resolve` finds the real NCCL's functions by name. Never fails: bad
 * configuration leaves everything to NCCL, with one line that says so. */
typedef const struct HocclCoreApi* (*HocclCoreStart)(void* (*resolve)(const char* name));
#define HOCCL_CORE_START_SYMBOL "hocclCoreStart"

#ifdef __cplusplus
}
#endif
#endif
