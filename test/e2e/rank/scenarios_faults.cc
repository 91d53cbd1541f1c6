// Programs that do not fit together, and deaths. The test kills; a rank says what it sees.

#include <unistd.h>

#include <chrono>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBytes = 300001;

/// The stream is released and the communicator in error within the bound; says what error.
void requireFailure(ncclComm_t comm, CUstream stream, int timeoutMs, const std::string& what) {
  const auto began = Clock::now();
  awaitStream(stream, what, timeoutMs);
  const ncclResult_t error = awaitError(comm, timeoutMs);
  REQUIRE(error != ncclSuccess && error != ncclInProgress, "{}: state {} after {} ms", what,
          static_cast<int>(error), timeoutMs);
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  REQUIRE(took <= timeoutMs, "{}: {} ms", what, took);
  say("result", std::to_string(static_cast<int>(error)));
  say("error", nccl().ncclGetLastError(comm));
  say("tookMs", std::to_string(took));
}

/// The two sides of a transfer name different sizes; `first` is the side that comes first.
void mismatch(const Rank& rank) {
  const std::size_t sent = std::stoul(rank.argument("sent", ""));
  const std::size_t wanted = std::stoul(rank.argument("wanted", ""));
  const int first = std::stoi(rank.argument("first", "0"));
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(rank.rank == 0 ? sent : wanted, 1);
  buffer.poison(stream);
  awaitStream(stream, "prepared");
  if (rank.rank != first) {
    rank.awaitOf("enqueued", first);
    ::usleep(200'000);
  }
  if (rank.rank == 0) {
    REQUIRE_NCCL(nccl().ncclSend(buffer.data(), sent, ncclUint8, 1, comm, stream));
  } else {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), wanted, ncclUint8, 0, comm, stream));
  }
  rank.postMine("enqueued");
  requireFailure(comm, stream, 10000, "sizes that differ");
  // A communicator in error refuses what comes next.
  const ncclResult_t again =
      rank.rank == 0 ? nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream)
                     : nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream);
  REQUIRE(again != ncclSuccess, "a communicator in error goes on");
  rank.barrier("seen");
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

/// Rank 1 has a receive pending that rank 0 does not answer; the test kills one of the movers.
void moverDies(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream(), checked = newStream();
  const int peer = 1 - rank.rank;
  // The movers know each other.
  Buffer out(kBytes, 1), in(kBytes, 3);
  out.fill(seedOf(rank.rank, 0), checked);
  in.poison(checked);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, peer, comm, checked));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, peer, comm, checked));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(checked);
  awaitStream(checked, "before the death");
  in.requirePattern(seedOf(peer, 0), "before the death");
  if (rank.rank == 1) {
    in.poison(stream);
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, 0, comm, stream));
    requireBusy(stream, 100, "a receive without a sender");
  }
  rank.postMine("pending");
  rank.await("killed");
  if (rank.rank == 1) {
    requireFailure(comm, stream, 5000, "a pending receive");
  } else {
    // Nothing of this rank is pending: it learns of the death from what it tries next.
    const auto until = Clock::now() + std::chrono::seconds(5);
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess && Clock::now() < until) {
      result = nccl().ncclSend(out.data(), kBytes, ncclUint8, 1, comm, stream);
      if (result == ncclSuccess) {
        awaitStream(stream, "a send to a rank without mover", 5000);
        REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &result));
      }
    }
    REQUIRE(result != ncclSuccess, "sends to a rank without mover go on without error");
    say("error", nccl().ncclGetLastError(comm));
  }
  rank.barrier("seen");
  const auto began = Clock::now();
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  REQUIRE(Clock::now() - began < std::chrono::seconds(5), "the abort took too long");
  if (rank.argument("cut", "0") == "1") rank.await("mended");
  // A new communicator gets a new mover, or the movers a new connection.
  ncclComm_t next = rank.communicator("next");
  out.fill(seedOf(rank.rank, 1), checked);
  in.poison(checked);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, peer, next, checked));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, peer, next, checked));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  in.fetch(checked);
  awaitStream(checked, "with a new mover");
  in.requirePattern(seedOf(peer, 1), "with a new mover");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(next));
}

/// Rank 0 is killed by the test while its transfers go; rank 1 must see an error.
void applicationDies(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(64 << 20, 1);
  const auto until = Clock::now() + std::chrono::seconds(20);
  for (int n = 0;; ++n) {
    REQUIRE(Clock::now() < until, "transfers with a dead rank go on");
    if (rank.rank == 0) {
      REQUIRE_NCCL(nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, 1, comm, stream));
      awaitStream(stream, "sending until the end");
    } else {
      const ncclResult_t result =
          nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, 0, comm, stream);
      if (result == ncclSuccess) awaitStream(stream, "a receive from a rank that dies");
      ncclResult_t state = ncclSuccess;
      REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
      if (result != ncclSuccess || state != ncclSuccess) break;
    }
    if (n == 1) rank.postMine("moving");
  }
  say("error", nccl().ncclGetLastError(comm));
  const auto began = Clock::now();
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  REQUIRE(Clock::now() - began < std::chrono::seconds(5), "the abort took too long");
}

