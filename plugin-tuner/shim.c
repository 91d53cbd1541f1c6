/* libnccl-tuner-hoccl.so: the library a job preloads. It enters every process of the job, so it has no
 * constructor, no C++ run-time and no dependency but libc, and does nothing until the process creates
 * an NCCL communicator. Then it loads the core (libhoccl.so, beside it) and passes the calls on. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin-tuner/shim.h"

_Atomic(const struct HocclCoreApi*) hocclLoadedCore;
static pthread_once_t loadOnce = PTHREAD_ONCE_INIT;

EXPORT const char* hocclShimVersion(void) { return HOCCL_VERSION; }

/* The real NCCL's function. PyTorch loads NCCL with RTLD_LOCAL, where RTLD_NEXT finds nothing; the
 * library is there already, so RTLD_NOLOAD gives its handle. */
static void* resolveReal(const char* name) {
  static _Atomic(void*) library;
  void* handle = atomic_load_explicit(&library, memory_order_acquire);
  if (!handle) {
    handle = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
    if (!handle) return dlsym(RTLD_NEXT, name);
    atomic_store_explicit(&library, handle, memory_order_release);
  }
  return dlsym(handle, name);
}

static void complain(const char* what, const char* why) {
  fprintf(stderr, "hoccl [error] %s: %s; this process stays with plain NCCL\n", what,
          why ? why : "unknown reason");
}

static void loadCore(void) {
  char path[4096];
  const char* named = getenv("HOCCL_CORE_LIB");
  if (named && *named) {
    snprintf(path, sizeof path, "%s", named);
  } else {
    Dl_info info;
    if (!dladdr((void*)&loadCore, &info) || !info.dli_fname) {
      complain("cannot find the preloaded library's own path", dlerror());
      return;
    }
    const char* slash = strrchr(info.dli_fname, '/');
    const int folder = slash ? (int)(slash - info.dli_fname + 1) : 0;
    snprintf(path, sizeof path, "%.*slibhoccl.so", folder, info.dli_fname);
  }
  /* NODELETE: the core has threads, which must not lose their code. */
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    complain("cannot load the core", dlerror());
    return;
  }
  HocclCoreStart start;
  *(void**)&start = dlsym(library, HOCCL_CORE_START_SYMBOL);
  if (!start) {
    complain(path, "is not HOCCL's core library");
    return;
  }
  const struct HocclCoreApi* core = start(resolveReal);
  if (core->version != HOCCL_CORE_API_VERSION) {
    complain(path, "is of another version than the preloaded library");
    return;
  }
  atomic_store_explicit(&hocclLoadedCore, core, memory_order_release);
}

static const struct HocclCoreApi* core(void) {
  return atomic_load_explicit(&hocclLoadedCore, memory_order_acquire);
}

static const struct HocclCoreApi* coreLoaded(void) {
  pthread_once(&loadOnce, loadCore);
  return core();
}

EXPORT size_t hocclStatsJson(char* out, size_t capacity) {
  static const char kNone[] = "{\"communicators\":[]}";
  const struct HocclCoreApi* c = core();
  if (c) return c->statsJson(out, capacity);
  snprintf(out, capacity, "%s", kNone);
  return sizeof kNone - 1;
}

