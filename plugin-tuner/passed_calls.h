#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"

namespace hoccl {

struct SteeredComm;
struct OpenGroup;

/// A send or receive that is passed on to NCCL, between ranks that steer larger ones.
struct PassedCall {
  SteeredComm* comm = nullptr;
  int peer = -1;
  bool send = false;
  std::uint64_t bytes = 0;
};

/// Counts a call before NCCL gets it; no lock, and no allocation unless a group has more of them
/// than any before. In a group, of which nothing may happen in the end, that is all. Else error:
/// the peer waits in a steered operation that this call passes by (pair_counts.h). The communicator
/// has failed with it on both sides, or is about to, and the call is not counted.
Status notePassed(const PassedCall& call, OpenGroup& open);
/// NCCL has refused the call counted last.
void takeBack(const PassedCall& call, OpenGroup& open);

/// The calls of this thread's group happen now, unless takeBackAll() follows: the movers may see
/// them. Error: one of them, of the communicator `where`, passes by what the peer waits in, as with
/// notePassed(); none is counted.
Status publishAll(const std::vector<PassedCall>& calls, SteeredComm** where);
/// NCCL has refused to launch the group; or, not `published`, nobody has asked it to.
void takeBackAll(const std::vector<PassedCall>& calls, bool published);

}  // namespace hoccl
