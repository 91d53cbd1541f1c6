// Ranks of one node whose GPUs reach each other over PCIe: direct copies that the receiver's mover
// makes (rule 13).

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <ostream>
#include <string>

#include "test/e2e/harness.h"
#include "test/e2e/paths.h"

namespace e2e {
namespace {

Job& overPcie(Job& job) { return job.oneNode().env("EMUCUDA_NVLINK", "0"); }

struct Case {
  const char* scenario;
  int ranks;
  std::uint64_t ops;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.scenario; }

class PullOf : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Scenarios, PullOf,
                         ::testing::Values(Case{"sizes", 2, 17}, Case{"bothWays", 2, 48},
                                           Case{"ring", 3, 12}, Case{"streams", 2, 64},
                                           Case{"manyInFlight", 2, 400}, Case{"independent", 2, 12},
                                           Case{"threads", 2, 240}));

TEST_P(PullOf, AllIsDirect) {
  Job job(GetParam().scenario, GetParam().ranks);
  overPcie(job).finish(60);
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    expectAll(job, rank, "direct", GetParam().ops);
  }
}

TEST(Pull, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    Job job("bothWays", 2);
    overPcie(job).env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed).finish();
    for (int rank : {0, 1}) {
      expectAll(job, rank, "direct", 48);
      EXPECT_EQ(job.said(rank, "smOps"), "0");
    }
  }
}

TEST(Pull, OneSlotAndOneCopyAtATime) {
  Job job("bothWays", 2);
  overPcie(job).env("HOCCL_SLOTS", "1").env("HOCCL_LANE_DEPTH", "1").finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 48);
}

/// By default no farther than NCCL would.
TEST(Pull, GpusThatAreFarApartAreStaged) {
  Job job("bothWays", 2);
  overPcie(job).env("NCCL_P2P_LEVEL", "").env("HOCCL_LOG", "info").finish();
  Job forced("bothWays", 2);
  overPcie(forced).env("NCCL_P2P_LEVEL", "").env("HOCCL_P2P", "3").finish();
  for (int rank : {0, 1}) {
    expectAll(job, rank, "staged", 48);
    EXPECT_NE(job.errors(rank).find("NCCL_P2P_LEVEL=SYS"), std::string::npos) << job.errors(rank);
    expectAll(forced, rank, "direct", 48);
  }
}

TEST(Pull, NcclsVariablesHoldForNvlinkToo) {
  for (const char* variable : {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"}) {
    SCOPED_TRACE(variable);
    const std::string value = std::string(variable) == "NCCL_P2P_DISABLE" ? "1" : "LOC";
    Job job("bothWays", 2);
    job.oneNode().env(variable, value).env("HOCCL_LOG", "info").finish();
    Job ahead("bothWays", 2);
    ahead.oneNode().env(variable, value).env("HOCCL_P2P", "1").finish();
    for (int rank : {0, 1}) {
      expectAll(job, rank, "staged", 48);
      EXPECT_NE(job.errors(rank).find(variable), std::string::npos) << job.errors(rank);
      expectAll(ahead, rank, "direct", 48);
    }
  }
}

/// On one rank only: each mover has its own view, and nothing is lost.
TEST(Pull, RanksThatSeeItDifferently) {
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    Job job("bothWays", 2);
    job.oneNode().env(rank, "NCCL_P2P_DISABLE", "1").finish();
    for (int each : {0, 1}) {
      EXPECT_EQ(total(job, each, "direct", "ops") + total(job, each, "staged", "ops"), 48u);
    }
  }
}

/// HOCCL_P2P=2 is the sender's mover, at the user's risk.
TEST(Pull, Rule13PushedOnlyIfAskedFor) {
  for (const bool pushed : {false, true}) {
    SCOPED_TRACE(pushed);
    Job job("bothWays", 2);
    overPcie(job).env("HOCCL_LOG", "info").env("HOCCL_P2P", pushed ? "2" : "1").finish();
    for (int rank : {0, 1}) {
      expectAll(job, rank, "direct", 48);
      const std::string log = job.errors(rank);
      EXPECT_NE(
          log.find(pushed ? "pushed by the sender's mover" : "pulled by the receiver's mover"),
          std::string::npos)
          << log;
    }
  }
}

class PullCollectivesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PullCollectivesOf, ::testing::Values(2, 3));

