// Communicators: every way to make one, many of them, and ends at any moment.

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBytes = 100003;

long msSince(Clock::time_point began) {
  return static_cast<long>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count());
}

void destroy(const std::vector<ncclComm_t>& comms) {
  for (ncclComm_t comm : comms) {
    if (comm) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  }
}

void useContextOf(int ordinal) {
  CUdevice device = 0;
  CUcontext context = nullptr;
  REQUIRE_CU(cuda().deviceGet(&device, ordinal));
  REQUIRE_CU(cuda().primaryRetain(&context, device));
  REQUIRE_CU(cuda().ctxSetCurrent(context));
}

/// What a thread of initAll has used: freed when all of them have ended, since a free holds up the
/// calls of the others, which is another test's subject.
struct Used {
  std::vector<std::unique_ptr<Trial>> trials;
  std::vector<std::unique_ptr<Sum>> sums;
};

/// ncclCommInitAll of `devices` in this thread, an AllGather and a sum over all of them, and the
/// end.
void initAllOnce(int devices, std::uint64_t tag, Used* used) {
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(devices), nullptr);
  std::vector<int> list;
  for (int i = 0; i < devices; ++i) list.push_back(i);
  REQUIRE_NCCL(nccl().ncclCommInitAll(comms.data(), devices, list.data()));
  std::vector<std::unique_ptr<Trial>> trials;
  std::vector<std::unique_ptr<Sum>> sums;
  std::vector<CUstream> streams;
  for (int i = 0; i < devices; ++i) {
    REQUIRE(rankOf(comms[static_cast<std::size_t>(i)]) == i, "rank {}", i);
    useContextOf(i);
    streams.push_back(newStream());
    trials.push_back(
        std::make_unique<Trial>(Shape{.kind = Kind::AllGather, .block = kBytes}, i, devices));
    sums.push_back(std::make_unique<Sum>(i, devices));
    trials.back()->prepare(tag, streams.back());
    sums.back()->prepare(streams.back());
  }
  REQUIRE_NCCL(nccl().ncclGroupStart());
  for (std::size_t i = 0; i < comms.size(); ++i) {
    REQUIRE_NCCL(trials[i]->call(comms[i], streams[i]));
    sums[i]->call(comms[i], streams[i]);
  }
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  for (std::size_t i = 0; i < comms.size(); ++i) {
    useContextOf(static_cast<int>(i));
    trials[i]->after(streams[i]);
    sums[i]->after(streams[i]);
    awaitStream(streams[i], "communicators of ncclCommInitAll");
    trials[i]->check();
    sums[i]->check();
  }
  destroy(comms);
  useContextOf(0);
  for (auto& trial : trials) used->trials.push_back(std::move(trial));
  for (auto& sum : sums) used->sums.push_back(std::move(sum));
}

