// The collectives with a configuration of their own, as NCCL has them since 2.31. A stand-in has
// nothing to configure, so they do what the plain ones do.
#include <nccl.h>

#include <string>

#include "calls.h"
#include "group.h"
#include "newer_nccl.h"

namespace standin {
namespace {

constexpr unsigned kApiMagic = 0xcafebeef;

ncclResult_t checkConfig(const char* function, const StandinCollConfig* config) {
  if (!config || (config->magic == kApiMagic && config->size >= sizeof *config)) return ncclSuccess;
  return failInGroup(report(Outcome::error(
      ncclInvalidArgument,
      std::string(function) + ": the config does not come from NCCL_COLLCONFIG_INITIALIZER")));
}

}  // namespace
}  // namespace standin

using standin::checkConfig;
using standin::Kind;
using standin::operate;

extern "C" {

ncclResult_t ncclAllReduceConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclAllReduceConfig", config);
  return bad != ncclSuccess ? bad
                            : operate("ncclAllReduceConfig", {Kind::AllReduce, in, out, count, type,
                                                              op, -1, comm, stream});
}

ncclResult_t ncclReduceConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                              ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                              const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclReduceConfig", config);
  return bad != ncclSuccess ? bad
                            : operate("ncclReduceConfig",
                                      {Kind::Reduce, in, out, count, type, op, root, comm, stream});
}

ncclResult_t ncclReduceScatterConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                     ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                     const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclReduceScatterConfig", config);
  return bad != ncclSuccess
             ? bad
             : operate("ncclReduceScatterConfig",
                       {Kind::ReduceScatter, in, out, count, type, op, -1, comm, stream});
}

ncclResult_t ncclBroadcastConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                 int root, ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclBroadcastConfig", config);
  return bad != ncclSuccess ? bad
                            : operate("ncclBroadcastConfig", {Kind::Broadcast, in, out, count, type,
                                                              ncclSum, root, comm, stream});
}

ncclResult_t ncclAllGatherConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclAllGatherConfig", config);
  return bad != ncclSuccess ? bad
                            : operate("ncclAllGatherConfig", {Kind::AllGather, in, out, count, type,
                                                              ncclSum, -1, comm, stream});
}

ncclResult_t ncclAlltoAllConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                                ncclComm_t comm, cudaStream_t stream,
                                const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclAlltoAllConfig", config);
  return bad != ncclSuccess
             ? bad
             : standin::allToAll("ncclAlltoAllConfig",
                                 {Kind::Send, in, out, count, type, ncclSum, -1, comm, stream});
}

ncclResult_t ncclGatherConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                              int root, ncclComm_t comm, cudaStream_t stream,
                              const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclGatherConfig", config);
  return bad != ncclSuccess ? bad
                            : standin::gather("ncclGatherConfig", {Kind::Send, in, out, count, type,
                                                                   ncclSum, root, comm, stream});
}

ncclResult_t ncclScatterConfig(const void* in, void* out, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream,
                               const StandinCollConfig* config) {
  const ncclResult_t bad = checkConfig("ncclScatterConfig", config);
  return bad != ncclSuccess
             ? bad
             : standin::scatter("ncclScatterConfig",
                                {Kind::Send, in, out, count, type, ncclSum, root, comm, stream});
}
}
