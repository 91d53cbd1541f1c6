// Collectives through the movers, and which of them stay with NCCL.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// Sums over a rank's communicators, by path ("staged", "nccl") and by reason ("nccl-small", …).
struct Counts {
  Counts(const Job& job, int rank) : comms(job.communicators(rank)) {
    for (const auto& comm : comms) {
      staged += comm["paths"]["staged"]["ops"].get<int>();
      nccl += comm["paths"]["nccl"]["ops"].get<int>();
      for (const auto& [name, count] : comm["reasons"].items()) {
        if (name == "nccl-small") small += count.get<int>();
        if (name == "nccl-pair") pair += count.get<int>();
        if (name == "nccl-capture") capture += count.get<int>();
      }
    }
  }
  nlohmann::json comms;
  int staged = 0, nccl = 0, small = 0, pair = 0, capture = 0;
};

int number(const Job& job, int rank, const std::string& key) {
  const std::string text = job.said(rank, key);
  EXPECT_FALSE(text.empty()) << "rank " << rank << " said nothing of " << key;
  return text.empty() ? -1 : std::stoi(text);
}

constexpr const char* kFunctions[] = {"ncclAllGather", "ncclAlltoAll",  "ncclGather",
                                      "ncclScatter",   "ncclBroadcast", "ncclBcast"};

/// Calls of collectives that NCCL has got. (Its Bcast calls its Broadcast.)
int ncclCalls(const Job& job, int rank, const std::string& part = "") {
  int calls = -job.callCount(rank, "ncclBcast", part);
  for (const char* function : kFunctions) calls += job.callCount(rank, function, part);
  return calls;
}

class CollectivesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesOf, ::testing::Values(2, 3, 5));

TEST_P(CollectivesOf, AllRootsInAndOutOfPlaceAtOddSizesWithoutAnySm) {
  Job job("collectives", GetParam());
  if (GetParam() == 5) job.argument("steered", "65536,70001").argument("small", "0,1003");
  job.finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, number(job, rank, "steered")) << counts.comms;
    EXPECT_EQ(counts.small, number(job, rank, "small")) << counts.comms;
    EXPECT_EQ(counts.nccl, counts.small) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), counts.small);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

std::uint64_t ownBlocks(const Job& job, int rank) {
  return nlohmann::json::parse(job.said(rank, "stats"))["ownBlocksByKernel"].get<std::uint64_t>();
}

/// HOCCL_OWN_BLOCK=kernel: each collective out of place has one copy within the GPU, and no other
/// does.
TEST_P(CollectivesOf, OwnBlocksByKernelOnRequest) {
  for (const bool oneNode : {false, true}) {
    SCOPED_TRACE(oneNode ? "one node" : "a node each");
    Job job("collectives", GetParam());
    if (oneNode) job.oneNode();
    job.env("HOCCL_OWN_BLOCK", "kernel")
        .argument("steered", "65536,70001")
        .argument("small", "1003");
    job.finish(60);
    for (int rank = 0; rank < GetParam(); ++rank) {
      EXPECT_EQ(Counts(job, rank).small, number(job, rank, "small"));
      EXPECT_GT(ownBlocks(job, rank), 0u);
      // The emulator counts by GPU; where the ranks share one, some copy before others look first.
      if (oneNode) {
        EXPECT_EQ(number(job, rank, "smOps"), static_cast<int>(ownBlocks(job, rank)));
      }
    }
  }
}

