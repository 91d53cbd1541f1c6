// Communicators that end, or split, while others know little of it yet.

#include <unistd.h>

#include <chrono>
#include <vector>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;

/// Rank 0 ends the communicator before its mover has a link to rank 1's; what rank 1 begins then
/// ends in an error. With `linked` another communicator makes the link first, and the movers sleep
/// when rank 1 begins.
void endsBeforeTheLink(const Rank& rank) {
  ncclComm_t comm = rank.communicator(), other = nullptr;
  const bool linked = rank.argument("linked", "0") == "1";
  if (linked) other = rank.communicator("other");
  rank.barrier("made");
  if (rank.rank == 0) {
    if (rank.argument("by", "abort") == "abort") {
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    } else {
      REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
    }
    rank.post("ended");
  }
  rank.await("ended");
  CUstream stream = newStream();
  if (linked) {
    traffic(other, 1, stream);
    ::usleep(300'000);
    rank.barrier("linked");
  }
  if (rank.rank == 0) {
    rank.await("seen");
    if (other) REQUIRE_NCCL(nccl().ncclCommDestroy(other));
    return;
  }
  Region buffer(96 << 20);
  buffer.poison(stream);
  awaitStream(stream, "prepared");
  const bool send = rank.argument("does", "send") == "send";
  const auto began = Clock::now();
  const ncclResult_t result =
      send ? nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, 0, comm, stream)
           : nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, 0, comm, stream);
  if (result == ncclSuccess) {
    awaitStream(stream, "an operation with a rank that has ended the communicator", 8000);
    REQUIRE(awaitError(comm, 5000) != ncclSuccess, "no error");
  }
  say("error", nccl().ncclGetLastError(comm));
  say("tookMs",
      std::to_string(
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count()));
  rank.post("seen");
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  if (other) REQUIRE_NCCL(nccl().ncclCommDestroy(other));
}

/// One thread has all ranks of a communicator and splits it in one group; one rank or more get no
/// color.
void splitOfOneThread(const Rank& rank) {
  cuda();
  constexpr int kDevices = 4;
  const int colored = std::stoi(rank.argument("colored", "3"));
  std::vector<ncclComm_t> comms(kDevices), parts(kDevices);
  std::vector<int> list;
  for (int i = 0; i < kDevices; ++i) list.push_back(i);
  REQUIRE_NCCL(nccl().ncclCommInitAll(comms.data(), kDevices, list.data()));
  const auto began = Clock::now();
  REQUIRE_NCCL(nccl().ncclGroupStart());
  for (int i = 0; i < kDevices; ++i) {
    const int color = i < colored ? 0 : NCCL_SPLIT_NOCOLOR;
    REQUIRE_NCCL(nccl().ncclCommSplit(comms[static_cast<std::size_t>(i)], color, i,
                                      &parts[static_cast<std::size_t>(i)], nullptr));
  }
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  const auto tookMs =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  say("tookMs", std::to_string(tookMs));
  sayStats();
  for (ncclComm_t comm : parts) {
    if (comm) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Non-blocking communicators of one thread, made and split one after the other and then asked
/// about one after the other, as NCCL's manual has it.
void oneThreadAsksInTurn(const Rank& rank) {
  cuda();
  constexpr int kDevices = 4;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  std::vector<ncclComm_t> comms(kDevices), parts(kDevices);
  const auto fine = [](ncclResult_t result) {
    REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
  };
  const auto awaitInTurn = [](const std::vector<ncclComm_t>& all) {
    for (ncclComm_t comm : all) {
      if (!comm) continue;
      REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
    }
  };
  const auto began = Clock::now();
  const ncclUniqueId id = rank.uniqueId("world");
  REQUIRE_NCCL(nccl().ncclGroupStart());
  for (int i = 0; i < kDevices; ++i) {
    CUdevice device = 0;
    CUcontext context = nullptr;
    REQUIRE_CU(cuda().deviceGet(&device, i));
    REQUIRE_CU(cuda().primaryRetain(&context, device));
    REQUIRE_CU(cuda().ctxSetCurrent(context));
    fine(nccl().ncclCommInitRankConfig(&comms[static_cast<std::size_t>(i)], kDevices, id, i,
                                       &config));
  }
  fine(nccl().ncclGroupEnd());
  awaitInTurn(comms);
  // Those without a color first.
  for (int i = kDevices; i-- > 0;) {
    fine(nccl().ncclCommSplit(comms[static_cast<std::size_t>(i)], i < 2 ? 0 : NCCL_SPLIT_NOCOLOR, i,
                              &parts[static_cast<std::size_t>(i)], &config));
  }
  awaitInTurn(comms);
  awaitInTurn(parts);
  say("tookMs",
      std::to_string(
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count()));
  sayStats();
  for (ncclComm_t comm : parts) {
    if (comm) REQUIRE_NCCL(nccl().ncclCommAbort(comm));
  }
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

/// A rank without a color ends its process right behind the split.
void leavesBehindTheSplit(const Rank& rank) {
  ncclComm_t comm = rank.communicator(), part = nullptr;
  if (rank.rank != 1) ::usleep(500'000);
  REQUIRE_NCCL(
      nccl().ncclCommSplit(comm, rank.rank == 1 ? NCCL_SPLIT_NOCOLOR : 0, 0, &part, nullptr));
  if (rank.rank == 1) return;
  CUstream stream = newStream();
  traffic(part, 1, stream);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommAbort(part));
}

}  // namespace

const std::vector<Scenario> kEarlyEndScenarios = {
    {"endsBeforeTheLink", endsBeforeTheLink},
    {"splitOfOneThread", splitOfOneThread},
    {"oneThreadAsksInTurn", oneThreadAsksInTurn},
    {"leavesBehindTheSplit", leavesBehindTheSplit},
};

}  // namespace e2e
