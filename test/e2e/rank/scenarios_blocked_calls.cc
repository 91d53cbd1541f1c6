// Calls that wait for room while their communicator is aborted by another thread.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBytes = 100001;

/// More operations than the op ring holds, to a mover that is stopped. The abort ends the mover.
void ringFull(const Rank& rank) {
  constexpr int kOps = 5000;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer out(64 << 10);
  out.fill(1, stream);
  awaitStream(stream, "the pattern");
  rank.postMine("ready");
  rank.await("stopped");
  if (rank.rank == 1) {
    rank.await("over", 40000);
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    return;
  }
  std::atomic<bool> done{false};
  std::thread worker([&] {
    useDevice();
    nccl().ncclGroupStart();
    for (int i = 0; i < kOps; ++i) {
      nccl().ncclSend(out.data(), out.bytes(), ncclUint8, 1, comm, stream);
    }
    nccl().ncclGroupEnd();
    done = true;
  });
  ::usleep(500'000);
  REQUIRE(!done, "{} operations fit into the ring of a mover that takes none", kOps);
  const auto began = Clock::now();
  nccl().ncclCommAbort(comm);
  worker.join();
  const auto took = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - began).count();
  REQUIRE(took < 15, "the abort and the call it ends took {} s", took);
  rank.post("over");
}

/// Two receives fill the pool, a third waits for room. Its communicator is aborted, and the next one
/// gets what that one had in the mover.
void poolReused(const Rank& rank) {
  ncclComm_t one = rank.communicator("one"), two = rank.communicator("two");
  CUstream first = newStream(), second = newStream(), third = newStream();
  Buffer a(kBytes), b(kBytes), c(kBytes);
  c.poison(third);
  awaitStream(third, "poison");
  std::atomic<int> answer{-1};
  std::thread worker([&] {
    useDevice();
    REQUIRE_NCCL(nccl().ncclRecv(a.data(), kBytes, ncclUint8, 1 - rank.rank, one, first));
    REQUIRE_NCCL(nccl().ncclRecv(b.data(), kBytes, ncclUint8, 1 - rank.rank, one, second));
    answer = nccl().ncclRecv(c.data(), kBytes, ncclUint8, 1 - rank.rank, two, third);
  });
  ::usleep(500'000);
  REQUIRE(answer == -1, "the third receive found room: {}", answer.load());
  nccl().ncclCommAbort(two);
  rank.barrier("two aborted");
  ncclComm_t three = rank.communicator("three");
  nccl().ncclCommAbort(one);
  worker.join();
  REQUIRE(answer != ncclSuccess, "a receive of an aborted communicator succeeds");
  Buffer out(kBytes), in(kBytes);
  out.fill(seedOf(rank.rank, 3), first);
  in.poison(first);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, 1 - rank.rank, three, first));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, 1 - rank.rank, three, first));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(first);
  c.fetch(first);
  awaitStream(first, "the communicator made last");
  in.requirePattern(seedOf(1 - rank.rank, 3), "the communicator made last");
  c.requirePoison("the receive that was refused");
  REQUIRE_NCCL(nccl().ncclCommDestroy(three));
}

}  // namespace

const std::vector<Scenario> kBlockedCallScenarios = {
    {"ringFull", ringFull},
    {"poolReused", poolReused},
};

}  // namespace e2e