/// In one thread, or in several at once.
void initAll(const Rank& rank) {
  cuda();
  const int devices = std::stoi(rank.argument("devices", "1"));
  const int threads = std::stoi(rank.argument("threads", "0"));
  std::vector<Used> used(static_cast<std::size_t>(std::max(threads, 1)));
  if (threads == 0) initAllOnce(devices, 1, &used[0]);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([=, &used] {
      useContextOf(0);
      for (std::uint64_t n = 0; n < 4; ++n) {
        initAllOnce(devices, static_cast<std::uint64_t>(t) * 100 + n,
                    &used[static_cast<std::size_t>(t)]);
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  sayStats();
}

/// ncclCommInitRankScalable: id i is made by rank i.
void scalable(const Rank& rank) {
  cuda();
  const int ids = std::stoi(rank.argument("ids", "1"));
  CUstream stream = newStream();
  std::vector<ncclComm_t> comms;
  for (std::uint64_t n = 0; n < 3; ++n) {
    std::vector<ncclUniqueId> all(static_cast<std::size_t>(ids));
    for (int i = 0; i < ids; ++i) {
      const std::string name = fmt::format("scalable-{}-{}", n, i);
      ncclUniqueId& id = all[static_cast<std::size_t>(i)];
      if (rank.rank == i) {
        REQUIRE_NCCL(nccl().ncclGetUniqueId(&id));
        rank.post(name, std::string(id.internal, sizeof id.internal));
      } else {
        const std::string text = rank.await(name);
        REQUIRE(text.size() == sizeof id.internal, "{} bytes", text.size());
        std::memcpy(id.internal, text.data(), text.size());
      }
    }
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    REQUIRE_NCCL(nccl().ncclCommInitRankScalable(&comm, rank.ranks, rank.rank, ids, all.data(),
                                                 n == 1 ? nullptr : &config));
    comms.push_back(comm);
    traffic(comm, n, stream);
  }
  for (std::uint64_t n = 0; n < 3; ++n) traffic(comms[n], 10 + n, stream);
  sayStats();
  destroy(comms);
}

/// Splits of splits, four deep, with traffic on every one; the parents end before their children.
void splitsOfSplits(const Rank& rank) {
  CUstream stream = newStream();
  std::vector<ncclComm_t> line{rank.communicator()};
  for (int depth = 0; depth < 4; ++depth) {
    ncclComm_t child = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(line.back(), depth, -rankOf(line.back()), &child, nullptr));
    REQUIRE(child && ranksOf(child) == rank.ranks, "depth {}", depth);
    line.push_back(child);
    traffic(child, static_cast<std::uint64_t>(depth), stream);
  }
  // Twins: the same color of the same parent, one after the other.
  ncclComm_t twins[2] = {};
  for (ncclComm_t& twin : twins) {
    REQUIRE_NCCL(nccl().ncclCommSplit(line[1], 5, rankOf(line[1]), &twin, nullptr));
  }
  for (std::uint64_t n = 0; n < 2; ++n) traffic(twins[n], 50 + n, stream);
  for (std::uint64_t n = 0; n < line.size(); ++n) traffic(line[n], 60 + n, stream);
  sayStats();
  destroy({line[0], line[2], line[1]});
  for (std::uint64_t n = 3; n < line.size(); ++n) traffic(line[n], 70 + n, stream);
  destroy({twins[1], twins[0], line[3], line[4]});
}

ncclComm_t shrunk(ncclComm_t parent, std::vector<int> excluded, int flags) {
  ncclComm_t child = nullptr;
  REQUIRE_NCCL(nccl().ncclCommShrink(parent, excluded.data(), static_cast<int>(excluded.size()),
                                     &child, nullptr, flags));
  REQUIRE(child, "no child");
  return child;
}

/// A rank is left out, twice without the same one, and then the next rank of another communicator;
/// all of them and their parents stay usable.
void shrink(const Rank& rank) {
  ncclComm_t world = rank.communicator();
  CUstream stream = newStream();
  std::vector<ncclComm_t> made{world};
  for (int gone = rank.ranks - 1; gone >= 0; --gone) {
    ncclComm_t parent = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(world, 0, rank.rank, &parent, nullptr));
    made.push_back(parent);
    for (int n = 0; n < 2 && rank.rank != gone; ++n) {
      made.push_back(shrunk(parent, {gone}, NCCL_SHRINK_DEFAULT));
      const int shift = rank.rank > gone ? 1 : 0;
      REQUIRE(ranksOf(made.back()) == rank.ranks - 1 && rankOf(made.back()) == rank.rank - shift,
              "{} of {}", rankOf(made.back()), ranksOf(made.back()));
    }
    if (rank.rank != gone) {
      for (std::size_t n = 1; n <= 2; ++n) {
        traffic(made[made.size() - n], static_cast<std::uint64_t>(10 * gone) + n, stream);
      }
      ncclComm_t child = nullptr;
      REQUIRE_NCCL(nccl().ncclCommSplit(made.back(), 0, rank.rank, &child, nullptr));
      traffic(child, static_cast<std::uint64_t>(10 * gone) + 5, stream);
      made.push_back(child);
    }
    rank.barrier(fmt::format("without{}", gone));
    traffic(parent, static_cast<std::uint64_t>(10 * gone) + 6, stream);
  }
  traffic(world, 2, stream);
  sayStats();
  destroy(made);
}

/// A rank's receive and send that nobody answers, on a stream each.
struct Pending {
  explicit Pending(std::size_t bytes = kBytes) : in(bytes, 3), out(bytes, 1) {}
  /// A call may fail where the peer's process has ended: HOCCL may have noticed.
  void enqueue(ncclComm_t comm, int peer, bool mayFail = false) {
    in.poison(receives);
    const ncclResult_t received =
        nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, comm, receives);
    which = in.fetch(receives);
    const ncclResult_t sent =
        nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, comm, sends);
    REQUIRE(mayFail || (received == ncclSuccess && sent == ncclSuccess), "receive {}, send {}",
            static_cast<int>(received), static_cast<int>(sent));
  }
  void requireEnded(const std::string& how) {
    const auto began = Clock::now();
    awaitStream(receives, how, 6000);
    awaitStream(sends, how, 6000);
    REQUIRE(msSince(began) < 6000, "{}", msSince(began));
    in.require(Bytes(in.bytes(), Region::kPoison), which, how + ": a receive nobody has sent to");
  }
  CUstream receives = newStream(), sends = newStream();
  Region in, out;
  std::size_t which = 0;
};

