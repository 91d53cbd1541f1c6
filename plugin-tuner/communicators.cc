#include "plugin-tuner/communicators.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>

#include "common/base/log.h"
#include "plugin-tuner/call_support.h"
#include "plugin-tuner/comm_setup.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/roll_call_answers.h"

namespace hoccl {
namespace {

/// While the real ncclCommInitAll runs: the tail of the id it makes for itself.
thread_local Tail* initAllTail = nullptr;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t value = a * 0x9e3779b97f4a7c15ull + b;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// Goes on with a communicator's set-up once NCCL's own is over. True when nothing is left to do.
bool advanceSetup(SteeredComm& comm) {
  if (!comm.settingUp.load(std::memory_order_acquire)) return true;
  // Another thread is at it, or this one further up its stack.
  std::unique_lock lock(comm.setupMutex, std::try_to_lock);
  if (!lock) return false;
  if (!comm.setup) return true;
  if (comm.rank < 0) {
    ncclResult_t state = ncclSuccess;
    if (callReal(realNccl.ncclCommGetAsyncError, comm.comm, &state) != ncclSuccess ||
        (state != ncclSuccess && state != ncclInProgress)) {
      comm.reason = "NCCL's own initialisation failed";
      comm.setup.reset();
      comm.settingUp.store(false, std::memory_order_release);
      return true;
    }
    if (state == ncclInProgress) return false;
    callReal(realNccl.ncclCommUserRank, comm.comm, &comm.rank);
    callReal(realNccl.ncclCommCount, comm.comm, &comm.ranks);
  }
  if (!comm.setup->advance()) return false;
  comm.setup.reset();
  comm.settingUp.store(false, std::memory_order_release);
  return true;
}

/// Goes on with every set-up of the process: an application may ask for its communicators one after
/// the other, and the first one's verdict needs what the others have to say.
void advanceAll() {
  std::vector<SteeredComm*> pending;
  ProcessCore::get().comms().forEach([&](SteeredComm& comm) {
    if (comm.settingUp.load(std::memory_order_acquire)) pending.push_back(&comm);
  });
  for (SteeredComm* comm : pending) (void)advanceSetup(*comm);
}

/// A creation call has returned. In a group nothing has happened yet.
ncclResult_t created(ncclResult_t result, const Creation& creation) {
  OpenGroup& open = openGroup();
  if (open.depth > 0) {
    open.real = true;
    if (result == ncclSuccess || result == ncclInProgress) open.creations.push_back(creation);
    return result;
  }
  if (result != ncclSuccess && result != ncclInProgress) return result;
  if (!creation.handle) {
    if (creation.rollCall) RollCallAnswers::ofThisProcess().give(*creation.rollCall);
    return result;
  }
  if (!*creation.handle) return result;
  SteeredComm* comm = adoptCommunicator(*creation.handle, creation);
  // Not blocking: the set-up goes on whenever the application asks how the communicator is.
  if (result == ncclInProgress || !comm) return result;
  return finishSetups({comm});
}

Creation rootedIn(ncclComm_t* handle, const ncclUniqueId& id) {
  Creation creation;
  creation.handle = handle;
  creation.hasRoot = readTail(id.internal, &creation.root);
  creation.key.nonce = creation.root.nonce;
  creation.key.splitSequence = creation.root.sequence;
  return creation;
}

/// What comes out of `parent` by a collective call all of its ranks make: `sequence` tells it from
/// its siblings, and is the same on all ranks.
Creation descendant(const SteeredComm& parent, ncclComm_t* handle, const Tail& root,
                    std::uint64_t sequence, std::int64_t color) {
  Creation creation;
  creation.handle = handle;
  creation.root = root;
  creation.hasRoot = true;
  creation.key = {parent.key.nonce, sequence, color};
  return creation;
}

/// What tells this communicator from all others of its unique id.
std::uint64_t lineage(const SteeredComm& comm) {
  return mix(comm.key.splitSequence, static_cast<std::uint64_t>(comm.key.color));
}

// Numbers for the ways a communicator can come out of another.
constexpr std::uint64_t kShrunk = 0x736872696e6bull, kGrown = 0x67726f77ull,
                        kRollCall = 0x726f6c6cull;

/// Writes where the id's communicator agrees into it. The id is all the same usable without.
Status markId(ncclUniqueId* id, Tail* tail) {
  const Config& config = ProcessCore::get().config();
  AgreementRoot& root = AgreementRoot::ofThisProcess();
  HOCCL_RETURN_IF_ERROR(
      root.start({.agreeTimeoutMs = config.agreeTimeoutMs, .timeoutMs = config.timeoutMs}));
  HOCCL_RETURN_IF_ERROR(root.newCommunicator(id->internal, tail));
  writeTail(id->internal, *tail);
  return {};
}

/// Ends the operations of a communicator that goes on existing.
Status endOperations(SteeredComm& comm, const std::string& why) {
  comm.fail(Status::error(Code::Aborted, why));
  if (!comm.mover || comm.ended.exchange(true)) return {};
  const Status status = comm.mover->endCommunicator(comm.moverIndex, OpKind::Abort);
  if (status) comm.leaveMover();
  return status;
}

/// Ends HOCCL's part of a communicator before NCCL's.
Status release(ncclComm_t handle, OpKind kind) {
  CommTable& comms = ProcessCore::get().comms();
  SteeredComm* comm = comms.find(handle);
  if (!comm) return {};
  Status status;
  // First of all: a thread that waits for room in a call of this communicator gives up.
  const bool over = kind == OpKind::Abort ? comm->ended.exchange(true) : comm->ended.load();
  if (comm->mover && !over) status = comm->mover->endCommunicator(comm->moverIndex, kind);
  if (status) comm->leaveMover();
  comms.remove(handle);
  std::lock_guard lock(comm->setupMutex);
  comm->setup.reset();
  comm->settingUp.store(false, std::memory_order_release);
  return status;
}

}  // namespace

SteeredComm* adoptCommunicator(ncclComm_t handle, const Creation& creation) {
  RollCallAnswers::ofThisProcess().tend();
  SteeredComm* comm = ProcessCore::get().comms().add(handle);
  if (!comm) {
    logError("more than {} communicators alive: this one cannot take part in the agreement",
             CommTable::kCapacity);
    return nullptr;
  }
  comm->key = creation.key;
  comm->root = creation.root;
  comm->rollCall = creation.rollCall;
  comm->hasRoot = creation.hasRoot;
  comm->id = mix(mix(creation.key.nonce, creation.key.splitSequence),
                 static_cast<std::uint64_t>(creation.key.color));
  if (!creation.hasRoot) {
    const Status& own = ProcessCore::get().configStatus();
    const char* common = std::getenv("NCCL_COMM_ID");
    comm->reason = !own                 ? own.message()
                   : creation.whyNoRoot ? creation.whyNoRoot
                   : common && *common
                       ? "NCCL_COMM_ID makes its unique id, which then has no room for HOCCL"
                       : "its unique id comes from a process without HOCCL, or one that "
                         "steers nothing";
    callReal(realNccl.ncclCommUserRank, handle, &comm->rank);
    callReal(realNccl.ncclCommCount, handle, &comm->ranks);
    // What is wrong here has been said when this process looked at its settings.
    logf(own ? LogLevel::Warn : LogLevel::Info,
         "rank {} of {}: the communicator stays with plain NCCL: {}", comm->rank, comm->ranks,
         comm->reason);
    return comm;
  }
  comm->setup = std::make_unique<CommSetup>(comm);
  comm->settingUp.store(true, std::memory_order_release);
  return comm;
}

ncclResult_t finishSetups(const std::vector<SteeredComm*>& comms) {
  for (bool pending = true; pending;) {
    pending = false;
    for (SteeredComm* comm : comms) pending = !advanceSetup(*comm) || pending;
    if (pending) {
      advanceAll();
      const timespec nap{0, 200'000};
      ::nanosleep(&nap, nullptr);
    }
  }
  for (SteeredComm* comm : comms) {
    if (Status status = comm->health(); !status) return refuse(*comm, status);
  }
  return ncclSuccess;
}

ncclResult_t getUniqueId(ncclUniqueId* id) {
  const ncclResult_t result = callReal(realNccl.ncclGetUniqueId, id);
  if (result != ncclSuccess || (insideReal() && !initAllTail)) return result;
  if (!ProcessCore::get().configStatus()) return result;
  // Each rank may make this id for itself, and all of them must be equal byte for byte.
  if (const char* common = std::getenv("NCCL_COMM_ID"); common && *common) return result;
  Tail tail;
  if (Status status = markId(id, &tail); !status) {
    logError("{}; communicators of this id stay with plain NCCL", status.message());
  } else if (initAllTail) {
    *initAllTail = tail;
  }
  return result;
}

ncclResult_t commInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (insideReal()) return callReal(realNccl.ncclCommInitRank, comm, ranks, id, rank);
  const ncclResult_t result = callReal(realNccl.ncclCommInitRank, comm, ranks, id, rank);
  return created(result, rootedIn(comm, id));
}

ncclResult_t commInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                ncclConfig_t* config) {
  if (insideReal()) return callReal(realNccl.ncclCommInitRankConfig, comm, ranks, id, rank, config);
  const ncclResult_t result =
      callReal(realNccl.ncclCommInitRankConfig, comm, ranks, id, rank, config);
  return created(result, rootedIn(comm, id));
}

