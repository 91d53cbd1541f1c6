// Collectives: each of them, in groups and on several streams, beside sends and reductions.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

constexpr std::size_t kSmall = 1003;
constexpr std::size_t kSteered = 70001;  // over HOCCL_MIN_BYTES, and odd

void groupStart() { REQUIRE_NCCL(nccl().ncclGroupStart()); }
void groupEnd() { REQUIRE_NCCL(nccl().ncclGroupEnd()); }

/// Every form of every collective with blocks of that size.
std::vector<Shape> allShapes(int ranks, std::size_t block) {
  std::vector<Shape> shapes;
  for (const Kind kind : kAllKinds) {
    for (int root = 0; root < (hasRoot(kind) ? ranks : 1); ++root) {
      shapes.push_back({.kind = kind, .block = block, .root = root});
      // NCCL documents none of AlltoAll, and Bcast has no other.
      if (kind == Kind::AlltoAll || kind == Kind::Bcast) continue;
      shapes.push_back({.kind = kind, .block = block, .root = root, .inPlace = true});
    }
  }
  return shapes;
}

std::vector<std::size_t> sizesOf(const std::string& list) {
  std::vector<std::size_t> sizes;
  for (std::size_t at = 0; at < list.size();) {
    std::size_t length = 0;
    sizes.push_back(std::stoul(list.substr(at), &length));
    at += length + 1;
  }
  return sizes;
}

