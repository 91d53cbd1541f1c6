// Communicators made from others: split, shrink, grow; and revoke, which precedes a shrink.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bootstrap.h"
#include "call_log.h"
#include "comm.h"
#include "creation.h"
#include "group.h"
#include "newer_nccl.h"

namespace standin {
namespace {

/// Ends what the communicator's operations do, for good.
void stopOperations(ncclComm* comm) {
  comm->revoked = true;
  comm->cancelled = true;
}

Outcome awaitStopped(ncclComm* comm) {
  Outcome quiet = comm->worker.drain(Bound(&comm->aborted), "the operations to be cancelled");
  if (quiet) comm->error = ncclSuccess;
  return quiet;
}

/// Common to split and shrink.
ncclResult_t makeFromParent(ncclComm* parent, ncclComm_t* newcomm, const std::vector<int>& members,
                            int color, int key, const ncclConfig_t* config, bool stopFirst) {
  ncclComm* child = color == NCCL_SPLIT_NOCOLOR ? nullptr : newChild(*parent, config);
  *newcomm = child;
  return submit(Job{parent, child, newcomm, [=] {
                      if (stopFirst) {
                        if (Outcome quiet = awaitStopped(parent); !quiet) return quiet;
                      }
                      return makeChild(parent, child, members, color, key);
                    }});
}

}  // namespace
}  // namespace standin

using standin::checkConfig;
using standin::ensureReady;
using standin::Outcome;
using standin::record;
using standin::report;

extern "C" {

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  record("ncclCommSplit", {.comm = comm, .peer = color});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!newcomm || (color < 0 && color != NCCL_SPLIT_NOCOLOR)) {
    return standin::invalid(fmt::format("ncclCommSplit: color {}", color));
  }
  if (const ncclResult_t bad = checkConfig("ncclCommSplit", config); bad != ncclSuccess) return bad;
  std::vector<int> members(comm->nranks);
  for (int rank = 0; rank < comm->nranks; ++rank) members[rank] = rank;
  return standin::makeFromParent(comm, newcomm, members, color, key, config, false);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm,
                            ncclConfig_t* config, int flags) {
  record("ncclCommShrink", {.comm = comm});
  const bool abort = (flags & NCCL_SHRINK_ABORT) != 0;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t usable = abort ? standin::ensureIdle(comm, &state) : ensureReady(comm);
  if (usable != ncclSuccess) return usable;
  if (!newcomm || !excluded || count < 1 || count >= comm->nranks ||
      (flags & ~NCCL_SHRINK_ABORT) != 0 ||
      std::find(excluded, excluded + count, comm->rank) != excluded + count) {
    return standin::invalid("ncclCommShrink: not a list of other ranks to leave out, or bad flags");
  }
  if (const ncclResult_t bad = checkConfig("ncclCommShrink", config); bad != ncclSuccess)
    return bad;
  std::vector<int> members;
  for (int rank = 0; rank < comm->nranks; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) members.push_back(rank);
  }
  if (abort) standin::stopOperations(comm);
  return standin::makeFromParent(comm, newcomm, members, 0, 0, config, abort);
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  record("ncclCommRevoke", {.comm = comm});
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t idle = standin::ensureIdle(comm, &state); idle != ncclSuccess) return idle;
  if (flags != NCCL_REVOKE_DEFAULT) {
    return report(Outcome::error(ncclInvalidArgument, fmt::format("ncclCommRevoke: {}", flags)));
  }
  standin::stopOperations(comm);
  return standin::runJobs(
      {standin::Job{comm, comm, nullptr, [comm] { return standin::awaitStopped(comm); }}});
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  record("ncclCommGetUniqueId", {.comm = comm});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!id) return ncclInvalidArgument;
  return report(standin::makeUniqueId(id));
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config) {
  if (!comm) {
    if (!id) return standin::invalid("ncclCommGrow: a new rank without an id");
    return standin::initRank("ncclCommGrow", newcomm, nranks, {*id}, rank, config, nullptr);
  }
  record("ncclCommGrow", {.comm = comm});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!newcomm || rank != -1 || nranks <= comm->nranks) {
    return standin::invalid(
        fmt::format("ncclCommGrow: rank {} of {} from {}", rank, nranks, comm->nranks));
  }
  if (const ncclResult_t bad = checkConfig("ncclCommGrow", config); bad != ncclSuccess) return bad;
  ncclComm* child = standin::newChild(*comm, config);
  child->rank = comm->rank;
  child->nranks = nranks;
  *newcomm = child;
  const auto mine = id ? std::optional(*id) : std::nullopt;
  return standin::submit(
      standin::Job{comm, child, newcomm, [=] { return standin::growParent(comm, child, mine); }});
}
}
