// A rank's own blocks by a kernel of its stream (HOCCL_OWN_BLOCK=kernel): order, errors, and ranks
// that differ in it.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

std::uint64_t byKernel(const Job& job, int rank) {
  return nlohmann::json::parse(job.said(rank, "stats"))["ownBlocksByKernel"].get<std::uint64_t>();
}

std::uint64_t opsOf(const Job& job, int rank, const char* path) {
  std::uint64_t ops = 0;
  for (const auto& comm : job.communicators(rank)) {
    ops += comm["paths"][path]["ops"].get<std::uint64_t>();
  }
  return ops;
}

constexpr const char* kBoth[] = {"engine", "kernel"};

TEST(OwnBlocks, HaveTheirPlaceOnStreamsOfEveryKind) {
  for (const char* how : kBoth) {
    for (const char* delay : {"0", "100"}) {
      SCOPED_TRACE(std::string(how) + ", delay " + delay);
      Job job("ownPairStreams", 2);
      job.env("HOCCL_OWN_BLOCK", how).env("EMUCUDA_DELAY_US", delay).finish(60);
      for (int rank : {0, 1}) {
        const auto pairs = std::stoull("0" + job.said(rank, "pairs"));
        EXPECT_EQ(byKernel(job, rank), std::string(how) == "kernel" ? pairs : 0);
      }
    }
  }
}

TEST(OwnBlocks, BesideASingleOtherOperation) {
  Job job("ownPairAndOne", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").finish();
  for (int rank : {0, 1}) EXPECT_EQ(byKernel(job, rank), 4u);
}

TEST(OwnBlocks, NoStreamOfTheGroupGoesOnBeforeTheCopy) {
  Job job("ownPairHeldUp", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(byKernel(job, rank), 4u);
    // Some have been made before anything was pending.
    EXPECT_GT(std::atoi(job.said(rank, "prepared").c_str()), 0);
  }
}

TEST(OwnBlocks, ThreadsThatComeAndGoLeaveNoEvents) {
  Job job("ownPairThreads", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").finish();
}

TEST(OwnBlocks, OfACommunicatorOfOneRank) {
  for (const char* how : kBoth) {
    SCOPED_TRACE(how);
    Job job("ownBlockOfOneRank", 2);
    job.env("HOCCL_OWN_BLOCK", how).finish();
  }
}

TEST(OwnBlocks, OfACallByAThreadWithoutAContext) {
  Job job("ownBlockWithoutContext", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").finish();
  for (int rank : {0, 1}) EXPECT_EQ(byKernel(job, rank), 1u);
}

TEST(OwnBlocks, OfTwoCommunicatorsAndStreamsInOneGroup) {
  for (const char* how : kBoth) {
    SCOPED_TRACE(how);
    Job job("ownPairsOfTwoCommunicators", 2);
    job.env("HOCCL_OWN_BLOCK", how).env("EMUCUDA_DELAY_US", "100").finish(60);
    for (int rank : {0, 1}) EXPECT_EQ(byKernel(job, rank), std::string(how) == "kernel" ? 8u : 0u);
  }
}

TEST(OwnBlocks, ACopyThatTheDriverRefusesFailsTheGroupAndNothingElse) {
  Job job("ownPairRefused", 2);
  job.env("HOCCL_OWN_BLOCK", "kernel").env("HOCCL_FLAG_POOL", "4").finish(60);
  for (int rank : {0, 1}) EXPECT_EQ(byKernel(job, rank), 12u);
}

TEST(OwnBlocks, AnAbortLeavesNoStreamBehind) {
  for (const char* how : kBoth) {
    SCOPED_TRACE(how);
    Job job("ownPairAborted", 2);
    job.env("HOCCL_OWN_BLOCK", how).env("HOCCL_FLAG_POOL", "8").finish(60);
  }
}

TEST(OwnBlocks, AreMadeBeforeTheirMemoryIsFreed) {
  for (const char* how : kBoth) {
    SCOPED_TRACE(how);
    Job job("ownPairFreed", 2);
    job.env("HOCCL_OWN_BLOCK", how).env("EMUCUDA_DELAY_US", "100").finish(60);
    for (int rank : {0, 1}) EXPECT_EQ(byKernel(job, rank), std::string(how) == "kernel" ? 40u : 0u);
  }
}

/// It is each rank's own affair.
TEST(OwnBlocks, RanksNeedNotAgree) {
  for (const char* scenario : {"collectives", "collectivesGrouped", "allToAllV", "toItself"}) {
    for (const bool oneNode : {false, true}) {
      SCOPED_TRACE(std::string(scenario) + (oneNode ? ", one node" : ", a node each"));
      Job job(scenario, 3);
      if (oneNode) job.oneNode();
      job.env(0, "HOCCL_OWN_BLOCK", "kernel").env(2, "HOCCL_OWN_BLOCK", "kernel");
      if (scenario == std::string("collectives")) {
        job.argument("steered", "65536,70001").argument("small", "1003");
      }
      job.finish(60);
      // Of an AlltoAllv not every rank has a block that is large enough.
      EXPECT_GT(byKernel(job, 0) + byKernel(job, 2), 0u);
      EXPECT_EQ(byKernel(job, 1), 0u);
    }
  }
}

/// What takes application-side copies stays with the engines.
TEST(OwnBlocks, OfMemoryOfEveryKind) {
  for (const char* memory : {"mapped", "unexportable", "managed", "pool"}) {
    for (const char* scenario : {"allToAllV", "collectivesRepeated", "toItself"}) {
      SCOPED_TRACE(std::string(memory) + ", " + scenario);
      Job job(scenario, 3);
      job.env("HOCCL_OWN_BLOCK", "kernel").env("E2E_MEMORY", memory).finish(60);
      std::uint64_t blocks = 0, pairs = 0;
      for (int rank = 0; rank < 3; ++rank) {
        blocks += byKernel(job, rank);
        pairs += opsOf(job, rank, "own-block");
      }
      const bool mapped = memory == std::string("mapped");
      const bool collectives = scenario == std::string("collectivesRepeated");
      EXPECT_EQ(blocks > 0, mapped);
      EXPECT_EQ(pairs > 0, mapped && !collectives);
    }
  }
}

}  // namespace
}  // namespace e2e