TEST_P(PullCollectivesOf, AllRootsInAndOutOfPlaceAtOddSizesWithoutAnySm) {
  Job job("collectives", GetParam());
  overPcie(job).argument("small", "1003").env("EMUCUDA_DELAY_US", "100").finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) {
    EXPECT_EQ(total(job, rank, "nccl", "ops"), std::stoul(job.said(rank, "small")));
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

/// The rank that receives copies. Its own block goes through the host: out to a neighbour and back
/// would be pushed.
TEST_P(PullCollectivesOf, AreCopiedByTheReceiver) {
  Job job("collectivesCopies", GetParam());
  overPcie(job).finish(60);
  const std::string others = std::to_string(GetParam() - 1);
  for (int rank = 0; rank < GetParam(); ++rank) {
    const bool root = rank == 1;
    EXPECT_EQ(job.said(rank, "AllGather"), "1 1 " + others);
    EXPECT_EQ(job.said(rank, "AlltoAll"), "1 1 " + others);
    EXPECT_EQ(job.said(rank, "Gather"), root ? "1 1 " + others : "0 0 0");
    EXPECT_EQ(job.said(rank, "Scatter"), root ? "1 1 0" : "0 0 1");
    EXPECT_EQ(job.said(rank, "Bcast"), root ? "0 0 0" : "0 0 1");
  }
}

TEST(Pull, SegmentsOfBothSides) {
  for (const char* seed : {"1", "2"}) {
    Job job("bothWays", 2);
    overPcie(job).env("E2E_MEMORY", "mapped").env("EMUCUDA_DELAY_US", "100");
    job.env("EMUCUDA_SEED", seed).finish(60);
    for (int rank : {0, 1}) {
      EXPECT_GT(total(job, rank, "direct", "ops"), 0u);
      EXPECT_EQ(total(job, rank, "direct", "ops") + total(job, rank, "staged", "ops"), 48u);
    }
  }
}

/// The receiver's mover finds out; the sender's hears of it. Of one allocation and not of another.
TEST(Pull, WhatTheReceiverCannotMapIsStaged) {
  for (const char* succeed : {"1", "2", "5"}) {
    SCOPED_TRACE(succeed);
    Job job("refusedImports", 2);
    overPcie(job).argument("many", "0").env(1, "EMUCUDA_REFUSE_IPC_OPEN", succeed);
    job.env(1, "EMUCUDA_REFUSE_IPC_IN", "hoccl-mover").finish();
    const std::uint64_t direct = std::stoul(succeed) - 1;  // the first is the receiver's own
    for (int rank : {0, 1}) {
      EXPECT_EQ(total(job, rank, "direct", "ops"), direct) << job.communicators(rank);
      EXPECT_EQ(total(job, rank, "staged", "ops"), 8 - direct) << job.communicators(rank);
    }
  }
}

// --- Frees (rule 8): the receiver's mover maps the sender's memory as well -----------------------

constexpr const char* kWarning = "is freed while the mover";

TEST(PullFrees, RoundsOfAllocateOperateFree) {
  Job job("freesRounds", 2);
  overPcie(job).argument("rounds", "400").env("EMUCUDA_DILATION", "1").start();
  ASSERT_TRUE(job.awaitAll("early", 60)) << job.transcript();
  job.post("early-seen");
  ASSERT_TRUE(job.awaitAll("late", 60)) << job.transcript();
  job.post("late-seen");
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
    EXPECT_EQ(job.errors(rank).find(kWarning), std::string::npos) << job.errors(rank);
    EXPECT_EQ(total(job, rank, "direct", "ops"), 400u);
  }
}

/// A stopped peer does not answer: the sender's free is bounded, and says so.
TEST(PullFrees, APeerThatDoesNotLetGoIsNamed) {
  Job job("directPeerStops", 2);
  overPcie(job).env("HOCCL_TIMEOUT_MS", "700").argument("frees", "0").start();
  ASSERT_TRUE(job.awaitAll("moved")) << job.transcript();
  const pid_t mover = job.moverOf(1);
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  const bool freed = job.await("freed");
  ::kill(mover, SIGCONT);
  EXPECT_TRUE(freed) << job.transcript();
  job.post("going on");
  job.finish();
  const std::string errors = job.errors(0);
  EXPECT_NE(errors.find(kWarning), std::string::npos) << errors;
  EXPECT_NE(errors.find("the mover of another GPU of the node"), std::string::npos) << errors;
}

// --- Deaths and aborts (rule 9) ------------------------------------------------------------------

class PullOfRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, PullOfRank, ::testing::Values(0, 1));

/// In the middle of a copy.
TEST_P(PullOfRank, AnApplicationKilledMidCopy) {
  Job job("directPeerDies", 2);
  overPcie(job).env("EMUCUDA_DILATION", "300").argument("dies", std::to_string(GetParam()));
  job.start();
  ASSERT_TRUE(job.awaitAll("moving")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam()), application = job.pid(GetParam());
  ASSERT_GT(mover, 0);
  job.expectDeath(GetParam());
  ::usleep(30'000);
  ASSERT_EQ(::kill(application, SIGKILL), 0);
  EXPECT_TRUE(job.awaitGone(mover, 5)) << "its mover lives on";
  job.finish();
  const std::string error = job.said(1 - GetParam(), "error");
  EXPECT_NE(error.find("rank " + std::to_string(GetParam())), std::string::npos) << error;
}

TEST_P(PullOfRank, AnAbortEndsThoughAMoverIsStopped) {
  Job job("abortWhileStopped", 2);
  overPcie(job).env("HOCCL_TIMEOUT_MS", "1000").start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  const bool ended = job.awaitEnd(1, 10);
  ::kill(mover, SIGCONT);
  EXPECT_TRUE(ended) << job.transcript();
  job.post("going on");
  job.finish();
}

TEST(PullAborts, OfTheSenderWaitForTheCopyFromItsMemory) {
  Job job("directAbortSendMidCopy", 2);
  overPcie(job).env("EMUCUDA_DILATION", "30").finish();
}

TEST(PullAborts, AtRandomMomentsFromAnotherThreadEndInTime) {
  Job job("abortStorm", 2);
  overPcie(job).argument("seed", "3").argument("rounds", "100").env("EMUCUDA_DELAY_US", "100");
  job.finish(60);
  for (int rank : {0, 1}) {
    ASSERT_FALSE(job.said(rank, "slowestAbortMs").empty());
    EXPECT_LT(std::stoi(job.said(rank, "slowestAbortMs")), 5000);
  }
}

}  // namespace
}  // namespace e2e
