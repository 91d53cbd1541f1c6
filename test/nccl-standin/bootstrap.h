#pragma once

#include <cstdint>
#include <vector>

#include "link.h"
#include "outcome.h"

namespace standin {

/// Fills the front of the id as NCCL does (a u64, then the address of a listening socket, zeros
/// behind) and starts the thread that brings the ranks of this id together.
Outcome makeUniqueId(ncclUniqueId* id);

/// What the ranks of a new communicator need to find each other.
struct Meeting {
  std::uint64_t magic = 0;  ///< differs between communicators
  int rank = 0;
  std::vector<std::uint32_t> ports;  ///< by rank
  UniqueFd listener;                 ///< this rank's
};

/// Tells the thread behind the id that this rank is here and waits for all others: the barrier of
/// ncclCommInitRank.
Outcome meet(const ncclUniqueId& id, int rank, int nranks, const Bound& bound, Meeting* out);
/// One connection to each peer, by rank; this rank's own is empty.
Outcome connectAll(const Meeting& meeting, const Bound& bound, std::vector<UniqueFd>* peers);

}  // namespace standin
