// Traffic among the ranks of a node while the test stops and kills movers and applications.

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;

struct Exchange {
  std::unique_ptr<Buffer> out, in;
  int peer = 0;
};

/// Groups of sends to and receives from all other ranks in two communicators, until the test says
/// that it is over or one of them fails. Behind each group the stream poisons what was sent: bytes
/// taken too late are no longer the send's. Whatever a communicator without an error has received
/// is right.
void peerStorm(const Rank& rank) {
  const std::uint64_t seed = std::stoull(rank.argument("seed", "1"));
  const auto lasts = std::chrono::milliseconds(std::stoi(rank.argument("ms", "4000")));
  auto until = Clock::now() + std::chrono::seconds(30);
  const bool survives = rank.argument("all", "0") == "1";
  constexpr std::size_t kSizes[] = {70'001, 300'007, 1'200'003, 3'000'001};
  ncclComm_t comms[] = {rank.communicator("one"), rank.communicator("two")};
  CUstream streams[] = {newStream(), newStream()};
  std::vector<Exchange> exchanges[2];
  std::mt19937_64 own(seed * 31 + static_cast<unsigned>(rank.rank));
  const auto state = [&] {
    for (ncclComm_t comm : comms) {
      ncclResult_t each = ncclSuccess;
      REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &each));
      if (each != ncclSuccess) return each;
    }
    return ncclSuccess;
  };
  std::uint64_t round = 0, checked = 0;
  bool failed = false;
  for (; !failed; ++round) {
    if (round == 3) {
      until = Clock::now() + lasts;  // however long it took up to here
      rank.postMine("moving");
    }
    // All ranks stop at the same round: rank 0 decides, ahead of the others.
    const std::string go = "round" + std::to_string(round);
    if (survives) {
      if (rank.rank == 0) rank.post(go, Clock::now() < until ? "go" : "over");
      if (rank.await(go, 30000) == "over") break;
    } else {
      REQUIRE(Clock::now() < until + std::chrono::seconds(15), "nobody notices the dead rank");
    }
    for (int c = 0; c < 2; ++c) {
      std::mt19937_64 plan(seed * 1'000'003 + round * 2 + static_cast<unsigned>(c));
      const std::size_t bytes = kSizes[plan() % 4];
      std::vector<Exchange>& now = exchanges[c];
      // Freed and allocated anew, now and then.
      if (now.empty() || now[0].in->bytes() != bytes || own() % 4 == 0) {
        now.clear();
        for (int step = 1; step < rank.ranks; ++step) {
          now.push_back({std::make_unique<Buffer>(bytes, own() % 8),
                         std::make_unique<Buffer>(bytes, own() % 8),
                         (rank.rank + step) % rank.ranks});
        }
      }
      const std::uint64_t tag = round * 2 + static_cast<std::uint64_t>(c);
      for (Exchange& e : now) {
        e.out->fill(seedOf(rank.rank, tag, static_cast<std::uint64_t>(e.peer)), streams[c]);
        e.in->poison(streams[c]);
      }
    }
    for (int c = 0; c < 2 && !failed; ++c) {
      failed = nccl().ncclGroupStart() != ncclSuccess;
      for (Exchange& e : exchanges[c]) {
        const std::size_t bytes = e.out->bytes();
        if (nccl().ncclSend(e.out->data(), bytes, ncclUint8, e.peer, comms[c], streams[c]) !=
                ncclSuccess ||
            nccl().ncclRecv(e.in->data(), bytes, ncclUint8, e.peer, comms[c], streams[c]) !=
                ncclSuccess) {
          failed = true;
        }
      }
      if (nccl().ncclGroupEnd() != ncclSuccess) failed = true;
      for (Exchange& e : exchanges[c]) {
        e.out->poison(streams[c]);
        e.in->fetch(streams[c]);
      }
    }
    for (int c = 0; c < 2; ++c) awaitStream(streams[c], "round " + std::to_string(round), 30000);
    failed = failed || state() != ncclSuccess;
    if (failed) break;
    for (int c = 0; c < 2; ++c) {
      const std::uint64_t tag = round * 2 + static_cast<std::uint64_t>(c);
      for (Exchange& e : exchanges[c]) {
        e.in->requirePattern(seedOf(e.peer, tag, static_cast<std::uint64_t>(rank.rank)),
                             "seed " + std::to_string(seed) + ", round " + std::to_string(round) +
                                 ", from rank " + std::to_string(e.peer));
        ++checked;
      }
    }
  }
  say("checked", std::to_string(checked));
  say("failed", failed ? "1" : "0");
  if (failed) say("error", nccl().ncclGetLastError(comms[0]));
  sayStats();
  for (ncclComm_t comm : comms) {
    const auto began = Clock::now();
    REQUIRE_NCCL(failed ? nccl().ncclCommAbort(comm) : nccl().ncclCommDestroy(comm));
    REQUIRE(Clock::now() - began < std::chrono::seconds(8), "an end took too long");
  }
}

}  // namespace

const std::vector<Scenario> kPeerStormScenarios = {{"peerStorm", peerStorm}};

}  // namespace e2e
