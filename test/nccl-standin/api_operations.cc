// Groups, point-to-point and collective operations, memory.
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>
#include <set>

#include "call_log.h"
#include "comm.h"
#include "driver.h"
#include "group.h"
#include "operation.h"
#include "reduce.h"

namespace standin {
namespace {

constexpr std::size_t kHostAlignment = 4096;
constexpr int kNoRoot = -1;
constexpr int kAll = -1;
constexpr int kNobody = -2;

/// What ncclMemAlloc took from the host, for ncclMemFree.
struct HostMemory {
  std::mutex mutex;
  std::set<void*> pointers;
};
HostMemory& hostMemory() {
  static HostMemory* const made = new HostMemory;
  return *made;
}

/// Common to all operations: record and check. Without `hasPeer` the peer is -1.
ncclResult_t check(const char* function, const Operation& op, bool hasPeer) {
  record(function, {.comm = op.comm,
                    .peer = op.peer,
                    .bytes = op.count * typeSize(op.type),
                    .dtype = op.type,
                    .stream = op.stream});
  if (const ncclResult_t ready = ensureReady(op.comm); ready != ncclSuccess) {
    return failInGroup(ready);
  }
  const bool reduces =
      op.kind == Kind::AllReduce || op.kind == Kind::Reduce || op.kind == Kind::ReduceScatter;
  std::string wrong;
  if (!typeSize(op.type)) {
    wrong = fmt::format("data type {}", static_cast<int>(op.type));
  } else if (op.peer < (hasPeer ? 0 : -1) || op.peer >= op.comm->nranks) {
    wrong = fmt::format("rank {} of {}", op.peer, op.comm->nranks);
  } else if (reduces && !canReduce(op.type, op.reduction)) {
    wrong = fmt::format("the stand-in cannot reduce data type {} by operator {}",
                        static_cast<int>(op.type), static_cast<int>(op.reduction));
  }
  if (!wrong.empty()) {
    return failInGroup(
        report(Outcome::error(ncclInvalidArgument, fmt::format("{}: {}", function, wrong))));
  }
  return ncclSuccess;
}

ncclResult_t operate(const char* function, const Operation& op) {
  const bool symmetric =
      op.kind == Kind::AllReduce || op.kind == Kind::ReduceScatter || op.kind == Kind::AllGather;
  const ncclResult_t checked = check(function, op, !symmetric);
  return checked == ncclSuccess ? submit(op) : checked;
}

/// AlltoAll, Gather and Scatter are sends to `to` and receives from `from`: a rank, kAll or
/// kNobody. `count` elements each; with kAll the n-th rank's lie at n.
ncclResult_t lower(const char* function, const Operation& whole, int to, int from) {
  if (const ncclResult_t bad = check(function, whole, whole.peer != kNoRoot); bad != ncclSuccess) {
    return bad;
  }
  const std::size_t bytes = whole.count * typeSize(whole.type);
  groupBegin();
  for (int peer = 0; peer < whole.comm->nranks; ++peer) {
    Operation op = whole;
    op.peer = peer;
    if (to == kAll || to == peer) {
      op.kind = Kind::Send;
      op.in = static_cast<const char*>(whole.in) + (to == kAll ? peer * bytes : 0);
      submit(op);
    }
    if (from == kAll || from == peer) {
      op.kind = Kind::Receive;
      op.out = static_cast<char*>(whole.out) + (from == kAll ? peer * bytes : 0);
      submit(op);
    }
  }
  return groupFinish();
}

}  // namespace
}  // namespace standin

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
  return standin::lower("ncclAlltoAll",
                        {Kind::Send, in, out, count, type, ncclSum, standin::kNoRoot, comm, stream},
                        standin::kAll, standin::kAll);
}

ncclResult_t ncclGather(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  const int from = comm && comm->rank == root ? standin::kAll : standin::kNobody;
  return standin::lower(
      "ncclGather", {Kind::Send, in, out, count, type, ncclSum, root, comm, stream}, root, from);
}

ncclResult_t ncclScatter(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
  const int to = comm && comm->rank == root ? standin::kAll : standin::kNobody;
  return standin::lower("ncclScatter",
                        {Kind::Send, in, out, count, type, ncclSum, root, comm, stream}, to, root);
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  record("ncclCommRegister", {.comm = comm, .bytes = size});
  if (const ncclResult_t ready = standin::ensureReady(comm); ready != ncclSuccess) return ready;
  if (!handle) return ncclInvalidArgument;
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* /*handle*/) {
  record("ncclCommDeregister", {.comm = comm});
  return standin::ensureReady(comm);
}

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  record("ncclMemAlloc", {.bytes = size});
  if (!pointer) return ncclInvalidArgument;
  *pointer = nullptr;
  if (size == 0) return ncclSuccess;
  if ((*pointer = standin::Driver::get().allocate(size))) return ncclSuccess;
  if (standin::Driver::get().currentContext()) return ncclUnhandledCudaError;
  if (posix_memalign(pointer, standin::kHostAlignment, size) != 0) return ncclSystemError;
  auto& host = standin::hostMemory();
  const std::lock_guard lock(host.mutex);
  host.pointers.insert(*pointer);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* pointer) {
  record("ncclMemFree");
  if (!pointer) return ncclSuccess;
  auto& host = standin::hostMemory();
  const std::lock_guard lock(host.mutex);
  if (host.pointers.erase(pointer)) {
    std::free(pointer);
    return ncclSuccess;
  }
  return standin::Driver::get().release(pointer) ? ncclSuccess : ncclInvalidArgument;
}
}
