// Threads, contexts, streams without a name, and forks.

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <thread>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kBytes = 200003;

void bothWays(const Rank& rank, ncclComm_t comm, Buffer& out, Buffer& in, CUstream stream,
              bool grouped) {
  const int peer = 1 - rank.rank;
  if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
  for (const bool sends : {rank.rank == 0, rank.rank != 0}) {
    if (sends) {
      REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, peer, comm, stream));
    } else {
      REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, peer, comm, stream));
    }
  }
  if (grouped) REQUIRE_NCCL(nccl().ncclGroupEnd());
}

/// The null stream, the legacy and the per-thread one, and a thread that has no context: the calls
/// work in the communicator's context and leave the thread as they found it.
void contexts(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  const int peer = 1 - rank.rank;
  CUstream own = newStream();
  std::uint64_t n = 0;
  std::string touched;
  for (const bool withContext : {true, false}) {
    for (CUstream stream : {own, CUstream(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
      for (const bool grouped : {true, false}) {
        const std::string what =
            fmt::format("stream {}, {} context, {}", fmt::ptr(stream), withContext ? "with" : "no",
                        grouped ? "grouped" : "single");
        Buffer out(kBytes, 1), in(kBytes, 3);
        out.fill(seedOf(rank.rank, n), own);
        in.poison(own);
        awaitStream(own, "prepared");
        std::thread([&] {
          CUcontext before = nullptr, after = nullptr;
          if (withContext) useDevice();
          REQUIRE_CU(cuda().ctxGetCurrent(&before));
          errno = 77;
          bothWays(rank, comm, out, in, stream, grouped);
          if (errno != 77) touched += fmt::format("{}: errno is {}; ", what, errno);
          REQUIRE_CU(cuda().ctxGetCurrent(&after));
          if (before != after) touched += what + ": another context is current; ";
          useDevice();  // for the wait, and the per-thread stream is this thread's
          awaitStream(stream, what);
        }).join();
        in.fetch(own);
        awaitStream(own, what);
        in.requirePattern(seedOf(peer, n), what);
        ++n;
      }
    }
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  REQUIRE(touched.empty(), "{}", touched);
}

/// Threads with a communicator each, all at once.
void threads(const Rank& rank) {
  constexpr int kThreads = 4;
  std::vector<ncclComm_t> comms;
  for (int t = 0; t < kThreads; ++t) comms.push_back(rank.communicator("t" + std::to_string(t)));
  // Freed after the last thread: a free waits for the whole context, so for the other threads'
  // transfers, and holds up what they would enqueue for their peers.
  std::vector<std::unique_ptr<Buffer>> outs, ins;
  for (int t = 0; t < kThreads; ++t) {
    outs.push_back(std::make_unique<Buffer>(kBytes, 1));
    ins.push_back(std::make_unique<Buffer>(kBytes, 3));
  }
  std::vector<std::thread> running;
  for (int t = 0; t < kThreads; ++t) {
    running.emplace_back([&, t] {
      useDevice();
      CUstream stream = newStream();
      Buffer &out = *outs[static_cast<std::size_t>(t)], &in = *ins[static_cast<std::size_t>(t)];
      for (std::uint64_t n = 0; n < 30; ++n) {
        const auto tag = static_cast<std::uint64_t>(t);
        out.fill(seedOf(rank.rank, n, tag), stream);
        in.poison(stream);
        bothWays(rank, comms[static_cast<std::size_t>(t)], out, in, stream, n % 2 == 0);
        in.fetch(stream);
        awaitStream(stream, "threads");
        in.requirePattern(seedOf(1 - rank.rank, n, tag), fmt::format("thread {}", t));
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  sayStats();
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A data loader: a forked child that lives on after this process and holds all its descriptors.
void forks(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  const pid_t child = ::fork();
  if (child == 0) {
    rank.await("movers gone", 15000);
    ::_exit(0);
  }
  REQUIRE(child > 0, "fork");
  // A short-lived one that ends like a program.
  const pid_t brief = ::fork();
  if (brief == 0) std::exit(0);
  int status = 0;
  REQUIRE(::waitpid(brief, &status, 0) == brief && status == 0, "status {}", status);
  CUstream stream = newStream();
  Buffer out(kBytes, 1), in(kBytes, 3);
  out.fill(seedOf(rank.rank, 0), stream);
  in.poison(stream);
  bothWays(rank, comm, out, in, stream, true);
  in.fetch(stream);
  awaitStream(stream, "after forks");
  in.requirePattern(seedOf(1 - rank.rank, 0), "after forks");
  rank.postMine("forked");
  rank.await("go");
  ::_exit(0);
}

}  // namespace

const std::vector<Scenario> kThreadScenarios = {
    {"contexts", contexts}, {"threads", threads}, {"forks", forks}};

}  // namespace e2e