ncclResult_t commInitRankScalable(ncclComm_t* comm, int ranks, int rank, int idCount,
                                  ncclUniqueId* ids, ncclConfig_t* config) {
  const bool nested = insideReal();
  const ncclResult_t result =
      callReal(realNccl.ncclCommInitRankScalable, comm, ranks, rank, idCount, ids, config);
  if (nested || !ids || idCount < 1) return result;
  return created(result, rootedIn(comm, ids[0]));
}

ncclResult_t commInitAll(ncclComm_t* comms, int count, const int* devices) {
  if (insideReal()) return callReal(realNccl.ncclCommInitAll, comms, count, devices);
  Tail tail;
  initAllTail = &tail;
  const ncclResult_t result = callReal(realNccl.ncclCommInitAll, comms, count, devices);
  initAllTail = nullptr;
  Creation creation;
  creation.root = tail;
  creation.hasRoot = tail.nonce != 0;
  creation.key.nonce = tail.nonce;
  OpenGroup& open = openGroup();
  if (open.depth > 0) open.real = true;
  if (result != ncclSuccess && result != ncclInProgress) return result;
  std::vector<SteeredComm*> adopted;
  for (int i = 0; i < count; ++i) {
    creation.handle = &comms[i];
    if (open.depth > 0) {
      open.creations.push_back(creation);
    } else if (SteeredComm* comm = adoptCommunicator(comms[i], creation)) {
      adopted.push_back(comm);
    }
  }
  return result == ncclInProgress ? result : finishSetups(adopted);
}

