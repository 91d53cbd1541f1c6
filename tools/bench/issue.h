#pragma once

#include <nccl.h>

#include "common/base/status.h"
#include "tools/bench/layout.h"
#include "tools/bench/nccl_api.h"

namespace hoccl::bench {

/// How a rank calls NCCL for an operation.
struct Issuer {
  const NcclApi* nccl = nullptr;
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  ncclDataType_t type = ncclUint8;
  OperationPlan plan;
  bool grouped = false;  ///< as grouped send/recv, even where NCCL has a function for it

  /// Whether this NCCL's own function is called.
  [[nodiscard]] bool ownFunction() const;
  /// Enqueues the operation once.
  [[nodiscard]] Status issue(const RankLayout& layout, const void* sendBase,
                             void* receiveBase) const;

 private:
  [[nodiscard]] Status group(const RankLayout& layout, const char* from, char* to) const;
};

}  // namespace hoccl::bench