/* Calls the core's function where there is a core, else the real one's. */
#define FORWARD(which, member, symbol, arguments)                            \
  do {                                                                       \
    const struct HocclCoreApi* c_ = (which);                                 \
    if (c_) return c_->member arguments;                                     \
    __typeof__(&symbol) real_;                                               \
    *(void**)&real_ = resolveReal(#symbol);                                  \
    return real_ ? real_ arguments : ncclInvalidUsage;                       \
  } while (0)

/* Calls NCCL's function about data, known here as `type`. */
#define CALL_REAL(c, type, symbol, arguments)                   \
  do {                                                          \
    type real_;                                                 \
    *(void**)&real_ = resolveReal(#symbol);                     \
    if (!real_) return ncclInvalidUsage;                        \
    if (!(c)) return real_ arguments;                           \
    (c)->enterReal();                                           \
    return (c)->leaveReal(real_ arguments);                     \
  } while (0)

/* An operation that always stays with NCCL. */
#define PASS(symbol, arguments)              \
  do {                                       \
    const struct HocclCoreApi* c_ = core();  \
    CALL_REAL(c_, __typeof__(&symbol), symbol, arguments); \
  } while (0)

#define UNPACK(...) __VA_ARGS__
/* A collective: the core's if it takes it, else NCCL's. */
#define STEER(member, coreArguments, type, symbol, arguments)                                   \
  do {                                                                                          \
    const struct HocclCoreApi* c_ = core();                                                     \
    ncclResult_t result_ = ncclSuccess;                                                         \
    if (c_ && c_->member(UNPACK coreArguments, &result_)) return result_;                       \
    CALL_REAL(c_, type, symbol, arguments);                                                     \
  } while (0)

/* A function newer than the oldest NCCL: looked up under its name, with the type given. */
#define FORWARD_NEW(which, member, type, symbol, arguments) \
  do {                                                      \
    const struct HocclCoreApi* c_ = (which);                \
    if (c_) return c_->member arguments;                    \
    type real_;                                             \
    *(void**)&real_ = resolveReal(#symbol);                 \
    return real_ ? real_ arguments : ncclInvalidUsage;      \
  } while (0)

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  FORWARD(coreLoaded(), getUniqueId, ncclGetUniqueId, (id));
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  FORWARD(coreLoaded(), commInitRank, ncclCommInitRank, (comm, ranks, id, rank));
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
  FORWARD(coreLoaded(), commInitRankConfig, ncclCommInitRankConfig, (comm, ranks, id, rank, config));
}
EXPORT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                                  ncclConfig_t* config) {
  FORWARD(core(), commSplit, ncclCommSplit, (parent, color, key, comm, config));
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  FORWARD(coreLoaded(), commInitAll, ncclCommInitAll, (comms, count, devices));
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int idCount,
                                             ncclUniqueId* ids, ncclConfig_t* config) {
  FORWARD_NEW(coreLoaded(), commInitRankScalable, HocclInitRankScalable, ncclCommInitRankScalable,
              (comm, ranks, rank, idCount, ids, config));
}
EXPORT ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excludedCount, ncclComm_t* comm,
                                   ncclConfig_t* config, int flags) {
  FORWARD_NEW(core(), commShrink, HocclShrink, ncclCommShrink,
              (parent, excluded, excludedCount, comm, config, flags));
}
EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  FORWARD_NEW(core(), commRevoke, HocclRevoke, ncclCommRevoke, (comm, flags));
}
EXPORT ncclResult_t ncclCommGetUniqueId(ncclComm_t parent, ncclUniqueId* id) {
  FORWARD_NEW(core(), commGetUniqueId, HocclCommGetUniqueId, ncclCommGetUniqueId, (parent, id));
}
EXPORT ncclResult_t ncclCommGrow(ncclComm_t parent, int ranks, const ncclUniqueId* id, int rank,
                                 ncclComm_t* comm, ncclConfig_t* config) {
  FORWARD_NEW(coreLoaded(), commGrow, HocclGrow, ncclCommGrow, (parent, ranks, id, rank, comm, config));
}
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  FORWARD(core(), commFinalize, ncclCommFinalize, (comm));
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  FORWARD(core(), commDestroy, ncclCommDestroy, (comm));
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  FORWARD(core(), commAbort, ncclCommAbort, (comm));
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  FORWARD(core(), commGetAsyncError, ncclCommGetAsyncError, (comm, error));
}
EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  const struct HocclCoreApi* c = core();
  if (c) return c->getLastError(comm);
  __typeof__(&ncclGetLastError) real;
  *(void**)&real = resolveReal("ncclGetLastError");
  return real ? real(comm) : "";
}
/* A process may open the group in which it creates its first communicator: the core has to count it. */
EXPORT ncclResult_t ncclGroupStart(void) { FORWARD(coreLoaded(), groupStart, ncclGroupStart, ()); }
EXPORT ncclResult_t ncclGroupEnd(void) { FORWARD(core(), groupEnd, ncclGroupEnd, ()); }
EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  FORWARD(core(), groupSimulateEnd, ncclGroupSimulateEnd, (info));
}
EXPORT ncclResult_t ncclSend(const void* buffer, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  FORWARD(core(), send, ncclSend, (buffer, count, type, peer, comm, stream));
}
EXPORT ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  FORWARD(core(), recv, ncclRecv, (buffer, count, type, peer, comm, stream));
}

