// Groups of which nothing happens: those with a call that HOCCL refuses, and simulated ones.

#include <dlfcn.h>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSteered = 300001, kSmall = 1003;

ncclResult_t send(const Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  return nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream);
}
ncclResult_t receive(const Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  return nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream);
}

/// A steered and a small transfer each way, and an AllGather; in a group with `group`.
struct Exchange {
  Exchange(const Rank& r, ncclComm_t c, CUstream s) : rank(r), comm(c), stream(s) {}

  void prepare(std::uint64_t n) {
    const int self = rank.rank;
    out.fill(seedOf(self, n), stream);
    smallOut.fill(seedOf(self, n, 1), stream);
    for (Buffer* each : {&in, &smallIn, &gathered}) each->poison(stream);
    awaitStream(stream, "prepared");
  }
  void calls() {
    REQUIRE_NCCL(send(smallOut, peer, comm, stream));
    REQUIRE_NCCL(send(out, peer, comm, stream));
    REQUIRE_NCCL(receive(smallIn, peer, comm, stream));
    REQUIRE_NCCL(receive(in, peer, comm, stream));
    REQUIRE_NCCL(
        nccl().ncclAllGather(out.data(), gathered.data(), kSteered, ncclUint8, comm, stream));
  }
  void fetch(const std::string& what) {
    for (Buffer* each : {&in, &smallIn, &gathered}) each->fetch(stream);
    awaitStream(stream, what);
  }
  void requireNothing(const std::string& what) {
    fetch(what);
    for (Buffer* each : {&in, &smallIn, &gathered}) each->requirePoison(what);
  }
  void requireAll(std::uint64_t n, const std::string& what) {
    fetch(what);
    in.requirePattern(seedOf(peer, n), what);
    smallIn.requirePattern(seedOf(peer, n, 1), what);
  }

  const Rank& rank;
  ncclComm_t comm;
  CUstream stream;
  int peer = 1 - rank.rank;
  Buffer out{kSteered, 1}, in{kSteered, 3}, smallOut{kSmall, 5}, smallIn{kSmall, 7};
  Buffer gathered{2 * kSteered, 1};
};

/// A small send in a group with a call that never reaches NCCL, because HOCCL refuses its buffer:
/// the peer's receive gets what is sent after it.
void refusedInGroup(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer small(kSmall, 1), steered(kSteered, 1);
  void* const nowhere = reinterpret_cast<void*>(std::uintptr_t{4096});
  for (std::uint64_t n = 0; n < 4; ++n) {
    if (rank.rank == 0) {
      small.fill(seedOf(7, n), stream);
      awaitStream(stream, "prepared");
      REQUIRE_NCCL(nccl().ncclGroupStart());
      if (n % 2 == 0) REQUIRE_NCCL(send(small, peer, comm, stream));
      REQUIRE(nccl().ncclSend(nowhere, kSteered, ncclUint8, peer, comm, stream) != ncclSuccess,
              "a buffer that is none was taken");
      if (n % 2 == 1) REQUIRE_NCCL(send(small, peer, comm, stream));
      REQUIRE(nccl().ncclGroupEnd() != ncclSuccess, "the group did not fail");
      small.fill(seedOf(0, n), stream);
      steered.fill(seedOf(0, n, 1), stream);
      REQUIRE_NCCL(send(small, peer, comm, stream));
      REQUIRE_NCCL(send(steered, peer, comm, stream));
      awaitStream(stream, "sent");
    } else {
      small.poison(stream);
      steered.poison(stream);
      REQUIRE_NCCL(receive(small, peer, comm, stream));
      REQUIRE_NCCL(receive(steered, peer, comm, stream));
      small.fetch(stream);
      steered.fetch(stream);
      awaitStream(stream, "received");
      small.requirePattern(seedOf(0, n), "behind a group that failed");
      steered.requirePattern(seedOf(0, n, 1), "behind a group that failed, steered");
    }
  }
  rank.barrier("done");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// ncclGroupSimulateEnd ends the group, and nothing of it happens: what follows goes on as if there
/// had been none.
void simulated(const Rank& rank) {
  auto* const simulateEnd = reinterpret_cast<decltype(&ncclGroupSimulateEnd)>(
      ::dlsym(RTLD_DEFAULT, "ncclGroupSimulateEnd"));
  REQUIRE(simulateEnd, "no ncclGroupSimulateEnd");
  Exchange exchange(rank, rank.communicator(), newStream());
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  for (std::uint64_t n = 0; n < 3; ++n) {
    exchange.prepare(n);
    REQUIRE_NCCL(nccl().ncclGroupStart());
    exchange.calls();
    REQUIRE_NCCL(simulateEnd(&info));
    exchange.requireNothing("a simulated group");
    // One without anything of NCCL's, one of one rank alone, and one that fails.
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(send(exchange.out, exchange.peer, exchange.comm, exchange.stream));
    REQUIRE_NCCL(simulateEnd(&info));
    if (rank.rank == 0) {
      REQUIRE_NCCL(nccl().ncclGroupStart());
      REQUIRE_NCCL(receive(exchange.in, exchange.peer, exchange.comm, exchange.stream));
      REQUIRE_NCCL(send(exchange.smallOut, exchange.peer, exchange.comm, exchange.stream));
      ncclSimInfo_t wrong{};
      wrong.size = sizeof wrong;
      REQUIRE(simulateEnd(&wrong) == ncclInvalidArgument, "an info that is none");
    }
    exchange.requireNothing("simulated groups");
    // Outside of any group now. The ends inside another one are ordinary.
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(nccl().ncclGroupStart());
    exchange.calls();
    REQUIRE_NCCL(simulateEnd(&info));
    if (n == 1) {
      REQUIRE_NCCL(simulateEnd(nullptr));  // an end like any other
    } else {
      REQUIRE_NCCL(nccl().ncclGroupEnd());
    }
    exchange.requireAll(n, "behind simulated groups");
    REQUIRE(simulateEnd(&info) == ncclInvalidUsage, "an end too many");
  }
  // Without a group, so that its depth counts.
  exchange.prepare(9);
  if (rank.rank == 0) {
    REQUIRE_NCCL(send(exchange.out, 1, exchange.comm, exchange.stream));
  } else {
    REQUIRE_NCCL(receive(exchange.in, 0, exchange.comm, exchange.stream));
    exchange.in.fetch(exchange.stream);
  }
  awaitStream(exchange.stream, "behind all groups");
  if (rank.rank == 1) exchange.in.requirePattern(seedOf(0, 9), "behind all groups");
  ncclResult_t state = ncclSuccess;
  REQUIRE_NCCL(nccl().ncclCommGetAsyncError(exchange.comm, &state));
  REQUIRE_NCCL(state);
  sayStats();
  rank.barrier("done");
  REQUIRE_NCCL(nccl().ncclCommDestroy(exchange.comm));
}

}  // namespace

const std::vector<Scenario> kGroupEndScenarios = {{"refusedInGroup", refusedInGroup},
                                                  {"simulated", simulated}};

}  // namespace e2e