/// Sends and receives of a rank to itself, in one group (PyTorch's all-to-all): pairs are copied,
/// and what has no counterpart there goes through the mover.
TEST_P(CollectivesOf, OwnPairsOfAGroupByKernelOnRequest) {
  Job job("allToAllV", GetParam());
  job.env("HOCCL_OWN_BLOCK", "kernel").finish(60);
  std::uint64_t all = 0;
  for (int rank = 0; rank < GetParam(); ++rank) {
    std::uint64_t own = 0, staged = 0;
    for (const auto& comm : job.communicators(rank)) {
      own += comm["paths"]["own-block"]["ops"].get<std::uint64_t>();
      staged += comm["paths"]["staged"]["ops"].get<std::uint64_t>();
    }
    EXPECT_EQ(own, 2 * ownBlocks(job, rank)) << "a send and a receive each";
    EXPECT_EQ(own + staged, static_cast<std::uint64_t>(number(job, rank, "staged")));
    all += own;
  }
  EXPECT_EQ(all > 0, GetParam() > 2);  // of two ranks each has a small one
}

/// Beside other operations of its stream only: where there are none the mover would have nothing to
/// end, and between two streams nothing would tell the one when the other is through.
TEST(Collectives, WhatARankSendsItselfIsAnOwnBlockBesideOthersOfItsStream) {
  Job job("toItself", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").finish(60);
  for (int rank : {0, 1}) EXPECT_EQ(ownBlocks(job, rank), 3u * 2u);  // sizes, orders
}

TEST_P(CollectivesOf, AllToAllVWithSkewZeroesAndTheOwnBlock) {
  Job job("allToAllV", GetParam());
  job.finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, number(job, rank, "staged")) << counts.comms;
    EXPECT_EQ(counts.small, number(job, rank, "small")) << counts.comms;
    EXPECT_EQ(job.callCount(rank, "ncclSend") + job.callCount(rank, "ncclRecv"), counts.small);
  }
}

TEST_P(CollectivesOf, GroupsOfAllKindsWithReductionsOnStreamsAndCommunicators) {
  Job job("collectivesGrouped", GetParam());
  job.finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, 3 * 12) << counts.comms;
    EXPECT_EQ(counts.small, 3 * 6) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), 3 * 6);
    EXPECT_EQ(ncclCalls(job, rank, " bytes=1003 "), 3 * 6);
    EXPECT_EQ(job.callCount(rank, "ncclAllReduce", " depth=1 "), 3 * 9);
  }
}

/// The bytes that all movers copy, in blocks: one that goes to several ranks is copied out for each
/// of the others, and for the own rank not once more.
TEST_P(CollectivesOf, CopyOutAndInWhatTheyConsistOf) {
  Job job("collectivesCopies", GetParam());
  job.finish(60);
  const int n = GetParam();
  const auto copies = [](int out, int in) {
    return std::to_string(out) + " " + std::to_string(in) + " 0";
  };
  for (int rank = 0; rank < n; ++rank) {
    EXPECT_EQ(job.said(rank, "AllGather"), copies(n * (n - 1), n * n));
    EXPECT_EQ(job.said(rank, "AlltoAll"), copies(n * n, n * n));
    EXPECT_EQ(job.said(rank, "Gather"), copies(n, n));
    EXPECT_EQ(job.said(rank, "Scatter"), copies(n, n));
    EXPECT_EQ(job.said(rank, "Broadcast"), copies(n - 1, n));
    EXPECT_EQ(job.said(rank, "Bcast"), copies(n - 1, n - 1));
  }
}

/// Of a rank's own block the movers copy nothing then.
TEST_P(CollectivesOf, CopyOutAndInTheOthersBlocksWhereOwnOnesAreKernels) {
  Job job("collectivesCopies", GetParam());
  job.env("HOCCL_OWN_BLOCK", "kernel").finish(60);
  const int n = GetParam();
  const auto copies = [](int blocks) { return fmt::format("{} {} 0", blocks, blocks); };
  for (int rank = 0; rank < n; ++rank) {
    for (const char* all : {"AllGather", "AlltoAll"}) {
      EXPECT_EQ(job.said(rank, all), copies(n * (n - 1))) << all;
    }
    for (const char* rooted : {"Gather", "Scatter", "Broadcast", "Bcast"}) {
      EXPECT_EQ(job.said(rank, rooted), copies(n - 1)) << rooted;
    }
  }
}

