// A communicator that grows. The functions are newer than some headers and are found by name.

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

using GetUniqueId = ncclResult_t (*)(ncclComm_t parent, ncclUniqueId* id);
using Grow = ncclResult_t (*)(ncclComm_t parent, int ranks, const ncclUniqueId* id, int rank,
                              ncclComm_t* comm, ncclConfig_t* config);

template <typename Function>
Function found(const char* name) {
  auto function = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
  REQUIRE(function, "no {}", name);
  return function;
}

/// Ranks 0 and 1 of the world have a communicator of their own, which grows twice: by all other
/// ranks in reverse order, and again out of the same parent. Rank 1 makes the ids. A grown
/// communicator is a parent like others.
void grow(const Rank& rank) {
  const auto getUniqueId = found<GetUniqueId>("ncclCommGetUniqueId");
  const auto commGrow = found<Grow>("ncclCommGrow");
  ncclComm_t world = rank.communicator();
  CUstream stream = newStream();
  ncclComm_t pair = nullptr;
  REQUIRE_NCCL(nccl().ncclCommSplit(world, rank.rank < 2 ? 0 : NCCL_SPLIT_NOCOLOR, rank.rank, &pair,
                                    nullptr));
  if (pair) traffic(pair, 1, stream);
  for (std::uint64_t n = 0; n < 2; ++n) {
    const std::string event = "grown" + std::to_string(n);
    ncclUniqueId id;
    if (rank.rank == 1) {
      REQUIRE_NCCL(getUniqueId(pair, &id));
      rank.post(event, std::string(id.internal, sizeof id.internal));
    } else {
      const std::string text = rank.await(event);
      REQUIRE(text.size() == sizeof id.internal, "an id of {} bytes", text.size());
      std::memcpy(id.internal, text.data(), sizeof id.internal);
    }
    const int place = rank.ranks + 1 - rank.rank;  // of those that join
    ncclComm_t grown = nullptr;
    REQUIRE_NCCL(
        pair ? commGrow(pair, rank.ranks, rank.rank == 1 ? &id : nullptr, -1, &grown, nullptr)
             : commGrow(nullptr, rank.ranks, &id, place, &grown, nullptr));
    REQUIRE(rankOf(grown) == (pair ? rank.rank : place) && ranksOf(grown) == rank.ranks, "{} of {}",
            rankOf(grown), ranksOf(grown));
    traffic(grown, 10 + n, stream);
    ncclComm_t child = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(grown, 0, -rankOf(grown), &child, nullptr));
    traffic(child, 20 + n, stream);
    rank.barrier(event + "done");
  }
  sayStats();
  for (ncclComm_t comm : {pair, world}) {
    if (comm) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
}

}  // namespace

const std::vector<Scenario> kGrowScenarios = {{"grow", grow}};

}  // namespace e2e
