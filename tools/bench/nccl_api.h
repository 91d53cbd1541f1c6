#pragma once

#include <nccl.h>

#include <cstddef>
#include <string>

#include "common/base/status.h"

namespace hoccl::bench {

/// The NCCL functions the bench calls: X(name).
#define HOCCL_BENCH_NCCL_FUNCTIONS(X) \
  X(ncclGetVersion)                   \
  X(ncclGetUniqueId)                  \
  X(ncclCommInitRank)                 \
  X(ncclCommDestroy)                  \
  X(ncclCommGetAsyncError)            \
  X(ncclGetErrorString)               \
  X(ncclGetLastError)                 \
  X(ncclSend)                         \
  X(ncclRecv)                         \
  X(ncclAllGather)                    \
  X(ncclBroadcast)                    \
  X(ncclGroupStart)                   \
  X(ncclGroupEnd)

/// NCCL as an application sees it: loaded globally and then resolved in the process's search order,
/// so that a preloaded library's functions come first, as they do for PyTorch and nccl-tests.
struct NcclApi {
#define X(name) decltype(&::name) name = nullptr;
  HOCCL_BENCH_NCCL_FUNCTIONS(X)
#undef X
  /// Only in NCCL 2.28.3 and later; null before. The types are ours, since older headers lack them.
  using Blocks = ncclResult_t (*)(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                  ncclComm_t communicator, cudaStream_t stream);
  using RootedBlocks = ncclResult_t (*)(const void* in, void* out, std::size_t count,
                                        ncclDataType_t type, int root, ncclComm_t communicator,
                                        cudaStream_t stream);
  Blocks alltoAll = nullptr;
  RootedBlocks gather = nullptr, scatter = nullptr;
  /// Memory that all ranks of a communicator map; null before NCCL 2.27, which has symmetric
  /// windows.
  ncclResult_t (*memAlloc)(void** pointer, std::size_t bytes) = nullptr;
  ncclResult_t (*memFree)(void* pointer) = nullptr;
  ncclResult_t (*windowRegister)(ncclComm_t communicator, void* buffer, std::size_t bytes,
                                 void** window, int flags) = nullptr;
  ncclResult_t (*windowDeregister)(ncclComm_t communicator, void* window) = nullptr;

  std::string library;   ///< file the real NCCL was loaded from
  std::string sendFrom;  ///< file whose ncclSend an application gets

  static Status load(const std::string& configuredLibrary, NcclApi* out);
  /// Whether it has symmetric windows.
  [[nodiscard]] bool windows() const {
    return memAlloc && memFree && windowRegister && windowDeregister;
  }
  /// Whether ncclSend is the steering library's.
  [[nodiscard]] bool steered() const;
  /// `call` answered `result`: what NCCL says about it.
  [[nodiscard]] Status error(const char* call, ncclResult_t result, ncclComm_t communicator) const;
};

/// Operations by path from the JSON text of the steering library's hocclStatsJson.
struct SteeringCounts {
  bool known = false;
  unsigned long long staged = 0, appCopies = 0, direct = 0, nccl = 0;
  std::string transport;  ///< of the steered operations, where the library tells
  std::string reasons;    ///< why operations stayed with NCCL: "below HOCCL_MIN_BYTES: 12, …"
};
/// Error: no such JSON.
Status parseSteeringCounts(const std::string& json, SteeringCounts* out);
/// What the preloaded library counts in this process; `known` is false without one.
Status readSteeringCounts(SteeringCounts* out);

}  // namespace hoccl::bench
