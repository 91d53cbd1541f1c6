// What the application thread does inside a warm steered call.

#include <string>
#include <thread>

#include "test/e2e/rank/call_watch.h"
#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kFewBytes = 200003;
constexpr std::size_t kSmallBytes = 1003;  // NCCL's
constexpr std::uint64_t kWarm = 40, kWatched = 200;

/// Sends and receives of `bytes`, and such as are left to NCCL, single and in groups, there on
/// demand with some of the rank to itself; only the calls themselves are watched. Destroys
/// `control`.
void loop(const Rank& rank, std::size_t bytes, ncclComm_t comm, ncclComm_t control, bool watched) {
  useDevice();
  const bool toItself = rank.argument("toItself", "0") == "1";
  const bool systemCalls = watched && CallWatch::watchSystemCalls();
  CUstream stream = newStream(), second = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(bytes, 1), in(bytes, 3), smallOut(kSmallBytes, 1), smallIn(kSmallBytes, 1);
  const auto send = [&](const Buffer& buffer) {
    return nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream);
  };
  const auto receive = [&](const Buffer& buffer) {
    return nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, second);
  };
  Buffer ownOut(kFewBytes, 5), ownIn(kFewBytes, 7);
  CallWatch::Counts sum;
  for (std::uint64_t n = 0; n < kWarm + kWatched; ++n) {
    const bool grouped = n % 2 == 0;
    out.fill(seedOf(rank.rank, n), stream);
    in.poison(second);
    smallOut.fill(seedOf(rank.rank, n, 1), stream);
    smallIn.poison(second);
    ownOut.fill(seedOf(rank.rank, n, 2), stream);
    ownIn.poison(stream);
    awaitStream(stream, "prepared");
    awaitStream(second, "prepared");
    if (watched) CallWatch::start();
    ncclResult_t results[8] = {};
    if (grouped) results[0] = nccl().ncclGroupStart();
    if (grouped && toItself) {
      results[6] = nccl().ncclSend(ownOut.data(), kFewBytes, ncclUint8, rank.rank, comm, stream);
      results[7] = nccl().ncclRecv(ownIn.data(), kFewBytes, ncclUint8, rank.rank, comm, stream);
    }
    // Where there is no group one side sends first, the other receives first.
    if (rank.rank == 0) {
      results[1] = send(out);
      results[2] = send(smallOut);
    }
    results[3] = receive(in);
    results[4] = receive(smallIn);
    if (rank.rank == 1) {
      results[1] = send(out);
      results[2] = send(smallOut);
    }
    if (grouped) results[5] = nccl().ncclGroupEnd();
    const CallWatch::Counts counts = CallWatch::stop();
    for (ncclResult_t result : results) REQUIRE_NCCL(result);
    if (n >= kWarm) {
      sum.allocations += counts.allocations;
      sum.locks += counts.locks;
      sum.systemCalls += counts.systemCalls;
      sum.seen += counts.seen;
      if (sum.firstSystemCall < 0) sum.firstSystemCall = counts.firstSystemCall;
    }
    in.fetch(second);
    smallIn.fetch(second);
    ownIn.fetch(stream);
    awaitStream(second, "watched");
    awaitStream(stream, "watched");
    if (grouped && toItself) ownIn.requirePattern(seedOf(rank.rank, n, 2), "watched, to itself");
    in.requirePattern(seedOf(peer, n), "watched");
    smallIn.requirePattern(seedOf(peer, n, 1), "watched");
  }
  // The same watch over what does allocate, lock and enter the kernel.
  if (watched) CallWatch::start();
  const ncclResult_t destroyed = nccl().ncclCommDestroy(control);
  char text[16];
  if (watched) nccl().hocclStatsJson(text, sizeof text);
  const CallWatch::Counts counts = CallWatch::stop();
  REQUIRE_NCCL(destroyed);
  if (!watched) return;
  say("controlAllocations", std::to_string(counts.allocations));
  say("controlLocks", std::to_string(counts.locks));
  say("controlSystemCalls", systemCalls ? std::to_string(counts.systemCalls) : "not watched");
  say("seen", std::to_string(sum.seen));
  say("allocations", std::to_string(sum.allocations));
  say("locks", std::to_string(sum.locks));
  say("systemCalls", systemCalls ? std::to_string(sum.systemCalls) : "not watched");
  say("firstSystemCall", std::to_string(sum.firstSystemCall));
}

/// A receive that stays pending keeps the mover from sleeping, so that nothing has to wake it.
void launchPath(const Rank& rank) {
  ncclComm_t comm = rank.communicator("busy"), awake = rank.communicator("awake");
  ncclComm_t control = rank.communicator("control");
  const std::size_t bytes = std::stoul(rank.argument("bytes", std::to_string(kFewBytes)));
  CUstream stream = newStream();
  Buffer buffer(kFewBytes, 1);
  buffer.poison(stream);
  buffer.fill(seedOf(rank.rank, 0, 9), stream);
  if (rank.rank == 0) {
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), kFewBytes, ncclUint8, 1, awake, stream));
  }
  // In a thread of its own, since watching its system calls cannot be ended.
  std::thread([&] { loop(rank, bytes, comm, control, rank.rank == 0); }).join();
  if (rank.rank == 1) {
    REQUIRE_NCCL(nccl().ncclSend(buffer.data(), kFewBytes, ncclUint8, 0, awake, stream));
  }
  buffer.fetch(stream);
  awaitStream(stream, "the receive that kept the mover awake");
  buffer.requirePattern(seedOf(1, 0, 9), "the receive that kept the mover awake");
  sayStats();
  for (ncclComm_t each : {comm, awake}) REQUIRE_NCCL(nccl().ncclCommDestroy(each));
}

}  // namespace

const std::vector<Scenario> kLaunchScenarios = {{"launchPath", launchPath}};

}  // namespace e2e
