// Direct copies between GPUs of a node: what only they can get wrong.

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;

/// Rank 0 sends into rank 1's memory once; the test stops rank 0's mover, which has that memory
/// mapped; rank 1 frees it.
void peerStops(const Rank& rank) {
  constexpr std::size_t kBytes = 100003;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  auto* alloc = reinterpret_cast<CUresult (*)(CUdeviceptr*, std::size_t)>(
      ::dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
  auto* free = reinterpret_cast<CUresult (*)(CUdeviceptr)>(::dlsym(RTLD_DEFAULT, "cuMemFree_v2"));
  REQUIRE(alloc && free, "no driver functions to be found");
  CUdeviceptr memory = 0;
  REQUIRE_CU(alloc(&memory, kBytes));
  void* data = reinterpret_cast<void*>(memory);
  if (rank.rank == 0) {
    REQUIRE_NCCL(nccl().ncclSend(data, kBytes, ncclUint8, 1, comm, stream));
  } else {
    REQUIRE_NCCL(nccl().ncclRecv(data, kBytes, ncclUint8, 0, comm, stream));
  }
  awaitStream(stream, "one transfer");
  rank.postMine("moved");
  rank.await("stopped");
  if (rank.rank == std::stoi(rank.argument("frees", "1"))) {
    const auto began = Clock::now();
    REQUIRE_CU(free(memory));
    REQUIRE(Clock::now() - began < std::chrono::seconds(5), "the free took too long");
    rank.post("freed");
  }
  rank.await("going on");
  rank.barrier("over");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// One of the ranks is killed by the test while large copies go; the other must see an error.
void peerDies(const Rank& rank) {
  const int dies = std::stoi(rank.argument("dies", "0"));
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(64 << 20, 1);
  const auto until = Clock::now() + std::chrono::seconds(25);
  for (int n = 0;; ++n) {
    REQUIRE(Clock::now() < until, "transfers with a dead rank go on");
    const ncclResult_t result =
        rank.rank == 0 ? nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, 1, comm, stream)
                       : nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, 0, comm, stream);
    if (result == ncclSuccess) awaitStream(stream, "a transfer with a rank that dies");
    ncclResult_t state = ncclSuccess;
    REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
    if (rank.rank != dies && (result != ncclSuccess || state != ncclSuccess)) break;
    if (n == 1) rank.postMine("moving");
  }
  say("error", nccl().ncclGetLastError(comm));
  const auto began = Clock::now();
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  REQUIRE(Clock::now() - began < std::chrono::seconds(5), "the abort took too long");
}

/// Rank 0 aborts while rank 1's GPU reads from its buffer, and overwrites that behind the send:
/// what rank 1 takes for received are the send's bytes.
void abortSendMidCopy(const Rank& rank) {
  constexpr std::size_t kBytes = 32 << 20;
  for (int round = 0; round < 4; ++round) {
    const std::string name = "abort" + std::to_string(round);
    ncclComm_t comm = rank.communicator(name);
    CUstream stream = newStream();
    Buffer buffer(kBytes, 3);
    if (rank.rank == 0) {
      buffer.fill(7, stream);
    } else {
      buffer.poison(stream);
    }
    awaitStream(stream, "prepared");
    rank.barrier(name);
    if (rank.rank == 0) {
      REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream));
      ::usleep(static_cast<useconds_t>(10'000 * round));
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      comm = nullptr;
      buffer.poison(stream);
      awaitStream(stream, "an aborted send");
    } else {
      REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
      awaitStream(stream, "a receive whose sender aborts");
      ncclResult_t state = ncclSuccess;
      REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
      buffer.fetch(stream);
      awaitStream(stream, "fetched");
      if (state == ncclSuccess) buffer.requirePattern(7, "a receive without an error");
      say("round" + std::to_string(round), state == ncclSuccess ? "received" : "failed");
    }
    rank.barrier("over" + name);
    if (comm) REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
}

/// Rank 1 aborts while rank 0's GPU writes into its buffer. Behind the receive its stream poisons
/// the buffer: were it released before the copy ends, the copy would write over that.
void abortMidCopy(const Rank& rank) {
  constexpr std::size_t kBytes = 32 << 20;
  for (int round = 0; round < 3; ++round) {
    const std::string name = "abort" + std::to_string(round);
    ncclComm_t comm = rank.communicator(name);
    CUstream stream = newStream();
    Buffer buffer(kBytes, 3);
    if (rank.rank == 0) {
      buffer.fill(7, stream);
    } else {
      buffer.poison(stream);
    }
    awaitStream(stream, "prepared");
    rank.barrier(name);
    if (rank.rank == 0) {
      REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream));
      awaitStream(stream, "a send whose receiver aborts");
    } else {
      REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
      ::usleep(static_cast<useconds_t>(5'000 * (round + 1)));
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      comm = nullptr;
      awaitStream(stream, "an aborted receive");
      buffer.poison(stream);
      awaitStream(stream, "poisoned");
      ::usleep(300'000);
      buffer.fetch(stream);
      awaitStream(stream, "fetched");
      buffer.requirePoison("a copy into memory of an operation that was over");
    }
    rank.barrier("over" + name);
    if (comm) REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
}

/// Rank 0 sends from one allocation into eight of rank 1, or (`many` 0) from eight into one. The
/// mover of the other rank maps its own buffer first and then one after the other of those, until
/// the emulated driver refuses.
void refusedImports(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  constexpr std::size_t kBytes = 200003;
  const bool many = rank.rank == std::stoi(rank.argument("many", "1"));
  std::vector<std::unique_ptr<Buffer>> buffers;
  for (std::uint64_t n = 0; n < 8; ++n) {
    if (many || n == 0) buffers.push_back(std::make_unique<Buffer>(kBytes, 3));
    Buffer& buffer = *buffers.back();
    if (rank.rank == 0) {
      buffer.fill(seedOf(0, n), stream);
      REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream));
      awaitStream(stream, "a send of which memory may be refused");
    } else {
      buffer.poison(stream);
      REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
      buffer.fetch(stream);
      awaitStream(stream, "a receive of which memory may be refused");
      buffer.requirePattern(seedOf(0, n), fmt::format("allocation {}", n));
    }
  }
  rank.barrier("moved");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kDirectScenarios = {
    {"refusedImports", refusedImports},
    {"directPeerStops", peerStops},
    {"directPeerDies", peerDies},
    {"directAbortMidCopy", abortMidCopy},
    {"directAbortSendMidCopy", abortSendMidCopy},
};

}  // namespace e2e