/// NCCL_SHRINK_ABORT with operations of the parent pending. `gone` says which rank is left out;
/// with `dead` its process has ended by then.
void shrinkAbort(const Rank& rank) {
  const int gone = std::stoi(rank.argument("gone", "2"));
  const bool dead = rank.argument("dead", "0") == "1";
  ncclComm_t world = rank.communicator();
  CUstream stream = newStream();
  traffic(world, 1, stream);
  rank.barrier("warm");
  if (rank.rank == gone) {
    if (dead) ::_exit(0);
    rank.await("shrunk");
    REQUIRE_NCCL(nccl().ncclCommAbort(world));
    return;
  }
  Pending pending;
  pending.enqueue(world, gone, dead);
  rank.postMine("pending");
  for (int other = 0; other < rank.ranks; ++other) {
    if (other != gone) rank.awaitOf("pending", other);
  }
  if (dead) ::usleep(300'000);
  if (!dead) requireBusy(pending.receives, 100, "a receive nobody has sent to");
  const auto began = Clock::now();
  ncclComm_t child = shrunk(world, {gone}, NCCL_SHRINK_ABORT);
  pending.requireEnded("shrunk");
  say("ms", std::to_string(msSince(began)));
  traffic(child, 2, stream);
  ncclComm_t split = nullptr;
  REQUIRE_NCCL(nccl().ncclCommSplit(child, 0, 0, &split, nullptr));
  traffic(split, 3, stream);
  // The parent takes nothing any more.
  Region more(kBytes);
  const ncclResult_t refused = nccl().ncclSend(more.data(), kBytes, ncclUint8, gone, world, stream);
  REQUIRE(refused != ncclSuccess,
          "a send over a communicator that was shrunk with an abort passed");
  say("error", nccl().ncclGetLastError(world));
  sayStats();
  rank.post("shrunk");
  REQUIRE_NCCL(nccl().ncclCommAbort(world));
  destroy({split, child});
}

/// Revoked with a receive and a send pending; what is left of it can be asked, shrunk and
/// destroyed.
void revoke(const Rank& rank) {
  ncclComm_t world = rank.communicator(), bystander = rank.communicator("bystander");
  CUstream stream = newStream();
  traffic(world, 1, stream);
  Pending pending;
  if (rank.rank != 0) {
    pending.enqueue(world, 0);
    requireBusy(pending.receives, 100, "a receive nobody has sent to");
    rank.postMine("pending");
  }
  for (int other = 1; other < rank.ranks; ++other) rank.awaitOf("pending", other);
  const auto began = Clock::now();
  REQUIRE_NCCL(nccl().ncclCommRevoke(world, NCCL_REVOKE_DEFAULT));
  if (rank.rank != 0) pending.requireEnded("revoked");
  REQUIRE(msSince(began) < 6000, "the revocation took {} ms", msSince(began));
  ncclResult_t state = ncclInProgress;
  REQUIRE_NCCL(nccl().ncclCommGetAsyncError(world, &state));
  say("state", std::to_string(static_cast<int>(state)));
  Region more(kBytes);
  for (const std::size_t bytes : {kBytes, std::size_t{1003}}) {
    const ncclResult_t refused =
        nccl().ncclSend(more.data(), bytes, ncclUint8, rank.next(), world, stream);
    REQUIRE(refused != ncclSuccess, "a send of {} bytes over a revoked communicator passed", bytes);
  }
  say("error", nccl().ncclGetLastError(world));
  rank.barrier("revoked");
  traffic(bystander, 2, stream);
  if (rank.rank != 0) {
    ncclComm_t child = shrunk(world, {0}, NCCL_SHRINK_DEFAULT);
    traffic(child, 3, stream);
    sayStats();
    destroy({child});
  } else {
    sayStats();
  }
  destroy({world});
  traffic(bystander, 4, stream);
  destroy({bystander});
}

/// Several ways to make one in one group, while another communicator works.
void severalInAGroup(const Rank& rank) {
  ncclComm_t parent = rank.communicator("parent");
  CUstream stream = newStream();
  std::vector<ncclComm_t> comms(5, nullptr);
  const ncclUniqueId a = rank.uniqueId("a"), b = rank.uniqueId("b");
  ncclUniqueId c = rank.uniqueId("c");
  Trial beside({.kind = Kind::AllGather, .block = kBytes}, rank.rank, rank.ranks);
  traffic(parent, 1, stream);
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclCommInitRank(&comms[0], rank.ranks, a, rank.rank));
  REQUIRE_NCCL(nccl().ncclCommInitRankConfig(&comms[1], rank.ranks, b, rank.rank, nullptr));
  REQUIRE_NCCL(nccl().ncclCommInitRankScalable(&comms[2], rank.ranks, rank.rank, 1, &c, nullptr));
  REQUIRE_NCCL(nccl().ncclCommSplit(parent, 0, rank.rank, &comms[3], nullptr));
  REQUIRE_NCCL(nccl().ncclCommSplit(parent, 1, -rank.rank, &comms[4], nullptr));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  for (std::size_t i = 0; i < comms.size(); ++i) traffic(comms[i], 10 + i, stream);
  beside.run(parent, 2, stream);
  sayStats();
  destroy(comms);
  destroy({parent});
}

