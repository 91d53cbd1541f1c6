#include "plugin-tuner/open_group.h"

#include <time.h>

#include "common/base/log.h"
#include "common/runtime/pair_window.h"
#include "plugin-tuner/call_support.h"
#include "plugin-tuner/communicators.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/roll_call_answers.h"

namespace hoccl {
namespace {

/// On non-blocking communicators NCCL may still be launching; the waits have to come after.
ncclResult_t untilLaunched(const Launcher& launcher, ncclResult_t result) {
  for (const PendingOp& op : launcher.ops()) {
    while (result == ncclInProgress && !op.comm->ended) {  // by an abort of another thread
      ncclResult_t state = ncclSuccess;
      const ncclResult_t asked = callReal(realNccl.ncclCommGetAsyncError, op.comm->comm, &state);
      if (asked != ncclSuccess) return asked;
      if (state != ncclInProgress) break;
      const timespec nap{0, 20'000};
      ::nanosleep(&nap, nullptr);
    }
  }
  return result;
}

/// NCCL's part of a group that does happen and whose calls have been published.
ncclResult_t endReal(const OpenGroup& open) {
  const ncclResult_t result = callReal(realNccl.ncclGroupEnd);
  if (result != ncclSuccess && result != ncclInProgress) takeBackAll(open.passed, true);
  return result;
}

/// NCCL launches what it has of a group unless one of the calls it has seen failed.
void failReal(const OpenGroup& open) {
  if (!open.refused || !open.real) return;
  // Refused for its communicator, before anything else is looked at.
  (void)callReal(realNccl.ncclSend, nullptr, 0, ncclInt8, 0, nullptr, nullptr);
}

/// Of a group one of whose calls failed nothing happens, as with NCCL.
ncclResult_t endFailed(const OpenGroup& open) {
  failReal(open);
  // The peers count its operations: the communicators cannot go on.
  for (const PendingOp& op : open.launcher.ops()) {
    if (!op.comm->health()) continue;  // for a reason that says more
    op.comm->fail(Status::error(Code::Aborted, "a call in the same group failed"));
  }
  (void)callReal(realNccl.ncclGroupEnd);  // with what NCCL knows of it
  return open.failed;
}

ncclResult_t endOutermost(OpenGroup& open) {
  if (open.failed != ncclSuccess) {
    takeBackAll(open.passed, false);
    return endFailed(open);
  }
  SteeredComm* mismatched = nullptr;
  if (Status status = publishAll(open.passed, &mismatched); !status) {
    open.failed = refuse(*mismatched, status);
    open.refused = true;
    return endFailed(open);
  }
  if (open.launcher.empty()) return endReal(open);
  SteeredComm& first = *open.launcher.ops().front().comm;
  if (!open.real) {
    // NCCL has nothing in this group.
    const ncclResult_t result = callReal(realNccl.ncclGroupEnd);
    if (Status status = open.launcher.launch(); !status) return refuse(first, launchFailed(status));
    return open.launcher.aborted() ? refuse(first, abortedStatus()) : result;
  }
  Status status = open.launcher.start();
  if (!status) (void)launchFailed(status);
  ncclResult_t result = endReal(open);
  if (!status) return refuse(first, status);
  result = untilLaunched(open.launcher, result);
  if (Status waited = open.launcher.wait(); !waited) return refuse(first, launchFailed(waited));
  return result;
}

/// What follows the end of the outermost group, whose calls have been launched or dropped.
ncclResult_t closeOutermost(OpenGroup& open, ncclResult_t result) {
  open.launcher.clear();
  open.passed.clear();
  open.real = open.refused = false;
  open.failed = ncclSuccess;
  if (open.creations.empty()) return result;

  std::vector<Creation> creations;
  creations.swap(open.creations);
  if (result != ncclSuccess && result != ncclInProgress) return result;
  std::vector<SteeredComm*> comms;
  for (const Creation& creation : creations) {
    if (!creation.handle || !*creation.handle) continue;
    if (SteeredComm* comm = adoptCommunicator(*creation.handle, creation)) comms.push_back(comm);
  }
  // First what the others wait for, who may be ranks of this thread.
  for (const Creation& creation : creations) {
    if (creation.handle || !creation.rollCall) continue;
    RollCallAnswers::ofThisProcess().give(*creation.rollCall);
  }
  return result == ncclInProgress ? result : finishSetups(comms);
}

/// Steered operations that are not made: the next ones get their numbers.
void dropSteered(const Launcher& launcher) {
  for (const PendingOp& op : launcher.ops()) {
    const OpDescriptor& d = op.descriptor;
    if (d.kind == OpKind::Mirror) continue;  // has the number of its send
    SteeredComm& comm = *op.comm;
    const bool send = d.kind == OpKind::Send;
    const auto peer = static_cast<std::size_t>(d.peer);
    if (d.pairSequence & kCollectiveSequence) {
      --(send ? comm.collectiveSendSequence : comm.collectiveRecvSequence)[peer];
      continue;
    }
    const std::uint64_t next = --(send ? comm.sendSequence : comm.recvSequence)[peer];
    comm.counts(d.peer, send).steered.store(next, std::memory_order_release);
  }
}

}  // namespace

OpenGroup& openGroup() {
  thread_local OpenGroup open;
  return open;
}

Status launchFailed(const Status& status) {
  // The peers count this operation as well: the communicator cannot go on.
  for (const PendingOp& op : openGroup().launcher.ops()) op.comm->fail(status);
  logError("{}", status.message());
  return status;
}

ncclResult_t noteResult(ncclResult_t result) {
  if (insideReal()) return result;
  OpenGroup& open = openGroup();
  if (open.depth > 0 && open.failed == ncclSuccess && result != ncclSuccess &&
      result != ncclInProgress) {
    open.failed = result;
  }
  return result;
}

ncclResult_t noteAnswer(ncclResult_t result) {
  if (!insideReal() && result != ncclSuccess && result != ncclInProgress) {
    openGroup().refused |= openGroup().depth > 0;
  }
  return noteResult(result);
}

ncclResult_t groupStart() {
  if (!insideReal()) {
    OpenGroup& open = openGroup();
    if (open.depth++ == 0) open.real = false;  // calls outside of any group have set it, too
  }
  return callReal(realNccl.ncclGroupStart);
}

ncclResult_t groupEnd() {
  if (insideReal()) return callReal(realNccl.ncclGroupEnd);
  OpenGroup& open = openGroup();
  if (open.depth > 1 || open.depth == 0) {  // 0: a call too many, which NCCL reports
    if (open.depth > 0) --open.depth;
    return callReal(realNccl.ncclGroupEnd);
  }
  open.depth = 0;
  const ErrnoKeeper keeper;
  return closeOutermost(open, endOutermost(open));
}

ncclResult_t groupSimulateEnd(ncclSimInfo_t* info) {
  if (!realNccl.ncclGroupSimulateEnd) return ncclInvalidUsage;
  if (insideReal()) return callReal(realNccl.ncclGroupSimulateEnd, info);
  OpenGroup& open = openGroup();
  if (!info) return groupEnd();  // to NCCL as well
  if (open.depth != 1) {
    if (open.depth > 0) --open.depth;
    return callReal(realNccl.ncclGroupSimulateEnd, info);
  }
  open.depth = 0;
  const ErrnoKeeper keeper;
  if (open.failed != ncclSuccess) return closeOutermost(open, endOutermost(open));
  ncclResult_t result = callReal(realNccl.ncclGroupSimulateEnd, info);
  if (result == ncclInProgress) {
    // NCCL does not simulate a group of non-blocking communicators: it launches it.
    SteeredComm* comm = nullptr;
    Status status = publishAll(open.passed, &comm);
    result = untilLaunched(open.launcher, result);
    if (status && !open.launcher.empty()) {
      comm = open.launcher.ops().front().comm;
      if (status = open.launcher.launch(); !status) (void)launchFailed(status);
    }
    return closeOutermost(open, status ? result : refuse(*comm, status));
  }
  takeBackAll(open.passed, false);
  dropSteered(open.launcher);
  return closeOutermost(open, result);
}

}  // namespace hoccl