EXPORT ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclAllReduce, (in, out, count, type, op, comm, stream));
}
EXPORT ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclReduce, (in, out, count, type, op, root, comm, stream));
}
EXPORT ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclReduceScatter, (in, out, count, type, op, comm, stream));
}

/* The collectives that are steered. Their forms with a configuration (NCCL 2.31) differ in the last
 * argument only, which says how NCCL's kernels are to run. */
typedef ncclResult_t (*AllGatherCall)(const void*, void*, size_t, ncclDataType_t, ncclComm_t,
                                      cudaStream_t);
typedef ncclResult_t (*RootedCall)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                                   cudaStream_t);
typedef ncclResult_t (*AllGatherConfigCall)(const void*, void*, size_t, ncclDataType_t, ncclComm_t,
                                            cudaStream_t, const void*);
typedef ncclResult_t (*RootedConfigCall)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                                         cudaStream_t, const void*);

#define ALL_TO_ALL_LIKE(member, symbol)                                                              \
  EXPORT ncclResult_t symbol(const void* in, void* out, size_t count, ncclDataType_t type,           \
                             ncclComm_t comm, cudaStream_t stream) {                                 \
    STEER(member, (in, out, count, type, comm, stream), AllGatherCall, symbol,                       \
          (in, out, count, type, comm, stream));                                                     \
  }                                                                                                  \
  EXPORT ncclResult_t symbol##Config(const void* in, void* out, size_t count, ncclDataType_t type,   \
                                     ncclComm_t comm, cudaStream_t stream, const void* config) {     \
    STEER(member, (in, out, count, type, comm, stream), AllGatherConfigCall, symbol##Config,         \
          (in, out, count, type, comm, stream, config));                                             \
  }
#define ROOTED(member, symbol)                                                                       \
  EXPORT ncclResult_t symbol(const void* in, void* out, size_t count, ncclDataType_t type, int root, \
                             ncclComm_t comm, cudaStream_t stream) {                                 \
    STEER(member, (in, out, count, type, root, comm, stream), RootedCall, symbol,                    \
          (in, out, count, type, root, comm, stream));                                               \
  }                                                                                                  \
  EXPORT ncclResult_t symbol##Config(const void* in, void* out, size_t count, ncclDataType_t type,   \
                                     int root, ncclComm_t comm, cudaStream_t stream,                 \
                                     const void* config) {                                           \
    STEER(member, (in, out, count, type, root, comm, stream), RootedConfigCall, symbol##Config,      \
          (in, out, count, type, root, comm, stream, config));                                       \
  }

ALL_TO_ALL_LIKE(allGather, ncclAllGather)
ALL_TO_ALL_LIKE(allToAll, ncclAlltoAll)
ROOTED(broadcast, ncclBroadcast)
ROOTED(gather, ncclGather)
ROOTED(scatter, ncclScatter)

EXPORT ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream) {
  STEER(broadcast, (buffer, buffer, count, type, root, comm, stream), __typeof__(&ncclBcast), ncclBcast,
        (buffer, count, type, root, comm, stream));
}

/* Reductions with a configuration. */
typedef ncclResult_t (*ReduceAllConfigCall)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                            ncclComm_t, cudaStream_t, const void*);
typedef ncclResult_t (*ReduceConfigCall)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int,
                                         ncclComm_t, cudaStream_t, const void*);
EXPORT ncclResult_t ncclAllReduceConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                        const void* config) {
  CALL_REAL(core(), ReduceAllConfigCall, ncclAllReduceConfig,
            (in, out, count, type, op, comm, stream, config));
}
EXPORT ncclResult_t ncclReduceScatterConfig(const void* in, void* out, size_t count,
                                            ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                            cudaStream_t stream, const void* config) {
  CALL_REAL(core(), ReduceAllConfigCall, ncclReduceScatterConfig,
            (in, out, count, type, op, comm, stream, config));
}
EXPORT ncclResult_t ncclReduceConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                     ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                                     const void* config) {
  CALL_REAL(core(), ReduceConfigCall, ncclReduceConfig,
            (in, out, count, type, op, root, comm, stream, config));
}
