// Calls that stay with NCCL, and what is counted.

#include <unistd.h>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSteered = 300001;
constexpr std::size_t kSmall = 1003;
constexpr std::size_t kRingBytes = 64 << 10;

/// One send and receive of `bytes` both ways in a group.
void exchange(const Rank& rank, ncclComm_t comm, std::size_t bytes, std::uint64_t tag) {
  const int peer = 1 - rank.rank;
  CUstream stream = newStream();
  Buffer out(bytes, 1), in(bytes, 3);
  out.fill(seedOf(rank.rank, 0, tag), stream);
  in.poison(stream);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), bytes, ncclUint8, peer, comm, stream));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), bytes, ncclUint8, peer, comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(stream);
  const std::string what = fmt::format("{} bytes, tag {}", bytes, tag);
  awaitStream(stream, what);
  in.requirePattern(seedOf(peer, 0, tag), what);
}

/// On a capturing stream everything is NCCL's, whatever its size, and nothing is enqueued.
void capture(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  const int peer = 1 - rank.rank;
  exchange(rank, comm, kSteered, 1);
  CUstream stream = newStream();
  Buffer out(kSteered, 1), in(kSteered, 3);
  in.poison(stream);
  awaitStream(stream, "before the capture");
  for (const CUstreamCaptureMode mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CU_STREAM_CAPTURE_MODE_RELAXED}) {
    for (const bool grouped : {false, true}) {
      REQUIRE_CU(cuda().streamBeginCapture(stream, mode));
      if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
      REQUIRE_NCCL(nccl().ncclSend(out.data(), kSteered, ncclUint8, peer, comm, stream));
      REQUIRE_NCCL(nccl().ncclRecv(in.data(), kSteered, ncclUint8, peer, comm, stream));
      if (grouped) REQUIRE_NCCL(nccl().ncclGroupEnd());
      CUgraph graph = nullptr;
      REQUIRE_CU(cuda().streamEndCapture(stream, &graph));
      REQUIRE(graph, "the capture gave no graph");
      REQUIRE_CU(cuda().graphDestroy(graph));
    }
  }
  in.fetch(stream);
  awaitStream(stream, "after the captures");
  in.requirePoison("a captured receive ran");
  exchange(rank, comm, kSteered, 2);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A call whose driver call fails leaves nothing in the op ring that would stop the ones behind it,
/// more of them than the ring holds.
void deadStream(const Rank& rank) {
  constexpr int kMoreThanTheRingHolds = 5000;
  ncclComm_t broken = rank.communicator("broken"), sound = rank.communicator("sound");
  Buffer buffer(kRingBytes);
  if (rank.rank == 0) {
    CUstream stream = newStream();
    REQUIRE_CU(cuda().streamDestroy(stream));
    const ncclResult_t result =
        nccl().ncclSend(buffer.data(), kRingBytes, ncclUint8, 1, broken, stream);
    REQUIRE(result != ncclSuccess && result != ncclInProgress, "a send on a dead stream: {}",
            static_cast<int>(result));
  }
  CUstream stream = newStream();
  for (int i = 0; i < kMoreThanTheRingHolds; ++i) {
    REQUIRE_NCCL(rank.rank == 0
                     ? nccl().ncclSend(buffer.data(), kRingBytes, ncclUint8, 1, sound, stream)
                     : nccl().ncclRecv(buffer.data(), kRingBytes, ncclUint8, 0, sound, stream));
    if (i % 100 == 99) awaitStream(stream, fmt::format("operation {}", i));
  }
  exchange(rank, sound, kSteered, 3);
  REQUIRE_NCCL(nccl().ncclCommAbort(broken));
  REQUIRE_NCCL(nccl().ncclCommDestroy(sound));
}

