#include "plugin-tuner/own_blocks.h"

#include <algorithm>

#include "common/gpu/stream_waits.h"
#include "common/runtime/pair_window.h"
#include "plugin-tuner/launcher.h"

namespace hoccl {
namespace {

using Ops = std::vector<PendingOp>;

bool ownOf(const PendingOp& op, const SteeredComm* comm) {
  const OpKind kind = op.descriptor.kind;
  return op.comm == comm && op.descriptor.peer == comm->rank &&
         (kind == OpKind::Send || kind == OpKind::Recv) &&
         (op.descriptor.pairSequence & kCollectiveSequence) == 0;
}

/// Visits the rank's sends to itself with their receives. Each have consecutive numbers in the
/// order of the calls, so the first two meet and all others likewise, or none. False where one has
/// no counterpart, or as soon as `visit` says so.
template <typename Visit>
bool eachPair(const Ops& ops, const SteeredComm* comm, Visit visit) {
  const auto next = [&](Ops::const_iterator from, OpKind kind) {
    return std::find_if(from, ops.end(), [&](const PendingOp& op) {
      return ownOf(op, comm) && op.descriptor.kind == kind;
    });
  };
  auto send = next(ops.begin(), OpKind::Send), receive = next(ops.begin(), OpKind::Recv);
  while (send != ops.end() && receive != ops.end()) {
    if (send->descriptor.pairSequence != receive->descriptor.pairSequence) return false;
    if (!visit(*send, *receive)) return false;
    send = next(send + 1, OpKind::Send);
    receive = next(receive + 1, OpKind::Recv);
  }
  return send == ops.end() && receive == ops.end();
}

/// Whether all of the rank's operations with itself can be copied. All or none, since the mover
/// takes their numbers without a gap.
bool takesAll(const Ops& ops, const SteeredComm* comm) {
  const PendingOp* before = nullptr;
  return eachPair(ops, comm, [&](const PendingOp& send, const PendingOp& receive) {
    if (send.stream != receive.stream || !send.address || !receive.address ||
        send.descriptor.bytes != receive.descriptor.bytes) {
      return false;
    }
    if (before && before->stream == send.stream) return true;  // has been looked at
    before = &send;
    return std::any_of(ops.begin(), ops.end(), [&](const PendingOp& launched) {
      return launched.comm->mover == comm->mover && launched.stream == send.stream &&
             !ownOf(launched, launched.comm);
    });
  });
}

void take(PendingOp& op, SteeredComm* comm) {
  const bool send = op.descriptor.kind == OpKind::Send;
  const auto self = static_cast<std::size_t>(comm->rank);
  const std::uint64_t next = --(send ? comm->sendSequence : comm->recvSequence)[self];
  comm->counts(comm->rank, send).steered.store(next, std::memory_order_release);
  comm->recount(Path::Staged, Path::OwnBlock, op.descriptor.bytes);
  if (op.span) op.span->unpin();
}

/// By which kernel the driver copies can depend on how the two places are aligned.
Status makeFirstCopies(const Driver* driver, std::uint64_t timeoutMs) {
  constexpr std::size_t kBytes = 64 << 10;
  CUdeviceptr memory = 0;  // stays: a free could wait for whatever is pending in the context
  CUstream stream = nullptr;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuMemAlloc(&memory, 2 * kBytes)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)));
  for (const std::size_t off : {0, 8, 4, 2, 1}) {
    for (const std::size_t same : {std::size_t{0}, off}) {
      HOCCL_RETURN_IF_ERROR(HOCCL_CU(
          driver, cuMemcpyDtoDAsync(memory + kBytes + off, memory + same, kBytes - off, stream)));
    }
  }
  return awaitFirstRun(driver, stream, timeoutMs);
}

}  // namespace

void takeOwnBlocks(Ops* ops, std::vector<OwnBlock>* blocks) {
  for (std::size_t i = 0; i < ops->size();) {
    SteeredComm* comm = (*ops)[i].comm;
    if (!ownOf((*ops)[i], comm) || (*ops)[i].staysOwn) {
      ++i;
      continue;
    }
    const bool takes = takesAll(*ops, comm);
    if (takes) {
      eachPair(*ops, comm, [&](const PendingOp& send, const PendingOp& receive) {
        blocks->push_back(
            {comm, send.stream, receive.address, send.address, send.descriptor.bytes});
        return true;
      });
    }
    for (PendingOp& op : *ops) {
      if (!ownOf(op, comm)) continue;
      if (takes) take(op, comm);
      op.staysOwn = !takes;
    }
    if (takes) std::erase_if(*ops, [&](const PendingOp& op) { return ownOf(op, comm); });
  }
}

Status prepareOwnBlocks(const Driver* driver, std::uint64_t timeoutMs) {
  const Status status = makeFirstCopies(driver, timeoutMs);
  return status ? status : status.inContext("HOCCL_OWN_BLOCK=kernel needs copies within the GPU");
}

}  // namespace hoccl