TEST(Collectives, RepeatedOnTheSameBuffersWithoutWaitingInBetween) {
  for (const int ranks : {2, 3}) {
    Job job("collectivesRepeated", ranks);
    job.finish(60);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(Counts(job, rank).staged, 10 * 12);
      EXPECT_EQ(ncclCalls(job, rank), 0);
      EXPECT_EQ(job.said(rank, "smOps"), "0");
    }
  }
}

TEST(Collectives, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"3", "4"}) {
    Job repeated("collectivesRepeated", 3);
    repeated.env("EMUCUDA_DELAY_US", "200").env("EMUCUDA_SEED", seed).finish(60);
    Job grouped("collectivesGrouped", 3);
    grouped.env("EMUCUDA_DELAY_US", "200").env("EMUCUDA_SEED", seed).finish(60);
  }
}

TEST(Collectives, OneSmallSlotForEachPair) {
  Job job("collectivesRepeated", 3);
  job.env("HOCCL_SLOTS", "1").env("HOCCL_SLOT_BYTES", "128KiB").finish(60);
  Job itself("toItself", 2);
  itself.env("HOCCL_SLOTS", "1").env("HOCCL_SLOT_BYTES", "128KiB").finish(60);
}

TEST(Collectives, FormsWithAConfiguration) {
  Job job("collectivesConfig", 3);
  job.finish();
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(Counts(job, rank).staged, 5);
    EXPECT_EQ(Counts(job, rank).small, 5);
    for (const char* function : kFunctions) {
      if (std::string(function) == "ncclBcast") continue;
      EXPECT_EQ(job.callCount(rank, std::string(function) + "Config"), 1) << function;
      EXPECT_EQ(job.callCount(rank, std::string(function) + "Config", " bytes=1003 "), 1)
          << function;
    }
  }
}

TEST(Collectives, SendsToItselfAloneGroupedAndInBothOrdersWithoutAnySm) {
  Job job("toItself", 2);
  job.finish();
  for (int rank : {0, 1}) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, 3 * (4 * 2 + 4 * 4) + 24) << counts.comms;
    EXPECT_EQ(counts.nccl, 0) << counts.comms;
    EXPECT_EQ(job.callCount(rank, "ncclSend") + job.callCount(rank, "ncclRecv"), 0);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

TEST(Collectives, APairCalledInAnotherPlaceThanThePeerCallsIt) {
  Job job("orderApart", 2);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(Counts(job, rank).staged, 8 * 4);
    EXPECT_EQ(Counts(job, rank).nccl, 0);
  }
}

TEST(Collectives, CapturedOnesAreNcclsAndNoCaptureIsSpoilt) {
  Job job("collectivesCaptured", 2);
  job.finish();
  for (int rank : {0, 1}) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.capture, number(job, rank, "captured")) << counts.comms;
    EXPECT_EQ(counts.nccl, counts.capture) << counts.comms;
    EXPECT_EQ(counts.staged, 6) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), counts.capture);
  }
}

/// Ranks 0 and 1 on one node, the third on another: only what has its root there is steered.
TEST(SharedNode, OnlyARootThatReachesAllIsSteered) {
  Job job("sharedNode", 3);
  job.env(1, "NCCL_HOSTID", "e2e-node-0").finish();
  for (int rank : {0, 1, 2}) {
    const Counts counts(job, rank);
    // Of each root: Gather, Scatter, Broadcast in and out of place, and Bcast.
    constexpr int kOfARoot = 7, kWithoutRoot = 3;
    // Sends and receives: with the ranks of the other node and with itself, both ways.
    const int pairs = 2 * (rank == 2 ? 3 : 2);
    EXPECT_EQ(counts.staged, kOfARoot + pairs) << "rank " << rank << " " << counts.comms;
    EXPECT_EQ(counts.pair, kWithoutRoot + 2 * kOfARoot + (rank == 2 ? 0 : 2)) << counts.comms;
    EXPECT_EQ(counts.nccl, counts.pair) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), kWithoutRoot + 2 * kOfARoot);
    for (const char* function : {"ncclGather", "ncclScatter", "ncclBroadcast", "ncclBcast"}) {
      EXPECT_EQ(job.callCount(rank, function, " peer=2 "), 0) << function;
      EXPECT_GT(job.callCount(rank, function, " peer=0 "), 0) << function;
      EXPECT_GT(job.callCount(rank, function, " peer=1 "), 0) << function;
    }
  }
}

