#pragma once

#include <nccl.h>

#include <cstdint>

#include "common/base/status.h"
#include "tools/bench/nccl_api.h"
#include "tools/bench/rank_buffers.h"

namespace hoccl::bench {

/// Device memory of NCCL's in a symmetric window of a communicator, which NCCL's collectives by
/// copy engines want for what they read and what they write. All ranks make theirs in the same
/// order, and release them before the communicator goes.
class SymmetricBuffer final : public Buffer {
 public:
  ~SymmetricBuffer() override { release(); }
  Status allocate(const NcclApi* nccl, ncclComm_t communicator, std::uint64_t bytes);
  void release();

 private:
  const NcclApi* nccl_ = nullptr;
  ncclComm_t communicator_ = nullptr;
  void* window_ = nullptr;
};

/// NCCL's memory in symmetric windows of the communicator.
BufferSource symmetricMemory(const NcclApi* nccl, ncclComm_t communicator);

}  // namespace hoccl::bench
