#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "link.h"
#include "outcome.h"

namespace standin {

/// Fills the front of the id as NCCL does (a u64, then the address of a listening socket, zeros
/// behind) and starts the thread that brings the ranks of this id together. With NCCL_COMM_ID set
/// the address is that one, the u64 always the same, and rank 0's initialisation starts the thread.
Outcome makeUniqueId(ncclUniqueId* id);
/// The part of rank 0 for an id out of NCCL_COMM_ID; nothing for other ids.
Outcome openNamedId(const ncclUniqueId& id, const Bound& bound);
/// Ends the thread behind an id that no rank is going to join.
Outcome releaseUniqueId(const ncclUniqueId& id, const Bound& bound);

/// What a rank says first when it connects to another one of its communicator.
struct Greeting {
  std::uint64_t magic = 0;  ///< of the communicator
  std::uint64_t index = 0;  ///< 0: for its operations; else the number of the child to be made
  std::int32_t rank = 0;
  // Of a child:
  std::int32_t color = 0, key = 0;
  std::uint32_t port = 0;   ///< where this rank listens for the child's other ranks
  std::uint32_t hasId = 0;  ///< a grown communicator: the id its root has made
  ncclUniqueId id{};
};

/// Where a rank is reached by the others of its communicator, as long as that lives.
class Reception {
 public:
  Outcome open();
  [[nodiscard]] Place place() const { return place_; }
  /// The next connection for `index`. Those for others are kept until their turn.
  Outcome next(std::uint64_t magic, std::uint64_t index, const Bound& bound,
               const std::string& whom, UniqueFd* out, Greeting* greeting);

 private:
  UniqueFd listener_;
  Place place_ = 0;
  std::unique_ptr<Door> door_;
  std::map<std::uint64_t, std::deque<std::pair<UniqueFd, Greeting>>> early_;
};

/// What the ranks of a new communicator need to find each other.
struct Meeting {
  std::uint64_t magic = 0;  ///< differs between communicators
  int rank = 0;
  std::vector<std::uint32_t> ports;  ///< of the receptions, by rank
};

/// Tells the thread behind the id that this rank is here and waits for all others: the barrier of
/// ncclCommInitRank.
Outcome meet(const ncclUniqueId& id, int rank, int nranks, const Reception& reception,
             const Bound& bound, Meeting* out);
/// One connection to each peer, by rank; this rank's own is empty.
Outcome connectAll(const Meeting& meeting, Reception& reception, const Bound& bound,
                   std::vector<UniqueFd>* peers);

}  // namespace standin
