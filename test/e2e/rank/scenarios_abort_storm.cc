// Aborts from another thread at random moments.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;

long msSince(Clock::time_point began) {
  return static_cast<long>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count());
}

/// Aborted at random moments by another thread while operations are pending, in motion, or not even
/// begun by their streams. Every round has a new communicator and new memory. The two threads call
/// NCCL in turns, as PyTorch's watchdog and its process group do.
void abortStorm(const Rank& rank) {
  const std::uint64_t rounds = std::stoull(rank.argument("rounds", "200"));
  std::mt19937_64 random(std::stoull(rank.argument("seed", "1")) * 2 +
                         static_cast<unsigned>(rank.rank));
  ncclComm_t base = rank.communicator("base");
  const int peer = 1 - rank.rank;
  CUstream streams[] = {newStream(), newStream(), newStream()};
  std::uint64_t called = 0, refused = 0;
  long slowest = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    ncclComm_t comm = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(base, 1, rank.rank, &comm, nullptr));
    std::vector<std::unique_ptr<Region>> regions;
    auto region = [&](std::size_t bytes, CUstream stream) -> Region& {
      regions.push_back(std::make_unique<Region>(bytes, regions.size() % 5));
      regions.back()->poison(stream);
      return *regions.back();
    };
    auto gate = std::make_unique<Gate>();
    std::vector<Region*> outputs;
    std::vector<std::function<ncclResult_t()>> calls;
    const std::size_t bytes = 65536 + random() % (random() % 4 == 0 ? 12 << 20 : 400'000);
    auto pick = [&] { return streams[random() % 3]; };
    auto addSend = [&](int to) {
      CUstream stream = pick();
      Region& r = region(bytes, stream);
      calls.push_back([&r, to, comm, stream] {
        return nccl().ncclSend(r.data(), r.bytes(), ncclUint8, to, comm, stream);
      });
    };
    auto addReceive = [&](int from) {
      CUstream stream = pick();
      Region& r = region(bytes, stream);
      outputs.push_back(&r);
      calls.push_back([&r, from, comm, stream] {
        return nccl().ncclRecv(r.data(), r.bytes(), ncclUint8, from, comm, stream);
      });
    };
    // What the two ranks call need not fit: the abort ends it.
    for (std::uint64_t n = 2 + random() % 4; n > 0; --n) {
      switch (random() % 5) {
        case 0:
          addSend(peer);
          break;
        case 1:
          addReceive(peer);
          break;
        case 2:
          addSend(rank.rank);
          addReceive(rank.rank);
          break;
        default: {
          CUstream stream = pick();
          Region &in = region(65537, stream), &out = region(2 * 65537, stream);
          outputs.push_back(&out);
          calls.push_back([&in, &out, comm, stream] {
            return nccl().ncclAllGather(in.data(), out.data(), in.bytes(), ncclUint8, comm, stream);
          });
        }
      }
    }
    for (CUstream stream : streams) awaitStream(stream, "prepared");
    const bool gated = random() % 4 == 0;
    if (gated) gate->hold(streams[random() % 3]);

    std::mutex turn;
    bool aborted = false;
    const auto nap = random() % 4 == 0 ? 0 : random() % 3000;
    rank.barrier(fmt::format("storm{}", round));
    std::thread watchdog([&] {
      ::usleep(static_cast<useconds_t>(nap));
      const std::lock_guard lock(turn);
      const auto began = Clock::now();
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      slowest = std::max(slowest, msSince(began));
      aborted = true;
    });
    for (const auto& call : calls) {
      const std::lock_guard lock(turn);
      if (aborted) break;
      ++called;
      // The peer may have aborted by now: then an error is right as well.
      if (call() != ncclSuccess) ++refused;
    }
    watchdog.join();
    gate->open();
    for (CUstream stream : streams) {
      awaitStream(stream, fmt::format("round {}: a stream after the abort", round), 6000);
    }
    // Released streams mean that nobody writes any more.
    for (Region* output : outputs) output->poison(streams[0]);
    awaitStream(streams[0], "poisoned");
    if (round % 4 == 0) ::usleep(3000);
    std::vector<std::size_t> fetches;
    for (Region* output : outputs) fetches.push_back(output->fetch(streams[0]));
    awaitStream(streams[0], "fetched");
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i]->require(Bytes(outputs[i]->bytes(), Region::kPoison), fetches[i],
                          fmt::format("round {}: written to after the abort", round));
    }
    if (round % 20 == 19) traffic(base, round, streams[1]);
  }
  say("called", std::to_string(called));
  say("refused", std::to_string(refused));
  say("slowestAbortMs", std::to_string(slowest));
  traffic(base, 1 << 20, streams[0]);
  REQUIRE_NCCL(nccl().ncclCommDestroy(base));
}

}  // namespace

const std::vector<Scenario> kAbortStormScenarios = {{"abortStorm", abortStorm}};

}  // namespace e2e