/// Non-blocking: some are used at once, some first asked until they are ready.
void usedBeforeReady(const Rank& rank) {
  cuda();
  CUstream stream = newStream();
  std::vector<ncclComm_t> comms;
  for (std::uint64_t n = 0; n < 6; ++n) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    const ncclUniqueId id = rank.uniqueId(fmt::format("early{}", n));
    ncclResult_t result = nccl().ncclCommInitRankConfig(&comm, rank.ranks, id, rank.rank, &config);
    REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}", static_cast<int>(result));
    comms.push_back(comm);
    if (n % 3 == 0) continue;  // several are under way at once
    if (n % 3 == 2) {
      REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
    }
    // One rank has polled to the end, the other one not.
    if (n == 4 && rank.rank == 1) {
      REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
    }
    Trial gather({.kind = Kind::AllGather, .block = kBytes}, rank.rank, rank.ranks);
    gather.prepare(n, stream);
    result = gather.call(comm, stream);
    REQUIRE(result == ncclSuccess || result == ncclInProgress, "{}: {}", n,
            nccl().ncclGetLastError(comm));
    gather.after(stream);
    awaitStream(stream, "used before it is ready");
    gather.check();
    REQUIRE(awaitReady(comm) == ncclSuccess, "{}", nccl().ncclGetLastError(comm));
    traffic(comm, 10 + n, stream);
  }
  for (std::uint64_t n = 0; n < comms.size(); ++n) {
    REQUIRE(awaitReady(comms[n]) == ncclSuccess, "{}", nccl().ncclGetLastError(comms[n]));
    traffic(comms[n], 20 + n, stream);
  }
  sayStats();
  destroy(comms);
}