ncclResult_t commSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                       ncclConfig_t* config) {
  const bool nested = insideReal();
  const ncclResult_t result = callReal(realNccl.ncclCommSplit, parent, color, key, comm, config);
  if (nested) return result;
  SteeredComm* known = ProcessCore::get().comms().find(parent);
  if (!known || !known->hasRoot) return result;
  if (known->settingUp.load(std::memory_order_acquire)) {
    if (ncclResult_t set = finishSetups({known}); set != ncclSuccess) return set;
  }
  // All ranks of the parent count its splits alike; a split's own splits get numbers of their own.
  const std::uint64_t sequence = mix(lineage(*known), ++known->splits);
  Creation creation = descendant(*known, color == NCCL_SPLIT_NOCOLOR ? nullptr : comm, known->root,
                                 sequence, color);
  if (!known->rankRoots.empty()) {
    auto call = std::make_shared<RollCall>();
    call->key = {known->key.nonce, mix(sequence, kRollCall), 0};
    call->root = known->root;
    call->rank = known->rank;
    call->ranks = known->ranks;
    call->color = color;
    call->rankRoots = known->rankRoots;
    creation.rollCall = std::move(call);
  }
  return created(result, creation);
}

ncclResult_t commShrink(ncclComm_t parent, int* excluded, int excludedCount, ncclComm_t* comm,
                        ncclConfig_t* config, int flags) {
  const bool nested = insideReal();
  SteeredComm* known = nested ? nullptr : ProcessCore::get().comms().find(parent);
  // Ends the parent's operations, as NCCL does with its own.
  if (known && (flags & NCCL_SHRINK_ABORT) != 0) {
    if (Status status = endOperations(*known, "the communicator was shrunk with NCCL_SHRINK_ABORT");
        !status) {
      logError("{}", status.message());
    }
  }
  const ncclResult_t result =
      callReal(realNccl.ncclCommShrink, parent, excluded, excludedCount, comm, config, flags);
  if (!known || !known->hasRoot || excludedCount < 0 || (excludedCount > 0 && !excluded))
    return result;
  std::vector<int> gone(excluded, excluded + excludedCount);
  std::sort(gone.begin(), gone.end());
  // Only the ranks that stay count it: by the ranks that go, since the others cannot keep count.
  std::uint64_t who = kShrunk;
  for (int rank : gone) who = mix(who, static_cast<std::uint64_t>(rank));
  const std::uint64_t sequence = mix(lineage(*known), mix(who, ++known->shrinks[who]));
  // The unique id's process may be one of those that are gone.
  std::size_t lowest = 0;
  while (std::binary_search(gone.begin(), gone.end(), static_cast<int>(lowest))) ++lowest;
  Creation creation;
  creation.handle = comm;
  if (lowest < known->rankRoots.size()) {
    creation = descendant(*known, comm, known->rankRoots[lowest], sequence, 0);
  } else {
    creation.whyNoRoot =
        "the communicator it shrinks out of did not get as far as to know its ranks";
  }
  return created(result, creation);
}