/// What NCCL refuses or ignores reaches it as it is.
void oddCalls(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer buffer(kSteered, 0);
  auto sendOf = [&](std::size_t count, int type, int to) {
    return nccl().ncclSend(buffer.data(), count, static_cast<ncclDataType_t>(type), to, comm,
                           stream);
  };
  auto receiveOf = [&](std::size_t count, int type, int from) {
    return nccl().ncclRecv(buffer.data(), count, static_cast<ncclDataType_t>(type), from, comm,
                           stream);
  };
  for (const int who : {-1, rank.ranks, 1000000}) {
    REQUIRE(sendOf(kSteered, ncclUint8, who) == ncclInvalidArgument, "send to {}", who);
    REQUIRE(receiveOf(kSteered, ncclUint8, who) == ncclInvalidArgument, "receive from {}", who);
  }
  for (const int type : {99, -1}) {
    REQUIRE(sendOf(kSteered, type, peer) == ncclInvalidArgument, "send of type {}", type);
    REQUIRE(receiveOf(kSteered, type, peer) == ncclInvalidArgument, "receive of type {}", type);
  }
  if (rank.rank == 0) {
    REQUIRE_NCCL(sendOf(0, ncclFloat32, peer));
  } else {
    REQUIRE_NCCL(receiveOf(0, ncclFloat32, peer));
  }
  // One byte less than what is steered, and a rank's own data to itself.
  exchange(rank, comm, (64 << 10) - 1, 1);
  Buffer in(kSteered, 1);
  buffer.fill(7, stream);
  in.poison(stream);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(sendOf(kSteered, ncclUint8, rank.rank));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kSteered, ncclUint8, rank.rank, comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(stream);
  awaitStream(stream, "to itself");
  in.requirePattern(7, "to itself");
  exchange(rank, comm, 64 << 10, 2);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A known number of operations of each kind on two communicators.
void counters(const Rank& rank) {
  ncclComm_t first = rank.communicator("first"), second = rank.communicator("second");
  sayStats("before");
  for (std::uint64_t n = 0; n < 3; ++n) exchange(rank, first, kSteered, n);
  for (std::uint64_t n = 0; n < 2; ++n) exchange(rank, first, kSmall, n);
  exchange(rank, second, 64 << 10, 9);
  sayStats("alive");
  for (ncclComm_t comm : {first, second}) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  sayStats();
}

/// What a job does where steering may be off: it has to work by NCCL alone. Says what was seen.
void plain(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  exchange(rank, comm, kSteered, 1);
  exchange(rank, comm, kSmall, 2);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// HOCCL_STRICT=1 where nothing can be steered: a steerable operation is an error, a small one is
/// not.
void strict(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  exchange(rank, comm, kSmall, 1);
  Buffer buffer(kSteered, 0);
  const ncclResult_t result =
      rank.rank == 0 ? nccl().ncclSend(buffer.data(), kSteered, ncclUint8, peer, comm, stream)
                     : nccl().ncclRecv(buffer.data(), kSteered, ncclUint8, peer, comm, stream);
  say("result", std::to_string(static_cast<int>(result)));
  say("error", nccl().ncclGetLastError(comm));
  awaitStream(stream, "after the refused operation", 2000);
  exchange(rank, comm, kSmall, 2);
  // Strict mode says nothing of what a rank does with itself, nor of a reduction.
  Buffer in(kSteered, 1), sums(kSteered, 0);
  buffer.fill(7, stream);
  in.poison(stream);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kSteered, ncclUint8, rank.rank, comm, stream));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kSteered, ncclUint8, rank.rank, comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  REQUIRE_NCCL(
      nccl().ncclAllReduce(buffer.data(), sums.data(), kSteered, ncclUint8, ncclMax, comm, stream));
  sums.fetch(stream);
  awaitStream(stream, "AllReduce with HOCCL_STRICT=1");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kCallScenarios = {
    {"capture", capture}, {"oddCalls", oddCalls}, {"counters", counters},
    {"plain", plain},     {"strict", strict},     {"deadStream", deadStream},
};

}  // namespace e2e
