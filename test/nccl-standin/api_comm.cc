// Making communicators from unique ids, asking about and ending them.
#include "bootstrap.h"
#include "call_log.h"
#include "comm.h"
#include "creation.h"
#include "group.h"

using standin::ensureReady;
using standin::Outcome;
using standin::record;
using standin::report;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = NCCL_VERSION(2, 28, 9);
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  record("ncclGetUniqueId");
  if (!id) return ncclInvalidArgument;
  return report(standin::makeUniqueId(id));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return standin::initRank("ncclCommInitRankConfig", comm, nranks, {id}, rank, config, nullptr);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return standin::initRank("ncclCommInitRank", comm, nranks, {id}, rank, nullptr, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int count,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
  if (!ids || count < 1) return standin::invalid("ncclCommInitRankScalable: no ids");
  return standin::initRank("ncclCommInitRankScalable", comm, nranks, {ids, ids + count}, rank,
                           config, nullptr);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  record("ncclCommInitAll");
  if (!comms || ndev < 1) return standin::invalid("ncclCommInitAll: no communicators");
  ncclUniqueId id;
  if (const ncclResult_t made = ncclGetUniqueId(&id); made != ncclSuccess) return made;
  standin::groupBegin();
  for (int rank = 0; rank < ndev; ++rank) {
    const int device = devices ? devices[rank] : rank;
    standin::initRank("ncclCommInitAll.rank", &comms[rank], ndev, {id}, rank, nullptr, &device);
  }
  return standin::groupFinish();
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  record("ncclCommFinalize", {.comm = comm});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (comm->revoked || comm->finalized.exchange(true)) {
    return report(Outcome::error(ncclInvalidArgument,
                                 "ncclCommFinalize: the communicator is finalized or revoked"));
  }
  return standin::runJobs(
      {standin::Job{comm, comm, nullptr, [comm] {
                      const standin::Bound bound(&comm->aborted, 2 * standin::timeout());
                      return comm->worker.drain(bound, "the operations to be flushed");
                    }}});
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  record("ncclCommDestroy", {.comm = comm});
  if (!comm) return ncclSuccess;
  if (comm->valid != ncclComm::kValid) return ncclInvalidArgument;
  standin::freeComm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  record("ncclCommAbort", {.comm = comm});
  if (!comm) return ncclSuccess;
  if (comm->valid != ncclComm::kValid) return ncclInvalidArgument;
  comm->aborted = comm->cancelled = true;
  standin::freeComm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm || !error || comm->valid != ncclComm::kValid) return ncclInvalidArgument;
  *error = comm->error != ncclSuccess ? comm->error : comm->state;
  return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t) { return standin::lastError(); }

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!count) return ncclInvalidArgument;
  *count = comm->nranks;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!device) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!rank) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}
}
