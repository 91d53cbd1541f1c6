// ncclSend and ncclRecv.

#include "plugin-tuner/call_support.h"
#include "plugin-tuner/open_group.h"
#include "plugin-tuner/operations.h"
#include "plugin-tuner/passed_calls.h"
#include "plugin-tuner/real_nccl.h"
#include "plugin-tuner/steered_call.h"

namespace hoccl {
namespace {

/// Steers the operation, or leaves it to NCCL.
bool steer(OpKind kind, const void* buffer, std::size_t count, ncclDataType_t type, int peer,
           ncclComm_t handle, cudaStream_t stream, ncclResult_t* result, PassedCall* passed) {
  const ErrnoKeeper keeper;
  SteeredCall call(handle, stream);
  const bool send = kind == OpKind::Send;
  const char* verb = send ? "send to" : "receive from";
  if (!call.takes(verb, {Pairs::Kind::Peer, peer, send}, type, count)) {
    *passed = call.passed();
    return false;
  }
  SteeredCall::Buffer exported;
  if (call.result() == ncclSuccess && call.exports(buffer, call.bytes(), &exported)) {
    call.add(kind, &exported, 0, peer, false);
    call.launch(call.bytes());
  }
  *result = call.result();
  return true;
}

/// What NCCL has said to a call left to it.
ncclResult_t left(const PassedCall& passed, ncclResult_t result) {
  if (passed.comm && result != ncclSuccess && result != ncclInProgress) {
    takeBack(passed, openGroup());
  }
  return result;
}

}  // namespace

ncclResult_t send(const void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  ncclResult_t result = ncclSuccess;
  PassedCall passed;
  if (steer(OpKind::Send, buffer, count, type, peer, comm, stream, &result, &passed))
    return noteAnswer(result);
  return noteResult(
      left(passed, callReal(realNccl.ncclSend, buffer, count, type, peer, comm, stream)));
}

ncclResult_t recv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  ncclResult_t result = ncclSuccess;
  PassedCall passed;
  if (steer(OpKind::Recv, buffer, count, type, peer, comm, stream, &result, &passed))
    return noteAnswer(result);
  return noteResult(
      left(passed, callReal(realNccl.ncclRecv, buffer, count, type, peer, comm, stream)));
}

}  // namespace hoccl
