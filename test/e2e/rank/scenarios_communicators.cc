// Making and ending communicators.

#include <unistd.h>

#include <chrono>
#include <thread>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBytes = 200003;

int rankIn(ncclComm_t comm) {
  int rank = -1;
  REQUIRE_NCCL(nccl().ncclCommUserRank(comm, &rank));
  return rank;
}
int ranksOf(ncclComm_t comm) {
  int ranks = 0;
  REQUIRE_NCCL(nccl().ncclCommCount(comm, &ranks));
  return ranks;
}

/// Every rank sends to the next and receives from the previous, over `comm`.
void around(ncclComm_t comm, std::uint64_t tag) {
  const int rank = rankIn(comm), ranks = ranksOf(comm);
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  CUstream stream = newStream();
  Buffer out(kBytes, 1), in(kBytes, 3);
  out.fill(seedOf(rank, 0, tag), stream);
  in.poison(stream);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, next, comm, stream));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, previous, comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(stream);
  const std::string what = fmt::format("around, tag {}", tag);
  awaitStream(stream, what);
  in.requirePattern(seedOf(previous, 0, tag), what);
}

void blocking(const Rank& rank) {
  cuda();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  REQUIRE_NCCL(
      nccl().ncclCommInitRankConfig(&comm, rank.ranks, rank.uniqueId("world"), rank.rank, &config));
  around(comm, 1);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Non-blocking: creation, split and groups are polled to their end.
void nonBlocking(const Rank& rank) {
  cuda();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr, child = nullptr;
  const ncclUniqueId id = rank.uniqueId("world");
  ncclResult_t result = nccl().ncclCommInitRankConfig(&comm, rank.ranks, id, rank.rank, &config);
  REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
  REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
  around(comm, 1);
  result = nccl().ncclCommSplit(comm, 0, rank.rank, &child, &config);
  REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
  REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
  REQUIRE(child, "no child");
  REQUIRE(awaitReady(child) == ncclSuccess, "{}", nccl().ncclGetLastError(child));
  around(child, 2);
  // Created in a group.
  ncclComm_t third = nullptr;
  const ncclUniqueId another = rank.uniqueId("third");
  REQUIRE_NCCL(nccl().ncclGroupStart());
  result = nccl().ncclCommInitRankConfig(&third, rank.ranks, another, rank.rank, &config);
  REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
  result = nccl().ncclGroupEnd();
  REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
  REQUIRE(awaitReady(third) == ncclSuccess, "{}", nccl().ncclGetLastError(third));
  around(third, 3);
  sayStats();
  for (ncclComm_t each : {third, child, comm}) {
    result = nccl().ncclCommFinalize(each);
    REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
    REQUIRE(awaitReady(each) == ncclSuccess, "{}", nccl().ncclGetLastError(each));
    REQUIRE_NCCL(nccl().ncclCommDestroy(each));
  }
}

/// Four ranks: two colors, a rank without one, a split of a split; the parent goes on beside them.
void split(const Rank& rank) {
  ncclComm_t world = rank.communicator();
  ncclComm_t pair = nullptr, three = nullptr, inner = nullptr;
  REQUIRE_NCCL(nccl().ncclCommSplit(world, rank.rank % 2, rank.rank, &pair, nullptr));
  REQUIRE(ranksOf(pair) == 2 && rankIn(pair) == rank.rank / 2, "{} of {}", rankIn(pair),
          ranksOf(pair));
  around(pair, 10 + static_cast<std::uint64_t>(rank.rank % 2));
  const int color = rank.rank == 3 ? NCCL_SPLIT_NOCOLOR : 7;
  REQUIRE_NCCL(nccl().ncclCommSplit(world, color, -rank.rank, &three, nullptr));
  REQUIRE((three == nullptr) == (rank.rank == 3), "rank {}", rank.rank);
  if (three) {
    REQUIRE(ranksOf(three) == 3 && rankIn(three) == 2 - rank.rank, "{} of {}", rankIn(three),
            ranksOf(three));
    around(three, 20);
  }
  around(world, 30);
  REQUIRE_NCCL(nccl().ncclCommSplit(pair, 0, 1 - rankIn(pair), &inner, nullptr));
  around(inner, 40 + static_cast<std::uint64_t>(rank.rank % 2));
  around(pair, 50 + static_cast<std::uint64_t>(rank.rank % 2));
  sayStats();
  for (ncclComm_t comm : {world, inner, three, pair}) {
    if (comm) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
}

/// Two communicators created in one group, then a split inside a group.
void createdInGroup(const Rank& rank) {
  cuda();
  ncclComm_t first = nullptr, second = nullptr, child = nullptr;
  const ncclUniqueId a = rank.uniqueId("a"), b = rank.uniqueId("b");
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclCommInitRank(&first, rank.ranks, a, rank.rank));
  REQUIRE_NCCL(nccl().ncclCommInitRank(&second, rank.ranks, b, rank.rank));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  around(first, 1);
  around(second, 2);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclCommSplit(first, 0, rank.rank, &child, nullptr));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  around(child, 3);
  sayStats();
  for (ncclComm_t comm : {first, second, child}) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Several alive at once, finalized and destroyed in another order, and new ones after them.
void several(const Rank& rank) {
  std::vector<ncclComm_t> comms;
  for (int i = 0; i < 4; ++i) comms.push_back(rank.communicator("c" + std::to_string(i)));
  for (std::uint64_t i : {2, 0, 3, 1, 2}) around(comms[i], 10 + i);
  for (std::size_t i : {1, 3}) {
    REQUIRE_NCCL(nccl().ncclCommFinalize(comms[i]));
    REQUIRE_NCCL(nccl().ncclCommDestroy(comms[i]));
  }
  comms[1] = rank.communicator("c4");
  comms[3] = rank.communicator("c5");
  for (std::uint64_t i : {3, 1, 0, 2}) around(comms[i], 20 + i);
  sayStats();
  for (ncclComm_t comm : comms) {
    REQUIRE_NCCL(nccl().ncclCommFinalize(comm));
    REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
}

/// `ended` communicators one after the other, of which the first carries something.
void manyEnded(const Rank& rank) {
  const int ended = std::stoi(rank.argument("ended", "257"));
  for (int i = 0; i < ended; ++i) {
    const ncclComm_t comm = rank.communicator("c" + std::to_string(i));
    if (i == 0) around(comm, 1);
    REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
  sayStats();
}

/// A communicator of one rank: everything is NCCL's.
void alone(const Rank&) {
  cuda();
  ncclUniqueId id{};
  ncclComm_t comm = nullptr, child = nullptr;
  REQUIRE_NCCL(nccl().ncclGetUniqueId(&id));
  REQUIRE_NCCL(nccl().ncclCommInitRank(&comm, 1, id, 0));
  around(comm, 1);
  REQUIRE_NCCL(nccl().ncclCommSplit(comm, 3, 0, &child, nullptr));
  around(child, 2);
  sayStats();
  for (ncclComm_t each : {comm, child}) REQUIRE_NCCL(nccl().ncclCommDestroy(each));
}

/// A receive whose sender never comes is ended by an abort; what is made afterwards works.
void abortPending(const Rank& rank) {
  const bool byThread = rank.argument("by", "self") == "thread";
  ncclComm_t comm = rank.communicator(), bystander = rank.communicator("bystander");
  CUstream stream = newStream();
  Buffer buffer(kBytes, 1);
  if (rank.rank == 1) {
    buffer.poison(stream);
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
    buffer.fetch(stream);
    requireBusy(stream, 200, "a receive without a sender");
    const auto began = Clock::now();
    if (byThread) {
      std::thread aborter([&] {
        ::usleep(200'000);
        REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      });
      awaitStream(stream, "aborted by another thread", 5000);
      aborter.join();
    } else {
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      awaitStream(stream, "aborted", 5000);
    }
    const auto took =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
    REQUIRE(took < 5000, "the abort took {} ms", took);
    buffer.requirePoison("an aborted receive");
    rank.post("aborted");
  } else {
    rank.await("aborted");
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
  around(bystander, 1);
  ncclComm_t next = rank.communicator("next");
  around(next, 2);
  sayStats();
  for (ncclComm_t each : {next, bystander}) REQUIRE_NCCL(nccl().ncclCommDestroy(each));
}

/// A send without a receiver, aborted while its chunks lie in the slots; the pair stays usable.
void abortSend(const Rank& rank) {
  ncclComm_t comm = rank.communicator(), bystander = rank.communicator("bystander");
  CUstream stream = newStream();
  if (rank.rank == 0) {
    Buffer buffer(96 << 20, 1);
    buffer.fill(1, stream);
    REQUIRE_NCCL(nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, 1, comm, stream));
    requireBusy(stream, 200, "a send without a receiver");
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    awaitStream(stream, "aborted", 5000);
    rank.post("aborted");
  } else {
    rank.await("aborted");
    // The peer has gone from this communicator, so this cannot end well, but it ends.
    Buffer buffer(96 << 20, 1);
    const ncclResult_t result =
        nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, 0, comm, stream);
    if (result == ncclSuccess) {
      awaitStream(stream, "a receive from a rank that has aborted", 5000);
      REQUIRE(awaitError(comm, 5000) != ncclSuccess, "no error");
    }
    say("error", nccl().ncclGetLastError(comm));
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
  for (std::uint64_t n = 0; n < 10; ++n) around(bystander, n);
  REQUIRE_NCCL(nccl().ncclCommDestroy(bystander));
}

}  // namespace

const std::vector<Scenario> kCommunicatorScenarios = {
    {"blocking", blocking},
    {"nonBlocking", nonBlocking},
    {"split", split},
    {"createdInGroup", createdInGroup},
    {"several", several},
    {"manyEnded", manyEnded},
    {"abortPending", abortPending},
    {"abortSend", abortSend},
    {"alone", alone},
};

}  // namespace e2e
