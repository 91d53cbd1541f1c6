#pragma once

#include <cstdint>
#include <vector>

#include "common/gpu/driver.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

struct PendingOp;

/// A rank's own block, copied by the application's stream within its GPU: a kernel
/// (HOCCL_OWN_BLOCK=kernel). Between the launch's start and its wait, so beside what the movers do.
struct OwnBlock {
  SteeredComm* comm = nullptr;
  CUstream stream = nullptr;
  CUdeviceptr to = 0, from = 0;
  std::uint64_t bytes = 0;
};

/// Takes the sends and receives of each communicator's rank to itself out of `ops` where each has
/// its counterpart there, on one stream that has other operations as well, and adds what they copy
/// to `blocks`. Their numbers go to the next ones.
void takeOwnBlocks(std::vector<PendingOp>* ops, std::vector<OwnBlock>* blocks);

/// Makes such a copy once in the current context, for at most `timeoutMs`: what a first one loads
/// must not be loaded while a transfer is pending (FACTS 3).
Status prepareOwnBlocks(const Driver* driver, std::uint64_t timeoutMs);

}  // namespace hoccl
