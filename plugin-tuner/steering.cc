// The functions the preloaded shim passes on: which operations are steered, and how the rest reaches
// NCCL unchanged.

#include <fmt/format.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "common/base/log.h"
#include "common/gpu/buffer.h"
#include "plugin-tuner/comm_setup.h"
#include "plugin-tuner/core_api.h"
#include "plugin-tuner/launcher.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/stats.h"

namespace hoccl {
namespace {

/// A communicator whose creation NCCL finishes at the outermost ncclGroupEnd.
struct Creation {
  ncclComm_t* handle = nullptr;
  AgreementKey key;
  Tail root;
  bool hasRoot = false;
};

/// This thread's open group.
struct Group {
  int depth = 0;
  bool real = false;  ///< an operation or creation in it stays with NCCL
  ncclResult_t failed = ncclSuccess;  ///< the first call in it that failed: then none of it is launched
  Launcher launcher;
  std::vector<Creation> creations;
};

Group& group() {
  thread_local Group open;
  return open;
}

ncclResult_t toNccl(Code code) {
  switch (code) {
    case Code::Ok: return ncclSuccess;
    case Code::InvalidArgument: return ncclInvalidArgument;
    case Code::InvalidConfig:
    case Code::Unsupported: return ncclInvalidUsage;
    case Code::Cuda: return ncclUnhandledCudaError;
    case Code::Remote:
    case Code::Timeout: return ncclRemoteError;
    case Code::System:
    case Code::Aborted: return ncclSystemError;
    case Code::Internal: return ncclInternalError;
  }
  return ncclInternalError;
}

/// Leaves the caller's errno as it was (rule 14).
class ErrnoKeeper {
 public:
  ErrnoKeeper() : saved_(errno) {}
  ~ErrnoKeeper() { errno = saved_; }
  ErrnoKeeper(const ErrnoKeeper&) = delete;
  ErrnoKeeper& operator=(const ErrnoKeeper&) = delete;

