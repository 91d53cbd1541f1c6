#include "plugin-tuner/own_blocks.h"

#include <algorithm>

#include "common/gpu/stream_waits.h"
#include "common/runtime/pair_window.h"
#include "plugin-tuner/launcher.h"

namespace hoccl {
namespace {

bool ownOf(const PendingOp& op, const SteeredComm* comm) {
  const OpKind kind = op.descriptor.kind;
  return op.comm == comm && op.descriptor.peer == comm->rank &&
         (kind == OpKind::Send || kind == OpKind::Recv) &&
         (op.descriptor.pairSequence & kCollectiveSequence) == 0;
}

const PendingOp* counterpart(const std::vector<PendingOp>& ops, const PendingOp& op) {
  const auto found = std::find_if(ops.begin(), ops.end(), [&](const PendingOp& other) {
    return ownOf(other, op.comm) && other.descriptor.kind != op.descriptor.kind &&
           other.descriptor.pairSequence == op.descriptor.pairSequence;
  });
  return found == ops.end() ? nullptr : &*found;
}

/// Whether all of the rank's operations with itself can be copied. All or none, since the mover
/// takes their numbers without a gap.
bool takesAll(const std::vector<PendingOp>& ops, const SteeredComm* comm) {
  return std::all_of(ops.begin(), ops.end(), [&](const PendingOp& op) {
    if (!ownOf(op, comm)) return true;
    const PendingOp* other = counterpart(ops, op);
    const bool alike = other && other->stream == op.stream && op.address && other->address &&
                       other->descriptor.bytes == op.descriptor.bytes;
    return alike && std::any_of(ops.begin(), ops.end(), [&](const PendingOp& launched) {
             return launched.comm->mover == op.comm->mover && launched.stream == op.stream &&
                    !ownOf(launched, launched.comm);
           });
  });
}

}  // namespace

void takeOwnBlocks(std::vector<PendingOp>* ops, std::vector<OwnBlock>* blocks) {
  for (std::size_t i = 0; i < ops->size(); ++i) {
    SteeredComm* comm = (*ops)[i].comm;
    if (!ownOf((*ops)[i], comm) || !takesAll(*ops, comm)) continue;
    for (const PendingOp& op : *ops) {
      if (!ownOf(op, comm)) continue;
      const bool send = op.descriptor.kind == OpKind::Send;
      const auto self = static_cast<std::size_t>(comm->rank);
      const std::uint64_t next = --(send ? comm->sendSequence : comm->recvSequence)[self];
      comm->counts(comm->rank, send).steered.store(next, std::memory_order_release);
      comm->recount(Path::Staged, Path::OwnBlock, op.descriptor.bytes);
      if (op.span) op.span->unpin();
      if (!send) continue;
      const PendingOp* receive = counterpart(*ops, op);
      blocks->push_back({comm, op.stream, receive->address, op.address, op.descriptor.bytes});
    }
    std::erase_if(*ops, [&](const PendingOp& op) { return ownOf(op, comm); });
    --i;
  }
}

Status prepareOwnBlocks(const Driver* driver, std::uint64_t timeoutMs) {
  constexpr std::size_t kBytes = 64 << 10;
  CUdeviceptr memory = 0;  // stays: a free could wait for whatever is pending in the context
  CUstream stream = nullptr;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuMemAlloc(&memory, 2 * kBytes)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)));
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver, cuMemcpyDtoDAsync(memory + kBytes, memory, kBytes, stream)));
  const Status status = awaitFirstRun(driver, stream, timeoutMs);
  return status ? status : status.inContext("HOCCL_OWN_BLOCK=kernel needs copies within the GPU");
}

}  // namespace hoccl
