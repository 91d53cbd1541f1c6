#pragma once

#include <nccl.h>

#include <cstddef>

// Functions newer than the header this is built with, as NCCL 2.29 (grow) and 2.31 (Config)
// document them.

#if NCCL_VERSION_CODE >= 23100
using StandinCollConfig = ncclCollConfig_t;
#else
/// The front of ncclCollConfig_t, which only ever grows at its end.
struct StandinCollConfig {
  std::size_t size;
  unsigned int magic;
  unsigned int version;
};
#endif

extern "C" {

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id);
ncclResult_t ncclCommGrow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank,
                          ncclComm_t* newcomm, ncclConfig_t* config);

ncclResult_t ncclAllReduceConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config);
ncclResult_t ncclReduceConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                              ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                              const StandinCollConfig* config);
ncclResult_t ncclReduceScatterConfig(const void* in, void* out, std::size_t count,
                                     ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const StandinCollConfig* config);
ncclResult_t ncclBroadcastConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                 int root, ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config);
ncclResult_t ncclAllGatherConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream,
                                 const StandinCollConfig* config);
ncclResult_t ncclAlltoAllConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                ncclComm_t comm, cudaStream_t stream,
                                const StandinCollConfig* config);
ncclResult_t ncclGatherConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                              int root, ncclComm_t comm, cudaStream_t stream,
                              const StandinCollConfig* config);
ncclResult_t ncclScatterConfig(const void* in, void* out, std::size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream,
                               const StandinCollConfig* config);
}