/// Each, one after the other; first the steered sizes, whose use of SMs is told, then those below.
void collectives(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t round = 0, steered = 0, small = 0;
  for (const std::size_t block : sizesOf(rank.argument("steered", "65536,70001,300007"))) {
    for (const Shape& shape : allShapes(rank.ranks, block)) {
      Trial(shape, rank.rank, rank.ranks).run(comm, ++round, stream);
      ++steered;
    }
  }
  saySmOps(rank, "smOps");
  for (const std::size_t block : sizesOf(rank.argument("small", "0,1,1003,65535"))) {
    for (const Shape& shape : allShapes(rank.ranks, block)) {
      Trial(shape, rank.rank, rank.ranks).run(comm, ++round, stream);
      ++small;
    }
  }
  say("steered", std::to_string(steered));
  say("small", std::to_string(small));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// What movers copy on this rank's GPU for one call out of place of each kind, in blocks: to the
/// host, from it, and from GPU to GPU. Ranks that share a GPU all say the sum.
void collectivesCopies(const Rank& rank) {
  constexpr std::size_t kBlock = 300007;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t round = 0;
  // What is there from the first call on copies something when it is made.
  Trial({.kind = Kind::AlltoAll, .block = kBlock}, rank.rank, rank.ranks)
      .run(comm, ++round, stream);
  for (const Kind kind : kAllKinds) {
    const Shape shape{.kind = kind, .block = kBlock, .root = 1};
    Trial trial(shape, rank.rank, rank.ranks);
    trial.prepare(++round, stream);
    awaitStream(stream, trial.what());
    const std::string name = nameOf(kind);
    rank.barrier(name);
    const HocclEmuCounters before = counters();
    rank.barrier(name + "-begins");
    REQUIRE_NCCL(trial.call(comm, stream));
    awaitStream(stream, trial.what());
    rank.barrier(name + "-over");
    const HocclEmuCounters after = counters();
    rank.barrier(name + "-counted");
    trial.after(stream);
    awaitStream(stream, trial.what());
    trial.check();
    const auto blocks = [](std::uint64_t from, std::uint64_t to) {
      REQUIRE((to - from) % kBlock == 0, "{} bytes are no number of blocks", to - from);
      return std::to_string((to - from) / kBlock);
    };
    say(name, blocks(before.bytesD2H, after.bytesD2H) + " " +
                  blocks(before.bytesH2D, after.bytesH2D) + " " +
                  blocks(before.bytesP2P, after.bytesP2P));
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// The forms with a configuration.
void collectivesConfig(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t round = 0;
  for (const std::size_t block : {kSteered, kSmall}) {
    for (const Kind kind : kAllKinds) {
      if (kind == Kind::Bcast) continue;
      Trial({.kind = kind, .block = block, .root = 1, .withConfig = true}, rank.rank, rank.ranks)
          .run(comm, ++round, stream);
    }
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// The same buffers again and again, with nothing but the stream's order between the rounds.
void collectivesRepeated(const Rank& rank) {
  constexpr std::uint64_t kRounds = 12;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  for (const Kind kind : kAllKinds) {
    for (const bool inPlace : {false, true}) {
      if (inPlace && (kind == Kind::AlltoAll || kind == Kind::Bcast)) continue;
      Trial trial({.kind = kind, .block = kSteered, .root = 1, .inPlace = inPlace}, rank.rank,
                  rank.ranks);
      for (std::uint64_t round = 0; round < kRounds; ++round) {
        trial.prepare(round, stream);
        REQUIRE_NCCL(trial.call(comm, stream));
        trial.after(stream);
      }
      awaitStream(stream, trial.what());
      trial.check();
    }
  }
  saySmOps(rank, "smOps");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// All of them in one group with reductions between them, large and small, on three streams and two
/// communicators.
void collectivesGrouped(const Rank& rank) {
  const std::array comms{rank.communicator("first"), rank.communicator("second")};
  const std::array streams{newStream(), newStream(), newStream()};
  for (std::uint64_t round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Trial>> trials;
    std::vector<std::unique_ptr<Sum>> sums;
    auto streamOf = [&](std::size_t i) { return streams[(i + round) % streams.size()]; };
    auto commOf = [&](std::size_t i) { return comms[(i / 2 + round) % comms.size()]; };
    for (const std::size_t block : {kSteered, kSmall, 2 * kSteered}) {
      for (const Kind kind : kAllKinds) {
        const int root = static_cast<int>(trials.size() + round) % rank.ranks;
        const bool inPlace =
            kind != Kind::AlltoAll && kind != Kind::Bcast && trials.size() % 3 == 0;
        trials.push_back(std::make_unique<Trial>(
            Shape{.kind = kind, .block = block, .root = root, .inPlace = inPlace}, rank.rank,
            rank.ranks));
        sums.push_back(std::make_unique<Sum>(rank.rank, rank.ranks));
      }
    }
    for (std::size_t i = 0; i < trials.size(); ++i) {
      trials[i]->prepare(100 * round + i, streamOf(i));
      sums[i]->prepare(streamOf(i));
    }
    groupStart();
    for (std::size_t i = 0; i < trials.size(); ++i) {
      REQUIRE_NCCL(trials[i]->call(commOf(i), streamOf(i)));
      if (i % 2 == 1) sums[i]->call(commOf(i), streamOf(i));
    }
    groupEnd();
    for (std::size_t i = 0; i < trials.size(); ++i) {
      trials[i]->after(streamOf(i));
      if (i % 2 == 1) sums[i]->after(streamOf(i));
    }
    for (CUstream stream : streams) awaitStream(stream, "a group of collectives");
    for (std::size_t i = 0; i < trials.size(); ++i) {
      trials[i]->check();
      if (i % 2 == 1) sums[i]->check();
    }
  }
  sayStats();
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Two ranks call a collective and a send/recv pair of one group in different orders, as NCCL
/// allows: the pair's numbers of the two do not mix.
void orderApart(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  for (std::uint64_t round = 0; round < 8; ++round) {
    Trial gather({.kind = Kind::AllGather, .block = kSteered}, rank.rank, rank.ranks);
    Trial broadcast({.kind = Kind::Broadcast, .block = kSteered, .root = 0}, rank.rank, rank.ranks);
    // The same number of bytes as the collective's block: a mix-up would not show as a wrong size.
    Region out(kSteered, 1), in(kSteered, 3);
    Bytes sent(kSteered), wanted(kSteered);
    makePattern(seedOf(rank.rank, round, 9), sent.data(), kSteered);
    makePattern(seedOf(peer, round, 9), wanted.data(), kSteered);
    gather.prepare(100 + round, stream);
    broadcast.prepare(200 + round, stream);
    out.poison(stream);
    out.put(sent, 0, stream);
    in.poison(stream);
    auto send = [&] {
      REQUIRE_NCCL(nccl().ncclSend(out.data(), kSteered, ncclUint8, peer, comm, stream));
    };
    auto receive = [&] {
      REQUIRE_NCCL(nccl().ncclRecv(in.data(), kSteered, ncclUint8, peer, comm, stream));
    };
    groupStart();
    // The collectives keep their order, the pair changes its place.
    if (rank.rank == 1) receive();
    if (rank.rank == 1 && round % 2 == 0) send();
    REQUIRE_NCCL(gather.call(comm, stream));
    if (rank.rank == 1 && round % 2 == 1) send();
    if (rank.rank == 0 && round % 2 == 1) receive();
    REQUIRE_NCCL(broadcast.call(comm, stream));
    if (rank.rank == 0) send();
    if (rank.rank == 0 && round % 2 == 0) receive();
    groupEnd();
    gather.after(stream);
    broadcast.after(stream);
    out.poison(stream);
    const std::size_t which = in.fetch(stream);
    awaitStream(stream, "called in different orders");
    gather.check();
    broadcast.check();
    in.require(wanted, which, fmt::format("a pair beside collectives, round {}", round));
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Captured collectives are NCCL's, no capture is spoilt, and what follows is steered.
void collectivesCaptured(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::vector<std::unique_ptr<Trial>> trials;
  for (const Kind kind : kAllKinds) {
    trials.push_back(std::make_unique<Trial>(Shape{.kind = kind, .block = kSteered, .root = 1},
                                             rank.rank, rank.ranks));
  }
  std::uint64_t captured = 0;
  for (const CUstreamCaptureMode mode :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CU_STREAM_CAPTURE_MODE_RELAXED}) {
    for (const bool grouped : {false, true}) {
      for (auto& trial : trials) trial->prepare(captured, stream);
      awaitStream(stream, "before the capture");
      REQUIRE_CU(cuda().streamBeginCapture(stream, mode));
      if (grouped) groupStart();
      for (auto& trial : trials) {
        REQUIRE_NCCL(trial->call(comm, stream));
        ++captured;
      }
      if (grouped) groupEnd();
      CUgraph graph = nullptr;
      REQUIRE_CU(cuda().streamEndCapture(stream, &graph));
      REQUIRE(graph, "the capture gave no graph");
      REQUIRE_CU(cuda().graphDestroy(graph));
      for (auto& trial : trials) trial->after(stream);
      awaitStream(stream, "after the capture");
      for (auto& trial : trials) trial->checkUntouched();
    }
  }
  say("captured", std::to_string(captured));
  for (auto& trial : trials) trial->run(comm, 77, stream);
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Ranks of which some share a node: every operation of every root, and how many went where.
void sharedNode(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t round = 0;
  for (const Shape& shape : allShapes(rank.ranks, kSteered)) {
    Trial(shape, rank.rank, rank.ranks).run(comm, ++round, stream);
  }
  // And between every two ranks, and with itself.
  for (int from = 0; from < rank.ranks; ++from) {
    for (int to = 0; to < rank.ranks; ++to) {
      ++round;
      Region out(kSteered, 1), in(kSteered, 3);
      Bytes image(kSteered);
      makePattern(seedOf(from, round), image.data(), kSteered);
      out.poison(stream);
      out.put(image, 0, stream);
      in.poison(stream);
      groupStart();
      if (rank.rank == from) {
        REQUIRE_NCCL(nccl().ncclSend(out.data(), kSteered, ncclUint8, to, comm, stream));
      }
      if (rank.rank == to) {
        REQUIRE_NCCL(nccl().ncclRecv(in.data(), kSteered, ncclUint8, from, comm, stream));
      }
      groupEnd();
      const std::size_t which = in.fetch(stream);
      awaitStream(stream, "between two ranks");
      if (rank.rank == to) in.require(image, which, fmt::format("{} to {}", from, to));
    }
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// HOCCL_STRICT with ranks 0 and 1 on one node: what cannot be steered is refused everywhere, alone
/// and in a group, and the communicator goes on.
void strictRefusals(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t round = 0, refused = 0;
  const int reachesAll = rank.ranks - 1;
  for (const Shape& shape : allShapes(rank.ranks, kSteered)) {
    Trial trial(shape, rank.rank, rank.ranks);
    if (hasRoot(shape.kind) && shape.root == reachesAll) {
      trial.run(comm, ++round, stream);
      continue;
    }
    trial.prepare(++round, stream);
    REQUIRE(trial.call(comm, stream) == ncclInvalidUsage, "{} passed", trial.what());
    const std::string error = nccl().ncclGetLastError(comm);
    REQUIRE(error.find("HOCCL_STRICT=1") != std::string::npos &&
                error.find(shape.kind == Kind::Bcast ? "Broadcast" : nameOf(shape.kind)) !=
                    std::string::npos &&
                error.find(std::to_string(kSteered)) != std::string::npos &&
                error.find("no transport connects") != std::string::npos,
            "the error says '{}'", error);
    trial.after(stream);
    awaitStream(stream, "refused");
    trial.checkUntouched();
    ++refused;
  }
  // Small ones and reductions are not steerable.
  for (const Shape& shape : allShapes(rank.ranks, kSmall)) {
    Trial(shape, rank.rank, rank.ranks).run(comm, ++round, stream);
  }
  Sum sum(rank.rank, rank.ranks);
  sum.prepare(stream);
  sum.call(comm, stream);
  sum.after(stream);
  awaitStream(stream, "a reduction");
  sum.check();
  say("refused", std::to_string(refused));
  sayStats();
  // In a group the refusal fails the group.
  Trial bad({.kind = Kind::AllGather, .block = kSteered}, rank.rank, rank.ranks);
  bad.prepare(++round, stream);
  groupStart();
  REQUIRE(bad.call(comm, stream) == ncclInvalidUsage, "passed in a group");
  REQUIRE(nccl().ncclGroupEnd() == ncclInvalidUsage, "the group's end passed");
  bad.after(stream);
  awaitStream(stream, "refused in a group");
  bad.checkUntouched();
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

/// Groups over two streams while another thread frees memory: a free holds up every submission of
/// the process until its pending work is done, so nothing may be pending that needs a further
/// submission.
void freesBesideGroups(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream streams[] = {newStream(), newStream()};
  std::atomic<bool> over{false};
  std::thread freeing([&] {
    useDevice();
    while (!over) {
      CUdeviceptr memory = 0;
      REQUIRE_CU(cuda().memAlloc(&memory, 1 << 20));
      REQUIRE_CU(cuda().memFree(memory));
    }
  });
  for (std::uint64_t round = 0; round < 60; ++round) {
    Trial first({.kind = Kind::AllGather, .block = kSteered}, rank.rank, rank.ranks);
    Trial second({.kind = Kind::AlltoAll, .block = kSteered}, rank.rank, rank.ranks);
    first.prepare(round, streams[0]);
    second.prepare(round, streams[1]);
    groupStart();
    REQUIRE_NCCL(first.call(comm, streams[0]));
    REQUIRE_NCCL(second.call(comm, streams[1]));
    groupEnd();
    first.after(streams[0]);
    second.after(streams[1]);
    for (CUstream stream : streams) awaitStream(stream, "a group beside frees", 10000);
    first.check();
    second.check();
  }
  over = true;
  freeing.join();
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kCollectiveScenarios = {
    {"collectives", collectives},
    {"collectivesConfig", collectivesConfig},
    {"collectivesCopies", collectivesCopies},
    {"collectivesRepeated", collectivesRepeated},
    {"collectivesGrouped", collectivesGrouped},
    {"collectivesCaptured", collectivesCaptured},
    {"orderApart", orderApart},
    {"sharedNode", sharedNode},
    {"strictRefusals", strictRefusals},
    {"freesBesideGroups", freesBesideGroups},
};

}  // namespace e2e
