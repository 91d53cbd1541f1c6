// Groups, point-to-point and collective operations, operators.
#include <fmt/format.h>

#include <cstring>
#include <mutex>

#include "call_log.h"
#include "calls.h"
#include "comm.h"
#include "group.h"
#include "reduce.h"

namespace {
constexpr unsigned kSimInfoMagic = 0x74685283;
}

using standin::Kind;
using standin::operate;
using standin::record;

extern "C" {

ncclResult_t ncclGroupStart() {
  record("ncclGroupStart");
  standin::groupBegin();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  record("ncclGroupEnd");
  return standin::groupFinish();
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  record("ncclGroupSimulateEnd");
  if (!info) return standin::groupFinish();
  if (info->magic != kSimInfoMagic) standin::failInGroup(ncclInvalidArgument);
  return standin::groupSimulate(&info->estimatedTime);
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclSend", {Kind::Send, data, nullptr, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return operate("ncclRecv",
                 {Kind::Receive, nullptr, data, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclAllReduce", {Kind::AllReduce, in, out, count, type, op, -1, comm, stream});
}

ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclReduce", {Kind::Reduce, in, out, count, type, op, root, comm, stream});
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclReduceScatter",
                 {Kind::ReduceScatter, in, out, count, type, op, -1, comm, stream});
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclAllGather",
                 {Kind::AllGather, in, out, count, type, ncclSum, -1, comm, stream});
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return operate("ncclBroadcast",
                 {Kind::Broadcast, in, out, count, type, ncclSum, root, comm, stream});
}

ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  record("ncclBcast", {comm, root, count * standin::typeSize(type), type, stream});
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return standin::allToAll("ncclAlltoAll",
                           {Kind::Send, in, out, count, type, ncclSum, -1, comm, stream});
}

ncclResult_t ncclGather(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return standin::gather("ncclGather",
                         {Kind::Send, in, out, count, type, ncclSum, root, comm, stream});
}

ncclResult_t ncclScatter(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  return standin::scatter("ncclScatter",
                          {Kind::Send, in, out, count, type, ncclSum, root, comm, stream});
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  record("ncclRedOpCreatePreMulSum", {.comm = comm, .dtype = type});
  if (const ncclResult_t ready = standin::ensureReady(comm); ready != ncclSuccess) return ready;
  if (!op || !scalar || !standin::canReduce(type, ncclSum) ||
      (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)) {
    return ncclInvalidArgument;
  }
  standin::Scale scale{.type = type};
  if (residence == ncclScalarHostImmediate) {
    std::memcpy(scale.value, scalar, standin::typeSize(type));
  } else {
    scale.where = scalar;
  }
  const std::lock_guard lock(comm->belongings);
  *op = static_cast<ncclRedOp_t>(comm->nextOperator++);
  comm->operators[*op] = scale;
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  record("ncclRedOpDestroy", {.comm = comm});
  if (!comm || comm->valid != ncclComm::kValid) return ncclInvalidArgument;
  const std::lock_guard lock(comm->belongings);
  return comm->operators.erase(op) ? ncclSuccess : ncclInvalidArgument;
}
}