/// Many alive at once, made in two ways, with an operation under way on every one.
void manyAlive(const Rank& rank) {
  const std::size_t count = std::stoul(rank.argument("count", "40"));
  std::vector<ncclComm_t> comms;
  for (std::size_t n = 0; n < count; ++n) {
    ncclComm_t comm = nullptr;
    if (n % 2 == 0) {
      comm = rank.communicator(fmt::format("many{}", n));
    } else {
      REQUIRE_NCCL(nccl().ncclCommSplit(comms[n / 2], 0, rank.rank, &comm, nullptr));
    }
    comms.push_back(comm);
  }
  std::vector<CUstream> streams;
  const std::size_t streamCount = std::stoul(rank.argument("streams", "4"));
  while (streams.size() < streamCount) streams.push_back(newStream());
  std::vector<std::unique_ptr<Trial>> trials;
  for (std::size_t n = 0; n < count; ++n) {
    trials.push_back(std::make_unique<Trial>(Shape{.kind = Kind::AllGather, .block = kBytes},
                                             rank.rank, rank.ranks));
  }
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (std::size_t n = 0; n < count; ++n) {
      trials[n]->prepare(round * 100 + n, streams[n % streams.size()]);
    }
    // The ranks call those of different streams in different orders: they may not wait for each
    // other.
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t lane = i % streams.size(), row = i / streams.size();
      const std::size_t n =
          row * streams.size() + (rank.rank % 2 == 0 ? lane : streams.size() - 1 - lane);
      if (n >= count) continue;
      REQUIRE_NCCL(trials[n]->call(comms[n], streams[n % streams.size()]));
    }
    for (std::size_t n = 0; n < count; ++n) trials[n]->after(streams[n % streams.size()]);
    for (CUstream stream : streams) awaitStream(stream, "many communicators");
    for (auto& trial : trials) trial->check();
  }
  sayStats();
  destroy(comms);
}

/// NCCL_COMM_ID: every rank makes the id itself.
void commonId(const Rank& rank) {
  cuda();
  CUstream stream = newStream();
  for (std::uint64_t n = 0; n < 2; ++n) {
    ncclUniqueId id{};
    ncclComm_t comm = nullptr, child = nullptr;
    REQUIRE_NCCL(nccl().ncclGetUniqueId(&id));
    REQUIRE_NCCL(nccl().ncclCommInitRank(&comm, rank.ranks, id, rank.rank));
    traffic(comm, n, stream);
    REQUIRE_NCCL(nccl().ncclCommSplit(comm, 0, rank.rank, &child, nullptr));
    traffic(child, 10 + n, stream);
    destroy({child, comm});
    rank.barrier(fmt::format("common{}", n));
  }
  sayStats();
}

/// Made and ended again and again; the test looks at both processes early and late.
void createDestroy(const Rank& rank) {
  const std::uint64_t rounds = std::stoull(rank.argument("rounds", "1000"));
  const std::uint64_t early = std::stoull(rank.argument("early", "400"));
  ncclComm_t base = rank.communicator("base");
  CUstream stream = newStream();
  // The stand-in keeps its log in memory.
  const auto clearLog = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "ncclStandinLogClear"));
  REQUIRE(clearLog, "ncclStandinLogClear is not to be found");
  for (std::uint64_t n = 1; n <= rounds; ++n) {
    ncclComm_t comm = nullptr;
    if (n % 5 == 0) {
      comm = rank.communicator(fmt::format("round{}", n));
    } else {
      REQUIRE_NCCL(nccl().ncclCommSplit(base, static_cast<int>(n % 7), rank.rank, &comm, nullptr));
    }
    if (n % 50 == 0) {
      traffic(comm, n, stream);
      clearLog();
    }
    REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
    if (n == early || n == rounds) {
      const std::string when = n == early ? "early" : "late";
      rank.postMine(when);
      rank.await(when + "-seen");
    }
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(base));
}

}  // namespace

const std::vector<Scenario> kFamilyScenarios = {
    {"initAll", initAll},
    {"scalable", scalable},
    {"splitsOfSplits", splitsOfSplits},
    {"shrink", shrink},
    {"shrinkAbort", shrinkAbort},
    {"revoke", revoke},
    {"severalInAGroup", severalInAGroup},
    {"usedBeforeReady", usedBeforeReady},
    {"manyAlive", manyAlive},
    {"commonId", commonId},
    {"createDestroy", createDestroy},
};

}  // namespace e2e