TEST(SharedNode, TwoNodesOfTwoLeaveCollectivesToNcclOnAllRanks) {
  Job job("sharedNode", 4);
  job.env(1, "NCCL_HOSTID", "e2e-node-0").env(3, "NCCL_HOSTID", "e2e-node-2").finish(60);
  for (int rank = 0; rank < 4; ++rank) {
    const Counts counts(job, rank);
    EXPECT_EQ(ncclCalls(job, rank), 3 + 4 * 7);
    EXPECT_EQ(counts.staged, 2 * 3) << counts.comms;  // two ranks of the other node, and itself
    EXPECT_EQ(counts.pair, 3 + 4 * 7 + 2) << counts.comms;
  }
}

TEST(SharedNode, OneNodeOfThreeIsPlainNccl) {
  Job job("sharedNode", 3);
  for (int rank : {0, 1, 2}) job.env(rank, "NCCL_HOSTID", "e2e-one");
  job.finish();
  for (int rank : {0, 1, 2}) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, 0) << counts.comms;
    EXPECT_EQ(counts.pair, 0) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), 3 + 3 * 7);
  }
}

TEST(SharedNode, StrictRefusesOnAllRanksAndSaysWhy) {
  Job job("strictRefusals", 3);
  job.env(1, "NCCL_HOSTID", "e2e-node-0").env("HOCCL_STRICT", "1").finish();
  for (int rank : {0, 1, 2}) {
    const Counts counts(job, rank);
    EXPECT_EQ(number(job, rank, "refused"), 3 + 2 * 7);
    EXPECT_EQ(counts.staged, 7) << counts.comms;
    EXPECT_EQ(counts.nccl, counts.small) << counts.comms;
    EXPECT_EQ(ncclCalls(job, rank), counts.small);
    EXPECT_EQ(ncclCalls(job, rank, " bytes=1003 "), counts.small);
  }
}

TEST(Collectives, GroupsOverTwoStreamsWhileAnotherThreadFrees) {
  Job job("freesBesideGroups", 2);
  job.finish(20);
  for (int rank : {0, 1}) EXPECT_EQ(Counts(job, rank).staged, 60 * 2);
}

/// MemAvailable of /proc/meminfo, in GiB.
long availableGib() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %ld kB", &kib) == 1) return kib >> 20;
  }
  return 0;
}

TEST(LargeTransfers, BeyondFourGiB) {
  // Two buffers whose every byte is touched, and the staging.
  if (availableGib() < 11)
    GTEST_SKIP() << "needs 11 GiB of memory, " << availableGib() << " are free";
  Job job("beyond4GiB", 2);
  job.env("EMUCUDA_DILATION", "1")
      .env("HOCCL_SLOTS", "4")
      .env("HOCCL_SLOT_BYTES", "64MiB")
      .finish(200);
  for (int rank : {0, 1}) {
    const Counts counts(job, rank);
    EXPECT_EQ(counts.staged, 1) << counts.comms;
    EXPECT_EQ(counts.nccl, 0) << counts.comms;
    std::uint64_t bytes = 0;
    for (const auto& comm : counts.comms) {
      bytes += comm["paths"]["staged"]["bytes"].get<std::uint64_t>();
    }
    EXPECT_EQ(bytes, (std::uint64_t{4} << 30) + 12345678);
  }
}

}  // namespace
}  // namespace e2e