ncclResult_t commGetUniqueId(ncclComm_t parent, ncclUniqueId* id) {
  const ncclResult_t result = callReal(realNccl.ncclCommGetUniqueId, parent, id);
  SteeredComm* known = insideReal() ? nullptr : ProcessCore::get().comms().find(parent);
  if (result != ncclSuccess || !known || !known->hasRoot) return result;
  // New ranks know nothing but the id, old ones nothing but the parent: both lead to its root.
  Tail tail = known->root;
  tail.sequence = mix(lineage(*known), mix(kGrown, known->grows + 1));
  writeTail(id->internal, tail);
  return result;
}

ncclResult_t commGrow(ncclComm_t parent, int ranks, const ncclUniqueId* id, int rank,
                      ncclComm_t* comm, ncclConfig_t* config) {
  const bool nested = insideReal();
  const ncclResult_t result =
      callReal(realNccl.ncclCommGrow, parent, ranks, id, rank, comm, config);
  if (nested) return result;
  Creation creation;
  creation.handle = comm;
  if (!parent) {
    if (id) creation = rootedIn(comm, *id);
  } else if (SteeredComm* known = ProcessCore::get().comms().find(parent);
             known && known->hasRoot) {
    Tail root = known->root;
    root.sequence = mix(lineage(*known), mix(kGrown, ++known->grows));
    creation = descendant(*known, comm, root, root.sequence, 0);
    creation.key.nonce = root.nonce;
  }
  return created(result, creation);
}

ncclResult_t commRevoke(ncclComm_t comm, int flags) {
  SteeredComm* known = insideReal() ? nullptr : ProcessCore::get().comms().find(comm);
  Status status;
  if (known) status = endOperations(*known, "the communicator was revoked");
  const ncclResult_t result = callReal(realNccl.ncclCommRevoke, comm, flags);
  return !status && result == ncclSuccess ? refuse(*known, status) : result;
}

ncclResult_t commFinalize(ncclComm_t comm) { return callReal(realNccl.ncclCommFinalize, comm); }

ncclResult_t commDestroy(ncclComm_t comm) {
  if (!insideReal()) {
    if (Status status = release(comm, OpKind::Close); !status) logError("{}", status.message());
  }
  return callReal(realNccl.ncclCommDestroy, comm);
}

ncclResult_t commAbort(ncclComm_t comm) {
  if (!insideReal()) {
    if (Status status = release(comm, OpKind::Abort); !status) logError("{}", status.message());
  }
  return callReal(realNccl.ncclCommAbort, comm);
}

ncclResult_t commGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  SteeredComm* comm = insideReal() ? nullptr : ProcessCore::get().comms().find(handle);
  const ncclResult_t result = callReal(realNccl.ncclCommGetAsyncError, handle, error);
  if (!comm || comm->ended || result != ncclSuccess || *error != ncclSuccess) return result;
  if (!advanceSetup(*comm)) {
    advanceAll();
    *error = ncclInProgress;
  } else if (Status status = comm->health(); !status) {
    *error = refuse(*comm, status);
  }
  return result;
}

const char* getLastError(ncclComm_t handle) {
  SteeredComm* comm = insideReal() ? nullptr : ProcessCore::get().comms().find(handle);
  if (comm) {
    std::lock_guard lock(comm->errorMutex);
    if (!comm->lastErrors.empty()) return comm->lastErrors.front().c_str();
  }
  if (!realNccl.ncclGetLastError) return "";
  RealCall guard;
  return realNccl.ncclGetLastError(handle);
}

}  // namespace hoccl