 private:
  int saved_;
};

/// Bytes of one element; 0 for a type this build does not know.
std::size_t typeBytes(ncclDataType_t type) {
  switch (static_cast<int>(type)) {
    case ncclInt8:
    case ncclUint8:
    case 10:  // ncclFloat8e4m3
    case 11:  // ncclFloat8e5m2
      return 1;
    case ncclFloat16:
    case 9:  // ncclBfloat16
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 0;
  }
}

ncclResult_t refuse(SteeredComm& comm, const Status& status) {
  std::lock_guard lock(comm.errorMutex);
  comm.lastError = "hoccl: " + status.message();
  return toNccl(status.code());
}

// --- Communicators -------------------------------------------------------------------------------

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t value = a * 0x9e3779b97f4a7c15ull + b;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// Registers a communicator NCCL has created and begins to agree about it.
SteeredComm* adopt(ncclComm_t handle, const Creation& creation) {
  SteeredComm* comm = ProcessCore::get().comms().add(handle);
  if (!comm) {
    logError("more than {} communicators alive: this one cannot take part in the agreement",
             CommTable::kCapacity);
    return nullptr;
  }
  comm->key = creation.key;
  comm->root = creation.root;
  comm->hasRoot = creation.hasRoot;
  comm->id = mix(mix(creation.key.nonce, creation.key.splitSequence),
                 static_cast<std::uint64_t>(creation.key.color));
  if (!creation.hasRoot) {
    const Status& own = ProcessCore::get().configStatus();
    comm->reason = own ? "its unique id comes from a process without HOCCL, or one that steers nothing"
                       : own.message();
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

/// Waits for the verdict on communicators that were created blocking. Bounded by the agreement.
ncclResult_t finishSetups(const std::vector<SteeredComm*>& comms) {
  for (bool pending = true; pending;) {
    pending = false;
    for (SteeredComm* comm : comms) pending = !advanceSetup(*comm) || pending;
    if (pending) {
      const timespec nap{0, 200'000};
      ::nanosleep(&nap, nullptr);
    }
  }
  for (SteeredComm* comm : comms) {
    if (Status status = comm->health(); !status) return refuse(*comm, status);
  }
  return ncclSuccess;
}

/// A creation call has returned. In a group nothing has happened yet.
ncclResult_t created(ncclResult_t result, const Creation& creation) {
  Group& open = group();
  if (open.depth > 0) {
    open.real = true;
    if (result == ncclSuccess || result == ncclInProgress) open.creations.push_back(creation);
    return result;
  }
  if ((result != ncclSuccess && result != ncclInProgress) || !*creation.handle) return result;
  SteeredComm* comm = adopt(*creation.handle, creation);
  // Not blocking: the set-up goes on whenever the application asks how the communicator is.
  if (result == ncclInProgress || !comm) return result;
  return finishSetups({comm});
}

Creation rootedIn(ncclComm_t* handle, const ncclUniqueId& id) {
  Creation creation;
  creation.handle = handle;
  creation.hasRoot = readTail(id.internal, &creation.root);
  creation.key.nonce = creation.root.nonce;
  return creation;
}

ncclResult_t getUniqueId(ncclUniqueId* id) {
  const ncclResult_t result = callReal(realNccl.ncclGetUniqueId, id);
  ProcessCore& core = ProcessCore::get();
  if (result != ncclSuccess || insideReal() || !core.configStatus()) return result;
  AgreementRoot& root = AgreementRoot::ofThisProcess();
  Tail tail;
  Status status = root.start({.agreeTimeoutMs = core.config().agreeTimeoutMs,
                              .timeoutMs = core.config().timeoutMs});
  if (status) status = root.newCommunicator(id->internal, &tail);
  if (status) {
    writeTail(id->internal, tail);
  } else {
    logError("{}; communicators of this id stay with plain NCCL", status.message());
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

ncclResult_t commSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                       ncclConfig_t* config) {
  const ncclResult_t result = callReal(realNccl.ncclCommSplit, parent, color, key, comm, config);
  if (insideReal()) return result;
  SteeredComm* known = ProcessCore::get().comms().find(parent);
  if (!known || !known->hasRoot) return result;
  // All ranks of the parent count its splits alike; a split's own splits get numbers of their own.
  const std::uint64_t sequence =
      mix(mix(known->key.splitSequence, static_cast<std::uint64_t>(known->key.color)), ++known->splits);
  if (color == NCCL_SPLIT_NOCOLOR) return result;
  Creation creation;
  creation.handle = comm;
  creation.root = known->root;
  creation.hasRoot = true;
  creation.key = {known->key.nonce, sequence, color};
  return created(result, creation);
}

/// Ends HOCCL's part of a communicator before NCCL's.
Status release(ncclComm_t handle, OpKind kind) {
  CommTable& comms = ProcessCore::get().comms();
  SteeredComm* comm = comms.find(handle);
  if (!comm) return {};
  Status status;
  if (comm->mover) status = comm->mover->endCommunicator(comm->moverIndex, kind);
  comms.remove(handle);
  std::lock_guard lock(comm->setupMutex);
  comm->setup.reset();
  comm->settingUp.store(false, std::memory_order_release);
  return status;
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
  if (!comm || result != ncclSuccess || *error != ncclSuccess) return result;
  if (!advanceSetup(*comm)) {
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
    if (!comm->lastError.empty()) return comm->lastError.c_str();
  }
  if (!realNccl.ncclGetLastError) return "";
  RealCall guard;
  return realNccl.ncclGetLastError(handle);
}

// --- Operations ----------------------------------------------------------------------------------

/// Where an operation goes. Depends only on what both ranks of the pair see alike, and on capture,
/// which NCCL makes a property of all ranks.
Path choosePath(const SteeredComm& comm, std::uint64_t bytes, int peer, cudaStream_t stream,
                const Driver* driver) {
  if (bytes < ProcessCore::get().config().minBytes) return Path::NcclSmall;
  if (!comm.steering()) return Path::NcclUnsteered;
  if (peer < 0 || peer >= comm.ranks || !comm.reachable[static_cast<std::size_t>(peer)]) {
    return Path::NcclPair;
  }
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult asked = driver->cuStreamIsCapturing(stream, &capture);
  // The legacy stream cannot be asked while another stream is captured; that, too, is a capture. Any
  // other error is this rank's alone, and the launch will report it: passing the operation to NCCL would
  // leave the peer waiting on the other path.
  if (asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
      (asked == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE)) {
    return Path::NcclCapture;
  }
  return Path::Staged;
}

Status launchFailed(const Status& status) {
  // The peers count this operation as well: the communicator cannot go on.
  for (const PendingOp& op : group().launcher.ops()) op.comm->fail(status);
  logError("{}", status.message());
  return status;
}

/// Steers the operation, or says why it stays with NCCL. `result` is set when it was steered.
bool steer(OpKind kind, const void* buffer, std::size_t count, ncclDataType_t type, int peer,
           ncclComm_t handle, cudaStream_t stream, ncclResult_t* result) {
  if (insideReal()) return false;
  const ErrnoKeeper keeper;
  ProcessCore& core = ProcessCore::get();
  SteeredComm* comm = core.comms().find(handle);
  Group& open = group();
  if (!comm) {
    open.real = true;
    return false;
  }
  if (comm->settingUp.load(std::memory_order_acquire)) {
    // An application that did not wait for its non-blocking communicator: the verdict has to come first.
    if (*result = finishSetups({comm}); *result != ncclSuccess) return true;
  }
  const std::size_t element = typeBytes(type);
  const std::uint64_t bytes = element * count;
  const Driver* driver = nullptr;
  std::optional<ContextGuard> context;
  if (comm->steering()) {
    (void)Driver::load(&driver);
    // A thread may call without a current context, or with another device's.
    context.emplace(driver, comm->context);
  }
  const Path path = element == 0 ? Path::NcclPair : choosePath(*comm, bytes, peer, stream, driver);
  if (path != Path::Staged) {
    if (core.config().strict && bytes >= core.config().minBytes && peer != comm->rank && peer >= 0 &&
        peer < comm->ranks &&
        (path == Path::NcclUnsteered || path == Path::NcclPair)) {
      const char* verb = kind == OpKind::Send ? "send to" : "receive from";
      *result = refuse(*comm, Status::error(
          Code::Unsupported,
          fmt::format("HOCCL_STRICT=1: {} rank {} of {} bytes is not steered: {}", verb, peer, bytes,
                      path == Path::NcclUnsteered ? comm->reason
                                                  : "no transport connects this pair of ranks")));
      logError("{}", comm->lastError);
      return true;
    }
    comm->count(path, bytes);
    open.real = true;
    return false;
  }
  Status status = comm->health();
  ExportedBuffer exported;
  if (status) status = exportBuffer(driver, buffer, bytes, &exported);
  if (!status) {
    logError("rank {} of {}: {}", comm->rank, comm->ranks, status.message());
    *result = refuse(*comm, status);
    return true;
  }
  PendingOp op;
  op.comm = comm;
  op.stream = stream;
  OpDescriptor& d = op.descriptor;
  d.kind = kind;
  d.communicator = comm->moverIndex;
  d.peer = peer;
  d.bytes = bytes;
  auto& sequences = kind == OpKind::Send ? comm->sendSequence : comm->recvSequence;
  d.pairSequence = sequences[static_cast<std::size_t>(peer)]++;
  d.buffer.allocationId = exported.allocationId;
  d.buffer.allocationBase = exported.base;
  d.buffer.allocationBytes = exported.allocationBytes;
  d.buffer.offset = exported.offset;
  std::memcpy(d.buffer.ipcHandle, &exported.handle, sizeof d.buffer.ipcHandle);
  comm->count(Path::Staged, bytes);
  open.launcher.add(op);
  *result = ncclSuccess;
  if (open.depth == 0) {
    status = open.launcher.launch();
    if (!status) *result = refuse(*comm, launchFailed(status));
    open.launcher.clear();
  }
  return true;
}

/// A call that fails inside a group fails the group.
ncclResult_t noteResult(ncclResult_t result) {
  if (insideReal()) return result;
  Group& open = group();
  if (open.depth > 0 && open.failed == ncclSuccess && result != ncclSuccess &&
      result != ncclInProgress) {
    open.failed = result;
  }
  return result;
}

ncclResult_t send(const void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  ncclResult_t result = ncclSuccess;
  if (!steer(OpKind::Send, buffer, count, type, peer, comm, stream, &result)) {
    result = callReal(realNccl.ncclSend, buffer, count, type, peer, comm, stream);
  }
  return noteResult(result);
}

ncclResult_t recv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  ncclResult_t result = ncclSuccess;
  if (!steer(OpKind::Recv, buffer, count, type, peer, comm, stream, &result)) {
    result = callReal(realNccl.ncclRecv, buffer, count, type, peer, comm, stream);
  }
  return noteResult(result);
}

// --- Groups --------------------------------------------------------------------------------------

ncclResult_t groupStart() {
  if (!insideReal()) ++group().depth;
  return callReal(realNccl.ncclGroupStart);
}

/// On non-blocking communicators NCCL may still be launching; the waits have to come after.
ncclResult_t untilLaunched(const Launcher& launcher, ncclResult_t result) {
  for (const PendingOp& op : launcher.ops()) {
    while (result == ncclInProgress) {
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked =
          callReal(realNccl.ncclCommGetAsyncError, op.comm->comm, &state);
      if (asked != ncclSuccess) return asked;
      if (state != ncclInProgress) break;
      const timespec nap{0, 20'000};
      ::nanosleep(&nap, nullptr);
    }
  }
  return result;
}

ncclResult_t endOutermost(Group& open) {
  if (open.failed != ncclSuccess) {
    // As with NCCL nothing of the group happens. The peers count its operations: the communicators
    // cannot go on.
    for (const PendingOp& op : open.launcher.ops()) {
      op.comm->fail(Status::error(Code::Aborted, "a call in the same group failed"));
    }
    const ncclResult_t result = callReal(realNccl.ncclGroupEnd);
    return result == ncclSuccess || result == ncclInProgress ? open.failed : result;
  }
  if (open.launcher.empty()) return callReal(realNccl.ncclGroupEnd);
  SteeredComm& first = *open.launcher.ops().front().comm;
  if (!open.real) {
    // NCCL has nothing in this group.
    const ncclResult_t result = callReal(realNccl.ncclGroupEnd);
    if (Status status = open.launcher.launch(); !status) return refuse(first, launchFailed(status));
    return result;
  }
  Status status = open.launcher.start();
  if (!status) (void)launchFailed(status);
  ncclResult_t result = callReal(realNccl.ncclGroupEnd);
  if (!status) return refuse(first, status);
  result = untilLaunched(open.launcher, result);
  if (Status waited = open.launcher.wait(); !waited) return refuse(first, launchFailed(waited));
  return result;
}

ncclResult_t groupEnd() {
  if (insideReal()) return callReal(realNccl.ncclGroupEnd);
  Group& open = group();
  if (open.depth > 1 || open.depth == 0) {  // 0: a call too many, which NCCL reports
    if (open.depth > 0) --open.depth;
    return callReal(realNccl.ncclGroupEnd);
  }
  open.depth = 0;
  const ErrnoKeeper keeper;
  ncclResult_t result = endOutermost(open);
  open.launcher.clear();
  open.real = false;
  open.failed = ncclSuccess;
  if (open.creations.empty()) return result;

  std::vector<Creation> creations;
  creations.swap(open.creations);
  if (result != ncclSuccess && result != ncclInProgress) return result;
  std::vector<SteeredComm*> comms;
  for (const Creation& creation : creations) {
    if (!*creation.handle) continue;
    if (SteeredComm* comm = adopt(*creation.handle, creation)) comms.push_back(comm);
  }
  return result == ncclInProgress ? result : finishSetups(comms);
}

void noteReal() {
  if (!insideReal()) group().real = true;
}

constexpr HocclCoreApi kApi = {
    .version = HOCCL_CORE_API_VERSION,
    .getUniqueId = getUniqueId,
    .commInitRank = commInitRank,
    .commInitRankConfig = commInitRankConfig,
    .commSplit = commSplit,
    .commFinalize = commFinalize,
    .commDestroy = commDestroy,
    .commAbort = commAbort,
    .commGetAsyncError = commGetAsyncError,
    .getLastError = getLastError,
    .groupStart = groupStart,
    .groupEnd = groupEnd,
    .send = send,
    .recv = recv,
    .noteReal = noteReal,
    .statsJson = statsJson,
};

}  // namespace
}  // namespace hoccl

extern "C" __attribute__((visibility("default"))) const HocclCoreApi* hocclCoreStart(
    void* (*resolve)(const char* name)) {
  using namespace hoccl;
#define X(name) realNccl.name = reinterpret_cast<decltype(&::name)>(resolve(#name));
  HOCCL_REAL_FUNCTIONS(X)
#undef X
  if (ProcessCore::get().config().stats) std::atexit(printStats);
  return &kApi;
}
