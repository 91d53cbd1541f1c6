// ncclSend and ncclRecv.

#include "plugin-tuner/call_support.h"
#include "plugin-tuner/operations.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/steered_call.h"

namespace hoccl {
namespace {

/// Steers the operation, or leaves it to NCCL.
bool steer(OpKind kind, const void* buffer, std::size_t count, ncclDataType_t type, int peer,
           ncclComm_t handle, cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  SteeredCall call(handle, stream);
  const char* verb = kind == OpKind::Send ? "send to" : "receive from";
  if (!call.takes(verb, {Pairs::Kind::Peer, peer}, type, count)) return false;
  SteeredCall::Buffer exported;
  if (call.result() == ncclSuccess && call.exports(buffer, call.bytes(), &exported)) {
    call.add(kind, &exported, 0, peer, false);
    call.launch(call.bytes());
  }
  *result = call.result();
  return true;
}

}  // namespace

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

}  // namespace hoccl
