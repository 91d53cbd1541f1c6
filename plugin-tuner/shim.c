/* libnccl-tuner-hoccl.so: the library a job preloads. It enters every process of the job, so it has no
 * constructor, no C++ run-time and no dependency but libc, and does nothing until the process creates
 * an NCCL communicator. Then it loads the core (libhoccl.so, beside it) and passes the calls on. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin-tuner/core_api.h"

#define EXPORT __attribute__((visibility("default")))

static _Atomic(const struct HocclCoreApi*) loadedCore;
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
  atomic_store_explicit(&loadedCore, core, memory_order_release);
}

static const struct HocclCoreApi* core(void) {
  return atomic_load_explicit(&loadedCore, memory_order_acquire);
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

/* Tells the core that NCCL gets an operation, and calls the real function. */
#define PASS(symbol, arguments)                        \
  do {                                                 \
    const struct HocclCoreApi* c_ = core();            \
    if (c_) c_->noteReal();                            \
    __typeof__(&symbol) real_;                         \
    *(void**)&real_ = resolveReal(#symbol);            \
    return real_ ? real_ arguments : ncclInvalidUsage; \
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
EXPORT ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclAllGather, (in, out, count, type, comm, stream));
}
EXPORT ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclBroadcast, (in, out, count, type, root, comm, stream));
}
EXPORT ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclBcast, (buffer, count, type, root, comm, stream));
}

#if NCCL_VERSION_CODE >= 22803
EXPORT ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclAlltoAll, (in, out, count, type, comm, stream));
}
EXPORT ncclResult_t ncclGather(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclGather, (in, out, count, type, root, comm, stream));
}
EXPORT ncclResult_t ncclScatter(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                ncclComm_t comm, cudaStream_t stream) {
  PASS(ncclScatter, (in, out, count, type, root, comm, stream));
}
#endif