/// The test stops a mover, lets time pass and has it go on.
void moverStops(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(5000003, 1), in(5000003, 3);
  rank.postMine("ready");
  rank.await("stopped");
  for (std::uint64_t n = 0; n < 3; ++n) {
    out.fill(seedOf(rank.rank, n), stream);
    in.poison(stream);
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, comm, stream));
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, comm, stream));
    REQUIRE_NCCL(nccl().ncclGroupEnd());
    in.fetch(stream);
    if (n == 0) {
      requireBusy(stream, 300, "a transfer whose mover is stopped");
      rank.postMine("waits");
    }
    awaitStream(stream, "after the mover went on");
    in.requirePattern(seedOf(peer, n), "after the mover went on");
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// The sender is through, destroys and exits before the receiver posts its receive: what fits the
/// slots has gone ahead and still arrives.
void senderLeaves(const Rank& rank) {
  constexpr int kSends = 3;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  if (rank.rank == 0) {
    Buffer buffer(kBytes, 1);
    for (int n = 0; n < kSends; ++n) {
      buffer.fill(seedOf(0, n), stream);
      REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream));
      awaitStream(stream, "a send whose receive has not come");
    }
    REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
    return;
  }
  rank.await("sender gone");
  for (int n = 0; n < kSends; ++n) {
    Buffer buffer(kBytes, 3);
    buffer.poison(stream);
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
    buffer.fetch(stream);
    awaitStream(stream, "a receive from a rank that has left");
    buffer.requirePattern(seedOf(0, n), "from a rank that has left");
  }
  // One more than was sent cannot come.
  Buffer buffer(kBytes, 3);
  const ncclResult_t result = nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream);
  if (result == ncclSuccess) {
    awaitStream(stream, "a receive that nobody sends", 5000);
    REQUIRE(awaitError(comm, 5000) != ncclSuccess, "no error");
  }
  say("error", nccl().ncclGetLastError(comm));
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

/// Rank 0 exits as a program does, with its communicator alive, while rank 1 waits for it.
void peerExits(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(kBytes, 1);
  if (rank.rank == 0) {
    rank.await("pending.1");
    ::usleep(100'000);
    return;
  }
  REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
  rank.postMine("pending");
  requireFailure(comm, stream, 5000, "a receive from a rank that has exited");
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

/// An abort ends a pending receive although a mover (of this rank or of its peer) is stopped.
void abortWhileStopped(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(kBytes, 1);
  if (rank.rank == 1) {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
    requireBusy(stream, 50, "a receive without a sender");
  }
  rank.postMine("pending");
  rank.await("stopped");
  if (rank.rank == 1) {
    const auto began = Clock::now();
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    awaitStream(stream, "aborted with a stopped mover", 5000);
    REQUIRE(Clock::now() - began < std::chrono::seconds(6), "the abort took too long");
    rank.post("aborted");
  } else {
    rank.await("going on");
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
}

/// Ends without a word while a receive is pending.
void leavesPending(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(kBytes, 1);
  if (rank.rank == 1) {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
    requireBusy(stream, 50, "a receive without a sender");
  }
  rank.barrier("pending");
  ::_exit(0);
}

/// Leaves the movers without anything to do until the test has looked at them; with `pending` a
/// receive waits for its sender meanwhile.
void idle(const Rank& rank) {
  const bool pending = rank.argument("pending", "0") == "1";
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer buffer(kBytes, 1);
  buffer.poison(stream);
  if (rank.rank == 0) buffer.fill(1, stream);
  awaitStream(stream, "prepared");
  if (rank.rank == 1 && pending) {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
  }
  rank.postMine("idle");
  rank.await("measured");
  if (rank.rank == 1 && !pending) {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kBytes, ncclUint8, 0, comm, stream));
  }
  if (rank.rank == 0) {
    REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kBytes, ncclUint8, 1, comm, stream));
  }
  buffer.fetch(stream);
  awaitStream(stream, "after the rest", 5000);
  buffer.requirePattern(1, "after the rest");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// More launches than HOCCL_FLAG_POOL has slots: they wait their turn. A group over more streams
/// than that is `tooSmall`: it is refused.
void smallPool(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream a = newStream(), b = newStream();
  const int peer = 1 - rank.rank;
  const bool grouped = rank.argument("grouped", "0") == "1";
  const bool tooSmall = rank.argument("tooSmall", "0") == "1";
  Buffer out(65537, 1), in(65537, 3);
  for (std::uint64_t n = 0; n < 60; ++n) {
    out.fill(seedOf(rank.rank, n), a);
    in.poison(b);
    awaitStream(a, "prepared");
    awaitStream(b, "prepared");
    auto send = [&] {
      REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, comm, a));
    };
    auto receive = [&] {
      REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, comm, b));
    };
    if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
    if (rank.rank == 0) {
      send();
      receive();
    } else {
      receive();
      send();
    }
    const ncclResult_t end = grouped ? nccl().ncclGroupEnd() : ncclSuccess;
    if (tooSmall) {
      say("result", std::to_string(static_cast<int>(end)));
      say("error", nccl().ncclGetLastError(comm));
      awaitStream(a, "a group that was refused", 5000);
      awaitStream(b, "a group that was refused", 5000);
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      return;
    }
    REQUIRE_NCCL(end);
    in.fetch(b);
    awaitStream(a, fmt::format("send {} with a small pool", n), 5000);
    awaitStream(b, fmt::format("receive {} with a small pool", n), 5000);
    in.requirePattern(seedOf(peer, n), "with a small pool");
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kFaultScenarios = {
    {"mismatch", mismatch},
    {"moverDies", moverDies},
    {"applicationDies", applicationDies},
    {"moverStops", moverStops},
    {"senderLeaves", senderLeaves},
    {"leavesPending", leavesPending},
    {"peerExits", peerExits},
    {"abortWhileStopped", abortWhileStopped},
    {"idle", idle},
    {"smallPool", smallPool},
};

}  // namespace e2e
