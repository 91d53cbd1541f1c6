// Making, asking about and ending communicators.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "bootstrap.h"
#include "call_log.h"
#include "comm.h"
#include "driver.h"
#include "group.h"

namespace standin {
namespace {

/// What children are told apart by; all ranks compute the same.
std::uint64_t childMagic(const ncclComm& parent, int color) {
  std::uint64_t hash = parent.magic;
  for (const std::uint64_t part : {parent.children, static_cast<std::uint64_t>(color)}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

constexpr std::uint32_t kSplitKind = 100;  // apart from operation kinds, to find mismatches

struct Offer {
  std::int32_t color, key;
  std::uint32_t port;
};

/// What every one of `members` (ranks of the parent, this one among them) offers, by rank.
Outcome gatherOffers(ncclComm* parent, const std::vector<int>& members, Offer mine,
                     std::vector<Offer>* all) {
  all->assign(parent->nranks, Offer{NCCL_SPLIT_NOCOLOR, 0, 0});
  (*all)[parent->rank] = mine;
  std::vector<Transfer> transfers;
  for (const int peer : members) {
    if (peer == parent->rank) continue;
    transfers.push_back({peer, true, &mine, sizeof mine, kSplitKind});
    transfers.push_back({peer, false, &(*all)[peer], sizeof mine, kSplitKind});
  }
  return exchange(parent->rank, parent->peers, std::move(transfers), Bound(&parent->aborted));
}

/// The child communicator of those `members` that have this rank's color. `child` is null where
/// this rank has none.
Outcome makeChild(ncclComm* parent, ncclComm* child, const std::vector<int>& members, int color,
                  int key) {
  const std::lock_guard lock(parent->use);
  ++parent->children;
  Meeting meeting;
  std::uint16_t port = 0;
  if (Outcome made = listenLoopback(&meeting.listener, &port); !made) return made;
  std::vector<Offer> offers;
  if (Outcome done = gatherOffers(parent, members, {color, key, port}, &offers); !done) return done;
  if (!child) return {};
  std::vector<int> same;
  for (const int rank : members) {
    if (offers[rank].color == color) same.push_back(rank);
  }
  std::sort(same.begin(), same.end(), [&](int a, int b) {
    return std::pair(offers[a].key, a) < std::pair(offers[b].key, b);
  });
  for (const int rank : same) {
    if (rank == parent->rank) meeting.rank = static_cast<int>(meeting.ports.size());
    meeting.ports.push_back(offers[rank].port);
  }
  meeting.magic = child->magic = childMagic(*parent, color);
  child->rank = meeting.rank;
  child->nranks = static_cast<int>(same.size());
  return connectAll(meeting, Bound(&child->aborted), &child->peers);
}

Outcome initialise(ncclComm* comm, const ncclUniqueId& id) {
  const Bound bound(&comm->aborted);
  Meeting meeting;
  if (Outcome done = meet(id, comm->rank, comm->nranks, bound, &meeting); !done) return done;
  comm->magic = meeting.magic;
  return connectAll(meeting, bound, &comm->peers);
}

ncclResult_t invalid(const std::string& text) {
  return failInGroup(report(Outcome::error(ncclInvalidArgument, text)));
}

bool wantsBlocking(const ncclConfig_t* config, bool otherwise) {
  if (!config || config->blocking == NCCL_CONFIG_UNDEF_INT) return otherwise;
  return config->blocking != 0;
}

/// Common to all ways of joining by unique id.
ncclResult_t initRank(const char* function, ncclComm_t* newcomm, int nranks, const ncclUniqueId& id,
                      int rank, const ncclConfig_t* config, const int* device) {
  if (!newcomm || nranks < 1 || rank < 0 || rank >= nranks) {
    return invalid(fmt::format("{}: rank {} of {}", function, rank, nranks));
  }
  ncclComm* comm = newComm(rank, nranks);
  if (device) {
    comm->device = *device;
    comm->context = Driver::get().primaryContext(*device);
  }
  comm->blocking = wantsBlocking(config, true);
  record(function, {.comm = comm});
  *newcomm = comm;
  return submit(Job{comm, comm, newcomm, [comm, id] { return initialise(comm, id); }});
}

/// Common to split and shrink.
ncclResult_t makeFromParent(ncclComm* parent, ncclComm_t* newcomm, const std::vector<int>& members,
                            int color, int key, const ncclConfig_t* config) {
  ncclComm* child = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR) {
    child = newComm(0, 0);
    child->device = parent->device;
    child->context = parent->context;
    child->blocking = wantsBlocking(config, parent->blocking);
  }
  *newcomm = child;
  return submit(
      Job{parent, child, newcomm, [=] { return makeChild(parent, child, members, color, key); }});
}

}  // namespace
}  // namespace standin

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
  return standin::initRank("ncclCommInitRankConfig", comm, nranks, id, rank, config, nullptr);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return standin::initRank("ncclCommInitRank", comm, nranks, id, rank, nullptr, nullptr);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  record("ncclCommInitAll");
  if (!comms || ndev < 1) return standin::invalid("ncclCommInitAll: no communicators");
  ncclUniqueId id;
  if (const ncclResult_t made = ncclGetUniqueId(&id); made != ncclSuccess) return made;
  standin::groupBegin();
  for (int rank = 0; rank < ndev; ++rank) {
    const int device = devices ? devices[rank] : rank;
    standin::initRank("ncclCommInitAll.rank", &comms[rank], ndev, id, rank, nullptr, &device);
  }
  return standin::groupFinish();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                           ncclConfig_t* config) {
  record("ncclCommSplit", {.comm = comm, .peer = color});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!newcomm || (color < 0 && color != NCCL_SPLIT_NOCOLOR)) {
    return standin::invalid(fmt::format("ncclCommSplit: color {}", color));
  }
  std::vector<int> members(comm->nranks);
  for (int rank = 0; rank < comm->nranks; ++rank) members[rank] = rank;
  return standin::makeFromParent(comm, newcomm, members, color, key, config);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm,
                            ncclConfig_t* config, int /*flags*/) {
  record("ncclCommShrink", {.comm = comm});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  if (!newcomm || !excluded || count < 1 || count >= comm->nranks ||
      std::find(excluded, excluded + count, comm->rank) != excluded + count) {
    return standin::invalid("ncclCommShrink: not a list of other ranks to leave out");
  }
  std::vector<int> members;
  for (int rank = 0; rank < comm->nranks; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) members.push_back(rank);
  }
  return standin::makeFromParent(comm, newcomm, members, 0, 0, config);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  record("ncclCommFinalize", {.comm = comm});
  if (const ncclResult_t ready = ensureReady(comm); ready != ncclSuccess) return ready;
  // Every operation is done when its call returns, so nothing is left to flush.
  return standin::runJobs({standin::Job{comm, comm, nullptr, [] { return Outcome{}; }}});
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
  comm->aborted = true;
  standin::freeComm(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm || !error || comm->valid != ncclComm::kValid) return ncclInvalidArgument;
  *error = comm->state;
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
