// Sends and receives on both sides of HOCCL_MIN_BYTES: those of one pair that differ in it, and
// correct mixes.

#include <signal.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kLarge = 100003, kSmall = 1003;

ncclResult_t call(bool send, const Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  return send ? nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream)
              : nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream);
}

/// One correct transfer from rank 0 to rank 1, or back.
void transfer(const Rank& rank, std::size_t bytes, bool back, std::uint64_t n, ncclComm_t comm,
              CUstream stream) {
  const bool send = (rank.rank == 0) != back;
  Buffer buffer(bytes, 1);
  if (send) {
    buffer.fill(seedOf(rank.rank, n), stream);
  } else {
    buffer.poison(stream);
  }
  REQUIRE_NCCL(call(send, buffer, 1 - rank.rank, comm, stream));
  buffer.fetch(stream);
  awaitStream(stream, "a correct transfer");
  if (!send) buffer.requirePattern(seedOf(1 - rank.rank, n), "a correct transfer");
}

/// Rank 0 sends `sent` bytes, rank 1 wants `wanted`; `first` comes first. Both learn of it.
void threshold(const Rank& rank) {
  const std::size_t sent = std::stoul(rank.argument("sent", ""));
  const std::size_t wanted = std::stoul(rank.argument("wanted", ""));
  const int first = std::stoi(rank.argument("first", "0"));
  const bool grouped = rank.argument("grouped", "0") == "1";
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  if (rank.argument("mixed", "0") == "1") {
    for (std::uint64_t n = 0; n < 12; ++n) {
      transfer(rank, n % 3 == 1 ? kLarge : kSmall, n % 4 == 3, n, comm, stream);
    }
  }
  Buffer buffer(rank.rank == 0 ? sent : wanted, 1);
  buffer.poison(stream);
  awaitStream(stream, "prepared");
  if (rank.rank != first) {
    rank.awaitOf("enqueued", first);
    ::usleep(std::stoul(rank.argument("delayMs", "300")) * 1000);
  }
  // The steered side's stream does not come to the operation.
  Gate gate;
  const bool held = rank.argument("held", "0") == "1" && buffer.bytes() >= kLarge;
  if (held) gate.hold(stream);
  if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
  ncclResult_t result = call(rank.rank == 0, buffer, 1 - rank.rank, comm, stream);
  if (grouped) {
    // Of the group nothing may have happened yet, so that nothing is said before its end.
    REQUIRE_NCCL(result);
    result = nccl().ncclGroupEnd();
  }
  const bool refused = result != ncclSuccess;
  rank.postMine("enqueued");
  const bool dies = rank.argument("dies", "0") == "1";
  if (dies && rank.rank == first) {
    ::usleep(500'000);  // what it waits in is told
    ::raise(SIGKILL);
  }
  if (result == ncclSuccess) result = awaitError(comm, 5000);
  REQUIRE(result != ncclSuccess && result != ncclInProgress, "no error within 5 s: state {}",
          static_cast<int>(result));
  say("refused", refused ? "1" : "0");
  say("result", std::to_string(static_cast<int>(result)));
  say("error", nccl().ncclGetLastError(comm));
  REQUIRE(awaitError(comm, 5000) != ncclSuccess, "the communicator is not in error");
  if (!dies) rank.barrier("seen");
  if (held) gate.open();
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  awaitStream(stream, "after the abort");
}

/// One transfer of a random mix.
struct Mixed {
  bool send;
  std::uint64_t seed;
  int stream;
  std::unique_ptr<Buffer> buffer;
};

/// Random sizes on both sides of the threshold, in random groups on three streams, both ways, with
/// pauses that differ between the ranks and are long enough for stalls to be told.
void mixedSizes(const Rank& rank) {
  const auto seed = static_cast<std::uint32_t>(std::stoul(rank.argument("seed", "1")));
  std::mt19937 common(seed), own(seed * 7919 + static_cast<std::uint32_t>(rank.rank));
  ncclComm_t comm = rank.communicator();
  CUstream streams[3] = {newStream(), newStream(), newStream()};
  const int rounds = std::stoi(rank.argument("rounds", "150"));
  std::uint64_t n = 0;
  for (int round = 0; round < rounds; ++round) {
    const bool grouped = common() % 2 == 0;
    const std::uint32_t calls = grouped ? 1 + common() % 6 : 1;
    std::vector<Mixed> mix;
    for (std::uint32_t i = 0; i < calls; ++i, ++n) {
      const bool send = (common() % 2 == 0) == (rank.rank == 0);
      const int stream = static_cast<int>(common() % 3);
      const std::size_t bytes =
          common() % 2 == 0 ? 1 + common() % 65535 : 65536 + common() % 200000;
      mix.push_back({send, seedOf(send ? rank.rank : 1 - rank.rank, n), stream,
                     std::make_unique<Buffer>(bytes, 1)});
      Mixed& each = mix.back();
      if (each.send) {
        each.buffer->fill(each.seed, streams[each.stream]);
      } else {
        each.buffer->poison(streams[each.stream]);
      }
    }
    for (CUstream each : streams) awaitStream(each, "prepared");
    if (own() % 5 == 0) ::usleep(own() % 200'000);
    if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
    for (const Mixed& each : mix) {
      REQUIRE_NCCL(call(each.send, *each.buffer, 1 - rank.rank, comm, streams[each.stream]));
      if (own() % 40 == 0) ::usleep(own() % 150'000);
    }
    if (grouped) REQUIRE_NCCL(nccl().ncclGroupEnd());
    for (const Mixed& each : mix) each.buffer->fetch(streams[each.stream]);
    for (CUstream each : streams) awaitStream(each, "a mix");
    for (const Mixed& each : mix) {
      if (!each.send) each.buffer->requirePattern(each.seed, "a mix");
    }
  }
  ncclResult_t state = ncclSuccess;
  REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
  REQUIRE_NCCL(state);
  sayStats();
  rank.barrier("done");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A captured send and its receive are at other places among the calls of the two ranks than among
/// what runs; the calls of a group that fails did not happen.
void notCounted(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream(), captured = newStream();
  const int peer = 1 - rank.rank;
  const bool send = rank.rank == 0;
  Buffer small(kSmall, 1), large(kLarge, 1);
  if (send) {
    large.fill(seedOf(0, 1), stream);
  } else {
    large.poison(stream);
  }
  awaitStream(stream, "prepared");
  const auto capture = [&] {
    REQUIRE_CU(cuda().streamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (int i = 0; i < 3; ++i) REQUIRE_NCCL(call(send, small, peer, comm, captured));
    CUgraph graph = nullptr;
    REQUIRE_CU(cuda().streamEndCapture(captured, &graph));
    REQUIRE_CU(cuda().graphDestroy(graph));
  };
  if (send) {
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(call(true, small, peer, comm, stream));
    REQUIRE(nccl().ncclSend(small.data(), kSmall, ncclUint8, 7, comm, stream) != ncclSuccess,
            "a send to a rank that does not exist");
    REQUIRE(nccl().ncclGroupEnd() != ncclSuccess, "a group with a call that failed");
    rank.postMine("failed");
    rank.awaitOf("enqueued", 1);
    ::usleep(300'000);  // rank 1's receive is told meanwhile
    capture();
    ::usleep(300'000);
  } else {
    rank.awaitOf("failed", 0);
  }
  REQUIRE_NCCL(call(send, large, peer, comm, stream));
  rank.postMine("enqueued");
  large.fetch(stream);
  awaitStream(stream, "the transfer");
  if (!send) {
    large.requirePattern(seedOf(0, 1), "the transfer");
    capture();
  }
  for (std::uint64_t n = 2; n < 8; ++n) {
    transfer(rank, n % 2 ? kLarge : kSmall, false, n, comm, stream);
  }
  ncclResult_t state = ncclSuccess;
  REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
  REQUIRE_NCCL(state);
  rank.barrier("done");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kThresholdScenarios = {
    {"threshold", threshold}, {"mixedSizes", mixedSizes}, {"notCounted", notCounted}};

}  // namespace e2e
